"""What calls from the C runtime mean: queued copies and fills, flags, events, graphs, waits; the mapping only."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ._graphs import FlagWait, FlagWrite, Node, graphs, write_flag
from ._queue import Blocked, EventWait, Item, StreamQueue, Work, scheduler
from ._runtime import Call, runtime

__all__ = ["connect"]

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _FlagItem:
    """A flag wait that was issued outside a capture."""

    __slots__ = ("node", "ticket")

    def __init__(self, node: FlagWait) -> None:
        self.node = node
        self.ticket = 0

    def run(self, queue: StreamQueue) -> Blocked | None:
        """Go on when the flag is set."""
        blocked = self.node.step()
        return blocked and Blocked(f"stream {queue.state.index} {blocked.text}")

    def drop(self) -> None:
        """Nothing to undo."""

    def describe(self) -> str:
        """The name of the wait."""
        return self.node.name


def _issue(stream: int, node: Node, item: Item | None = None) -> None:
    """Capture the node, or queue it and run what can run."""
    queue = scheduler.queue(stream)
    model = queue.state.model
    if model:
        graphs.get(model).add(node)
        return
    with scheduler.lock:
        scheduler.submit(queue, item or Work(node.name, node.call))
        scheduler.progress(queue)


def _wait_event(stream: int, other: int, _second: int, ticket: int, _size: int) -> None:
    with scheduler.lock:
        scheduler.submit(scheduler.queue(stream), EventWait(scheduler.queue(other), ticket))


def _value_wait(stream: int, address: int, _second: int, value: int, mode: int) -> None:
    node = FlagWait(address, value, mode)
    queue = scheduler.queue(stream)
    if queue.state.model or queue.items or not node.ready():
        _issue(stream, node, _FlagItem(node))


def _value_write(stream: int, address: int, _second: int, value: int, _mode: int) -> None:
    queue = scheduler.queue(stream)
    if queue.state.model or queue.items:
        _issue(stream, FlagWrite(address, value))
    else:
        with scheduler.lock:
            write_flag(address, value)


def _memcpy(stream: int, target: int, source: int, _value: int, size: int) -> None:
    _issue(stream, Node("aclrtMemcpyAsync", lambda: ctypes.memmove(target, source, size)))


def _memset(stream: int, target: int, _second: int, value: int, size: int) -> None:
    _issue(stream, Node("aclrtMemsetAsync", lambda: ctypes.memset(target, value & 0xFF, size)))


def _host_function(stream: int, function: int, argument: int, _value: int, _size: int) -> None:
    call: Callable[[int], None] = _HOST_FUNCTION(function)
    _issue(stream, Node("host function", lambda: call(argument)))


def _group_end(_stream: int, out: int, _second: int, _value: int, _size: int) -> None:
    ctypes.c_uint64.from_address(out).value = graphs.end_group()


def connect() -> None:
    """Give every call from C its meaning."""
    runtime.on(Call.WAIT_EVENT, _wait_event)
    runtime.on(Call.VALUE_WAIT, _value_wait)
    runtime.on(Call.VALUE_WRITE, _value_write)
    runtime.on(Call.MEMCPY, _memcpy)
    runtime.on(Call.MEMSET, _memset)
    runtime.on(Call.HOST_FUNCTION, _host_function)
    runtime.on(Call.EXECUTE, lambda stream, first, second, value, size: graphs.replay(value, stream))
    runtime.on(
        Call.SYNCHRONIZE_STREAM,
        lambda stream, first, second, value, size: scheduler.wait_stream(scheduler.queue(stream)),
    )
    runtime.on(Call.SYNCHRONIZE_EVENT, lambda stream, first, second, value, size: scheduler.wait_event(first))
    runtime.on(Call.SYNCHRONIZE_DEVICE, lambda stream, first, second, value, size: scheduler.wait_device(value))
    runtime.on(Call.CAPTURE_BEGIN, lambda stream, first, second, value, size: graphs.begin(value))
    runtime.on(Call.CAPTURE_END, lambda stream, first, second, value, size: graphs.end())
    runtime.on(Call.DESTROY, lambda stream, first, second, value, size: graphs.destroy(value))
    runtime.on(
        Call.GROUP_BEGIN,
        lambda stream, first, second, value, size: graphs.begin_group(scheduler.queue(stream).state.model, value),
    )
    runtime.on(Call.GROUP_END, _group_end)
    runtime.on(Call.UPDATE_BEGIN, lambda stream, first, second, value, size: graphs.begin_update(value))
    runtime.on(Call.UPDATE_END, lambda stream, first, second, value, size: graphs.end_update())
