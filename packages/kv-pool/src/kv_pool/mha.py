"""Owns the device memory of a paged pool with separate K and V, and its per-layer views.

Storage of each part is one contiguous tensor for K and one for V over all local layers; a layer's view shares it, so
that a backup of all layers and a write to one layer see the same bytes. Page 0 is reserved for padded rows. It does not
own which pages are free (see `allocator`) nor how bytes travel to a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from kv_planner import BufferEntry, ModelLayout, Placement, RankManifest

from kv_pool._geometry import PartGeometry, mha_geometry
from kv_pool.errors import PoolSizeError, UnknownLayer
from kv_pool.writers import WriterName, create_writer

if TYPE_CHECKING:
    from kv_planner import Part as PartName

__all__ = ["MhaPool"]

Region = Callable[[], AbstractContextManager[object]]

_TORCH_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int8": torch.int8,
}


@dataclass(frozen=True)
class _PartStorage:
    geometry: PartGeometry
    key: torch.Tensor
    value: torch.Tensor
    views: Mapping[int, tuple[torch.Tensor, torch.Tensor]]


class MhaPool:
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
        page_size = layout.page_size
        if size < page_size or size % page_size:
            raise PoolSizeError(
                "size",
                given=size,
                expected=f"a positive multiple of the page size {page_size}",
                consequence="the last page would be shorter than the others",
                remedy="round the capacity to whole pages",
            )
        self._layout = layout
        self._placement = placement if placement is not None else Placement()
        self._num_pages = size // page_size + 1
        geometries = mha_geometry(layout, layer_ids=layer_ids, placement=self._placement, head_range=head_range)
        self._writer = create_writer(writer, torch.device(device), num_slots=self._num_pages * page_size)
        with region() if region is not None else nullcontext():
            self._parts = {item.part: self._allocate(item, torch.device(device), zero) for item in geometries}

    @property
    def layout(self) -> ModelLayout:
        """The layout of the whole deployment."""
        return self._layout

    @property
    def placement(self) -> Placement:
        """This rank."""
        return self._placement

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._layout.page_size

    @property
    def num_pages(self) -> int:
        """Pages, the reserved page 0 included."""
        return self._num_pages

    @property
    def device(self) -> torch.device:
        """Where the memory lies, with its index."""
        return next(iter(self._parts.values())).key.device

    @property
    def writer(self) -> str:
        """Name of the writer that was chosen at construction."""
        return self._writer.name

    @property
    def parts(self) -> tuple[PartName, ...]:
        """The parts held, target first."""
        return tuple(self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all storage."""
        return sum(tensor.nbytes for part in self._parts.values() for tensor in (part.key, part.value))

    @property
    def key_storage(self) -> torch.Tensor:
        """K of the target part. Shape: [layers, num_pages, page_size, heads, key_dims]; contiguous."""
        return self.storage("key")

    @property
    def value_storage(self) -> torch.Tensor:
        """V of the target part. Shape: [layers, num_pages, page_size, heads, value_dims]; contiguous."""
        return self.storage("value")

    def storage(self, component: Literal["key", "value"], part: PartName = "target") -> torch.Tensor:
        """Return a part's K or V over all its layers. Shape: [layers, num_pages, page_size, heads, dims]."""
        held = self._part(part)
        return held.key if component == "key" else held.value

    def layer_ids(self, part: PartName = "target") -> tuple[int, ...]:
        """Return the global layer ids of a part, in storage order."""
        return self._part(part).geometry.layer_ids

    def head_range(self, part: PartName = "target") -> tuple[int, int]:
        """Return the global KV heads of a part on this rank, half-open."""
        return self._part(part).geometry.head_range

    def key(self, layer_id: int, part: PartName = "target") -> torch.Tensor:
        """Return a layer's K, a view of the storage. Shape: [num_pages, page_size, heads, key_dims]."""
        return self._views(layer_id, part)[0]

    def value(self, layer_id: int, part: PartName = "target") -> torch.Tensor:
        """Return a layer's V, a view of the storage. Shape: [num_pages, page_size, heads, value_dims]."""
        return self._views(layer_id, part)[1]

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
        key_cache, value_cache = self._views(layer_id, part)
        self._writer.write(key_cache, value_cache, slots, key, value)

    def manifest(self) -> RankManifest:
        """Describe every buffer by name: one entry a component, part and layer, in that order.

        The addresses are those of page 0; one item is one page.
        """
        entries = [
            _entry(component, held, layer_id, pages)
            for component, index in (("key", 0), ("value", 1))
            for held in self._parts.values()
            for layer_id, views in held.views.items()
            for pages in (views[index],)
        ]
        return RankManifest(self._layout, self._placement, entries)

    def _allocate(self, geometry: PartGeometry, device: torch.device, zero: bool) -> _PartStorage:
        create = torch.zeros if zero else torch.empty
        rows = (len(geometry.layer_ids), self._num_pages, self.page_size, geometry.heads)
        key = create((*rows, geometry.key_dims), dtype=_TORCH_DTYPES[geometry.key_dtype], device=device)
        value = create((*rows, geometry.value_dims), dtype=_TORCH_DTYPES[geometry.value_dtype], device=device)
        views = {layer_id: (key[index], value[index]) for index, layer_id in enumerate(geometry.layer_ids)}
        return _PartStorage(geometry, key, value, views)

    def _part(self, part: PartName) -> _PartStorage:
        try:
            return self._parts[part]
        except KeyError:
            raise UnknownLayer(
                "part",
                given=part,
                expected=f"one of {list(self._parts)}",
                consequence="there is no such storage",
                remedy="declare the part in the layout",
            ) from None

    def _views(self, layer_id: int, part: PartName) -> tuple[torch.Tensor, torch.Tensor]:
        held = self._part(part)
        try:
            return held.views[layer_id]
        except KeyError:
            raise UnknownLayer(
                "layer_id",
                given=layer_id,
                expected=f"one of {held.geometry.layer_ids} (part {part})",
                consequence="the layer belongs to another stage",
                remedy="pass the global layer id of a layer held here",
            ) from None


def _entry(component: str, held: _PartStorage, layer_id: int, pages: torch.Tensor) -> BufferEntry:
    page_bytes = pages.stride(0) * pages.element_size()
    return BufferEntry(
        component,  # type: ignore[arg-type]
        held.geometry.part,
        layer_id,
        device=str(pages.device),
        address=pages.data_ptr(),
        nbytes=pages.nbytes,
        item_stride=page_bytes,
        item_bytes=page_bytes,
        head_range=held.geometry.head_range,
    )
