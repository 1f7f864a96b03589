"""Waits, queries, replays and ends of captures of torch_npu's Python classes: an emulator's error keeps its own type.

torch_npu turns an error of the runtime into a RuntimeError with the text; draining before its call keeps type and
attributes. A query, too, drives the stream as far as it goes, since nothing runs in the background.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch_npu

from ._graphs import graphs
from ._queue import scheduler
from ._runtime import runtime
from .errors import CaptureFailedError

__all__ = ["install_waits"]


def _before(original: Callable[..., Any], first: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return original(*args, **kwargs)

    return call


def _typed(original: Callable[..., Any]) -> Callable[..., Any]:
    """A call that raises the emulator's error instead of torch_npu's RuntimeError with its text."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        runtime.take_error()
        try:
            return original(*args, **kwargs)
        except RuntimeError:
            error = runtime.take_error()
            if error is None:
                raise
        raise error

    return call


def _capture_exit(original: Callable[..., Any]) -> Callable[..., Any]:
    """The end of `torch.npu.graph`: raises when the capture failed and nobody has said so yet."""

    @functools.wraps(original)
    def leave(self: Any, exc_type: Any, exc_value: Any, traceback: Any) -> Any:
        graphs.take_failure()
        result = original(self, exc_type, exc_value, traceback)
        failure = graphs.take_failure()
        if failure is not None and exc_type is None:
            raise CaptureFailedError(failure)
        return result

    return leave


def _stream_synchronize(stream: Any) -> None:
    queue = scheduler.queue(stream.npu_stream)
    if not queue.state.model:
        scheduler.wait_stream(queue)


def _stream_query(stream: Any) -> None:
    queue = scheduler.queue(stream.npu_stream)
    if not queue.state.model and scheduler.progress(queue) is None:
        runtime.host_sees_stream(queue.address)
        scheduler.settle()


def _event_synchronize(event: Any) -> None:
    if event.npu_event and not scheduler.captures:
        scheduler.wait_event(event.npu_event)


def _event_query(event: Any) -> None:
    if not event.npu_event or scheduler.captures:
        return
    stream, ticket = runtime.event_point(event.npu_event)
    if not stream:
        return
    queue = scheduler.queue(stream)
    scheduler.progress(queue)
    if queue.state.executed >= ticket:
        runtime.host_sees_event(event.npu_event)
        scheduler.settle()


def _device_synchronize(device: Any = None) -> None:
    if scheduler.captures or not torch_npu.npu.is_initialized():
        return
    index = torch_npu.npu.utils._get_device_index(device, optional=True)
    scheduler.wait_device(index)


def install_waits() -> None:
    """Put the drains before torch_npu's own waits and queries, and the types on its errors."""
    stream, event, npu = torch_npu.npu.streams.Stream, torch_npu.npu.streams.Event, torch_npu.npu
    stream.synchronize = _before(stream.synchronize, _stream_synchronize)
    stream.query = _before(stream.query, _stream_query)
    event.synchronize = _before(event.synchronize, _event_synchronize)
    event.query = _before(event.query, _event_query)
    synchronize = _before(npu.synchronize, _device_synchronize)
    npu.synchronize = synchronize
    npu.utils.synchronize = synchronize
    npu.NPUGraph.replay = _typed(npu.NPUGraph.replay)
    npu.graph.__exit__ = _capture_exit(npu.graph.__exit__)
