"""Owns the proof that every public argument of the host cache refuses an odd value by name; nothing has happened."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kv_planner import PlanError, PrefixIndex
from kv_planner.testing.odd_values import ANY, NUMBER, OPTIONAL, Case, arguments, missing, public, wrongs
from kv_pool import CacheError, KvPoolError, PageAllocator, PageMap, StorageError, hicache
from kv_pool.hicache import (
    CacheMetrics,
    Canary,
    Companion,
    CopyLimits,
    FileStorage,
    HiCacheController,
    HitAgreement,
    HostPool,
    StorageIdentity,
    StorageTier,
)
from kv_pool.hicache.storage.engines.mooncake import MooncakeStorage
from prometheus_client import CollectorRegistry

sys.path.insert(0, str(Path(__file__).parent))

from pool_group import GroupBench
from pool_group_store import over

TYPED = (KvPoolError, PlanError)
RECORD = "a record that calls return"
OWN = "called by the cache with its own objects"
EXEMPT = {
    **dict.fromkeys(
        ("Accounting", "CacheCounters", "CompanionCounters", "Mirror", "MoverCapabilities", "Prefetch",
         "StorageCounters", "StorageIdentity", "UnderWay", "CompanionPrefetch"), RECORD
    ),
    "Acquired": "made by HiCacheController.acquire",
    "CompanionStorage": "made by HiCacheController",
    "CompanionStorage.attach": OWN,
    "CompanionStorage.back_up": OWN,
    "CompanionStorage.forget": OWN,
    "CompanionStorage.prefetch": OWN,
    "ImmediateStreams.mark": OWN,
    "ImmediateStreams.on": OWN,
    "ImmediateStreams.wait": OWN,
    "StorageTier.submit": OWN,
}  # fmt: skip
ANY_NUMBER = ("0", "2**64", "many digits")
WORDS = ("text", "empty text", "half a pair")


class World:
    """A cache with companions and a store, requests in both states, and the table over them."""

    def __init__(self, root: Path) -> None:
        self.store = FileStorage(root / "store", capacity_bytes=1 << 20)
        self.bench = over(self.store, ["window", "draft", "states"], {"threads": 0}, pages=12)
        self.cache, self.tier = self.bench.cache, self.bench.cache._storage
        self.bench.serve(list(range(26)))
        self.cache.drain()
        self.acquired = self.cache.acquire(list(range(26)))
        self.loaded = self.cache.acquire(list(range(26)))
        self.cache.load(self.loaded)
        self.other = GroupBench(["states"])
        self.key = hicache.page_keys(b"x", [1, 2, 3, 4], 4)[0]
        self.page = [np.zeros(8, np.uint8)]
        self.root = root
        self.canary = Canary(self.other.host)
        self.before = self.state()

    def state(self) -> list[Any]:
        """All books, all handles, and what the store has."""
        self.bench.check_books()
        books = [self.cache.accounting(name) for name in (None, "window", "draft", "states")]
        handles = [(own.state, own.hit_tokens, own.pages.tolist()) for own in (self.acquired, self.loaded)]
        files = sorted(str(path) for path in self.root.rglob("*"))
        return [books, handles, self.cache.counters, self.store.used_bytes, files, self.canary.sums.tolist()]

    def cases(self) -> dict[str, Case]:
        """How each public callable is called, and what its arguments take beside."""
        cache, tier, other = self.cache, self.tier, self.other
        stores = cache.companion_storage
        assert tier is not None and stores is not None
        prompt = {"tokens": [1, 2, 3, 4, 5], "namespace": None}
        names = {"namespace": ("None", *WORDS[:2])}
        text = list(range(26))
        pool = self.bench.states.kind("conv")
        rows = PageMap(self.bench.allocator, PageAllocator(pool.num_pages, 1))
        hosts = [other._host(other.states.kind(kind)) for kind in other.states.kinds]
        own = {"name": "a", "pages": PageMap(other.allocator, PageAllocator(other.pool.num_pages, 4))}
        named = {"name": WORDS[:1]}
        index = PrefixIndex(4, device_pages=other.pool.num_pages, host_pages=other.host.num_pages)
        none = ("empty list",)
        files = {"root": self.root / "files", "capacity_bytes": 1, "durable": False}
        return {
            "Acquired.companion_pages": Case(self.acquired.companion_pages, {"name": "draft"}),
            "Acquired.restorable": Case(self.acquired.restorable, {"at_most": 8}, {"at_most": ("-1", *ANY_NUMBER)}),
            "Acquired.row": Case(self.acquired.row, {"name": "states"}),
            "Acquired.wait_layer": Case(self.loaded.wait_layer, {"layer_id": 0}, {"layer_id": NUMBER}),
            "CacheMetrics": Case(
                CacheMetrics, {"cache": cache, "storage": tier, "registry": CollectorRegistry(), "labels": {}},
                {"storage": OPTIONAL, "registry": OPTIONAL, "labels": ("None", "mapping")},
            ),
            "Canary": Case(Canary, {"host": self.other.host}),
            "Canary.check": Case(self.canary.check, {"host_pages": [1]}, {"host_pages": none}),
            "Canary.record": Case(self.canary.record, {"host_pages": [1]}, {"host_pages": none}),
            "Companion": Case(
                Companion,
                {"name": "a", "coverage": "snapshots", "trailing": 1, "pages": rows, "hosts": hosts},
                {"name": WORDS[:1]},
            ),
            "Companion.every_page": Case(Companion.every_page, {**own, "host": other.host}, named),
            "Companion.last_pages": Case(Companion.last_pages, {**own, "host": other.host, "window": 4}, named),
            "Companion.snapshots": Case(
                Companion.snapshots, {"name": "a", "pages": rows, "states": self.other.states, "hosts": hosts}, named,
            ),
            "CompanionStorage.counters_of": Case(stores.counters_of, {"name": "draft"}),
            "CompanionStorage.under_way": Case(stores.under_way, {"name": "draft"}),
            "CopyLimits": Case(CopyLimits, {"batch_pages": 1, "layers_ahead": 1}),
            "FileStorage": Case(FileStorage, files, {"root": WORDS[:1], "durable": ("true",)}),
            "FileStorage.exists": Case(self.store.exists, {"keys": [self.key]}, {"keys": none}),
            "FileStorage.read": Case(self.store.read, {"keys": [self.key], "pages": [self.page]}),
            "FileStorage.remove": Case(self.store.remove, {"keys": [self.key]}, {"keys": none}),
            "FileStorage.write": Case(self.store.write, {"keys": [self.key], "pages": [self.page]}),
            "HiCacheController": Case(
                HiCacheController,
                {"pool": other.pool, "allocator": other.allocator, "host": other.host, "index": index,
                 "policy": "write_back", "mover": None, "streams": None, "poison": True, "storage": None,
                 "canary": None, "limits": None, "companions": ()},
                {name: OPTIONAL for name in ("mover", "streams", "storage", "canary", "limits")}
                | {"poison": ("true",), "companions": none},
            ),
            "HiCacheController.abort": Case(cache.abort, {"acquired": self.acquired}),
            "HiCacheController.acquire": Case(
                cache.acquire, {**prompt, "reach": None}, {**names, "reach": ("None", *ANY_NUMBER)}
            ),
            "HiCacheController.advance": Case(
                cache.advance, {"acquired": self.loaded, "computed": 24, "reach": None},
                {"computed": ANY_NUMBER, "reach": ("None", *ANY_NUMBER)},
            ),
            "HiCacheController.evict": Case(
                cache.evict, {"pages": 1, "companion": None}, {"pages": ANY_NUMBER, "companion": OPTIONAL}
            ),
            "HiCacheController.extend": Case(
                cache.extend, {"acquired": self.acquired, "count": 1}, {"count": NUMBER}
            ),
            "HiCacheController.finish": Case(cache.finish, {"acquired": self.loaded, "tokens": text}),
            "HiCacheController.limit": Case(
                cache.limit, {"acquired": self.acquired, "hit_tokens": 8}, {"hit_tokens": NUMBER}
            ),
            "HiCacheController.load": Case(cache.load, {"acquired": self.acquired}),
            "HiCacheController.prefetch": Case(cache.prefetch, prompt, {**names, "tokens": none}),
            "HiCacheController.snapshot": Case(cache.snapshot, {"acquired": self.loaded, "tokens": 28}),
            "HitAgreement": Case(
                HitAgreement, {"reduce_min": np.copy, "width": 1, "companions": False}, {"companions": ("true",)}
            ),
            "HitAgreement.limit": Case(
                HitAgreement(np.copy, width=1).limit, {"cache": cache, "acquired": [self.acquired]}, {"acquired": none}
            ),
            "HitAgreement.minimum": Case(HitAgreement(np.copy, width=1).minimum, {"hits": [0]}, {"hits": none}),
            "HostPool": Case(
                HostPool, {"pool": other.pool, "pages": 1, "layout": "page_first", "pin": "auto"}
            ),
            "HostPool.mirror": Case(other.host.mirror, {"component": "key", "part": "target"}),
            "MoverCapabilities.supports": Case(
                cache.mover.capabilities.supports, {"layout": "page_first", "device_type": "cpu"},
                {"layout": ANY, "device_type": ANY},
            ),
            "StorageIdentity.of": Case(
                StorageIdentity.of, {"host": other.host, "salt": "", "canary": False},
                {"salt": WORDS, "canary": ("true",)},
            ),
            "StorageTier": Case(
                StorageTier,
                {"host": other.host, "index": index, "storage": self.store, "threshold": 1, "batch": 1,
                 "write_limit": 1, "threads": 0, "share": (0, 1), "salt": "", "canary": None},
                {"threads": NUMBER, "salt": WORDS, "canary": OPTIONAL},
            ),
            "StorageTier.back_up": Case(tier.back_up, {"nodes": [1]}, {"nodes": none}),
            "StorageTier.drain": Case(tier.drain, {"reads": True}, {"reads": ("true",)}),
            "StorageTier.forget": Case(tier.forget, prompt, names),
            "StorageTier.prefetch": Case(tier.prefetch, prompt, {**names, "tokens": none}),
            "create_mover": Case(
                hicache.create_mover, {"name": "auto", "host": other.host, "threads": 1}, says={"name": "mover"}
            ),
            "create_storage": Case(hicache.create_storage, {"name": "files"}),
            "create_streams": Case(hicache.create_streams, {"device": torch.device("cpu")}),
            "mover_names": Case(
                hicache.mover_names, {"layout": "page_first", "device_type": "cpu"}, {"device_type": WORDS}
            ),
            "owner_rank": Case(hicache.owner_rank, {"key": self.key, "ranks": 1}),
            "page_keys": Case(
                hicache.page_keys, {"digest": b"x", **prompt, "page_size": 4},
                {**names, "digest": ("bytes",), "tokens": none},
            ),
            "whole_pages": Case(hicache.whole_pages, {"slots": [4, 5, 6, 7], "page_size": 4}, {"slots": none}),
        }  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    yield World(tmp_path)


def test_the_table_has_every_public_argument(world: World) -> None:
    cases = world.cases()
    assert missing(hicache, cases, EXEMPT) == []
    assert (set(cases) | set(EXEMPT)) - set(public(hicache)) == set()


def test_odd_values_are_refused_by_name_and_change_nothing(world: World) -> None:
    assert wrongs(world.cases(), TYPED) == []
    assert world.state() == world.before


def test_odd_options_of_mooncake_are_refused_before_its_library_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_LOG_LEVEL", raising=False)
    options: dict[str, Any] = {
        "master": "127.0.0.1:1", "hostname": "127.0.0.1", "segment_bytes": 1, "buffer_bytes": 1, "protocol": "tcp",
        "rdma_devices": "", "timeout_s": 1.0, "log_level": "ERROR",
    }  # fmt: skip
    takes = {
        "master": WORDS[:1], "hostname": WORDS[:1], "rdma_devices": WORDS[:2], "segment_bytes": NUMBER,
        "buffer_bytes": NUMBER, "timeout_s": ("fraction",),
    }  # fmt: skip
    assert set(options) == arguments(MooncakeStorage)
    assert wrongs({"MooncakeStorage": Case(MooncakeStorage, options, takes)}, TYPED) == []
    assert "MC_LOG_LEVEL" not in os.environ


def test_a_handle_of_another_cache_is_refused(world: World) -> None:
    other = GroupBench(["window"])
    acquired = other.cache.acquire([1, 2, 3, 4, 5])
    cache = world.cache
    calls: list[Callable[[], object]] = [
        lambda: cache.limit(acquired, 0),
        lambda: cache.extend(acquired, 1),
        lambda: cache.load(acquired),
        lambda: cache.advance(acquired, 4),
        lambda: cache.snapshot(acquired, 4),
        lambda: cache.finish(acquired, [1, 2, 3, 4, 5]),
        lambda: cache.abort(acquired),
    ]
    for call in calls:
        with pytest.raises(CacheError, match="another cache"):
            call()
    assert world.state() == world.before
    other.cache.abort(acquired)
    other.check_books()


def test_pages_of_a_call_to_a_store_are_checked_before_the_first_is_written(world: World) -> None:
    keys = hicache.page_keys(b"x", list(range(8)), 4)
    whole, frozen = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    frozen.flags.writeable = False
    wrong: list[Any] = [
        [[whole]], [[whole], [whole.view(np.int8)]], [[whole], [np.zeros((8, 2), np.uint8)[:, 0]]], [[whole], [b"x"]],
    ]  # fmt: skip
    for pages in wrong:
        with pytest.raises(StorageError, match="pages"):
            world.store.write(keys, pages)
        with pytest.raises(StorageError, match="pages"):
            world.store.read(keys, pages)
    with pytest.raises(StorageError, match="read-only"):
        world.store.read(keys, [[whole], [frozen]])
    assert world.state() == world.before and world.store.exists(keys) == 0
    assert world.store.write(keys, [[whole], [frozen]]) == 2


def test_a_cache_that_was_refused_watches_nothing() -> None:
    bench = GroupBench([])
    watchers = len(bench.allocator._on_left), len(bench.allocator._on_freed)
    parts = (bench.pool, bench.allocator, bench.host, bench.index)
    for options in ({"mover": "dim_exchange"}, {"limits": 5}, {"companions": [None]}):
        with pytest.raises(KvPoolError):
            HiCacheController(*parts, **options)
    assert (len(bench.allocator._on_left), len(bench.allocator._on_freed)) == watchers


def test_numpy_numbers_are_numbers(tmp_path: Path) -> None:
    bench = GroupBench([], limits=CopyLimits(batch_pages=np.int32(2), layers_ahead=np.uint8(1)))
    store = FileStorage(tmp_path, capacity_bytes=np.int64(1 << 20))
    tier = StorageTier(bench.host, bench.index, store, threshold=np.int64(1), batch=np.int8(2), threads=np.int16(0))
    assert tier.batch == 2 and HostPool(bench.pool, pages=np.int64(3)).num_pages == 4
    acquired = bench.cache.acquire(np.arange(9, dtype=np.int16), reach=np.int64(9))
    acquired.wait_layer(np.int64(0))
    assert bench.cache.evict(np.uint32(0)) == 0 and acquired.restorable(np.int8(9)) == 0
