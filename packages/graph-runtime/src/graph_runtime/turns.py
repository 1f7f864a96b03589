"""Taking turns: locks that know their holder, wait for a bounded time, and name a call that would wait for itself.

It owns who may call whom: a runner is used by one call at a time, a device by one thread at a time, and nothing runs
inside a capture. It does not own what is done in a turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._stack import stack_of
from .errors import FenceTimeout, ReentrantCall

__all__ = ["Turn", "capturing", "refuse_in_capture", "take_turn"]

_local = threading.local()


class Turn:
    """A lock of one thread at a time.

    An exception at any moment, also one of a signal handler, leaves it released once the `with` block is left.

    Args:
        name: What it guards, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock: Any = threading.RLock()
        self._holder: int | None = None
        self._since = 0.0
        self._call = ""

    @property
    def mine(self) -> bool:
        """Whether the calling thread holds it."""
        return bool(self._lock._is_owned())

    @contextmanager
    def hold(self, timeout: float | None, call: str) -> Iterator[None]:
        """Holds it in the block; where the thread holds it already, the block is part of that turn.

        Args:
            timeout: Seconds to wait, or None for ever.
            call: Who wants it, for messages of others.

        Raises:
            FenceTimeout: Another thread did not release it in time.
        """
        if self.mine:
            yield
            return
        try:
            self.take(timeout, call)
            yield
        finally:
            self.drop()

    def take(self, timeout: float | None, call: str) -> None:
        """Takes it, for a thread that does not hold it and will `drop` it; see `hold`."""
        if not self._lock.acquire(timeout=-1 if timeout is None else max(timeout, 0)):
            raise self._timed_out(timeout, call)
        self._holder, self._since, self._call = threading.get_ident(), time.monotonic(), call

    def take_now(self, call: str) -> bool:
        """As `take`, but gives up at once; whether it was taken."""
        if not self._lock.acquire(blocking=False):
            return False
        self._holder, self._since, self._call = threading.get_ident(), time.monotonic(), call
        return True

    def drop(self) -> None:
        """Releases it if the calling thread holds it."""
        if self.mine:
            self._holder = None
            self._lock.release()

    @contextmanager
    def aside(self, timeout: float | None) -> Iterator[None]:
        """Lets others have it in the block, and takes it back afterwards. The calling thread must hold it.

        Raises:
            FenceTimeout: It did not come back in time.
        """
        call = self._call
        self.drop()
        try:
            yield
        finally:
            self.take(timeout, call)

    def _timed_out(self, timeout: float | None, call: str) -> FenceTimeout:
        holder, since, theirs = self._holder, self._since, self._call
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        where = stack_of(holder) or "its thread has ended"
        return FenceTimeout(
            f"{call} waiting for {self.name}",
            expected=f"a turn within {timeout} s",
            got=f"{theirs or 'a call'} of thread {names.get(holder, holder)}, for {time.monotonic() - since:.3f} s, "
            f"at:\n{where}\n",
            consequence="Nothing was written.",
            remedy="Look at the stack above: a callback that waits for this thread, or a device that stopped.",
        )


@contextmanager
def take_turn(turn: Turn, device: Turn, timeout: float | None, call: str) -> Iterator[None]:
    """A call's turn on one runner; runners of one device may be called from each other's callbacks.

    A callback's thread holds the device. Where the other runner is busy in another thread, which may itself wait for
    the device, the device is set aside until that call has ended.

    Args:
        turn: The runner's.
        device: That of its device.
        timeout: Seconds to wait for either, or None for ever.
        call: Such as ``"run() of a decode runner on cpu"``.

    Raises:
        ReentrantCall: The thread is inside a call of this runner, or inside a capture.
        FenceTimeout: Another thread did not end its turn in time.
    """
    refuse_in_capture(call)
    if turn.mine:
        raise ReentrantCall(
            call,
            expected="a call from outside the runner",
            got="a call from the runner's own forward, before_step or barrier, or from a signal handler in its call",
            consequence="It would wait for the end of the call that it is part of.",
            remedy="Call it when run(), capture() or close() has returned, or use a runner of its own.",
        )
    try:
        if not device.mine:
            turn.take(timeout, call)
        elif not turn.take_now(call):
            with device.aside(timeout):
                turn.take(timeout, call)
        yield
    finally:
        turn.drop()


@contextmanager
def capturing(what: str) -> Iterator[None]:
    """Marks that the calling thread captures, warm-ups and barriers included.

    Args:
        what: Such as ``"bucket 4 on cpu"``.
    """
    _local.capture = what
    try:
        yield
    finally:
        _local.capture = None


def refuse_in_capture(call: str) -> None:
    """Refuses a runner's call in a capture of the calling thread.

    Raises:
        ReentrantCall: There is one.
    """
    what = getattr(_local, "capture", None)
    if what is not None:
        raise ReentrantCall(
            call,
            expected="a call outside every capture",
            got=f"a call from the forward or barrier that is being captured for {what}",
            consequence="The other runner's step would become part of the graph, with the values of capture time.",
            remedy="Call it from before_step, or before and after run().",
        )
