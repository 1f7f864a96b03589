"""Owns the proof of the copies of companions that wait: merged, bounded, given up, failed (on a CPU)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_pool import CacheError
from kv_pool.hicache import CopyLimits, UnderWay

sys.path.insert(0, str(Path(__file__).parent))

from pool_group import GroupBench, PageByPage
from test_pool_hicache_copies import GatedStreams

Text = Callable[[int, int], list[int]]


class Sizes:
    """A real mover, and how many pages each backup, and each load of a layer, was asked for."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.capabilities = inner, inner.capabilities
        self.taken: list[int] = []
        self.loaded: list[tuple[int | None, int]] = []
        self.broken: bool | int = False

    def backup(self, device_pages: Any, host_pages: Any) -> None:
        if self.broken is True:
            raise OSError("backup")
        self.taken.append(len(device_pages))
        self.inner.backup(device_pages, host_pages)

    def load(self, device_pages: Any, host_pages: Any, layer_id: int | None = None) -> None:
        if self.broken is not False and self.broken == layer_id:
            raise OSError("load")
        self.loaded.append((layer_id, len(device_pages)))
        self.inner.load(device_pages, host_pages, layer_id)

    def asked(self) -> list[tuple[int | None, int]]:
        """Layer and number of pages of each load, and forget them."""
        found, self.loaded = self.loaded, []
        return found


def make(batch_pages: int = 1024, *, kind: str = "draft", layers_ahead: int = 1) -> tuple[GroupBench, Any, Sizes]:
    """A cache with one companion over gated lanes; the companion at work, and its (first) mover."""
    streams = GatedStreams()
    limits = CopyLimits(batch_pages, layers_ahead)
    bench = GroupBench([kind], pages=16, host_pages=24, streams=streams, limits=limits)
    bench.random = PageByPage()  # type: ignore[assignment]
    member: Any = bench.cache._group.member(kind)
    sizes = Sizes(member.mover.movers[0])
    member.mover.movers[0] = sizes
    return bench, member, sizes


def on_host(bench: GroupBench, member: Any, tokens: list[int]) -> int:
    """Pages of a text that the companion has on the host."""
    host_pages = bench.index.match(np.array(tokens)).host_pages
    return int((member.on_host(host_pages) > 0).sum())


def test_backups_that_wait_go_together(text: Text) -> None:
    bench, member, sizes = make(4)
    for name, length in ((1, 13), (2, 13), (3, 5)):
        bench.serve(text(name, length))
    assert sizes.taken == [3] and member.under_way == UnderWay(4, 3)
    assert bench.cache.under_way == UnderWay(queued_backups=8, backups=6)
    bench.cache.drain()
    assert sizes.taken == [3, 4] and not bench.cache.pending and bench.index.counts().locks == 0
    bench.cache.evict(16)
    for name, length in ((1, 13), (2, 13), (3, 5)):
        assert bench.serve(text(name, length)) == (0, length - 1)  # checks every byte


def test_a_larger_backup_is_cut_and_the_rest_is_submitted_when_that_has_ended(text: Text) -> None:
    bench, member, sizes = make(2)
    bench.serve(text(1, 21))
    assert sizes.taken == [2] and member.under_way == UnderWay(3, 2)
    streams: Any = bench.options["streams"]
    for expected in ([2, 2], [2, 2, 1]):
        streams.let_go("backup")
        bench.cache.poll()
        assert sizes.taken == expected
    bench.cache.drain()
    assert on_host(bench, member, text(1, 21)) == 5 and bench.cache.counters.companion_backed_up_pages == 5


def test_what_waits_is_given_up_and_asked_for_again(text: Text) -> None:
    bench, member, sizes = make(2)
    bench.serve(text(1, 21))
    assert bench.cache.cancel_backups() == 3 + 3
    assert member.under_way == UnderWay(0, 2)
    bench.cache.drain()
    assert on_host(bench, member, text(1, 21)) == 2 and bench.index.counts().locks == 0
    assert bench.cache.accounting("draft").protected == 0
    bench.serve(text(1, 21))
    bench.cache.drain()
    assert on_host(bench, member, text(1, 21)) == 5 and sizes.taken == [2, 2, 1]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_failed_submission_keeps_nothing(text: Text, at_once: bool) -> None:
    bench, member, sizes = make(2)
    sizes.broken = at_once
    if at_once:
        with pytest.raises(OSError, match="backup"):
            bench.serve(text(1, 21))
    else:
        bench.serve(text(1, 21))
        sizes.broken = True
        with pytest.raises(OSError, match="backup"):
            bench.cache.drain()
    sizes.broken = False
    bench.cache.drain()
    assert not bench.cache.pending and bench.index.counts().locks == 0
    account = bench.cache.accounting("draft")
    assert (account.protected, account.in_use) == (0, 0)
    member.host.verify()
    member.device.verify()
    bench.serve(text(1, 21))
    bench.cache.drain()
    assert on_host(bench, member, text(1, 21)) == 5


def on_the_host(bench: GroupBench, sizes: Sizes, *texts: list[int]) -> None:
    """Prompts that were served, and have left the device, in all pools."""
    for one in texts:
        bench.serve(one)
    bench.cache.drain()
    bench.cache.evict(16)
    sizes.loaded.clear()


