"""Owns which pages of a pool are free and how many holders each page has.

Invariants, true before and after every call:

1. page 0 is never handed out;
2. every other page is either free or held, never both: `available + held == total`; a held page has a holder, or it
   lingers;
3. a page that a copy or a transfer reads or writes (`in_use`) lingers when its last holder releases it, and is free
   when the last of them ends;
4. a refused call changes nothing;
5. the same calls in the same order hand out the same pages.

It does not own memory, and it does not know which request holds a page.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kv_pool._arguments import check_call
from kv_pool.errors import DoubleFree, ForeignPage, IntegrityError, OutOfPages, PageError, PoolSizeError
from kv_pool.tables import INT32_MAX, IndexLike, IntArray, as_index_array, whole_number

__all__ = ["PageAllocator", "PageUse"]

_ONE = np.int32(1)  # of the holders' own type: with a Python int, numpy's `at` takes a way that is 20 times as slow


class PageAllocator:
    """Reference-counted allocator over the pages `1..num_pages-1`.

    Not thread-safe: one owner calls it, as one scheduler owns a pool.

    Args:
        num_pages: Pages of the pool, the reserved page 0 included.
        page_size: Tokens in a page.

    Raises:
        PoolSizeError: Fewer than two pages, a page size below 1, one that is no whole number, or more than a block
            table can name.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        consequence = "page 0 is reserved, so no page could be handed out"
        num_pages = whole_number(
            "num_pages", num_pages, least=2, most=INT32_MAX, error=PoolSizeError, consequence=consequence
        )
        consequence = "no slot of a page could be computed"
        page_size = whole_number(
            "page_size", page_size, least=1, most=INT32_MAX, error=PoolSizeError, consequence=consequence
        )
        self._num_pages = num_pages
        self._page_size = page_size
        self._holders: npt.NDArray[np.int32] = np.zeros(num_pages, dtype=np.int32)
        self._users: npt.NDArray[np.int32] = np.zeros(num_pages, dtype=np.int32)
        self._stack: IntArray = np.arange(num_pages - 1, 0, -1, dtype=np.int64)
        self._top = num_pages - 1
        self._held = 0
        self._lingering = 0
        self._mark: IntArray = np.zeros(num_pages, dtype=np.int64)
        self._on_left: list[Callable[[IntArray], object]] = []
        self._on_freed: list[Callable[[IntArray], object]] = []

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the reserved page 0 included."""
        return self._num_pages

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._page_size

    @property
    def total(self) -> int:
        """Pages that can be handed out: `num_pages - 1`."""
        return self._num_pages - 1

    @property
    def available(self) -> int:
        """Free pages."""
        return self._top

    @property
    def held(self) -> int:
        """Pages that are not free: those with a holder, and those that linger."""
        return self._held

    def watch(
        self, *, left: Callable[[IntArray], object] | None = None, freed: Callable[[IntArray], object] | None = None
    ) -> None:
        """Have functions called at the end of each release or use; they must not take pages from this allocator.

        Args:
            left: Gets pages that lost their last holder, also when they linger. What belongs to a page (its pages in
                another group) is given back there, so that it never outlives the owner.
            freed: Gets pages that became free: nobody reads or writes them any more.

        Raises:
            PageError: One cannot be called.
        """
        check_call("left", left, PageError)
        check_call("freed", freed, PageError)
        if left is not None:
            self._on_left.append(left)
        if freed is not None:
            self._on_freed.append(freed)

    @property
    def lingering(self) -> int:
        """Pages that nobody holds any more, which a copy or a transfer still reads or writes."""
        return self._lingering

    def holders(self, pages: IndexLike) -> npt.NDArray[np.int32]:
        """Return how many holders each page has. Shape: [n]; dtype int32. Raises ForeignPage outside the pool."""
        counts: npt.NDArray[np.int32] = self._holders[self._ids(pages)]
        return counts

    def alloc(self, count: int) -> IntArray:
        """Take `count` free pages, each with one holder.

        A fresh allocator hands pages out in ascending order; released pages come back in the order of their release.

        Args:
            count: Pages to take; 0 is allowed.

        Returns:
            Shape: [count]; dtype int64.

        Raises:
            OutOfPages: Fewer pages are free; none is taken.
            PageError: `count` is negative or no whole number.
            IntegrityError: A page on the free list has a holder.
        """
        count = whole_number("count", count, most=None, error=PageError, consequence="no page was taken")
        if count > self._top:
            raise OutOfPages(
                "count",
                given=count,
                expected=f"at most {self._top} free pages (of {self.total}, {self._held} held)",
                consequence="no page was taken",
                remedy="release pages, evict, or wait",
            )
        pages: IntArray = self._stack[self._top - count : self._top][::-1].copy()
        if self._holders[pages].any() or self._users[pages].any():
            raise IntegrityError(
                "free list",
                given=pages[(self._holders[pages] > 0) | (self._users[pages] > 0)].tolist(),
                expected="pages without a holder, a reader or a writer",
                consequence="a page would have two owners",
                remedy="this is a defect: report it with the calls that led here",
            )
        self._holders[pages] = 1
        self._top -= count
        self._held += count
        self._check()
        return pages

    def retain(self, pages: IndexLike) -> None:
        """Add one holder to each page; a page listed twice gets two.

        Raises:
            ForeignPage: A page is outside the pool, reserved, or free.
        """
        np.add.at(self._holders, self._held_ids(pages), _ONE)

    def in_use(self, pages: IndexLike) -> PageUse:
        """Declare that a copy or a transfer reads or writes pages, until the use ends.

        It is no holder: whoever releases the pages meanwhile is served, and told of a release too many, but the pages
        are handed to nobody before the use ends.

        Args:
            pages: Pages that somebody holds; a page listed twice is used twice.

        Returns:
            The use; end it when no byte of the pages is read or written any more.

        Raises:
            ForeignPage: A page is outside the pool, reserved, free, or lingers.
        """
        ids = self._held_ids(pages)
        np.add.at(self._users, ids, _ONE)
        return PageUse(self, ids)

    def release(self, pages: IndexLike) -> IntArray:
        """Drop one holder of each page; pages without a holder and not in use become free, in the order given.

        Returns:
            Pages that became free. Shape: [freed]; dtype int64.

        Raises:
            ForeignPage: A page is outside the pool or reserved.
            DoubleFree: A page is released more often than it is held. Nothing is released then.
        """
        ids = self._ids(pages)
        if not ids.size:
            return ids
        np.subtract.at(self._holders, ids, _ONE)
        left = self._holders[ids]
        if int(left.min()) < 0:
            np.add.at(self._holders, ids, _ONE)
            raise DoubleFree(
                "pages",
                given=np.unique(ids[left < 0]).tolist(),
                expected="pages that are still held as often as they are released",
                consequence="a page freed twice would be handed to two owners; nothing was released",
                remedy="release each page once per alloc or retain",
            )
        ended = self._once(ids[left == 0])
        idle = self._users[ended] == 0
        freed: IntArray = ended[idle]
        self._lingering += ended.size - freed.size
        self._free(freed)
        if ended.size:
            for watcher in self._on_left:
                watcher(ended)
        return freed

    def _end(self, ids: IntArray) -> IntArray:
        """End one use of each page, and free those that lingered for it."""
        np.subtract.at(self._users, ids, _ONE)
        freed = self._once(ids[(self._users[ids] == 0) & (self._holders[ids] == 0)])
        self._lingering -= freed.size
        return self._free(freed)

    def _once(self, ids: IntArray) -> IntArray:
        """Each page once, in the order given."""
        order = np.arange(ids.size, dtype=np.int64)
        self._mark[ids[::-1]] = order[::-1]
        once: IntArray = ids[self._mark[ids] == order]
        return once

    def _free(self, freed: IntArray) -> IntArray:
        self._stack[self._top : self._top + freed.size] = freed[::-1]
        self._top += freed.size
        self._held -= freed.size
        self._check()
        if freed.size:
            for watcher in self._on_freed:
                watcher(freed)
        return freed

    def verify(self) -> None:
        """Recount everything from scratch: every page is free once or held, never both.

        Takes time proportional to the pool; the running check after each call does not need it.

        Raises:
            IntegrityError: The books contradict each other.
        """
        free = self._stack[: self._top]
        seen = np.bincount(free, minlength=self._num_pages)
        lingers = (self._holders == 0) & (self._users > 0)
        wrong = np.flatnonzero((seen + (self._holders > 0) + lingers)[1:] != 1) + 1
        held = int((self._holders > 0).sum())
        counts = (held + int(lingers.sum()), int(lingers.sum()))
        if (
            wrong.size
            or seen[0]
            or self._holders[0]
            or self._users.min() < 0
            or counts != (self._held, self._lingering)
        ):
            raise IntegrityError(
                "pages",
                given=wrong.tolist(),
                expected="every page free once or held",
                consequence="a page may be lost or have two owners",
                remedy="this is a defect: report it with the calls that led here",
            )
        self._check()

    def _check(self) -> None:
        if self._top + self._held != self._num_pages - 1 or self._held < 0:
            raise IntegrityError(
                "available + held",
                given=f"{self._top} + {self._held}",
                expected=self.total,
                consequence="a page may be lost or have two owners",
                remedy="this is a defect: report it with the calls that led here",
            )

    def _held_ids(self, pages: IndexLike) -> IntArray:
        ids = self._ids(pages)
        free = ids[self._holders[ids] == 0]
        if free.size:
            raise ForeignPage(
                "pages",
                given=free.tolist(),
                expected="pages that somebody holds",
                consequence="a free page may be handed to another owner at any moment",
                remedy="take it with alloc, or retain it before its last holder releases it",
            )
        return ids

    def _ids(self, pages: IndexLike) -> IntArray:
        ids = as_index_array("pages", pages, PageError)
        if ids.size and (int(ids.min()) < 1 or int(ids.max()) >= self._num_pages):
            raise ForeignPage(
                "pages",
                given=ids[(ids < 1) | (ids >= self._num_pages)].tolist(),
                expected=f"page ids in 1..{self._num_pages - 1}",
                consequence="page 0 is reserved for padded rows, and other ids belong to no page of this pool",
                remedy="pass pages that this allocator handed out",
            )
        return ids


class PageUse:
    """Pages that a copy or a transfer reads or writes; a context that ends with its block.

    Args:
        allocator: Whose pages they are.
        pages: The pages.
    """

    def __init__(self, allocator: PageAllocator, pages: IntArray) -> None:
        self._allocator = allocator
        self._pages: IntArray | None = pages.copy()

    @property
    def ended(self) -> bool:
        """Whether the pages are read and written no more."""
        return self._pages is None

    def end(self) -> IntArray:
        """End the use; pages that nobody holds any more become free. A second call does nothing.

        Returns:
            Pages that became free. Shape: [freed]; dtype int64.
        """
        pages, self._pages = self._pages, None
        return np.zeros(0, dtype=np.int64) if pages is None else self._allocator._end(pages)

    def __enter__(self) -> PageUse:
        """The use itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it, also when the block raises."""
        self.end()
