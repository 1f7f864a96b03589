"""`ReceiverSession`: one room at one decode rank, as its user sees it.

Thin and thread-safe: the room decides; the lock and the waiting are the endpoint's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kv_transfer.errors import TransferError, TransferTimeout
from kv_transfer.handshake import Rank
from kv_transfer.loop import Endpoint
from kv_transfer.receiver_room import ReceiverRoom, TransferResult
from kv_transfer.states import ReceiverState

__all__ = ["ReceiverSession"]


class ReceiverSession:
    """One room at one decode rank. Made by `Receiver.open`; all methods may be called from any thread."""

    def __init__(self, receiver: Endpoint, room: ReceiverRoom, abort: Callable[[ReceiverRoom, str], None]) -> None:
        """For `Receiver.open`."""
        self._receiver = receiver
        self._room = room
        self._abort = abort

    @property
    def room(self) -> int:
        """Its number."""
        return self._room.offer.room

    @property
    def generation(self) -> int:
        """Which use of the number this is."""
        return self._room.offer.generation

    @property
    def state(self) -> ReceiverState:
        """The current state."""
        with self._receiver.lock:
            return self._room.state

    @property
    def error(self) -> TransferError | None:
        """Why the room was given up, if it was."""
        with self._receiver.lock:
            return self._room.error

    @property
    def pages_released(self) -> bool:
        """Whether no rank may write into the pages any more, so that they may be used, or reused after a failure."""
        with self._receiver.lock:
            return self._room.pages_released

    @property
    def failed_pages(self) -> Mapping[str, tuple[int, ...]]:
        """Destination pages whose bytes are undefined, by group: all of them once the room was given up.

        Of a complete room, those that an engine could not move (`TransferResult.failed_pages`). They must not enter a
        prefix cache; the request is sent again as another room, or computed at decode.
        """
        with self._receiver.lock:
            if self._room.error is not None:
                return {name: own.pages for name, own in self._room.offer.groups.items() if own.pages}
            return self._room.result.failed_pages if self._room.result is not None else {}

    @property
    def writing(self) -> tuple[Rank, ...]:
        """Ranks that may still write."""
        with self._receiver.lock:
            return self._room.writing

    def poll(self) -> TransferResult | None:
        """The result, or None as long as the room is open.

        Raises:
            TransferError: The room was given up; as soon as that is known, even when a rank may still write.
        """
        with self._receiver.lock:
            if self._room.error is not None:
                raise self._room.error
            return self._room.result

    def wait(self, timeout: float | None = None) -> TransferResult:
        """Waits for the result.

        Args:
            timeout: Seconds; None waits until the room ends, which its own time-out bounds.

        Raises:
            TransferTimeout: Not within `timeout`, and the room goes on; or its own time-out, and it is given up
                (`error` is set).
            TransferError: The room was given up.
        """
        with self._receiver.lock:
            result = self._receiver.wait_for(self.poll, timeout)
            if result is None:
                raise TransferTimeout(
                    f"{self._room.name}: prefill ranks {', '.join(map(str, self._room.writing))} are not done",
                    seconds=timeout or 0.0,
                    consequence="the room goes on",
                    remedy="wait again, or abort()",
                )
            return result

    def wait_released(self, timeout: float | None = None) -> bool:
        """Waits until no rank may write into the pages any more.

        Returns:
            Whether that is so; False when the time ran out.
        """
        with self._receiver.lock:
            released = self._receiver.wait_for(lambda: True if self._room.pages_released else None, timeout)
            return released is True

    def abort(self, reason: str) -> None:
        """Gives the room up and tells every rank to stop; does nothing after the end.

        The pages stay held until all ranks have stopped.
        """
        self._abort(self._room, reason)
