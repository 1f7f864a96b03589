"""SGLang's own hybrid cache controller, its threads and host pools, with our storage attached by name."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines_groups import host_of, number, page_slots, windowed
from engines_pools import PAGE
from kv_planner import page_hashes
from kv_pool.integrations.sglang import storage_class
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.runtime_context import get_parallel

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller

TOKENS = list(range(4 * PAGE))
KEYS = list(page_hashes(TOKENS, PAGE))
WAIT = 60


@pytest.fixture(autouse=True)
def hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang compiles its hash on first use, which needs a compiler; a golden file holds ours equal to it."""

    def hashed(tokens: list[int], prior: str | None, *, page_size: int) -> list[str]:
        return list(page_hashes(tokens, page_size, prior=prior))

    monkeypatch.setattr(hybrid_cache_controller, "get_storage_hash_str", hashed)


def trailing(where: list[int]) -> PoolTransfer:
    return PoolTransfer(
        PoolName.SWA, host_indices=page_slots(where), keys=KEYS[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )


@contextmanager
def controller(folder: Path) -> Iterator[tuple[Any, dict[PoolName, Any]]]:
    """A controller of a model with windows, its host pools empty, its storage attached as the server attaches it."""
    pool = windowed()
    pools = {PoolName.KV: pool.full_kv_pool, PoolName.SWA: pool.swa_kv_pool}
    hosts = {name: host_of(one) for name, one in pools.items()}
    group = HostPoolGroup([
        PoolEntry(name, hosts[name], one, lambda layer: layer, is_primary_index_anchor=name == PoolName.KV)
        for name, one in pools.items()
    ])  # fmt: skip
    extra = {
        "backend_name": "kv_pool", "module_path": "kv_pool.integrations.sglang", "class_name": "KvPoolStorage",
        "interface_v1": 1, "storage": "files", "options": {"root": str(folder), "capacity_bytes": 10**8},
    }  # fmt: skip
    alone = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_cp_size": 1}
    with get_parallel().override(**alone):
        made = hybrid_cache_controller.HybridCacheController(
            SimpleNamespace(get_kvcache=lambda: pool), group, PAGE, None, threading.Event(), io_backend="kernel_ascend"
        )
        made.attach_storage_backend(
            "dynamic", prefetch_threshold=PAGE, model_name="m/x", storage_backend_extra_config=extra,
            host_pools=group.entries,
        )  # fmt: skip
        try:
            yield made, hosts
        finally:
            made.detach_storage_backend()


def waited(queue: Queue[Any]) -> Any:
    return queue.get(timeout=WAIT)


def prefetched(made: Any, hosts: dict[PoolName, Any], where: list[int], window: list[int]) -> Any:
    """A prefetch as the scheduler drives it: a query, then room for what was hit, then the reads."""
    asked = PoolTransfer(PoolName.SWA, keys=KEYS[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    made.prefetch(CacheRequestHandle("r", 0), TOKENS, extra_pools=[asked])
    operation = waited(made.prefetch_hit_queue)
    if operation.storage_hit_count:
        operation.host_indices = page_slots(where)[: operation.storage_hit_count]
        asked.host_indices = page_slots(window)
        made.prefetch_buffer.put(operation)
        acks: list[Any] = []
        while not acks or not acks[-1].completed_req:
            acks.append(waited(made.ack_prefetch_queue))
        done = [ack.completed_tokens for ack in acks if ack.completed_tokens is not None]
        hits = {name: count for ack in acks for name, count in (ack.pool_hits or {}).items() if count}
        return done[-1], hits
    return 0, {}


def test_a_window_comes_back_in_another_server(tmp_path: Path) -> None:
    with controller(tmp_path) as (made, hosts):
        assert type(made.storage_backend) is storage_class()
        assert prefetched(made, hosts, [1, 2, 3, 4], [1, 2]) == (0, {})
        kept = {}
        for salt, (name, host) in enumerate(hosts.items()):
            number(host.k_buffer, 3 + salt)
            number(host.v_buffer, 30 + salt)
            kept[name] = (host.k_buffer.clone(), host.v_buffer.clone())
        made.write_storage(page_slots([1, 2, 3, 4]), TOKENS, hash_value=KEYS, extra_pools=[trailing([5, 2])])
        backup = waited(made.ack_backup_queue)
        assert backup.completed_tokens == len(TOKENS)
        assert backup.pool_storage_result.extra_pool_hit_pages == {PoolName.SWA: 2}
    with controller(tmp_path) as (made, hosts):
        for host in hosts.values():
            host.k_buffer.fill_(-7)
            host.v_buffer.fill_(-7)
        assert prefetched(made, hosts, [6, 2, 5, 3], [1, 4]) == (len(TOKENS), {PoolName.SWA: 2})
        moved = {PoolName.KV: dict(zip([6, 2, 5, 3], [1, 2, 3, 4], strict=True)), PoolName.SWA: {1: 5, 4: 2}}
        for name, host in hosts.items():
            for buffer, old in zip((host.k_buffer, host.v_buffer), kept[name], strict=True):
                for target, source in moved[name].items():
                    assert torch.equal(buffer[target], old[source]), name
                assert (buffer[[page for page in range(len(buffer)) if page not in moved[name]]] == -7).all()


@pytest.mark.parametrize(("window", "lost", "hit"), [([], [], 4), ([2, 3], [], 4), ([2, 3], [3], 0), ([2, 3], [2], 0)])
def test_a_prefix_is_as_long_as_its_window_is_whole(
    tmp_path: Path, window: list[int], lost: list[int], hit: int
) -> None:
    """All of K and V is there; without a page of the trailing window no prefix can be restored."""
    with controller(tmp_path) as (made, _):
        extra = [trailing([5, 2])] if window else []
        made.write_storage(page_slots([1, 2, 3, 4]), TOKENS, hash_value=KEYS, extra_pools=extra or None)
        assert waited(made.ack_backup_queue).completed_tokens == len(TOKENS)
        for key in made.storage_backend._pool(PoolName.SWA).keys([KEYS[page] for page in lost]):
            (tmp_path / key[:2] / key).unlink()
        asked = [PoolTransfer(PoolName.SWA, keys=KEYS[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
        made.prefetch(CacheRequestHandle("r", 0), TOKENS, extra_pools=asked if window else None)
        assert waited(made.prefetch_hit_queue).storage_hit_count == hit * PAGE