@pytest.mark.parametrize(("kind", "layers", "pages"), [("window", (10, 11), 2), ("states", (20, 21, 22), 1)])
def test_layers_of_a_load_are_submitted_ahead_of_compute(
    text: Text, kind: str, layers: tuple[int, ...], pages: int
) -> None:
    bench, member, sizes = make(kind=kind)
    on_the_host(bench, sizes, text(1, 13))
    acquired = bench.cache.acquire(text(1, 13))
    bench.cache.load(acquired)
    assert sizes.asked() == [(layers[0], pages)], "one layer ahead of compute"
    assert bench.cache.under_way == UnderWay(loads=3 + pages) and member.under_way == UnderWay(loads=pages)
    acquired.wait_layer(layers[0])
    assert sizes.asked() == [(layers[1], pages)]
    bench.cache.finish(acquired, bench.run(acquired))  # checks every byte
    assert sizes.asked() == [(layer, pages) for layer in layers[2:]]
    bench.cache.drain()
    assert bench.cache.counters.companion_loaded_pages == pages and not bench.cache.pending
    bench.check_books()


def test_loads_that_come_while_one_is_under_way_go_together(text: Text) -> None:
    bench, member, sizes = make(4, kind="window")
    texts = [text(name, 13) for name in range(1, 5)]
    on_the_host(bench, sizes, *texts)
    running = [bench.cache.acquire(one) for one in texts]
    for acquired in running:
        bench.cache.load(acquired)
    assert sizes.asked() == [(10, 2)] and member.under_way == UnderWay(queued_loads=6, loads=2)
    running[2].wait_layer(10)
    assert sizes.asked() == [(10, 4), (11, 4)], "two together, as many as the limit allows"
    for acquired in running:
        bench.cache.finish(acquired, bench.run(acquired))
    assert sizes.asked() == [(11, 2), (10, 2), (11, 2)]
    bench.cache.drain()
    assert bench.cache.counters.companion_loaded_pages == 8
    bench.check_books()


@pytest.mark.parametrize("kind", ["window", "states"])
def test_an_abort_stops_the_load_of_a_companion(text: Text, kind: str) -> None:
    """What was not submitted is not moved; the pages are free when the rest has ended, and nothing counts."""
    bench, member, sizes = make(kind=kind)
    on_the_host(bench, sizes, text(1, 13), text(2, 13))
    first, waiting = (bench.cache.acquire(text(name, 13)) for name in (1, 2))
    bench.cache.load(first)
    bench.cache.load(waiting)
    pages = 2 if kind == "window" else 1
    assert member.under_way == UnderWay(queued_loads=pages, loads=pages) and len(sizes.asked()) == 1
    bench.cache.abort(waiting)
    assert member.under_way == UnderWay(loads=pages)
    bench.cache.abort(first)
    bench.check_books()
    account = bench.cache.accounting(kind)
    assert (account.in_use, account.protected) == (pages, 0), "they are written yet"
    assert member.device.named().size == 0 and member.device.evict(16) == 0
    streams: Any = bench.options["streams"]
    streams.let_go("load")
    bench.cache.poll()
    assert sizes.asked() == [] and not bench.cache.pending and bench.index.counts().locks == 0
    assert bench.cache.counters.companion_loaded_pages == 0
    assert member.counts["cancelled_load_pages"] == 2 * pages and member.device.own.held == 0
    bench.check_books()  # what was freed is poison
    assert [bench.serve(text(name, 13)) for name in (1, 2)] == [(0, 12)] * 2


def test_a_load_of_a_companion_that_somebody_else_reads_goes_on(text: Text) -> None:
    bench, member, sizes = make(kind="window")
    on_the_host(bench, sizes, text(1, 13))
    first = bench.cache.acquire(text(1, 13))
    bench.cache.load(first)
    other = bench.cache.acquire(text(1, 13))  # finds the pages that are under way
    bench.cache.abort(first)
    assert member.counts["cancelled_load_pages"] == 0
    bench.cache.finish(other, bench.run(other))
    assert sizes.asked() == [(10, 2), (11, 2)] and bench.cache.counters.companion_loaded_pages == 0
    bench.cache.drain()
    assert bench.cache.counters.companion_loaded_pages == 2


def test_a_lower_hit_over_what_another_request_loads_is_read_too(text: Text) -> None:
    """Found before the other's load, lowered while it is under way: the other's abort must not take the pages away."""
    bench, member, sizes = make(kind="window")
    bench.serve(text(1, 17))
    bench.cache.drain()
    assert bench.cache.evict(16, "window") == 4
    other, first = (bench.cache.acquire(text(1, length)) for length in (17, 13))
    bench.cache.load(first)  # window pages 1 and 2 of pages that both have found on the device
    bench.cache.limit(other, 12)
    bench.cache.abort(first)
    assert member.counts["cancelled_load_pages"] == 0
    bench.cache.finish(other, bench.run(other))  # checks every byte
    bench.cache.drain()
    bench.check_books()
    assert sizes.asked() == [(10, 2), (11, 2)]


def test_a_layer_that_fails_later_is_heard_of_by_all_who_read_it(text: Text) -> None:
    bench, member, sizes = make(kind="window")
    on_the_host(bench, sizes, text(1, 13))
    first = bench.cache.acquire(text(1, 13))
    bench.cache.load(first)
    second = bench.cache.acquire(text(1, 13))
    sizes.broken = 11
    for handle in (first, second):
        with pytest.raises(OSError, match="load"):
            handle.wait_layer(10)
    sizes.broken = False
    assert not member.device.find(first.pages[:3]).any(), "nobody finds it"
    for handle in (first, second):
        with pytest.raises(CacheError, match="a load has failed"):
            bench.cache.finish(handle, handle.tokens)
        bench.cache.abort(handle)
        bench.check_books()
    bench.cache.drain()
    assert member.device.own.held == 0 and bench.index.counts().locks == 0
    assert bench.serve(text(1, 13)) == (0, 12)
