"""The place where accesses to memory are reported for the order between streams. It owns the hook, not yet a checker.

Every operator, copy, capture node and replay passes through `report`; the events' vector clocks are in
`runtime/stream.c`. A checker sets `observer` and gets each access with the stream it was issued on, in issue order.
"""

from __future__ import annotations

from collections.abc import Callable

from ._queue import scheduler

__all__ = ["Access", "observe", "observer"]

# (operator name, stream address, tensors read and written as the operator's own arguments)
Access = Callable[[str, int, tuple[object, ...]], None]

observer: Access | None = None


def observe(call: Access | None) -> None:
    """Set or remove (None) the observer of accesses."""
    global observer
    scheduler.count(observers=(call is not None) - (observer is not None))
    observer = call
