"""One room at a sender: feeds the engine with chunks as they become ready, and ends with exactly one message.

No thread, no socket, no clock of its own; messages collect in `outgoing`. `planner` may be used without the owner's
lock, everything else needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import kv_planner
import pydantic
from pydantic import JsonValue

from kv_transfer.arguments import check_kind
from kv_transfer.aux_rows import AuxField, pack
from kv_transfer.chunks import Chunk, Job, Step, Where
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
from kv_transfer.groups import Groups
from kv_transfer.messages import Aborted, Done, GroupDone, Offer, encode
from kv_transfer.ready import NotifyingReady, Ready
from kv_transfer.room_planner import RoomPlanner
from kv_transfer.spans import Interleave
from kv_transfer.states import SENDER_STEPS, SenderState, StateMachine

__all__ = ["SenderRoom"]

_VERDICT = 0.3  # seconds between an engine's failure and the end of the room
_MOST = 2**63 - 1
_UNDEFINED = "its pages at the receiver are undefined"


class SenderRoom:
    """The state machine of one room.

    Args:
        offer: The receiver's pages; None on a rank that sends nothing.
        groups: Of this rank.
        routes: From this rank to the receiver, by group.
        interleave: How context-parallel ranks of the receiver's side share the request.
        engine: Moves the bytes.
        peer: The receiver's engine session.
        limits: Batches in flight, message size.
        now: Monotonic seconds.
        timeout: Longest time without progress, in seconds.
        room: Its number.
        aux: Auxiliary rows that were agreed on.
        wake: Called from any thread when `step` has something to do; None as for `SenderCore`.
    """

    def __init__(
        self,
        room: int,
        offer: Offer | None,
        groups: Groups,
        routes: Mapping[str, kv_planner.Route],
        interleave: Interleave,
        engine: TransferEngine,
        peer: str,
        limits: Limits,
        now: float,
        timeout: float,
        aux: Sequence[AuxField] = (),
        wake: Callable[[], None] | None = None,
    ) -> None:
        """Ready to send."""
        self._wake = wake
        self._asks = False
        self.room = room
        self.offer = offer
        self.generation = offer.generation if offer is not None else 0
        self.error: TransferError | None = None
        self.outgoing: deque[Done | Aborted] = deque()
        self.nbytes = 0
        self.blocks = 0
        self.planner = RoomPlanner(groups, routes, offer, interleave, engine.capabilities, limits)
        self._engine = engine
        self._peer = peer
        self._limits = limits
        self._timeout = timeout
        self._progress_at = now
        self._coverage: dict[tuple[str, bool], Coverage] = {}
        for name, own in self.planner.planners.items():
            label, span = groups.label(name), own.span
            self._coverage[name, False] = Coverage(own.summary.layers, span.pages, span.first, label)
            self._coverage[name, True] = Coverage(own.summary.states, int(offer is not None), label=label)
        self._awaited: list[tuple[Step, Ready]] = []
        self._queued: deque[Job] = deque()
        self._in_flight: list[tuple[TransferHandle, Job]] = []
        self._waiting_again: list[Job] = []
        self._failed: set[Where] = set()
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
    def must_ask(self) -> bool:
        """Whether something is awaited that does not say when it is there: a layer, or the time of another try."""
        if self._waiting_again:
            return True
        return self._asks and any(not isinstance(ready, NotifyingReady) for _, ready in self._awaited)

    @property
    def awaited(self) -> tuple[tuple[Step, Ready], ...]:
        """Steps that are handed over and still to be computed."""
        return tuple(self._awaited)

    def send(self, chunks: Sequence[Chunk], now: float) -> None:
        """Takes planned chunks, one a group.

        Raises:
            CoverageError: A (layer, page) of them was sent already; nothing is taken.
            SessionStateError: The room takes no chunks any more.
        """
        tables = self.check_send(chunks)
        for ready in {id(chunk.ready): chunk.ready for chunk in chunks if chunk.ready is not None}.values():
            if self._wake is not None and isinstance(ready, NotifyingReady):
                ready.subscribe(self._wake)
            else:
                self._asks = True
        for table, chunk in zip(tables, chunks, strict=True):
            table.claim(chunk.layers, chunk.where.start, chunk.where.pages)
            for step in chunk.steps:
                if chunk.ready is None:
                    self._queue(step)
                else:
                    self._awaited.append((step, chunk.ready))
        self._progress_at = now

    def check_send(self, chunks: Sequence[Chunk]) -> list[Coverage]:
        """Raises what `send` would, and takes nothing.

        Returns:
            The table of each chunk.
        """
        self._require_sending("send")
        tables = [self._coverage[chunk.where.group, chunk.where.rows] for chunk in chunks]
        for table, chunk in zip(tables, chunks, strict=True):
            table.check(chunk.layers, chunk.where.start, chunk.where.pages)
        return tables

    def _queue(self, step: Step) -> None:
        self._queued.extend(Job(batch, step.where) for batch in step.batches)

    def finish(self, metadata: Mapping[str, JsonValue], now: float, rows: Mapping[str, object] | None = None) -> None:
        """Says that everything was handed over.

        Raises:
            ArgumentError: Auxiliary rows that are not as declared; the room stays open.
            CoverageError: A (layer, page) or state of the route was never sent; the room stays open.
            MessageTooLarge: The metadata does not fit into a message.
            ProtocolError: The metadata is not made of JSON values.
        """
        packed = self.check_finish(metadata, rows)
        self._last_words = (dict(metadata), packed)
        self._machine.to(SenderState.DRAINING)
        self._progress_at = now

    def check_finish(
        self, metadata: Mapping[str, JsonValue], rows: Mapping[str, object] | None = None
    ) -> Mapping[str, str]:
        """Raises what `finish` would, or returns the rows as they travel; the room stays open either way."""
        self._require_sending("finish")
        for table in self._coverage.values():
            table.check_complete()
        check_kind("metadata", metadata, Mapping)  # type: ignore[type-abstract]
        packed = pack(self._aux, {} if rows is None else rows)
        try:
            encode(self._done(metadata, packed, _MOST, _MOST), self._limits)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise ProtocolError(
                f"metadata: {'.'.join(map(str, first['loc']))}: {first['msg']}",
                consequence="the room stays open",
                remedy="use str keys and JSON values (str, int, finite float, bool, None, list, dict)",
            ) from error
        return packed

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
            for handle, _ in self._in_flight:
                self._cancel(handle)

    def _engine_failed(self, error: TransferFailed, now: float) -> None:
        """Stops, and gives the news of a dead receiver, which often comes second, a moment to name the real cause."""
        if self._suspicion is None and self.state in (SenderState.SENDING, SenderState.DRAINING):
            self._suspicion = (error, now + _VERDICT)
            self._drop_waiting()
            for handle, _ in self._in_flight:
                self._cancel(handle)

    def _batch_failed(self, job: Job, error: TransferFailed, now: float) -> None:
        """The engine let go of a batch without moving it: another try, a report, or the end, as the receiver says."""
        policy = self.offer.on_failed_pages if self.offer is not None else "fail"
        job.failures += 1
        if self._suspicion is not None or self.state not in (SenderState.SENDING, SenderState.DRAINING):
            return
        if policy == "recompute":
            self._failed.add(job.where)
            self._progress_at = now
        elif policy == "retry" and job.failures <= self._limits.batch_retries:
            # The same bytes into the same pages of the same generation; the pause is for the news of a dead receiver.
            job.again_at = now + _VERDICT
            self._waiting_again.append(job)
        else:
            self._engine_failed(error, now)

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
        waiting = self._queued or self._awaited or self._in_flight or self._waiting_again
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
        still: list[tuple[TransferHandle, Job]] = []
        for handle, job in self._in_flight:
            status = self._status(handle)
            if not status.is_terminal:
                still.append((handle, job))
            elif status.state is TransferState.DONE:
                self.nbytes += handle.nbytes
                self.blocks += handle.blocks
                self._progress_at = now
            else:
                text = f"{self.name}: {status.error}"
                self._batch_failed(job, TransferFailed(text, consequence=_UNDEFINED), now)
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
        self._waiting_again.clear()

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
                self._queue(step)
                self._progress_at = now
            else:
                still.append((step, ready))
        self._awaited = still

    def _feed(self, now: float) -> None:
        due = [job for job in self._waiting_again if now >= job.again_at]
        self._waiting_again = [job for job in self._waiting_again if now < job.again_at]
        self._queued.extend(due)
        while self._queued and len(self._in_flight) < self._limits.batches_in_flight:
            job = self._queued.popleft()
            try:
                handle = self._engine.submit(self._peer, job.batch)
                self._in_flight.append((handle, job))
                if self._wake is not None and self._engine.capabilities.settles_itself:
                    handle.notify(self._wake)
            except BaseException as error:
                if not is_fault(error):
                    raise
                failure = TransferFailed(f"{self.name}: {error}", consequence=_UNDEFINED)
                failure.__cause__ = error
                self._batch_failed(job, failure, now)

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
            groups={name: self._group_done(name) for name in self.planner.planners},
            metadata=dict(metadata),
            rows=dict(rows),
        )

    def _group_done(self, name: str) -> GroupDone:
        own = self.planner.planners[name]
        lost = [where for where in self._failed if where.group == name]
        return GroupDone(
            pages=own.span.pages,
            layers=own.summary.layers,
            states=own.summary.states,
            failed=tuple(sorted((where.start, where.start + where.pages) for where in lost if not where.rows)),
            states_failed=any(where.rows for where in lost),
        )
