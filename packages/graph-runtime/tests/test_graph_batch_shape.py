"""Decode or not, and sizes that a scheduler and a draft model share."""

from __future__ import annotations

import pytest
from graph_runtime.batch_shape import BatchShape, batch_shape, row_starts, token_capacity
from graph_runtime.errors import BatchShapeError


def naive_is_decode(query_lens: list[int], window: int) -> bool:
    """The field's way: query lengths alone."""
    return all(n == window for n in query_lens)


@pytest.mark.parametrize(
    ("query", "computed", "window", "shape"),
    [
        ([4, 4], [0, 0], 4, BatchShape.PREFILL),  # C15: prompts as long as the window
        ([4, 4], [10, 0], 4, BatchShape.MIXED),
        ([4, 4], [10, 20], 4, BatchShape.DECODE),
        ([1, 1], [9, 6], 1, BatchShape.DECODE),  # first step after a transfer: all but one computed
        ([4, 3], [10, 20], 4, BatchShape.MIXED),
        ([7, 5], [0, 0], 4, BatchShape.PREFILL),
        ([], [], 4, BatchShape.DECODE),  # an idle rank takes the captured shape
    ],
)
def test_kinds_of_batches(query: list[int], computed: list[int], window: int, shape: BatchShape) -> None:
    assert batch_shape(query, computed, window=window) is shape
    if query == [4, 4] and shape is not BatchShape.DECODE:
        assert naive_is_decode(query, window)


@pytest.mark.parametrize(("query", "computed"), [([4], [1, 2]), ([0], [1]), ([1], [-1])])
def test_numbers_without_sense(query: list[int], computed: list[int]) -> None:
    with pytest.raises(BatchShapeError):
        batch_shape(query, computed)


def test_slots_for_scheduler_and_drafts() -> None:
    """C09: five drafts for 12 requests; two a request hide that one side counted otherwise."""
    assert token_capacity(80, 12, draft_tokens=5) == 128
    assert token_capacity(80, 12, draft_tokens=3) == 104 == 80 + 2 * 12
    assert token_capacity(80, 12, draft_tokens=1) == token_capacity(80, 12, draft_tokens=0) == 80


def test_rows_follow_the_layout() -> None:
    """E03: 3 steps and top-4 with 8 draft tokens lie 8 rows apart, not steps + 1."""
    assert row_starts(3, 8) == [0, 8, 16, 24] != row_starts(3, 3 + 1)
