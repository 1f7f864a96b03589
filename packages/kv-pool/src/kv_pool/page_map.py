"""Owns the map from pages of a leading group to pages of another one: where a group of layers keeps what a page holds.

A page of the other group is named by at most one leading page, and leaves with it: the map is told by the leading
allocator what became free. It may leave earlier, when room is needed and nobody else holds it. It does not own memory,
nor which tokens a page holds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kv_pool._arguments import check_kind
from kv_pool.allocator import PageAllocator
from kv_pool.errors import ForeignPage, IntegrityError, PageError
from kv_pool.tables import IndexLike, IntArray, as_index_array, is_whole, whole_number

__all__ = ["PageMap"]


class PageMap:
    """Which page of its own a group has for each page of the leading group.

    Invariants, true before and after every call:

    1. a leading page that is free has no own page; no own page belongs to two leading pages;
    2. the map is one holder of each own page that it names; whoever reads or writes one is another;
    3. a refused call changes nothing.

    Args:
        lead: Allocator of the leading group.
        own: Allocator of this group; its page size may differ (rows of states have 1).

    Raises:
        PageError: One is no allocator.
    """

    def __init__(self, lead: PageAllocator, own: PageAllocator) -> None:
        self._lead = check_kind("lead", lead, PageAllocator, PageError)
        self._own = check_kind("own", own, PageAllocator, PageError)
        self._map: IntArray = np.zeros(lead.num_pages, dtype=np.int64)
        self._used: IntArray = np.zeros(lead.num_pages, dtype=np.int64)
        self._clock = 0
        lead.watch(left=self._drop)

    @property
    def lead(self) -> PageAllocator:
        """Pages of the leading group."""
        return self._lead

    @property
    def own(self) -> PageAllocator:
        """Pages of this group."""
        return self._own

    def find(self, pages: IntArray) -> IntArray:
        """Return the own page of each leading page, 0 where there is none; what is below 1 has none. Shape: [pages].

        Raises:
            ForeignPage: Pages that are no integers, or outside the leading group.
        """
        ids = as_index_array("pages", pages, ForeignPage)
        try:
            found: IntArray = self._map[np.maximum(ids, 0)]
        except IndexError:
            raise ForeignPage(
                "pages",
                given=int(ids.max()),
                expected=f"pages below {self._lead.num_pages}",
                consequence="it is no page of the leading group",
                remedy="pass pages that its allocator handed out",
            ) from None
        return found

    def named(self) -> IntArray:
        """Leading pages that have an own page, in ascending order."""
        return np.flatnonzero(self._map)

    def give(self, pages: IntArray, own_pages: IntArray) -> None:
        """Name an own page for each leading page; the map takes over one holder of each.

        Raises:
            ForeignPage: A leading page that nobody holds or that has an own page, or an own page that nobody holds or
                that is named; or lists of unequal lengths.
        """
        pages, own_pages = _pairs(pages=pages, own_pages=own_pages)
        free = _holders(self._lead, "pages", pages) == 0
        foreign = (_holders(self._own, "own_pages", own_pages) == 0) | np.isin(own_pages, self._map[self._map > 0])
        wrong = free | (self._map[pages] > 0) | foreign
        if wrong.any() or np.unique(pages).size != pages.size or np.unique(own_pages).size != own_pages.size:
            raise ForeignPage(
                "pages, own_pages",
                given=list(zip(pages.tolist(), own_pages.tolist(), strict=True)),
                expected="held pages without an own page, and held own pages that no page names, each once",
                consequence="two owners would write into the same page",
                remedy="take pages from the allocators first",
            )
        self._map[pages] = own_pages

    def pass_on(self, source: IntArray, target: IntArray) -> None:
        """Let leading pages in `target` name what those in `source` named; both hold the same tokens.

        Args:
            source: Held leading pages. Shape: [pages].
            target: One each, each once; those that have an own page already keep it.

        Raises:
            ForeignPage: A page outside the leading group, one that is named twice, or lists of unequal lengths.
        """
        source, target = _pairs(source=source, target=target)
        _holders(self._lead, "source", source)
        held = _holders(self._lead, "target", target) > 0
        moved = (self._map[source] > 0) & (self._map[target] == 0) & held
        self._map[target[moved]] = self._map[source[moved]]
        self._used[target[moved]] = self._used[source[moved]]
        self._map[source[moved]] = 0

    def leave(self, pages: IndexLike) -> int:
        """Drop the own pages of leading pages, which stay.

        Returns:
            Own pages that were dropped; pages that had none count nothing.

        Raises:
            ForeignPage: A leading page that nobody holds.
        """
        ids = np.unique(as_index_array("pages", pages, ForeignPage))
        free = ids[self._lead.holders(ids) == 0]
        if free.size:
            raise ForeignPage(
                "pages",
                given=free.tolist(),
                expected="pages that somebody holds",
                consequence="the page of the next owner would be freed",
                remedy="let pages leave before they are released",
            )
        inside = ids[self._map[ids] > 0]
        self._drop(inside)
        return int(inside.size)

    def touch(self, pages: IntArray) -> None:
        """Count leading pages as used just now, the last of the list as the youngest.

        Raises:
            ForeignPage: A page outside the leading group.
        """
        ids = as_index_array("pages", pages, ForeignPage)
        self._lead.holders(ids)
        self._used[ids] = self._clock + np.arange(ids.size)
        self._clock += ids.size

    def evict(self, count: int) -> int:
        """Drop up to `count` own pages that nobody else holds, the longest unused first; returns how many.

        Raises:
            PageError: No number of pages.
        """
        if not is_whole(count) or count > 0:  # below 0 where a caller has more room than it needs
            count = whole_number("count", count, most=None, error=PageError, consequence="no page was dropped")
        named = self.named() if count > 0 else np.zeros(0, dtype=np.int64)
        idle = named[self._own.holders(self._map[named]) == 1]
        if idle.size > count:
            idle = idle[np.argsort(self._used[idle], kind="stable")[:count]]
        self._drop(idle)
        return int(idle.size)

    def verify(self) -> None:
        """Check the invariants with a full pass over both groups.

        Raises:
            IntegrityError: An allocator contradicts itself, or the map names a page twice, for a free page, or one that
                nobody holds.
        """
        self._lead.verify()
        self._own.verify()
        named = self.named()
        own = self._map[named]
        unowned = bool((self._lead.holders(named) == 0).any() or (self._own.holders(own) == 0).any())
        if unowned or np.unique(own).size != own.size:
            raise IntegrityError(
                "page map",
                given=dict(zip(named.tolist(), own.tolist(), strict=True)),
                expected="held own pages, each named by one held leading page",
                consequence="two requests would write into the same page",
                remedy="this is a defect: report it with the calls that led here",
            )

    def _drop(self, pages: IntArray) -> None:
        """Let go of the own pages that leading pages name."""
        inside = pages[self._map[pages] > 0]
        own = self._map[inside]
        self._map[inside] = 0
        self._own.release(own)


def _holders(allocator: PageAllocator, name: str, pages: IntArray) -> npt.NDArray[np.int32]:
    """Holders of the pages of the argument `name`."""
    try:
        return allocator.holders(pages)
    except ForeignPage as error:
        raise error.named(name) from None


def _pairs(**lists: IndexLike) -> list[IntArray]:
    """Return lists of which each names a page once, and all as many as the others."""
    found = [as_index_array(name, pages, ForeignPage) for name, pages in lists.items()]
    if any(not pages.size == np.unique(pages).size == found[0].size for pages in found):
        raise ForeignPage(
            ", ".join(lists),
            given=[pages.tolist() for pages in found],
            expected="pages that pair, each once",
            consequence="two owners would write into the same page",
            remedy="pass one page for each page",
        )
    return found
