"""NPUMHATokenToKVPool against MhaPool and a plain loop: geometry, every writer, transfer entries, refusals."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from ascend_emulator.kernels import OpRefused
from engines_pools import LAYERS, NPU, PAGE, DType, Pair, rows
from kv_pool import WriteError
from kv_pool.writers import WriterName

# What selects each writer of SGLang, and which of ours is the same operator (scatter_pa has none).
WRITERS: dict[str, tuple[dict[str, str], WriterName]] = {
    "reshape_and_cache": ({}, "reshape_and_cache"),
    "scatter_nd": ({"ASCEND_USE_FIA": "1"}, "scatter_nd"),
    "scatter_pa": ({"SGLANG_NPU_USE_SCATTER_PA_KV_CACHE": "1"}, "index"),
    "scatter_pa_fia": ({"SGLANG_NPU_USE_SCATTER_PA_KV_CACHE": "1", "ASCEND_USE_FIA": "1"}, "scatter_nd"),
}


def test_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages = size // page_size + 1, page 0 reserved; with FIA the layers are views of the same memory."""
    for fia in ("0", "1"):
        monkeypatch.setenv("ASCEND_USE_FIA", fia)
        pair = Pair(dims=48, value_dims=32)
        key, value = pair.theirs.get_hicache_transfer_buffers()
        assert key.shape == pair.ours.key_storage.shape and value.shape == pair.ours.value_storage.shape
        assert pair.ours.num_pages == 9 and not key.any() and not value.any()
        for layer in pair.layers:
            assert pair.theirs.get_key_buffer(layer).data_ptr() == key[layer].data_ptr()
            assert pair.theirs.get_value_buffer(layer).data_ptr() == value[layer].data_ptr()


