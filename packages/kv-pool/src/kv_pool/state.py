"""Owns the pool of recurrent states: one row a request, conv and recurrent states (or any others) side by side.

Kinds of state differ in shape and dtype, so each has a layout, a manifest and storage of its own; the rows are shared.
Row 0 is reserved for padded requests. It does not own which rows are free (a `PageAllocator` of page size 1 does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from kv_planner import ModelLayout, Placement

from kv_pool._arguments import check_kind, check_mapping, check_numbers
from kv_pool._geometry import derive_geometry
from kv_pool._paged import Pool
from kv_pool._storage import Region, allocate, as_device
from kv_pool.errors import LayoutError, PoolSizeError, RowMismatch, UnknownLayer, WriteError
from kv_pool.tables import INT32_MAX, whole_number
from kv_pool.writers import WriterName, create_writer
from kv_pool.writers._checks import as_bits, check_device, check_index, check_slot_values

if TYPE_CHECKING:
    from kv_planner import Part as PartName

__all__ = ["StateKind", "StatePool"]


class StateKind(Pool):
    """One kind of state of the layers and heads of one rank: a `Pool` whose items are request rows.

    `num_pages` is the number of rows and `page_size` 1, so that host pools and transfer serve it as they serve pages.
    """

    @property
    def page_size(self) -> int:
        """1: an item is one request's row."""
        return 1


