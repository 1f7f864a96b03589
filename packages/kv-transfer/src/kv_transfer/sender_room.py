"""One room at a sender: feeds the engine with chunks as they become ready, and ends with exactly one message.

No thread, no socket, no clock of its own; messages collect in `outgoing`. `planner` may be used without the owner's
lock, everything else needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import kv_planner
import pydantic
from pydantic import JsonValue

from kv_transfer.aux_rows import AuxField, pack
from kv_transfer.chunks import Chunk, ChunkPlanner, Step
from kv_transfer.config import Limits
from kv_transfer.coverage import Coverage
from kv_transfer.engine import TransferEngine, TransferHandle, TransferState, TransferStatus
from kv_transfer.errors import (
    ProtocolError,
    SessionStateError,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from kv_transfer.faults import is_fault
from kv_transfer.messages import Aborted, Done, Offer, encode
from kv_transfer.ready import Ready
from kv_transfer.states import SENDER_STEPS, SenderState, StateMachine

__all__ = ["SenderRoom"]

_VERDICT = 0.3  # seconds between an engine's failure and the end of the room
_MOST = 2**63 - 1


class SenderRoom:
    """The state machine of one room.

    Args:
        offer: The receiver's pages; None on a rank that sends nothing.
        route: From this rank to the receiver.
        engine: Moves the bytes.
        peer: The receiver's engine session.
        limits: Batches in flight, message size.
        now: Monotonic seconds.
        timeout: Longest time without progress, in seconds.
        room: Its number.
        aux: Auxiliary rows that were agreed on.
    """

    def __init__(
        self,
        room: int,
        offer: Offer | None,
        route: kv_planner.Route,
        engine: TransferEngine,
        peer: str,
        limits: Limits,
        now: float,
        timeout: float,
        aux: Sequence[AuxField] = (),
    ) -> None:
        """Ready to send."""
        self.room = room
        self.offer = offer
        self.generation = offer.generation if offer is not None else 0
        self.error: TransferError | None = None
        self.outgoing: deque[Done | Aborted] = deque()
        self.nbytes = 0
        self.blocks = 0
        self.planner = ChunkPlanner(route, offer, engine.capabilities, limits)
        self._engine = engine
        self._peer = peer
        self._limits = limits
        self._timeout = timeout
        self._progress_at = now
        self._summary = self.planner.summary
        self._coverage = Coverage(self._summary.layers, self.planner.pages, self.planner.first_page)
        self._states = Coverage(self._summary.states, int(offer is not None))
        self._awaited: list[tuple[Step, Ready]] = []
        self._queued: deque[kv_planner.Batch] = deque()
        self._in_flight: list[TransferHandle] = []
        self._aux = tuple(aux)
        self._last_words: tuple[Mapping[str, JsonValue], Mapping[str, str]] = ({}, {})
        self._connected = True
        self._suspicion: tuple[TransferFailed, float] | None = None
        self._machine = StateMachine(self.name, SENDER_STEPS, SenderState.SENDING)

    @property
    def name(self) -> str:
        """Room and generation, for texts."""
        return f"room {self.room} (generation {self.generation})"

    @property
    def state(self) -> SenderState:
        """The current state."""
        return self._machine.state

    @property
    def is_terminal(self) -> bool:
        """Whether nothing can change any more."""
        return self._machine.is_terminal

    @property
    def in_flight(self) -> int:
        """Batches that the engine holds."""
        return len(self._in_flight)

    @property
    def is_waiting(self) -> bool:
        """Whether layers are handed over that are still to be computed."""
        return bool(self._awaited)

    @property
    def awaited(self) -> tuple[tuple[Step, Ready], ...]:
        """Steps that are handed over and still to be computed."""
        return tuple(self._awaited)

    def send(self, chunk: Chunk, now: float) -> None:
        """Takes a planned chunk.

        Raises:
            CoverageError: A (layer, page) of it was sent already; nothing is taken.
            SessionStateError: The room takes no chunks any more.
        """
        self._require_sending("send")
        (self._states if chunk.rows else self._coverage).claim(chunk.layers, chunk.start, chunk.pages)
        for step in chunk.steps:
            if chunk.ready is None:
                self._queued.extend(step.batches)
            else:
                self._awaited.append((step, chunk.ready))
        self._progress_at = now

    def finish(self, metadata: Mapping[str, JsonValue], now: float, rows: Mapping[str, object] | None = None) -> None:
        """Says that everything was handed over.

        Raises:
            ArgumentError: Auxiliary rows that are not as declared; the room stays open.
            CoverageError: A (layer, page) or state of the route was never sent; the room stays open.
            MessageTooLarge: The metadata does not fit into a message.
            ProtocolError: The metadata is not made of JSON values.
        """
        self._require_sending("finish")
        self._coverage.check_complete()
        self._states.check_complete()
        packed = pack(self._aux, rows or {})
        try:
            encode(self._done(metadata, packed, _MOST, _MOST), self._limits)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise ProtocolError(
                f"metadata: {'.'.join(map(str, first['loc']))}: {first['msg']}",
                consequence="the room stays open",
                remedy="use str keys and JSON values (str, int, finite float, bool, None, list, dict)",
            ) from error
        self._last_words = (dict(metadata), packed)
        self._machine.to(SenderState.DRAINING)
        self._progress_at = now

    def fail(self, error: TransferError) -> None:
        """Gives the room up: nothing more is submitted, what waits is cancelled. Does nothing after the end."""
        if self._suspicion is not None and error is not self._suspicion[0] and error.__cause__ is None:
            error.__cause__ = self._suspicion[0]
        if self.state is SenderState.DONE_SENT:
            self.error = error
            self._machine.to(SenderState.ABORTED)
        elif self.state in (SenderState.SENDING, SenderState.DRAINING):
            self.error = error
            self._machine.to(SenderState.ABORTING)
            self._drop_waiting()
            for handle in self._in_flight:
                self._cancel(handle)

    def _engine_failed(self, error: TransferFailed, now: float) -> None:
        """Stops, and gives the news of a dead receiver, which often comes second, a moment to name the real cause."""
        if self._suspicion is None and self.state in (SenderState.SENDING, SenderState.DRAINING):
            self._suspicion = (error, now + _VERDICT)
            self._drop_waiting()
            for handle in self._in_flight:
                self._cancel(handle)

    def disconnected(self, error: TransferError) -> None:
        """The receiver cannot be told anything any more."""
        self._connected = False
        self.fail(error)

    def accepted(self) -> None:
        """The receiver checked our `Done`."""
        if self.state is SenderState.DONE_SENT:
            self._machine.to(SenderState.FINISHED)

    def step(self, now: float) -> None:
        """Polls and feeds the engine, and takes the steps that follow."""
        self._poll(now)
        if self._suspicion is not None and now >= self._suspicion[1]:
            self.fail(self._suspicion[0])
        if self.state in (SenderState.SENDING, SenderState.DRAINING):
            self._take_ready(now)
            self._feed(now)
        waiting = self._queued or self._awaited or self._in_flight
        if self.state is SenderState.DRAINING and self._suspicion is None and not waiting:
            if self.offer is None:
                self._machine.to(SenderState.FINISHED)
            else:
                self.outgoing.append(self._done(*self._last_words, self.nbytes, self.blocks))
                self._machine.to(SenderState.DONE_SENT)
        if not self.is_terminal and self.state is not SenderState.ABORTING and now - self._progress_at > self._timeout:
            self.fail(
                TransferTimeout(
                    f"{self.name}: no progress while {self.state.value}",
                    seconds=self._timeout,
                    consequence="the room is given up",
                    remedy="raise Timeouts.transfer if prefill takes longer between two chunks",
                )
            )
        if self.state is SenderState.ABORTING and not self._in_flight:
            if self._connected and self.offer is not None:
                self.outgoing.append(Aborted(room=self.room, generation=self.generation, reason=str(self.error)[:4096]))
            self._machine.to(SenderState.ABORTED)

    def _poll(self, now: float) -> None:
        still: list[TransferHandle] = []
        for handle in self._in_flight:
            status = self._status(handle)
            if not status.is_terminal:
                still.append(handle)
            elif status.state is TransferState.DONE:
                self.nbytes += handle.nbytes
                self.blocks += handle.blocks
                self._progress_at = now
            else:
                self._engine_failed(
                    TransferFailed(
                        f"{self.name}: {status.error}", consequence="its pages at the receiver are undefined"
                    ),
                    now,
                )
        self._in_flight = still

    def _cancel(self, handle: TransferHandle) -> None:
        # Only a request: the batch is polled until the engine has let go, whether it took the request or not.
        try:
            self._engine.cancel(handle)
        except BaseException as error:
            if not is_fault(error):
                raise

    def _status(self, handle: TransferHandle) -> TransferStatus:
        # Whatever an engine raises ends this room, and reaches whoever waits for it as TransferFailed; other rooms go
        # on.
        try:
            status: object = self._engine.poll(handle)
            if not isinstance(status, TransferStatus):
                raise TypeError(f"poll: expected a TransferStatus, got {status!r}")
            return status
        except BaseException as error:
            if not is_fault(error):
                raise
            return TransferStatus(TransferState.FAILED, f"engine {self._engine.name!r} raised {error!r}")

    def _drop_waiting(self) -> None:
        self._queued.clear()
        self._awaited.clear()

    def _take_ready(self, now: float) -> None:
        still: list[tuple[Step, Ready]] = []
        for step, ready in self._awaited:
            try:
                computed = all(ready.query(part, layer) for part, layer in step.layers)
            except BaseException as error:
                if not is_fault(error):
                    raise
                failure = TransferFailed(
                    f"{self.name}: the Ready of layers {step.layers} raised {error!r}",
                    consequence="the room is given up",
                )
                failure.__cause__ = error
                self.fail(failure)
                return
            if computed:
                self._queued.extend(step.batches)
                self._progress_at = now
            else:
                still.append((step, ready))
        self._awaited = still

    def _feed(self, now: float) -> None:
        while self._queued and len(self._in_flight) < self._limits.batches_in_flight:
            try:
                self._in_flight.append(self._engine.submit(self._peer, self._queued.popleft()))
            except BaseException as error:
                if not is_fault(error):
                    raise
                failure = TransferFailed(f"{self.name}: {error}", consequence="its pages at the receiver are undefined")
                failure.__cause__ = error
                self._engine_failed(failure, now)

    def _require_sending(self, call: str) -> None:
        if self.error is not None:
            raise self.error
        if self._suspicion is not None:
            raise self._suspicion[0]
        if self.state is not SenderState.SENDING:
            raise SessionStateError(f"{self.name}: {call} after finish", local=self.state.value)

    def _done(self, metadata: Mapping[str, JsonValue], rows: Mapping[str, str], nbytes: int, blocks: int) -> Done:
        return Done(
            room=self.room,
            generation=max(self.generation, 1),
            nbytes=nbytes,
            blocks=blocks,
            pages=self.planner.pages,
            layers=self._summary.layers,
            states=self._summary.states,
            metadata=dict(metadata),
            rows=dict(rows),
        )
