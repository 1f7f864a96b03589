"""Owns the proof of the cache on an NPU: the same life as on a CPU, and the order of its copies beside compute.

Order is shown by holding the compute stream back at an external event: what does not wait for it runs too early, and is
seen in the bytes. For each wait there is a run without it that must go wrong, so that no wait is there for nothing; the
emulator's own check of the order, which would stop such a run, is off in it (test_pool_hicache_order_npu.py has it on).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ascend_emulator
import pytest
import torch
import torch_npu
from kv_pool.hicache import HostLayout, Lane, MoverName, Streams, WritePolicy

NPU = "npu:0"
MOVERS: list[tuple[MoverName, HostLayout]] = [("dim_exchange", "page_first_direct"), ("indexed", "layer_first")]
POLICIES: list[WritePolicy] = ["write_through", "write_through_selective", "write_back"]
Text = Callable[[int, int], list[int]]
WithoutWait = Callable[[Lane], Streams]
HeldBack = Callable[[], AbstractContextManager[None]]


def checked(complete: bool) -> AbstractContextManager[None]:
    """The emulator's check of the order is on in complete runs."""
    return nullcontext() if complete else ascend_emulator.order.unchecked()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("mover", "host_layout"), MOVERS)
def test_evicted_pages_come_back_bit_for_bit(
    make_cache: Callable[..., Any], text: Text, mover: MoverName, host_layout: HostLayout, policy: WritePolicy
) -> None:
    bench = make_cache(NPU, mover=mover, host_layout=host_layout, policy=policy)
    assert bench.cache.mover.name == mover
    bench.serve(text(1, 17))
    bench.serve(text(1, 17))
    bench.cache.drain()
    assert bench.cache.evict(8) == 4
    bench.check_poison({1, 2, 3, 4, 5})
    assert bench.serve(text(1, 19)) == (0, 16)
    assert bench.serve(text(1, 19)) == (16, 0)


@pytest.mark.parametrize(("mover", "host_layout"), MOVERS)
def test_a_working_set_larger_than_the_device(
    make_cache: Callable[..., Any], text: Text, mover: MoverName, host_layout: HostLayout
) -> None:
    for policy in ("write_through", "write_back"):
        bench = make_cache(NPU, pages=5, host_pages=20, policy=policy, mover=mover, host_layout=host_layout)
        for _ in range(3):
            found = [bench.serve(text(name, 18)) for name in range(4)]
        assert found == [(0, 16)] * 4


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(("mover", "host_layout"), MOVERS)
def test_a_backup_waits_for_the_compute_before_it(
    make_cache: Callable[..., Any],
    text: Text,
    mover: MoverName,
    host_layout: HostLayout,
    complete: bool,
    without_wait: WithoutWait,
    held_back: HeldBack,
) -> None:
    with checked(complete):
        streams = None if complete else without_wait("backup")
        bench = make_cache(NPU, mover=mover, host_layout=host_layout, streams=streams)
        cache = bench.cache
        acquired = cache.acquire(text(1, 13))
        contents = torch.full_like(bench.pool.key_storage[:, :1], 7)
        torch_npu.npu.synchronize()
        with held_back():
            for page in acquired.pages.tolist():
                bench.pool.key_storage[:, page : page + 1] = contents
            cache.finish(acquired, text(1, 12))
            cache.poll()
            pinned = bench.index.counts()
            assert (pinned.device.protected, pinned.host.held) == ((3, 0) if complete else (0, 3))
        cache.drain()
        saved = bench.host.mirror("key").host[1:4]
        assert bool((saved == 7).all()) is complete
        assert bench.index.counts().host.held == 3 and bench.index.counts().locks == 0


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(("mover", "host_layout"), MOVERS)
def test_a_load_waits_for_the_last_reader_of_its_pages(
    make_cache: Callable[..., Any],
    text: Text,
    mover: MoverName,
    host_layout: HostLayout,
    complete: bool,
    without_wait: WithoutWait,
    held_back: HeldBack,
) -> None:
    with checked(complete):
        streams = None if complete else without_wait("load")
        bench = make_cache(NPU, pages=4, mover=mover, host_layout=host_layout, streams=streams)
        cache = bench.cache
        bench.serve(text(1, 13))
        cache.drain()
        cache.evict(4)
        reader = cache.acquire(text(2, 13))
        page = int(reader.pages[0])
        bench.pool.key(0)[page].fill_(5)
        torch_npu.npu.synchronize()
        with held_back():
            read = bench.pool.key(0)[page].clone()
            cache.abort(reader)
            acquired = cache.acquire(text(1, 13))
            assert page in acquired.pages[:3].tolist() and acquired.host_hit_tokens == 12
            cache.load(acquired)
        torch_npu.npu.synchronize()
        right = bool((read.cpu() == 5).all())
        assert right is complete
        cache.abort(acquired)
        cache.drain()


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(("mover", "host_layout"), MOVERS)
def test_compute_waits_for_the_layer_that_it_reads(
    make_cache: Callable[..., Any],
    text: Text,
    mover: MoverName,
    host_layout: HostLayout,
    complete: bool,
    without_wait: WithoutWait,
    held_back: HeldBack,
) -> None:
    with checked(complete):
        streams = None if complete else without_wait("compute")
        bench = make_cache(NPU, mover=mover, host_layout=host_layout, streams=streams)
        cache = bench.cache
        bench.serve(text(1, 13))
        cache.drain()
        cache.evict(8)
        acquired = cache.acquire(text(1, 13))
        with held_back():
            cache.load(acquired)
            acquired.wait_layer(0)
            read = bench.pool.key(0)[int(acquired.pages[1])].clone()
        torch_npu.npu.current_stream().synchronize()
        wanted = bench.expected(bench.host.mirror("key"), 0, text(1, 13), None, 1)
        assert torch.equal(read.cpu(), wanted) is complete
        cache.abort(acquired)
        cache.drain()


