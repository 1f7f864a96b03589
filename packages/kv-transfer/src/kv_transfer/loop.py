"""One background thread that owns an endpoint's sockets and drives its core.

Public methods of sender and receiver take `lock`, change the core, and call `wake`; waiting threads sleep on `changed`.
An error that ends the thread reaches whoever waits or calls, and the connection stands until the engine holds no batch
any more. Knows neither messages nor rooms.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import zmq

from kv_transfer.arguments import check_seconds
from kv_transfer.config import Limits, Timeouts
from kv_transfer.errors import SessionStateError, TransferError

__all__ = ["POLL_SECONDS", "Endpoint"]

_Value = TypeVar("_Value")
_LOG = logging.getLogger(__name__)
_MESSAGES_AT_ONCE = 256
POLL_SECONDS = 0.001
"""Between two looks at what does not say by itself that it changed."""


def _milliseconds(seconds: float) -> int:
    """As ZeroMQ counts them: in 32 bits."""
    return min(int(seconds * 1000), 2**31 - 1)


class Endpoint(abc.ABC):
    """A thread, its sockets and the lock around the core.

    Args:
        name: Of the thread.
        timeouts: Heartbeat interval and drain time.
        limits: Message size.
    """

    def __init__(self, name: str, timeouts: Timeouts, limits: Limits) -> None:
        """Nothing runs yet."""
        self._name = name
        self._timeouts = timeouts
        self._limits = limits
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._thread: threading.Thread | None = None
        self._stop_at = 0.0
        self._stopping = False
        self._crash: TransferError | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)

    def wake(self) -> None:
        """Makes the thread look at the core now."""
        try:
            self._wake_in.send(b"\0")
        except (BlockingIOError, OSError):
            return

    def wait_for(self, value: Callable[[], _Value | None], seconds: float | None) -> _Value | None:
        """Waits until `value()` is not None, at most `seconds`; call with the lock held.

        Returns:
            The value, or None when the time ran out.

        Raises:
            ArgumentError: The seconds are no finite number from 0 on.
            SessionStateError: The thread ended by an error, so that nothing would come.
        """
        deadline = None if seconds is None else time.monotonic() + check_seconds("timeout", seconds)
        while True:
            found = value()
            if found is not None:
                return found
            self._require_running()
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            self.changed.wait(left)

    def _open_socket(self, kind: int) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        control = context.socket(kind)
        control.setsockopt(zmq.LINGER, _milliseconds(self._timeouts.heartbeat_interval))
        control.setsockopt(zmq.MAXMSGSIZE, self._limits.message_bytes)
        control.setsockopt(zmq.HANDSHAKE_IVL, _milliseconds(self._timeouts.handshake))
        return context, control

    def _require_running(self) -> None:
        """Raises the error that ended the thread, if one did; call with the lock held."""
        if self._crash is not None:
            raise self._crash

    def _launch(self, kind: int, attach: Callable[[zmq.Socket[bytes]], object]) -> None:
        """Opens a socket, attaches it and starts; when one of these fails, nothing stays open."""
        context, control = self._open_socket(kind)
        try:
            attach(control)
            self._start(context, control)
        except BaseException:
            control.close(linger=0)
            context.term()
            raise

    def _start(self, context: zmq.Context[zmq.Socket[bytes]], control: zmq.Socket[bytes]) -> None:
        self._stopping = False
        self._crash = None
        thread = threading.Thread(target=self._run, args=(context, control), name=self._name, daemon=True)
        thread.start()
        self._thread = thread

    def _stop(self) -> None:
        """Lets the core drain, then ends the thread and closes its sockets; call without the lock."""
        with self.lock:
            thread, self._thread = self._thread, None
            self._stopping = True
            self._stop_at = time.monotonic() + self._timeouts.drain
            self.wake()
        if thread is not None:
            thread.join()

    def _close_wakers(self) -> None:
        with self.lock:
            self._wake_in.close()
            self._wake_out.close()

    def _run(self, context: zmq.Context[zmq.Socket[bytes]], control: zmq.Socket[bytes]) -> None:
        monitor: zmq.Socket[bytes] | None = None
        try:
            if self._watches_connection():
                monitor = control.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._serve(control, monitor)
        except BaseException as error:
            self._record(error)
            # Not later: the end of the connection tells the peer that nobody writes any more.
            self._let_engine_go(control)
        try:
            if monitor is not None:
                control.disable_monitor()
                monitor.close(linger=0)
        finally:
            control.close()
            context.term()
            self._let_engine_go(None)
            self._ended()

    def _record(self, error: BaseException) -> None:
        crash = SessionStateError(
            f"{self._name}: its thread ended by an error: {error!r}",
            consequence="its rooms have ended",
            remedy="close it and make a new one",
        )
        crash.__cause__ = error
        with self.lock:
            self._crash = crash
            with contextlib.suppress(BaseException):
                self._crashed(crash)
            self.changed.notify_all()
        _LOG.error("%s", crash, exc_info=error)

    def _let_engine_go(self, control: zmq.Socket[bytes] | None) -> None:
        while True:
            with self.lock:
                now = time.monotonic()
                gone = self._let_go(now)
                if control is not None:
                    with contextlib.suppress(BaseException):
                        self._flush(control, now)
                self.changed.notify_all()
            if gone:
                return
            time.sleep(POLL_SECONDS)

    def _serve(self, control: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None) -> None:
        """Until the connection is closed, or `_stop` was called and the core has drained."""
        poller = zmq.Poller()
        poller.register(control, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        if monitor is not None:
            poller.register(monitor, zmq.POLLIN)
        pause = 0.0
        while True:
            ready = dict(poller.poll(max(0, round(pause * 1000))))
            with self.lock:
                if self._wake_out.fileno() in ready:
                    self._wake_out.recv(4096)
                now = time.monotonic()
                self._read(control, now)
                if monitor is not None and monitor in ready:
                    self._disconnected("its connection is closed")
                    self.changed.notify_all()
                    return
                pause = self._advance(now)
                self._flush(control, now)
                self.changed.notify_all()
                if self._stopping and self._is_drained(now >= self._stop_at):
                    self._last_words()
                    self._flush(control, now)
                    return
            pause = self._pause(pause)

    def _pause(self, most: float) -> float:
        return min(most, self._timeouts.heartbeat_interval / 2, 0.1)

    def _read(self, control: zmq.Socket[bytes], now: float) -> None:
        for _ in range(_MESSAGES_AT_ONCE):
            try:
                parts = control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(parts, now)

    @abc.abstractmethod
    def _watches_connection(self) -> bool: ...

    @abc.abstractmethod
    def _receive(self, parts: list[bytes], now: float) -> None: ...

    @abc.abstractmethod
    def _disconnected(self, why: str) -> None: ...

    @abc.abstractmethod
    def _advance(self, now: float) -> float:
        """Moves the core on.

        Returns:
            Seconds after which it must be called again without a message or `wake`; infinity when nothing is under way.
        """

    @abc.abstractmethod
    def _flush(self, control: zmq.Socket[bytes], now: float) -> None: ...

    @abc.abstractmethod
    def _is_drained(self, late: bool) -> bool: ...

    @abc.abstractmethod
    def _last_words(self) -> None: ...

    @abc.abstractmethod
    def _let_go(self, now: float) -> bool: ...

    @abc.abstractmethod
    def _ended(self) -> None:
        """The conversation is over, and the engine holds no batch of it; the last call of the thread."""

    @abc.abstractmethod
    def _crashed(self, error: TransferError) -> None: ...
