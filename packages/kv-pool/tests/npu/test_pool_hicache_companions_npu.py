"""Owns the proof of a cache over several pools on an NPU: bytes, and that every wait of its companions is needed.

As in test_pool_hicache_order_npu.py no bytes are compared where an order is proved: without any one wait the emulator
finds the race, every time; with all of them none. States and windows are looked at alone: nothing else is touched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import ascend_emulator
import pytest
import torch
import torch_npu
from kv_pool.hicache import (
    Companion,
    CopyLimits,
    HostLayout,
    Lane,
    Mirror,
    MoverName,
    Streams,
    UnderWay,
    WritePolicy,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

import pool_soak
from pool_group import GroupBench, PageByPage

NPU = "npu:0"
MOVERS: list[tuple[MoverName, HostLayout]] = [("dim_exchange", "page_first_direct"), ("indexed", "layer_first")]
KINDS = ["window", "draft", "states"]
LAST, LEVELS = "heads and draft, window and states", ("two levels", "three levels")
TIMES = 3
Text = Callable[[int, int], list[int]]
HeldBack = Callable[[], AbstractContextManager[None]]
each_mover = pytest.mark.parametrize(("mover", "host_layout"), MOVERS)
each_kind = pytest.mark.parametrize("kind", KINDS)


def make(kinds: list[str], mover: MoverName, host_layout: HostLayout, **options: Any) -> GroupBench:
    bench = GroupBench(kinds, device=NPU, mover=mover, host_layout=host_layout, **options)
    bench.random = PageByPage()  # type: ignore[assignment]
    torch_npu.npu.synchronize()
    return bench


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@each_mover
def test_all_pools_come_back_bit_for_bit(
    text: Text, mover: MoverName, host_layout: HostLayout, policy: WritePolicy
) -> None:
    bench = make(KINDS, mover, host_layout, policy=policy)
    bench.serve(text(1, 17))
    bench.serve(text(1, 17))
    bench.cache.drain()
    assert bench.cache.evict(8) == 4
    assert bench.serve(text(1, 19)) == (0, 16)
    assert bench.cache.counters.companion_loaded_pages == 2 + 4 + 1
    bench.cache.drain()
    bench.check_books()


class Work:
    """One companion of one cache, and what a model does with its layers: its compute, seen alone."""

    def __init__(self, bench: GroupBench, text: Text) -> None:
        self.bench, self.text = bench, text
        self.companion: Companion = bench.cache.companions[0]
        self.mirrors: list[Mirror] = [mirror for host in self.companion.hosts for mirror in host.mirrors]
        self.rows = self.companion.coverage == "snapshots"

    def touch(self, acquired: Any, act: Callable[[torch.Tensor], object]) -> None:
        """Do something with the pages (or the row) of each layer."""
        name = self.companion.name
        pages = [acquired.row(name)] if self.rows else acquired.companion_pages(name).tolist()
        for layer in (layer for mirror in self.mirrors for layer in mirror.layers):
            for page in pages:
                act(layer[page])

    def put_on_host(self) -> None:
        """Prompt 1 is on the host, in all pools, and not on the device."""
        self.bench.serve(self.text(1, 13))
        self.bench.cache.drain()
        self.bench.cache.evict(8)
        torch_npu.npu.synchronize()

    def end(self, acquired: Any) -> None:
        self.bench.cache.abort(acquired)
        self.bench.cache.drain()
        self.bench.cache.evict(8)


def computed_then_backed_up(work: Work, name: int) -> None:
    """A companion's pages are computed, and the node's backup starts; the cache's own pool is not written at all."""
    acquired = work.bench.cache.acquire(work.text(name, 13))
    work.bench.cache.load(acquired)
    torch_npu.npu.synchronize()
    work.touch(acquired, lambda page: page.fill_(name))
    if work.rows:
        assert work.bench.cache.snapshot(acquired, 12)
    work.bench.cache.finish(acquired, work.text(name, 12))
    work.bench.cache.drain()


def read_then_loaded_over(work: Work, name: int) -> None:
    """A request reads its pages of a companion and gives them back; a load puts another prompt's there."""
    reader = work.bench.cache.acquire(work.text(100 + name, 13))
    work.bench.cache.load(reader)
    torch_npu.npu.synchronize()
    work.touch(reader, lambda page: page.clone())
    work.bench.cache.abort(reader)
    acquired = work.bench.cache.acquire(work.text(1, 13))
    assert acquired.host_hit_tokens == 12
    try:
        work.bench.cache.load(acquired)
    finally:
        work.end(acquired)


def loaded_then_read(work: Work, name: int) -> None:
    """A companion's pages come back from the host; a layer of them is read after the wait for this layer alone."""
    acquired = work.bench.cache.acquire(work.text(1, 13))
    assert acquired.host_hit_tokens == 12
    work.bench.cache.load(acquired)
    mirror = work.mirrors[-1]
    acquired.wait_layer(mirror.layer_ids[0])
    row = acquired.row(work.companion.name) if work.rows else int(acquired.companion_pages(work.companion.name)[2])
    try:
        mirror.layers[0][row].clone()
    finally:
        work.end(acquired)


CASES: dict[Lane, tuple[Callable[[Work, int], None], bool]] = {
    "backup": (computed_then_backed_up, False),
    "load": (read_then_loaded_over, True),
    "compute": (loaded_then_read, True),
}


