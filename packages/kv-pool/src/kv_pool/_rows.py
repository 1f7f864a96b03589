"""Owns how a pool stores rows in the form that its operators read: paged as it is, or in tiles (NZ).

It does not own the operators that store (see `writers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kv_pool._storage import Form, check_form, shaped, tiles_of
from kv_pool.errors import UnknownWriter
from kv_pool.writers import WriterName, create_writer
from kv_pool.writers._checks import check_write

if TYPE_CHECKING:
    from kv_pool._geometry import ComponentGeometry

__all__ = ["RowStore", "nz_slots"]

_SLOT_DTYPES = (torch.int32, torch.int64)


def nz_slots(slots: torch.Tensor, page_size: int, tiles: int) -> torch.Tensor:
    """Return the tile rows of token slots: `(page * tiles + tile) * page_size + offset`, token by token.

    Args:
        slots: Shape: [tokens]; int32 or int64. Not mutated.
        page_size: Tokens in a page.
        tiles: Tiles of a token.

    Returns:
        Shape: [tokens * tiles]; dtype int64; on the device of `slots`.
    """
    wide = slots.to(torch.int64)
    page, offset = torch.div(wide, page_size, rounding_mode="floor"), wide.remainder(page_size)
    tile = torch.arange(tiles, device=slots.device)
    return ((page[:, None] * tiles + tile) * page_size + offset[:, None]).reshape(-1)


class RowStore:
    """A writer, chosen once, and the form in which it leaves the rows.

    Args:
        writer: Name of the writer.
        form: `paged` or `nz`.
        device: The pool's device.
        geometries: What will be written.
        num_slots: Slots of the pool.
        pairs: Whether rows come as pairs only.

    Raises:
        UnknownWriter: The writer does not serve the device, the form or single components.
        UnknownForm: The form cannot be stored, or a width does not fit it.
    """

    def __init__(
        self,
        writer: WriterName,
        form: Form,
        device: torch.device,
        geometries: Sequence[ComponentGeometry],
        *,
        num_slots: int,
        pairs: bool,
    ) -> None:
        check_form(form, ("paged", "nz"))  # a flat view has the bytes of the paged form
        tiles = max(tiles_of(geometry) for geometry in geometries) if form == "nz" else 1
        self._form: Form = form
        self.writer = create_writer(writer, device, num_slots=num_slots * tiles)
        if self.writer.pairs_only and (form == "nz" or not pairs):
            raise UnknownWriter(
                "writer",
                given=f"{self.writer.name} for form {form}",
                expected="a writer of single components",
                consequence="some rows of this pool could not be stored",
                remedy="leave it at auto",
            )

    @property
    def form(self) -> Form:
        """How rows lie in a page."""
        return self._form

    def pair(
        self, first: torch.Tensor, second: torch.Tensor, slots: torch.Tensor, one: torch.Tensor, two: torch.Tensor
    ) -> None:
        """Store two components of a token at the same slots; see `Writer.write`."""
        if self._form == "paged":
            self.writer.write(first, second, slots, one, two)
            return
        check_write(slots, (("first", one, first), ("second", two, second)), _SLOT_DTYPES)
        self._tiles(first, slots, one)
        self._tiles(second, slots, two)

    def single(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store one component; see `Writer.write_rows`."""
        if self._form == "paged":
            self.writer.write_rows(cache, slots, rows)
            return
        check_write(slots, (("rows", rows, cache),), _SLOT_DTYPES)
        self._tiles(cache, slots, rows)

    def _tiles(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        tiled = shaped(cache, "nz")
        pages, tiles, page_size, tile = tiled.shape
        self.writer.write_rows(
            tiled.view(pages, tiles * page_size, 1, tile),
            nz_slots(slots, page_size, tiles),
            rows.reshape(-1, 1, tile),
        )