class StatePool:
    """States of requests, by kind.

    Invariants:

    1. Every kind holds the same number of rows, row 0 among them, which is nobody's.
    2. Every layer that a kind's layout and `layer_ids` declare has storage and a manifest entry.

    Args:
        layouts: One layout a kind, e.g. `{"conv": ..., "recurrent": ...}`; only the component state, item kind
            `request_row`. A head's state of any shape is declared by its number of elements.
        requests: Rows beside row 0.
        device: Where the memory lies.
        layer_ids: Global layer ids of this stage, as for `MhaPool`; kinds take from it the layers that own them.
        placement: This rank.
        shapes: Shape of a head's state, a kind each, whose product is the layout's dims; a flat row without one.
        writer: How `write` stores rows.
        region: Called once a kind; the allocation happens inside the context manager it returns.

    Raises:
        PoolSizeError: Less than one row.
        LayoutError: No kind, or a shape that is not the kind's.
        UnheldComponent, HeadRangeError, UnknownWriter, DeviceUnavailable: See `MhaPool`.
    """

    def __init__(
        self,
        layouts: Mapping[str, ModelLayout],
        *,
        requests: int,
        device: str | torch.device,
        layer_ids: Mapping[PartName, Sequence[int]] | Sequence[int] | None = None,
        placement: Placement | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        writer: WriterName = "auto",
        region: Region | None = None,
    ) -> None:
        consequence = "row 0 is reserved, so no request would have a state"
        most = INT32_MAX - 1  # rows that an index can name
        requests = whole_number("requests", requests, least=1, most=most, error=PoolSizeError, consequence=consequence)
        self._rows = requests + 1
        check_mapping("layouts", layouts, LayoutError)
        shapes = {} if shapes is None else check_mapping("shapes", shapes, LayoutError)
        if not layouts or not set(shapes) <= set(layouts):
            raise _shape_error(
                "layouts, shapes",
                (sorted(map(str, layouts)), sorted(map(str, shapes))),
                "at least one kind, shapes of it",
            )
        placement = placement if placement is not None else Placement()
        place = as_device(device)
        self._writer = create_writer(writer, place, num_slots=self._rows)
        self._kinds: dict[str, StateKind] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for kind, layout in layouts.items():
            geometries = derive_geometry(
                layout, holds=("state",), item_kind="request_row", layer_ids=layer_ids, placement=placement
            )
            shape = check_numbers(f"shapes[{kind!r}]", shapes.get(kind, ()), LayoutError)
            for geometry in geometries:
                if shape and torch.Size(shape).numel() != geometry.dims:
                    raise _shape_error(f"shapes[{kind!r}]", shape, f"{geometry.dims} elements")
            buffers = allocate(geometries, self._rows, place, region=region)
            self._kinds[kind] = StateKind(layout, placement, buffers, self._rows)
            self._shapes[kind] = shape

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds."""
        return tuple(self._kinds)

    @property
    def rows(self) -> int:
        """Rows, the reserved row 0 included."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of all storage."""
        return sum(kind.nbytes for kind in self._kinds.values())

    def kind(self, name: str) -> StateKind:
        """Return one kind: its storage, manifest and copies.

        Raises:
            UnknownLayer: There is no such kind.
        """
        try:
            return self._kinds[name]
        except (KeyError, TypeError):  # the latter from a list, for example
            raise UnknownLayer(
                "kind",
                given=name,
                expected=f"one of {list(self._kinds)}",
                consequence="there is no such storage",
                remedy="declare its layout at construction",
            ) from None

    def state(self, kind: str, layer_id: int, part: PartName = "target") -> torch.Tensor:
        """Return a layer's states, a view of the storage. Shape: [rows, heads, *shape of the kind]."""
        layer = self.kind(kind).view("state", layer_id, part).squeeze(1)
        return layer.view(*layer.shape[:2], *self._shapes[kind]) if self._shapes[kind] else layer

    def write(
        self, kind: str, layer_id: int, rows: torch.Tensor, states: torch.Tensor, part: PartName = "target"
    ) -> None:
        """Store one state a request. Safe inside graph capture: no host synchronisation, static shapes.

        Args:
            kind: Which kind.
            layer_id: Global layer id.
            rows: Row of each request. Shape: [requests]; int32 or int64 on the pool's device; padded ones name row 0.
            states: Shape: [requests, heads, *shape of the kind]; dtype of the kind. Not mutated.
            part: Which part.

        Raises:
            UnknownLayer: The kind or layer is not held here.
            WriteError: Something does not fit; nothing is written.
        """
        cache = self.kind(kind).view("state", layer_id, part)
        shape = self._shapes[kind]
        check_kind("states", states, torch.Tensor, RowMismatch)
        if shape and states.ndim > 1 and tuple(states.shape[2:]) == shape:
            states = states.flatten(2)
        try:
            self._writer.write_rows(cache, rows, states)
        except WriteError as error:  # of the writer, whose rows are states, and slots the rows
            raise error.named({"rows": "states", "slots": "rows"}.get(error.argument, error.argument)) from None

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy rows of every kind, layer and part: a state that two requests go on from, or that is kept as it is.

        All sources of a layer are read before a target is written, so that rows may change places. Safe inside graph
        capture, as `write` is.

        Args:
            sources: Rows to read; one may be named several times. Shape: [requests]; int32 or int64 on the pool's
                device; on a device, a negative one reads row 0.
            targets: The row that each goes to, each once. Shape and dtypes: as of `sources`; padded ones name row 0.

        Raises:
            WriteError: Something does not fit; nothing is written.
        """
        layers = self._layers()
        self._check("sources", sources, layers[0].device)
        self._check("targets", targets, layers[0].device)
        if len(sources) != len(targets):
            raise RowMismatch(
                "targets",
                given=f"{len(targets)} rows",
                expected=f"{len(sources)}, one a source",
                consequence="some states would be lost or stored twice",
                remedy="pass one target a source; padded ones name row 0",
            )
        index = sources.to(torch.int64).clamp_min(0)
        for layer in layers:
            states = as_bits(layer).squeeze(1).index_select(0, index).view(layer.dtype)
            self._writer.write_rows(layer, targets, states)

    def clear(self, rows: torch.Tensor) -> None:
        """Zero rows of every kind, layer and part, before their first use by a request.

        Args:
            rows: Shape: [requests]; int32 or int64 on the pool's device.

        Raises:
            WriteError: Something does not fit.
        """
        layers = self._layers()
        self._check("rows", rows, layers[0].device)
        for layer in layers:
            zeros = torch.zeros((len(rows), *layer.shape[2:]), dtype=layer.dtype, device=layer.device)
            self._writer.write_rows(layer, rows, zeros)

    def _check(self, argument: str, rows: torch.Tensor, device: torch.device) -> None:
        """Refuse what names no rows of this pool; values where they can be read without waiting."""
        check_index(argument, rows, (torch.int32, torch.int64))
        check_device(argument, rows, device)
        if device.type == "cpu":
            check_slot_values(rows, self._rows, argument)

    def _layers(self) -> list[torch.Tensor]:
        """Every layer of every part and kind. Shape of each: [rows, 1, heads, dims]."""
        return [layer for kind in self._kinds.values() for name in kind.components for layer in kind.layers(*name)]


def _shape_error(argument: str, given: object, expected: str) -> LayoutError:
    return LayoutError(
        argument,
        given=given,
        expected=expected,
        consequence="rows could not be told apart",
        remedy="declare every kind once, with the shape of one head's state",
    )
