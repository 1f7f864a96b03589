"""Owns the proof of a cache's life on a CPU: hits, eviction, restore, refusals, failures; bytes known throughout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kv_planner import PrefixIndex
from kv_pool import CacheError, HitError, HostPoolError, MhaPool, OutOfPages, PageAllocator, UnknownLayer
from kv_pool.hicache import HiCacheController, HostPool, ImmediateStreams, Lane, Mark, WritePolicy

Text = Callable[[int, int], list[int]]
POLICIES: list[WritePolicy] = ["write_through", "write_through_selective", "write_back"]


def test_the_last_token_is_never_a_hit(make_cache: Callable[..., Any], text: Text) -> None:
    bench = make_cache()
    assert bench.serve(text(1, 16)) == (0, 0)
    assert bench.serve(text(1, 16)) == (12, 0)
    assert bench.serve(text(1, 17)) == (16, 0)
    assert bench.serve(text(1, 3)) == (0, 0)
    counters = bench.cache.counters
    assert counters.prompt_tokens == 52 and counters.hit_tokens == 28 and counters.computed_tokens == 24
    assert counters.finished == 4 and counters.backed_up_pages == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_evicted_pages_come_back_bit_for_bit(make_cache: Callable[..., Any], text: Text, policy: WritePolicy) -> None:
    bench = make_cache(policy=policy)
    bench.serve(text(1, 17))
    bench.serve(text(1, 17))
    assert bench.cache.evict(8) == 4
    bench.check_poison({1, 2, 3, 4, 5})
    assert bench.allocator.available == 8
    assert bench.serve(text(1, 19)) == (0, 16)
    assert bench.cache.counters.loaded_pages == 4
    assert bench.serve(text(1, 19)) == (16, 0)


def test_selective_backs_up_what_is_used_twice(make_cache: Callable[..., Any], text: Text) -> None:
    bench = make_cache(policy="write_through_selective")
    bench.serve(text(1, 12))
    assert bench.cache.counters.backed_up_pages == 0
    bench.serve([*text(1, 8), 7, 7, 7, 7])
    assert bench.cache.counters.backed_up_pages == 2
    bench.cache.evict(8)
    assert bench.serve(text(1, 12)) == (0, 8)


def test_a_working_set_larger_than_the_device(make_cache: Callable[..., Any], text: Text) -> None:
    for policy in ("write_through", "write_back"):
        bench = make_cache(pages=5, host_pages=40, policy=policy)
        for _ in range(3):
            found = [bench.serve(text(name, 18)) for name in range(6)]
        assert found == [(0, 16)] * 6
        assert bench.cache.counters.computed_tokens == 6 * 18 + 12 * 2


def test_namespaces_share_nothing(make_cache: Callable[..., Any], text: Text) -> None:
    bench = make_cache()
    bench.serve(text(1, 9), "adapter")
    assert bench.serve(text(1, 9)) == (0, 0)
    assert bench.serve(text(1, 9), "adapter") == (8, 0)


def test_a_longer_text_is_kept_with_what_followed(make_cache: Callable[..., Any], text: Text) -> None:
    bench = make_cache()
    acquired = bench.cache.acquire(text(1, 9))
    bench.cache.extend(acquired, 2)
    assert acquired.pages.size == 5
    bench.cache.finish(acquired, bench.run(acquired, text(1, 18)))
    bench.check_books()
    assert bench.serve(text(1, 18)) == (16, 0)
    other = bench.cache.acquire(text(2, 9))
    bench.cache.finish(other, bench.run(other)[:6])
    assert bench.serve(text(2, 9)) == (4, 0)


def test_a_hit_lowered_by_another_stage(make_cache: Callable[..., Any], text: Text) -> None:
    bench = make_cache(pages=12)
    bench.serve(text(1, 20))
    for least in (8, 0):
        acquired = bench.cache.acquire(text(1, 22))
        shared = acquired.pages.copy()
        assert acquired.hit_tokens == 20
        bench.cache.limit(acquired, least)
        assert (acquired.hit_tokens, acquired.device_hit_tokens) == (least, least)
        assert not set(shared[least // 4 : 5]) & set(acquired.pages.tolist())
        bench.check_books()
        bench.cache.finish(acquired, bench.run(acquired))
        bench.check_books()
    bench.cache.evict(12)
    acquired = bench.cache.acquire(text(1, 22))
    assert acquired.host_hit_tokens == 20
    bench.cache.limit(acquired, 12)
    assert (acquired.hit_tokens, acquired.host_hit_tokens) == (12, 12)
    bench.cache.finish(acquired, bench.run(acquired))
    assert bench.cache.counters.loaded_pages == 3 and bench.serve(text(1, 22)) == (20, 0)
    assert bench.cache.counters.prompt_tokens == 20 + 22 * 4


def test_two_requests_that_load_the_same_pages(make_cache: Callable[..., Any], text: Text) -> None:
    bench = make_cache()
    bench.serve(text(1, 13))
    bench.cache.evict(8)
    first, second = bench.cache.acquire(text(1, 13)), bench.cache.acquire(text(1, 14))
    bench.check_books()
    done = bench.run(second)
    bench.check_books()
    bench.cache.finish(first, bench.run(first))
    bench.check_books()
    bench.cache.finish(second, done)
    bench.check_books()
    assert bench.allocator.held == 3 and bench.serve(text(1, 13)) == (12, 0)


def test_what_is_found_is_protected_until_the_end(make_cache: Callable[..., Any], text: Text) -> None:
    bench = make_cache(pages=6, host_pages=3)
    bench.serve(text(1, 13))
    held = bench.cache.acquire(text(1, 13))
    with pytest.raises(OutOfPages):
        bench.cache.acquire(text(2, 12))
    bench.check_books()
    bench.serve(text(3, 8))
    assert bench.cache.counters.unbacked_pages == 2, "the host was full of protected pages"
    bench.cache.abort(held)
    bench.check_books()
    assert bench.serve(text(2, 24)) == (0, 0)
    assert bench.cache.counters.evicted_host_pages == 3


def test_host_full_drops_and_never_marks(make_cache: Callable[..., Any], text: Text) -> None:
    for policy in ("write_through", "write_back"):
        bench = make_cache(pages=4, host_pages=2, policy=policy)
        bench.serve(text(1, 16))
        assert bench.serve(text(2, 16)) == (0, 0)
        assert bench.host.allocator.held == bench.index.counts().host.held <= 2
        assert bench.serve(text(1, 16))[1] in (0, 8)


class Failing:
    """A mover that raises when it is told to, after a part has moved."""

    def __init__(self, inner: Any) -> None:
        self.name, self.capabilities, self.inner = inner.name, inner.capabilities, inner
        self.fail = ""

    def backup(self, device_pages: Any, host_pages: Any) -> None:
        self.inner.backup(device_pages[:1], host_pages[:1])
        if self.fail == "backup":
            raise OSError("backup")
        self.inner.backup(device_pages, host_pages)

    def load(self, device_pages: Any, host_pages: Any, layer_id: int | None = None) -> None:
        self.inner.load(device_pages, host_pages, layer_id)
        if self.fail == "load" and layer_id in (None, 1):
            raise OSError("load")


def test_failures_leave_nothing_marked(make_cache: Callable[..., Any], text: Text) -> None:
    bench = make_cache()
    mover = bench.options["mover"] = Failing(bench.cache.mover)
    bench.attach(None)
    acquired = bench.cache.acquire(text(1, 13))
    done = bench.run(acquired)
    mover.fail = "backup"
    with pytest.raises(OSError, match="backup"):
        bench.cache.finish(acquired, done)
    bench.check_books()
    assert bench.host.allocator.held == bench.index.counts().host.held == bench.index.counts().locks == 0
    mover.fail = ""
    assert bench.serve(text(1, 13)) == (12, 0)
    assert bench.cache.counters.backed_up_pages == 3
    bench.cache.evict(8)
    acquired = bench.cache.acquire(text(1, 13))
    mover.fail = "load"
    with pytest.raises(OSError, match="load"):
        bench.cache.load(acquired)
    bench.check_books()
    assert bench.index.counts().device.held == 0 and acquired.state == "acquired"
    bench.cache.abort(acquired)
    bench.check_books()
    assert bench.index.counts().locks == 0 and bench.allocator.available == 8
    mover.fail = ""
    assert bench.serve(text(1, 13)) == (0, 12)
    assert bench.cache.counters.aborted == 1


class Breaking(ImmediateStreams):
    """Lanes on which the end of a copy is an error of the device, when they are told so."""

    fail = False

    def mark(self, lane: Lane) -> Mark:
        return BrokenMark() if self.fail and lane != "compute" else super().mark(lane)


class BrokenMark:
    """Reached, and the device says that it went wrong."""

    def reached(self) -> bool:
        return True

    def wait_on_host(self) -> None:
        raise OSError("device")


def test_a_copy_that_the_device_reports_as_failed_is_not_marked(make_cache: Callable[..., Any], text: Text) -> None:
    streams = Breaking()
    bench = make_cache(streams=streams)
    streams.fail = True
    acquired = bench.cache.acquire(text(1, 13))
    done = bench.run(acquired)
    with pytest.raises(OSError, match="device"):
        bench.cache.finish(acquired, done)
    bench.check_books()
    counts = bench.index.counts()
    assert (counts.device.held, counts.host.held, counts.locks, bench.host.allocator.held) == (3, 0, 0, 0)
    streams.fail = False
    assert bench.serve(text(1, 13)) == (12, 0) and bench.cache.counters.backed_up_pages == 3


def test_calls_out_of_order_are_refused(make_cache: Callable[..., Any], text: Text) -> None:
    bench = make_cache()
    cache = bench.cache
    bench.serve(text(1, 13))
    cache.evict(8)
    acquired = cache.acquire(text(1, 13))
    with pytest.raises(CacheError, match="load first"):
        acquired.wait_layer(0)
    with pytest.raises(CacheError, match="expected one that is loaded"):
        cache.finish(acquired, text(1, 13))
    for wrong in (3, 16, -4):
        with pytest.raises(HitError, match=str(wrong)):
            cache.limit(acquired, wrong)
    cache.load(acquired)
    with pytest.raises(UnknownLayer):
        acquired.wait_layer(3)
    for call in (cache.load, lambda handle: cache.limit(handle, 4)):
        with pytest.raises(CacheError, match="loaded"):
            call(acquired)
    for tokens in (text(2, 13), text(1, 17), text(1, 8)):
        with pytest.raises(CacheError, match="tokens"):
            cache.finish(acquired, tokens)
    with pytest.raises(ValueError, match="read-only"):
        acquired.pages[0] = 1
    bench.check_books()
    cache.finish(acquired, bench.run(acquired))
    assert "finished" in repr(acquired)
    for end in (cache.abort, lambda handle: cache.finish(handle, text(1, 13)), lambda handle: cache.extend(handle, 1)):
        with pytest.raises(CacheError, match="finished"):
            end(acquired)
    with pytest.raises(CacheError, match="at least one token"):
        cache.acquire([])
    with pytest.raises(CacheError, match="float64"):
        cache.acquire(np.ones(3))
    bench.check_books()


def test_parts_that_do_not_belong_together(make_cache: Callable[..., Any]) -> None:
    bench = make_cache()
    other = MhaPool(bench.pool.layout, size=32, device="cpu")
    fresh = PageAllocator(9, 4)
    index = PrefixIndex(4, device_pages=9, host_pages=17)
    used = PageAllocator(9, 4)
    used.alloc(1)
    for wrong, parts in (
        ("host.pool", (bench.pool, fresh, HostPool(other, pages=16), index)),
        ("allocator.num_pages", (bench.pool, PageAllocator(8, 4), bench.host, index)),
        ("allocator.held", (bench.pool, used, bench.host, index)),
        ("index.page_size", (bench.pool, fresh, bench.host, PrefixIndex(8, device_pages=9, host_pages=17))),
        ("index.host_pages", (bench.pool, fresh, bench.host, PrefixIndex(4, device_pages=9, host_pages=16))),
    ):
        with pytest.raises(HostPoolError, match=wrong):
            HiCacheController(*parts)
    with pytest.raises(HostPoolError, match="write_around"):
        HiCacheController(bench.pool, fresh, bench.host, index, policy="write_around")  # type: ignore[arg-type]
    assert HiCacheController(bench.pool, fresh, bench.host, index).policy == "write_through"


def test_no_poison_when_it_is_not_wanted(make_cache: Callable[..., Any], text: Text) -> None:
    bench = make_cache()
    index = PrefixIndex(4, device_pages=9, host_pages=17)
    cache = HiCacheController(bench.pool, PageAllocator(9, 4), bench.host, index, poison=False)
    acquired = cache.acquire(text(1, 3))
    bench.pool.key_storage.fill_(1)
    cache.abort(acquired)
    assert not bench.pool.key_storage.isnan().any() and isinstance(replace(cache.counters, aborted=0).aborted, int)
    assert torch.equal(bench.pool.key_storage, torch.ones_like(bench.pool.key_storage))
