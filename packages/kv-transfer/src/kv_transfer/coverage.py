"""Which (layer, page) of a room was handed to the engine: each exactly once.

Counts claims; it does not know whether the bytes have arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import kv_planner
import numpy as np

from kv_transfer.errors import CoverageError

__all__ = ["Coverage", "Layer"]

Layer = tuple[kv_planner.Part, int]
"""(part, layer id)."""


class Coverage:
    """A table of layers by pages of one room at one sender.

    Args:
        layers: What the route to the receiver holds.
        pages: Pages that are to be sent.
        first_page: Index of the first of them within the request.
        label: Begins the texts of errors, where a room has several tables.
    """

    def __init__(self, layers: Sequence[Layer], pages: int, first_page: int = 0, label: str = "") -> None:
        """Nothing is claimed yet."""
        self._label = label
        self._first = first_page
        self._layers = tuple(layers)
        self._rows = {layer: index for index, layer in enumerate(self._layers)}
        self._claimed = np.zeros((len(self._layers), pages), np.bool_)

    @property
    def pages(self) -> int:
        """Pages that are to be sent."""
        return int(self._claimed.shape[1])

    def check(self, layers: Iterable[Layer], start: int, count: int) -> None:
        """Raises `CoverageError` when one of pages [start, start + count) of `layers` was claimed before."""
        rows = [self._rows[layer] for layer in layers]
        begin = start - self._first
        window = self._claimed[rows, begin : begin + count]
        if window.any():
            cells = tuple((*self._layers[rows[int(row)]], start + int(page)) for row, page in np.argwhere(window)[:16])
            part, layer, page = cells[0]
            raise CoverageError(
                f"{self._label}{part} layer {layer}, page {page} of the request was sent already "
                f"({int(window.sum())} such pairs)",
                cells=cells,
                remedy="send each page of each layer once",
            )

    def claim(self, layers: Iterable[Layer], start: int, count: int) -> None:
        """Marks pages [start, start + count) of the request, of `layers`; all of them or none.

        Raises:
            CoverageError: One of them was claimed before; it is named.
        """
        wanted = list(layers)
        self.check(wanted, start, count)
        begin = start - self._first
        self._claimed[[self._rows[layer] for layer in wanted], begin : begin + count] = True

    def check_complete(self) -> None:
        """Raises `CoverageError` unless every page of every layer was claimed; names the first gaps."""
        gaps = np.argwhere(~self._claimed)
        if len(gaps):
            cells = tuple((*self._layers[int(row)], self._first + int(page)) for row, page in gaps[:16])
            part, layer, page = cells[0]
            raise CoverageError(
                f"{self._label}{part} layer {layer}, page {page} of the request was never sent "
                f"({len(gaps)} such pairs of {self._claimed.size})",
                cells=cells,
                remedy="send it, or abort the room",
            )
