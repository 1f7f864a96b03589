"""Owns the pool of layers with multi-head latent attention: latent, rope, and the keys of a sparse indexer.

A latent may be a packed record of bytes (8-bit latent, its scales and the rope in one), which then has no rope of its
own. Index keys and their scales lie only on the layers that own them. It does not own the packing of the record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from kv_planner import ModelLayout, Placement

from kv_pool._arguments import check_kind
from kv_pool._geometry import derive_geometry, require_pair
from kv_pool._paged import Pool, pages_of
from kv_pool._rows import RowStore
from kv_pool._storage import Form, Region, allocate, as_device
from kv_pool.errors import LayoutError, RowMismatch, WidthMismatch, WriteError
from kv_pool.tables import whole_number
from kv_pool.writers import WriterName

if TYPE_CHECKING:
    from kv_planner import Component
    from kv_planner import Part as PartName

__all__ = ["MlaPool", "packed_record_bytes"]

_HOLDS: tuple[Component, ...] = ("latent", "rope", "index_key", "index_scale")
_BLOCK = 128  # latent elements under one scale of the packed record


def packed_record_bytes(latent: int, rope: int) -> int:
    """Return the bytes of a packed token: 8-bit latent, a float32 scale every 128 of it, and a 16-bit rope.

    Raises:
        LayoutError: The latent is no multiple of 128.

    Source: the fp8 pools of sparse attention on the NPU.
    """
    consequence = "a token would have no width"
    latent = whole_number("latent", latent, error=LayoutError, consequence=consequence)
    rope = whole_number("rope", rope, error=LayoutError, consequence=consequence)
    if latent < _BLOCK or latent % _BLOCK:
        raise LayoutError(
            "latent, rope",
            given=(latent, rope),
            expected=f"a latent of a multiple of {_BLOCK}",
            consequence="the last scale would cover elements of the rope",
            remedy="pad the latent",
        )
    return latent + latent // _BLOCK * 4 + rope * 2


class MlaPool(Pool):
    """Latent, rope, index keys and index scales of the layers of one rank, in pages.

    Invariants: those of `Pool`, and

    1. every layer of a part has a latent; a rope on every layer or, with a latent of dtype uint8, on none;
    2. index keys and scales lie on the same layers, a subset; scales never without keys.

    Args:
        layout: What the whole deployment agreed on.
        size: Capacity in tokens, a multiple of the page size. Page 0 comes on top.
        device: Where the memory lies.
        layer_ids: Global layer ids of this pipeline stage, a part each; a plain sequence is the target's; `None` is
            all. Index components take from it the layers that own them.
        placement: This rank. With one head, every tensor-parallel rank holds all of it.
        writer: How rows are stored; `"auto"` is `scatter_nd` on an NPU, else `index`.
        form: How rows lie in a page: `paged`, or `nz` (tiles of 32 bytes). The published fingerprint of an NZ pool
            ends in `+nz`, so that no peer takes its pages for others.
        region: Called once; the allocation happens inside the context manager it returns.
        zero: Whether to zero the memory.

    Raises:
        PoolSizeError, UnheldComponent, LayoutError, HeadRangeError, UnknownWriter, DeviceUnavailable: See `MhaPool`.
        UnknownForm: A width that is no whole number of tiles.
    """

    def __init__(
        self,
        layout: ModelLayout,
        *,
        size: int,
        device: str | torch.device,
        layer_ids: Mapping[PartName, Sequence[int]] | Sequence[int] | None = None,
        placement: Placement | None = None,
        writer: WriterName = "auto",
        form: Form = "paged",
        region: Region | None = None,
        zero: bool = True,
    ) -> None:
        pages = pages_of(size, layout)
        placement = placement if placement is not None else Placement()
        geometries = derive_geometry(layout, holds=_HOLDS, layer_ids=layer_ids, placement=placement)
        _check_components(layout)
        place, slots = as_device(device), pages * layout.page_size
        pairs = {geometry.component for geometry in geometries} == {"latent", "rope"}
        self._store = RowStore(writer, form, place, geometries, num_slots=slots, pairs=pairs)
        buffers = allocate(geometries, pages, place, region=region, zero=zero)
        super().__init__(published(layout, form), placement, buffers, pages)

    @property
    def writer(self) -> str:
        """Name of the writer that was chosen at construction."""
        return self._store.writer.name

    @property
    def form(self) -> Form:
        """How rows lie in a page."""
        return self._store.form

    def latent(self, layer_id: int, part: PartName = "target") -> torch.Tensor:
        """Return a layer's latent. Shape: [num_pages, page_size, 1, dims]; for an NZ pool see `view`."""
        return self.view("latent", layer_id, part)

    def rope(self, layer_id: int, part: PartName = "target") -> torch.Tensor:
        """Return a layer's rope. Shape: [num_pages, page_size, 1, dims]."""
        return self.view("rope", layer_id, part)

    def write(
        self,
        layer_id: int,
        slots: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor | None = None,
        part: PartName = "target",
    ) -> None:
        """Store one latent (or packed record) and one rope a token. Safe inside graph capture.

        Args:
            layer_id: Global layer id.
            slots: Where each row goes. Shape: [tokens]; int32 or int64 as the writer takes.
            latent: Shape: [tokens, 1, dims]; dtype of the pool. Not mutated.
            rope: Shape: [tokens, 1, dims]; `None` exactly when the pool has none.
            part: Which part.

        Raises:
            UnknownLayer: The layer or part is not held here.
            WriteError: Something does not fit; nothing is written.
        """
        self._write(layer_id, slots, part, "latent", latent, "rope", rope)

    def write_index(
        self,
        layer_id: int,
        slots: torch.Tensor,
        index_key: torch.Tensor,
        index_scale: torch.Tensor | None = None,
        part: PartName = "target",
    ) -> None:
        """Store one index key and one scale a token, on a layer that owns them; see `write`."""
        self._write(layer_id, slots, part, "index_key", index_key, "index_scale", index_scale)

    def _write(
        self,
        layer_id: int,
        slots: torch.Tensor,
        part: PartName,
        first: Component,
        one: torch.Tensor,
        second: Component,
        two: torch.Tensor | None,
    ) -> None:
        cache = self.view(first, layer_id, part)
        held = (second, part) in self._buffers
        if held != (two is not None):
            raise WidthMismatch(
                second,
                given="rows" if two is not None else "None",
                expected=f"rows of {second}" if held else f"None: the pool has no {second}",
                consequence="a token would have half of its components",
                remedy="pass what the layout declares",
            )
        check_kind(first, one, torch.Tensor, RowMismatch)
        try:
            if two is None:
                self._store.single(cache, slots, one)
            else:
                check_kind(second, two, torch.Tensor, RowMismatch)
                self._store.pair(cache, self.view(second, layer_id, part), slots, one, two)
        except WriteError as error:  # of the writer, which knows rows, or keys and values
            names = {"rows": first, "key": first, "first": first, "value": second, "second": second}
            raise error.named(names.get(error.argument, error.argument)) from None


