"""Owns copies of pages in ordinary host memory, and the proof that one fits the pool that it goes into.

For retraction and tests; the cache's own host memory is `kv_pool.hicache`. It does not move bytes (see `Pool`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kv_pool._arguments import check_kind
from kv_pool.errors import LayoutError, PageError
from kv_pool.tables import IndexLike, IntArray, as_index_array

if TYPE_CHECKING:
    import torch
    from kv_planner import Component, ModelLayout
    from kv_planner import Part as PartName

    from kv_pool._geometry import ComponentGeometry

    Name = tuple[Component, PartName]

__all__ = ["PageCopy", "check_copy", "check_items"]


@dataclass(frozen=True)
class PageCopy:
    """Pages of every component of a pool, as bytes.

    Attributes:
        layout: The layout of the pool that they come from.
        pages: How many.
        geometries: Layers, heads, width and dtype of each component.
        rows: Bytes of each component, a tensor a layer. Shape of each: [pages, bytes]; dtype uint8; on the CPU.
    """

    layout: ModelLayout
    pages: int
    geometries: Mapping[Name, ComponentGeometry]
    rows: Mapping[Name, tuple[torch.Tensor, ...]]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(layer.nbytes for layers in self.rows.values() for layer in layers)


def check_items(argument: str, values: IndexLike, count: int) -> IntArray:
    """Return item ids as int64.

    Raises:
        PageError: One is reserved, outside `1..count-1`, or named twice.
    """
    ids = as_index_array(argument, values, PageError)
    wrong = ids[(ids < 1) | (ids >= count)]
    if wrong.size or np.unique(ids).size != ids.size:
        raise PageError(
            argument,
            given=wrong.tolist() if wrong.size else f"{ids.tolist()}, one of them twice",
            expected=f"distinct ids in 1..{count - 1}",
            consequence="bytes of another owner would be copied or overwritten",
            remedy="pass ids that the allocator handed out, each once",
        )
    return ids


def check_copy(copy: PageCopy, layout: ModelLayout, geometries: Mapping[Name, ComponentGeometry], pages: int) -> None:
    """Refuse a copy that is not of this pool's kind, or of another number of pages.

    Raises:
        LayoutError, PageError: As said.
    """
    check_kind("copy", copy, PageCopy, LayoutError)
    if copy.layout != layout or dict(copy.geometries) != dict(geometries):
        raise LayoutError(
            "copy",
            given=f"{copy.layout.fingerprint}: {sorted(copy.geometries)}",
            expected=f"{layout.fingerprint}: {sorted(geometries)}, the same layers, heads, widths and dtypes",
            consequence="rows would come back at other offsets than they were taken from",
            remedy="put a copy back into a pool of the same layout, stage and rank",
        )
    if copy.pages != pages:
        raise PageError(
            "pages",
            given=f"{pages} pages for a copy of {copy.pages}",
            expected="one page a page of the copy",
            consequence="some pages would keep the bytes of their last owner",
            remedy="allocate as many pages as the copy has",
        )
