"""SGLang's dynamic storage backend over our stores, and its NPU pools described as ours."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from engines_pools import LAYERS, PAGE, Pair
from kv_planner import page_hashes
from kv_pool import LayoutError, StorageError
from kv_pool.hicache import HostPool, create_mover
from kv_pool.integrations.sglang import HostPages, adopt_pool, storage_class
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMHATokenToKVPool, NPUMLATokenToKVPool
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGES = 6


def number(tensor: torch.Tensor, salt: int) -> None:
    """Fill with a running number, exact in 16 bits; a byte's worth where the type has no more."""
    small = tensor.element_size() == 1
    running = torch.arange(salt, salt + tensor.numel()).remainder(120 if small else 509) - (0 if small else 254)
    tensor.copy_(running.view(tensor.shape).to(tensor.dtype))


def slots(pages: list[int]) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).reshape(-1)


def mha_host(pool: Any, layout: str = "page_first_direct", drafts: tuple[Any, ...] = ()) -> Any:
    return MHATokenToKVPoolHost(
        pool._mha_buffer_info(), 2.0, 0, PAGE, layout,
        device_capacity_tokens=pool.size, start_layer=0, end_layer=LAYERS,
        draft_buffer_infos=[draft._mha_buffer_info() for draft in drafts], host_token_capacity=PAGES * PAGE,
    )  # fmt: skip


def mla_host(pool: Any) -> Any:
    return MLATokenToKVPoolHost(
        pool._mla_buffer_info(), 2.0, 0, PAGE, "page_first_kv_split",
        device_capacity_tokens=pool.size, start_layer=0, end_layer=LAYERS, target_layer_num=LAYERS,
        host_token_capacity=PAGES * PAGE,
    )  # fmt: skip


def mla_pool(layers: int = LAYERS, **changes: Any) -> Any:
    return NPUMLATokenToKVPool(**{
        "size": 8 * PAGE, "page_size": PAGE, "dtype": torch.bfloat16, "kv_lora_rank": 64, "qk_rope_head_dim": 32,
        "layer_num": layers, "device": "npu", "enable_memory_saver": False, "start_layer": 0, "end_layer": layers - 1,
        **changes,
    })  # fmt: skip


def draft_pool() -> Any:
    return NPUMHATokenToKVPool(
        size=8 * PAGE, page_size=PAGE, dtype=torch.float16, head_num=2, head_dim=32, layer_num=1, device="npu",
        enable_memory_saver=False,
    )  # fmt: skip


def config(folder: Path, **changes: Any) -> HiCacheStorageConfig:
    extra = {
        "backend_name": "kv_pool", "module_path": "kv_pool.integrations.sglang", "class_name": "KvPoolStorage",
        "interface_v1": 1, "storage": "files", "options": {"root": str(folder), "capacity_bytes": 10**8},
    }  # fmt: skip
    return HiCacheStorageConfig(**{
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "m/x",
        "extra_config": extra, **changes,
    })  # fmt: skip


def backend(folder: Path, host: Any, **changes: Any) -> Any:
    made: Any = StorageBackendFactory.create_backend("dynamic", config(folder, **changes), host)
    made.register_mem_pool_host(host)
    return made


def hashes(pages: int) -> list[str]:
    """SGLang's hashes of pages; a golden file of the planner holds them equal."""
    return list(page_hashes(list(range(pages * PAGE)), PAGE))


def buffers(host: Any) -> list[torch.Tensor]:
    names = ("k_buffer", "v_buffer", "index_k_buffer")
    return [held for name in names if isinstance(held := getattr(host, name, None), torch.Tensor)]


