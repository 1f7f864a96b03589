"""Owns the proof that odd values, calls out of order, refusals midway and late failures of a device lose nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_pool import (
    CacheError,
    ForeignPage,
    HostPoolError,
    KvPoolError,
    OutOfPages,
    PageAllocator,
    PageMap,
    UnknownLayer,
)
from kv_pool.hicache import Acquired, Companion, CopyLimits, HiCacheController, ImmediateStreams, Lane, Mark

sys.path.insert(0, str(Path(__file__).parent))

from pool_group import GroupBench, PageByPage

Text = Callable[[int, int], list[int]]
ALL = ["window", "draft", "states"]


class Held(ImmediateStreams):
    """Lanes whose marks are reached when they are let go, and whose loads may fail then."""

    def __init__(self) -> None:
        self.go, self.broken = True, False

    def mark(self, lane: Lane) -> Mark:
        return HeldMark(self, lane)


class HeldMark:
    def __init__(self, streams: Held, lane: Lane) -> None:
        self.streams, self.lane = streams, lane

    def reached(self) -> bool:
        return self.streams.go

    def wait_on_host(self) -> None:
        if self.streams.broken and self.lane == "load":
            raise RuntimeError("the device has failed")


def make(kinds: list[str], **options: object) -> GroupBench:
    bench = GroupBench(kinds, pages=12, **options)  # type: ignore[arg-type]
    bench.random = PageByPage()  # type: ignore[assignment]
    return bench


def test_refused_pages_of_one_companion_are_not_kept_by_another(text: Text) -> None:
    bench = make(["draft", "window"])
    bench.serve(text(1, 26))
    window, draft = (bench.cache._group.member(name).device.own for name in ("window", "draft"))
    bench.cache.evict(12, "window")
    acquired = bench.cache.acquire(text(2, 9))
    bench.cache.load(acquired)
    outside, free = window.alloc(window.available), draft.available
    for _ in range(3):
        with pytest.raises(OutOfPages):
            bench.cache.extend(acquired, 2)
        assert draft.available == free
    window.release(outside)
    bench.cache.extend(acquired, 2)
    assert draft.available == free - 2
    bench.check_books()


def test_a_refused_limit_keeps_no_page(text: Text) -> None:
    bench = make(["draft", "window"])
    bench.serve(text(1, 26))
    window, draft = (bench.cache._group.member(name).device.own for name in ("window", "draft"))
    acquired = bench.cache.acquire(text(1, 30))
    outside, free, before = window.alloc(window.available), draft.available, acquired.pages.tolist()
    for _ in range(2):
        with pytest.raises(OutOfPages):
            bench.cache.limit(acquired, 8)
        assert draft.available == free and acquired.pages.tolist() == before and acquired.hit_tokens == 24
    window.release(outside)
    bench.cache.limit(acquired, 8)
    bench.cache.finish(acquired, bench.run(acquired))
    bench.check_books()


def test_after_a_refused_limit_the_deeper_hit_is_still_loaded_whole(text: Text) -> None:
    bench = make(["draft", "window"])
    bench.serve(text(1, 26))
    bench.cache.drain()
    bench.cache.evict(12)
    window = bench.cache._group.member("window").device.own
    acquired = bench.cache.acquire(text(1, 26))
    assert acquired.host_hit_tokens == 24
    outside = window.alloc(window.available)
    with pytest.raises(OutOfPages):
        bench.cache.limit(acquired, acquired.restorable(20))
    window.release(outside)
    bench.cache.finish(acquired, bench.run(acquired))
    bench.check_books()


def test_a_lower_hit_computes_into_the_pages_that_were_ready_for_the_deeper_one(text: Text) -> None:
    bench = make(["draft"], own=5, own_host=12)
    bench.serve(text(1, 17))
    bench.cache.drain()
    bench.cache.evict(12)
    acquired = bench.cache.acquire(text(1, 17))
    draft = bench.cache._group.member("draft").device.own
    assert acquired.host_hit_tokens == 16 and draft.available == 0, "the request takes the whole pool of drafts"
    bench.cache.limit(acquired, 8)
    bench.cache.finish(acquired, bench.run(acquired))
    bench.check_books()
    assert bench.serve(text(1, 17)) == (16, 0)


def test_a_refused_limit_keeps_ready_what_the_deeper_hit_fills(text: Text) -> None:
    bench = make(["draft", "window"], own=12)
    bench.serve(text(1, 26))
    bench.cache.drain()
    bench.cache.evict(12)
    acquired = bench.cache.acquire(text(1, 26))
    draft, window = (bench.cache._group.member(name).device.own for name in ("draft", "window"))
    outside, free = window.alloc(window.available), draft.available
    for _ in range(2):
        with pytest.raises(OutOfPages):
            bench.cache.limit(acquired, acquired.restorable(8))
        assert draft.available == free and acquired.hit_tokens == 24
    window.release(outside)
    bench.cache.finish(acquired, bench.run(acquired))
    bench.check_books()
    bench.cache.evict(12)
    assert (draft.available, window.available) == (12, 12)


def test_pages_that_somebody_else_uses_are_counted_and_poisoned_when_he_ends(text: Text) -> None:
    bench = make(["draft"])
    acquired = bench.cache.acquire(text(1, 26))
    bench.run(acquired)
    draft = bench.cache._group.member("draft").device.own
    uses = [bench.allocator.in_use(acquired.pages), draft.in_use(acquired.companion_pages("draft"))]
    pages = set(acquired.pages.tolist())
    bench.cache.finish(acquired, text(1, 26))
    bench.cache.evict(12)
    for name in (None, "draft"):
        books = bench.cache.accounting(name)
        assert (books.available, books.in_use, books.total) == (5, 7, 12)
    for use in uses:
        use.end()
    assert bench.cache.accounting().available == bench.cache.accounting("draft").available == 12
    bench.check_poison(pages)
    bench.check_books()


@pytest.mark.parametrize("kinds", [[], ALL])
def test_an_ended_handle_waits_for_nothing(text: Text, kinds: list[str]) -> None:
    streams = Held()
    bench = make(kinds, streams=streams)
    for name in (1, 2):
        bench.serve(text(name, 10))
    bench.cache.drain()
    bench.cache.evict(12)
    streams.go = False
    first, second = (bench.cache.acquire(text(name, 10)) for name in (1, 2))
    for acquired in (first, second):
        bench.cache.load(acquired)
    bench.cache.abort(second)
    with pytest.raises(CacheError, match="aborted"):
        second.wait_layer(0)
    streams.go = True
    bench.cache.finish(first, bench.run(first))
    with pytest.raises(CacheError, match="finished"):
        first.wait_layer(0)
    bench.cache.drain()
    bench.check_books()


@pytest.mark.parametrize("kinds", [[], ALL])
def test_an_unknown_layer_is_refused_when_nothing_is_under_way_too(text: Text, kinds: list[str]) -> None:
    bench = make(kinds)
    acquired = bench.cache.acquire(text(1, 9))
    bench.cache.load(acquired)
    with pytest.raises(UnknownLayer, match="999"):
        acquired.wait_layer(999)


def held_load(text: Text, kind: str, tokens: int) -> tuple[GroupBench, Held, Acquired]:
    """A prompt of which a companion's pages have to come from the host, and whose load is held back."""
    streams = Held()
    bench = make([kind], streams=streams)
    bench.serve(text(1, 26))
    bench.cache.drain()
    bench.cache.evict(12, kind)
    streams.go = False
    return bench, streams, bench.cache.acquire(text(1, tokens))


