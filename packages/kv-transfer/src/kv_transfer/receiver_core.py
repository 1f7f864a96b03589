"""A receiver's side of all conversations, without threads and sockets: peers, readiness, rooms, heartbeats.

Bytes go in through `receive`, bytes come out in `outbox`, time is an argument. `Receiver` drives it. A rank counts
once: readiness is the set of distinct ranks whose connections live, never a number of messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from kv_transfer.config import Limits, Timeouts, limits_between
from kv_transfer.errors import (
    PeerLost,
    PeerRefused,
    ProtocolError,
    SessionStateError,
    TransferError,
    TransferTimeout,
)
from kv_transfer.groups import Groups
from kv_transfer.handshake import (
    Rank,
    agree_pair,
    agree_whole,
    as_refusal,
    check_interleave,
    check_side,
    parse_groups,
    refusal_error,
    refusal_message,
)
from kv_transfer.messages import (
    Abort,
    Aborted,
    Agreed,
    Bye,
    Done,
    GroupOffer,
    Heartbeat,
    Hello,
    Message,
    Offer,
    Policy,
    Ready,
    Refusal,
    RefusalCode,
    decode,
    encode,
)
from kv_transfer.page_holds import PageHolds, things_of
from kv_transfer.receiver_peer import Peer, lost_error
from kv_transfer.receiver_room import ReceiverRoom, Writer
from kv_transfer.shares import Shares
from kv_transfer.silence import Silence
from kv_transfer.spans import Interleave
from kv_transfer.states import PEER_STEPS, PeerPhase, StateMachine
from kv_transfer.summaries import is_empty, summarise
from kv_transfer.terms import Terms

__all__ = ["ReceiverCore"]

_PROBE_SECONDS = 0.2


class ReceiverCore:
    """State of one receiver.

    Args:
        groups: What this rank owns.
        terms: Engine, process and parts.
        prefill_ranks: How many distinct prefill ranks there are.
        timeouts: Heartbeat, loss and transfer limits.
        limits: Sizes.
        dp_rank: Data-parallel group of the prefill side that is served.
        interleave: How context-parallel ranks of this side share a request.
    """

    def __init__(
        self,
        groups: Groups,
        terms: Terms,
        prefill_ranks: int,
        timeouts: Timeouts,
        limits: Limits,
        dp_rank: int = 0,
        interleave: Interleave = "page",
    ) -> None:
        """Nobody is there yet."""
        self.rank = Rank.at(groups.placement)
        self.outbox: deque[tuple[bytes, bytes]] = deque()
        self.rooms: dict[int, ReceiverRoom] = {}
        self.refusals: deque[PeerRefused] = deque(maxlen=64)
        self.closed: TransferError | None = None
        self.late_messages = 0
        self._groups = groups
        self._interleave: Interleave = interleave if groups.placement.dcp_size > 1 else "page"
        self._terms = terms
        self._prefill_ranks = prefill_ranks
        self._dp_rank = dp_rank
        self._timeouts = timeouts
        self._limits = limits
        self._peers: dict[bytes, Peer] = {}
        self.is_ready = False
        """Whether all prefill ranks are there and fit together."""
        self._lost: dict[Rank, PeerLost] = {}
        self._second_hellos: list[tuple[float, bytes, Hello]] = []
        self._generation = 0
        self._holds = PageHolds()
        self._incarnation = 0

    @property
    def members(self) -> tuple[Rank, ...]:
        """Ranks that agreed and live."""
        return tuple(sorted(peer.rank for peer in self._peers.values() if peer.phase is PeerPhase.MEMBER))

    def receive(self, identity: bytes, data: bytes, now: float) -> None:
        """Takes one message of a connection; whatever it holds, only this connection can suffer."""
        peer = self._peers.get(identity)
        if peer is not None:
            peer.silence.heard(now)
        try:
            message = decode(data, self._limits)
            if isinstance(message, Hello):
                self._hello(identity, message, now)
            elif peer is None:
                if not isinstance(message, Refusal | Bye):
                    raise PeerRefused(
                        f"{message.type!r} before a hello; say hello (connect again) first",
                        code=RefusalCode.UNEXPECTED.value,
                    )
            else:
                self._handle(identity, peer, message, now)
        except BaseException as error:
            self._refuse(identity, as_refusal(error))
        self._collect()

    def unreachable(self, identity: bytes, now: float) -> None:
        """The connection is closed: its process can write no more, bytes on their way excepted."""
        self._second_hellos = [entry for entry in self._second_hellos if entry[1] != identity]
        peer = self._peers.get(identity)
        if peer is None or peer.phase is PeerPhase.GONE:
            return
        self._lose(identity, peer, "its connection is closed", PeerPhase.GONE)
        peer.dead_at = now + self._timeouts.dead_writer_grace
        self._collect()

    def tick(self, now: float) -> None:
        """Beats, notices silence, ends rooms that took too long, and lets go of dead writers."""
        for identity, peer in list(self._peers.items()):
            silent = peer.silence.silent_for(now)
            if peer.phase in (PeerPhase.WELCOMED, PeerPhase.MEMBER) and silent > self._timeouts.peer_lost_after:
                self._post(identity, Bye(reason=f"you were silent for {silent:.1f} s and are taken for lost"))
                self._lose(identity, peer, f"silent for {silent:.1f} s", PeerPhase.LOST)
            if peer.phase is PeerPhase.GONE:
                if peer.dead_at is not None and now >= peer.dead_at:
                    self._bury(identity)
            elif peer.phase is PeerPhase.LOST and not self._writes(identity):
                del self._peers[identity]
            elif peer.silence.beat_due(now):
                self._post(identity, Heartbeat())
        self._retry_hellos(now)
        for room in self.rooms.values():
            if now >= room.deadline:
                room.fail(
                    TransferTimeout(
                        f"{room.name}: prefill ranks {', '.join(map(str, room.writing))} were not done",
                        seconds=room.timeout,
                        consequence="the room is given up",
                        remedy="raise Timeouts.transfer, or see why prefill did not send",
                    )
                )
        self._collect()

    def open_room(
        self,
        room: int,
        groups: Mapping[str, GroupOffer],
        tokens: int,
        now: float,
        timeout: float,
        policy: Policy = "fail",
    ) -> ReceiverRoom:
        """Offers pages to every rank that has something to send.

        Raises:
            PeerLost: A prefill rank is gone.
            SessionStateError: Not ready, or the room is still held by an earlier use.
            PageHeld: A room holds one of the pages, or the row.
            MessageTooLarge: The offer does not fit into a message.
        """
        self._require_free(room, "wait until its pages are released, or use another room")
        generation = self._generation + 1
        offer = Offer(room=room, generation=generation, groups=dict(groups), tokens=tokens, on_failed_pages=policy)
        shortest = min((peer.limits.message_bytes for peer in self._peers.values()), default=self._limits.message_bytes)
        encode(offer, limits_between(self._limits, shortest))
        self._holds.take(f"room {room} (generation {generation})", things_of(offer))
        self._generation += 1
        writers = {
            peer.rank: Writer(identity, peer.summary)
            for identity, peer in self._peers.items()
            if peer.phase is PeerPhase.MEMBER and peer.summary is not None and not is_empty(peer.summary)
        }
        shares = Shares(self._groups, offer, self._interleave)
        opened = ReceiverRoom(offer, writers, now, timeout, shares, self._terms.aux)
        self.rooms[room] = opened
        self._collect()
        return opened

    def reject(self, room: int, reason: str) -> None:
        """Tells every rank that has something to send that the room will not be offered.

        Raises:
            PeerLost: A prefill rank is gone.
            SessionStateError: Not ready, or the room is open.
        """
        self._require_free(room, "abort its session")
        self._generation += 1
        for identity, peer in self._peers.items():
            if peer.phase is PeerPhase.MEMBER and peer.summary is not None and not is_empty(peer.summary):
                self._post(identity, Abort(room=room, generation=self._generation, reason=reason[:4096]))

    def missing(self) -> str:
        """Who is there, in words."""
        there = ", ".join(map(str, self.members)) or "nobody"
        return f"{len(self.members)} of {self._prefill_ranks} prefill ranks are there ({there})"

    def fail_room(self, room: ReceiverRoom, error: TransferError) -> None:
        """Gives a room up and tells its ranks."""
        room.fail(error)
        self._collect()

    def fail_all(self, error: TransferError) -> None:
        """Gives every room up; `open_room` raises `error` from now on."""
        if self.closed is None:
            self.closed = error
        self.is_ready = False
        for room in self.rooms.values():
            room.fail(error)
        self._collect()

    def say_bye(self) -> None:
        """The last word to everybody."""
        for identity, peer in self._peers.items():
            if peer.phase is not PeerPhase.GONE:
                self._post(identity, Bye(reason="the receiver was closed"))

    def _hello(self, identity: bytes, message: Hello, now: float, *, probed: bool = False) -> None:
        if identity in self._peers:
            raise ProtocolError("a second hello on one connection")
        self._terms.check(message)
        groups = parse_groups(message.groups, self._terms.parts)
        rank = Rank.at(groups.placement)
        check_side(groups.placement, self._prefill_ranks, self._dp_rank)
        for other_identity, other in self._peers.items():
            if other.rank == rank and other.phase in (PeerPhase.WELCOMED, PeerPhase.MEMBER):
                if not probed:
                    self._post(other_identity, Heartbeat())
                    self._second_hellos.append((now + _PROBE_SECONDS, identity, message))
                    return
                raise PeerRefused(
                    f"rank {rank} is connected already and lives; the second one does not count",
                    code=RefusalCode.RANK_TAKEN.value,
                    remedy="give each prefill process its own rank, or end the first one",
                )
        agreed = agree_pair(groups, self._groups, self._terms.parts, here="decode")
        check_interleave({name: own.route(0, 0) for name, own in agreed.items()}, self._interleave)
        machine = StateMachine(f"peer {rank}", PEER_STEPS, PeerPhase.WELCOMED)
        limits = limits_between(self._limits, message.message_bytes)
        self._peers[identity] = Peer(rank, groups, machine, Silence(self._timeouts, now), limits)
        self._incarnation += 1
        self._post(identity, self._terms.welcome(self._groups, self._incarnation, self._interleave))

    def _retry_hellos(self, now: float) -> None:
        """A rank that was there already has been probed meanwhile: its place is free now, or really taken."""
        due = [entry for entry in self._second_hellos if now >= entry[0]]
        self._second_hellos = [entry for entry in self._second_hellos if now < entry[0]]
        for _, identity, message in due:
            try:
                self._hello(identity, message, now, probed=True)
            except BaseException as error:
                self._refuse(identity, as_refusal(error))

    def _handle(self, identity: bytes, peer: Peer, message: Message, now: float) -> None:
        if isinstance(message, Agreed):
            if peer.phase is PeerPhase.WELCOMED:
                peer.machine.to(PeerPhase.MEMBER)
                self._lost.pop(peer.rank, None)
                self._make_ready()
        elif isinstance(message, Done | Aborted):
            room = self.rooms.get(message.room)
            rank = room.rank_of(identity) if room is not None else None
            if room is None or rank is None or room.offer.generation != message.generation:
                self.late_messages += 1
            elif isinstance(message, Done):
                room.done(rank, message)
            else:
                room.aborted(rank, message.reason)
        elif isinstance(message, Refusal):
            self.refusals.append(refusal_error(message, f"prefill rank {peer.rank}"))
            self._lose(identity, peer, f"it refused: {message.reason}", PeerPhase.LOST)
        elif isinstance(message, Bye):
            self._lose(identity, peer, f"it ended the conversation: {message.reason}", PeerPhase.LOST)
        elif not isinstance(message, Heartbeat):
            raise ProtocolError(f"message {message.type!r} is none that a sender sends")

    def _make_ready(self) -> None:
        members = sorted(
            ((peer.rank, identity) for identity, peer in self._peers.items() if peer.phase is PeerPhase.MEMBER)
        )
        if len(members) != self._prefill_ranks or self.closed is not None:
            return
        sides = [self._peers[identity].groups for _, identity in members]
        try:
            agreed = agree_whole(self._groups, sides, self._terms.parts)
        except PeerRefused as error:
            for _, identity in members:
                self._refuse(identity, error)
            return
        for rank, identity in members:
            routes = {}
            for name, agreement in agreed.items():
                order = [Rank.of(manifest) for manifest in agreement.local]
                routes[name] = agreement.route(order.index(rank.in_group), 0)
            summary = summarise(routes)
            self._peers[identity].summary = summary
            ready = Ready(
                ranks=len(members),
                sends=not is_empty(summary),
                groups={name: own.message() for name, own in summary.items()},
            )
            self._post(identity, ready)
        self.is_ready = True

    def _refuse(self, identity: bytes, error: PeerRefused) -> None:
        if error.code != RefusalCode.UNEXPECTED.value:
            self.refusals.append(error)
        peer = self._peers.get(identity)
        self._post(identity, refusal_message(error, self._limits if peer is None else peer.limits))
        if peer is not None:
            self._lose(identity, peer, f"it was refused: {error}", PeerPhase.LOST)

    def _lose(self, identity: bytes, peer: Peer, why: str, phase: PeerPhase) -> None:
        if phase not in PEER_STEPS[peer.phase]:
            return
        was_member = peer.phase is PeerPhase.MEMBER
        peer.machine.to(phase)
        if was_member:
            self.is_ready = False
            self._lost[peer.rank] = lost_error(peer.rank, why)
            for room in self.rooms.values():
                rank = room.rank_of(identity)
                if rank is not None and rank in room.writing:
                    room.fail(lost_error(peer.rank, why, room.name))

    def _bury(self, identity: bytes) -> None:
        for room in self.rooms.values():
            rank = room.rank_of(identity)
            if rank is not None:
                room.dead(rank)
        del self._peers[identity]

    def _writes(self, identity: bytes) -> bool:
        return any(room.rank_of(identity) in room.writing for room in self.rooms.values())

    def _require_free(self, room: int, remedy: str) -> None:
        if self.closed is not None:
            raise self.closed
        if not self.is_ready:
            for error in self._lost.values():
                raise error
            raise SessionStateError(f"not ready: {self.missing()}", remedy="call wait_ready() first")
        known = self.rooms.get(room)
        if known is not None:
            raise SessionStateError(
                f"{known.name} is still {known.state.value}", local=known.state.value, remedy=remedy
            )

    def _collect(self) -> None:
        for number, room in list(self.rooms.items()):
            while room.outgoing:
                identity, message = room.outgoing.popleft()
                self._post(identity, message)
            if room.is_terminal:
                self._holds.give(things_of(room.offer))
                del self.rooms[number]

    def _post(self, identity: bytes, message: Message) -> None:
        peer = self._peers.get(identity)
        if peer is None or peer.phase is not PeerPhase.GONE:
            self.outbox.append((identity, encode(message, self._limits if peer is None else peer.limits)))
