"""Auxiliary rows of a request: first token, log-probabilities, hidden states of the draft's width.

Small, so they travel in the sender's last message and not through the engine: they are there whole, or the room has
failed. Declared on both sides and compared at the handshake; it knows no sessions.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Iterable, Mapping

import kv_planner
import numpy as np

from kv_transfer.arguments import check_items, check_kind, check_text, check_whole
from kv_transfer.errors import ArgumentError

__all__ = ["AuxField", "check_fields", "pack", "unpack"]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class AuxField:
    """One row a request.

    Attributes:
        name: Unique on its side.
        dtype: Of its elements.
        width: Elements.
    """

    name: str
    dtype: kv_planner.DType
    width: int = 1

    def __post_init__(self) -> None:
        """Refuses what is no row.

        Raises:
            ArgumentError: No name, no such dtype, or no elements.
        """
        check_text("aux.name", self.name)
        check_text(f"aux {self.name!r}.dtype", self.dtype)
        check_whole(f"aux {self.name!r}.width", self.width, 2**31 - 1, least=1)
        try:
            self._row()
        except kv_planner.PlanError as error:
            raise ArgumentError(f"aux: {error}", local=str(self), consequence="the row would have no bytes") from error

    @property
    def nbytes(self) -> int:
        """Bytes of the row."""
        return self._row().fields[0].nbytes

    def _row(self) -> kv_planner.RowLayout:
        return kv_planner.RowLayout([kv_planner.RowField(self.name, self.dtype, rows=1, width=self.width)])

    def __str__(self) -> str:
        """As in "hidden: bfloat16[2048]"."""
        return f"{self.name}: {self.dtype}[{self.width}]"


def check_fields(fields: Iterable[AuxField]) -> tuple[AuxField, ...]:
    """The fields by name.

    Raises:
        ArgumentError: Two have the same name, or one is no `AuxField`.
    """
    found = tuple(sorted(check_kind("aux", field, AuxField) for field in check_items("aux", fields)))
    names = [field.name for field in found]
    if len(set(names)) != len(names):
        raise ArgumentError(f"aux: names {names} are not unique", local=str(names), remedy="name each row once")
    return found


def pack(fields: Iterable[AuxField], rows: Mapping[str, object]) -> dict[str, str]:
    """Rows as they travel.

    Args:
        fields: What was declared.
        rows: A contiguous buffer (bytes, a numpy array, the bytes of a tensor) for every field, or nothing at all.

    Raises:
        ArgumentError: A row is missing, unknown, or has another number of bytes; nothing was sent.
    """
    if not check_kind("rows", rows, Mapping):  # type: ignore[type-abstract]
        return {}
    known = {field.name: field for field in fields}
    if set(rows) != set(known):
        given = sorted(map(str, rows))
        raise ArgumentError(
            f"rows: got {given}, declared are {sorted(known)}",
            local=str(given),
            consequence="nothing was sent and the room stays open",
            remedy="give every declared row, or none on a rank that has none",
        )
    packed = {}
    for name, row in rows.items():
        data = _bytes_of(name, row)
        if len(data) != known[name].nbytes:
            raise ArgumentError(
                f"rows[{name!r}]: {len(data)} bytes, {known[name]} has {known[name].nbytes}",
                local=len(data),
                consequence="nothing was sent and the room stays open",
                remedy="give a row of the declared dtype and width",
            )
        packed[name] = base64.b64encode(data).decode()
    return packed


def _bytes_of(name: str, row: object) -> bytes:
    """The bytes of a row.

    Raises:
        ArgumentError: It has none.
    """
    try:
        if not (isinstance(row, np.ndarray) and row.dtype.hasobject):
            return row.tobytes() if isinstance(row, np.ndarray) else bytes(memoryview(row))  # type: ignore[arg-type]
    except (TypeError, BufferError, NotImplementedError):  # no buffer, or one that is not contiguous
        pass
    raise ArgumentError(
        f"rows[{name!r}]: expected a contiguous buffer, got {type(row).__name__}",
        local=type(row).__name__,
        consequence="nothing was sent and the room stays open",
        remedy="give bytes, a numpy array of numbers, or the bytes of a tensor",
    )


def unpack(fields: Iterable[AuxField], rows: Mapping[str, str]) -> dict[str, bytes]:
    """Rows from the wire.

    Raises:
        ArgumentError: They are not what was declared.
    """
    known = {field.name: field for field in fields}
    if not rows:
        return {}
    if set(rows) != set(known):
        raise ArgumentError(f"auxiliary rows {sorted(rows)} came, {sorted(known)} are declared")
    found = {}
    for name, text in rows.items():
        try:
            found[name] = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ArgumentError(f"auxiliary row {name!r} is not base64: {error}") from None
        if len(found[name]) != known[name].nbytes:
            raise ArgumentError(f"auxiliary row {name!r} has {len(found[name])} bytes, not {known[name].nbytes}")
    return found
