"""Owns the pool of layers with separate K and V.

Each of the two is one contiguous tensor a part over all local layers; a layer's view shares it, so that a backup of all
layers and a write to one layer see the same bytes. Page 0 is reserved for padded rows. It does not own which pages are
free (see `allocator`) nor how bytes travel to a peer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from kv_planner import ModelLayout, Placement

from kv_pool._geometry import derive_geometry, require_pair
from kv_pool._paged import Pool, pages_of
from kv_pool._rows import RowStore
from kv_pool._storage import Region, allocate, as_device
from kv_pool.writers import WriterName

if TYPE_CHECKING:
    from kv_planner import Part as PartName

__all__ = ["MhaPool"]


class MhaPool(Pool):
    """K and V of the layers and heads of one rank, in pages.

    Invariants:

    1. `key_storage` is `[layers, num_pages, page_size, heads, key_dims]`, contiguous; `value_storage` likewise with
       `value_dims`; the two widths are independent.
    2. Every component, part and layer that the layout and `layer_ids` declare has storage, a view and a manifest entry.
    3. Addresses never change after construction.

    Args:
        layout: What the whole deployment agreed on; only key and value components.
        size: Capacity in tokens, a multiple of the page size. Page 0 comes on top.
        device: Where the memory lies, e.g. `"cpu"` or `"npu:0"`.
        layer_ids: Global layer ids of this pipeline stage, a part each; a plain sequence is the target's; `None` is
            all.
        placement: This rank, published in the manifest.
        head_range: Global KV heads of this rank; derived from the placement when `None`.
        writer: How `write` stores rows; `"auto"` is `scatter_nd` on an NPU, else `index`.
        region: Called once; the allocation happens inside the context manager it returns (memory savers, pools).
        zero: Whether to zero the memory. Without it never-written slots hold arbitrary bytes, which the emulated NPU
            reports when attention reads them, but which may be NaN on a device.

    Raises:
        PoolSizeError: `size` is not a positive multiple of the page size, or too large for the writer's slots.
        UnheldComponent: The layout has a component or part that this pool would not hold.
        LayoutError: Key and value do not pair.
        HeadRangeError: The heads do not fit.
        UnknownWriter: The writer does not exist or does not serve the device.
        DeviceUnavailable: The device does not exist here.
    """

    def __init__(
        self,
        layout: ModelLayout,
        *,
        size: int,
        device: str | torch.device,
        layer_ids: Mapping[PartName, Sequence[int]] | Sequence[int] | None = None,
        placement: Placement | None = None,
        head_range: tuple[int, int] | None = None,
        writer: WriterName = "auto",
        region: Region | None = None,
        zero: bool = True,
    ) -> None:
        pages = pages_of(size, layout)
        placement = placement if placement is not None else Placement()
        geometries = derive_geometry(
            layout, holds=("key", "value"), layer_ids=layer_ids, placement=placement, head_range=head_range
        )
        for part in dict.fromkeys(spec.part for spec in layout.components):
            require_pair(layout, "key", "value", part)
        place = as_device(device)
        slots = pages * layout.page_size
        self._store = RowStore(writer, "paged", place, geometries, num_slots=slots, pairs=True)
        super().__init__(layout, placement, allocate(geometries, pages, place, region=region, zero=zero), pages)

    @property
    def writer(self) -> str:
        """Name of the writer that was chosen at construction."""
        return self._store.writer.name

    @property
    def key_storage(self) -> torch.Tensor:
        """K of the target part. Shape: [layers, num_pages, page_size, heads, key_dims]; contiguous."""
        return self.storage("key")

    @property
    def value_storage(self) -> torch.Tensor:
        """V of the target part. Shape: [layers, num_pages, page_size, heads, value_dims]; contiguous."""
        return self.storage("value")

    def key(self, layer_id: int, part: PartName = "target") -> torch.Tensor:
        """Return a layer's K, a view of the storage. Shape: [num_pages, page_size, heads, key_dims]."""
        return self.view("key", layer_id, part)

    def value(self, layer_id: int, part: PartName = "target") -> torch.Tensor:
        """Return a layer's V, a view of the storage. Shape: [num_pages, page_size, heads, value_dims]."""
        return self.view("value", layer_id, part)

    def write(
        self,
        layer_id: int,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        part: PartName = "target",
    ) -> None:
        """Store one row of K and of V a token. Safe inside graph capture: no host synchronisation, static shapes.

        Args:
            layer_id: Global layer id.
            slots: Where each row goes. Shape: [tokens]; int32 or int64 as the writer takes, on the pool's device.
                Padded rows name slot 0; of rows that name one slot twice, any may win.
            key: Shape: [tokens, heads, key_dims]; dtype of the pool. Not mutated.
            value: Shape: [tokens, heads, value_dims]; dtype of the pool. Not mutated.
            part: Which part.

        Raises:
            UnknownLayer: The layer or part is not held here.
            WriteError: Widths, rows, dtype or device do not fit, rows lie in this layer's own K or V, or (on a CPU) a
                slot is out of range. Nothing is written.
        """
        self._store.pair(self.key(layer_id, part), self.value(layer_id, part), slots, key, value)
