"""Owns the proof that what fails or is refused in a cache over several pools leaves its books and bytes right."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kv_pool import CacheError, CanaryMismatch, HostPoolError, PageAllocator, PageMap, StatePool
from kv_pool.hicache import Canary, Companion, HiCacheController, HostPool, ImmediateStreams, Lane, Mark

sys.path.insert(0, str(Path(__file__).parent))

from pool_group import GroupBench, PageByPage, state_layouts, window_pool

Text = Callable[[int, int], list[int]]
ALL = ["window", "draft", "states"]


def make(kinds: list[str], **options: Any) -> GroupBench:
    """A cache whose prompts are computed page by page, with a snapshot after each."""
    bench = GroupBench(kinds, **options)
    bench.random = PageByPage()  # type: ignore[assignment]
    return bench


class Failing:
    """A mover that raises when it is told to, after it has moved."""

    def __init__(self, inner: Any) -> None:
        self.name, self.capabilities, self.inner, self.fail = inner.name, inner.capabilities, inner, ""

    def backup(self, device_pages: Any, host_pages: Any) -> None:
        self.inner.backup(device_pages, host_pages)
        if self.fail == "backup":
            raise OSError("backup")

    def load(self, device_pages: Any, host_pages: Any, layer_id: int | None = None) -> None:
        self.inner.load(device_pages, host_pages, layer_id)
        if self.fail == "load":
            raise OSError("load")


@pytest.mark.parametrize("kind", ALL)
def test_failures_of_a_companion_leave_nothing_marked(kind: str, text: Text) -> None:
    bench = make([kind])
    member = bench.cache._group.member(kind)
    failing = [Failing(mover) for mover in member.mover.movers]
    member.mover.movers[:] = failing
    failing[-1].fail = "backup"
    acquired = bench.cache.acquire(text(1, 13))
    done = bench.run(acquired)
    with pytest.raises(OSError, match="backup"):
        bench.cache.finish(acquired, done)
    bench.check_books()
    counts = bench.index.counts()
    assert counts.host.held == bench.host.allocator.held == member.host.own.held == counts.locks == 0
    failing[-1].fail = ""
    assert bench.serve(text(1, 13)) == (12, 0)
    bench.cache.drain()
    bench.cache.evict(8)
    acquired = bench.cache.acquire(text(1, 13))
    failing[-1].fail = "load"
    with pytest.raises(OSError, match="load"):
        bench.cache.load(acquired)
    assert acquired.state == "failed"
    for call in (bench.cache.load, lambda handle: bench.cache.finish(handle, text(1, 13))):
        with pytest.raises(CacheError, match="failed"):
            call(acquired)
    bench.check_books()
    bench.cache.abort(acquired)
    bench.cache.drain()
    bench.check_books()
    failing[-1].fail = ""
    assert bench.serve(text(1, 13)) == (12, 0), "the cache's own pages had come; the companion's come from the host"
    assert bench.index.counts().locks == 0


def test_a_copy_of_a_companion_that_the_device_reports_as_failed(text: Text) -> None:
    streams = _Breaking()
    bench = make(["draft"], streams=streams)
    streams.fail = True
    acquired = bench.cache.acquire(text(1, 13))
    done = bench.run(acquired)
    with pytest.raises(OSError, match="device"):
        bench.cache.finish(acquired, done)
    with pytest.raises(OSError, match="device"):
        bench.cache.drain()
    streams.fail = False
    bench.cache.drain()
    member = bench.cache._group.member("draft")
    assert member.host.own.held == 0 and not member.pending
    bench.check_books()
    assert bench.serve(text(1, 13)) == (12, 0)
    bench.cache.drain()
    assert member.host.own.held == 3
    member.host.leave(member.host.named())
    streams.fail = True
    with pytest.raises(OSError, match="device"):
        bench.serve(text(1, 13))
    assert (member.host.own.held, bench.host.allocator.held) == (0, 3), "the cache's own copies were made before"
    bench.check_books()


class _Breaking(ImmediateStreams):
    """Lanes on which the end of a copy is an error of the device, when they are told so."""

    fail = False

    def mark(self, lane: Lane) -> Mark:
        return _BrokenMark() if self.fail and lane != "compute" else super().mark(lane)


class _BrokenMark:
    def reached(self) -> bool:
        return True

    def wait_on_host(self) -> None:
        raise OSError("device")


@pytest.mark.parametrize("kind", ALL)
def test_a_host_page_of_a_companion_that_has_changed_is_refused(kind: str, text: Text) -> None:
    bench = make([kind])
    bench.options["canary"] = Canary(bench.host)
    bench.attach(None)
    bench.serve(text(1, 17))
    bench.cache.drain()
    assert bench.cache.evict(8) == 4
    member = bench.cache._group.member(kind)
    place = int(member.host.find(np.array([4]))[0])
    member.companion.hosts[-1].mirrors[-1].host[place].view(torch.uint8)[-1, -1, -1, -1] ^= 1
    acquired = bench.cache.acquire(text(1, 18))
    assert acquired.hit_tokens == 16
    with pytest.raises(CanaryMismatch):
        bench.cache.load(acquired)
    assert acquired.state == "acquired" and acquired.restorable(16) == 12
    bench.check_books()
    bench.cache.limit(acquired, 12)
    bench.cache.finish(acquired, bench.run(acquired))
    assert bench.serve(text(1, 18)) == (16, 0)
    bench.cache.drain()
    bench.cache.evict(8)
    assert bench.serve(text(1, 18)) == (0, 16), "what was computed again has got its host copy"


def test_calls_out_of_order_are_refused(text: Text) -> None:
    bench = make(ALL)
    cache = bench.cache
    acquired = cache.acquire(text(1, 13))
    before: list[Callable[[], object]] = [
        lambda: cache.advance(acquired, 4),
        lambda: cache.snapshot(acquired, 4),
        lambda: acquired.wait_layer(20),
        lambda: cache.finish(acquired, text(1, 13)),
    ]
    for call in before:
        with pytest.raises(CacheError, match="loaded"):
            call()
    cache.load(acquired)
    for place in (0, 6, 20):
        with pytest.raises(CacheError, match="multiple of 4"):
            cache.snapshot(acquired, place)
    unknown: list[Callable[[], object]] = [
        lambda: acquired.row("window"),
        lambda: acquired.row("other"),
        lambda: acquired.companion_pages("no"),
        lambda: cache.accounting("other"),
        lambda: cache.evict(1, "other"),
    ]
    for call in unknown:
        with pytest.raises(CacheError):
            call()
    cache.abort(acquired)
    for call in (lambda: acquired.row("states"), lambda: acquired.companion_pages("window")):
        with pytest.raises(CacheError):
            call()
    bench.check_books()
    assert "states" in repr(bench.cache.companions[2])


def test_companions_that_do_not_belong_to_the_cache() -> None:
    lead, pool = PageAllocator(9, 4), window_pool(8, "cpu")
    host, pages = HostPool(pool, pages=4), PageMap(lead, PageAllocator(9, 4))
    states = StatePool(state_layouts(), requests=3, device="cpu")
    hosts = [HostPool(states.kind(kind), pages=4) for kind in states.kinds]
    rows = PageMap(lead, PageAllocator(4, 1))
    refused: list[Callable[[], object]] = [
        lambda: Companion.last_pages("w", PageMap(lead, PageAllocator(8, 4)), host, window=4),
        lambda: Companion.last_pages("w", PageMap(lead, PageAllocator(9, 2)), host, window=4),
        lambda: Companion.last_pages("w", pages, host, window=0),
        lambda: Companion.every_page("", pages, host),
        lambda: Companion.snapshots("s", rows, states, hosts[:1]),
        lambda: Companion.snapshots("s", rows, states, hosts[::-1]),
        lambda: Companion.snapshots("s", rows, states, [hosts[0], HostPool(states.kind("recurrent"), pages=5)]),
        lambda: Companion.snapshots("s", PageMap(lead, PageAllocator(4, 4)), states, hosts),
    ]
    for wrong in refused:
        with pytest.raises(HostPoolError):
            wrong()
    bench, other = make(["window"]), Companion.every_page("draft", pages, host)
    for companions in ([other], [bench.cache.companions[0]] * 2):
        parts = (bench.pool, bench.allocator, bench.host, bench.index)
        with pytest.raises(HostPoolError, match=r"lead|names"):
            HiCacheController(*parts, companions=companions)
