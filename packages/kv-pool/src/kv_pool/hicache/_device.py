"""Owns the life of device pages in a cache: taken from the allocator, and overwritten when nobody holds them any more.

A freed page is filled with NaN (or all bits set, for integers), so that a read through a stale block table shows at
once. It does not choose which pages to free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_pool.allocator import PageAllocator, PageUse
    from kv_pool.hicache.host_pool import HostPool, Mirror
    from kv_pool.tables import IndexLike, IntArray

__all__ = ["DevicePages", "fill_poison", "pages_second"]


class DevicePages:
    """An allocator whose freed pages are poisoned on the compute lane, in the order of the work issued there."""

    def __init__(self, allocator: PageAllocator, host: HostPool, *, poison: bool) -> None:
        self._allocator = allocator
        if poison:
            storages = [storage for mirror in host.mirrors for storage in pages_second(mirror)]
            allocator.watch(freed=lambda freed: fill_poison(storages, freed))

    @property
    def available(self) -> int:
        """Free pages."""
        return self._allocator.available

    @property
    def lingering(self) -> int:
        """Pages that nobody holds and somebody still reads or writes."""
        return self._allocator.lingering

    @property
    def total(self) -> int:
        """Pages without page 0."""
        return self._allocator.total

    def alloc(self, count: int) -> IntArray:
        """See `PageAllocator.alloc`."""
        return self._allocator.alloc(count)

    def retain(self, pages: IndexLike) -> None:
        """See `PageAllocator.retain`."""
        self._allocator.retain(pages)

    def in_use(self, pages: IndexLike) -> PageUse:
        """See `PageAllocator.in_use`."""
        return self._allocator.in_use(pages)

    def release(self, pages: IndexLike) -> None:
        """Drop one holder of each page; pages in use are not free, nor poisoned, before the last use has ended."""
        self._allocator.release(pages)


def fill_poison(storages: Sequence[torch.Tensor], pages: IntArray) -> None:
    """Overwrite pages of tensors whose second axis is pages, runs of pages at once."""
    freed = np.sort(pages)
    for run in np.split(freed, np.flatnonzero(np.diff(freed) != 1) + 1):
        for storage in storages:
            storage[:, int(run[0]) : int(run[-1]) + 1].fill_(_poison(storage.dtype))


def pages_second(mirror: Mirror) -> list[torch.Tensor]:
    """The device memory of a mirror as tensors whose second axis is pages, as few as possible."""
    return [mirror.parent] if mirror.parent is not None else [layer.unsqueeze(0) for layer in mirror.layers]


def _poison(dtype: torch.dtype) -> float:
    """NaN, or all bits set; a packed record of 8-bit floats reads that as NaN too."""
    return float("nan") if dtype.is_floating_point else 255 if dtype == torch.uint8 else -1
