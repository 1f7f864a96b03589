"""Copies in all directions: device to device, and between host and device, blocking and not. It owns when bytes move.

A blocking copy, and any copy from or to pageable memory, waits for the stream. A non-blocking copy between pinned
memory and the device takes effect at the latest legal moment: a host destination is poisoned when the copy is issued
and gets its bytes at the next wait of the host that covers the copy (in a capture: poisoned at once, and again at each
replay); a host source is read when the stream needs it,
and must not change before that wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import order, poison
from ._alias import alias
from ._graphs import Graph, HostCopy, OperatorNode
from ._operators import capturing_graph, current_queue
from ._queue import StreamQueue, Work, scheduler
from .errors import CaptureError, HostRaceError

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


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.detach().view(-1)


def _same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(_bytes_of(first), _bytes_of(second))


def copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`aten::copy_` with at least one npu tensor."""
    to_device, from_device = not self.is_cpu, not src.is_cpu
    target = alias(self) if to_device else self
    source = alias(src) if from_device else src
    if scheduler.slow or non_blocking:
        return _ordered_copy(self, src, target, source, non_blocking)
    if not (to_device and from_device):  # a wait of the host, even on an idle stream: it fences and delivers
        scheduler.wait_stream(current_queue((self if to_device else src).device.index))
    target.copy_(source)
    return self


def _ordered_copy(
    self: torch.Tensor, src: torch.Tensor, target: torch.Tensor, source: torch.Tensor, non_blocking: bool
) -> torch.Tensor:
    device = self if not self.is_cpu else src
    queue = current_queue(device.device.index)
    graph = capturing_graph(queue)
    if order.observer is not None:
        order.observer("aten::copy_", queue.address, ((self, src), {}))
    host = self if self.is_cpu else src if src.is_cpu else None
    late = host is not None and non_blocking and host.is_pinned()
    if graph is not None:
        if host is None:
            source.expand(target.shape)  # raises now when it cannot be broadcast
            graph.add(OperatorNode("copy_", lambda args, _: args[0].copy_(args[1]), (target, source), {}))
        elif not late:
            raise CaptureError("a blocking copy between host and device", "waits for the stream")
        elif host is self:
            _capture_to_host(graph, target, source)
        else:
            _capture_to_device(graph, target, source)
    elif host is None:
        _device_copy(self, src, queue, target, source)
    elif not late:
        scheduler.wait_stream(queue)
        target.copy_(source)
    elif host is self:
        _to_host(queue, target, source)
    else:
        _to_device(queue, target, source)
    return self


def _device_copy(
    self: torch.Tensor, src: torch.Tensor, queue: StreamQueue, target: torch.Tensor, source: torch.Tensor
) -> None:
    if self.device != src.device:
        other = current_queue(src.device.index)
        if other.items:  # torch_npu orders both devices' streams around the copy
            scheduler.wait(other, other.state.enqueued)
    if not queue.items or scheduler.progress(queue) is None:
        target.copy_(source)
    else:
        scheduler.submit(queue, Work("copy_", lambda: target.copy_(source)))


# --- device to pinned host ---


def _staged(target: torch.Tensor, source: torch.Tensor, staging: list[torch.Tensor]) -> Callable[[], None]:
    def read() -> None:
        staged = torch.empty_like(target)
        staged.copy_(source)
        staging.append(staged)

    return read


def _delivery(target: torch.Tensor, staging: list[torch.Tensor]) -> Callable[[], None]:
    def deliver() -> None:
        if staging:  # empty when the work was dropped
            target.copy_(staging.pop(0))

    return deliver


def _to_host(queue: StreamQueue, target: torch.Tensor, source: torch.Tensor) -> None:
    staging: list[torch.Tensor] = []
    work = Work("device to host copy", _staged(target, source, staging))
    with scheduler.lock:  # another thread may wait for the device meanwhile
        scheduler.submit(queue, work)
        scheduler.progress(queue)
        _poison(target)
        scheduler.deliver_later(queue, work.ticket, _delivery(target, staging))


def _capture_to_host(graph: Graph, target: torch.Tensor, source: torch.Tensor) -> None:
    staging: list[torch.Tensor] = []

    def issue(queue: StreamQueue, ticket: int) -> None:
        _poison(target)
        scheduler.deliver_later(queue, ticket, _delivery(target, staging))

    graph.add(HostCopy("device to host copy", _staged(target, source, staging), issue))
    _poison(target)  # a capture computes nothing: what a reader finds here before the first replay is no result


# --- pinned host to device ---


def _unchanged(source: torch.Tensor, name: str) -> Callable[[], None]:
    taken = source.detach().clone()

    def check() -> None:
        if not _same_bytes(source, taken):
            raise HostRaceError(name)

    return check


def _to_device(queue: StreamQueue, target: torch.Tensor, source: torch.Tensor) -> None:
    check = _unchanged(source, _describe("host to device", source))
    work = Work("host to device copy", lambda: target.copy_(source))
    with scheduler.lock:
        if not queue.items or scheduler.progress(queue) is None:
            _poison(target)
        else:
            scheduler.submit(queue, Work("poison", lambda: _poison(target)))
        scheduler.submit(queue, work)
        scheduler.check_later(queue, work.ticket, check)


def _capture_to_device(graph: Graph, target: torch.Tensor, source: torch.Tensor) -> None:
    def issue(queue: StreamQueue, ticket: int) -> None:
        scheduler.check_later(queue, ticket, _unchanged(source, _describe("host to device", source)))

    graph.add(HostCopy("host to device copy", lambda: target.copy_(source), issue))


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
    if capturing_graph(queue) is not None:
        raise CaptureError(".item()", "needs its data on the host")
    scheduler.wait_stream(queue)
    return alias(self).item()
