"""What calls from the C runtime mean: queued copies and fills, flags, events, graphs, waits; the mapping only."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from . import order
from ._graphs import graphs
from ._nodes import FlagWait, FlagWrite, HostFunction, Node, write_flag
from ._queue import Blocked, EventWait, StreamQueue, scheduler
from ._runtime import Call, runtime

__all__ = ["connect", "move_bytes"]

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _NodeItem:
    """What would be a node in a capture, issued outside one."""

    __slots__ = ("node", "ticket")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.ticket = 0

    def run(self, queue: StreamQueue) -> Blocked | None:
        """Run it, or go on when its flag is set."""
        if self.node.accesses is not None and order.on:
            order.touch(queue.address, order.words_of(self.node.accesses, (), {}))
        blocked = self.node.step(queue)
        return blocked and Blocked(f"stream {queue.state.index} {blocked.text}")

    def drop(self) -> None:
        """Nothing to undo."""

    def describe(self) -> str:
        """The name of the work."""
        return self.node.name


def _issue(stream: int, node: Node) -> None:
    """Capture the node, or queue it and run what can run."""
    queue = scheduler.queue(stream)
    model = queue.state.model
    if model:
        graphs.get(model).add(node, queue)
        return
    with scheduler.lock:
        scheduler.submit(queue, _NodeItem(node))
        scheduler.progress(queue)


def _wait_event(stream: int, other: int, point: int, ticket: int, _size: int) -> None:
    with scheduler.lock:
        scheduler.submit(scheduler.queue(stream), EventWait(scheduler.queue(other), ticket, point))


def _value_wait(stream: int, address: int, _second: int, value: int, mode: int) -> None:
    node = FlagWait(address, value, mode)
    queue = scheduler.queue(stream)
    if queue.state.model or queue.items or not node.ready():
        _issue(stream, node)
    else:
        runtime.read_flag(stream, address)


def _value_write(stream: int, address: int, _second: int, value: int, _mode: int) -> None:
    queue = scheduler.queue(stream)
    if queue.state.model or queue.items:
        _issue(stream, FlagWrite(address, value))
    else:
        with scheduler.lock:
            runtime.write_flag(stream, address)
            write_flag(address, value)


def move_bytes(stream: int, target: int, source: int, size: int) -> None:
    """What `aclrtMemcpyAsync` does on a stream: bytes from address to address, in the stream's order."""
    name = "aclrtMemcpyAsync"
    accesses = order.bytes_accesses(name, {"source": source}, {"target": target}, size)
    _issue(stream, Node(name, lambda: ctypes.memmove(target, source, size), accesses))


def _memset(stream: int, target: int, _second: int, value: int, size: int) -> None:
    name = "aclrtMemsetAsync"
    accesses = order.bytes_accesses(name, {}, {"target": target}, size)
    _issue(stream, Node(name, lambda: ctypes.memset(target, value & 0xFF, size), accesses))


def _host_function(stream: int, function: int, argument: int, _value: int, _size: int) -> None:
    call: Callable[[int], None] = _HOST_FUNCTION(function)
    _issue(stream, HostFunction(lambda: call(argument)))


def _race(_stream: int, _first: int, _second: int, _value: int, _size: int) -> None:
    raise order.race_error()


def _group_end(_stream: int, out: int, _second: int, _value: int, _size: int) -> None:
    ctypes.c_uint64.from_address(out).value = graphs.end_group()


def connect() -> None:
    """Give every call from C its meaning."""
    runtime.on(Call.WAIT_EVENT, _wait_event)
    runtime.on(Call.VALUE_WAIT, _value_wait)
    runtime.on(Call.VALUE_WRITE, _value_write)
    runtime.on(Call.MEMCPY, lambda stream, target, source, value, size: move_bytes(stream, target, source, size))
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
    runtime.on(
        Call.CAPTURE_END,
        lambda stream, first, second, value, size: graphs.end(value, unjoined=size - 1 if size else None),
    )
    runtime.on(Call.CAPTURE_FAILED, lambda stream, first, second, value, size: graphs.fail(value, second))
    runtime.on(Call.RACE, _race)
    runtime.on(Call.DESTROY, lambda stream, first, second, value, size: graphs.destroy(value))
    runtime.on(
        Call.GROUP_BEGIN,
        lambda stream, first, second, value, size: graphs.begin_group(scheduler.queue(stream).state.model, value),
    )
    runtime.on(Call.GROUP_END, _group_end)
    runtime.on(Call.UPDATE_BEGIN, lambda stream, first, second, value, size: graphs.begin_update(value))
    runtime.on(Call.UPDATE_END, lambda stream, first, second, value, size: graphs.end_update())