def by_page(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """The axis of slots to the front, in pages."""
    moved = tensor.movedim(axis, 0)
    return moved.reshape(-1, PAGE, *moved.shape[1:])


def test_the_class_is_what_the_engine_asks_for() -> None:
    """Every call that the controller makes has the engine's parameters, and none is left abstract."""
    ours = storage_class()
    assert issubclass(ours, HiCacheStorage) and not inspect.isabstract(ours) and storage_class() is ours
    calls = ("batch_exists", "exists", "batch_get_v1", "batch_set_v1", "batch_get", "get", "batch_set", "set")
    for name in (*calls, "register_mem_pool_host"):
        theirs = list(inspect.signature(getattr(HiCacheStorage, name)).parameters)
        assert list(inspect.signature(getattr(HostPages, name)).parameters) == theirs, name
    assert set(HiCacheStorage.__abstractmethods__) <= set(vars(HostPages))


@pytest.mark.parametrize("kind", ["mha", "mha_packed", "mha_page_first", "mha_layer_first", "mla", "mla_index"])
def test_host_pages_go_and_come_in_place(tmp_path: Path, kind: str) -> None:
    index: dict[str, Any] = {"index_head_dim": 128, "indexer_layer_ids": [0, 2]} if kind == "mla_index" else {}
    drafts = (draft_pool(), draft_pool()) if kind == "mha_packed" else ()
    layout = kind.removeprefix("mha_") if kind.endswith("_first") else "page_first_direct"
    host = mha_host(Pair().theirs, layout, drafts) if kind.startswith("mha") else mla_host(mla_pool(**index))
    store = backend(tmp_path, host, is_mla_model=kind.startswith("mla"))
    keys, there, back = hashes(4), [2, 5, 1], [4, 1, 3, 2]
    held = buffers(host)
    assert len(held) == (3 if index else 2)
    for salt, buffer in enumerate(held):
        number(buffer, salt)
    paged = kind not in ("mha_page_first", "mha_layer_first")
    before = [buffer.clone() for buffer in held]
    assert store.batch_exists(keys) == 0
    assert store.batch_set_v1(keys[:3], slots(there)) == [True] * 3
    assert (store.batch_exists(keys), store.exists(keys[2]), store.exists(keys[3])) == (3, True, False)
    for buffer in held:
        buffer.fill_(-7)
    assert store.batch_get_v1(keys, slots(back)) == [True, True, True, False]
    for buffer, old in zip(held, before, strict=True):
        axis = 0 if paged else buffer.dim() - 3 - (kind == "mha_page_first")
        pages, olds = (one if paged else by_page(one, axis) for one in (buffer, old))
        for source, target in zip(there, back, strict=False):
            assert torch.equal(pages[target], olds[source])
        assert (pages[[0, 2, 5]] == -7).all()


def test_tensors_go_and_come_by_the_older_calls(tmp_path: Path) -> None:
    host = mha_host(Pair().theirs)
    store = backend(tmp_path, host)
    keys = hashes(3)
    number(host.k_buffer, 1)
    number(host.v_buffer, 2)
    values = [host.get_data_page(page * PAGE).contiguous() for page in (2, 4)]
    assert store.batch_set(keys[:2], values) and store.set(keys[0], values[0])
    rooms = [host.get_dummy_flat_data_page() for _ in keys]
    found = store.batch_get(keys, rooms)
    assert torch.equal(found[0], values[0]) and torch.equal(found[1], values[1]) and found[2] is None
    assert store.get(keys[2], rooms[2]) is None
    host.set_from_flat_data_page(PAGE, found[1])
    assert torch.equal(host.k_buffer[1], host.k_buffer[4]) and torch.equal(host.v_buffer[1], host.v_buffer[4])


def test_a_page_with_a_draft_is_not_read_as_one_without(tmp_path: Path) -> None:
    """A-04: SGLang's own store restores a draft's K as V, and reads float16 as bfloat16; these keys differ."""
    pair = Pair()
    packed, plain = mha_host(pair.theirs, drafts=(draft_pool(),)), mha_host(pair.theirs)
    other = mha_host(Pair(dtype="bfloat16").theirs)
    keys = hashes(1)
    assert backend(tmp_path, packed).batch_set_v1(keys, slots([1])) == [True]
    changes: list[tuple[Any, dict[str, Any]]] = [
        (plain, {}), (other, {}), (packed, {"model_name": "m/y"}), (packed, {"tp_size": 2}),
        (packed, {"pp_size": 2}), (packed, {"attn_cp_size": 2}),
    ]  # fmt: skip
    for host, change in changes:
        assert backend(tmp_path, host, **change).batch_exists(keys) == 0, change
    assert backend(tmp_path, packed).batch_exists(keys) == 1
    theirs = [HiCacheFile(config(tmp_path / "theirs"), str(tmp_path / "theirs")) for _ in range(2)]
    assert theirs[0].set(keys[0], packed.get_data_page(PAGE)) and theirs[1].exists(keys[0])


def test_latents_are_shared_by_ranks(tmp_path: Path) -> None:
    host = mla_host(mla_pool())
    ranks = [backend(tmp_path, host, is_mla_model=True, tp_rank=rank, tp_size=4) for rank in (0, 3)]
    assert ranks[0].batch_set_v1(hashes(1), slots([1])) == [True]
    assert ranks[1].batch_exists(hashes(1)) == 1


def test_slots_that_are_no_whole_pages_are_refused(tmp_path: Path) -> None:
    """A-22: SGLang takes the first slot of every page for the page."""
    host = mha_host(Pair().theirs)
    store = backend(tmp_path, host)
    for wrong in (slots([1])[:-1], slots([1]) + 2, slots([1]).flip(0), slots([1, 2])):
        with pytest.raises(StorageError, match="whole pages"):
            store.batch_set_v1(hashes(1), wrong)
    with pytest.raises(StorageError, match="registered"):
        storage_class()(config(tmp_path)).batch_exists(hashes(1))


def test_damage_is_a_miss(tmp_path: Path) -> None:
    host = mha_host(Pair().theirs)
    store = backend(tmp_path, host)
    keys = hashes(3)
    assert store.batch_set_v1(keys[1:2], slots([2])) == [True]
    (path,) = tmp_path.glob("??/*")
    assert store.batch_set_v1(keys, slots([1, 2, 3])) == [True] * 3
    path.write_bytes(path.read_bytes()[:-1])
    assert store.batch_get_v1(keys, slots([1, 2, 3])) == [True, False, False]
    assert store.batch_exists(keys) == 1


@pytest.mark.parametrize("drafts", [0, 2])
def test_mha_pools_are_described_whole(drafts: int) -> None:
    pair = Pair(value_dims=16)
    extra = [
        NPUMHATokenToKVPool(
            size=8 * PAGE, page_size=PAGE, dtype=torch.float16, head_num=1, head_dim=8, layer_num=1, device="npu",
            enable_memory_saver=False,
        )
        for _ in range(drafts)
    ]  # fmt: skip
    ours = adopt_pool(pair.theirs, fingerprint="m", drafts=extra)
    entries = ours.manifest().entries
    pointers, _, items = pair.theirs.get_contiguous_buf_infos()
    named = {(entry.component, entry.layer_id): entry for entry in entries if entry.part == "target"}
    layers = list(range(LAYERS))
    order = [named[name, layer] for name in ("key", "value") for layer in layers]
    assert [entry.address for entry in order] == pointers and [entry.item_bytes for entry in order] == items
    drafted = [entry.address for entry in entries if entry.part == "draft" and entry.component == "key"]
    assert drafted == [pool.get_contiguous_buf_infos()[0][0] for pool in extra]
    assert {entry.layer_id for entry in entries if entry.part == "draft"} == set(range(LAYERS, LAYERS + drafts))
    for salt, storage in enumerate(pair.theirs.get_hicache_transfer_buffers()):
        number(storage, salt)
    host = HostPool(ours, pages=3)
    create_mover("indexed", host).backup([6], [2])
    torch_npu.npu.synchronize()
    for name, storage in zip(("key", "value"), pair.theirs.get_hicache_transfer_buffers(), strict=True):
        assert torch.equal(host.mirror(name).host[2], storage[:, 6].cpu())  # type: ignore[arg-type]


def test_mla_pools_are_described_whole() -> None:
    theirs = mla_pool(index_head_dim=128, indexer_layer_ids=[4, 6], start_layer=4, end_layer=4 + LAYERS - 1)
    ours = adopt_pool(theirs, fingerprint="m", model_layers=range(8), model_indexer_layers=[0, 4, 6])
    held = {(entry.component, entry.layer_id): entry.address for entry in ours.manifest().entries}
    assert held == {
        **{("latent", 4 + layer): theirs.k_buffer[layer].data_ptr() for layer in range(LAYERS)},
        **{("rope", 4 + layer): theirs.v_buffer[layer].data_ptr() for layer in range(LAYERS)},
        ("index_key", 4): theirs.index_k_buffer[0].data_ptr(), ("index_key", 6): theirs.index_k_buffer[1].data_ptr(),
    }  # fmt: skip


def test_pools_of_other_kinds_are_refused() -> None:
    class Other(NPUMHATokenToKVPool):  # type: ignore[misc]
        pass

    pair = Pair()
    pair.theirs.__class__ = Other
    with pytest.raises(LayoutError, match="Other"):
        adopt_pool(pair.theirs, fingerprint="m")
    with pytest.raises(LayoutError, match="equal components"):
        adopt_pool(Pair().theirs, fingerprint="m", drafts=[draft_pool(), mla_pool(1)])
