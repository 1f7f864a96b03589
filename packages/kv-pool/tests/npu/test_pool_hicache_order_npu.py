"""Owns the proof that every wait of the cache is needed: without any one of them the emulator finds a race, every time.

Nothing is held back here and no bytes are compared: streams run in issue order, so a missing wait changes no result. It
is the order itself that is checked, so it does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ascend_emulator
import pytest
import torch_npu
from kv_pool.hicache import CopyLimits, HostLayout, Lane, MoverName, Streams, UnderWay

NPU = "npu:0"
MOVERS: list[tuple[MoverName, HostLayout]] = [("dim_exchange", "page_first_direct"), ("indexed", "layer_first")]
TIMES = 5
Text = Callable[[int, int], list[int]]
MakeCache = Callable[..., Any]
HeldBack = Callable[[], AbstractContextManager[None]]
SMALL = CopyLimits(batch_pages=2, layers_ahead=1)

each_mover = pytest.mark.parametrize(("mover", "host_layout"), MOVERS)
each_limit = pytest.mark.parametrize("limits", [CopyLimits(), SMALL], ids=["large", "small"])


@pytest.fixture
def make_bench(
    make_cache: MakeCache,
    without_wait: Callable[[Lane], Streams],
    mover: MoverName,
    host_layout: HostLayout,
    limits: CopyLimits,
) -> Callable[[Lane | None], Any]:
    """A cache of which one lane never waits, or none."""

    def make(deaf: Lane | None) -> Any:
        streams = None if deaf is None else without_wait(deaf)
        bench = make_cache(NPU, mover=mover, host_layout=host_layout, streams=streams, limits=limits)
        torch_npu.npu.synchronize()
        return bench

    return make


def computed_then_backed_up(bench: Any, text: Text, name: int) -> None:
    """K and V of a prompt are computed; handing it in starts the backup."""
    acquired = bench.cache.acquire(text(name, 13))
    for page in acquired.pages.tolist():
        bench.pool.key_storage[:, page].fill_(name)
    bench.cache.finish(acquired, text(name, 12))
    bench.cache.drain()


def read_then_loaded_over(bench: Any, text: Text, name: int) -> None:
    """A request reads its pages and gives them back; a load puts another prompt into the same pages."""
    reader = bench.cache.acquire(text(100 + name, 13))
    for page in reader.pages.tolist():
        bench.pool.key(0)[page].fill_(0)
    torch_npu.npu.synchronize()
    for page in reader.pages.tolist():
        bench.pool.key(0)[page].clone()
    bench.cache.abort(reader)
    acquired = bench.cache.acquire(text(1, 13))
    assert acquired.host_hit_tokens and set(reader.pages.tolist()) & set(acquired.pages.tolist())
    try:
        bench.cache.load(acquired)
    finally:
        bench.cache.abort(acquired)
        bench.cache.drain()
        bench.cache.evict(8)


def loaded_then_read(bench: Any, text: Text, name: int) -> None:
    """A prompt comes back from the host; attention reads a layer of it."""
    acquired = bench.cache.acquire(text(1, 13))
    assert acquired.host_hit_tokens
    bench.cache.load(acquired)
    acquired.wait_layer(0)
    try:
        bench.pool.key(0)[int(acquired.pages[0])].clone()
    finally:
        bench.cache.abort(acquired)
        bench.cache.drain()
        bench.cache.evict(8)


# What is done, and whether prompt 1 has to be on the host before.
CASES: dict[Lane, tuple[Callable[[Any, Text, int], None], bool]] = {
    "backup": (computed_then_backed_up, False),
    "load": (read_then_loaded_over, True),
    "compute": (loaded_then_read, True),
}


@each_mover
@each_limit
@pytest.mark.parametrize("lane", CASES)
def test_without_its_wait_a_lane_races_every_time(
    make_bench: Callable[[Lane | None], Any], text: Text, lane: Lane
) -> None:
    work, on_host = CASES[lane]
    found = 0
    for name in range(1, TIMES + 1):
        bench = make_bench(lane)
        if on_host:
            bench.serve(text(1, 13))
            bench.cache.drain()
            bench.cache.evict(8)
            torch_npu.npu.synchronize()
        with pytest.raises(ascend_emulator.RaceError):
            work(bench, text, name)
        found += 1
        torch_npu.npu.synchronize()
    assert found == TIMES


@each_mover
@each_limit
@pytest.mark.parametrize("lane", CASES)
def test_with_all_waits_there_is_no_race(make_bench: Callable[[Lane | None], Any], text: Text, lane: Lane) -> None:
    work, on_host = CASES[lane]
    bench = make_bench(None)
    if on_host:
        bench.serve(text(1, 13))
        bench.cache.drain()
        bench.cache.evict(8)
    for name in range(1, TIMES + 1):
        work(bench, text, name)
    torch_npu.npu.synchronize()
    bench.check_books()


@each_mover
@pytest.mark.parametrize("complete", [True, False])
def test_a_backup_that_was_queued_waits_for_the_compute_that_fills_its_pages(
    make_cache: MakeCache,
    text: Text,
    held_back: HeldBack,
    waits_once: Callable[[Lane], Streams],
    mover: MoverName,
    host_layout: HostLayout,
    complete: bool,
) -> None:
    """It is submitted later, with others, and from whatever stream the owner is on then."""
    streams = None if complete else waits_once("backup")
    bench = make_cache(NPU, mover=mover, host_layout=host_layout, streams=streams)
    torch_npu.npu.synchronize()
    other = torch_npu.npu.Stream()
    with held_back():
        bench.cache.finish(bench.cache.acquire(text(1, 8)), text(1, 8))
        with torch_npu.npu.stream(other):
            for name in (2, 3):
                acquired = bench.cache.acquire(text(name, 8))
                for page in acquired.pages.tolist():
                    bench.pool.key_storage[:, page].fill_(name)
                bench.cache.finish(acquired, text(name, 8))
        assert bench.cache.under_way == UnderWay(queued_backups=4, backups=2)
    with nullcontext() if complete else pytest.raises(ascend_emulator.RaceError):
        bench.cache.drain()
    torch_npu.npu.synchronize()
    if complete:
        assert bench.cache.counters.backed_up_pages == 6 and bench.cache.counters.backup_batches == 2


@each_mover
@pytest.mark.parametrize("complete", [True, False])
def test_a_load_that_was_queued_waits_for_the_last_reader_of_its_pages(
    make_cache: MakeCache,
    text: Text,
    held_back: HeldBack,
    waits_once: Callable[[Lane], Streams],
    mover: MoverName,
    host_layout: HostLayout,
    complete: bool,
) -> None:
    """Also where another load, asked for before the reader came, goes to the mover with it."""
    streams = None if complete else waits_once("load")
    bench = make_cache(NPU, pages=8, mover=mover, host_layout=host_layout, streams=streams)
    cache = bench.cache
    for name in (1, 2, 3):
        bench.serve(text(name, 9))
    cache.drain()
    cache.evict(8)
    other = torch_npu.npu.Stream()
    first, second = (cache.acquire(text(name, 9)) for name in (1, 2))
    reader = cache.acquire(text(4, 8))  # the pages that are left
    for page in reader.pages.tolist():
        bench.pool.key(0)[page].fill_(0)
    torch_npu.npu.synchronize()
    with held_back():
        cache.load(first)
        cache.load(second)
        with torch_npu.npu.stream(other):
            for page in reader.pages.tolist():
                bench.pool.key(0)[page].clone()
            cache.abort(reader)
            third = cache.acquire(text(3, 8))
            cache.load(third)
        assert cache.under_way.queued_loads == 3
    with nullcontext() if complete else pytest.raises(ascend_emulator.RaceError):
        second.wait_layer(0)
        cache.drain()
    torch_npu.npu.synchronize()
    if complete:
        assert cache.counters.loaded_pages == 5 and cache.counters.load_batches == 2


def test_pages_of_a_stopped_load_are_reused_after_what_was_submitted(
    make_cache: MakeCache, text: Text, held_back: HeldBack
) -> None:
    bench = make_cache(NPU, pages=4, mover="indexed", host_layout="layer_first", limits=SMALL)
    cache = bench.cache
    bench.serve(text(1, 13))
    cache.drain()
    cache.evict(4)
    acquired = cache.acquire(text(1, 13))
    pages = acquired.pages.tolist()
    with held_back():
        cache.load(acquired)
        cache.abort(acquired)
        cache.poll()
        assert not bench.allocator.holders(pages).any() and bench.allocator.lingering == 3
        assert cache.counters.cancelled_load_pages == 3
    again = cache.acquire(text(2, 16))  # waits for them
    assert sorted(again.pages.tolist()) == sorted(pages)
    for page in again.pages.tolist():
        bench.pool.key_storage[:, page].fill_(1)
    torch_npu.npu.synchronize()
    assert cache.counters.loaded_pages == 0 and bool((bench.pool.key_storage[:, 1:] == 1).all())
    cache.abort(again)
    cache.drain()
    bench.check_books()
