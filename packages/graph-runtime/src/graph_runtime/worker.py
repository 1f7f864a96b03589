"""One persistent thread that runs updates for one device.

It owns the thread, the hand-over of one job at a time and the diagnosis of a job that does not end. It does not know
what an update is, and it keeps nothing of a job once the job has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from ._stack import stack_of
from .errors import GraphClosed, UpdateTimeout

__all__ = ["UpdateWorker"]


class _Job:
    """A call handed to the thread; the reply carries the exception or None."""

    __slots__ = ("call", "reply")

    def __init__(self, call: Callable[[], object]) -> None:
        self.call: Callable[[], object] | None = call
        self.reply: SimpleQueue[BaseException | None] = SimpleQueue()


class UpdateWorker:
    """Runs calls on one thread that was bound to its device before the first of them.

    The thread starts with the first call and lives until `close`. Calls of several threads are served in turn.

    Args:
        bind: Called once on the new thread before its first job, for instance to set the thread's current device
            (a new thread would otherwise start on device 0).
        name: Name of the thread, seen in diagnoses.
    """

    def __init__(self, bind: Callable[[], object], *, name: str) -> None:
        self._bind = bind
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._busy_since: float | None = None

    @property
    def name(self) -> str:
        """Name of the thread."""
        return self._name

    @property
    def started(self) -> bool:
        """Whether the thread exists."""
        return self._thread is not None

    def run(self, call: Callable[[], object], *, timeout: float | None, what: str = "the update") -> None:
        """Runs `call` on the thread and waits for its end.

        Args:
            call: The job; its result is dropped.
            timeout: Seconds to wait, or None for ever.
            what: Named in the error.

        Raises:
            UpdateTimeout: The job did not end in time. It may still end later: its effect must not be relied upon.
            GraphClosed: The worker was closed.
            BaseException: Whatever the job, or `bind`, raised.
        """
        job = _Job(call)
        del call
        with self._lock:
            if self._closed:
                raise GraphClosed(
                    self._name,
                    expected="an open worker",
                    got="a closed one",
                    consequence="Nobody would run the update.",
                    remedy="Do not close the device's gate while a runner uses it.",
                )
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._jobs.put(job)
        try:
            error = job.reply.get(timeout=timeout)
        except Empty:
            raise self._timed_out(timeout, what) from None
        if error is not None:
            try:
                raise error
            finally:
                del error, job  # no cycle through the traceback

    def close(self, *, timeout: float = 5.0) -> None:
        """Ends the thread after the jobs already given; may be called twice. A job that hangs is left to itself."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
            self._jobs.put(None)
        if thread is not None and thread is not threading.current_thread() and self._busy_since is None:
            thread.join(timeout)

    def _serve(self) -> None:
        bound = False
        while True:
            job = self._jobs.get()
            if job is None:
                return
            self._busy_since = time.monotonic()
            error: BaseException | None = None
            try:
                if not bound:
                    self._bind()
                    bound = True
                call, job.call = job.call, None
                if call is not None:
                    call()
            except BaseException as raised:  # handed to the caller, who raises it
                error = raised
            call = None
            self._busy_since = None
            job.reply.put(error)
            del job, error

    def _timed_out(self, timeout: float | None, what: str) -> UpdateTimeout:
        thread, since = self._thread, self._busy_since
        where = stack_of(thread.ident if thread is not None else None) or "the worker's thread has ended"
        busy = "is idle" if since is None else f"has been busy for {time.monotonic() - since:.3f} s"
        return UpdateTimeout(
            what,
            expected=f"an end within {timeout} s",
            got=f"none; thread {self._name} {busy}, at:\n{where}\n",
            consequence="Nothing was replayed; the graph is taken out of use.",
            remedy="Look at the stack above: an update that waits for a replay, or a device that stopped.",
        )
