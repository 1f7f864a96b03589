"""`SenderSession`: one room at one prefill rank, as its user sees it.

Thin and thread-safe: the room decides; the lock and the waiting are the endpoint's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import kv_planner
from pydantic import JsonValue

from kv_transfer.arguments import check_items, check_kind, check_seconds, check_wait
from kv_transfer.chunks import Chunk, Step
from kv_transfer.errors import TransferAborted, TransferError, TransferTimeout
from kv_transfer.loop import Endpoint
from kv_transfer.ready import NotifyingReady, Ready
from kv_transfer.room_planner import PageLists
from kv_transfer.sender_room import SenderRoom
from kv_transfer.spans import Span
from kv_transfer.states import SenderState

__all__ = ["SenderSession"]

_SLICE = 0.05  # seconds after which a waiting thread looks whether the room has ended


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
        """Pages of the request from `first_page` on; 0 on a rank that sends nothing.

        With several groups those of the one that begins first; `spans` has all.
        """
        return self._room.planner.pages

    @property
    def tokens(self) -> int:
        """As given to `Receiver.open`: of the whole prompt; 0 on a rank that sends nothing."""
        return self._room.offer.tokens if self._room.offer is not None else 0

    @property
    def first_page(self) -> int:
        """Index within the request of the first page that the receiver offers; above 0 after its prefix hit."""
        return self._room.planner.first_page

    @property
    def spans(self) -> Mapping[str, Span]:
        """Which pages of the request each group sends: `Span.pages` of them from page `Span.first` on."""
        return self._room.planner.spans

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
        source_pages: PageLists,
        *,
        start: int | Mapping[str, int],
        layer_ids: Iterable[int] | None = None,
        parts: Iterable[kv_planner.Part] | None = None,
        ready: Ready | None = None,
    ) -> None:
        """Hands one chunk to the engine and returns; the pages must stay as they are until `pages_released`.

        Args:
            source_pages: Page ids of this rank's pool; a list for each group, by name, where several have pages. Those
                before a group's window are left out, whatever their ids. Shape: [n]; dtype int32 or int64.
            start: Index of the first of them within the request, counted from the prompt's first page also when the
                receiver offers pages from `first_page` on; a number, or one for each group.
            layer_ids: Only these layers; all of this rank by default.
            parts: Only "target" or "draft" layers; both by default.
            ready: Says when each layer of these pages is computed, and the layer is sent then. None: all are.

        Raises:
            ArgumentError: No such group, one list where several groups have pages, or no start of a group.
            CoverageError: A (layer, page) was sent before, or the chunk reaches out of the offered pages. Nothing is
                sent.
            kv_planner.PlanError: The pages are not valid. Nothing is sent.
            TransferError: The room has ended badly; the error says why.
        """
        self.take(self.plan(source_pages, start=start, layer_ids=layer_ids, parts=parts, ready=ready))

    def plan(
        self,
        source_pages: PageLists,
        *,
        start: int | Mapping[str, int],
        layer_ids: Iterable[int] | None = None,
        parts: Iterable[kv_planner.Part] | None = None,
        ready: Ready | None = None,
    ) -> tuple[Chunk, ...]:
        """What `send` would hand to the engine, for `take`; arguments and errors are those of `send`."""
        _check_ready(ready)
        chunks = self._room.planner.chunk(source_pages, start, layer_ids, parts, ready)
        with self._sender.lock:
            self._room.check_send(chunks)
        return chunks

    def send_states(
        self,
        source_row: int | Mapping[str, int],
        *,
        layer_ids: Iterable[int] | None = None,
        parts: Iterable[kv_planner.Part] | None = None,
        ready: Ready | None = None,
    ) -> None:
        """Hands the states of the request to the engine and returns: components with a row a request.

        Args:
            source_row: Row of this rank's pool, or one for each group with states.
            layer_ids: As for `send`.
            parts: As for `send`.
            ready: As for `send`.

        Raises:
            CoverageError: A layer's states were sent before. Nothing is sent.
            kv_planner.PlanError: The row is not valid. Nothing is sent.
            TransferError: The room has ended badly; the error says why.
        """
        _check_ready(ready)
        self.take(self._room.planner.row(source_row, layer_ids, parts, ready))

    def finish(
        self,
        metadata: Mapping[str, JsonValue] | None = None,
        *,
        rows: Mapping[str, object] | None = None,
        wait: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Says that all chunks were handed over; the receiver is told when all of them are computed and have arrived.

        FINISHED means that the receiver took what this rank had to send; other ranks of the room may still fail.

        Args:
            metadata: JSON values for the receiver.
            rows: Auxiliary rows, a contiguous buffer each: all that are declared, or none on a rank that has none.
            wait: Wait for the receiver's answer.
            timeout: Seconds to wait; None waits until the room ends, which `Timeouts.transfer` bounds.

        Raises:
            ArgumentError: The rows are not as declared; the room stays open.
            CoverageError: A (layer, page) or state of this rank's route was never sent; the room stays open.
            ProtocolError: The metadata is too long or not made of JSON values; the room stays open.
            TransferError: The room ended badly.
        """
        check_wait("timeout", timeout)
        check_kind("wait", wait, bool)
        with self._sender.lock:
            self._room.finish({} if metadata is None else metadata, time.monotonic(), rows)
            self._sender.wake()
        if wait:
            self.wait(timeout)

    def check_finish(
        self, metadata: Mapping[str, JsonValue] | None = None, *, rows: Mapping[str, object] | None = None
    ) -> None:
        """Raises what `finish` would raise at once; the room stays open either way."""
        with self._sender.lock:
            self._room.check_finish({} if metadata is None else metadata, rows)

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

        end = None if timeout is None else time.monotonic() + check_seconds("timeout", timeout)
        self._wait_computed(end)
        left = None if end is None else max(0.0, end - time.monotonic())
        with self._sender.lock:
            if self._sender.wait_for(ended, left) is None:
                raise TransferTimeout(f"{self._room.name}: still {self._room.state.value}", seconds=timeout or 0.0)

    def take(self, chunks: Sequence[Chunk]) -> None:
        """Hands what was planned to the engine.

        Raises:
            ArgumentError: They are no chunks of `plan`.
            CoverageError: A (layer, page) was sent meanwhile. Nothing is sent.
            TransferError: The room has ended badly.
        """
        chunks = [check_kind("chunks", chunk, Chunk) for chunk in check_items("chunks", chunks)]
        with self._sender.lock:
            self._room.send(chunks, time.monotonic())
            self._sender.wake()

    def _wait_computed(self, end: float | None) -> None:
        """Sleeps in each `Ready` that would not wake the sender's thread itself, and wakes it when it is there."""
        while True:
            with self._sender.lock:
                awaited = [own for own in self._room.awaited if not isinstance(own[1], NotifyingReady)]
            left = _SLICE if end is None else min(_SLICE, end - time.monotonic())
            if not awaited or left <= 0:
                return
            step, ready = awaited[0]
            if all(ready.wait(part, layer, left) for part, layer in step.layers):
                self._sender.wake()
                self._wait_taken(step, left)

    def _wait_taken(self, step: Step, seconds: float) -> None:
        with self._sender.lock:
            self._sender.wait_for(lambda: None if any(own is step for own, _ in self._room.awaited) else True, seconds)

    def abort(self, reason: str) -> None:
        """Gives the room up: stops writing, then tells the receiver. Does nothing after the end."""
        with self._sender.lock:
            name = self._room.name
            self._room.fail(TransferAborted(f"{name} was aborted here: {reason}", reason=reason, by="local"))
            self._sender.wake()


def _check_ready(ready: Ready | None) -> None:
    """Refuses what cannot be asked, before the room would fail by it.

    Raises:
        ArgumentError: It is neither None nor a `Ready`.
    """
    if ready is not None:
        check_kind("ready", ready, Ready)  # type: ignore[type-abstract]