@pytest.mark.parametrize(("dims", "value_dims"), [(32, 32), (192, 128)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", WRITERS)
def test_random_writes(
    monkeypatch: pytest.MonkeyPatch, name: str, index_dtype: torch.dtype, dtype: DType, dims: int, value_dims: int
) -> None:
    """The whole pool, byte for byte: written slots, slots nobody wrote, other layers."""
    environment, writer = WRITERS[name]
    for variable, text in environment.items():
        monkeypatch.setenv(variable, text)
    if writer == "reshape_and_cache" and index_dtype == torch.int64:
        writer = "index"  # ours refuses int64 here instead of casting it
    pair = Pair(dims=dims, value_dims=value_dims, start=4, writer=writer, dtype=dtype)
    expected = {
        side: torch.zeros(storage[0].shape, dtype=storage[0].dtype) for side, storage in pair.storages().items()
    }
    draw = random.Random(7)
    for step in range(6):
        layer = draw.choice(pair.layers)
        slots = draw.sample(range(PAGE, 9 * PAGE), k=draw.randint(1, 20))
        key = rows(slots, pair.heads, dims, pair.dtype, salt=step)
        value = rows(slots, pair.heads, value_dims, pair.dtype, salt=100 + step)
        pair.write(layer, torch.tensor(slots, dtype=index_dtype, device=NPU), key, value)
        for side, written in (("key", key.cpu()), ("value", value.cpu())):
            for row, slot in enumerate(slots):
                expected[side][layer - 4, slot // PAGE, slot % PAGE] = written[row]
    for side, (theirs, ours) in pair.storages().items():
        assert torch.equal(theirs, expected[side]), side
        assert torch.equal(ours, expected[side]), side
        assert not theirs[:, 0].any()


@pytest.mark.parametrize("fia", ["0", "1"])
def test_transfer_entries(monkeypatch: pytest.MonkeyPatch, fia: str) -> None:
    """K layers, then V layers; offsets, lengths and bytes of a page as our manifest publishes them by name."""
    monkeypatch.setenv("ASCEND_USE_FIA", fia)
    pair = Pair(dims=48, value_dims=32, start=4)
    addresses, lengths, items = pair.theirs.get_contiguous_buf_infos()
    entries = pair.ours.manifest().entries
    assert [(entry.component, entry.layer_id) for entry in entries] == [
        (component, layer) for component in ("key", "value") for layer in pair.layers
    ]
    assert lengths == [entry.nbytes for entry in entries]
    assert items == [entry.item_bytes for entry in entries]
    key, value = pair.theirs.get_hicache_transfer_buffers()
    for first, theirs, ours in ((0, key, pair.ours.key_storage), (LAYERS, value, pair.ours.value_storage)):
        for number in range(first, first + LAYERS):
            assert addresses[number] - theirs.data_ptr() == entries[number].address - ours.data_ptr()


@pytest.mark.parametrize("name", ["scatter_nd", "scatter_pa"])
def test_rows_that_do_not_fit_the_slots(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for variable, text in WRITERS[name][0].items():
        monkeypatch.setenv(variable, text)
    pair = Pair()
    slots = torch.tensor([PAGE, PAGE + 1], device=NPU)
    key = rows([0] * 3, 2, 32, pair.dtype, salt=0)
    with pytest.raises(ValueError, match="loc_rows=2"):
        pair.theirs.set_kv_buffer(SimpleNamespace(layer_id=0), slots, key, key)
    with pytest.raises(WriteError):
        pair.ours.write(0, slots, key, key)
    assert not any(storage.any() for both in pair.storages().values() for storage in both)


def test_the_default_writer_checks_nothing_but_the_operator_does() -> None:
    """SGLang passes any rows to reshape_and_cache; the emulated operator refuses what the document refuses."""
    pair = Pair(writer="reshape_and_cache")
    slots = torch.tensor([PAGE, PAGE + 1], dtype=torch.int32, device=NPU)
    key = rows([0] * 3, 2, 32, pair.dtype, salt=0)
    with pytest.raises(OpRefused):
        pair.theirs.set_kv_buffer(SimpleNamespace(layer_id=0), slots, key, key)
    with pytest.raises(WriteError):
        pair.ours.write(0, slots, key, key)


def test_cpu_copies_return_where_k_and_v_are_equally_wide() -> None:
    pair = Pair()
    slots = list(range(PAGE, 3 * PAGE))
    for layer in pair.layers:
        key = rows(slots, 2, 32, pair.dtype, salt=layer)
        pair.write(layer, torch.tensor(slots, dtype=torch.int32, device=NPU), key, key + 1)
    before = {name: theirs for name, (theirs, _) in pair.storages().items()}
    index = torch.tensor(slots, device=NPU)
    copy = pair.theirs.get_cpu_copy(index)
    pair.theirs.get_hicache_transfer_buffers()[0].zero_()
    pair.theirs.get_hicache_transfer_buffers()[1].zero_()
    pair.theirs.load_cpu_copy(copy, index)
    for name, (theirs, _) in pair.storages().items():
        assert torch.equal(theirs, before[name])


def test_cpu_copies_take_v_for_as_wide_as_k() -> None:
    """A-09: V is viewed with K's width: an error where the counts do not divide, else rows of other slots."""
    slot = torch.tensor([PAGE], dtype=torch.int32, device=NPU)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        Pair(dims=40, value_dims=32).theirs.get_cpu_copy(slot)
    pair = Pair(dims=48, value_dims=20)
    pair.write(0, slot, rows([0], 2, 48, pair.dtype, salt=1), rows([0], 2, 20, pair.dtype, salt=2))
    copy = pair.theirs.get_cpu_copy(slot)
    for storage in pair.theirs.get_hicache_transfer_buffers():
        storage.zero_()
    pair.theirs.load_cpu_copy(copy, slot)
    storages = pair.storages()
    assert torch.equal(*storages["key"]) and not torch.equal(*storages["value"])
    assert not storages["value"][0][0, 1, 0].any() and storages["value"][1][0, 1, 0].any()
