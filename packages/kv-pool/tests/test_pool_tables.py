"""Owns the proof of page, slot and table arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_pool import TableError, block_table, slots_for


@given(
    pages=st.lists(st.integers(1, 50), min_size=1, max_size=6, unique=True),
    page_size=st.sampled_from([1, 3, 4, 128]),
    data=st.data(),
)
def test_slots_follow_the_definition(pages: list[int], page_size: int, data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, len(pages) * page_size))
    start = data.draw(st.integers(0, stop))
    slots = slots_for(np.array(pages, dtype=np.int32), start, stop, page_size)
    assert slots.dtype == np.int64
    assert slots.tolist() == [pages[p // page_size] * page_size + p % page_size for p in range(start, stop)]


def test_large_pages_are_multiplied_in_64_bits() -> None:
    slots = slots_for(np.array([14_340, 2**31 - 1], dtype=np.int32), 255, 257, 256)
    assert slots.tolist() == [14_340 * 256 + 255, (2**31 - 1) * 256]


@pytest.mark.parametrize(
    ("pages", "start", "stop", "size"),
    [
        ([3], 0, 5, 4),
        ([3], 3, 2, 4),
        ([3], -1, 2, 4),
        ([0], 0, 1, 4),
        ([3, -1], 3, 5, 4),
        ([3], 0, 1, 0),
        ([], 0, 1, 4),
    ],
)
def test_positions_without_a_page_are_refused(pages: list[int], start: int, stop: int, size: int) -> None:
    with pytest.raises(TableError):
        slots_for(pages, start, stop, size)


def test_only_pages_in_use_are_looked_at() -> None:
    assert slots_for([7, 0], 0, 4, 4).tolist() == [28, 29, 30, 31]
    assert slots_for([], 0, 0, 4).tolist() == []


def test_block_table_pads_with_the_reserved_page() -> None:
    table = block_table([[5, 2], np.array([9], dtype=np.int64), []], columns=3, rows=5)
    assert table.dtype == np.int32
    assert table.tolist() == [[5, 2, 0], [9, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("requests", "columns", "rows"),
    [([[1, 2, 3]], 2, None), ([[1], [2]], 2, 1), ([[0]], 1, None), ([[-1]], 1, None), ([[2**31]], 1, None)],
)
def test_what_does_not_fit_a_table(requests: list[list[int]], columns: int, rows: int | None) -> None:
    with pytest.raises(TableError):
        block_table(requests, columns=columns, rows=rows)


@given(page=st.integers(1, 2**63 - 1), page_size=st.integers(1, 2**40), data=st.data())
def test_a_slot_is_exact_or_refused(page: int, page_size: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, page_size - 1))
    if (page + 1) * page_size > 2**63:
        with pytest.raises(TableError, match="wrap"):
            slots_for(np.array([page]), position, position + 1, page_size)
    else:
        assert slots_for(np.array([page]), position, position + 1, page_size).tolist() == [page * page_size + position]


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 128, 2**20])
def test_the_last_page_that_fits_int64(page_size: int) -> None:
    last = 2**63 // page_size - 1
    assert slots_for([last], page_size - 1, page_size, page_size).tolist() == [last * page_size + page_size - 1]
    if page_size > 1:
        with pytest.raises(TableError, match="wrap"):
            slots_for([last + 1], 0, 1, page_size)


@pytest.mark.parametrize("value", [-1, 0.5, 4.5, float("nan"), True, "4", None])
@pytest.mark.parametrize("name", ["start", "stop", "page_size"])
def test_positions_are_whole_numbers(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"start": 0, "stop": 4, "page_size": 4, name: value}
    with pytest.raises(TableError, match=name):
        slots_for([1, 2], **arguments)


@pytest.mark.parametrize("value", [-1, 1.5, float("nan"), True, "4"])
@pytest.mark.parametrize("name", ["columns", "rows"])
def test_table_sizes_are_whole_numbers(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"columns": 2, "rows": 2, name: value}
    with pytest.raises(TableError, match=name):
        block_table([], **arguments)


def test_numpy_integers_are_whole_numbers() -> None:
    assert slots_for([3], np.int32(0), np.int64(2), np.int32(4)).tolist() == [12, 13]
    assert block_table([[1]], columns=np.int32(2), rows=np.int64(1)).tolist() == [[1, 0]]
