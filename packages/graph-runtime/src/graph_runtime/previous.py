"""Waiting for the step before, and what its failure means.

It owns the two errors. It keeps no fence: the runner does.
"""

from __future__ import annotations

from .device import Fence
from .errors import FenceTimeout, StepFailed

__all__ = ["await_step"]


def await_step(fence: Fence, what: str, timeout: float | None) -> None:
    """Blocks until a step has ended.

    Args:
        fence: Recorded after it.
        what: Names it, such as ``"previous step (bucket 4)"``.
        timeout: Seconds, or None for ever.

    Raises:
        StepFailed: The device raised while it ran; it has ended.
        FenceTimeout: It still runs.
    """
    try:
        reached = fence.wait(timeout)
    except Exception as error:
        raise StepFailed(
            what,
            expected="a step without a device error",
            got=f"{type(error).__name__}: {error}",
            consequence="Its output is not valid; nothing of the present step was written.",
            remedy="Mend the cause and capture the bucket again; steps may go on if the device still works.",
        ) from error
    if not reached:
        raise FenceTimeout(
            what,
            expected=f"an end within {timeout} s",
            got="still running",
            consequence="A write or update now would reach the step in flight, so nothing was written.",
            remedy="Look for an op that waits for an update, a collective without its peers, or a stopped device.",
        )
