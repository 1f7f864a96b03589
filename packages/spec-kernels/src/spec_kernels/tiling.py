"""Owns launch sizes of Triton kernels: grids within a device's limit, tiles within its on-chip memory; pure numbers.

Source: triton-ascend refuses grids over 65,535 and needs a kernel's live tiles within 192 KiB of unified buffer.
"""

from __future__ import annotations

__all__ = ["MAX_PROGRAMS", "MAX_TILE_BYTES", "grid", "tile"]

MAX_PROGRAMS = 65_535
MAX_TILE_BYTES = 192 * 1024


def grid(programs: int) -> tuple[int]:
    """Return the grid for so many units of work; kernels step by the number of programs, so each unit is done once."""
    return (max(1, min(programs, MAX_PROGRAMS)),)


def tile(elements: int, *, itemsize: int, live: int = 4) -> int:
    """Return a power of two: what holds `elements`, or the most that fits.

    Args:
        elements: Elements along the tiled axis.
        itemsize: Bytes of the widest element that a tile holds.
        live: Tiles that a kernel holds at once.
    """
    size = 1
    while size < elements and size * 2 * itemsize * live <= MAX_TILE_BYTES:
        size *= 2
    return size
