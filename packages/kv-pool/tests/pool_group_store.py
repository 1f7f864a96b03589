"""Caches with companions over a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kv_pool.hicache import Canary, StorageTier
from pool_group import GroupBench, PageByPage

__all__ = ["over"]


def over(
    store: Any, kinds: Sequence[str], tier: dict[str, Any] | None = None, *, canary: bool = False, **options: Any
) -> GroupBench:
    """A cache with a store; each call is a restart."""
    bench = GroupBench(kinds, **options)
    bench.random = PageByPage()  # type: ignore[assignment]
    chosen: dict[str, Any] = {"threshold": 4, "batch": 2, "threads": 1, **(tier or {})}
    chosen["canary"] = bench.options["canary"] = Canary(bench.host) if canary else None
    bench.attach(StorageTier(bench.host, bench.index, store, **chosen))
    return bench
