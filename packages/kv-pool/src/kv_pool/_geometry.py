"""Owns what one part of a pool looks like on this rank: layers, heads, widths, dtypes; derived from a `ModelLayout`.

Pure: it allocates nothing and imports no torch. A component, part or layer that the pool would not hold is an error
here, so that transfer and backup never meet a pool with a hole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_pool.errors import HeadRangeError, LayoutError, UnheldComponent

if TYPE_CHECKING:
    from kv_planner import Component, ComponentSpec, ModelLayout, Placement
    from kv_planner import DType as DTypeName
    from kv_planner import Part as PartName

    Specs = Mapping[tuple[Component, PartName], ComponentSpec]

__all__ = ["PartGeometry", "local_head_range", "mha_geometry"]

_PARTS: tuple[PartName, ...] = ("target", "draft")
_COMPONENTS: tuple[Component, ...] = ("key", "value")
_AXES = ("token", "head", "dim")
_DTYPES = ("float16", "bfloat16", "float32", "int8")


@dataclass(frozen=True)
class PartGeometry:
    """Shape of one part (target or draft) on this rank.

    Attributes:
        part: Which part.
        layer_ids: Global ids of the layers held here, in storage order.
        head_range: Global KV heads held here, half-open.
        key_dims: Head dim of K.
        value_dims: Head dim of V; may differ from K's.
        key_dtype: Dtype of K.
        value_dtype: Dtype of V.
    """

    part: PartName
    layer_ids: tuple[int, ...]
    head_range: tuple[int, int]
    key_dims: int
    value_dims: int
    key_dtype: DTypeName
    value_dtype: DTypeName

    @property
    def heads(self) -> int:
        """KV heads held on this rank."""
        return self.head_range[1] - self.head_range[0]


def mha_geometry(
    layout: ModelLayout,
    *,
    layer_ids: Mapping[PartName, Sequence[int]] | Sequence[int] | None,
    placement: Placement,
    head_range: tuple[int, int] | None,
) -> tuple[PartGeometry, ...]:
    """Derive the parts of a pool with separate K and V from a layout.

    Args:
        layout: What the whole deployment agreed on.
        layer_ids: Layers of this stage, a part each; a plain sequence is the target's; `None` means all.
        placement: This rank; its tensor-parallel rank chooses the heads unless `head_range` is given.
        head_range: Global KV heads of this rank, for layouts whose components all have the same number of heads.

    Returns:
        One geometry a part, target first.

    Raises:
        UnheldComponent: The layout has a component that is neither key nor value, or a part that `layer_ids` omits.
        LayoutError: Key and value do not pair, or an item is not a page of (token, head, dim).
        HeadRangeError: The heads do not fit.
    """
    specs = {(spec.component, spec.part): spec for spec in layout.components}
    for component, part in specs:
        if component not in ("key", "value"):
            raise UnheldComponent(
                "layout.components",
                given=f"{component} of part {part}",
                expected="key and value only",
                consequence="backup and transfer would silently leave it out",
                remedy="use a pool that holds this component",
            )
    parts = [part for part in _PARTS if any(spec.part == part for spec in layout.components)]
    if not parts:
        raise LayoutError(
            "layout.components",
            given="no component",
            expected="key and value",
            consequence="the pool would hold nothing",
            remedy="declare key and value",
        )
    stage = _stage_layers(specs, parts, layer_ids)
    if head_range is not None and len({spec.total_heads for spec in layout.components}) != 1:
        raise HeadRangeError(
            "head_range",
            given=head_range,
            expected="None, as the components have different numbers of heads",
            consequence="one range cannot name the heads of both parts",
            remedy="leave head_range out and give the placement",
        )
    return tuple(_part_geometry(specs, part, stage[part], placement, head_range) for part in parts)


def _part_geometry(
    specs: Specs,
    part: PartName,
    layers: tuple[int, ...],
    placement: Placement,
    head_range: tuple[int, int] | None,
) -> PartGeometry:
    key, value = _pair(specs, part)
    heads = head_range if head_range is not None else local_head_range(key.total_heads, placement)
    if not 0 <= heads[0] < heads[1] <= key.total_heads:
        raise HeadRangeError(
            "head_range",
            given=heads,
            expected=f"a non-empty range within 0..{key.total_heads}",
            consequence="the pool would publish heads that the model does not have",
            remedy="pass the global KV heads of this rank",
        )
    return PartGeometry(part, layers, heads, key.dims, value.dims, key.dtype, value.dtype)


def _pair(specs: Specs, part: PartName) -> tuple[ComponentSpec, ComponentSpec]:
    for component in _COMPONENTS:
        if (component, part) not in specs:
            raise LayoutError(
                f"layout.components of part {part}",
                given=f"no {component}",
                expected="both key and value",
                consequence="one of them would have no storage",
                remedy="declare both, or use a pool for the components that the model has",
            )
    key, value = specs["key", part], specs["value", part]
    for spec in (key, value):
        if tuple(spec.axes) != _AXES or spec.item_kind != "page":
            raise LayoutError(
                f"{spec.component} of part {part}",
                given=f"{spec.item_kind} of {tuple(spec.axes)}",
                expected=f"page of {_AXES}",
                consequence="heads and tokens would be swapped between peers",
                remedy="declare the axes that this pool stores",
            )
        if spec.dtype not in _DTYPES:
            raise LayoutError(
                f"{spec.component} of part {part}",
                given=spec.dtype,
                expected=" or ".join(_DTYPES),
                consequence="the pool cannot store it",
                remedy="choose one of these dtypes",
            )
    if len(set(key.layer_ids)) != len(key.layer_ids):
        raise LayoutError(
            f"layer_ids of part {part}",
            given=tuple(key.layer_ids),
            expected="distinct ids",
            consequence="the second owner of an id would have storage that no view and no transfer reaches",
            remedy="number every layer that owns K and V; MhaPool holds one K and one V a layer id",
        )
    if key.total_heads != value.total_heads or tuple(key.layer_ids) != tuple(value.layer_ids):
        raise LayoutError(
            f"key and value of part {part}",
            given=f"{key.total_heads} heads on {tuple(key.layer_ids)}; {value.total_heads} on {tuple(value.layer_ids)}",
            expected="the same heads and layers for both",
            consequence="a K would have no V",
            remedy="declare both over the same layers",
        )
    return key, value


def _stage_layers(
    specs: Specs,
    parts: Sequence[PartName],
    layer_ids: Mapping[PartName, Sequence[int]] | Sequence[int] | None,
) -> dict[PartName, tuple[int, ...]]:
    if layer_ids is None:
        return {part: tuple(_pair(specs, part)[0].layer_ids) for part in parts}
    if not isinstance(layer_ids, Mapping):
        layer_ids = {"target": layer_ids}
    unknown = [part for part in layer_ids if part not in parts]
    missing = [part for part in parts if part not in layer_ids]
    if unknown or missing:
        raise UnheldComponent(
            "layer_ids",
            given=f"parts {sorted(layer_ids)}",
            expected=f"parts {sorted(parts)}",
            consequence="a part would be left out without anybody saying so",
            remedy="name every part of the layout; an empty list says that this stage holds none of it",
        )
    stage = {}
    for part in parts:
        layers, known = tuple(layer_ids[part]), tuple(_pair(specs, part)[0].layer_ids)
        if len(set(layers)) != len(layers) or not set(layers) <= set(known):
            raise LayoutError(
                f"layer_ids of part {part}",
                given=layers,
                expected=f"distinct ids out of {known}",
                consequence="a layer would be held twice, or belong to no model",
                remedy="pass the global layer ids of this stage",
            )
        stage[part] = layers
    if not any(stage.values()):
        raise LayoutError(
            "layer_ids",
            given="no layer",
            expected="at least one layer",
            consequence="the pool would hold nothing",
            remedy="pass the global layer ids of this stage",
        )
    return stage


def local_head_range(total_heads: int, placement: Placement) -> tuple[int, int]:
    """Return the global KV heads of a tensor-parallel rank, half-open.

    With more ranks than heads, each head is replicated on `tp_size / total_heads` neighbouring ranks.

    Raises:
        HeadRangeError: Neither number divides the other.
    """
    rank, size = placement.tp_rank, placement.tp_size
    if total_heads % size == 0:
        local = total_heads // size
        return rank * local, (rank + 1) * local
    if size % total_heads == 0:
        head = rank * total_heads // size
        return head, head + 1
    raise HeadRangeError(
        "placement.tp_size",
        given=size,
        expected=f"a divisor or a multiple of {total_heads} KV heads",
        consequence="the ranks would hold unequal numbers of heads",
        remedy="choose another tensor-parallel size, or pass head_range",
    )
