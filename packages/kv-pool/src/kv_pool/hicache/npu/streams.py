"""Owns the lanes of a cache on an NPU: two streams of its own beside the caller's, and events as marks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch_npu

from kv_pool.hicache.streams import Lane, Mark

__all__ = ["NpuStreams"]


class _EventMark:
    """An event that was recorded on a stream."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def reached(self) -> bool:
        """See `Mark.reached`."""
        return bool(self.event.query())

    def wait_on_host(self) -> None:
        """See `Mark.wait_on_host`."""
        self.event.synchronize()


class NpuStreams:
    """Streams of one device; see `Streams`."""

    name = "npu"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = {"load": torch_npu.npu.Stream(device=device), "backup": torch_npu.npu.Stream(device=device)}

    def mark(self, lane: Lane) -> Mark:
        """See `Streams.mark`."""
        return _EventMark(self._stream(lane).record_event())

    def wait(self, lane: Lane, mark: Mark) -> None:
        """See `Streams.wait`."""
        if not isinstance(mark, _EventMark):
            raise TypeError(f"mark: expected one of these lanes' own, got {type(mark).__name__}")
        self._stream(lane).wait_event(mark.event)

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """See `Streams.on`."""
        return cast("AbstractContextManager[object]", torch_npu.npu.stream(self._stream(lane)))

    def _stream(self, lane: Lane) -> Any:
        return self._own.get(lane) or torch_npu.npu.current_stream(self._device)
