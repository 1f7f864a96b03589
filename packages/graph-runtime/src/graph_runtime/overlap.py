"""Reading a step's result while the next one runs: pinned host copies in turn, each with its fence.

It owns the copies. Preparing step n + 1 while step n runs needs nothing more: `run` only enqueues, device-side state
carries tokens and exact lengths, and host lengths are upper bounds.
"""

from __future__ import annotations

import torch

from .device import Fence, GraphDevice
from .errors import FenceTimeout, OutputShapeError, SlotBusy

__all__ = ["HostResults", "PendingResult"]


class PendingResult:
    """A copy to the host that was enqueued.

    Args:
        rows: The host memory.
        fence: Recorded after the copy.
    """

    def __init__(self, rows: torch.Tensor, fence: Fence) -> None:
        self._rows = rows
        self._fence = fence
        self._read = False

    @property
    def was_read(self) -> bool:
        """Whether somebody has read it."""
        return self._read

    def done(self) -> bool:
        """Whether `read` returns at once."""
        return self._fence.done()

    def read(self, timeout: float | None = 60.0) -> torch.Tensor:
        """Waits for the step.

        Returns:
            Host memory, valid until the same slot is fetched into again. Shape: as fetched.

        Raises:
            FenceTimeout: It did not end in time; it can be read later.
        """
        if not self._fence.wait(timeout):
            raise FenceTimeout(
                "result of a step",
                expected=f"an end within {timeout} s",
                got="still running",
                consequence="The host memory does not hold it yet.",
                remedy="Look for an op that waits for an update, a collective without its peers, or a stopped device.",
            )
        self._read = True
        return self._rows


class HostResults:
    """Host copies of the results of the last few steps.

    Args:
        device: The device of the results.
        rows: Most rows of a result.
        width: Elements of a row.
        dtype: Of the results.
        slots: Results that may be unread at a time: steps in flight.
    """

    def __init__(
        self, device: GraphDevice, *, rows: int, width: int, dtype: torch.dtype = torch.int64, slots: int = 2
    ) -> None:
        self._device = device
        size = rows * width * dtype.itemsize
        self._slots = [device.allocate_host(size).view(dtype).view(rows, width) for _ in range(slots)]
        self._pending: list[PendingResult | None] = [None] * slots
        self._next = 0

    def fetch(self, result: torch.Tensor) -> PendingResult:
        """Enqueues the copy of a result on the current stream, before another step can overwrite it.

        Args:
            result: Shape: [up to rows, width]; the dtype given.

        Raises:
            OutputShapeError: Another shape or dtype.
            SlotBusy: As many results as there are slots have not been read.
        """
        slot = self._slots[self._next]
        if result.dtype != slot.dtype or result.shape[1:] != slot.shape[1:] or result.shape[0] > slot.shape[0]:
            raise OutputShapeError(
                "result",
                expected=f"at most {tuple(slot.shape)} of {slot.dtype}",
                got=f"{tuple(result.shape)} of {result.dtype}",
                consequence="It does not fit the host memory.",
                remedy="Make HostResults for the largest result.",
            )
        before = self._pending[self._next]
        if before is not None and not before.was_read:
            raise SlotBusy(
                "fetch",
                expected=f"at most {len(self._slots)} unread results",
                got="one more",
                consequence="The oldest one would be overwritten before anybody read it.",
                remedy="Read the oldest result first, or use more slots.",
            )
        rows = slot[: result.shape[0]]
        self._device.copy(rows, result)
        pending = PendingResult(rows, self._device.record_fence())
        self._pending[self._next] = pending
        self._next = (self._next + 1) % len(self._slots)
        return pending