def published(layout: ModelLayout, form: Form) -> ModelLayout:
    """The layout that peers see: that of an NZ pool says so in its fingerprint."""
    if form != "nz":
        return layout
    return ModelLayout(
        layout.components,
        page_size=layout.page_size,
        fingerprint=f"{layout.fingerprint}+nz",
        kernel_block_size=layout.kernel_block_size,
        format_version=layout.format_version,
    )


def _check_components(layout: ModelLayout) -> None:
    for part in dict.fromkeys(spec.part for spec in layout.components):
        specs = {spec.component: spec for spec in layout.components if spec.part == part}
        packed = "latent" in specs and specs["latent"].dtype == "uint8"
        if not packed or "rope" in specs:
            require_pair(layout, "latent", "rope", part)
        if packed and "rope" in specs:
            raise LayoutError(
                f"rope of part {part}",
                given="a rope beside a packed latent",
                expected="none: the record holds it",
                consequence="every token would have two ropes, one of them never written",
                remedy="leave the rope out, or choose a latent that is not uint8",
            )
        if "index_scale" in specs:
            require_pair(layout, "index_key", "index_scale", part)
        strays = set(specs["index_key"].layer_ids) - set(specs["latent"].layer_ids) if "index_key" in specs else set()
        if strays:
            raise LayoutError(
                f"index_key of part {part}",
                given=f"layers {sorted(strays)} without a latent",
                expected="layers of the part",
                consequence="the index would choose tokens of a layer that has none",
                remedy="declare index keys on the layers that own them",
            )
