"""Pages are released once, whichever comes first of the notice that they are done with and the time-out.

Both cores in one thread: each word is delivered, and each time-out happens, when the test says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from transfer_memory import make_layout, stages, whole

import kv_transfer as kt
from kv_transfer.engines.loopback import LoopbackEngine
from kv_transfer.groups import Groups
from kv_transfer.messages import Accepted, Done, GroupOffer, decode
from kv_transfer.page_holds import PageHolds, Thing
from kv_transfer.receiver_core import ReceiverCore
from kv_transfer.regions import register_manifests
from kv_transfer.sender_core import SenderCore
from kv_transfer.states import ReceiverState, SenderState
from kv_transfer.terms import Terms

SECONDS = 10.0
LATE = 3 * SECONDS
TIMES = kt.Timeouts(handshake=1e6, offer=1e6, transfer=SECONDS, heartbeat_interval=1e5, peer_lost_after=1e6)
PAGE = 3


class Counted(PageHolds):
    """Remembers every release."""

    def __init__(self) -> None:
        super().__init__()
        self.released: list[Thing] = []

    def give(self, things: Iterable[Thing]) -> None:
        given = list(things)
        self.released += given
        super().give(given)


class Talk:
    """A sender and a receiver that agreed, with a room whose pages are sent and whose end the test brings about."""

    def __init__(self) -> None:
        layout = make_layout(layers=1)
        self.source, self.target = stages(layout, 1)[0], whole(layout)
        self.engines = LoopbackEngine(), LoopbackEngine()
        for engine, memory in zip(self.engines, (self.source, self.target), strict=True):
            register_manifests(engine, [memory.manifest])
        terms = Terms.of(self.engines[1])
        self.receiver = ReceiverCore(Groups.of(self.target.manifest), terms, 1, TIMES, kt.Limits())
        self.receiver._holds = self.holds = Counted()
        self.sender = SenderCore(Groups.of(self.source.manifest), self.engines[0], TIMES, kt.Limits(), 0.0)
        self.held: list[bytes] = []
        self.deliver()
        self.room = self.receiver.open_room(1, {"main": GroupOffer(pages=(PAGE,))}, 4, 0.0, SECONDS)
        self.deliver()
        opened = self.sender.open_room(1, 0.0)
        assert opened is not None
        self.sending = opened
        self.sending.send(self.sending.planner.chunk(np.array([5]), 0), 0.0)
        self.sending.finish({}, 0.0)
        self.deliver(hold=(Done,))
        assert self.sending.state is SenderState.DONE_SENT and self.room.state is ReceiverState.OPEN
        (self.done,) = self.held

    def deliver(self, hold: Sequence[type] = ()) -> None:
        """Carries words both ways until nobody has one, but keeps those of a kind."""
        self.sender.step(0.0)
        while self.sender.outbox or self.receiver.outbox or self.sender.moves_bytes:
            while self.sender.outbox:
                word = self.sender.outbox.popleft()
                if not self._keeps(word, hold):
                    self.receiver.receive(b"peer", word, 0.0)
            while self.receiver.outbox:
                _, word = self.receiver.outbox.popleft()
                if not self._keeps(word, hold):
                    self.sender.receive(word, 0.0)
            self.sender.step(0.0)

    def _keeps(self, word: bytes, hold: Sequence[type]) -> bool:
        kept = isinstance(decode(word), tuple(hold))
        self.held += [word] if kept else []
        return kept

    def happen(self, event: str, *, hold: Sequence[type] = ()) -> None:
        """The receiver hears that all is sent, or its time runs out."""
        if event == "done":
            self.receiver.receive(b"peer", self.done, 1.0)
        else:
            self.receiver.tick(LATE)
        self.deliver(hold)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@pytest.mark.parametrize("events", [("done", "time-out"), ("time-out", "done"), ("done", "done"), ("time-out",) * 2])
def test_decode_pages_are_released_once_by_notice_and_time_out(events: tuple[str, str]) -> None:
    talk = Talk()
    for event in events:
        talk.happen(event)
    if "done" not in events:  # the writer has not let go: the time-out alone releases nothing
        assert talk.room.state is ReceiverState.ABORTING and talk.holds.released == []
        talk.happen("done")
    first = events[0] == "done"
    assert talk.room.state is (ReceiverState.COMPLETE if first else ReceiverState.ABORTED)
    assert isinstance(talk.room.error, kt.TransferTimeout) is not first
    assert talk.holds.released == [("main", "page", PAGE)]
    second = talk.receiver.open_room(1, {"main": GroupOffer(pages=(PAGE,))}, 4, LATE, 1e6)
    late = talk.receiver.late_messages
    for event in (*events, "done"):  # all of it once more, for a page and a number that are in use again
        talk.happen(event)
    assert talk.receiver.late_messages > late
    assert talk.holds.released == [("main", "page", PAGE)] and second.state is ReceiverState.OPEN
    with pytest.raises(kt.PageHeld, match=r"is held by room 1 \(generation 2\)"):
        talk.receiver.open_room(3, {"main": GroupOffer(pages=(PAGE,))}, 4, LATE, 1e6)
    talk.close()


@pytest.mark.parametrize("events", [("notice", "time-out"), ("time-out", "notice"), ("notice", "notice")])
def test_prefill_pages_are_released_once_by_notice_and_time_out(events: tuple[str, str]) -> None:
    """They are free since the engine let go of them; what comes afterwards takes nothing back and says nothing more."""
    talk = Talk()
    talk.held.clear()
    talk.happen("done", hold=(Accepted,))
    (notice,) = talk.held
    ends = []
    for event in events:
        if event == "notice":
            talk.sender.receive(notice, 1.0)
        talk.sender.step(1.0 if event == "notice" else LATE)
        assert talk.sending.is_terminal and talk.sender.rooms == {} and not talk.sender.outbox
        ends.append((talk.sending.state, talk.sending.error))
    assert ends[0] == ends[1]
    state, error = ends[0]
    assert state is (SenderState.FINISHED if events[0] == "notice" else SenderState.ABORTED)
    assert (error is None) is (events[0] == "notice")
    assert talk.target.faults({PAGE: 5}) == []
    talk.close()
