"""Owns pools over memory that an engine allocated: `adopt`, so that the host cache and transfer serve foreign pools.

Nothing is copied; every tensor is proved to be what the layout says. It does not own the memory and never frees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from kv_planner import ModelLayout, Placement

from kv_pool._arguments import check_kind, check_list, check_mapping
from kv_pool._geometry import ComponentGeometry, check_layout, derive_geometry
from kv_pool._paged import Pool
from kv_pool._storage import TORCH_DTYPES, Buffer, Form, check_form
from kv_pool.errors import LayoutError, UnheldComponent
from kv_pool.mla import published
from kv_pool.state import StateKind

if TYPE_CHECKING:
    from kv_planner import Component
    from kv_planner import Part as PartName

__all__ = ["Adopted", "adopt"]

Adopted: TypeAlias = "Mapping[Component | tuple[Component, PartName], torch.Tensor | Sequence[torch.Tensor]]"
_PAGED: tuple[Component, ...] = ("key", "value", "latent", "rope", "index_key", "index_scale")


def adopt(
    tensors: Adopted,
    layout: ModelLayout,
    *,
    layer_ids: Mapping[PartName, Sequence[int]] | Sequence[int] | None = None,
    placement: Placement | None = None,
    head_range: tuple[int, int] | None = None,
    form: Form = "paged",
) -> Pool:
    """Wrap an engine's own storage as a pool: pages of tokens, or the rows of one kind of state.

    Args:
        tensors: Memory of each component; a plain name is the target's. Either one tensor over all layers, the first
            axis being layers, or one tensor a layer in the order of the stage's layers. A layer holds whole pages, page
            0 first, contiguous: [pages, page_size, heads, dims], [slots, 1, heads, dims], tiles, or any other shape of
            the same bytes. Integers of the same size may stand for 8-bit floats and packed records. States:
            [rows, heads, dims] or any other shape of the same bytes, row 0 first and nobody's.
        layout: What the whole deployment agreed on; all components of pages, or states of request rows.
        layer_ids: Global layer ids of this stage, as for `MhaPool`.
        placement: This rank.
        head_range: Global heads of this rank; derived from the placement when `None`.
        form: `nz` when the engine keeps its pages in tiles; published as such.

    Returns:
        A pool whose views are the engine's memory, a `StateKind` for states; writing stays with the engine.

    Raises:
        UnheldComponent: A component of the layout without memory, or memory that the layout does not declare.
        UnknownForm: No form in which pages are kept.
        LayoutError: A number of layers, a size, a dtype or a device that does not fit; memory that is not contiguous.
    """
    check_form(form, ("paged", "nz"))
    check_layout(layout)
    check_mapping("tensors", tensors, UnheldComponent)
    given = {name if isinstance(name, tuple) else (name, "target"): held for name, held in tensors.items()}
    placement = placement if placement is not None else Placement()
    states = all(spec.item_kind == "request_row" for spec in layout.components)
    geometries = derive_geometry(
        layout, holds=("state",) if states else _PAGED, item_kind="request_row" if states else "page",
        layer_ids=layer_ids, placement=placement, head_range=head_range,
    )  # fmt: skip
    declared = {(geometry.component, geometry.part) for geometry in geometries if geometry.layer_ids}
    if set(given) != declared:
        raise UnheldComponent(
            "tensors",
            given=sorted(map(str, given)),
            expected=sorted(map(str, declared)),
            consequence="backup and transfer would silently leave a component out",
            remedy="pass the memory of every component that the layout declares for this stage, and no other",
        )
    buffers = [
        _buffer(geometry, given[geometry.component, geometry.part]) for geometry in geometries if geometry.layer_ids
    ]
    pages = {len(layer) for buffer in buffers for layer in buffer.layers}
    devices = {layer.device for buffer in buffers for layer in buffer.layers}
    if len(pages) != 1 or len(devices) != 1:
        raise LayoutError(
            "tensors",
            given=f"{sorted(pages)} pages on {sorted(map(str, devices))}",
            expected="one number of pages, on one device",
            consequence="a page id would name nothing in some component",
            remedy="pass components of one pool",
        )
    if states:
        return StateKind(layout, placement, buffers, pages.pop())
    return Pool(published(layout, form), placement, buffers, pages.pop())


def _buffer(geometry: ComponentGeometry, given: torch.Tensor | Sequence[torch.Tensor]) -> Buffer:
    name = f"{geometry.component} of part {geometry.part}"
    if isinstance(given, torch.Tensor) and given.ndim:
        tensors: tuple[object, ...] = tuple(given.unbind(0))
    else:
        tensors = check_list(name, given, LayoutError)
    if len(tensors) != len(geometry.layer_ids):
        raise _misfit(name, f"{len(tensors)} layers", f"{len(geometry.layer_ids)}: {geometry.layer_ids}")
    row = geometry.tokens * geometry.heads * geometry.dims
    dtype = TORCH_DTYPES[geometry.dtype]
    layers = []
    for layer_id, tensor in zip(geometry.layer_ids, tensors, strict=True):
        where = f"{name}, layer {layer_id}"
        tensor = check_kind(where, tensor, torch.Tensor, LayoutError)
        stands_for = tensor.dtype in (torch.uint8, torch.int8) and dtype.itemsize == 1
        if tensor.dtype != dtype and not stands_for:
            raise _misfit(where, tensor.dtype, dtype)
        if not tensor.is_contiguous():
            raise _misfit(where, f"strides {tensor.stride()} of shape {tuple(tensor.shape)}", "contiguous memory")
        if tensor.numel() % row or tensor.numel() < 2 * row:
            raise _misfit(where, f"{tensor.numel()} elements", f"a multiple of {row}, a page, and at least two pages")
        layers.append(tensor.view(dtype).view(-1, geometry.tokens, geometry.heads, geometry.dims))
    parent = given if isinstance(given, torch.Tensor) and given.is_contiguous() else None
    whole = None if parent is None else parent.view(dtype).view(len(layers), *layers[0].shape)
    return Buffer(geometry, tuple(layers), whole)


def _misfit(argument: str, given: object, expected: object) -> LayoutError:
    return LayoutError(
        argument,
        given=given,
        expected=expected,
        consequence="pages would be read at wrong offsets",
        remedy="describe the engine's memory by the layout that it has",
    )
