"""Random schedules of two prefill stages and one decode rank, over the cores and the real loopback engine.

No thread, no socket, no real time: messages wait in queues until they are delivered, bytes move one block at a time.
After every step free pages are untouched; at the end everything has ended, both sides agree, and what is complete
holds the right bytes.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transfer_memory import RankMemory, make_layout, stages, whole
from transfer_pair import Hardware

from kv_transfer.config import Limits, Timeouts
from kv_transfer.engines.loopback import LoopbackEngine
from kv_transfer.errors import PageHeld, SessionStateError, TransferError
from kv_transfer.groups import MAIN, Groups
from kv_transfer.messages import Abort, Aborted, Accepted, Done, GroupOffer, decode
from kv_transfer.receiver_core import ReceiverCore
from kv_transfer.receiver_room import ReceiverRoom
from kv_transfer.sender_core import SenderCore
from kv_transfer.sender_room import SenderRoom
from kv_transfer.states import ReceiverState, SenderState
from kv_transfer.terms import Terms

STAGES = 2
ROOMS = 3
PAGES = 9
TIMEOUTS = Timeouts(
    handshake=5, offer=5, transfer=20, heartbeat_interval=1, peer_lost_after=4, dead_writer_grace=1, drain=1
)
LIMITS = Limits(batches_in_flight=2)


def offered(pages: list[int]) -> dict[str, GroupOffer]:
    return {MAIN: GroupOffer(pages=tuple(pages))}


@dataclasses.dataclass
class Peer:
    """One life of one prefill process."""

    identity: bytes
    memory: RankMemory
    engine: Hardware
    core: SenderCore
    to_receiver: deque[bytes] = dataclasses.field(default_factory=deque)
    to_sender: deque[bytes] = dataclasses.field(default_factory=deque)
    rooms: dict[int, SenderRoom] = dataclasses.field(default_factory=dict)
    unsent: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    alive: bool = True
    died_at: float = 0.0


@dataclasses.dataclass
class Use:
    """One use of a room number."""

    room: ReceiverRoom
    pages: list[int]
    sources: dict[int, list[int]]
    returned: bool = False


class Transfers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.lives = 0
        self.random = random.Random(7)
        self.layout = make_layout(layers=3, heads=1, key_dims=2, value_dims=1, page_size=1)
        self.memory = whole(self.layout, pages=PAGES)
        self.engine = LoopbackEngine(blocks_per_poll=1, max_entries_per_batch=2)
        self._register(self.engine, self.memory)
        self.receiver = ReceiverCore(Groups.of(self.memory.manifest), Terms.of(self.engine), STAGES, TIMEOUTS, LIMITS)
        self.free = list(range(1, PAGES))
        self.uses: list[Use] = []
        self.peers: list[Peer] = []
        self.everyone: list[Peer] = []
        self.terminal: Counter[tuple[bytes, str, int, int]] = Counter()
        self.sources = stages(self.layout, STAGES, pages=PAGES)
        for stage in range(STAGES):
            self.peers.append(self._start(stage))
        self._settle()

    def _register(self, engine: LoopbackEngine, memory: RankMemory) -> None:
        for entry in memory.manifest.entries:
            engine.register(entry.address, entry.nbytes)

    def _start(self, stage: int) -> Peer:
        self.lives += 1
        engine = Hardware()
        memory = self.sources[stage]
        self._register(engine, memory)
        core = SenderCore(Groups.of(memory.manifest), engine, TIMEOUTS, LIMITS, self.now)
        peer = Peer(f"life{self.lives}".encode(), memory, engine, core)
        self.everyone.append(peer)
        return peer

    def _by_identity(self, identity: bytes) -> Peer | None:
        return next((peer for peer in self.peers if peer.identity == identity and peer.alive), None)

    def _post(self) -> None:
        """Moves what both sides want to say into the queues, and counts terminal messages."""
        for peer in self.peers:
            while peer.alive and peer.core.outbox:
                data = peer.core.outbox.popleft()
                self._count(peer.identity, "sender", data)
                peer.to_receiver.append(data)
        for _ in range(len(self.receiver.outbox)):
            identity, data = self.receiver.outbox.popleft()
            living = self._by_identity(identity)
            if living is None:
                self.receiver.unreachable(identity, self.now)
            else:
                self._count(identity, "receiver", data)
                living.to_sender.append(data)

    def _count(self, identity: bytes, side: str, data: bytes) -> None:
        message = decode(data)
        if isinstance(message, Done | Aborted | Accepted | Abort):
            key = (identity, side, message.room, message.generation)
            self.terminal[key] += 1
            assert self.terminal[key] == 1, f"two terminal messages of the {side}: {message}"

    def _deliver(self, peer: Peer, to_receiver: bool, count: int) -> None:
        queue = peer.to_receiver if to_receiver else peer.to_sender
        for _ in range(min(count, len(queue))):
            data = queue.popleft()
            if to_receiver:
                self.receiver.receive(peer.identity, data, self.now)
            else:
                peer.core.receive(data, self.now)
            self._post()
        self._reclaim()

    def _reclaim(self) -> None:
        """Pages whose writers let go return to the free list, checked and wiped."""
        for use in self.uses:
            if use.returned or not use.room.pages_released:
                continue
            use.returned = True
            if use.room.state is ReceiverState.COMPLETE:
                assert use.room.result is not None
                self._check_bytes(use)
            self.memory.wipe(use.pages)
            self.free.extend(use.pages)

    def _check_bytes(self, use: Use) -> None:
        for stage, pages in use.sources.items():
            for name in self.sources[stage].names:
                for destination, source in zip(use.pages, pages, strict=True):
                    expected = self.sources[stage].page_labels(name, source)
                    assert (self.memory.buffer(name)[destination] == expected).all(), (use.room.name, name, destination)

    def _settle(self, seconds: float = 0.0) -> None:
        """Delivers and moves everything until nothing happens."""
        self.now += seconds
        for _ in range(400):
            self.receiver.tick(self.now)
            for peer in self.peers:
                if peer.alive:
                    peer.core.tick(self.now)
                    peer.engine.run(100)
                    peer.core.step(self.now)
            self._post()
            if not any(peer.to_receiver or peer.to_sender or peer.core.rooms for peer in self.peers if peer.alive):
                break
            for peer in self.peers:
                self._deliver(peer, True, 1000)
                if peer.alive:
                    self._deliver(peer, False, 1000)
        self._reclaim()

    @rule(room=st.integers(0, ROOMS - 1), count=st.integers(0, 3))
    def open_at_receiver(self, room: int, count: int) -> None:
        if count > len(self.free):
            return
        for use in self.uses:
            if self.receiver.is_ready and room not in self.receiver.rooms and use.pages and not use.returned:
                with pytest.raises(PageHeld):
                    self.receiver.open_room(room, offered(use.pages[:1]), 1, self.now, TIMEOUTS.transfer)
        pages = [self.free.pop(self.random.randrange(len(self.free))) for _ in range(count)]
        try:
            opened = self.receiver.open_room(room, offered(pages), count, self.now, TIMEOUTS.transfer)
        except TransferError:
            self.free.extend(pages)
            return
        sources = {stage: self.random.sample(range(1, PAGES), count) for stage in range(STAGES)}
        self.uses.append(Use(opened, pages, sources))
        self._post()

    @rule(stage=st.integers(0, STAGES - 1), room=st.integers(0, ROOMS - 1))
    def open_at_sender(self, stage: int, room: int) -> None:
        peer = self.peers[stage]
        try:
            opened = peer.core.open_room(room, self.now) if peer.alive else None
        except TransferError:
            return
        if opened is not None:
            peer.rooms[room] = opened
            peer.unsent[room] = list(range(opened.planner.pages))

    @rule(stage=st.integers(0, STAGES - 1), room=st.integers(0, ROOMS - 1), count=st.integers(1, 3))
    def send(self, stage: int, room: int, count: int) -> None:
        peer = self.peers[stage]
        opened = peer.rooms.get(room)
        if not peer.alive or opened is None or not peer.unsent[room]:
            return
        use = next(use for use in self.uses if use.room.offer.generation == opened.generation)
        chunk = peer.unsent[room][:count]
        source = use.sources[stage][chunk[0] : chunk[-1] + 1]
        try:
            opened.send(opened.planner.chunk(source, chunk[0]), self.now)
        except TransferError:
            return
        del peer.unsent[room][: len(chunk)]

    @rule(stage=st.integers(0, STAGES - 1), room=st.integers(0, ROOMS - 1))
    def finish(self, stage: int, room: int) -> None:
        peer = self.peers[stage]
        opened = peer.rooms.get(room)
        if not peer.alive or opened is None:
            return
        sendable = opened.state is SenderState.SENDING
        try:
            opened.finish({"stage": stage}, self.now)
        except (TransferError, SessionStateError):
            assert peer.unsent[room] or not sendable
        else:
            assert not peer.unsent[room]

    @rule(stage=st.integers(0, STAGES - 1), room=st.integers(0, ROOMS - 1))
    def abort_at_sender(self, stage: int, room: int) -> None:
        opened = self.peers[stage].rooms.get(room)
        if self.peers[stage].alive and opened is not None:
            opened.fail(SessionStateError("given up by the test"))

    @rule(stage=st.integers(0, STAGES - 1), room=st.integers(0, ROOMS - 1))
    def reject_at_sender(self, stage: int, room: int) -> None:
        peer = self.peers[stage]
        if peer.alive and peer.core.error is None and room not in peer.core.rooms:
            peer.core.reject(room, "rejected by the test")
            self._post()

    @rule(room=st.integers(0, ROOMS - 1))
    def abort_at_receiver(self, room: int) -> None:
        opened = self.receiver.rooms.get(room)
        if opened is not None:
            self.receiver.fail_room(opened, SessionStateError("given up by the test"))
            self._post()
            self._reclaim()

    @rule(stage=st.integers(0, STAGES - 1), to_receiver=st.booleans(), count=st.integers(1, 5))
    def deliver(self, stage: int, to_receiver: bool, count: int) -> None:
        peer = self.peers[stage]
        if to_receiver or peer.alive:
            self._deliver(peer, to_receiver, count)

    @rule(stage=st.integers(0, STAGES - 1), steps=st.integers(1, 6))
    def step(self, stage: int, steps: int) -> None:
        peer = self.peers[stage]
        if peer.alive:
            peer.core.step(self.now)
            peer.engine.run(steps)
            peer.core.step(self.now)
        self._post()

    @rule(blocks=st.integers(1, 6))
    def hardware_runs(self, blocks: int) -> None:
        """Also what a dead process had begun: those bytes are on the wire until the grace is over."""
        for peer in self.everyone:
            if peer.alive or self.now - peer.died_at < TIMEOUTS.dead_writer_grace:
                peer.engine.run(blocks)

    @rule(stage=st.integers(0, STAGES - 1))
    def stall(self, stage: int) -> None:
        """A process hears and says nothing for longer than a peer may."""
        for _ in range(6):
            self.now += 0.9
            self.receiver.tick(self.now)
            for other, peer in enumerate(self.peers):
                if other != stage and peer.alive:
                    peer.core.tick(self.now)
                    self._post()
                    self._deliver(peer, True, 1000)
                    self._deliver(peer, False, 1000)
            self._post()
        self._reclaim()

    @rule(seconds=st.sampled_from([0.1, 0.5, 0.9]), ticks=st.integers(1, 3))
    def time_passes(self, seconds: float, ticks: int) -> None:
        for _ in range(ticks):
            self.now += seconds
            self.receiver.tick(self.now)
            for peer in self.peers:
                if peer.alive:
                    peer.core.tick(self.now)
            self._post()
        self._reclaim()

    @rule(
        stage=st.integers(0, STAGES - 1),
        room=st.integers(0, ROOMS - 1),
        count=st.integers(1, 3),
        steps=st.integers(0, 9),
    )
    def work(self, stage: int, room: int, count: int, steps: int) -> None:
        """What a prefill process does most of the time: takes the room, sends pages, finishes when all are sent."""
        peer = self.peers[stage]
        self.deliver(stage, True, 5)
        if peer.alive:
            self.deliver(stage, False, 5)
        if room not in peer.rooms or peer.rooms[room].is_terminal:
            self.open_at_sender(stage, room)
        self.send(stage, room, count)
        self.step(stage, steps)
        if room in peer.rooms and not peer.unsent[room]:
            self.finish(stage, room)
        self.step(stage, steps)

    @rule(room=st.integers(0, ROOMS - 1), count=st.integers(1, 3), steps=st.integers(0, 9))
    def work_everywhere(self, room: int, count: int, steps: int) -> None:
        if room not in self.receiver.rooms:
            self.open_at_receiver(room, count)
        for stage in range(STAGES):
            self.work(stage, room, count, steps)
            self.deliver(stage, True, 5)

    @rule(stage=st.integers(0, STAGES - 1), dice=st.integers(0, 5))
    def crash(self, stage: int, dice: int) -> None:
        """The process is gone with what it had not sent; bytes that left it still arrive."""
        peer = self.peers[stage]
        if peer.alive and dice == 5:
            peer.alive = False
            peer.died_at = self.now
            peer.to_sender.clear()

    @precondition(lambda self: any(not peer.alive or peer.core.is_over for peer in self.peers))
    @rule()
    def restart(self) -> None:
        for stage, peer in enumerate(self.peers):
            if not peer.alive or (peer.core.is_over and not peer.core.rooms):
                self.peers[stage] = self._start(stage)
        self._post()
        self._settle(TIMEOUTS.dead_writer_grace)

    @rule()
    def settle(self) -> None:
        self._settle()

    @invariant()
    def free_pages_are_untouched(self) -> None:
        for name in self.memory.names:
            assert (self.memory.buffer(name)[self.free] == 0xEE).all(), f"a free page of {name} was written"

    @invariant()
    def no_page_is_lost(self) -> None:
        held = [page for use in self.uses if not use.returned for page in use.pages]
        assert sorted(self.free + held) == list(range(1, PAGES))

    def teardown(self) -> None:
        for room in list(self.receiver.rooms.values()):
            if self.random.random() < 0.5:
                self.receiver.fail_room(room, SessionStateError("the test ends"))
        for _ in range(60):
            self._settle(0.5)
        assert not self.receiver.rooms
        assert sorted(self.free) == list(range(1, PAGES))
        for peer in self.peers:
            if peer.alive:
                assert not peer.core.rooms
                assert all(room.is_terminal for room in peer.rooms.values())
        finished = {
            (stage, room.generation)
            for stage, peer in enumerate(self.peers)
            for room in peer.rooms.values()
            if room.state is SenderState.FINISHED
        }
        for use in self.uses:
            if use.room.state is ReceiverState.COMPLETE:
                assert use.room.result is not None
                expected = sum(writer.summary[MAIN].bytes_per_page for writer in use.room.writers.values())
                expected *= len(use.pages)
                assert use.room.result.nbytes == expected
        complete = {use.room.offer.generation for use in self.uses if use.room.state is ReceiverState.COMPLETE}
        open_ends = {generation for _, generation in finished} - {use.room.offer.generation for use in self.uses}
        assert not open_ends
        assert all(use.room.error is None for use in self.uses if use.room.offer.generation in complete)
        self.engine.close()
        for peer in self.everyone:
            peer.engine.close()
