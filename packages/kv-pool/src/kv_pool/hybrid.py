"""Owns pools whose layers attend differently: full attention and a sliding window, each group with its own geometry.

One map, from pages of the full group to pages of the window group, is the only place that says where a token lies in
the window group: block tables and write locations of both groups come from the same slots. It does not own memory (each
group is an `MhaPool`) and does not know requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from kv_pool._arguments import check_kind
from kv_pool.allocator import PageAllocator
from kv_pool.errors import ForeignPage, LayoutError, OutOfPages, PageError, RowMismatch, TableError
from kv_pool.mha import MhaPool
from kv_pool.page_map import PageMap
from kv_pool.tables import IndexLike, IntArray, as_index_array, is_whole, whole_number

if TYPE_CHECKING:
    from kv_planner import ModelLayout
    from kv_planner import Part as PartName

__all__ = ["HybridPool", "WindowPages", "WriteSlots"]


@dataclass(frozen=True)
class WriteSlots:
    """Where the rows of one step go, in each group.

    Attributes:
        full: Slots of the full group. Shape: [tokens]; dtype int64, on the pool's device.
        window: Slots of the window group; those of page 0 for tokens that have left the window. Shape: [tokens].
    """

    full: torch.Tensor
    window: torch.Tensor


class WindowPages(PageMap):
    """Pages of both groups, and which window page a full page has: a `PageMap` of equal page sizes.

    Invariants, true before and after every call:

    1. a full page that is free has no window page; no window page belongs to two full pages;
    2. a window page is held at least while a full page names it;
    3. a refused call changes nothing.

    Args:
        full: Allocator of the full group.
        window: Allocator of the window group, of the same page size.

    Raises:
        LayoutError: The page sizes differ.
    """

    def __init__(self, full: PageAllocator, window: PageAllocator) -> None:
        check_kind("full", full, PageAllocator, LayoutError)
        check_kind("window", window, PageAllocator, LayoutError)
        if full.page_size != window.page_size:
            raise LayoutError(
                "window.page_size",
                given=window.page_size,
                expected=full.page_size,
                consequence="one page of a group would lie in two of the other",
                remedy="give both groups one page size",
            )
        super().__init__(full, window)

    @property
    def full(self) -> PageAllocator:
        """Pages of the full group."""
        return self.lead

    @property
    def window(self) -> PageAllocator:
        """Pages of the window group; take and give them back through this class, or a cache over it."""
        return self.own

    def alloc(self, count: int) -> IntArray:
        """Take `count` full pages, each with a window page.

        Returns:
            Full pages. Shape: [count]; dtype int64.

        Raises:
            OutOfPages: One of the groups has too few; none is taken.
        """
        count = whole_number("count", count, most=None, error=PageError, consequence="no page was taken")
        if count > self.window.available:
            raise OutOfPages(
                "count",
                given=count,
                expected=f"at most {self.window.available} free pages of the window group",
                consequence="no page was taken",
                remedy="let pages leave the window (leave), or release requests",
            )
        pages = self.full.alloc(count)
        self.give(pages, self.window.alloc(count))
        return pages

    def retain(self, pages: IndexLike) -> None:
        """Add one holder to each full page; see `PageAllocator.retain`."""
        self.full.retain(pages)

    def release(self, pages: IndexLike) -> None:
        """Drop one holder of each full page; those that are free then lose their window page too.

        Raises:
            ForeignPage, DoubleFree: See `PageAllocator.release`. Nothing is released.
        """
        self.full.release(pages)

    def window_pages(self, pages: IndexLike) -> IntArray:
        """Return the window page of each full page, 0 for those that have left. Shape: [pages]; dtype int64."""
        ids = as_index_array("pages", pages, ForeignPage)
        self.full.holders(ids[ids > 0])  # refuses what is no page of the pool; page 0 maps to page 0
        if ids.size and int(ids.min()) < 0:
            raise ForeignPage(
                "pages",
                given=int(ids.min()),
                expected=f"pages in 0..{self.full.num_pages - 1}",
                consequence="a negative page would wrap around to the end of the pool",
                remedy="pass pages of the full group, padding as 0",
            )
        return self.find(ids)

    def window_slots(self, slots: IndexLike) -> IntArray:
        """Return the window slot of each full slot; slots of page 0 for those that have left, or are padding."""
        ids = as_index_array("slots", slots)
        size = self.full.page_size
        try:
            return self.window_pages(ids // size) * size + ids % size
        except ForeignPage as error:
            raise error.named("pages of the slots") from None

    def window_table(self, table: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the block table of the window group for one of the full group.

        Args:
            table: Shape: [rows, pages]; dtype int32, padded with 0.

        Raises:
            TableError: Not such a table.
        """
        if not isinstance(table, np.ndarray) or table.ndim != 2 or table.dtype != np.int32:
            raise TableError(
                "table",
                given=f"{table.dtype} of shape {table.shape}"
                if isinstance(table, np.ndarray)
                else type(table).__name__,
                expected="int32 of shape [rows, pages]",
                consequence="rows could not be told apart",
                remedy="build it with block_table",
            )
        found: npt.NDArray[np.int32] = self.window_pages(table.reshape(-1)).astype(np.int32)
        return found.reshape(table.shape[0], table.shape[1])

    def verify(self) -> None:
        """Check the invariants with a full pass over both groups, while nobody else holds window pages.

        Raises:
            IntegrityError: See `PageMap.verify`.
            LayoutError: A window page is held that no full page names.
        """
        super().verify()
        named = self.named()
        held = self.window.held - self.window.lingering
        if named.size != held:
            raise LayoutError(
                "window map",
                given=dict(zip(named.tolist(), self.find(named).tolist(), strict=True)),
                expected=f"{held} held window pages, each named by one held full page",
                consequence="a window page is lost",
                remedy="take and release pages of both groups through WindowPages alone",
            )


