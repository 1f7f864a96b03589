"""Buckets: which captured size serves a batch."""

from __future__ import annotations

import pytest
from graph_runtime import Buckets
from graph_runtime.errors import BucketError
from hypothesis import given
from hypothesis import strategies as st


def test_smallest_that_holds_the_batch() -> None:
    buckets = Buckets([4, 1, 2])
    assert [buckets.pick(n) for n in range(6)] == [1, 1, 2, 4, 4, None]
    assert buckets.sizes == (1, 2, 4) and buckets.largest == 4 and buckets.smallest == 1
    assert list(buckets) == [1, 2, 4] and len(buckets) == 3 and 2 in buckets and 3 not in buckets
    assert buckets == Buckets((1, 2, 4)) and hash(buckets) == hash(Buckets((1, 2, 4)))


@pytest.mark.parametrize("sizes", [[], [0, 1], [-1], [2, 2], [1.5], [True]])
def test_sizes_that_are_no_buckets(sizes: list[int]) -> None:
    with pytest.raises(BucketError):
        Buckets(sizes)


def test_negative_batch() -> None:
    with pytest.raises(BucketError, match="raw_bs"):
        Buckets([1]).pick(-1)


@given(st.sets(st.integers(1, 64), min_size=1), st.integers(0, 80))
def test_pick_is_the_least_sufficient_size(sizes: set[int], raw_bs: int) -> None:
    picked = Buckets(sizes).pick(raw_bs)
    enough = [size for size in sizes if size >= raw_bs]
    assert picked == (min(enough) if enough else None)