@pytest.mark.parametrize(("kind", "layer"), [("draft", 30), ("window", 10), ("states", 20)])
def test_a_load_of_a_companion_that_fails_late_is_told_and_found_by_nobody(text: Text, kind: str, layer: int) -> None:
    bench, streams, acquired = held_load(text, kind, 26)
    bench.cache.load(acquired)
    follower = bench.cache.acquire(text(1, 26))
    streams.go = streams.broken = True
    with pytest.raises(RuntimeError, match="device has failed"):
        bench.cache.poll()
    with pytest.raises(RuntimeError, match="device has failed"):
        acquired.wait_layer(layer)
    with pytest.raises(CacheError, match="load has failed"):
        bench.cache.finish(acquired, text(1, 26))
    streams.broken = False
    if kind == "states":  # each request fills a row of its own
        bench.cache.finish(follower, bench.run(follower))
    else:
        with pytest.raises(RuntimeError, match="device has failed"):
            bench.cache.load(follower)
        bench.cache.abort(follower)
    bench.cache.abort(acquired)
    assert bench.serve(text(1, 26)) == (24, 0)
    bench.cache.drain()
    bench.check_books()


def number_calls(bench: GroupBench, acquired: Acquired, value: Any) -> list[Callable[[], object]]:
    cache = bench.cache
    return [
        lambda: cache.limit(acquired, value),
        lambda: cache.extend(acquired, value),
        lambda: cache.evict(value),
        lambda: cache.evict(value, "window"),
        lambda: cache.acquire([1, 2], reach=value),
    ]


