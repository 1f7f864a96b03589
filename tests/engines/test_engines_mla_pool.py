"""NPUMLATokenToKVPool against plain loops: latent, rope and index writes, ND and NZ, transfer entries, host copies.

`MlaPool` is compared with it by recorded answers (`packages/kv-pool/tests/golden`). The meaning here is the contract's:
`[layers, pages, page_size, 1, width]`, and the tile order of NZ.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines_pools import NPU, PAGE, rows
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMLATokenToKVPool

LATENT, ROPE, INDEX, FIRST, LAYERS, PAGES = 64, 32, 48, 3, 2, 7


def make(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "size": (PAGES - 1) * PAGE, "page_size": PAGE, "dtype": torch.bfloat16, "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE, "layer_num": LAYERS, "device": "npu", "enable_memory_saver": False,
        "start_layer": FIRST, "end_layer": FIRST + LAYERS - 1,
    }  # fmt: skip
    return NPUMLATokenToKVPool(**(settings | changes))


def element(pages: torch.Tensor, slot: int, dim: int, *, nz: bool) -> torch.Tensor:
    """The element of a slot by the contract's formula. `pages` is one layer, [pages, PAGE, 1, width]."""
    page, offset = divmod(slot, PAGE)
    if not nz:
        return pages[page, offset, 0, dim]
    tile, inside = divmod(dim, 16)
    return pages[page].reshape(-1)[(tile * PAGE + offset) * 16 + inside]


@pytest.mark.parametrize("nz", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_writes(monkeypatch: pytest.MonkeyPatch, nz: bool, index_dtype: torch.dtype) -> None:
    if nz:
        monkeypatch.setenv("SGLANG_USE_FIA_NZ", "1")
    pool = make()
    assert pool.k_buffer.shape == (LAYERS, PAGES, PAGE, 1, LATENT)
    assert pool.v_buffer.shape == (LAYERS, PAGES, PAGE, 1, ROPE)
    draw = random.Random(3)
    written: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    for step in range(5):
        layer = draw.randrange(LAYERS)
        slots = draw.sample(range(PAGE, PAGES * PAGE), k=draw.randint(1, 12))
        latent = rows(slots, 1, LATENT, torch.bfloat16, salt=step)
        rope = rows(slots, 1, ROPE, torch.bfloat16, salt=50 + step)
        target = torch.tensor(slots, dtype=index_dtype, device=NPU)
        pool.set_kv_buffer(SimpleNamespace(layer_id=FIRST + layer), target, latent, rope)
        for row, slot in enumerate(slots):
            written[layer, slot] = (latent[row, 0].cpu(), rope[row, 0].cpu())
    for which, (buffer, width) in enumerate(((pool.k_buffer, LATENT), (pool.v_buffer, ROPE))):
        bytes_of = buffer.cpu()
        for layer in range(LAYERS):
            for slot in range(PAGES * PAGE):
                found = torch.stack([element(bytes_of[layer], slot, dim, nz=nz) for dim in range(width)])
                expected = written[layer, slot][which] if (layer, slot) in written else torch.zeros_like(found)
                assert torch.equal(found, expected), (which, layer, slot)


def test_a_latent_row_with_its_rope_in_one_tensor_is_split() -> None:
    pool = make()
    slots = torch.tensor([PAGE + 1], dtype=torch.int64, device=NPU)
    both = rows([0], 1, LATENT + ROPE, torch.bfloat16, salt=9)
    pool.set_kv_buffer(SimpleNamespace(layer_id=FIRST), slots, both, None)
    latent, rope = (buffer.cpu()[0, 1, 1, 0] for buffer in (pool.k_buffer, pool.v_buffer))
    assert torch.equal(torch.cat([latent, rope]), both.cpu()[0, 0])


def test_index_keys_of_some_layers() -> None:
    pool = make(index_head_dim=INDEX, indexer_layer_ids=[FIRST + 1])
    assert pool.index_k_buffer.shape == (1, PAGES, PAGE, 1, INDEX)
    slots = [PAGE, 3 * PAGE + 5]
    keys = rows(slots, 1, INDEX, torch.bfloat16, salt=4)
    pool.set_index_k_buffer(FIRST + 1, torch.tensor(slots, dtype=torch.int64, device=NPU), keys)
    stored = pool.index_k_buffer.cpu().view(-1, INDEX)
    assert torch.equal(stored[slots], keys.cpu()[:, 0])
    stored[slots] = 0
    assert not stored.any()


@pytest.mark.parametrize("indexer", [None, [FIRST, FIRST + 1], [FIRST + 1]])
def test_transfer_entries(indexer: list[int] | None) -> None:
    """Latents, then ropes, then index keys, one a layer; the ids that go with them have the same count."""
    pool = make(**({} if indexer is None else {"index_head_dim": INDEX, "indexer_layer_ids": indexer}))
    buffers = [*pool.k_buffer, *pool.v_buffer, *([] if indexer is None else pool.index_k_buffer)]
    addresses, lengths, items = pool.get_contiguous_buf_infos()
    assert addresses == [buffer.data_ptr() for buffer in buffers]
    assert lengths == [PAGES * PAGE * buffer.shape[-1] * 2 for buffer in buffers]
    assert items == [PAGE * buffer.shape[-1] * 2 for buffer in buffers]
    ids = [*range(FIRST, FIRST + LAYERS)] * 2 + (indexer or [])
    assert pool.get_kv_layer_ids() == ids and len(ids) == len(buffers)


def test_nz_needs_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_FIA_NZ", "1")
    pool = make(kv_lora_rank=24)
    slots = torch.tensor([PAGE], dtype=torch.int64, device=NPU)
    latent, rope = (rows([0], 1, width, torch.bfloat16, salt=1) for width in (24, ROPE))
    with pytest.raises(ValueError, match="divisible by 16"):
        pool.set_kv_buffer(SimpleNamespace(layer_id=FIRST), slots, latent, rope)


def test_copies_to_the_host_return() -> None:
    pool = make(index_head_dim=INDEX)
    for number, buffer in enumerate((pool.k_buffer, pool.v_buffer, pool.index_k_buffer)):
        pattern = torch.arange(buffer.numel()).remainder(251 - number).view(buffer.shape)
        buffer.copy_(pattern.to(torch.bfloat16))
    slots = torch.tensor([PAGE + 3, 5 * PAGE, 2 * PAGE + 1], device=NPU)
    buffers = (pool.k_buffer, pool.v_buffer, pool.index_k_buffer)
    before = [buffer.cpu() for buffer in buffers]
    copy = pool.get_cpu_copy(slots)
    for buffer in buffers:
        buffer.zero_()
    pool.load_cpu_copy(copy, slots)
    for buffer, old in zip(buffers, before, strict=True):
        flat, expected = buffer.cpu().flatten(1, 2), old.flatten(1, 2)
        assert torch.equal(flat[:, slots.cpu()], expected[:, slots.cpu()])
        flat[:, slots.cpu()] = 0
        assert not flat.any()
