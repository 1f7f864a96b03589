"""Owns the proof that ranks agree on hits with the same reductions, whatever each of them has found."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_pool import AgreementError
from kv_pool.hicache import HitAgreement, owner_rank


class Group:
    """A minimum over threads; a rank that calls too often or too rarely breaks the barrier."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.vectors: dict[int, Any] = {}
        self.sizes: list[int] = []

    def of(self, rank: int) -> Callable[[Any], Any]:
        def reduce_min(vector: Any) -> Any:
            self.vectors[rank] = vector
            self.barrier.wait()
            least = np.min(np.stack(list(self.vectors.values())), axis=0)
            self.barrier.wait()
            if rank == 0:
                self.sizes.append(len(vector))
            return least

        return reduce_min


@settings(max_examples=25, deadline=None)
@given(
    hits=st.lists(st.lists(st.integers(0, 5).map(lambda n: 4 * n), min_size=3, max_size=3), max_size=6),
    split=st.integers(0, 6),
)
def test_every_rank_gets_the_minimum_with_the_same_reductions(hits: list[list[int]], split: int) -> None:
    group, answers = Group(3), [[[0]], [[0]], [[0]]]

    def serve(rank: int) -> None:
        agreement = HitAgreement(group.of(rank), width=8)
        mine = [request[rank] for request in hits]
        answers[rank] = [agreement.minimum(mine[:split]), agreement.minimum(mine[split:]), agreement.minimum([])]

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    least = [min(request) for request in hits]
    assert answers == [[least[:split], least[split:], []]] * 3 and group.sizes == [10, 10, 10]


def test_hits_of_two_caches_become_one(make_cache: Callable[..., Any], text: Callable[[int, int], list[int]]) -> None:
    benches = [make_cache(pages=16), make_cache(pages=16)]
    for bench, length in zip(benches, (26, 13), strict=True):
        bench.serve(text(1, length))
        bench.cache.drain()
    handles = [bench.cache.acquire(text(1, 26)) for bench in benches]
    assert [handle.hit_tokens for handle in handles] == [24, 12]
    least = np.array([12, 2**63 - 1, 1, -1])
    for bench, handle in zip(benches, handles, strict=True):
        assert HitAgreement(lambda vector: np.minimum(vector, least), width=2).limit(bench.cache, [handle]) == [True]
        assert handle.hit_tokens == 12
        bench.cache.finish(handle, bench.run(handle))
        bench.check_books()


@pytest.mark.parametrize("companions", [False, True])
def test_a_request_that_one_rank_has_no_pages_for_is_served_by_none(
    make_cache: Callable[..., Any], text: Callable[[int, int], list[int]], companions: bool
) -> None:
    """All ranks hear of it in the same reductions, and none waits for another."""
    group, answers, hits = Group(2), {}, {}

    def serve(rank: int) -> None:
        bench = make_cache(pages=8)
        bench.serve(text(1, 13 if rank else 9))
        handles: list[Any] = [bench.cache.acquire(text(1, 13)), None if rank else bench.cache.acquire(text(2, 9))]
        agreement = HitAgreement(group.of(rank), width=3, companions=companions)
        answers[rank] = agreement.limit(bench.cache, handles)
        for handle, everywhere in zip(handles, answers[rank], strict=True):
            if handle is not None and not everywhere:
                bench.cache.abort(handle)
        hits[rank] = handles[0].hit_tokens
        bench.cache.finish(handles[0], bench.run(handles[0]))
        bench.check_books()

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {0: [True, False], 1: [True, False]} and hits == {0: 8, 1: 8}
    assert group.sizes == [5] * (1 + companions)


@pytest.mark.parametrize("companions", [False, True])
def test_ranks_with_other_numbers_of_requests_all_hear_of_it(
    make_cache: Callable[..., Any], text: Callable[[int, int], list[int]], companions: bool
) -> None:
    group, errors = Group(2), {}

    def serve(rank: int) -> None:
        bench = make_cache(pages=8)
        handles = [bench.cache.acquire(text(name, 9)) for name in range(rank + 1)]
        try:
            HitAgreement(group.of(rank), width=3, companions=companions).limit(bench.cache, handles)
        except AgreementError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors.keys() == {0, 1} and all("from 1 to 2" in text for text in errors.values())
    assert group.sizes == [5]


def test_reductions_that_are_none(make_cache: Callable[..., Any]) -> None:
    for answer in (
        lambda v: v + 4,
        lambda v: v[:1],
        lambda v: v - 100,
        lambda v: np.minimum(v, 8),
        lambda v: np.minimum(v, 1),
    ):
        with pytest.raises(AgreementError):
            HitAgreement(answer, width=3).minimum([4, 8])
    with pytest.raises(AgreementError, match="at most 1"):
        HitAgreement(lambda v: v, width=1).minimum([4, 8])
    with pytest.raises(AgreementError):
        HitAgreement(lambda v: v, width=0)
    for bad in (("zz", 2), ("00", 0)):
        with pytest.raises(AgreementError):
            owner_rank(*bad)


@pytest.mark.parametrize("answer", [None, "x", [float("nan")], [4.0], [[4]], [True], [2**64]])
def test_a_reduction_that_answers_no_hits_is_refused(answer: Any) -> None:
    with pytest.raises(AgreementError, match="reduce_min"):
        HitAgreement(lambda _: answer, width=1).minimum([4])
