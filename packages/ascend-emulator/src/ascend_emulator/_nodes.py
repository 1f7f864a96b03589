"""Nodes of a captured graph: what a replay does again, one by one. Graphs and records are in `_graphs.py`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._queue import Blocked, StreamQueue, scheduler
from ._runtime import runtime
from .order import Accesses

if TYPE_CHECKING:
    from ._graphs import Record

__all__ = ["FlagWait", "FlagWrite", "HostCopy", "HostFunction", "Node", "OperatorNode", "write_flag"]

_TESTS: tuple[Callable[[int, int], bool], ...] = (
    lambda word, value: word >= value,
    lambda word, value: word == value,
    lambda word, value: bool(word & value),
    lambda word, value: (~(word | value) & 0xFFFFFFFF) != 0,
)


class Node:
    """A captured call: on a replay it runs again with the same arguments, and touches the same memory."""

    __slots__ = ("accesses", "call", "name", "record")

    def __init__(self, name: str, call: Callable[[], Any], accesses: Accesses | None = None) -> None:
        self.name = name
        self.call = call
        self.accesses = accesses
        self.record: Record | None = None

    def step(self, queue: StreamQueue) -> Blocked | None:
        """Run the node on the replay's stream, or say why it has to wait."""
        self.call()
        return None


class FlagWait(Node):
    """Waits until a word of device memory has a value (the wait of an external event)."""

    __slots__ = ("address", "mode", "value")

    def __init__(self, address: int, value: int, mode: int) -> None:
        super().__init__("external event wait", lambda: None)
        self.address, self.value, self.mode = address, value, mode

    def ready(self) -> bool:
        """Whether the word has the value now."""
        return _TESTS[self.mode](ctypes.c_uint64.from_address(self.address).value, self.value)

    def step(self, queue: StreamQueue) -> Blocked | None:
        """Go on when the flag is set, after all that its writer did and knew."""
        if not self.ready():
            return Blocked("waits for an external event that nobody records")
        runtime.read_flag(queue.address, self.address)
        return None


class FlagWrite(Node):
    """Writes a word of device memory (reset or record of an external event)."""

    __slots__ = ("address",)

    def __init__(self, address: int, value: int) -> None:
        super().__init__("external event write", lambda: write_flag(address, value))
        self.address = address

    def step(self, queue: StreamQueue) -> Blocked | None:
        """Publish what the stream did, and write."""
        runtime.write_flag(queue.address, self.address)
        self.call()
        return None


class HostFunction(Node):
    """A function of the host in a stream; when it has run, any thread of the host may know that."""

    __slots__ = ()

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__("host function", call)

    def step(self, queue: StreamQueue) -> Blocked | None:
        """The host has waited for what is before it; call it."""
        runtime.host_sees_stream(queue.address)
        self.call()
        return None


class HostCopy(Node):
    """A captured copy between pinned host memory and the device; `issue` is called when a replay is queued."""

    __slots__ = ("issue",)

    def __init__(
        self, name: str, call: Callable[[], Any], issue: Callable[[StreamQueue, int], None], accesses: Accesses
    ) -> None:
        super().__init__(name, call, accesses)
        self.issue = issue


def write_flag(address: int, value: int) -> None:
    """Set a flag and wake the waits."""
    ctypes.c_uint64.from_address(address).value = value
    scheduler.notify()


class OperatorNode(Node):
    """A captured operator with its arguments, which an update may replace."""

    __slots__ = ("args", "kwargs", "run")

    def __init__(
        self, name: str, run: Callable[[Any, Any], Any], args: Any, kwargs: Any, accesses: Accesses | None = None
    ) -> None:
        super().__init__(name, self._again, accesses)
        self.run = run
        self.args, self.kwargs = args, kwargs

    def _again(self) -> None:
        self.run(self.args, self.kwargs)
