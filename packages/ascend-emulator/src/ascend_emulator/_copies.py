"""Copies in all directions: device to device, and between host and device, blocking and not. It owns when bytes move.

A blocking copy, and any copy from or to pageable memory, waits for the stream. A non-blocking copy between pinned
memory and the device takes effect at the latest legal moment: a host destination is poisoned when the copy is issued
and gets its bytes at the next wait of the host that covers the copy (in a capture: poisoned at once, and again at each
replay), and nobody may write it before. A host source is read when the stream needs it and must not change before that
wait; the device destination is poisoned until then. Both ends are told to `order/`, pinned memory as well.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from . import order, poison
from ._alias import alias
from ._graphs import Graph
from ._nodes import HostCopy, OperatorNode
from ._operators import capturing_graph, current_queue
from ._queue import StreamQueue, Work, scheduler
from ._runtime import PINNED, runtime
from .errors import HostRaceError

__all__ = ["copy_", "copy_from", "copy_from_and_resize", "local_scalar_dense"]


def _describe(what: str, tensor: torch.Tensor) -> str:
    return f"{what} copy of {tuple(tensor.shape)} {tensor.dtype}"


def _poison(tensor: torch.Tensor) -> None:
    """Poison what a copy will write, and nothing beside it."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        poison.fill(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor.dtype)
        return
    pattern = torch.empty((), dtype=tensor.dtype)
    poison.fill(pattern.data_ptr(), pattern.element_size(), tensor.dtype)
    tensor.copy_(pattern)


def _poisoned(tensor: torch.Tensor) -> bool:
    return bool(poison.is_poisoned(tensor).all())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.detach().view(-1)


def _same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(_bytes_of(first), _bytes_of(second))


def _accesses(self: torch.Tensor, src: torch.Tensor) -> array[int]:
    """What a copy touches: device and pinned memory."""
    there = [not x.is_cpu or (x.numel() and runtime.locate(x.data_ptr())[0] == PINNED) for x in (self, src)]
    return order.plain_accesses("aten::copy_", {"src": src} if there[1] else {}, {"self": self} if there[0] else {})


def copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`aten::copy_` with at least one npu tensor."""
    to_device, from_device = not self.is_cpu, not src.is_cpu
    target = alias(self) if to_device else self
    source = alias(src) if from_device else src
    if scheduler.slow or non_blocking:
        return _ordered_copy(self, src, target, source, non_blocking)
    if not (to_device and from_device):
        _blocking_copy(self, src, current_queue((self if to_device else src).device.index), target, source)
    elif self.device != src.device:
        _device_copy(self, src, current_queue(self.device.index), target, source)
    else:
        if order.on:
            order.touch(current_queue(self.device.index).address, _accesses(self, src))
        target.copy_(source)
    return self


def _blocking_copy(
    self: torch.Tensor, src: torch.Tensor, queue: StreamQueue, target: torch.Tensor, source: torch.Tensor
) -> None:
    """A wait of the host, even on an idle stream: it fences and delivers."""
    scheduler.wait(queue, queue.state.enqueued)
    if order.on:
        order.touch(queue.address, _accesses(self, src))
    scheduler.wait_stream(queue)
    target.copy_(source)


def _ordered_copy(
    self: torch.Tensor, src: torch.Tensor, target: torch.Tensor, source: torch.Tensor, non_blocking: bool
) -> torch.Tensor:
    device = self if not self.is_cpu else src
    queue = current_queue(device.device.index)
    graph = capturing_graph(queue)
    host = self if self.is_cpu else src if src.is_cpu else None
    late = host is not None and non_blocking and host.is_pinned()
    if graph is not None:
        if host is None:
            source.expand(target.shape)  # raises now when it cannot be broadcast
            call = lambda args, _: args[0].copy_(args[1])  # noqa: E731
            graph.add(OperatorNode("copy_", call, (target, source), {}, _accesses(self, src)), queue)
        elif not late:
            raise graph.refuse("a blocking copy between host and device", "waits for the stream")
        elif host is self:
            _capture_to_host(graph, queue, target, source, _accesses(self, src))
        else:
            _capture_to_device(graph, queue, target, source, _accesses(self, src))
    elif host is None:
        _device_copy(self, src, queue, target, source)
    elif not late:
        _blocking_copy(self, src, queue, target, source)
    elif host is self:
        _to_host(queue, target, source, _accesses(self, src))
    else:
        _to_device(queue, target, source, _accesses(self, src))
    return self


def _device_copy(
    self: torch.Tensor, src: torch.Tensor, queue: StreamQueue, target: torch.Tensor, source: torch.Tensor
) -> None:
    other = current_queue(src.device.index)
    if other is not queue:  # torch_npu orders both devices' streams around the copy
        scheduler.wait(other, other.state.enqueued)
        runtime.join_stream(queue.address, other.address)
    accesses = _accesses(self, src)
    if not queue.items or scheduler.progress(queue) is None:
        if order.on:
            order.touch(queue.address, accesses)
        target.copy_(source)
        if other is not queue:
            runtime.join_stream(other.address, queue.address)
    else:
        scheduler.submit(queue, Work("copy_", lambda: target.copy_(source), lambda: accesses))


def _reached(queue: StreamQueue, work: Work, accesses: array[int]) -> bool:
    """Whether nothing is pending before the work; then its accesses are told now, else when the stream reaches it."""
    ready = not queue.items or scheduler.progress(queue) is None
    if not ready:
        work.accesses = lambda: accesses
    elif order.on:
        order.touch(queue.address, accesses)
    return ready


# --- device to pinned host ---


def _staged(target: torch.Tensor, source: torch.Tensor, staging: list[torch.Tensor]) -> Callable[[], None]:
    def read() -> None:
        staged = torch.empty_like(target)
        staged.copy_(source)
        staging.append(staged)

    return read


class _Delivery:
    """What a copy to the host will write, once the host has waited for it; poison until then.

    A later copy into the same memory keeps its part poisoned when this one is delivered.
    """

    _pending: ClassVar[WeakSet[_Delivery]] = WeakSet()

    def __init__(self, target: torch.Tensor, staging: list[torch.Tensor]) -> None:
        self.target, self.staging, self.name = target, staging, _describe("device to host", target)
        self.later: list[_Delivery] = []
        for earlier in self._pending:
            if _overlap(earlier.target, target):
                earlier.later.append(self)
        self._pending.add(self)

    def __call__(self) -> None:
        self._pending.discard(self)
        if not self.staging:  # the work was dropped
            return
        if not _poisoned(self.target):
            raise HostRaceError("destination", self.name)
        self.target.copy_(self.staging.pop(0))
        for other in self.later:
            if other in self._pending:
                _poison(other.target)


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    (start, end), (begin, stop) = _span(first), _span(second)
    return start < stop and begin < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last byte."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _to_host(queue: StreamQueue, target: torch.Tensor, source: torch.Tensor, accesses: array[int]) -> None:
    staging: list[torch.Tensor] = []
    work = Work("device to host copy", _staged(target, source, staging))
    with scheduler.lock:  # another thread may wait for the device meanwhile
        _reached(queue, work, accesses)
        scheduler.submit(queue, work)
        scheduler.progress(queue)
        _poison(target)
        scheduler.deliver_later(queue, work.ticket, _Delivery(target, staging))


def _capture_to_host(
    graph: Graph, queue: StreamQueue, target: torch.Tensor, source: torch.Tensor, accesses: array[int]
) -> None:
    staging: list[torch.Tensor] = []

    def issue(queue: StreamQueue, ticket: int) -> None:
        _poison(target)
        scheduler.deliver_later(queue, ticket, _Delivery(target, staging))

    graph.add(HostCopy("device to host copy", _staged(target, source, staging), issue, accesses), queue)
    _poison(target)  # a capture computes nothing: what a reader finds here before the first replay is no result


# --- pinned host to device ---


def _unchanged(source: torch.Tensor, name: str) -> Callable[[], None]:
    taken = source.detach().clone()

    def check() -> None:
        if not _same_bytes(source, taken):
            raise HostRaceError("source", name)

    return check


def _to_device(queue: StreamQueue, target: torch.Tensor, source: torch.Tensor, accesses: array[int]) -> None:
    check = _unchanged(source, _describe("host to device", source))
    work = Work("host to device copy", lambda: target.copy_(source))
    with scheduler.lock:
        if _reached(queue, work, accesses):
            _poison(target)
        else:
            scheduler.submit(queue, Work("poison", lambda: _poison(target)))
        scheduler.submit(queue, work)
        scheduler.check_later(queue, work.ticket, check)


def _capture_to_device(
    graph: Graph, queue: StreamQueue, target: torch.Tensor, source: torch.Tensor, accesses: array[int]
) -> None:
    def issue(queue: StreamQueue, ticket: int) -> None:
        scheduler.check_later(queue, ticket, _unchanged(source, _describe("host to device", source)))

    graph.add(HostCopy("host to device copy", lambda: target.copy_(source), issue, accesses), queue)


# --- the other entry points ---


def copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`aten::_copy_from`."""
    return copy_(dst, self, non_blocking)


def copy_from_and_resize(self: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """`aten::_copy_from_and_resize`."""
    if dst.shape != self.shape:
        dst.resize_(self.shape)
    return copy_(dst, self)


def local_scalar_dense(self: torch.Tensor) -> Any:
    """`aten::_local_scalar_dense`, what `.item()` calls: waits for the stream."""
    queue = current_queue(self.device.index)
    graph = capturing_graph(queue)
    if graph is not None:
        raise graph.refuse(".item()", "needs its data on the host")
    scheduler.wait(queue, queue.state.enqueued)
    if order.on:
        order.touch(queue.address, order.plain_accesses("aten::_local_scalar_dense", {"self": self}, {}))
    scheduler.wait_stream(queue)
    return alias(self).item()
