"""A sender's side of the conversation, without threads and sockets: handshake, offers, rooms, heartbeats.

Bytes go in through `receive`, bytes come out in `outbox`, time is an argument. `Sender` drives it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

import kv_planner

from kv_transfer.aux_rows import AuxField
from kv_transfer.config import Limits, Timeouts, limits_between
from kv_transfer.engine import TransferEngine
from kv_transfer.errors import (
    PeerLost,
    PeerRefused,
    ProtocolError,
    SessionStateError,
    TransferAborted,
    TransferError,
)
from kv_transfer.groups import Groups
from kv_transfer.handshake import (
    Rank,
    agree_pair,
    as_refusal,
    check_expected,
    check_interleave,
    parse_groups,
    refusal_error,
    refusal_message,
)
from kv_transfer.messages import (
    Abort,
    Aborted,
    Accepted,
    Agreed,
    Bye,
    Heartbeat,
    Message,
    Offer,
    Ready,
    Refusal,
    Welcome,
    decode,
    encode,
)
from kv_transfer.room_planner import check_offer
from kv_transfer.sender_offers import Offers
from kv_transfer.sender_room import SenderRoom
from kv_transfer.silence import Silence
from kv_transfer.spans import Interleave
from kv_transfer.states import SENDER_PHASE_STEPS, SenderPhase, StateMachine
from kv_transfer.summaries import RouteSummary, summarise
from kv_transfer.terms import ALL_PARTS, Terms

__all__ = ["SenderCore"]


class SenderCore:
    """State of one sender.

    Args:
        groups: What this rank owns.
        engine: Moves the bytes.
        timeouts: Heartbeat, loss and progress limits.
        limits: Sizes.
        now: Monotonic seconds.
        parts: Parts of the model that are sent.
        aux: Auxiliary rows of a request.
        wake: Called from any thread when `step` has something to do; None where the core is stepped often enough.
    """

    def __init__(
        self,
        groups: Groups,
        engine: TransferEngine,
        timeouts: Timeouts,
        limits: Limits,
        now: float,
        parts: Sequence[kv_planner.Part] = ALL_PARTS,
        aux: Sequence[AuxField] = (),
        wake: Callable[[], None] | None = None,
    ) -> None:
        """Greets the receiver."""
        self.rank = Rank.at(groups.placement)
        self.error: TransferError | None = None
        self.outbox: deque[bytes] = deque()
        self.rooms: dict[int, SenderRoom] = {}
        self.sends_nothing = False
        self.late_messages = 0
        self.moves_bytes = False
        """Whether the engine holds batches."""
        self.must_ask = False
        """Whether something is awaited that does not say when it is there: a layer, or the time of another try."""
        self._wake = wake
        self._groups = groups
        self._engine = engine
        self._timeouts = timeouts
        self._limits = limits
        self._routes: dict[str, kv_planner.Route] | None = None
        self._interleave: Interleave = "page"
        self._place = groups.placement
        self.peer_session = ""
        self._offers = Offers(limits.remembered_rooms)
        self._silence = Silence(timeouts, now)
        self._machine = StateMachine(f"sender {self.rank}", SENDER_PHASE_STEPS, SenderPhase.NEW)
        self._terms = Terms.of(engine, parts, aux, limits)
        self._post(self._terms.hello(groups))
        self._hello_bytes = len(self.outbox[0])
        self._machine.to(SenderPhase.GREETING)

    @property
    def phase(self) -> SenderPhase:
        """Where the conversation is."""
        return self._machine.state

    @property
    def offered(self) -> frozenset[int]:
        """Rooms that `open_room` answers now, with a room or with the reason why there is none."""
        return self._offers.known

    @property
    def is_over(self) -> bool:
        """Whether the conversation has ended, one way or another."""
        return self.phase in (SenderPhase.REFUSED, SenderPhase.LOST, SenderPhase.CLOSED)

    @property
    def routes(self) -> dict[str, kv_planner.Route]:
        """What this rank sends to the receiver, by group.

        Raises:
            SessionStateError: The two sides have not agreed yet.
        """
        if self._routes is None:
            raise SessionStateError(f"sender {self.rank}: no routes before the handshake", local=self.phase.value)
        return self._routes

    def receive(self, data: bytes, now: float) -> None:
        """Takes one message; whatever it holds, ends in a defined state."""
        self._silence.heard(now)
        if self.is_over:
            self._after_the_end(data)
            return
        try:
            message = decode(data, self._limits)
            self._handle(message)
        except BaseException as error:
            self._refuse(as_refusal(error))
        self._collect()

    def disconnected(self, why: str) -> None:
        """The connection is closed."""
        remedy = "call connect() again when it is back"
        if self.phase is SenderPhase.GREETING:
            hello = f"a hello of {self._hello_bytes} bytes is not too long there"
            remedy += f"; see that both ends have the same secret, or none, and that {hello}"
        error = PeerLost(f"the receiver is lost: {why}", consequence="its rooms have ended", remedy=remedy)
        if not self.is_over:
            self.error = error
            self._machine.to(SenderPhase.LOST)
        for room in self.rooms.values():
            room.disconnected(error)
        self.outbox.clear()

    def tick(self, now: float) -> None:
        """Beats, and notices silence."""
        if self.is_over:
            return
        silent = self._silence.silent_for(now)
        if self.phase is not SenderPhase.GREETING and silent > self._timeouts.peer_lost_after:
            self._end(
                SenderPhase.LOST,
                PeerLost(
                    f"the receiver is lost: silent for {silent:.1f} s",
                    consequence="its rooms have ended",
                    remedy="call connect() again when it is back",
                ),
            )
            self._collect()
            return
        if self.phase is not SenderPhase.GREETING and self._silence.beat_due(now):
            self._post(Heartbeat())

    def step(self, now: float) -> None:
        """Moves all rooms on, and sees what `moves_bytes` and `must_ask` are now."""
        for room in list(self.rooms.values()):
            room.step(now)
        self._collect()
        self.moves_bytes = any(room.in_flight for room in self.rooms.values())
        self.must_ask = any(room.must_ask for room in self.rooms.values())

    def open_room(self, room: int, now: float) -> SenderRoom | None:
        """The room, when the receiver has offered pages for it; None as long as it has not.

        Raises:
            PeerRefused, PeerLost: The conversation has ended.
            TransferAborted: The receiver gave the room up before it was opened here.
            SessionStateError: The room is open already.
        """
        self.require_alive()
        known = self.rooms.get(room)
        if known is not None:
            raise SessionStateError(
                f"{known.name} is open already", local=known.state.value, remedy="use the session that you have"
            )
        if self.phase is not SenderPhase.READY:
            return None
        offer = self._offers.pop(room)
        if offer is None and not self.sends_nothing:
            ended = self._offers.pop_ended(room)
            if ended is not None:
                generation, reason = ended
                raise TransferAborted(
                    f"room {room} (generation {generation}) was aborted by the receiver: {reason}",
                    reason=reason,
                    by="receiver",
                )
            return None
        opened = SenderRoom(
            room,
            offer,
            self._groups,
            self.routes,
            self._interleave,
            self._engine,
            self.peer_session,
            self._limits,
            now,
            self._timeouts.transfer,
            self._terms.aux,
            self._wake,
        )
        self.rooms[room] = opened
        return opened

    def reject(self, room: int, reason: str) -> None:
        """Aborts a room that is not open here; when its offer is still to come, as soon as it comes."""
        self.require_alive()
        if room in self.rooms:
            raise SessionStateError(f"{self.rooms[room].name} is open", remedy="abort its session")
        offer = self._offers.pop(room)
        if offer is not None:
            self._decline(offer, reason[:4096])
        elif not self.sends_nothing:
            self._offers.reject(room, reason[:4096])

    def require_alive(self) -> None:
        """Raises the error that ended the conversation, if one did."""
        if self.error is not None:
            raise self.error

    def close(self, reason: str) -> None:
        """Gives up all rooms and says good-bye once they have drained; keep calling `step` until `rooms` is empty."""
        error = TransferAborted(f"the sender was closed: {reason}", reason=reason, by="local")
        for room in self.rooms.values():
            room.fail(error)
        if self.error is None:
            self.error = SessionStateError(f"sender {self.rank} is closed", local=reason)
        if not self.is_over:
            self._decline_all("the sender is closed")

    def crashed(self, error: TransferError) -> None:
        """The thread that drives it ended by an error; from now on only `let_go` is called."""
        if not self.is_over:
            self._end(SenderPhase.LOST, error)

    def let_go(self, now: float) -> bool:
        """Moves the rooms to their end, whatever goes wrong on the way.

        Returns:
            Whether the engine holds none of their batches any more.
        """
        for room in self.rooms.values():
            with contextlib.suppress(BaseException):
                room.step(now)
        with contextlib.suppress(BaseException):
            self._collect()
        return not any(room.in_flight for room in self.rooms.values())

    def say_bye(self) -> None:
        """The last word; call it when the rooms have drained."""
        if not self.is_over:
            self._post(Bye(reason="the sender was closed"))
            self._machine.to(SenderPhase.CLOSED)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Welcome):
            self._welcome(message)
        elif isinstance(message, Ready):
            if self.phase is not SenderPhase.AGREED and self.phase is not SenderPhase.READY:
                raise ProtocolError(f"ready in phase {self.phase.value}")
            expected = {name: RouteSummary.from_message(own) for name, own in message.groups.items()}
            check_expected(self.rank, summarise(self.routes), expected)
            self.sends_nothing = not message.sends
            if self.phase is SenderPhase.AGREED:
                self._machine.to(SenderPhase.READY)
        elif isinstance(message, Offer):
            self._offer(message)
        elif isinstance(message, Abort):
            self._abort(message)
        elif isinstance(message, Accepted):
            room = self.rooms.get(message.room)
            if room is not None and room.generation == message.generation:
                room.accepted()
            else:
                self.late_messages += 1
        elif isinstance(message, Refusal):
            self._end(SenderPhase.REFUSED, refusal_error(message, "receiver"))
        elif isinstance(message, Bye):
            self._end(
                SenderPhase.LOST,
                PeerLost(f"the receiver ended the conversation: {message.reason}", consequence="its rooms have ended"),
            )
        elif not isinstance(message, Heartbeat):
            raise ProtocolError(f"message {message.type!r} is none that a receiver sends")

    def _welcome(self, message: Welcome) -> None:
        if self.phase is not SenderPhase.GREETING:
            raise ProtocolError(f"welcome in phase {self.phase.value}")
        self._terms.check(message)
        remote = parse_groups(message.groups, self._terms.parts)
        agreed = agree_pair(self._groups, remote, self._terms.parts, here="prefill")
        routes = {name: own.route(0, 0) for name, own in agreed.items()}
        check_interleave(routes, message.interleave)
        self._routes, self._interleave, self._place = routes, message.interleave, remote.placement
        self.peer_session = message.session
        self._limits = limits_between(self._limits, message.message_bytes)
        self._post(Agreed())
        self._machine.to(SenderPhase.AGREED)

    def _offer(self, offer: Offer) -> None:
        if self.phase is not SenderPhase.READY:
            raise ProtocolError(f"offer in phase {self.phase.value}")
        check_offer(self._groups, self._place, offer)
        if not self._offers.is_news(offer.generation):
            self.late_messages += 1
        elif self.error is not None:
            self._decline(offer, "the sender is closed")
        elif (reason := self._offers.add(offer)) is not None:
            self._decline(offer, reason)

    def _abort(self, message: Abort) -> None:
        room = self.rooms.get(message.room)
        if room is not None and room.generation == message.generation:
            room.fail(
                TransferAborted(
                    f"{room.name} was aborted by the receiver: {message.reason}", reason=message.reason, by="receiver"
                )
            )
            return
        news, offer = self._offers.aborted(message)
        if offer is not None:
            self._decline(offer, "never opened here")
        if not news:
            self.late_messages += 1

    def _decline(self, offer: Offer, reason: str) -> None:
        self._post(Aborted(room=offer.room, generation=offer.generation, reason=reason))

    def _decline_all(self, reason: str) -> None:
        for offer in self._offers.pop_all():
            self._decline(offer, reason)

    def _refuse(self, error: PeerRefused) -> None:
        if not self.is_over:
            self._post(refusal_message(error, self._limits))
            self._end(SenderPhase.REFUSED, error)

    def _end(self, phase: SenderPhase, error: TransferError) -> None:
        if self.error is None:
            self.error = error
        self._machine.to(phase)
        for room in self.rooms.values():
            room.fail(error)
        self._decline_all(str(error)[:4096])

    def _after_the_end(self, data: bytes) -> None:
        self.late_messages += 1
        try:
            message = decode(data, self._limits)
        except ProtocolError:
            return
        open_end = self.phase is not SenderPhase.CLOSED
        if open_end and isinstance(message, Offer) and self._offers.is_news(message.generation):
            self._decline(message, f"the sender is {self.phase.value}")

    def _collect(self) -> None:
        for number, room in list(self.rooms.items()):
            while room.outgoing:
                self._post(room.outgoing.popleft())
            if room.is_terminal:
                del self.rooms[number]

    def _post(self, message: Message) -> None:
        self.outbox.append(encode(message, self._limits))
