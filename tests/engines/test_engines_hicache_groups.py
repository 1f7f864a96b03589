"""SGLang's storage calls for groups of pools (v2) over our stores: its own host pools, its own file store beside."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engines_groups import host_of, index_host, number, page_slots, sparse, state_host, states, windowed
from engines_pools import PAGE
from kv_planner import page_hashes
from kv_pool import StorageError
from kv_pool.integrations.sglang import HostPages, storage_class
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    count_pool_hits,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.ple_state_pool import ShortConvPool

KEYS = list(page_hashes(list(range(7 * PAGE)), PAGE))
V2 = ("register_mem_host_pool_v2", "batch_exists_v2", "batch_get_v2", "batch_set_v2")


def config(folder: Path, **changes: Any) -> HiCacheStorageConfig:
    extra = {"interface_v1": 1, "storage": "files", "options": {"root": str(folder), "capacity_bytes": 10**8}}
    return HiCacheStorageConfig(**{
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "m/x",
        "extra_config": extra, **changes,
    })  # fmt: skip


def attached(backend: Any, pools: dict[PoolName, Any]) -> Any:
    """A backend that knows its pools in the order in which SGLang's controller tells it."""
    backend.register_mem_pool_host(pools[PoolName.KV])
    for name, pool in pools.items():
        backend.register_mem_host_pool_v2(pool, name)
    backend.on_host_pools_registered()
    return backend


def ours(folder: Path, pools: dict[PoolName, Any], **changes: Any) -> Any:
    return attached(storage_class()(config(folder, **changes)), pools)


def windows() -> dict[PoolName, Any]:
    pool = windowed()
    return {PoolName.KV: host_of(pool.full_kv_pool), PoolName.SWA: host_of(pool.swa_kv_pool, "page_first")}


def indexed() -> dict[PoolName, Any]:
    pool = sparse()
    anchor = host_of(pool.main_pool)
    return {PoolName.KV: anchor, PoolName.INDEXER: index_host(pool, anchor)}


def recurrent() -> dict[PoolName, Any]:
    return {PoolName.KV: host_of(windowed().full_kv_pool), PoolName.MAMBA: state_host(states())}


def sided() -> dict[PoolName, Any]:
    """States with a short conv beside them: SGLang gives no addresses of such pages, only their flat form."""
    pool = states()
    pool.register_slot_state(
        ShortConvPool(size=pool.size, state_shape=(3, 7), layer_ids=[1, 4], dtype=torch.bfloat16, device="npu")
    )
    return {PoolName.KV: host_of(windowed().full_kv_pool), PoolName.MAMBA: state_host(pool)}


def memory(pool: Any) -> list[torch.Tensor]:
    """Everything that a host pool holds, the axis of slots or pages first."""
    if hasattr(pool, "temporal_buffer"):
        return [pool.temporal_buffer, *pool.conv_buffer, *pool.slot_state_buffers]
    return [held for name in ("k_buffer", "v_buffer") if isinstance(held := getattr(pool, name, None), torch.Tensor)]


