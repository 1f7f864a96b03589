"""The place where accesses to memory are reported for the order between streams. It owns the hook, not yet a checker.

`observer` hears every operator and tensor copy when it is issued or captured, and every replay, with the stream, in
issue order. Waits between streams are in the events' vector clocks (`runtime/stream.c`). A checker becomes observer.
"""

from __future__ import annotations

from collections.abc import Callable

from ._queue import scheduler

__all__ = ["Access", "observe", "observer"]

# (operator name, stream address, the operator's own positional and keyword arguments)
Access = Callable[[str, int, tuple[object, ...]], None]

observer: Access | None = None


def observe(call: Access | None) -> None:
    """Set or remove (None) the observer of accesses."""
    global observer
    scheduler.count(observers=(call is not None) - (observer is not None))
    observer = call
