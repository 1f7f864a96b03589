"""Accesses that a device would abort on: blocks outside the cache, unwritten slots, indices out of range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ascend_emulator.errors import EmulatorError
from ascend_emulator.kernels import REGISTRY, DeviceFault
from ascend_emulator.poison import POISON_BYTE

V1 = REGISTRY["npu::npu_fused_infer_attention_score"]
V2 = REGISTRY["npu::npu_fused_infer_attention_score_v2"]
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
LAYERS, PAGES, SIZE, HEADS, DIM = 3, 6, 128, 2, 64
LENS = [130, 20]
TABLE = [[4, 1, 0], [3, 0, 0]]


class Cache:
    """Key and value storage of several layers, written up to the requests' lengths, the rest poison."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        shape = (LAYERS, PAGES, SIZE, HEADS, DIM)
        self.key, self.value = (self._poison(shape, dtype) for _ in range(2))
        for row, length in enumerate(LENS):
            for token in range(length):
                for part in (self.key, self.value):
                    part[:, TABLE[row][token // SIZE], token % SIZE] = torch.randn(LAYERS, HEADS, DIM).to(dtype)

    @staticmethod
    def _poison(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        tensor.view(torch.uint8).fill_(POISON_BYTE)
        return tensor

    def spoil(self, part: torch.Tensor, *place: Any) -> None:
        part.view(torch.int16)[place] = -1

    def attend(self, layer: int = 1, q: int = 1, dtype: torch.dtype = torch.float16, **over: Any) -> torch.Tensor:
        options: dict[str, Any] = {
            "num_query_heads": 4,
            "num_key_value_heads": HEADS,
            "input_layout": "BSND",
            "actual_seq_kvlen": LENS,
            "block_table": torch.tensor(TABLE, dtype=torch.int32),
            "block_size": SIZE,
        }
        if q > 1:
            options |= {"sparse_mode": 3, "atten_mask": TRIANGLE}
        query = torch.randn(2, q, 4, DIM).to(dtype)
        key, value = self.key[layer].flatten(2), self.value[layer].flatten(2)
        out, _ = V2(query, key, value, **(options | over))
        assert isinstance(out, torch.Tensor)
        return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("q", [1, 4])
def test_slots_past_a_request_are_not_read(dtype: torch.dtype, q: int) -> None:
    assert Cache(dtype).attend(q=q, dtype=dtype).isfinite().all()


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("q", [1, 4])
def test_a_visible_slot_that_was_never_written_faults_with_its_place(part: str, q: int) -> None:
    cache = Cache()
    cache.spoil(getattr(cache, part), 1, 1, 1, 1)  # layer 1, page 1, offset 1 (token 129 of request 0), head 1
    with pytest.raises(DeviceFault, match="error code is 507015") as caught:
        cache.attend(q=q)
    fault = caught.value
    assert (fault.code, fault.layer, fault.page, fault.slot) == (507015, 1, 1, 1 * SIZE + 1)
    assert isinstance(fault, RuntimeError) and isinstance(fault, EmulatorError)
    text = str(fault)
    assert all(word in text for word in (part, "layer 1", "page 1", f"slot {SIZE + 1}", "token 129", "head 1"))
    cache.attend(layer=0, q=q)


def test_one_length_too_many_reads_a_slot_that_was_never_written() -> None:
    with pytest.raises(DeviceFault) as caught:
        Cache().attend(actual_seq_kvlen=[130, 21])
    assert (caught.value.page, caught.value.slot) == (3, 3 * SIZE + 20)


def test_a_row_with_one_poison_element_was_written() -> None:
    cache = Cache()
    cache.spoil(cache.value, 1, 4, 5, 0, 0)
    out = cache.attend()
    assert out[0, 0, :2].isnan().any() and out[1].isfinite().all()


def test_poison_outside_the_window_is_not_read() -> None:
    cache = Cache()
    cache.spoil(cache.key, 1, 4, slice(0, 50))
    cache.spoil(cache.value, 1, 4, slice(0, 50))
    banded: dict[str, Any] = {"sparse_mode": 4, "atten_mask": TRIANGLE, "next_tokens": 0}
    cache.key[1, 3, :20], cache.value[1, 3, :20] = 1.0, 1.0
    out = cache.attend(q=4, pre_tokens=76, **banded)  # first query token: position 126, sees 50..126
    assert out.isfinite().all()
    with pytest.raises(DeviceFault) as caught:
        cache.attend(q=4, pre_tokens=77, **banded)
    assert caught.value.slot == 4 * SIZE + 49


def test_poison_under_a_full_mask_is_not_read() -> None:
    cache = Cache()
    cache.spoil(cache.value, 1, 4, 7)
    mask = torch.zeros(2, 1, 1, 3 * SIZE, dtype=torch.bool)
    mask[0, 0, 0, 7] = True
    assert cache.attend(atten_mask=mask).isfinite().all()
    with pytest.raises(DeviceFault):
        cache.attend(atten_mask=torch.zeros_like(mask))


@pytest.mark.parametrize("page", [-1, PAGES, 1 << 30])
def test_a_block_outside_the_cache_faults_with_its_place(page: int) -> None:
    table = torch.tensor(TABLE, dtype=torch.int32)
    table[0, 1] = page
    with pytest.raises(DeviceFault, match="507015") as caught:
        Cache().attend(layer=2, block_table=table)
    assert (caught.value.layer, caught.value.page, caught.value.slot) == (2, page, page * SIZE)
    assert "block_table[0, 1]), outside the cache of layer 2" in str(caught.value)


def test_blocks_past_a_request_are_not_looked_at() -> None:
    table = torch.tensor(TABLE, dtype=torch.int32)
    table[:, 2] = -7
    table[1, 1] = PAGES
    assert Cache().attend(block_table=table).isfinite().all()


def test_a_lone_cache_names_no_layer() -> None:
    cache = Cache()
    key, value = cache.key[0].clone().flatten(2), cache.value[0].clone().flatten(2)
    options = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BSND", "block_size": SIZE}
    table = torch.tensor([[5]], dtype=torch.int32)
    with pytest.raises(DeviceFault) as caught:
        V1(torch.randn(1, 1, 4, DIM).half(), key, value, **options, block_table=table, actual_seq_lengths_kv=[1])
    assert caught.value.layer is None and caught.value.slot == 5 * SIZE


def test_dense_key_and_value_fault_too() -> None:
    key = torch.randn(1, 8, 2, DIM).half()
    value = key.clone()
    value.view(torch.int16)[0, 5, 1] = -1
    query = torch.randn(1, 1, 4, DIM).half()
    options = {"num_query_heads": 4, "num_key_value_heads": 2, "input_layout": "BSND"}
    V2(query, key, value, **options, actual_seq_kvlen=[5])
    with pytest.raises(DeviceFault, match="value where it was never written: token 5, head 1"):
        V2(query, key, value, **options, actual_seq_kvlen=[6])


def test_key_rope_faults_too() -> None:
    cache = torch.randn(2, SIZE, 512).half()
    rope = torch.randn(2, SIZE, 64).half()
    rope.view(torch.int16)[1, 3] = -1
    query = torch.randn(1, 1, 4, 512).half()
    with pytest.raises(DeviceFault, match="key_rope") as caught:
        V2(
            *(query, cache, cache),
            query_rope=query[..., :64].contiguous(),
            key_rope=rope,
            num_query_heads=4,
            num_key_value_heads=1,
            input_layout="BSND",
            block_table=torch.tensor([[1]], dtype=torch.int32),
            block_size=SIZE,
            actual_seq_kvlen=[4],
        )
    assert caught.value.slot == SIZE + 3


@pytest.mark.parametrize("op", ["npu::npu_scatter_nd_update", "npu::npu_scatter_nd_update_"])
@pytest.mark.parametrize("wrong", [[6, 0], [-1, 0], [0, 128], [0, -1]])
def test_scatter_faults_and_writes_nothing(op: str, wrong: list[int]) -> None:
    storage = torch.arange(3 * PAGES * SIZE * 4, dtype=torch.float32).view(3, PAGES, SIZE, 4)
    before = storage.clone()
    indices = torch.tensor([[0, 0], wrong, [1, 1]], dtype=torch.int32)
    with pytest.raises(DeviceFault, match=r"error code is 507015[\s\S]*index 1 = ") as caught:
        REGISTRY[op](storage[2], indices, torch.ones(3, 4))
    if op.endswith("_"):
        assert caught.value.layer == 2
    assert torch.equal(storage, before)


def test_cache_write_faults_and_writes_nothing() -> None:
    cache = torch.zeros(2, PAGES, SIZE, HEADS, DIM, dtype=torch.float16)
    rows = torch.ones(2, HEADS, DIM, dtype=torch.float16)
    slots = torch.tensor([3, PAGES * SIZE], dtype=torch.int32)
    with pytest.raises(DeviceFault, match=rf"slot_indices\[1\] = {PAGES * SIZE} ") as caught:
        REGISTRY["atb::_npu_reshape_and_cache"](rows, rows, cache[1], cache[0], slots)
    assert (caught.value.layer, caught.value.page) == (1, PAGES)
    assert not cache.any()


@pytest.mark.parametrize("masked", [False, True])
def test_not_a_number_in_a_visible_row_stays_one(masked: bool) -> None:
    query, key = torch.ones(1, 2, 1, 16).half(), torch.ones(1, 3, 1, 16).half()
    value = key.clone()
    key[0, 1, 0, 3] = float("nan")
    mask = torch.zeros(1, 1, 2, 3, dtype=torch.bool)
    mask[..., 0, 1] = True
    out, _ = V2(query, key, value, input_layout="BSND", atten_mask=mask if masked else None)
    assert out[0, 1].isnan().all() and bool(out[0, 0].isnan().any()) is not masked


def test_one_query_token_a_request_ignores_query_lengths() -> None:
    cache = Cache()
    torch.manual_seed(3)
    out = cache.attend()
    torch.manual_seed(3)
    assert torch.equal(cache.attend(actual_seq_qlen=[0, 7]), out)
