"""SGLang's NPU host pools (`kernel_ascend`) against our movers: backup, load, packed drafts, and what goes wrong."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch_npu
from engines_pools import LAYERS, PAGE, Pair
from kv_pool import MoveRefused
from kv_pool.hicache import HostPool, create_mover
from kv_pool.hicache.movers import MoverName
from sgl_kernel_npu.kvcacheio import TransferDirection, transfer_kv_dim_exchange
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool, NPUMLATokenToKVPool
from sglang.srt.mem_cache.pool_host import mla
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

HOST_PAGES = 6


def slots(pages: list[int]) -> torch.Tensor:
    """Every slot of the pages, as the cache controller passes them. Shape: [pages * PAGE]; int64 on the host."""
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)


def number(tensor: torch.Tensor, salt: int) -> None:
    """Fill with a running number, exact in 16 bits."""
    tensor.copy_((torch.arange(salt, salt + tensor.numel()).remainder(509) - 254).view(tensor.shape).to(tensor.dtype))


def mha_host(pool: Any, *, drafts: tuple[Any, ...] = (), kind: type[Any] = MHATokenToKVPoolHost) -> Any:
    return kind(
        pool._mha_buffer_info(), 2.0, 0, PAGE, "page_first_direct",
        device_capacity_tokens=pool.size, start_layer=0, end_layer=LAYERS,
        draft_buffer_infos=[draft._mha_buffer_info() for draft in drafts], host_token_capacity=HOST_PAGES * PAGE,
    )  # fmt: skip


def mla_host(pool: Any, *, drafts: tuple[Any, ...] = ()) -> Any:
    return MLATokenToKVPoolHost(
        pool._mla_buffer_info(), 2.0, 0, PAGE, "page_first_kv_split",
        device_capacity_tokens=pool.size, start_layer=0, end_layer=LAYERS, target_layer_num=LAYERS,
        draft_buffer_infos=[draft._mla_buffer_info() for draft in drafts], host_token_capacity=HOST_PAGES * PAGE,
    )  # fmt: skip


def mla_pool(layers: int = LAYERS, **changes: Any) -> Any:
    return NPUMLATokenToKVPool(
        size=8 * PAGE, page_size=PAGE, dtype=torch.bfloat16, kv_lora_rank=64, qk_rope_head_dim=32, layer_num=layers,
        device="npu", enable_memory_saver=False, start_layer=0, end_layer=layers - 1, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("fia", ["0", "1"])
@pytest.mark.parametrize("mover_name", ["dim_exchange", "indexed"])
def test_mha_backup_and_load(monkeypatch: pytest.MonkeyPatch, fia: str, mover_name: MoverName) -> None:
    """Both sides back the same pages up, lose them, and load them elsewhere: equal host and device bytes throughout."""
    monkeypatch.setenv("ASCEND_USE_FIA", fia)
    pair = Pair()
    theirs, ours = mha_host(pair.theirs), HostPool(pair.ours, pages=HOST_PAGES - 1)
    assert theirs.k_buffer.is_pinned() and ours.pinned and theirs.page_num == ours.num_pages
    mover = create_mover(mover_name, ours)
    sides: tuple[tuple[Literal["key", "value"], torch.Tensor, torch.Tensor], ...] = (
        ("key", pair.theirs.get_hicache_transfer_buffers()[0], theirs.k_buffer),
        ("value", pair.theirs.get_hicache_transfer_buffers()[1], theirs.v_buffer),
    )
    for salt, (name, device, host) in enumerate(sides):
        number(device, salt)
        number(pair.ours.key_storage if name == "key" else pair.ours.value_storage, salt)
        host.fill_(-7)
        ours.mirror(name).host.fill_(-7)
    backup, restore = ([5, 2, 8], [1, 4, 3]), ([7, 1], [3, 4])
    saved: dict[str, torch.Tensor] = {name: device.cpu() for name, device, _ in sides}
    theirs.backup_from_device_all_layer(pair.theirs, slots(backup[1]), slots(backup[0]), "kernel_ascend")
    mover.backup(*backup)
    torch_npu.npu.synchronize()
    for name, _, host in sides:
        assert torch.equal(host, ours.mirror(name).host), name
        for device_page, host_page in zip(*backup, strict=True):
            assert torch.equal(host[host_page], saved[name][:, device_page])
        assert (host[[0, 2, 5]] == -7).all()
    for layer in range(LAYERS):
        theirs.load_to_device_per_layer(pair.theirs, slots(restore[1]), slots(restore[0]), layer, "kernel_ascend")
    mover.load(*restore)
    torch_npu.npu.synchronize()
    for side, (found, mine) in pair.storages().items():
        assert torch.equal(found, mine), side
        expected = saved[side].clone()
        expected[:, 7], expected[:, 1] = saved[side][:, 8], saved[side][:, 2]
        assert torch.equal(found, expected), side


def test_mha_drafts_are_packed_behind_the_target() -> None:
    pair = Pair()
    drafts = tuple(
        NPUMHATokenToKVPool(
            size=8 * PAGE, page_size=PAGE, dtype=torch.float16, head_num=2, head_dim=32, layer_num=1, device="npu",
            enable_memory_saver=False,
        )
        for _ in range(2)
    )  # fmt: skip
    host = mha_host(pair.theirs, drafts=drafts)
    assert host.k_buffer.shape == (HOST_PAGES, LAYERS + 2, PAGE, 2, 32)
    pools = (pair.theirs, *drafts)
    for salt, pool in enumerate(pools):
        for storage in pool.get_hicache_transfer_buffers():
            number(storage, 11 * salt)
    host.backup_from_device_all_layer(pair.theirs, slots([2]), slots([6]), "kernel_ascend")
    torch_npu.npu.synchronize()
    for side, buffer in enumerate((host.k_buffer, host.v_buffer)):
        layers = torch.cat([pool.get_hicache_transfer_buffers()[side].cpu() for pool in pools])
        assert torch.equal(buffer[2], layers[:, 6])


def test_slots_that_do_not_start_a_page_move_a_page_nobody_asked_for() -> None:
    """A-22: 50..65 copies page 3 as a whole; our movers take pages and refuse what is none."""
    pair = Pair()
    host = mha_host(pair.theirs)
    for storage in (*pair.theirs.get_hicache_transfer_buffers(), pair.ours.key_storage):
        number(storage, 1)
    host.k_buffer.fill_(-7)
    host.backup_from_device_all_layer(pair.theirs, slots([1]), torch.arange(50, 66), "kernel_ascend")
    torch_npu.npu.synchronize()
    assert torch.equal(host.k_buffer[1], pair.theirs.get_hicache_transfer_buffers()[0].cpu()[:, 50 // PAGE])
    ours = HostPool(pair.ours, pages=2)
    with pytest.raises(MoveRefused):
        create_mover("dim_exchange", ours).backup([50], [1])


def test_unequal_widths_cannot_be_moved() -> None:
    """A-05: K and V of unequal widths (192/128) have a class that knows the layout and neither direction."""
    pair = Pair(dims=192, value_dims=128)
    host = mha_host(pair.theirs, kind=AsymmetricMHATokenToKVPoolHost)
    with pytest.raises(AttributeError, match="device_k_data_ptrs"):
        host.backup_from_device_all_layer(pair.theirs, slots([1]), slots([2]), "kernel_ascend")
    with pytest.raises(ValueError, match="kernel_ascend"):
        host.load_to_device_per_layer(pair.theirs, slots([1]), slots([2]), 0, "kernel_ascend")
    number(pair.ours.value_storage, 3)
    ours = HostPool(pair.ours, pages=2)
    create_mover("dim_exchange", ours).backup([2], [1])
    torch_npu.npu.synchronize()
    assert torch.equal(ours.mirror("value").host[1], pair.ours.value_storage.cpu()[:, 2])


def test_other_pairs_of_layout_and_backend_are_refused() -> None:
    pair = Pair()
    host = mha_host(pair.theirs)
    host.layout = "page_first"
    with pytest.raises(ValueError, match="Unsupported layout: page_first"):
        host.backup_from_device_all_layer(pair.theirs, slots([1]), slots([2]), "kernel_ascend")
    with pytest.raises(ValueError, match="Unsupported layout: page_first"):
        host.load_to_device_per_layer(pair.theirs, slots([1]), slots([2]), 0, "kernel_ascend")


def test_host_pages_are_counted_by_both() -> None:
    pair = Pair()
    theirs, ours = mha_host(pair.theirs), HostPool(pair.ours, pages=HOST_PAGES)
    first = theirs.alloc(2 * PAGE)
    assert theirs.available_size() == (HOST_PAGES - 2) * PAGE
    assert theirs.alloc((HOST_PAGES - 1) * PAGE) is None and theirs.available_size() == (HOST_PAGES - 2) * PAGE
    assert len(ours.allocator.alloc(2)) == 2 and ours.allocator.available == HOST_PAGES - 2
    theirs.free(first)
    with pytest.raises(AssertionError):
        theirs.free(first)


def test_mla_moves_need_a_wrapper_that_knows_index_scales() -> None:
    """A-20: SGLang passes keywords that no published wrapper has."""
    pool = mla_pool()
    host = mla_host(pool)
    with pytest.raises(TypeError, match="device_index_k_scale"):
        host.backup_from_device_all_layer(pool, slots([1]), slots([2]), "kernel_ascend")
    with pytest.raises(TypeError, match="device_index_k_scale"):
        host.load_to_device_per_layer(pool, slots([1]), slots([2]), 0, "kernel_ascend")


class Exchanges:
    """The wrapper that SGLang calls for: the library's, and a call for the index scales; counts its calls."""

    def __init__(self) -> None:
        self.directions: list[TransferDirection] = []

    def __call__(
        self,
        *,
        device_index_k: torch.Tensor | None,
        host_index_k: torch.Tensor | None,
        device_index_k_scale: torch.Tensor | None,
        host_index_k_scale: torch.Tensor | None,
        **arguments: Any,
    ) -> None:
        transfer_kv_dim_exchange(**arguments)
        self.directions.append(arguments["direction"])
        for device, host in ((device_index_k, host_index_k), (device_index_k_scale, host_index_k_scale)):
            if device is not None and host is not None:
                pair = {"device_k": device, "host_k": host, "device_v": device[:, :0], "host_v": host[:0]}
                transfer_kv_dim_exchange(**(arguments | pair))


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> Exchanges:
    calls = Exchanges()
    monkeypatch.setattr(mla, "transfer_kv_dim_exchange", calls)
    return calls