@each_mover
@each_kind
@pytest.mark.parametrize("lane", CASES)
def test_without_its_wait_a_lane_of_a_companion_races_every_time(
    text: Text,
    without_wait: Callable[[Lane], Streams],
    mover: MoverName,
    host_layout: HostLayout,
    kind: str,
    lane: Lane,
) -> None:
    case, on_host = CASES[lane]
    found = 0
    for name in range(2, 2 + TIMES):
        work = Work(make([kind], mover, host_layout, streams=without_wait(lane), poison=False), text)
        if on_host:
            with ascend_emulator.order.unchecked():
                work.put_on_host()
        with pytest.raises(ascend_emulator.RaceError):
            case(work, name)
        found += 1
        torch_npu.npu.synchronize()
    assert found == TIMES


@each_mover
@each_kind
@pytest.mark.parametrize("lane", CASES)
def test_with_all_waits_there_is_no_race(
    text: Text, mover: MoverName, host_layout: HostLayout, kind: str, lane: Lane
) -> None:
    case, on_host = CASES[lane]
    work = Work(make([kind], mover, host_layout), text)
    if on_host:
        work.put_on_host()
    for name in range(2, 2 + TIMES):
        case(work, name)
    torch_npu.npu.synchronize()
    work.bench.check_books()


@each_mover
def test_a_request_that_finds_a_companion_under_way_waits_for_it(
    text: Text, mover: MoverName, host_layout: HostLayout
) -> None:
    bench = make(["window"], mover, host_layout)
    work = Work(bench, text)
    work.put_on_host()
    first = bench.cache.acquire(text(1, 13))
    bench.cache.load(first)
    second = bench.cache.acquire(text(1, 13))
    assert (second.device_hit_tokens, second.host_hit_tokens) == (12, 0)
    page = int(second.companion_pages("window")[2])
    assert page and page == first.companion_pages("window")[2]
    with torch_npu.npu.stream(torch_npu.npu.Stream()):
        second.wait_layer(11)
        work.mirrors[-1].layers[1][page].clone()
    bench.cache.abort(first)
    bench.cache.abort(second)
    bench.cache.drain()
    bench.check_books()


@each_mover
@pytest.mark.parametrize("complete", [True, False])
def test_a_load_that_was_queued_waits_for_the_last_reader_of_its_pages(
    text: Text,
    held_back: HeldBack,
    waits_once: Callable[[Lane], Streams],
    mover: MoverName,
    host_layout: HostLayout,
    complete: bool,
) -> None:
    """Window pages that a request on another stream still reads go to a load that waits behind another one."""
    streams = None if complete else waits_once("load")
    bench = make(["window"], mover, host_layout, streams=streams, own=6, poison=False)
    work, cache = Work(bench, text), bench.cache
    for name in (1, 2):
        bench.serve(text(name, 9))
        cache.drain()
        assert cache.evict(8, "window")
    first = cache.acquire(text(1, 9))
    reader = cache.acquire(text(3, 8))
    cache.load(reader)
    torch_npu.npu.synchronize()
    with held_back():
        cache.load(first)
        with torch_npu.npu.stream(torch_npu.npu.Stream()):
            work.touch(reader, lambda page: page.clone())
            pages = reader.companion_pages("window")
            cache.abort(reader)
            second = cache.acquire(text(2, 9))
            cache.load(second)
            assert set(second.companion_pages("window").tolist()) & set(pages.tolist())
        assert bench.cache._group.member("window").under_way == UnderWay(queued_loads=2, loads=2)
    with nullcontext() if complete else pytest.raises(ascend_emulator.RaceError):
        second.wait_layer(10)
        cache.drain()
    torch_npu.npu.synchronize()
    if complete:
        assert cache.counters.companion_loaded_pages == 4


def test_pages_of_a_stopped_load_are_reused_after_what_was_submitted(text: Text, held_back: HeldBack) -> None:
    limits = CopyLimits(batch_pages=2, layers_ahead=1)
    bench = make(["window"], "indexed", "layer_first", pages=4, limits=limits)
    work, cache, own = Work(bench, text), bench.cache, bench.cache.companions[0].pages.own
    work.put_on_host()
    acquired = cache.acquire(text(1, 13))
    with held_back():
        cache.load(acquired)
        pages = acquired.companion_pages("window")[1:3]
        cache.abort(acquired)
        cache.poll()
        assert (own.holders(pages) == 1).all() and cache.accounting("window").in_use == 2
    again = cache.acquire(text(2, 16))  # waits for them
    assert {*pages.tolist()} < {*again.companion_pages("window").tolist()}
    cache.load(again)
    work.touch(again, lambda page: page.fill_(1))
    torch_npu.npu.synchronize()
    assert cache.counters.companion_loaded_pages == 0
    assert all(bool((layer[1:] == 1).all()) for mirror in work.mirrors for layer in mirror.layers)
    cache.abort(again)
    cache.drain()
    bench.check_books()


@pytest.mark.parametrize("seed", range(4))
def test_any_interleaving(tmp_path: Path, seed: int) -> None:
    """Steps of the soak on the device: every kind of companion, late acknowledgements, the check of the order on."""
    kind = next(
        number for number, chosen in enumerate(pool_soak.KINDS) if chosen[0] == LAST and chosen[2] == LEVELS[seed % 2]
    )
    soak = pool_soak.Soak(kind + len(pool_soak.KINDS) * (1 + seed), tmp_path, device=NPU)
    for _ in range(40):
        soak.step()
    soak.count_tokens()
    soak.machine.teardown()
    assert soak.counts["companion_hits"] or soak.counts["uncovered"]
