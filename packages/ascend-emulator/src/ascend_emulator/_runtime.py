"""The built C library as Python sees it: loading, the functions it offers, its stream record, its calls into Python.

It owns the boundary only; what the calls mean is decided by `_queue.py`, `_graphs.py` and `_copies.py`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

from ._build import LIBRARIES
from .errors import EmulatorError

__all__ = ["PINNED", "UNKNOWN", "Call", "Runtime", "StreamState", "runtime"]

UNKNOWN, PINNED = -2, -1  # owners of an address, beside devices: nobody, pinned host memory

_CALL = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_uint64,
)
Handler = Callable[[int, int, int, int, int], None]


class Call(IntEnum):
    """Kinds of call from C into Python; the numbers are those of emulator.h."""

    WAIT_EVENT = 1
    VALUE_WAIT = 2
    VALUE_WRITE = 3
    MEMCPY = 4
    MEMSET = 5
    HOST_FUNCTION = 6
    EXECUTE = 7
    SYNCHRONIZE_STREAM = 8
    SYNCHRONIZE_EVENT = 9
    SYNCHRONIZE_DEVICE = 10
    CAPTURE_BEGIN = 11
    CAPTURE_END = 12
    DESTROY = 13
    GROUP_BEGIN = 14
    GROUP_END = 15
    UPDATE_BEGIN = 16
    UPDATE_END = 17
    RACE = 18
    CAPTURE_FAILED = 19


class StreamState(ctypes.Structure):
    """First fields of `Stream` in emulator.h."""

    _fields_ = (
        ("device", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("model", ctypes.c_uint64),
        ("enqueued", ctypes.c_uint64),
        ("executed", ctypes.c_uint64),
    )


class Runtime:
    """The loaded libraries. One per process; empty until `load`."""

    def __init__(self) -> None:
        self._handles: list[ctypes.CDLL] = []
        self._handlers: dict[int, Handler] = {}
        self._errors = threading.local()
        self._thunk = _CALL(self._dispatch)  # kept alive: C holds its address
        self.loaded = False

    def load(self, folder: Path, *, devices: int, memory_bytes: int) -> None:
        """Load the libraries under their SONAMEs, visible to libraries that are loaded later."""
        for name in LIBRARIES:
            self._handles.append(ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL))
        lib = self._lib = ctypes.PyDLL(str(folder / "libascendcl.so"))  # these calls are tiny: the GIL stays
        lib.emulator_stream_at.restype = ctypes.c_void_p
        pointer, number = ctypes.c_void_p, ctypes.c_uint64
        lib.emulator_advance.argtypes = [pointer]
        lib.emulator_enqueue.argtypes = [pointer]
        lib.emulator_enqueue.restype = number
        lib.emulator_join_point.argtypes = [pointer, pointer]
        lib.emulator_join_stream.argtypes = [pointer, pointer]
        lib.emulator_order_access.argtypes = [pointer, pointer, ctypes.c_size_t]
        lib.emulator_order_race.restype = pointer
        lib.emulator_order_allocated.argtypes = [number, number]
        lib.emulator_order_shared.argtypes = [number, number, pointer]
        lib.emulator_order_node.argtypes = [pointer]
        lib.emulator_order_write_flag.argtypes = [pointer, number]
        lib.emulator_order_read_flag.argtypes = [pointer, number]
        lib.emulator_host_saw.restype = ctypes.c_uint64
        lib.emulator_host_sees_stream.argtypes = [ctypes.c_void_p]
        lib.emulator_host_sees_event.argtypes = [ctypes.c_void_p]
        lib.emulator_event_point.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64)]
        lib.emulator_event_point.restype = ctypes.c_void_p
        lib.emulator_locate.argtypes = [
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_uint64),
            ctypes.POINTER(ctypes.c_uint64),
        ]
        lib.emulator_set_memory_limit.argtypes = [ctypes.c_uint64]
        lib.emulator_set_memory_limit(memory_bytes)
        lib.emulator_set_device_count(devices)
        lib.emulator_set_call.argtypes = [_CALL]
        lib.emulator_set_call(self._thunk)
        self.advance = lib.emulator_advance
        self.enqueue = lib.emulator_enqueue
        self.join_point = lib.emulator_join_point
        self.join_stream = lib.emulator_join_stream
        self.order_enable = lib.emulator_order_enable
        self.order_access = lib.emulator_order_access
        self.order_race = lib.emulator_order_race
        self.order_allocated = lib.emulator_order_allocated
        self.order_shared = lib.emulator_order_shared
        self.order_node = lib.emulator_order_node
        self.write_flag = lib.emulator_order_write_flag
        self.read_flag = lib.emulator_order_read_flag
        self.host_saw = lib.emulator_host_saw
        self.host_sees_stream = lib.emulator_host_sees_stream
        self.host_sees_event = lib.emulator_host_sees_event
        self._active = ctypes.c_int.in_dll(lib, "emulator_active")
        self._slow = ctypes.c_int.in_dll(lib, "emulator_slow")
        self.loaded = True

    def set_active(self, active: bool) -> None:
        """Tell C whether a wait of the host has anything to do."""
        self._active.value = int(active)

    def set_slow(self, slow: bool) -> None:
        """Tell the compiled kernels whether an operator has to look at its stream before it runs."""
        self._slow.value = int(slow)

    def streams(self) -> list[int]:
        """Addresses of all streams."""
        return [self._lib.emulator_stream_at(i) for i in range(self._lib.emulator_stream_count())]

    def event_point(self, event: int) -> tuple[int, int]:
        """Stream (0 when not recorded) and ticket of an event's last record."""
        ticket = ctypes.c_uint64()
        stream = self._lib.emulator_event_point(event, ctypes.byref(ticket))
        return stream or 0, ticket.value

    def locate(self, address: int) -> tuple[int, int, int]:
        """Owner (-2 unknown, -1 pinned host, else device), start and size of the allocation that holds an address."""
        start, size = ctypes.c_uint64(), ctypes.c_uint64()
        owner = self._lib.emulator_locate(address, ctypes.byref(start), ctypes.byref(size))
        return owner, start.value, size.value

    def take_error(self) -> BaseException | None:
        """What the last call from C that failed in this thread had raised, once."""
        error: BaseException | None = getattr(self._errors, "last", None)
        self._errors.last = None
        return error

    def on(self, call: Call, handler: Handler) -> None:
        """Set what happens on a call from C: handler(stream, first, second, value, size)."""
        self._handlers[int(call)] = handler

    def _dispatch(
        self, kind: int, stream: int | None, first: int | None, second: int | None, value: int, size: int
    ) -> int:
        try:
            self._handlers[kind](stream or 0, first or 0, second or 0, value, size)
        except BaseException as error:  # handed on as an error code: a C frame cannot carry it
            self._errors.last = error
            self._lib.emulator_set_message(f"ascend_emulator: {error}".encode())
            return error.acl_code if isinstance(error, EmulatorError) else EmulatorError.acl_code
        return 0


runtime = Runtime()