@pytest.mark.parametrize("indexer", [None, [0, 2]])
def test_mla_backup_and_load(exchanges: Exchanges, indexer: list[int] | None) -> None:
    changes: dict[str, Any] = {} if indexer is None else {"index_head_dim": 128, "indexer_layer_ids": indexer}
    pool = mla_pool(**changes)
    host = mla_host(pool)
    device = [pool.k_buffer, pool.v_buffer] + ([] if indexer is None else [pool.index_k_buffer])
    mirrors = [host.k_buffer, host.v_buffer] + ([] if indexer is None else [host.index_k_buffer])
    for salt, (storage, mirror) in enumerate(zip(device, mirrors, strict=True)):
        number(storage, salt)
        mirror.fill_(-7)
        assert mirror.shape == (HOST_PAGES, storage.shape[0], PAGE, 1, storage.shape[-1])
    saved = [storage.cpu() for storage in device]
    host.backup_from_device_all_layer(pool, slots([1, 3]), slots([4, 6]), "kernel_ascend")
    torch_npu.npu.synchronize()
    for storage, mirror in zip(saved, mirrors, strict=True):
        assert torch.equal(mirror[1], storage[:, 4]) and torch.equal(mirror[3], storage[:, 6])
        assert (mirror[[0, 2, 4, 5]] == -7).all()
    for layer in range(LAYERS):
        host.load_to_device_per_layer(pool, slots([3]), slots([2]), layer, "kernel_ascend")
    torch_npu.npu.synchronize()
    for storage, old in zip(device, saved, strict=True):
        expected = old.clone()
        expected[:, 2] = old[:, 6]
        assert torch.equal(storage.cpu(), expected)
    assert exchanges.directions == [TransferDirection.D2H, TransferDirection.H2D]


