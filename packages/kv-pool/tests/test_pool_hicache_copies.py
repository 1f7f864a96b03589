"""Owns the proof of the queues between device and host: what is merged, bounded, and given up (on a CPU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kv_pool import CacheError, DoubleFree, HostPoolError
from kv_pool.hicache import CopyLimits, ImmediateStreams, Lane, Mark, UnderWay, create_mover
from kv_pool.hicache.streams import issue

Text = Callable[[int, int], list[int]]
MakeCache = Callable[..., Any]


class Gate:
    """A mark that is reached when the test says so, or when somebody waits."""

    def __init__(self) -> None:
        self.open = self.broken = False

    def reached(self) -> bool:
        return self.open

    def wait_on_host(self) -> None:
        self.open = True
        if self.broken:
            raise OSError("device")


class GatedStreams(ImmediateStreams):
    """Lanes whose copies are under way until the test lets them end."""

    def __init__(self) -> None:
        self.gates: dict[Lane, list[Gate]] = {"load": [], "backup": [], "compute": []}
        self.waits: list[tuple[Lane, Mark]] = []

    def mark(self, lane: Lane) -> Mark:
        self.gates[lane].append(Gate())
        return self.gates[lane][-1]

    def wait(self, lane: Lane, mark: Mark) -> None:
        self.waits.append((lane, mark))

    def let_go(self, lane: Lane) -> None:
        for gate in self.gates[lane]:
            gate.open = True


class Recorder:
    """A real mover, and what it was asked for."""

    def __init__(self, inner: Any) -> None:
        self.name, self.capabilities, self.inner = inner.name, inner.capabilities, inner
        self.calls: list[tuple[str, int | None, list[int]]] = []
        self.fail: tuple[str, int | None] | None = None

    def backup(self, device_pages: Any, host_pages: Any) -> None:
        self.calls.append(("backup", None, device_pages.tolist()))
        if self.fail == ("backup", None):
            raise OSError("backup")
        self.inner.backup(device_pages, host_pages)

    def load(self, device_pages: Any, host_pages: Any, layer_id: int | None = None) -> None:
        self.calls.append(("load", layer_id, device_pages.tolist()))
        if self.fail == ("load", layer_id):
            raise OSError("load")
        self.inner.load(device_pages, host_pages, layer_id)

    def taken(self, what: str) -> list[tuple[int | None, int]]:
        """Layer and number of pages of each call of one kind, and forget them."""
        found = [(layer, len(pages)) for kind, layer, pages in self.calls if kind == what]
        self.calls = [call for call in self.calls if call[0] != what]
        return found


@pytest.fixture
def make(make_cache: MakeCache) -> Callable[..., Any]:
    """A cache of three layers over gated lanes and a recording mover."""

    def build(batch_pages: int = 1024, layers_ahead: int = 8, **options: Any) -> Any:
        streams = GatedStreams()
        limits = CopyLimits(batch_pages, layers_ahead)
        bench = make_cache(**{"pages": 20, "host_pages": 40, "limits": limits, "streams": streams, **options})
        bench.streams, bench.recorder = streams, Recorder(create_mover("auto", bench.host))
        bench.options["mover"] = bench.recorder
        bench.attach(None)
        return bench

    return build


def test_backups_that_come_while_one_is_under_way_go_together(make: Callable[..., Any], text: Text) -> None:
    bench = make()
    bench.serve(text(1, 9))
    assert bench.recorder.taken("backup") == [(None, 2)]
    for name in (2, 3, 4):
        bench.serve(text(name, 13))
    assert bench.recorder.taken("backup") == [] and bench.cache.under_way == UnderWay(queued_backups=9, backups=2)
    assert bench.index.counts().device.protected == 2 + 9  # nobody takes what waits
    assert bench.cache.counters.backed_up_pages == bench.index.counts().host.held == 0
    bench.streams.let_go("backup")
    bench.cache.poll()
    assert bench.recorder.taken("backup") == [(None, 9)]
    assert bench.cache.counters.backed_up_pages == bench.index.counts().host.held == 2  # the others are on their way
    filled = [mark for lane, mark in bench.streams.waits if lane == "backup"]
    assert len(set(filled)) == 4, "each behind the compute that filled it"
    bench.streams.let_go("backup")
    bench.cache.poll()
    counters = bench.cache.counters
    assert (counters.backed_up_pages, counters.backup_batches, counters.unbacked_pages) == (11, 2, 0)
    assert not bench.cache.pending and bench.index.counts().locks == 0
    bench.cache.evict(20)
    for name, length in ((1, 9), (2, 13), (3, 13), (4, 13)):
        assert bench.serve(text(name, length)) == (0, length - 1)  # checks every byte


def test_a_batch_is_bounded_and_a_larger_backup_is_cut(make: Callable[..., Any], text: Text) -> None:
    bench = make(batch_pages=4)
    bench.serve(text(1, 41))
    assert bench.cache.under_way == UnderWay(queued_backups=6, backups=4)
    bench.serve(text(2, 13))
    seen = []
    while bench.cache.pending:
        seen += bench.recorder.taken("backup")
        bench.streams.let_go("backup")
        bench.cache.poll()
        assert bench.cache.under_way.backups <= 4
        bench.check_books()
    assert [pages for _, pages in seen] == [4, 4, 2, 3]  # 2 and 3 would be one too many
    assert bench.index.counts().host.held == bench.cache.counters.backed_up_pages == 13
    bench.cache.evict(20)
    assert bench.serve(text(1, 41)) == (0, 40)


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("batch_pages", [1, 3])
def test_a_working_set_larger_than_the_device_never_waits_for_ever(
    make: Callable[..., Any], text: Text, policy: Any, batch_pages: int
) -> None:
    """Nothing ends unless somebody waits: eviction has to find what waits in the queue, and its own pages behind it."""
    bench = make(batch_pages=batch_pages, policy=policy, pages=6, host_pages=30)
    for _ in range(3):
        found = [(bench.serve(text(name, 21)), bench.serve(text(name, 21))) for name in range(4)]
    assert found == [((0, 20), (20, 0))] * 4
    bench.cache.drain()
    counters = bench.cache.counters
    assert counters.unbacked_pages == counters.cancelled_backup_pages == 0 and not bench.cache.pending
    assert counters.backup_batches >= 4 * 5 // batch_pages


def test_what_waits_can_be_given_up_and_asked_for_again(make: Callable[..., Any], text: Text) -> None:
    bench = make()
    bench.serve(text(1, 9))
    bench.serve(text(2, 13))
    assert bench.cache.cancel_backups() == 3 == bench.cache.counters.cancelled_backup_pages
    assert bench.cache.under_way == UnderWay(backups=2) and bench.host.allocator.held == 2
    bench.check_books()
    bench.cache.drain()
    assert bench.cache.counters.backed_up_pages == 2 and bench.index.counts().locks == 0
    assert bench.serve(text(2, 13)) == (12, 0)  # it was used again, so its backup is wanted again
    bench.cache.drain()
    assert bench.cache.counters.backed_up_pages == 5
    bench.cache.evict(20)
    assert bench.serve(text(2, 13)) == (0, 12)


def test_the_rest_of_a_cut_backup_is_given_up_and_the_part_under_way_ends(make: Callable[..., Any], text: Text) -> None:
    bench = make(batch_pages=2)
    bench.serve(text(1, 21))
    assert bench.cache.cancel_backups() == 3 and bench.index.counts().device.protected == 5
    bench.cache.drain()
    assert bench.cache.counters.backed_up_pages == bench.host.allocator.held == 2
    assert bench.index.counts().locks == 0
    bench.cache.evict(20)
    assert bench.serve(text(1, 21)) == (0, 8)


def test_a_failed_batch_costs_its_own_pages_and_no_others(make: Callable[..., Any], text: Text) -> None:
    bench = make(batch_pages=6)
    for name in (1, 2, 3, 4):
        bench.serve(text(name, 13))
    assert bench.cache.under_way == UnderWay(queued_backups=9, backups=3)
    bench.recorder.fail = ("backup", None)
    bench.streams.let_go("backup")
    with pytest.raises(OSError, match="backup"):
        bench.cache.poll()  # 2 and 3 together
    assert bench.cache.counters.backed_up_pages == bench.host.allocator.held - 3 == 3
    assert bench.cache.under_way == UnderWay(queued_backups=3)
    bench.recorder.fail = None
    bench.cache.poll()
    bench.streams.gates["backup"][-1].broken = True
    with pytest.raises(OSError, match="device"):
        bench.cache.drain()  # 4 by itself, and the device says later that it went wrong
    assert bench.cache.counters.backed_up_pages == bench.host.allocator.held == bench.index.counts().host.held == 3
    assert not bench.cache.pending and bench.index.counts().locks == 0
    bench.check_books()


def on_the_host(bench: Any, texts: list[list[int]]) -> None:
    """Prompts that were served, and have left the device."""
    for one in texts:
        bench.serve(one)
    bench.cache.drain()
    bench.cache.evict(20)
    bench.recorder.calls.clear()


def test_loads_that_come_while_one_is_under_way_go_together(make: Callable[..., Any], text: Text) -> None:
    bench = make(layers_ahead=1)
    texts = [text(name, 13) for name in (1, 2, 3)]
    on_the_host(bench, texts)
    running = [bench.cache.acquire(one) for one in texts]
    for acquired in running:
        bench.cache.load(acquired)
    assert bench.recorder.taken("load") == [(0, 3)] and bench.cache.under_way == UnderWay(queued_loads=6, loads=3)
    running[0].wait_layer(0)
    assert bench.recorder.taken("load") == [(1, 3)]  # one ahead of compute
    running[2].wait_layer(0)
    assert bench.recorder.taken("load") == [(0, 6), (1, 6)] and bench.cache.under_way == UnderWay(loads=9)
    for acquired, one in zip(running, texts, strict=True):
        bench.cache.finish(acquired, bench.run(acquired, one))  # checks every byte
    assert sorted(bench.recorder.taken("load")) == [(2, 3), (2, 6)]
    bench.cache.drain()
    assert (bench.cache.counters.loaded_pages, bench.cache.counters.load_batches) == (9, 2)


def test_layers_follow_without_anybody_waiting(make: Callable[..., Any], text: Text) -> None:
    bench = make(layers_ahead=1)
    on_the_host(bench, [text(1, 13)])
    acquired = bench.cache.acquire(text(1, 13))
    bench.cache.load(acquired)
    for layer in (1, 2):
        bench.cache.poll()
        assert bench.recorder.calls[-1][1] == layer - 1  # the lane is busy
        bench.streams.let_go("load")
        bench.cache.poll()
        assert bench.recorder.calls[-1][1] == layer
    bench.streams.let_go("load")
    bench.cache.poll()
    assert not bench.cache.pending and bench.cache.counters.loaded_pages == 3
    bench.cache.finish(acquired, bench.run(acquired))


def test_an_abort_stops_its_load(make: Callable[..., Any], text: Text) -> None:
    """The layers that are left are not moved; pages are free when the others have ended; nothing counts as loaded."""
    bench = make(layers_ahead=1)
    on_the_host(bench, [text(1, 13)])
    acquired = bench.cache.acquire(text(1, 13))
    pages = acquired.pages[:3].tolist()
    bench.cache.load(acquired)
    acquired.wait_layer(0)
    assert bench.recorder.taken("load") == [(0, 3), (1, 3)]
    bench.cache.abort(acquired)
    bench.check_books()
    assert bench.allocator.lingering == bench.cache.accounting().in_use == 3  # nobody holds them, they are written yet
    with pytest.raises(DoubleFree, match=str(sorted(pages)[0])):
        bench.allocator.release(pages)
    others = bench.allocator.alloc(bench.allocator.available)
    assert not {*others.tolist()} & {*pages}
    bench.allocator.release(others)
    assert bench.index.counts().device.held == 0 and bench.index.counts().host.protected == 3
    bench.streams.let_go("load")
    bench.cache.poll()
    assert bench.allocator.held == 0 and bench.index.counts().locks == 0 and not bench.cache.pending
    bench.check_poison(set(pages))
    counters = bench.cache.counters
    assert (counters.loaded_pages, counters.cancelled_load_pages) == (0, 3) and bench.recorder.calls == []
    assert bench.serve(text(1, 13)) == (0, 12)


def test_a_load_that_waits_is_stopped_at_once_and_one_of_a_batch_alone(make: Callable[..., Any], text: Text) -> None:
    bench = make(layers_ahead=1)
    texts = [text(name, 13) for name in (1, 2, 3, 4)]
    on_the_host(bench, texts)
    first, second, third, fourth = running = [bench.cache.acquire(one) for one in texts]
    for acquired in running:
        bench.cache.load(acquired)
    bench.cache.abort(second)
    assert bench.cache.under_way == UnderWay(queued_loads=6, loads=3)
    assert bench.cache.accounting().in_use == 3, "the last pages of three prompts"
    third.wait_layer(0)
    assert bench.recorder.taken("load") == [(0, 3), (0, 6), (1, 6)]
    bench.cache.abort(third)
    for acquired, one in ((first, texts[0]), (fourth, texts[3])):
        bench.cache.finish(acquired, bench.run(acquired, one))
    assert bench.recorder.taken("load") == [(1, 3), (2, 3), (2, 3)]
    bench.cache.drain()
    bench.check_books()
    assert (bench.cache.counters.loaded_pages, bench.cache.counters.cancelled_load_pages) == (6, 6)
    assert [bench.serve(one) for one in texts] == [(12, 0), (0, 12), (0, 12), (12, 0)]


def test_a_load_that_somebody_else_needs_goes_on(make: Callable[..., Any], text: Text) -> None:
    bench = make(layers_ahead=1)
    on_the_host(bench, [text(1, 13)])
    first = bench.cache.acquire(text(1, 13))
    bench.cache.load(first)
    other = bench.cache.acquire(text(1, 21))  # finds the pages that are under way
    assert other.device_hit_tokens == 12
    bench.cache.abort(first)
    bench.cache.finish(other, bench.run(other))
    bench.cache.drain()
    assert bench.cache.counters.loaded_pages == 3 and bench.cache.counters.cancelled_load_pages == 0

    bench.cache.evict(20)
    first = bench.cache.acquire(text(1, 13))
    bench.cache.load(first)
    other = bench.cache.acquire(text(1, 21))
    bench.cache.load(other)
    bench.cache.finish(other, text(1, 21))  # without a look at its pages: they are built on, and stay
    bench.cache.abort(first)
    assert bench.cache.counters.cancelled_load_pages == 0
    bench.cache.drain()
    assert bench.serve(text(1, 21)) == (20, 0)


def test_a_load_that_fails_later_is_heard_of_by_all_who_wait(make: Callable[..., Any], text: Text) -> None:
    bench = make(layers_ahead=1)
    on_the_host(bench, [text(1, 13)])
    first = bench.cache.acquire(text(1, 13))
    bench.cache.load(first)
    second = bench.cache.acquire(text(1, 13))
    bench.recorder.fail = ("load", 1)
    with pytest.raises(OSError, match="load"):
        first.wait_layer(0)
    bench.check_books()
    with pytest.raises(OSError, match="load"):
        second.wait_layer(0)
    assert bench.index.counts().device.held == 0, "nobody finds it"
    assert (bench.allocator.holders(first.pages[:3]) == 2).all(), "who has the pages keeps them"
    for acquired in (first, second):
        with pytest.raises(CacheError, match="a load has failed"):
            bench.cache.finish(acquired, acquired.tokens)
        bench.cache.abort(acquired)
        bench.check_books()
    assert bench.allocator.held == 0 and bench.index.counts().locks == 0 and not bench.cache.pending
    bench.recorder.fail = None
    assert bench.cache.counters.loaded_pages == 0 and bench.serve(text(1, 13)) == (0, 12)


def test_what_the_device_says_later_of_a_load_counts_too(make: Callable[..., Any], text: Text) -> None:
    bench = make()
    on_the_host(bench, [text(1, 13), text(2, 13)])
    first, second = (bench.cache.acquire(text(name, 13)) for name in (1, 2))
    bench.cache.load(first)
    bench.cache.load(second)
    bench.streams.gates["load"][-1].broken = True
    with pytest.raises(OSError, match="device"):
        bench.cache.drain()
    bench.cache.drain()
    assert bench.cache.counters.loaded_pages == 3  # the other one
    with pytest.raises(OSError, match="device"):
        first.wait_layer(2)
    bench.cache.abort(first)
    bench.cache.finish(second, bench.run(second))
    bench.check_books()
    assert bench.serve(text(1, 13)) == (0, 12)


@pytest.mark.parametrize("limits", [{"batch_pages": 0}, {"layers_ahead": 0}])
def test_limits_of_nothing_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(HostPoolError, match=next(iter(limits))):
        CopyLimits(**limits)


@pytest.mark.parametrize("lane", ["load", "backup"])
def test_nothing_of_work_that_fails_is_under_way_when_its_error_is_seen(lane: Lane) -> None:
    streams = GatedStreams()

    def half() -> None:
        raise OSError("half of it was issued")

    with pytest.raises(OSError, match="half of it was issued"):
        issue(streams, lane, [], half)
    assert [gate.open for gate in streams.gates[lane]] == [True]
