"""`SenderSession`: one room at one prefill rank, as its user sees it.

Thin and thread-safe: the room decides; the lock and the waiting are the endpoint's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import kv_planner
import numpy.typing as npt
from pydantic import JsonValue

from kv_transfer.errors import TransferAborted, TransferError, TransferTimeout
from kv_transfer.loop import Endpoint
from kv_transfer.sender_room import SenderRoom
from kv_transfer.states import SenderState

__all__ = ["SenderSession"]


class SenderSession:
    """One room at one prefill rank. Made by `Sender.open`; all methods may be called from any thread."""

    def __init__(self, sender: Endpoint, room: SenderRoom) -> None:
        """For `Sender.open`."""
        self._sender = sender
        self._room = room

    @property
    def room(self) -> int:
        """Its number."""
        return self._room.room

    @property
    def generation(self) -> int:
        """Which use of the number this is; 0 on a rank that sends nothing."""
        return self._room.generation

    @property
    def pages(self) -> int:
        """Pages that the receiver offers; 0 on a rank that sends nothing."""
        return self._room.pages

    @property
    def tokens(self) -> int:
        """As given to `Receiver.open`: of the whole prompt; 0 on a rank that sends nothing."""
        return self._room.offer.tokens if self._room.offer is not None else 0

    @property
    def first_page(self) -> int:
        """Index within the request of the first page that the receiver offers; above 0 after its prefix hit."""
        return self._room.first_page

    @property
    def state(self) -> SenderState:
        """The current state."""
        with self._sender.lock:
            return self._room.state

    @property
    def error(self) -> TransferError | None:
        """Why the room ended badly, if it did."""
        with self._sender.lock:
            return self._room.error

    @property
    def pages_released(self) -> bool:
        """Whether the engine reads none of the source pages any more, so that they may be reused."""
        with self._sender.lock:
            return self._room.is_terminal or self._room.state is SenderState.DONE_SENT

    def send(
        self,
        source_pages: npt.ArrayLike,
        *,
        start: int,
        layer_ids: Iterable[int] | None = None,
        parts: Iterable[kv_planner.Part] | None = None,
    ) -> None:
        """Hands one chunk to the engine and returns; the pages must stay as they are until `pages_released`.

        Args:
            source_pages: Page ids of this rank's pool. Shape: [n]; dtype int32 or int64.
            start: Index of the first of them within the request, counted from the prompt's first page also when the
                receiver offers pages from `first_page` on.
            layer_ids: Only these layers; all of this rank by default.
            parts: Only "target" or "draft" layers; both by default.

        Raises:
            CoverageError: A (layer, page) was sent before, or the chunk reaches out of the offered pages. Nothing is
                sent.
            kv_planner.PlanError: The pages are not valid. Nothing is sent.
            TransferError: The room has ended badly; the error says why.
        """
        chunk = self._room.plan(source_pages, start, layer_ids, parts)
        with self._sender.lock:
            self._room.send(chunk, time.monotonic())
            self._sender.wake()

    def finish(
        self, metadata: Mapping[str, JsonValue] | None = None, *, wait: bool = True, timeout: float | None = None
    ) -> None:
        """Says that all chunks were handed over; the receiver is told when all of them have arrived.

        FINISHED means that the receiver took what this rank had to send; other ranks of the room may still fail.

        Args:
            metadata: JSON values for the receiver, such as the first token.
            wait: Wait for the receiver's answer.
            timeout: Seconds to wait; None waits until the room ends, which `Timeouts.transfer` bounds.

        Raises:
            CoverageError: A (layer, page) of this rank's route was never sent; the room stays open.
            ProtocolError: The metadata is too long or not made of JSON values; the room stays open.
            TransferError: The room ended badly.
        """
        with self._sender.lock:
            self._room.finish(metadata or {}, time.monotonic())
            self._sender.wake()
        if wait:
            self.wait(timeout)

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the end after `finish`.

        Raises:
            TransferTimeout: Not within `timeout`; the room goes on.
            TransferError: The room ended badly.
        """

        def ended() -> bool | None:
            if self._room.error is not None:
                raise self._room.error
            return True if self._room.is_terminal else None

        with self._sender.lock:
            if self._sender.wait_for(ended, timeout) is None:
                raise TransferTimeout(f"{self._room.name}: still {self._room.state.value}", seconds=timeout or 0.0)

    def abort(self, reason: str) -> None:
        """Gives the room up: stops writing, then tells the receiver. Does nothing after the end."""
        with self._sender.lock:
            name = self._room.name
            self._room.fail(TransferAborted(f"{name} was aborted here: {reason}", reason=reason, by="local"))
            self._sender.wake()