class HybridPool:
    """Two groups of layers over one set of full pages.

    Invariants:

    1. A layer id belongs to one group, target and draft alike.
    2. Both groups have one page size and one device.
    3. Each group has a manifest of its own: their geometries differ, and so do their page ids.

    Args:
        full: Pool of the layers that attend to everything.
        window: Pool of the layers that attend to a window.

    Raises:
        LayoutError: The groups share a layer, or differ in page size or device.
    """

    def __init__(self, full: MhaPool, window: MhaPool) -> None:
        for name, group in (("full", full), ("window", window)):
            check_kind(name, group, MhaPool, LayoutError)
        ids = [{layer for part in pool.parts for layer in pool.layer_ids(part)} for pool in (full, window)]
        rules: list[tuple[str, object, object]] = [
            ("layers of both groups", sorted(ids[0] & ids[1]), []),
            ("window.page_size", window.page_size, full.page_size),
            ("window.device", window.device, full.device),
        ]
        for argument, given, expected in rules:
            if given != expected:
                raise LayoutError(
                    argument,
                    given=given,
                    expected=expected,
                    consequence="one step could not write both groups",
                    remedy="make both pools for one model on one device, each with its own layers",
                )
        self._groups = {"full": full, "window": window}
        self._group_of = {layer: pool for pool, held in zip((full, window), ids, strict=True) for layer in held}
        self.pages = WindowPages(
            PageAllocator(full.num_pages, full.page_size), PageAllocator(window.num_pages, window.page_size)
        )

    @property
    def full(self) -> MhaPool:
        """The group that attends to everything."""
        return self._groups["full"]

    @property
    def window(self) -> MhaPool:
        """The group that attends to a window."""
        return self._groups["window"]

    @property
    def layouts(self) -> tuple[ModelLayout, ModelLayout]:
        """Layouts of the full and of the window group."""
        return self.full.layout, self.window.layout

    @property
    def nbytes(self) -> int:
        """Bytes of all storage."""
        return self.full.nbytes + self.window.nbytes

    def group_of(self, layer_id: int, part: PartName = "target") -> MhaPool:
        """Return the pool that holds a layer.

        Raises:
            UnknownLayer: Neither does.
        """
        pool = self._group_of.get(layer_id, self.full) if is_whole(layer_id) else self.full
        pool.key(layer_id, part)
        return pool

    def locate(self, slots: IndexLike) -> WriteSlots:
        """Return where rows go in both groups, once a step; not to be called inside graph capture.

        Args:
            slots: Slots of the full group. Shape: [tokens]; padding names slot 0.
        """
        ids = as_index_array("slots", slots)
        window = self.pages.window_slots(ids)
        device = self.full.device
        return WriteSlots(torch.from_numpy(ids.copy()).to(device), torch.from_numpy(window).to(device))

    def write(
        self,
        layer_id: int,
        slots: WriteSlots,
        key: torch.Tensor,
        value: torch.Tensor,
        part: PartName = "target",
    ) -> None:
        """Store one row of K and of V a token in the layer's own group; see `MhaPool.write`.

        Raises:
            UnknownLayer, WriteError: As there, or the slots are not of `locate`.
        """
        pool = self.group_of(layer_id, part)
        check_kind("slots", slots, WriteSlots, RowMismatch)
        pool.write(layer_id, slots.full if pool is self.full else slots.window, key, value, part)
