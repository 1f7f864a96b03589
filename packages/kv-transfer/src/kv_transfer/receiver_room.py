"""One room at the receiver: which ranks still write, when it is complete, and when its pages are free.

No thread, no socket, no clock of its own; messages to ranks collect in `outgoing`. A page has two holders, the room and
each rank that may write; `pages_released` says that the writers let go.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from kv_transfer.aux_rows import AuxField, unpack
from kv_transfer.errors import ArgumentError, ProtocolError, TransferAborted, TransferError
from kv_transfer.handshake import Rank
from kv_transfer.messages import Abort, Accepted, Done, GroupDone, Offer
from kv_transfer.shares import Shares
from kv_transfer.states import RECEIVER_STEPS, ReceiverState, StateMachine
from kv_transfer.summaries import RouteSummary, Summaries

__all__ = ["ReceiverRoom", "TransferResult", "Writer"]


@dataclasses.dataclass(frozen=True, slots=True)
class TransferResult:
    """A completed room.

    Attributes:
        room: Its number.
        generation: Which use of the number this was.
        tokens: As given to `open`, of the whole prompt.
        pages: Pages that were offered, over all groups.
        failed_pages: Of them, those whose bytes are undefined, by group; none unless the receiver's policy is
            "recompute". They must not enter a prefix cache before they are computed.
        recompute: Tokens of the prompt whose KV decode has to compute, as (first, behind the last), in order: those of
            the failed pages, or all, where a state or a group with a window would be needed for it.
        rows: Auxiliary rows by name, of the first rank that had them; empty where none are declared.
        nbytes: Bytes over all ranks.
        blocks: Blocks over all ranks.
        metadata: What each rank passed to `finish`.
    """

    room: int
    generation: int
    tokens: int
    pages: int
    nbytes: int
    blocks: int
    metadata: Mapping[Rank, Mapping[str, JsonValue]]
    rows: Mapping[str, bytes]
    failed_pages: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    recompute: tuple[tuple[int, int], ...] = ()


class _Hold(enum.Enum):
    WRITING = "writing"
    DONE = "done"
    STOPPED = "stopped"
    DEAD = "dead"


@dataclasses.dataclass(slots=True)
class Writer:
    """A rank that has something to send.

    Attributes:
        peer: The connection it spoke on when the room was opened.
        summary: What it has to deliver for each page of each group.
    """

    peer: bytes
    summary: Summaries
    hold: _Hold = _Hold.WRITING
    done: Done | None = None
    told: bool = False


class ReceiverRoom:
    """The state machine of one room.

    Args:
        offer: As sent to the ranks.
        writers: Ranks with a route that is not empty.
        started: Time at which it was opened, monotonic seconds.
        timeout: Seconds until it is given up.
        shares: What of the request is sent to this rank.
        aux: Auxiliary rows that one of the writers must bring.
    """

    def __init__(
        self,
        offer: Offer,
        writers: Mapping[Rank, Writer],
        started: float,
        timeout: float,
        shares: Shares,
        aux: Sequence[AuxField] = (),
    ) -> None:
        """Opens the room and offers its pages to every writer."""
        self.offer = offer
        self._shares = shares
        self._failed: dict[str, set[int]] = {}
        self._states_failed = False
        self._aux = tuple(aux)
        self._rows: dict[Rank, dict[str, bytes]] = {}
        self.writers = dict(writers)
        self.timeout = timeout
        self.deadline = started + timeout
        self.error: TransferError | None = None
        self.result: TransferResult | None = None
        self.outgoing: deque[tuple[bytes, Offer | Accepted | Abort]] = deque()
        self._machine = StateMachine(self.name, RECEIVER_STEPS, ReceiverState.OPEN)
        for writer in self.writers.values():
            self.outgoing.append((writer.peer, offer))
        self._complete_if_done()

    @property
    def name(self) -> str:
        """Room and generation, for texts."""
        return f"room {self.offer.room} (generation {self.offer.generation})"

    @property
    def state(self) -> ReceiverState:
        """The current state."""
        return self._machine.state

    @property
    def is_terminal(self) -> bool:
        """Whether nothing can change any more."""
        return self._machine.is_terminal

    @property
    def pages_released(self) -> bool:
        """Whether no writer may write into the room's pages any more."""
        return self.is_terminal

    @property
    def writing(self) -> tuple[Rank, ...]:
        """Ranks that may still write."""
        return tuple(rank for rank, writer in self.writers.items() if writer.hold is _Hold.WRITING)

    def rank_of(self, peer: bytes) -> Rank | None:
        """The rank that speaks on connection `peer`, if it writes to this room."""
        return next((rank for rank, writer in self.writers.items() if writer.peer == peer), None)

    def done(self, rank: Rank, message: Done) -> None:
        """A rank says that it wrote everything."""
        writer = self.writers[rank]
        if writer.hold is not _Hold.WRITING:
            return
        writer.hold = _Hold.DONE
        if self.state is ReceiverState.OPEN:
            fault = self._fault(rank, writer, message)
            if fault is not None:
                self.fail(ProtocolError(f"{self.name}: rank {rank}: {fault}", consequence="the room is given up"))
            else:
                writer.done = message
                writer.told = True
                self.outgoing.append((writer.peer, Accepted(room=message.room, generation=message.generation)))
                self._complete_if_done()
        self._release_if_quiet()

    def aborted(self, rank: Rank, reason: str) -> None:
        """A rank says that it stopped writing, asked or not."""
        writer = self.writers[rank]
        if writer.hold is not _Hold.WRITING:
            return
        writer.hold = _Hold.STOPPED
        self.fail(
            TransferAborted(f"{self.name} was aborted by prefill rank {rank}: {reason}", reason=reason, by=str(rank))
        )
        self._release_if_quiet()

    def dead(self, rank: Rank) -> None:
        """The process of a rank is gone and its last bytes have landed."""
        writer = self.writers[rank]
        if writer.hold is _Hold.WRITING:
            writer.hold = _Hold.DEAD
            self._release_if_quiet()

    def fail(self, error: TransferError) -> None:
        """Gives the room up; does nothing unless it is open. Each rank that was told nothing yet is told once."""
        if self.state is not ReceiverState.OPEN:
            return
        self.error = error
        self._machine.to(ReceiverState.ABORTING)
        reason = str(error)[:4096]
        for writer in self.writers.values():
            if not writer.told:
                writer.told = True
                message = Abort(room=self.offer.room, generation=self.offer.generation, reason=reason)
                self.outgoing.append((writer.peer, message))
        self._release_if_quiet()

    def _fault(self, rank: Rank, writer: Writer, message: Done) -> str | None:
        if message.groups.keys() != writer.summary.keys():
            return f"it sent groups {sorted(message.groups)}, its routes are of {sorted(writer.summary)}"
        for name, summary in writer.summary.items():
            fault = self._group_fault(name, summary, message.groups[name])
            if fault is not None:
                return fault
        failed = any(own.failed or own.states_failed for own in message.groups.values())
        if failed and self.offer.on_failed_pages != "recompute":
            return "it could not send all pages, and this receiver does not compute them"
        expected = self._shares.nbytes(writer.summary)
        if message.nbytes != expected and not (failed and message.nbytes < expected):
            return f"it sent {message.nbytes} bytes, its route holds {expected}"
        try:
            rows = unpack(self._aux, message.rows)
        except ArgumentError as error:
            return str(error)
        if rows:
            self._rows[rank] = rows
        for name, own in message.groups.items():
            self._failed.setdefault(name, set()).update(*(range(*pages) for pages in own.failed))
            self._states_failed |= own.states_failed
        last = all(other.done is not None for other in self.writers.values() if other is not writer)
        if self._aux and last and not self._rows:
            return f"the last of all ranks ended, and none brought {', '.join(map(str, self._aux))}"
        return None

    def _group_fault(self, name: str, summary: RouteSummary, message: GroupDone) -> str | None:
        span = self._shares.spans[name]
        of = f" of group {name!r}" if len(self._shares.spans) > 1 else ""
        if message.pages != span.pages:
            return f"it sent {message.pages} pages{of}, {span.pages} were offered"
        for what, sent, held in (
            ("layers", message.layers, summary.layers),
            ("states of layers", message.states, summary.states),
        ):
            if set(sent) != set(held) or len(sent) != len(held):
                return f"it sent {what}{of} {sent}, its route holds {held}"
        for start, stop in message.failed:
            if not span.first <= start < stop <= span.first + span.pages:
                return f"it could not send pages [{start}, {stop}){of}, which were not offered"
        return None

    def _complete_if_done(self) -> None:
        if any(writer.done is None for writer in self.writers.values()):
            return
        done = {rank: writer.done for rank, writer in self.writers.items() if writer.done is not None}
        self.result = TransferResult(
            room=self.offer.room,
            generation=self.offer.generation,
            tokens=self.offer.tokens,
            pages=sum(len(own.pages) for own in self.offer.groups.values()),
            nbytes=sum(message.nbytes for message in done.values()),
            blocks=sum(message.blocks for message in done.values()),
            rows=self._rows[min(self._rows)] if self._rows else {},
            metadata={rank: message.metadata for rank, message in sorted(done.items())},
            failed_pages=self._shares.failed_pages(self._failed),
            recompute=self._shares.recompute(self._failed, self._states_failed),
        )
        self._machine.to(ReceiverState.COMPLETE)

    def _release_if_quiet(self) -> None:
        if self.state is ReceiverState.ABORTING and not self.writing:
            self._machine.to(ReceiverState.ABORTED)
