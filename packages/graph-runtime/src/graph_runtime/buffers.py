"""Static step inputs: one host arena, one device arena, the same offsets, every row rewritten on every load.

It owns the memory that captured graphs read, its padding, its addresses and the fence that keeps the host side
unchanged while it is copied. It does not decide how many rows a bucket has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from kv_planner import RowField, RowLayout

from .device import Fence, GraphDevice
from .errors import (
    AddressChanged,
    AliasedValue,
    FenceTimeout,
    GraphClosed,
    RowCountError,
    UnknownField,
    UnwrittenRows,
    ValueDevice,
)
from .values import poison_bytes, to_tensor, torch_dtype

__all__ = ["PreparedLoad", "StaticBuffers"]


class PreparedLoad:
    """Values that were checked against the layout and not yet written.

    Args:
        rows: Live rows of every field.
        values: Field to tensor, shapes and dtypes right.
    """

    def __init__(self, rows: Mapping[str, int], values: Mapping[str, torch.Tensor]) -> None:
        self.rows = rows
        self.values = values


class StaticBuffers:
    """Host and device twins of one `RowLayout`.

    Invariants: 1. both arenas have the layout's bytes and offsets; 2. after a load every row of every field was
    written: live rows from the values, all others, beyond any bucket too, with the field's fill; 3. a load makes one
    copy from host to device; 4. the host arena is not rewritten before that copy was consumed; 5. a refused load
    changes nothing.

    Args:
        layout: Fields with rows, width, dtype and fill.
        device: Where the device arena lives.
        device_written: Fields whose live rows are not loaded but written on the device, after the load and before the
            replay. A load gives their rows the fill, or in poison mode a pattern that no sensible input has.
        poison: Marks those rows and lets `check_written` find the ones that nobody wrote. A debug mode: the check
            copies the fields to the host. One-byte dtypes and bool have no pattern of their own, so there a legitimate
            value can be mistaken for it.
        fence_timeout: Seconds to wait for the previous copy.

    Raises:
        UnknownField: `device_written` names a field that the layout has not.
    """

    def __init__(
        self,
        layout: RowLayout,
        device: GraphDevice,
        *,
        device_written: Collection[str] = (),
        poison: bool = False,
        fence_timeout: float | None = 60.0,
    ) -> None:
        self._layout = layout
        self._device = device
        self._fields: dict[str, RowField] = {field.name: field for field in layout.fields}
        self._device_written = frozenset(device_written)
        for name in self._device_written:
            self.field(name)
        self._poison = poison
        self._fence_timeout = fence_timeout
        self._host = device.allocate_host(layout.nbytes)
        self._arena = device.allocate(layout.nbytes)
        self._host_views = {name: _view(self._host, field) for name, field in self._fields.items()}
        self._views = {name: _view(self._arena, field) for name, field in self._fields.items()}
        self._addresses = {name: view.data_ptr() for name, view in self._views.items()}
        self._fence: Fence | None = None
        self._closed = False
        self._live: dict[str, int] = {}
        self.loads = 0
        self.reset()

    @property
    def layout(self) -> RowLayout:
        """The layout of both arenas."""
        return self._layout

    @property
    def device(self) -> GraphDevice:
        """The device."""
        return self._device

    @property
    def nbytes(self) -> int:
        """Bytes of each arena."""
        return int(self._layout.nbytes)

    @property
    def poison(self) -> bool:
        """Whether device-written rows are marked on load."""
        return self._poison

    @property
    def names(self) -> tuple[str, ...]:
        """The fields in layout order."""
        return tuple(self._fields)

    def field(self, name: str) -> RowField:
        """The field of that name.

        Raises:
            UnknownField: The layout has none.
        """
        if name not in self._fields:
            raise UnknownField(
                f"field {name!r}",
                expected=f"one of {sorted(self._fields)}",
                got=name,
                consequence="The value would reach no captured op.",
                remedy="Add the field to the RowLayout, or correct the name.",
            )
        return self._fields[name]

    def view(self, name: str, rows: int | None = None) -> torch.Tensor:
        """The device memory of a field, at a fixed address.

        Args:
            name: The field.
            rows: The first so many rows, or all.

        Returns:
            Shape: [rows] for width 1, else [rows, width]; the field's dtype.
        """
        self._check_open()
        field = self.field(name)
        count = field.rows if rows is None else rows
        if not 0 <= count <= field.rows:
            raise self._too_many(field, count)
        return self._views[name][:count]

    def prepare(self, rows: int | Mapping[str, int], values: Mapping[str, Any]) -> PreparedLoad:
        """Checks rows and values for a load, and writes nothing.

        Args:
            rows: Live rows of every field, or one number for all.
            values: For every field that is loaded, a tensor (host or device), numpy array or list with exactly its live
                rows. A field without live rows may be left out.

        Raises:
            UnknownField: A name is no field, or a field with live rows has no value.
            RowCountError: More rows than the field has, or a value with another number.
            RowWidthError: A value of another width.
            RowDtypeError: A value of another dtype.
            AliasedValue: A value that lies in one of the arenas.
            ValueDevice: A value on another device than the host and that of the arena, or not strided.
        """
        self._check_open()
        for name in (*values, *(rows if isinstance(rows, Mapping) else ())):
            self.field(name)
        live: dict[str, int] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, field in self._fields.items():
            count = rows.get(name, 0) if isinstance(rows, Mapping) else rows
            if not 0 <= count <= field.rows:
                raise self._too_many(field, count)
            live[name] = count
            if name in values:
                tensors[name] = self._checked(field, values[name], count)
            elif count and name not in self._device_written:
                raise UnknownField(
                    f"value of field {name!r}",
                    expected=f"{count} live rows",
                    got="no value",
                    consequence="The replay would read rows of an earlier step.",
                    remedy="Pass the value, or declare the field as device_written.",
                )
        return PreparedLoad(live, tensors)

    def load(self, rows: int | Mapping[str, int] | PreparedLoad, values: Mapping[str, Any] | None = None) -> None:
        """Rewrites every row of every field and copies once to the device.

        Values on the device are then copied from device to device; nothing is ever copied to the host.

        Args:
            rows: See `prepare`; or what `prepare` returned, without values.
            values: See `prepare`.

        Raises:
            RowValueError: See `prepare`; nothing was written.
            FenceTimeout: The previous copy was not consumed in time; nothing was written.
        """
        self._check_open()
        prepared = rows if isinstance(rows, PreparedLoad) else self.prepare(rows, values or {})
        self._await_copy()
        on_device: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for name, field in self._fields.items():
                view, count = self._host_views[name], prepared.rows[name]
                value = prepared.values.get(name)
                if value is None and self._poison and name in self._device_written:
                    _write_poison(view[:count], field)
                elif value is not None and value.device.type == "cpu":
                    view[:count].copy_(value)
                else:
                    view[:count].fill_(field.fill)
                    if value is not None and count:
                        on_device.append((self._views[name][:count], value))
                view[count:].fill_(field.fill)
            self._device.copy(self._arena, self._host)
            for target, source in on_device:
                target.copy_(source)
        self._fence = self._device.record_fence()
        self._live = dict(prepared.rows)
        self.loads += 1

    def reset(self) -> None:
        """Gives every row its fill, as for a step without live rows."""
        self.load(0, {})

    def check_addresses(self) -> None:
        """Compares the address of every view with that of construction.

        Raises:
            AddressChanged: A view moved, for instance because somebody assigned to its `data`.
        """
        self._check_open()
        for name, view in self._views.items():
            if view.data_ptr() != self._addresses[name]:
                raise AddressChanged(
                    f"static view {name!r}",
                    expected=hex(self._addresses[name]),
                    got=hex(view.data_ptr()),
                    consequence="Captured graphs would read memory that nobody fills.",
                    remedy="Write into the view (copy_), never rebind or resize it.",
                )

    def check_written(self) -> None:
        """In poison mode, looks for live rows of device-written fields that still hold the mark of the last load.

        Raises:
            UnwrittenRows: There are such rows.
        """
        self._check_open()
        if not self._poison:
            return
        found: dict[str, list[int]] = {}
        for name in sorted(self._device_written):
            field, count = self._fields[name], self._live.get(name, 0)
            if count:
                data = self._views[name][:count].contiguous().view(torch.uint8).cpu().reshape(count, -1)
                mark = torch.frombuffer(bytearray(poison_bytes(field.dtype)), dtype=torch.uint8).repeat(field.width)
                rows = (data == mark).all(dim=1).nonzero().flatten().tolist()
                if rows:
                    found[name] = rows
        if found:
            raise UnwrittenRows(
                "device-written fields",
                expected="every live row written after the load",
                got=found,
                consequence="The replay would read rows of an earlier step.",
                remedy="Write these rows before the replay (before_step), or load them.",
            )

    def close(self) -> None:
        """Drops both arenas; may be called twice."""
        if self._closed:
            return
        self._await_copy()
        self._closed = True
        self._views.clear()
        self._host_views.clear()
        self._host = self._arena = torch.empty(0, dtype=torch.uint8)
        self._fence = None

    def _checked(self, field: RowField, value: Any, count: int) -> torch.Tensor:
        devices = (torch.device("cpu"), self._arena.device)
        if isinstance(value, torch.Tensor) and (value.device not in devices or value.layout is not torch.strided):
            raise ValueDevice(
                f"value of field {field.name!r}",
                expected=f"strided memory of the host or of {self._arena.device}",
                got=f"{value.layout} on {value.device}",
                consequence="The load would fail halfway, or copy between devices.",
                remedy="Move it to the host or to the device of the buffers first.",
            )
        tensor = to_tensor(field, value, count)
        storage = tensor.untyped_storage().data_ptr()
        if tensor.numel() and storage in (
            self._arena.untyped_storage().data_ptr(),
            self._host.untyped_storage().data_ptr(),
        ):
            raise AliasedValue(
                f"value of field {field.name!r}",
                expected="memory of its own",
                got="a view of these buffers",
                consequence="It would be overwritten while it is read.",
                remedy="Clone it first, or write the view on the device after the load.",
            )
        return tensor.detach()

    def _await_copy(self) -> None:
        if self._fence is not None and not self._fence.wait(self._fence_timeout):
            raise FenceTimeout(
                "previous load",
                expected=f"its copy consumed within {self._fence_timeout} s",
                got="a copy still running",
                consequence="Rewriting the host arena now would corrupt it.",
                remedy="Look for a replay before it that waits for an update.",
            )
        self._fence = None

    def _check_open(self) -> None:
        if self._closed:
            raise GraphClosed(
                "static buffers",
                expected="open buffers",
                got="closed ones",
                consequence="Their memory has been released.",
                remedy="Make new ones and capture again.",
            )

    @staticmethod
    def _too_many(field: RowField, count: int) -> RowCountError:
        return RowCountError(
            f"rows of field {field.name!r}",
            expected=f"0 to {field.rows}",
            got=count,
            consequence="Rows would be written beyond the field.",
            remedy="Split the batch, or lay the field out with more rows.",
        )


def _view(arena: torch.Tensor, field: RowField) -> torch.Tensor:
    part = arena[field.offset : field.offset + field.nbytes].view(torch_dtype(field.dtype))
    return part if field.width == 1 else part.view(field.rows, field.width)


def _write_poison(view: torch.Tensor, field: RowField) -> None:
    if view.numel():
        mark = torch.frombuffer(bytearray(poison_bytes(field.dtype)), dtype=torch.uint8)
        view.view(torch.uint8).view(-1, mark.numel()).copy_(mark.expand(view.numel(), -1))
