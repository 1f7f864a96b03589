"""Two prefill stages and one decode rank as processes without threads, sockets and time, for random schedules.

Messages wait in queues until they are delivered, bytes move one block at a time, and processes die. Every page and row
carries the stamp of the room that it was computed for: stale bytes, bytes that were read too early or too late, and
bytes in pages of nobody are seen. What happens when is `transfer_machine`'s.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque

import kv_planner as kp
from transfer_image import EMPTY
from transfer_items import GARBAGE, KINDS, LAYERS, WINDOW, Kind, Memory, stamp
from transfer_pair import Hardware

from kv_transfer.aux_rows import AuxField
from kv_transfer.config import Limits, Timeouts
from kv_transfer.engine import TransferState, TransferStatus
from kv_transfer.engines.loopback import LoopbackEngine
from kv_transfer.messages import Abort, Aborted, Accepted, Done, GroupOffer, Policy, decode
from kv_transfer.ready import LayerMarks
from kv_transfer.receiver_core import ReceiverCore
from kv_transfer.receiver_room import ReceiverRoom
from kv_transfer.sender_core import SenderCore
from kv_transfer.sender_room import SenderRoom
from kv_transfer.spans import request_span
from kv_transfer.states import ReceiverState, SenderState
from kv_transfer.terms import ALL_PARTS, Terms

STAGES = 2
TIMEOUTS = Timeouts(
    handshake=5, offer=5, transfer=20, heartbeat_interval=1, peer_lost_after=4, dead_writer_grace=1, drain=1
)
LIMITS = Limits(batches_in_flight=2, ready_step_bytes=1)
AUX = (AuxField("first_token", "int64"),)


@dataclasses.dataclass
class Sending:
    """One room at one stage: its source items by kind, each index of the request at its place."""

    room: SenderRoom
    life: int
    items: dict[Kind, list[int]]
    unsent: list[int]
    row_unsent: bool = True
    marks: LayerMarks = dataclasses.field(default_factory=LayerMarks)
    marked: set[int] = dataclasses.field(default_factory=set)
    returned: bool = False

    @property
    def released(self) -> bool:
        return self.room.is_terminal or self.room.state is SenderState.DONE_SENT


@dataclasses.dataclass
class Process:
    """One life of one prefill process."""

    memory: Memory
    engine: Hardware
    alive: bool = True
    died_at: float = 0.0

    def run(self, blocks: int, now: float) -> None:
        """The hardware works on, also for a dead process until the grace is over: those bytes are on the wire."""
        if self.alive or now - self.died_at < TIMEOUTS.dead_writer_grace:
            self.engine.run(blocks)


@dataclasses.dataclass
class Peer:
    """One connection of a process."""

    stage: int
    identity: bytes
    life: int  # of the receiver
    process: Process
    core: SenderCore
    to_receiver: deque[bytes] = dataclasses.field(default_factory=deque)
    to_sender: deque[bytes] = dataclasses.field(default_factory=deque)
    rooms: dict[int, Sending] = dataclasses.field(default_factory=dict)
    ended: list[Sending] = dataclasses.field(default_factory=list)
    heard: dict[bool, deque[bytes]] = dataclasses.field(
        default_factory=lambda: {True: deque(maxlen=20), False: deque(maxlen=20)}
    )

    @property
    def alive(self) -> bool:
        return self.process.alive

    @property
    def memory(self) -> Memory:
        return self.process.memory

    @property
    def engine(self) -> Hardware:
        return self.process.engine

    @property
    def sendings(self) -> tuple[Sending, ...]:
        return (*self.rooms.values(), *self.ended)


@dataclasses.dataclass
class Use:
    """One use of a room number."""

    room: ReceiverRoom
    life: int
    items: dict[Kind, list[int]]
    firsts: dict[Kind, int]
    policy: Policy
    returned: bool = False


class World:
    """Everybody, and what lies between them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.dice = random.Random(7)
        self.life = 0
        self.lives = 0
        self.memory = Memory(LAYERS[0] + LAYERS[1], None, EMPTY)
        self.uses: list[Use] = []
        self.peers: list[Peer] = []
        self.everyone: list[Peer] = []
        self.processes: list[Process] = []
        self.terminal: Counter[tuple[bytes, str, int, int]] = Counter()
        self.complete = 0
        self.engine = LoopbackEngine()
        self.start_receiver()
        for stage in range(STAGES):
            self.peers.append(self.start_peer(stage))
        self.settle()

    def start_receiver(self) -> None:
        """At the same address and with its memory at the same place: nobody who wrote to the last one may reach it."""
        self.life += 1
        self.engine.close()
        self.engine = LoopbackEngine(blocks_per_poll=1, max_entries_per_batch=2)
        self.memory.reset()
        self.memory.register(self.engine)
        terms = Terms.of(self.engine, ALL_PARTS, AUX)
        self.receiver = ReceiverCore(self.memory.groups, terms, STAGES, TIMEOUTS, LIMITS)
        for use in self.uses:
            use.returned = True

    def start_peer(self, stage: int, known: Peer | None = None) -> Peer:
        """A new process, or the process of `known` connects again."""
        self.lives += 1
        if known is None:
            memory = Memory(LAYERS[stage], kp.Placement(pp_rank=stage, pp_size=STAGES), GARBAGE)
            process = Process(memory, Hardware())
            memory.register(process.engine)
            self.processes.append(process)
        else:
            process = known.process
        core = SenderCore(process.memory.groups, process.engine, TIMEOUTS, LIMITS, self.now, ALL_PARTS, AUX)
        peer = Peer(stage, f"connection{self.lives}".encode(), self.life, process, core)
        self.everyone.append(peer)
        return peer

    def use_of(self, sending: Sending) -> Use | None:
        wanted = (sending.life, sending.room.generation)
        return next((use for use in self.uses if (use.life, use.room.offer.generation) == wanted), None)

    def post(self) -> None:
        """Moves what all want to say into the queues, and counts terminal messages."""
        for peer in self.peers:
            while peer.alive and peer.core.outbox:
                data = peer.core.outbox.popleft()
                self._count(peer.identity, "sender", data)
                if peer.life == self.life:
                    peer.to_receiver.append(data)
        for _ in range(len(self.receiver.outbox)):
            identity, data = self.receiver.outbox.popleft()
            living = next((peer for peer in self.peers if peer.identity == identity and peer.alive), None)
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

    def deliver(self, peer: Peer, to_receiver: bool, count: int) -> None:
        queue = peer.to_receiver if to_receiver else peer.to_sender
        for _ in range(min(count, len(queue))):
            data = queue.popleft()
            peer.heard[to_receiver].append(data)
            if not to_receiver:
                peer.core.receive(data, self.now)
            elif peer.life == self.life:
                self.receiver.receive(peer.identity, data, self.now)
            self.post()
        if peer.alive and peer.life != self.life and not peer.to_sender and not peer.core.is_over:
            peer.core.disconnected("its connection is closed")
        self.reclaim()

    def step(self, peer: Peer, blocks: int) -> None:
        if peer.alive:
            peer.core.step(self.now)
            peer.engine.run(blocks)
            peer.core.step(self.now)
        self.post()
        self.reclaim()

    def tick(self, seconds: float, stopped: int | None = None) -> None:
        """Time passes; the process of stage `stopped` hears and says nothing."""
        self.now += seconds
        self.receiver.tick(self.now)
        for peer in self.peers:
            if peer.alive and peer.stage != stopped:
                peer.core.tick(self.now)
        self.post()
        self.reclaim()

    def settle(self, seconds: float = 0.0) -> None:
        """Delivers and moves everything until nothing happens."""
        self.tick(seconds)
        quiet = 0
        while quiet < 2:
            for peer in self.peers:
                self.step(peer, 100)
            busy = any(
                peer.to_receiver or (peer.alive and (peer.to_sender or peer.engine.begun)) for peer in self.peers
            )
            quiet = 0 if busy else quiet + 1
            for peer in self.peers:
                self.deliver(peer, True, 1000)
                if peer.alive:
                    self.deliver(peer, False, 1000)

    def compute(self, sending: Sending, peer: Peer, layer: int) -> None:
        """Prefill writes the layer of all pages of a room, or of its row, and says so."""
        for kind, numbers in sending.items.items():
            for name in peer.memory.names(kind, layer):
                for index, number in enumerate(numbers):
                    item = peer.memory.item(name, number)
                    item[:] = stamp(sending.life, sending.room.generation, name, index, len(item))
        sending.marked.add(layer)
        sending.marks.mark(layer)

    def fail_batch(self, peer: Peer) -> None:
        """The engine gives one batch up, wherever it stands."""
        if peer.alive and peer.engine.begun:
            handle = peer.engine.begun.pop(self.dice.randrange(len(peer.engine.begun)))
            handle.settle(TransferStatus(TransferState.FAILED, "broken by the test"))

    def reclaim(self) -> None:
        """Items that are released return to the free lists, checked and wiped."""
        for use in self.uses:
            if use.returned or not use.room.pages_released:
                continue
            use.returned = True
            if use.room.state is ReceiverState.COMPLETE:
                self.complete += 1
                self._check_bytes(use)
            for kind, numbers in use.items.items():
                self.memory.give(kind, numbers)
        for peer in self.everyone:
            for sending in peer.sendings:
                if peer.alive and sending.released and not sending.returned:
                    sending.returned = True
                    for kind, numbers in sending.items.items():
                        peer.memory.give(kind, numbers)

    def _check_bytes(self, use: Use) -> None:
        result = use.room.result
        assert result is not None
        assert use.policy == "recompute" or not result.failed_pages
        assert result.rows["first_token"] == use.room.offer.generation.to_bytes(8, "little")
        assert {rank.pp: dict(data) for rank, data in result.metadata.items()} == {0: {"stage": 0}, 1: {"stage": 1}}
        whole = result.recompute == ((0, use.room.offer.tokens),)
        for kind, numbers in use.items.items():
            failed = set(result.failed_pages.get(kind[0], ())) if kind[1] == "page" else set()
            if kind[1] == "request_row" and whole:
                continue
            for name in self.memory.names(kind):
                for index, number in enumerate(numbers, use.firsts[kind]):
                    item = self.memory.item(name, number)
                    right = stamp(use.life, use.room.offer.generation, name, index, len(item))
                    assert number in failed or (item == right).all(), (use.room.name, name, index)

    def offer(self, tokens: int, first_page: int) -> tuple[dict[str, GroupOffer], dict[Kind, list[int]]] | None:
        """Takes free items for a request; None when there are too few."""
        spans = {
            "full": request_span(tokens, first_page, 1, None, self.memory.groups.placement),
            "sliding": request_span(tokens, first_page, 1, WINDOW, self.memory.groups.placement),
        }
        counts = {(group, "page"): span.pages for group, span in spans.items()} | {("full", "request_row"): 1}
        if any(count > len(self.memory.free[kind]) for kind, count in counts.items()):  # type: ignore[index]
            return None
        items = {kind: self.memory.take(kind, counts[kind], self.dice) for kind in KINDS}
        groups = {
            group: GroupOffer(
                pages=tuple(items[group, "page"]),
                first_page=span.first,
                row=items["full", "request_row"][0] if group == "full" else None,
            )
            for group, span in spans.items()
        }
        return groups, items
