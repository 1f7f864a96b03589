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
    assert answers == [[least[:split], least[split:], []]] * 3 and group.sizes == [8, 8, 8]


def test_hits_of_two_caches_become_one(make_cache: Callable[..., Any], text: Callable[[int, int], list[int]]) -> None:
    benches = [make_cache(pages=16), make_cache(pages=16)]
    for bench, length in zip(benches, (26, 13), strict=True):
        bench.serve(text(1, length))
        bench.cache.drain()
    handles = [bench.cache.acquire(text(1, 26)) for bench in benches]
    assert [handle.hit_tokens for handle in handles] == [24, 12]
    least = np.array([12, 2**63 - 1])
    for bench, handle in zip(benches, handles, strict=True):
        HitAgreement(lambda vector: np.minimum(vector, least), width=2).limit(bench.cache, [handle])
        assert handle.hit_tokens == 12
        bench.cache.finish(handle, bench.run(handle))
        bench.check_books()


def test_reductions_that_are_none(make_cache: Callable[..., Any]) -> None:
    for answer in (lambda v: v + 4, lambda v: v[:1], lambda v: v - 100, lambda v: np.minimum(v, 8)):
        with pytest.raises(AgreementError):
            HitAgreement(answer, width=3).minimum([4, 8])
    with pytest.raises(AgreementError, match="at most 1"):
        HitAgreement(lambda v: v, width=1).minimum([4, 8])
    with pytest.raises(AgreementError):
        HitAgreement(lambda v: v, width=0)
    for bad in (("zz", 2), ("00", 0)):
        with pytest.raises(AgreementError):
            owner_rank(*bad)
