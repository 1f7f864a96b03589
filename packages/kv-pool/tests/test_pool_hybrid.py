"""Owns the proof that two groups of layers share one slot map, and that no window page has two owners (on a CPU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_planner import ModelLayout
from kv_pool import (
    DoubleFree,
    ForeignPage,
    HybridPool,
    LayoutError,
    MhaPool,
    OutOfPages,
    PageAllocator,
    TableError,
    UnknownLayer,
    WindowPages,
    block_table,
    slots_for,
)

Layout = Callable[..., ModelLayout]


@pytest.fixture
def pool(make_layout: Layout) -> HybridPool:
    full = MhaPool(make_layout(layers=(0, 3), heads=1, dims=8, value_dims=6), size=40, device="cpu")
    window = MhaPool(make_layout(layers=(1, 2), heads=2, dims=4, value_dims=2, dtype="int8"), size=16, device="cpu")
    return HybridPool(full, window)


def test_each_layer_is_written_in_its_own_group(pool: HybridPool, make_labels: Callable[..., torch.Tensor]) -> None:
    first = pool.pages.alloc(1)  # another request's
    pages = pool.pages.alloc(3)
    pool.pages.release(first)
    assert pool.pages.leave(pages[:1]) == 1 and pool.pages.leave(pages[:1]) == 0
    slots = slots_for(pages, 0, 10, 4)
    where = pool.locate(slots)
    assert where.full.tolist() == slots.tolist()
    assert where.window.tolist()[:4] == [0, 1, 2, 3]  # gone: rows of the reserved page
    assert where.window.tolist()[4:] == slots_for(pool.pages.window_pages(pages[1:]), 0, 6, 4).tolist()
    for layer, heads, dims, value_dims, dtype in ((3, 1, 8, 6, torch.float16), (2, 2, 4, 2, torch.int8)):
        key, value = make_labels([10, heads, dims], dtype, 1), make_labels([10, heads, value_dims], dtype, 2)
        pool.write(layer, where, key, value)
        held, at = pool.group_of(layer), where.full if layer == 3 else where.window
        for token in range(4, 10):
            page, offset = divmod(int(at[token]), 4)
            assert torch.equal(held.key(layer)[page, offset], key[token])
            assert torch.equal(held.value(layer)[page, offset], value[token])
    assert not pool.full.key(0).any() and not pool.window.key(1).any()
    with pytest.raises(UnknownLayer):
        pool.write(7, where, key, value)
    assert pool.nbytes == pool.full.nbytes + pool.window.nbytes and len(pool.layouts) == 2


def test_block_tables_of_both_groups_come_from_one(pool: HybridPool) -> None:
    rows = [pool.pages.alloc(2), pool.pages.alloc(1)]
    table = block_table(rows, columns=3)
    windows = pool.pages.window_table(table)
    assert windows.dtype == np.int32 and windows.shape == table.shape
    for row, pages in enumerate(rows):
        assert windows[row, : len(pages)].tolist() == pool.pages.window_pages(pages).tolist()
        assert not windows[row, len(pages) :].any()
    with pytest.raises(TableError):
        pool.pages.window_table(table.astype(np.int64))
    for bad in ([-1], [11]):
        with pytest.raises(ForeignPage):
            pool.pages.window_pages(bad)
        with pytest.raises(ForeignPage):
            pool.pages.window_slots([bad[0] * 4])


def test_a_recycled_page_forgets_its_window_page() -> None:
    """A map entry that outlives its page would let its first owner free another's window page."""
    pages = WindowPages(PageAllocator(3, 4), PageAllocator(6, 4))
    old = pages.alloc(2)
    window = pages.window_pages(old).copy()
    pages.release(old)
    assert not pages.window_pages(old).any() and pages.window.available == 5
    new = pages.alloc(2)
    assert sorted(new.tolist()) == sorted(old.tolist())
    with pytest.raises(DoubleFree):
        pages.release([int(new[0]), int(new[0])])
    pages.verify()
    assert (pages.window.holders(pages.window_pages(new)) == 1).all() and set(window.tolist()) <= set(range(6))


def test_shortage_of_either_group_takes_nothing() -> None:
    pages = WindowPages(PageAllocator(9, 4), PageAllocator(4, 4))
    with pytest.raises(OutOfPages, match="window group"):
        pages.alloc(4)
    held = pages.alloc(3)
    pages.leave(held)
    assert pages.alloc(3).size == 3
    pages.leave(held)
    with pytest.raises(OutOfPages):
        pages.alloc(3)
    assert pages.full.held == 6 and pages.window.held == 3
    pages.verify()


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["alloc", "leave", "release", "retain"]), st.integers(0, 5)), max_size=40)
)
def test_any_order_of_calls_keeps_the_groups_consistent(steps: list[tuple[str, int]]) -> None:
    pages = WindowPages(PageAllocator(8, 2), PageAllocator(5, 2))
    holders: dict[int, int] = {}
    inside: set[int] = set()
    for call, number in steps:
        if call == "alloc":
            free = min(7 - len(holders), 4 - len(inside))
            if number > free:
                with pytest.raises(OutOfPages):
                    pages.alloc(number)
            else:
                new = pages.alloc(number).tolist()
                assert not set(new) & set(holders)
                holders.update(dict.fromkeys(new, 1))
                inside.update(new)
        elif holders:
            page = sorted(holders)[number % len(holders)]
            if call == "leave":
                assert pages.leave([page]) == (page in inside)
                inside.discard(page)
            elif call == "retain":
                pages.retain([page])
                holders[page] += 1
            else:
                pages.release([page])
                holders[page] -= 1
                if not holders[page]:
                    del holders[page]
                    inside.discard(page)
        pages.verify()
        assert pages.full.held == len(holders) and pages.window.held == len(inside)
        assert {page for page in range(8) if pages.window_pages([page])[0]} == inside


def test_groups_that_do_not_belong_together(make_layout: Layout) -> None:
    def group(layers: Any, **options: Any) -> MhaPool:
        return MhaPool(make_layout(layers=layers, **options), size=8, device="cpu")

    with pytest.raises(LayoutError, match="layers of both"):
        HybridPool(group((0, 1)), group((1,)))
    with pytest.raises(LayoutError, match="page_size"):
        HybridPool(group((0,)), group((1,), page_size=8))
    with pytest.raises(LayoutError, match="page_size"):
        WindowPages(PageAllocator(3, 4), PageAllocator(3, 8))
    pages = WindowPages(PageAllocator(3, 4), PageAllocator(3, 4))
    pages.alloc(1)
    pages.window.alloc(1)
    with pytest.raises(LayoutError, match="window map"):
        pages.verify()
    with pytest.raises(ForeignPage):
        pages.leave([2])