def pages(pool: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The axis of pages first."""
    return tensor if len(tensor) == pool.page_num else tensor.view(-1, pool.page_size, *tensor.shape[1:])


def transfer(name: PoolName, pool: Any, keys: list[str], where: list[int], **more: Any) -> PoolTransfer:
    return PoolTransfer(name, host_indices=page_slots(where, pool.page_size), keys=keys, **more)


def test_the_calls_are_the_engines() -> None:
    made = storage_class()
    for name in V2:
        theirs = list(inspect.signature(getattr(HiCacheStorage, name)).parameters)
        assert list(inspect.signature(getattr(HostPages, name)).parameters) == theirs, name
        assert getattr(made, name) is getattr(HostPages, name)
    assert {policy.value for policy in PoolHitPolicy} == {"all_pages", "trailing_pages", "block_groups"}
    assert (str(PoolName.KV), str(PoolName.MAMBA)) == ("kv", "mamba")
    fields = list(inspect.signature(PoolTransferResult).parameters)
    assert fields == ["kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"]


@pytest.mark.parametrize("make", [windows, indexed, recurrent, sided], ids=lambda make: make.__name__)
def test_pages_of_every_pool_go_and_come_in_place(tmp_path: Path, make: Any) -> None:
    """Permuted pages of the pools of a group, each with its own geometry; sentinels where nothing was asked for."""
    pools = make()
    name, side = list(pools.items())[1]
    store = ours(tmp_path, pools)
    before = {}
    for salt, (known, pool) in enumerate(pools.items()):
        for place, tensor in enumerate(memory(pool)):
            number(tensor, 13 * salt + 5 * place)
            before[known, place] = tensor.clone()
    assert store.batch_set_v1(KEYS[:3], page_slots([2, 5, 1])) == [True] * 3
    assert store.batch_set_v2([transfer(name, side, KEYS[1:3], [4, 3])]) == {name: [True, True]}
    for pool in pools.values():
        for tensor in memory(pool):
            tensor.fill_(-7)
    again = ours(tmp_path, pools)
    assert again.batch_get_v1(KEYS[:4], page_slots([4, 3, 6, 1])) == [True, True, True, False]
    found = again.batch_get_v2([transfer(name, side, KEYS[1:4], [6, 2, 1])])
    assert found == {name: [True, True, False]} and count_pool_hits(found) == {name: 2}
    for known, moved in ((PoolName.KV, {4: 2, 3: 5, 6: 1}), (name, {6: 4, 2: 3})):
        for place, tensor in enumerate(memory(pools[known])):
            now, then = (pages(pools[known], one) for one in (tensor, before[known, place]))
            for target, source in moved.items():
                assert torch.equal(now[target], then[source]), (known, place)
            assert (now[[page for page in range(len(now)) if page not in moved]] == -7).all()


@pytest.mark.parametrize("seed", range(4))
def test_prefixes_are_those_of_sglangs_own_file_store(tmp_path: Path, seed: int) -> None:
    """Random pages present in three pools, every policy and window: the same verdict, the same restorable prefixes."""
    draw = random.Random(seed)
    alike = windowed(head_dim=16, swa_v_head_dim=16)  # its file store takes no unequal widths
    pools = {**recurrent(), PoolName.KV: host_of(alike.full_kv_pool), PoolName.SWA: host_of(alike.swa_kv_pool)}
    for number_of_case in range(15):
        folder = tmp_path / str(number_of_case)
        mine = ours(folder / "ours", pools)
        theirs = attached(HiCacheFile(config(folder), str(folder / "theirs")), pools)
        for name, pool in pools.items():
            odds = 0.9 if name == PoolName.KV else 0.6
            for key in (key for key in KEYS if draw.random() < odds):
                one = transfer(name, pool, [key], [1])
                both = [store.batch_set_v2([one]) for store in (mine, theirs)]
                assert both == [{name: [True]}] * 2
        asked = [
            PoolTransfer(PoolName.SWA, keys=KEYS[: draw.randint(0, 4)], hit_policy=PoolHitPolicy.TRAILING_PAGES),
            PoolTransfer(PoolName.MAMBA, keys=KEYS[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES),
            PoolTransfer(PoolName.SWA),
        ]
        for transfers in (asked[:2], asked[1:], asked[:1], asked[::-1], [], None):
            length = draw.randint(0, len(KEYS))
            expected = theirs.batch_exists_v2(KEYS[:length], transfers)
            assert mine.batch_exists_v2(KEYS[:length], transfers) == expected


def test_states_are_kept_by_rank_though_latents_are_not(tmp_path: Path) -> None:
    """Of a model of latents, ranks share those; states, and heads of a draft, are a rank's own."""
    pools = {**recurrent(), PoolName.DRAFT: host_of(windowed().full_kv_pool)}
    latent = LogicalHostPool(8 * PAGE, PAGE)
    pools[PoolName.KV] = latent
    ranks = [ours(tmp_path, pools, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    assert ranks[0].batch_set_v1(KEYS[:1], page_slots([1])) == [True]
    for name in (PoolName.MAMBA, PoolName.DRAFT):
        ranks[0].batch_set_v2([transfer(name, pools[name], KEYS[:1], [1])])
        asked = [PoolTransfer(name)]
        assert [rank.batch_exists_v2(KEYS[:1], asked).kv_hit_pages for rank in ranks] == [1, 0]
    assert [rank.batch_exists(KEYS[:1]) for rank in ranks] == [1, 1]
    folder = tmp_path / "theirs"
    theirs = [HiCacheFile(config(folder, is_mla_model=True, tp_rank=r, tp_size=2), str(folder)) for r in (0, 1)]
    key = f"{KEYS[0]}.{PoolName.DRAFT}"  # SGLang's file store keeps the state apart, but not the draft's heads
    assert theirs[0].set(key, torch.zeros(8)) and theirs[1].exists(key)


def test_an_anchor_without_bytes_is_a_mark(tmp_path: Path) -> None:
    """Compressed pools have an anchor that holds nothing; that its page was kept is still known."""
    anchor = LogicalHostPool(8 * PAGE, PAGE)
    store = ours(tmp_path, {PoolName.KV: anchor})
    assert store.batch_set_v1(KEYS[:2], page_slots([1, 2])) == [True, True]
    assert store.batch_exists(KEYS) == 2 and store.batch_get_v1(KEYS[:3], page_slots([3, 4, 5])) == [True, True, False]


def test_pools_do_not_share_keys(tmp_path: Path) -> None:
    """One pool under two names, and pools of other widths under one name."""
    first, second = windows(), windows()
    pools = {PoolName.KV: first[PoolName.KV], PoolName.DRAFT: second[PoolName.KV]}
    store = ours(tmp_path, pools)
    assert store.batch_set_v1(KEYS[:1], page_slots([1])) == [True]
    assert store.batch_get_v2([transfer(PoolName.DRAFT, pools[PoolName.DRAFT], KEYS[:1], [1])]) == {
        PoolName.DRAFT: [False]
    }
    other = {**windows(), PoolName.KV: host_of(windowed(head_dim=16).full_kv_pool)}
    assert ours(tmp_path, other).batch_exists(KEYS) == 0
    flat = config(tmp_path)
    flat.extra_config = {**(flat.extra_config or {}), "interface_v1": 0}
    assert attached(storage_class()(flat), pools).batch_exists(KEYS) == 0  # the other calls may order bytes otherwise


def test_what_would_be_read_elsewhere_is_refused(tmp_path: Path) -> None:
    pools = windows()
    store = ours(tmp_path, pools)
    swa = pools[PoolName.SWA]
    for where in (page_slots([1])[:-1], page_slots([1]) + 1, page_slots([1, 2]), None):
        for call in (store.batch_get_v2, store.batch_set_v2):
            with pytest.raises(StorageError, match="1 whole pages"):
                call([PoolTransfer(PoolName.SWA, host_indices=where, keys=KEYS[:1])])
    assert store.batch_get_v2([PoolTransfer(PoolName.SWA, host_indices=None, keys=None)]) == {PoolName.SWA: []}
    with pytest.raises(StorageError, match="register_mem_host_pool_v2"):
        store.batch_set_v2([transfer(PoolName.MAMBA, swa, KEYS[:1], [1])])
    assert store.batch_set_v1(KEYS[:1], page_slots([1])) == [True]
    with pytest.raises(StorageError, match="block_groups"):
        store.batch_exists_v2(KEYS, [PoolTransfer(PoolName.SWA, hit_policy=PoolHitPolicy.BLOCK_GROUPS)])
    with pytest.raises(StorageError, match="flat form"):
        store.register_mem_host_pool_v2(type("Empty", (), {"page_size": PAGE})(), PoolName.INDEXER)


def test_damage_ends_a_pool_as_a_miss_does(tmp_path: Path) -> None:
    pools = recurrent()
    store = ours(tmp_path, pools)
    states_ = pools[PoolName.MAMBA]
    for key, row in zip(KEYS, (1, 2, 3), strict=False):
        store.batch_set_v2([transfer(PoolName.MAMBA, states_, [key], [row])])
        written = max(tmp_path.glob("??/*"), key=lambda path: path.stat().st_mtime_ns)
        if row == 2:
            written.write_bytes(written.read_bytes()[:-1] + b"?")
    found = store.batch_get_v2([transfer(PoolName.MAMBA, states_, KEYS[:3], [4, 5, 6])])
    assert found == {PoolName.MAMBA: [True, False, False]}
