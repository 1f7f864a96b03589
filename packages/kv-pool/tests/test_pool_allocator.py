"""Owns the proof of the page allocator's invariants, example by example and under random interleavings."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_pool import (
    DoubleFree,
    ForeignPage,
    IntegrityError,
    OutOfPages,
    PageAllocator,
    PageError,
    PageUse,
    PoolSizeError,
)


def test_fresh_pages_ascend_and_page_zero_is_never_given() -> None:
    pool = PageAllocator(6, 4)
    assert pool.alloc(3).tolist() == [1, 2, 3]
    assert pool.alloc(2).tolist() == [4, 5]
    assert (pool.available, pool.held, pool.total) == (0, 5, 5)


def test_released_pages_return_in_order_of_release() -> None:
    pool = PageAllocator(6, 4)
    pages = pool.alloc(5)
    assert pages.dtype == np.int64
    pool.release([4, 2])
    assert pool.alloc(2).tolist() == [4, 2]


def test_shortage_consumes_nothing() -> None:
    pool = PageAllocator(4, 4)
    pool.alloc(1)
    with pytest.raises(OutOfPages, match="at most 2") as caught:
        pool.alloc(3)
    assert isinstance(caught.value, RuntimeError) and caught.value.given == 3
    assert (pool.available, pool.held) == (2, 1)
    assert pool.alloc(0).tolist() == []
    with pytest.raises(PageError):
        pool.alloc(-1)


def test_two_holders_both_let_go() -> None:
    pool = PageAllocator(3, 4)
    page = pool.alloc(1)
    pool.retain(page)
    pool.release(page)
    assert pool.held == 1 and pool.holders(page).tolist() == [1]
    assert page[0] not in pool.alloc(1)
    with pytest.raises(OutOfPages):
        pool.alloc(1)
    pool.release(page)
    assert pool.alloc(1).tolist() == page.tolist()


def test_double_free_is_named_and_changes_nothing() -> None:
    pool = PageAllocator(5, 4)
    pages = pool.alloc(3)
    pool.release([2])
    with pytest.raises(DoubleFree, match=r"\[2\]"):
        pool.release([1, 2])
    with pytest.raises(DoubleFree, match=r"\[3\]"):
        pool.release([3, 3])
    assert pool.holders(pages).tolist() == [1, 0, 1]
    pool.verify()


@pytest.mark.parametrize("page", [0, -1, 5, 2**40])
def test_foreign_pages_are_named(page: int) -> None:
    pool = PageAllocator(5, 4)
    pool.alloc(2)
    for call in (pool.release, pool.retain, pool.in_use, pool.holders):
        with pytest.raises(ForeignPage, match=str(page)):
            call([1, page])
    assert pool.held == 2


def test_retaining_a_free_page_is_refused() -> None:
    pool = PageAllocator(5, 4)
    pool.alloc(1)
    with pytest.raises(ForeignPage, match=r"\[3\]"):
        pool.retain([1, 3])
    assert pool.holders([1]).tolist() == [1]


@pytest.mark.parametrize("pages", [np.array([1.0]), np.array([[1]]), np.array([True]), ["1"]])
def test_only_integer_lists_are_page_lists(pages: object) -> None:
    pool = PageAllocator(5, 4)
    pool.alloc(2)
    with pytest.raises(PageError):
        pool.release(pages)  # type: ignore[arg-type]


def test_any_integer_width_and_stride() -> None:
    pool = PageAllocator(9, 4)
    pool.alloc(8)
    pool.release(np.array([1, 9, 2, 9, 3], dtype=np.int32)[::2])
    pool.release(np.array([8, 7], dtype=np.uint64))
    assert pool.alloc(5).tolist() == [8, 7, 1, 2, 3]


def test_a_page_released_twice_by_two_holders_at_once_is_free_once() -> None:
    pool = PageAllocator(4, 4)
    pool.alloc(2)
    pool.retain([1])
    pool.release([1, 2, 1])
    assert (pool.available, pool.held) == (3, 0)
    pool.verify()
    assert pool.alloc(3).tolist() == [1, 2, 3]


def test_broken_books_are_noticed() -> None:
    pool = PageAllocator(4, 4)
    pool.alloc(1)
    pool._holders[2] = 1
    with pytest.raises(IntegrityError):
        pool.verify()
    with pytest.raises(IntegrityError, match="two owners"):
        pool.alloc(1)
    pool._held = 2
    with pytest.raises(IntegrityError):
        pool.release([1])


def test_too_small() -> None:
    for size in ((1, 4), (4, 0)):
        with pytest.raises(PoolSizeError):
            PageAllocator(*size)


def test_a_page_that_is_read_is_free_when_its_reader_ends() -> None:
    """The owner is gone, the copy is not: nobody gets the page, and the books say where it is."""
    pool = PageAllocator(4, 4)
    pages = pool.alloc(3)
    use = pool.in_use(pages[:2])
    assert pool.release(pages).tolist() == [3]
    assert (pool.available, pool.held, pool.lingering) == (1, 2, 2)
    assert pool.alloc(1).tolist() == [3]
    with pytest.raises(OutOfPages, match="at most 0"):
        pool.alloc(1)
    pool.verify()
    assert use.end().tolist() == [1, 2] and use.ended and use.end().tolist() == []
    assert (pool.available, pool.held, pool.lingering) == (2, 1, 0)
    assert pool.alloc(2).tolist() == [1, 2]


def test_a_use_ends_before_its_owner_and_with_its_block() -> None:
    pool = PageAllocator(3, 4)
    (page,) = pool.alloc(1).tolist()
    with pytest.raises(RuntimeError, match="copy"), pool.in_use([page]) as use:
        assert not use.ended
        raise RuntimeError("the copy failed")
    assert use.ended and pool.lingering == 0 and pool.holders([page]).tolist() == [1]
    assert pool.release([page]).tolist() == [page]


def test_two_uses_of_one_page_both_end() -> None:
    pool = PageAllocator(2, 4)
    pool.alloc(1)
    reader, writer = pool.in_use([1]), pool.in_use([1, 1])
    pool.release([1])
    assert reader.end().tolist() == [] and pool.lingering == 1
    assert writer.end().tolist() == [1] and pool.available == 1
    pool.verify()


def test_a_use_is_no_holder() -> None:
    """A release too many is named though the page is in use; so are uses of pages that nobody holds."""
    pool = PageAllocator(4, 4)
    pool.alloc(2)
    use = pool.in_use([1])
    pool.release([1])
    with pytest.raises(DoubleFree, match=r"\[1\]"):
        pool.release([1])
    for call in (pool.in_use, pool.retain):
        for page in (1, 3, 0, 4):
            with pytest.raises(ForeignPage, match=rf"\[{page}\]"):
                call([2, page])
    assert use.end().tolist() == [1] and pool.holders([1, 2]).tolist() == [0, 1]
    pool.verify()


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator beside counters of holders and of uses."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Counter[int] = Counter()
        self.uses: list[tuple[list[int], list[PageUse]]] = []

    def used(self) -> set[int]:
        return {page for pages, _ in self.uses for page in pages}

    @initialize(pages=st.integers(2, 12))
    def start(self, pages: int) -> None:
        self.pool = PageAllocator(pages, 4)
        self.twin = PageAllocator(pages, 4)

    @rule(count=st.integers(0, 6))
    def alloc(self, count: int) -> None:
        taken = self.held.keys() | self.used()
        if count > self.pool.total - len(taken):
            with pytest.raises(OutOfPages):
                self.pool.alloc(count)
            return
        pages = self.pool.alloc(count).tolist()
        assert pages == self.twin.alloc(count).tolist()
        assert len(set(pages)) == count and not set(pages) & taken and 0 not in pages
        self.held.update(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=4))
        self.pool.retain(pages)
        self.twin.retain(pages)
        self.held.update(pages)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.integers(1, self.pool.total), max_size=5))
        left = Counter(self.held)
        left.subtract(pages)
        if any(count < 0 for count in left.values()):
            with pytest.raises(DoubleFree):
                self.pool.release(pages)
            return
        self.pool.release(np.array(pages, dtype=np.int32))
        self.twin.release(pages)
        self.held = +left

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=4))
        self.uses.append((pages, [self.pool.in_use(pages), self.twin.in_use(pages)]))

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        pages, both = self.uses.pop(data.draw(st.integers(0, len(self.uses) - 1)))
        freed = [use.end().tolist() for use in both]
        left = self.held.keys() | self.used()
        assert freed[0] == freed[1] == [page for page in dict.fromkeys(pages) if page not in left]

    @rule()
    def release_all(self) -> None:
        pages = sorted(self.held.elements())
        self.pool.release(pages)
        self.twin.release(pages)
        self.held.clear()

    @invariant()
    def books(self) -> None:
        if hasattr(self, "pool"):
            self.pool.verify()
            assert self.pool.held == len(self.held.keys() | self.used())
            assert self.pool.lingering == len(self.used() - self.held.keys())
            assert self.pool.available + self.pool.held == self.pool.total
            everything = np.arange(1, self.pool.num_pages)
            assert self.pool.holders(everything).tolist() == [self.held[int(page)] for page in everything]


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAllocatorMachine = AllocatorMachine.TestCase


@pytest.mark.parametrize("value", [0, -1, 4.5, 5.0, float("nan"), float("inf"), True, "5", None])
@pytest.mark.parametrize("name", ["num_pages", "page_size"])
def test_sizes_are_whole_numbers(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"num_pages": 5, "page_size": 4, name: value}
    with pytest.raises(PoolSizeError, match=name):
        PageAllocator(**arguments)


@pytest.mark.parametrize("count", [-1, 0.5, 1.5, float("nan"), True, "1", None])
def test_counts_are_whole_numbers(count: Any) -> None:
    pool = PageAllocator(5, 4)
    with pytest.raises(PageError, match="count"):
        pool.alloc(count)
    pool.verify()
    assert (pool.available, pool.held) == (4, 0)
    assert pool.alloc(np.int32(2)).tolist() == [1, 2]