def test_pages_under_way_are_pinned_until_acknowledged(
    make_cache: Callable[..., Any], text: Text, held_back: HeldBack
) -> None:
    bench = make_cache(NPU, pages=8, host_pages=6)
    cache = bench.cache
    bench.serve(text(1, 13))
    bench.serve(text(2, 9))
    cache.drain()
    cache.evict(8)
    with held_back():
        first = cache.acquire(text(1, 13))
        cache.load(first)
        cache.abort(first)
        bench.check_books()
        counts = bench.index.counts()
        assert (counts.device.protected, counts.host.protected, counts.locks) == (3, 3, 1)
        other = cache.acquire(text(3, 12))
        cache.finish(other, text(3, 12))
        assert bench.index.counts().host.protected == 3
        assert cache.counters.loaded_pages == 0
        bench.check_books()
    cache.drain()
    bench.check_books()
    assert bench.index.counts().locks == 0 and cache.counters.loaded_pages == 3
    assert bench.serve(text(1, 13)) == (12, 0)


def test_any_interleaving(run_machine: Callable[..., None]) -> None:
    run_machine(NPU, examples=15, steps=30)


@pytest.mark.parametrize(("mover", "host_layout"), MOVERS)
def test_a_request_that_finds_pages_under_way_waits_for_them(
    make_cache: Callable[..., Any],
    text: Text,
    mover: MoverName,
    host_layout: HostLayout,
    held_back: HeldBack,
) -> None:
    bench = make_cache(NPU, mover=mover, host_layout=host_layout)
    cache = bench.cache
    bench.serve(text(1, 13))
    cache.drain()
    cache.evict(8)
    with held_back():
        first = cache.acquire(text(1, 13))
        cache.load(first)
        second = cache.acquire(text(1, 13))
        assert (second.device_hit_tokens, second.host_hit_tokens) == (12, 0)
        with torch_npu.npu.stream(torch_npu.npu.Stream()):
            second.wait_layer(1)
            read = bench.pool.value(1)[int(second.pages[2])].clone()
    torch_npu.npu.synchronize()
    assert torch.equal(read.cpu(), bench.expected(bench.host.mirror("value"), 1, text(1, 13), None, 2))
    cache.abort(first)
    cache.abort(second)
    cache.drain()
    bench.check_books()
