"""Owns the memory of a pool's components: one place that allocates it, makes its views and its manifest entries.

A component is one tensor a layer; where the pool allocates, the layers lie in one contiguous parent, and where an
engine's own storage is adopted they may lie anywhere. It does not own which pages are free, nor how rows are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
from kv_planner import BufferEntry

from kv_pool._arguments import check_call, check_kind
from kv_pool.errors import DeviceUnavailable, PoolSizeError, UnknownForm, UnknownLayer
from kv_pool.tables import is_whole, shown

if TYPE_CHECKING:
    from kv_planner import Component
    from kv_planner import Part as PartName

    from kv_pool._geometry import ComponentGeometry

__all__ = [
    "TORCH_DTYPES",
    "Buffer",
    "Form",
    "Region",
    "allocate",
    "as_device",
    "check_form",
    "find",
    "shaped",
    "tiles_of",
]

Region = Callable[[], AbstractContextManager[object]]
Form: TypeAlias = Literal["paged", "flat", "nz"]
NZ_BYTES = 32  # width of a tile of the NZ format

TORCH_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Buffer:
    """One component of one part.

    Attributes:
        geometry: What it holds.
        layers: One tensor a layer, in the order of `geometry.layer_ids`. Shape of each: [items, tokens, heads, dims];
            contiguous.
        parent: All layers in one tensor, where they lie in one. Shape: [layers, items, tokens, heads, dims].
    """

    geometry: ComponentGeometry
    layers: tuple[torch.Tensor, ...]
    parent: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes over all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def layer(self, layer_id: int) -> torch.Tensor:
        """The tensor of a global layer id.

        Raises:
            UnknownLayer: This stage does not hold the component on that layer.
        """
        try:
            if is_whole(layer_id):  # True is equal to 1, and so is 1.0
                return self.layers[self.geometry.layer_ids.index(layer_id)]
            raise ValueError
        except ValueError:
            raise UnknownLayer(
                "layer_id",
                given=shown(layer_id),
                expected=f"one of {self.geometry.layer_ids} ({self.geometry.component} of part {self.geometry.part})",
                consequence="the layer belongs to another stage, or does not own the component",
                remedy="pass the global layer id of a layer that owns it here",
            ) from None

    def entries(self) -> list[BufferEntry]:
        """One manifest entry a layer; the addresses are those of item 0, one item is one page or row."""
        made = []
        for layer_id, layer in zip(self.geometry.layer_ids, self.layers, strict=True):
            item = layer.stride(0) * layer.element_size()
            made.append(
                BufferEntry(
                    self.geometry.component,
                    self.geometry.part,
                    layer_id,
                    device=str(layer.device),
                    address=layer.data_ptr(),
                    nbytes=layer.nbytes,
                    item_stride=item,
                    item_bytes=item,
                    head_range=self.geometry.head_range,
                )
            )
        return made


def as_device(device: str | torch.device) -> torch.device:
    """Return a device that this process can allocate on.

    Raises:
        DeviceUnavailable: The text names no device type that is known here, or the device cannot be reached.
    """
    check_kind("device", device, str | torch.device, DeviceUnavailable)  # type: ignore[arg-type]
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        kind = str(device).partition(":")[0]
        raise DeviceUnavailable(
            "device",
            given=device,
            expected="a device that torch can reach in this process",
            consequence=f"the pool would have no memory ({str(error).splitlines()[0]})",
            remedy="import torch_npu first, and check the driver" if kind == "npu" else "pass cpu, or npu:<index>",
        ) from error
    return found


def allocate(
    geometries: Sequence[ComponentGeometry],
    items: int,
    device: torch.device,
    *,
    region: Region | None = None,
    zero: bool = True,
) -> tuple[Buffer, ...]:
    """Allocate every component, each contiguous over its layers, inside `region`.

    Raises:
        PoolSizeError: The region cannot be called, or returns no context, or `zero` is neither true nor false.
    """
    check_call("region", region, PoolSizeError)
    check_kind("zero", zero, bool, PoolSizeError)
    create = torch.zeros if zero else torch.empty
    buffers = []
    made = nullcontext() if region is None else region()
    with check_kind("region()", made, AbstractContextManager, PoolSizeError):  # type: ignore[type-abstract]
        for geometry in geometries:
            shape = (len(geometry.layer_ids), items, geometry.tokens, geometry.heads, geometry.dims)
            parent = create(shape, dtype=TORCH_DTYPES[geometry.dtype], device=device)
            buffers.append(Buffer(geometry, tuple(parent.unbind(0)), parent))
    return tuple(buffers)


def find(buffers: Mapping[tuple[Component, PartName], Buffer], component: Component, part: PartName) -> Buffer:
    """Return a component of a part, or say what there is.

    Raises:
        UnknownLayer: There is no such storage.
    """
    try:
        return buffers[component, part]
    except (KeyError, TypeError):  # the latter from a list, for example
        raise UnknownLayer(
            "component, part",
            given=(component, part),
            expected=f"one of {list(buffers)}",
            consequence="there is no such storage",
            remedy="declare the component and the part in the layout",
        ) from None


def check_form(form: Form, forms: Sequence[str] = get_args(Form)) -> Form:
    """The form itself, one of `forms`.

    Raises:
        UnknownForm: It is none of them.
    """
    if not isinstance(form, str) or form not in forms:
        raise UnknownForm(
            "form",
            given=form,
            expected=f"one of {list(forms)}",
            consequence="the order of bytes would be unknown",
            remedy="ask for a form that the operators have",
        )
    return form


def shaped(layer: torch.Tensor, form: Form) -> torch.Tensor:
    """Return a layer in the shape that an operator wants; a view of the same bytes.

    Args:
        layer: Shape: [pages, page_size, heads, dims].
        form: `paged` as it is; `flat` is [slots, 1, heads, dims]; `nz` is [pages, heads * dims / tile, page_size,
            tile], a tile being 32 bytes of elements.

    Raises:
        UnknownForm: No such form, or a row that is no whole number of tiles.

    Source: contracts of the NPU pools for the FIA and NZ paths.
    """
    if check_form(form) == "paged":
        return layer
    pages, tokens, heads, dims = layer.shape
    if form == "flat":
        return layer.view(pages * tokens, 1, heads, dims)
    tiles = _tiles(heads * dims, layer.dtype)
    return layer.view(pages, tiles, tokens, heads * dims // tiles)


def tiles_of(geometry: ComponentGeometry) -> int:
    """Return how many tiles a token of a component has; see `shaped`."""
    return _tiles(geometry.heads * geometry.dims, TORCH_DTYPES[geometry.dtype])


def _tiles(width: int, dtype: torch.dtype) -> int:
    tile = NZ_BYTES // dtype.itemsize
    if width % tile:
        raise UnknownForm(
            "form",
            given=f"nz of {width} elements a token",
            expected=f"a multiple of {tile} elements of {dtype}",
            consequence="elements of two tokens would share a tile",
            remedy="pad the width, or use the paged form",
        )
    return width // tile
