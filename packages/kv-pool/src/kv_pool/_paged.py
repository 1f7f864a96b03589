"""Owns what all pools have in common: components over the layers of one rank, views, manifest, copies to host memory.

It does not own which components a kind of pool has (see `mha`, `mla`, `state`), nor how rows are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from kv_planner import RankManifest

from kv_pool._geometry import check_layout
from kv_pool._storage import Buffer, Form, find, shaped
from kv_pool.copies import PageCopy, check_copy, check_items
from kv_pool.errors import LayoutError, PoolSizeError, UnknownLayer
from kv_pool.tables import whole_number

if TYPE_CHECKING:
    from kv_planner import Component, ModelLayout, Placement
    from kv_planner import Part as PartName

    from kv_pool.tables import IndexLike

__all__ = ["Pool", "pages_of"]


def pages_of(size: int, layout: ModelLayout) -> int:
    """Return the pages of a pool of `size` tokens, page 0 included.

    Raises:
        PoolSizeError: Not a positive multiple of the page size.
        LayoutError: The layout is none.
    """
    page_size = check_layout(layout).page_size
    consequence = "the pool would have no pages"
    size = whole_number("size", size, error=PoolSizeError, consequence=consequence)
    if size < page_size or size % page_size:
        raise PoolSizeError(
            "size",
            given=size,
            expected=f"a positive multiple of the page size {page_size}",
            consequence="the last page would be shorter than the others",
            remedy="round the capacity to whole pages",
        )
    return size // page_size + 1


class Pool:
    """Components of the layers and heads of one rank, in items: pages of tokens, or rows of requests.

    Invariants:

    1. Every component, part and layer that the layout and the stage declare has storage, a view and a manifest entry.
    2. Each component has its own layers, heads, width and dtype.
    3. Addresses never change after construction.

    Args:
        layout: What the whole deployment agreed on, as it is published.
        placement: This rank.
        buffers: The storage; at least one of them has a layer.
        items: Items of each buffer, the reserved item 0 included.
    """

    def __init__(self, layout: ModelLayout, placement: Placement, buffers: Sequence[Buffer], items: int) -> None:
        self._layout = layout
        self._placement = placement
        self._items = items
        self._buffers = {(buffer.geometry.component, buffer.geometry.part): buffer for buffer in buffers}
        self._device = next(layer.device for buffer in buffers for layer in buffer.layers)

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
        return self._items

    @property
    def device(self) -> torch.device:
        """Where the memory lies, with its index."""
        return self._device

    @property
    def parts(self) -> tuple[PartName, ...]:
        """The parts held, target first."""
        return tuple(dict.fromkeys(part for _, part in self._buffers))

    @property
    def components(self) -> tuple[tuple[Component, PartName], ...]:
        """Every component of every part, in the manifest's order."""
        return tuple(self._buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of all storage."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def storage(self, component: Component, part: PartName = "target") -> torch.Tensor:
        """Return a component over all its layers.

        Returns:
            Shape: [layers, num_pages, page_size, heads, dims]; contiguous.

        Raises:
            UnknownLayer: There is no such component.
            LayoutError: Its layers do not lie in one tensor (adopted storage); ask for `layers`.
        """
        parent = find(self._buffers, component, part).parent
        if parent is None:
            raise LayoutError(
                "component",
                given=f"{component} of part {part}, a tensor a layer",
                expected="all layers in one contiguous tensor",
                consequence="an operator over all layers would read foreign memory",
                remedy="take the layers one by one",
            )
        return parent

    def layers(self, component: Component, part: PartName = "target") -> tuple[torch.Tensor, ...]:
        """Return a component layer by layer, in the order of `layer_ids(part, component)`.

        Returns:
            Tensors of shape [num_pages, page_size, heads, dims]; contiguous.
        """
        return find(self._buffers, component, part).layers

    def layer_ids(self, part: PartName = "target", component: Component | None = None) -> tuple[int, ...]:
        """Return the global layer ids of a part, or of one component of it, in storage order."""
        if component is not None:
            return find(self._buffers, component, part).geometry.layer_ids
        return tuple(dict.fromkeys(layer for held in self._of(part) for layer in held.geometry.layer_ids))

    def head_range(self, part: PartName = "target", component: Component | None = None) -> tuple[int, int]:
        """Return the global heads of a part (of its first component, or of the one named) on this rank, half-open."""
        held = self._of(part)[0] if component is None else find(self._buffers, component, part)
        return held.geometry.head_range

    def view(
        self, component: Component, layer_id: int, part: PartName = "target", form: Form = "paged"
    ) -> torch.Tensor:
        """Return a layer of a component in the form that an operator wants; a view of the storage.

        Args:
            component: Which component.
            layer_id: Global layer id.
            part: Which part.
            form: `paged`: [num_pages, page_size, heads, dims]. `flat`: [slots, 1, heads, dims]. `nz`: [num_pages,
                heads * dims / tile, page_size, tile] with tiles of 32 bytes.

        Raises:
            UnknownLayer: The layer, component or part is not held here.
            UnknownForm: No such form, or a width that is no whole number of tiles.
        """
        return shaped(find(self._buffers, component, part).layer(layer_id), form)

    def manifest(self) -> RankManifest:
        """Describe every buffer by name: one entry a component, part and layer, in that order.

        The addresses are those of page 0; one item is one page.
        """
        entries = [entry for buffer in self._buffers.values() for entry in buffer.entries()]
        return RankManifest(self._layout, self._placement, entries)

    def copy_out(self, pages: IndexLike) -> PageCopy:
        """Copy pages to ordinary host memory, every component, bit for bit.

        Args:
            pages: Page ids. Shape: [pages]; any integer dtype.

        Raises:
            PageError: A page that is reserved, outside the pool or named twice.
        """
        ids = check_items("pages", pages, self._items)
        index = torch.from_numpy(ids).to(self._device)
        return PageCopy(
            self._layout,
            len(ids),
            {name: buffer.geometry for name, buffer in self._buffers.items()},
            {
                name: tuple(_rows(layer)[index].cpu() for layer in buffer.layers)
                for name, buffer in self._buffers.items()
            },
        )

    def copy_in(self, pages: IndexLike, copy: PageCopy) -> None:
        """Put a copy back, into any pages of a pool of the same layout and rank.

        Args:
            pages: Where each page of the copy goes. Shape: [pages].
            copy: What `copy_out` returned, here or in a pool alike.

        Raises:
            PageError: A page that is reserved, outside the pool or named twice, or a number of pages that differs.
            LayoutError: The copy was made of other components, layers, heads, widths or dtypes. Nothing is written.
        """
        ids = check_items("pages", pages, self._items)
        check_copy(copy, self._layout, {name: buffer.geometry for name, buffer in self._buffers.items()}, len(ids))
        index = torch.from_numpy(ids).to(self._device)
        for name, buffer in self._buffers.items():
            for layer, rows in zip(buffer.layers, copy.rows[name], strict=True):
                _rows(layer).index_copy_(0, index, rows.to(self._device))

    def _of(self, part: PartName) -> list[Buffer]:
        held = [buffer for (_, of), buffer in self._buffers.items() if isinstance(part, str) and of == part]
        if not held:
            raise UnknownLayer(
                "part",
                given=part,
                expected=f"one of {list(self.parts)}",
                consequence="there is no such storage",
                remedy="declare the part in the layout",
            )
        return held


def _rows(layer: torch.Tensor) -> torch.Tensor:
    """A layer as bytes, an item a row. Shape: [items, bytes]; dtype uint8; the same memory."""
    return layer.view(layer.shape[0], -1).view(torch.uint8)