def test_mla_drafts_load_everything_again(exchanges: Exchanges) -> None:
    """A-21: with two drafts, each draft layer repeats the transfer of all pools: 9 calls instead of 3."""
    pool, drafts = mla_pool(), (mla_pool(1, is_draft_worker=True), mla_pool(1, is_draft_worker=True))
    host = mla_host(pool, drafts=drafts)
    for layer in range(LAYERS):
        host.load_to_device_per_layer(pool, slots([1]), slots([1]), layer, "kernel_ascend")
    assert len(exchanges.directions) == 3
    for depth, draft in enumerate(drafts):
        host.load_to_device_per_layer(draft, slots([1]), slots([1]), LAYERS + depth, "kernel_ascend", is_draft=True)
    assert len(exchanges.directions) == 9


def test_the_wrappers_empty_v_has_too_few_axes() -> None:
    """The library passes an empty V of one axis for index keys; the operator reads the fifth axis of it."""
    pool = mla_pool(index_head_dim=128)
    host = mla_host(pool)
    with pytest.raises(ValueError, match="5 axes"):
        transfer_kv_dim_exchange(
            slots([1]), slots([1]), pool.k_buffer, host.k_buffer, pool.v_buffer, host.v_buffer,
            pool.index_k_buffer, host.index_k_buffer, page_size=PAGE, direction=TransferDirection.D2H,
        )  # fmt: skip
