"""Owns what the buffers of a pool look like on this rank: layers, heads, widths, dtypes; derived from a `ModelLayout`.

Pure: it allocates nothing and imports no torch. A component, part or layer that the pool would not hold is an error
here, so that transfer and backup never meet a pool with a hole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_planner import ModelLayout, Placement

from kv_pool._arguments import check_kind, check_numbers
from kv_pool.errors import HeadRangeError, LayoutError, UnheldComponent

if TYPE_CHECKING:
    from kv_planner import Component, ComponentSpec
    from kv_planner import DType as DTypeName
    from kv_planner import Part as PartName

    LayerIds = Mapping[PartName, Sequence[int]] | Sequence[int] | None
    Specs = Mapping[tuple[Component, PartName], ComponentSpec]

__all__ = ["DTYPES", "ComponentGeometry", "check_layout", "derive_geometry", "local_head_range", "require_pair"]

_PARTS: tuple[PartName, ...] = ("target", "draft")
_ORDER: tuple[Component, ...] = ("key", "value", "latent", "rope", "index_key", "index_scale", "state")
_AXES = ("token", "head", "dim")
DTYPES: tuple[DTypeName, ...] = (
    "float16", "bfloat16", "float32", "int8", "uint8", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


@dataclass(frozen=True)
class ComponentGeometry:
    """Shape of one component of one part on this rank.

    Attributes:
        component: Which component.
        part: Which part (target or draft).
        layer_ids: Global ids of the layers that own it here, in storage order.
        head_range: Global heads held here, half-open.
        tokens: Tokens in an item: the page size, or 1 for request rows.
        dims: Elements of a head.
        dtype: Element type.
    """

    component: Component
    part: PartName
    layer_ids: tuple[int, ...]
    head_range: tuple[int, int]
    tokens: int
    dims: int
    dtype: DTypeName

    @property
    def heads(self) -> int:
        """Heads held on this rank."""
        return self.head_range[1] - self.head_range[0]


def check_layout(layout: ModelLayout) -> ModelLayout:
    """The layout itself.

    Raises:
        LayoutError: It is none.
    """
    return check_kind("layout", layout, ModelLayout, LayoutError)


def derive_geometry(
    layout: ModelLayout,
    *,
    holds: Sequence[Component],
    item_kind: str = "page",
    layer_ids: LayerIds,
    placement: Placement,
    head_range: tuple[int, int] | None = None,
    may_be_absent: bool = False,
) -> tuple[ComponentGeometry, ...]:
    """Derive the buffers of a pool from a layout: component by component, target before draft.

    Args:
        layout: What the whole deployment agreed on.
        holds: Components that the pool can hold.
        item_kind: What one item of its buffers is.
        layer_ids: Layers of this stage, a part each; a plain sequence is the target's; `None` means all.
        placement: This rank; its tensor-parallel rank chooses the heads unless `head_range` is given.
        head_range: Global heads of this rank, for layouts whose components all have the same number of heads.
        may_be_absent: Whether the stage may hold no layer of any part.

    Returns:
        One geometry a component and part; its layers are those of the stage that own the component, in the stage's
        order, so one of the two may be empty.

    Raises:
        UnheldComponent: The layout has a component outside `holds`, or a part that `layer_ids` omits.
        LayoutError: An item, axes or dtype that the pool cannot store; an id that is owned twice.
        HeadRangeError: The heads do not fit.
    """
    check_layout(layout)
    check_kind("placement", placement, Placement, LayoutError)
    head_range = None if head_range is None else _pair(head_range)
    specs = {(spec.component, spec.part): spec for spec in layout.components}
    for component, part in specs:
        if component not in holds:
            raise UnheldComponent(
                "layout.components",
                given=f"{component} of part {part}",
                expected=f"{' and '.join(holds)} only",
                consequence="backup and transfer would silently leave it out",
                remedy="use a pool that holds this component",
            )
    for spec in layout.components:
        _check_spec(spec, item_kind)
    parts = [part for part in _PARTS if any(spec.part == part for spec in layout.components)]
    stage = _stage_layers(specs, parts, layer_ids)
    if not may_be_absent and not any(stage.values()):
        raise LayoutError(
            "layer_ids",
            given="no layer",
            expected="at least one layer",
            consequence="the pool would hold nothing",
            remedy="pass the global layer ids of this stage",
        )
    if head_range is not None and len({spec.total_heads for spec in layout.components}) != 1:
        raise HeadRangeError(
            "head_range",
            given=head_range,
            expected="None, as the components have different numbers of heads",
            consequence="one range cannot name the heads of both parts",
            remedy="leave head_range out and give the placement",
        )
    tokens = layout.page_size if item_kind == "page" else 1
    return tuple(
        ComponentGeometry(
            component,
            part,
            tuple(layer for layer in stage[part] if layer in set(spec.layer_ids)),
            _heads(spec, placement, head_range),
            tokens,
            spec.dims,
            spec.dtype,
        )
        for component in _ORDER
        for part in parts
        if (component, part) in specs
        for spec in (specs[component, part],)
    )


def _pair(head_range: tuple[int, int]) -> tuple[int, int]:
    found = check_numbers("head_range", head_range, HeadRangeError)
    if len(found) != 2:
        raise HeadRangeError(
            "head_range",
            given=found,
            expected="two numbers, the first head and the one behind the last",
            consequence="it would be unknown which heads the rank holds",
            remedy="pass the global KV heads of this rank",
        )
    return found[0], found[1]


def _heads(spec: ComponentSpec, placement: Placement, head_range: tuple[int, int] | None) -> tuple[int, int]:
    heads = head_range if head_range is not None else local_head_range(spec.total_heads, placement)
    if not 0 <= heads[0] < heads[1] <= spec.total_heads:
        raise HeadRangeError(
            "head_range",
            given=heads,
            expected=f"a non-empty range within 0..{spec.total_heads}",
            consequence="the pool would publish heads that the model does not have",
            remedy="pass the global KV heads of this rank",
        )
    return heads


def _check_spec(spec: ComponentSpec, item_kind: str) -> None:
    name = f"{spec.component} of part {spec.part}"
    if tuple(spec.axes) != _AXES or spec.item_kind != item_kind:
        raise LayoutError(
            name,
            given=f"{spec.item_kind} of {tuple(spec.axes)}",
            expected=f"{item_kind} of {_AXES}",
            consequence="heads and tokens would be swapped between peers",
            remedy="declare the axes that this pool stores",
        )
    if spec.dtype not in DTYPES:
        raise LayoutError(
            name,
            given=spec.dtype,
            expected=" or ".join(DTYPES),
            consequence="the pool cannot store it",
            remedy="choose one of these dtypes",
        )
    if len(set(spec.layer_ids)) != len(spec.layer_ids):
        raise LayoutError(
            f"layer_ids of {name}",
            given=tuple(spec.layer_ids),
            expected="distinct ids",
            consequence="the second owner of an id would have storage that no view and no transfer reaches",
            remedy="number every layer that owns the component; a pool holds one buffer a layer id",
        )


def require_pair(layout: ModelLayout, first: Component, second: Component, part: PartName) -> None:
    """Refuse a part that has one of two components which go together, or both over different layers or heads.

    Raises:
        LayoutError: As said.
    """
    specs = {spec.component: spec for spec in layout.components if spec.part == part}
    for component in (first, second):
        if component not in specs:
            raise LayoutError(
                f"layout.components of part {part}",
                given=f"no {component}",
                expected=f"both {first} and {second}",
                consequence="one of them would have no storage",
                remedy="declare both, or use a pool for the components that the model has",
            )
    one, two = specs[first], specs[second]
    if one.total_heads != two.total_heads or tuple(one.layer_ids) != tuple(two.layer_ids):
        raise LayoutError(
            f"{first} and {second} of part {part}",
            given=f"{one.total_heads} heads on {tuple(one.layer_ids)}; {two.total_heads} on {tuple(two.layer_ids)}",
            expected="the same heads and layers for both",
            consequence=f"a {first} would have no {second}",
            remedy="declare both over the same layers",
        )


def _owned(specs: Specs, part: PartName) -> tuple[int, ...]:
    """Layers of a part that own any component, in the order of their first mention."""
    return tuple(dict.fromkeys(layer for (_, of), spec in specs.items() if of == part for layer in spec.layer_ids))


def _stage_layers(specs: Specs, parts: Sequence[PartName], layer_ids: LayerIds) -> dict[PartName, tuple[int, ...]]:
    if layer_ids is None:
        return {part: _owned(specs, part) for part in parts}
    if not isinstance(layer_ids, Mapping):
        layer_ids = {"target": layer_ids}
    unknown = [part for part in layer_ids if part not in parts]
    missing = [part for part in parts if part not in layer_ids]
    if unknown or missing:
        raise UnheldComponent(
            "layer_ids",
            given=f"parts {sorted(map(str, layer_ids))}",
            expected=f"parts {sorted(parts)}",
            consequence="a part would be left out without anybody saying so",
            remedy="name every part of the layout; an empty list says that this stage holds none of it",
        )
    stage = {}
    for part in parts:
        layers, known = check_numbers(f"layer_ids of part {part}", layer_ids[part], LayoutError), _owned(specs, part)
        if len(set(layers)) != len(layers) or not set(layers) <= set(known):
            raise LayoutError(
                f"layer_ids of part {part}",
                given=layers,
                expected=f"distinct ids out of {known}",
                consequence="a layer would be held twice, or belong to no model",
                remedy="pass the global layer ids of this stage",
            )
        stage[part] = layers
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