@pytest.mark.parametrize("value", [-1, 4.0, "4", True, float("nan"), np.float64(4), [4]])
def test_what_is_no_number_is_refused_by_name_and_changes_nothing(text: Text, value: Any) -> None:
    bench = make(ALL)
    bench.serve(text(1, 26))
    acquired = bench.cache.acquire(text(1, 26))
    loaded = bench.cache.acquire(text(1, 26))
    bench.cache.load(loaded)
    calls = number_calls(bench, acquired, value)
    calls += [lambda: bench.cache.snapshot(loaded, value), lambda: bench.cache.advance(loaded, value)]
    calls += [lambda: bench.cache.advance(loaded, 8, reach=value)]
    before = [bench.cache.accounting(name) for name in (None, *ALL)]
    for call in calls:
        with pytest.raises(KvPoolError, match=r"hit_tokens|count|pages|reach|tokens|computed"):
            call()
    assert before == [bench.cache.accounting(name) for name in (None, *ALL)]
    bench.cache.limit(acquired, np.int8(20))
    bench.cache.extend(acquired, np.uint64(1))
    for handle in (acquired, loaded):
        bench.cache.finish(handle, bench.run(handle))
    bench.check_books()


@pytest.mark.parametrize("field", ["batch_pages", "layers_ahead"])
@pytest.mark.parametrize("value", [0, 1.5, "8", True, float("nan")])
def test_limits_are_whole_numbers(field: str, value: Any) -> None:
    with pytest.raises(HostPoolError, match=f"limits.{field}"):
        CopyLimits(**{field: value})


def test_a_prompt_that_can_never_fit_empties_nothing(text: Text) -> None:
    bench = make(ALL)
    bench.serve(text(1, 26))
    acquired = bench.cache.acquire(text(2, 9))
    for call in (lambda: bench.cache.acquire(text(3, 200)), lambda: bench.cache.extend(acquired, 10**30)):
        with pytest.raises(OutOfPages):
            call()
    bench.cache.abort(acquired)
    assert bench.serve(text(1, 26)) == (24, 0)
    assert bench.cache.evict(10**30) == 6


def test_ragged_tokens_are_refused_by_name() -> None:
    with pytest.raises(CacheError, match=r"tokens.*1-D integer"):
        make([]).cache.acquire([[1], [2, 3]])  # type: ignore[list-item]


def test_a_map_names_no_page_twice() -> None:
    lead, own = PageAllocator(8, 4), PageAllocator(8, 4)
    pages = PageMap(lead, own)
    first, second = lead.alloc(3), own.alloc(3)
    for given, mine in ((first, second[:1]), (first[:1], second), (first[[0, 0]], second[:2])):
        with pytest.raises(ForeignPage, match="pages, own_pages"):
            pages.give(given, mine)
    pages.give(first[:2], second[:2])
    for source, target in ((first[:2], first[[2, 2]]), (first[:2], first[2:]), ([-1], first[2:])):
        with pytest.raises(ForeignPage):
            pages.pass_on(source, target)  # type: ignore[arg-type]
    assert pages.find(first).tolist() == [*second[:2].tolist(), 0]
    pages.verify()


def test_companions_share_neither_pages_nor_host_memory() -> None:
    bench = GroupBench(["draft"])
    [draft] = bench.cache.companions
    other = Companion.every_page("other", draft.pages, draft.host)
    parts = (bench.pool, bench.allocator, bench.host, bench.index)
    with pytest.raises(HostPoolError, match="allocators of cache and companions"):
        HiCacheController(*parts, companions=[draft, other])
    wrong: list[tuple[Any, Any, Any]] = [("x", "every", None), ("x", "every_page", 1), ("x", "snapshots", None)]
    wrong += [("x", "last_pages", 0), (5, "every_page", None)]
    for name, coverage, trailing in wrong:
        with pytest.raises(HostPoolError):
            Companion(name, coverage, trailing, draft.pages, [draft.host])
