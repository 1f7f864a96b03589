"""Owns the proof of a cache over several pools (on a CPU): the deepest hit that all can serve, every byte right."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_pool import HitError, OutOfPages
from kv_pool.hicache import HitAgreement, ImmediateStreams, Lane, Mark, WritePolicy
from kv_pool.hicache._group import covered

sys.path.insert(0, str(Path(__file__).parent))

from pool_group import GroupBench, PageByPage

Text = Callable[[int, int], list[int]]
ALL = ["window", "draft", "states"]
POLICIES: list[WritePolicy] = ["write_through", "write_through_selective", "write_back"]


def make(kinds: list[str], **options: Any) -> GroupBench:
    """A cache whose prompts are computed page by page, with a snapshot after each."""
    bench = GroupBench(kinds, **options)
    bench.random = PageByPage()  # type: ignore[assignment]
    return bench


@given(have=st.lists(st.booleans(), max_size=12), trailing=st.one_of(st.none(), st.integers(1, 14)))
def test_a_hit_is_served_when_its_last_pages_are_there(have: list[bool], trailing: int | None) -> None:
    wanted = [all(have[0 if trailing is None else max(0, hit - trailing) : hit]) for hit in range(len(have) + 1)]
    assert covered(np.array(have, dtype=np.bool_), trailing).tolist() == wanted


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kinds", [["window"], ["draft"], ["states"], ALL])
def test_what_is_served_comes_back_from_device_and_host(kinds: list[str], policy: WritePolicy, text: Text) -> None:
    bench = make(kinds, policy=policy)
    bench.serve(text(1, 17))
    assert bench.serve(text(1, 19)) == (16, 0)
    assert bench.cache.evict(8) == 4
    for companion in bench.cache.companions:
        assert bench.cache.accounting(companion.name).available == 8, "companions leave with their page"
    assert bench.serve(text(1, 19)) == (0, 16)
    loaded = {"window": 2, "draft": 4, "states": 1}
    assert bench.cache.counters.companion_loaded_pages == sum(loaded[kind] for kind in kinds)
    assert bench.serve(text(1, 19)) == (16, 0)


def test_inner_pages_leave_the_window_first(text: Text) -> None:
    bench = make(["window"])
    bench.serve(text(1, 25))
    bench.cache.drain()
    assert bench.cache.evict(6, "window") == 4
    books, windows = bench.cache.accounting(), bench.cache.accounting("window")
    assert (books.evictable, windows.evictable) == (6, 2), "the pages of full attention stay"
    assert bench.serve(text(1, 26)) == (24, 0)
    assert bench.cache.counters.companion_loaded_pages == 0
    acquired = bench.cache.acquire(text(1, 17))
    assert acquired.hit_tokens == 16, "its window comes back from the host under pages that never left"
    assert acquired.companion_pages("window").tolist()[:4] == [0, 0, 0, 0]
    bench.cache.finish(acquired, bench.run(acquired))
    assert bench.cache.counters.companion_loaded_pages == 2


def test_a_prompt_longer_than_the_pool_of_its_window(text: Text) -> None:
    bench = make(["window"], pages=12, own=4)
    with pytest.raises(OutOfPages):
        bench.cache.acquire(text(1, 40))
    bench.check_books()
    assert bench.cache.accounting().available == 12
    acquired = bench.cache.acquire(text(1, 40), reach=8)
    assert np.flatnonzero(acquired.companion_pages("window")).tolist() == [0, 1]
    bench.cache.finish(acquired, bench.run(acquired))
    bench.check_books()
    assert bench.serve(text(1, 41))[0] == 40


def test_pages_behind_the_window_get_none_again(text: Text) -> None:
    bench = make(["window"], pages=12, own=4)
    acquired = bench.cache.acquire(text(1, 24), reach=8)
    done = bench.run(acquired)
    with pytest.raises(OutOfPages):
        bench.cache.extend(acquired, 3)
    assert acquired.pages.size == 6
    bench.cache.advance(acquired, 24)
    bench.cache.extend(acquired, 2)
    assert np.flatnonzero(acquired.companion_pages("window")).tolist() == [4, 5, 6, 7]
    bench.check_books()
    for layer in bench.layers:
        bench.compute(acquired, text(1, 32), layer, 6, 8)
    bench.cache.finish(acquired, text(1, 32))
    assert len(done) == 24 and bench.serve(text(1, 12)) == (0, 0)
    late = bench.cache.acquire(text(2, 12), reach=4)
    bench.cache.load(late)
    bench.cache.advance(late, 8, reach=12)
    assert np.flatnonzero(late.companion_pages("window")).tolist() == [0, 2], (
        "what is computed without a page gets none"
    )


def test_a_snapshot_is_found_at_its_very_end(text: Text) -> None:
    bench = make(["states"])
    bench.random = _Never()  # type: ignore[assignment]
    first = bench.cache.acquire(text(1, 18))
    assert (first.row("states"), first.hit_tokens, first.known_tokens) == (1, 0, 0)
    done = bench.run(first)
    bench.write_states(first, done[:16])
    assert bench.cache.snapshot(first, 16)
    bench.cache.finish(first, done)
    assert bench.serve(text(1, 30))[0] == 16
    other = [*text(1, 8), *text(2, 9)]
    acquired = bench.cache.acquire(other)
    assert (acquired.hit_tokens, acquired.known_tokens) == (0, 8), "it parts where no state was saved"
    done = bench.run(acquired)
    bench.write_states(acquired, done[:8])
    assert bench.cache.snapshot(acquired, acquired.known_tokens)
    bench.cache.finish(acquired, done)
    assert bench.cache.counters.uncovered_tokens == 8
    bench.check_books()
    assert bench.serve([*text(1, 8), *text(3, 5)])[0] == 8, "the page that was there has got the state"
    bench.cache.drain()
    bench.cache.evict(8)
    assert bench.serve([*text(1, 8), *text(3, 5)]) == (0, 8), "and so has its host copy, made before"


class _Never(PageByPage):
    """Saves no state by itself."""

    def integers(self, *bounds: int) -> int:
        return 0 if bounds == (4,) else super().integers(*bounds)


def test_running_rows_come_before_snapshots(text: Text) -> None:
    bench = make(["states"], own=2)
    first = bench.cache.acquire(text(1, 9))
    second = bench.cache.acquire(text(2, 9))
    for acquired in (first, second):
        bench.cache.load(acquired)
    assert not bench.cache.snapshot(first, 8), "both rows run"
    with pytest.raises(OutOfPages):
        bench.cache.acquire(text(3, 3))
    bench.check_books()
    bench.cache.abort(second)
    assert bench.cache.snapshot(first, 8) and bench.cache.snapshot(first, 8)
    assert bench.cache.acquire(text(3, 3)).row("states"), "a snapshot leaves for a row that runs"


def test_the_last_pages_stay_while_they_are_read_or_copied(text: Text) -> None:
    bench = make(["window"], streams=_Slow())
    bench.serve(text(1, 13))
    assert bench.cache.pending
    member = bench.cache._group.member("window")
    assert member.device.evict(8) == 0, "they are being backed up"
    bench.cache.drain()
    held = bench.cache.acquire(text(1, 13))
    assert member.device.evict(8) == 0, "three pages were found and may be asked for by a lower hit"
    bench.cache.load(held)
    assert member.device.evict(8) == 1, "two are read"
    bench.cache.abort(held)
    assert member.device.evict(8) == 3 - 1


def test_what_is_on_its_way_to_the_host_is_not_there_yet(text: Text) -> None:
    bench = make(["window"], streams=_Slow())
    bench.serve(text(1, 13))
    member = bench.cache._group.member("window")
    lead = np.array([1, 2, 3])
    assert member.host.find(lead).all() and not member.on_host(lead).any()
    held = bench.cache.acquire(text(1, 13))
    assert held.hit_tokens == 12 and held._shares[0].host.size == 3 and not held._shares[0].host.any()
    bench.cache.abort(held)
    bench.cache.drain()
    assert (member.on_host(lead) == member.host.find(lead)).all() and member.on_host(lead).all()


class _Slow(ImmediateStreams):
    """Copies end when somebody waits for them."""

    def mark(self, lane: Lane) -> Mark:
        return _SlowMark() if lane != "compute" else super().mark(lane)


class _SlowMark:
    done = False

    def reached(self) -> bool:
        return self.done

    def wait_on_host(self) -> None:
        self.done = True


def test_a_hit_that_all_ranks_can_serve(text: Text) -> None:
    """One rank has states at 12 and 20, the other at 8, 12 and 16: 12, although the least of the deepest is 16."""
    benches = []
    for saved in ((12, 20), (8, 12, 16)):
        bench = make(["states"], pages=16)
        bench.random = _Never()  # type: ignore[assignment]
        acquired = bench.cache.acquire(text(1, 22))
        done = bench.run(acquired)
        for place in saved:
            bench.write_states(acquired, done[:place])
            assert bench.cache.snapshot(acquired, place)
        bench.cache.finish(acquired, done)
        benches.append(bench)
    handles = [bench.cache.acquire(text(1, 25)) for bench in benches]
    assert [handle.hit_tokens for handle in handles] == [20, 16]
    assert [handles[0].restorable(most) for most in (25, 19, 12, 11, 3, -4)] == [20, 12, 12, 0, 0, 0]
    with pytest.raises(HitError, match="restorable"):
        benches[0].cache.limit(handles[0], 16)
    barrier, vectors, sizes = threading.Barrier(2, timeout=60), {}, []

    def serve(rank: int) -> None:
        def reduce_min(vector: Any) -> Any:
            vectors[rank] = vector
            sizes.append(vector.size)
            barrier.wait()
            least = np.minimum(vectors[0], vectors[1])
            barrier.wait()
            return least

        HitAgreement(reduce_min, width=3, companions=True).limit(benches[rank].cache, [handles[rank]])

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [handle.hit_tokens for handle in handles] == [12, 12] and sizes == [5] * 6
    for bench, handle in zip(benches, handles, strict=True):
        bench.check_books()
        bench.cache.finish(handle, bench.run(handle))
        bench.check_books()


@pytest.mark.parametrize("kinds", [["window"], ["draft"], ["states"], ALL])
def test_a_lower_hit_of_pages_on_device_and_host(kinds: list[str], text: Text) -> None:
    bench = make(kinds, pages=16)
    bench.serve(text(1, 25))
    for evicted in (0, 10, 16):
        for least in (20, 8, 0):
            bench.cache.evict(evicted)
            acquired = bench.cache.acquire(text(1, 26))
            assert acquired.hit_tokens == 24
            bench.cache.limit(acquired, least)
            bench.check_books()
            bench.cache.extend(acquired, 1)
            bench.cache.finish(acquired, bench.run(acquired))
            bench.check_books()
    bench.cache.abort(bench.cache.acquire(text(1, 26)))
    bench.cache.evict(16)
    assert all(bench.cache.accounting(one.name).available == 16 for one in bench.cache.companions)


def test_what_a_finished_text_has_is_kept_where_the_index_has_the_page(text: Text) -> None:
    bench = make(["window", "draft"])
    bench.serve(text(1, 17))
    bench.cache.drain()
    for name in ("window", "draft"):
        member = bench.cache._group.member(name)
        member.host.leave(member.host.named())
        assert bench.cache.evict(8, name) == 4
    assert bench.serve(text(1, 18)) == (0, 0), "the pages are there, and what they need beside is not"
    assert bench.cache.counters.uncovered_tokens == 16
    assert bench.serve(text(1, 18)) == (16, 0)
    bench.cache.drain()
    bench.cache.evict(8)
    assert bench.serve(text(1, 18)) == (0, 16)
