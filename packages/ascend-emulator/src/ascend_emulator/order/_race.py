"""Tells the C runtime of accesses and turns what it finds into a `RaceError`."""

from __future__ import annotations

import ctypes
from array import array

from ascend_emulator import memory
from ascend_emulator._runtime import StreamState, runtime
from ascend_emulator.errors import CaptureError, RaceError

from ._info import AccessInfo

__all__ = ["race_error", "touch"]


class _Description(ctypes.Structure):
    """`Description` in shadow.h."""

    _fields_ = (
        ("operator", ctypes.c_char_p),
        ("argument", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("write", ctypes.c_int64),
        ("stream", ctypes.c_int64),
        ("device", ctypes.c_int64),
        ("dims", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * 8),
        ("address", ctypes.c_uint64),
        ("sequence", ctypes.c_uint64),
        ("place", ctypes.c_int64),
    )


class _Race(ctypes.Structure):
    """`Race` in order.c."""

    _fields_ = (
        ("earlier", _Description),
        ("later", _Description),
        ("low", ctypes.c_uint64),
        ("high", ctypes.c_uint64),
        ("allocated", ctypes.c_uint64),
        ("capture", ctypes.c_uint64),
    )


def touch(stream: int, words: array[int]) -> None:
    """Tell that a stream touches memory now, or with its next queued work when nothing is pending before that.

    Args:
        stream: address of the stream's record.
        words: what it touches (`_words.py`).

    Raises:
        RaceError: another stream touched the same bytes, and no event orders the two.
        CaptureError: a capture that is open only records what makes these bytes.
    """
    if words:
        address, count = words.buffer_info()
        if runtime.order_access(stream, address, count):
            raise race_error()


def _info(found: _Description) -> AccessInfo:
    operator = found.operator.decode()
    if found.place:
        operator += f" (node {(found.place & 0xFFFFFFFF) - 1} of graph {found.place >> 32})"
    return AccessInfo(
        operator=operator,
        argument=found.argument.decode(),
        dtype=found.dtype.decode(),
        shape=tuple(found.sizes[: found.dims]),
        writes=bool(found.write),
        device=f"npu:{found.device}",
        stream=found.stream,
        stream_address=runtime.streams()[found.stream],
        address=found.address,
    )


def race_error() -> RaceError | CaptureError:
    """The race that this thread's last access has run into, or its touch of what a capture only records."""
    found = _Race.from_address(runtime.order_race())
    if found.capture:
        captured = _info(found.earlier)
        return CaptureError(
            f"{_info(found.later)}, outside of the capture,", f"touches what {captured.operator} of the capture makes"
        )
    earlier = found.earlier.sequence
    place = memory.describe(found.low)
    return RaceError(
        _info(found.earlier),
        _info(found.later),
        found.low,
        found.high,
        reused=bool(found.allocated > earlier),
        captured=StreamState.from_address(runtime.streams()[found.later.stream]).model != 0,
        place="" if place is None else str(place),
    )
