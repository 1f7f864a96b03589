"""Random schedules of two prefill stages and one decode rank, over the cores and the real loopback engine.

After every step free pages and rows are untouched at the receiver and unread at the senders; at the end everything has
ended, both sides agree, and what is complete holds the right bytes. The processes themselves are in `transfer_world`.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transfer_items import Kind
from transfer_world import STAGES, TIMEOUTS, Peer, Sending, Use, World

from kv_transfer.errors import PageHeld, SessionStateError, TransferError, TransferFailed
from kv_transfer.messages import GroupOffer, Policy
from kv_transfer.receiver_room import ReceiverRoom
from kv_transfer.states import ReceiverState, SenderState

ROOMS = 3
LONGEST = 4  # pages of a request, its prefix included
PAGES: tuple[Kind, ...] = (("full", "page"), ("sliding", "page"))
ROW: Kind = ("full", "request_row")
STAGE = st.integers(0, STAGES - 1)
ROOM = st.integers(0, ROOMS - 1)
POLICY = st.sampled_from(["fail", "retry", "recompute"])


class Transfers(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @property
    def uses(self) -> list[Use]:
        return self.world.uses

    @property
    def must_restart(self) -> bool:
        return any(not peer.alive or peer.core.is_over for peer in self.world.peers)

    def _open(self, room: int, offer: dict[str, GroupOffer], tokens: int, policy: Policy = "fail") -> ReceiverRoom:
        world = self.world
        return world.receiver.open_room(room, offer, tokens, world.now, TIMEOUTS.transfer, policy)

    @rule(room=ROOM, count=st.integers(0, 3), first_page=st.integers(0, 1), policy=POLICY)
    def open_at_receiver(self, room: int, count: int, first_page: int = 0, policy: Policy = "fail") -> None:
        world = self.world
        for use in world.uses:
            pages = use.items["full", "page"]
            if world.receiver.is_ready and room not in world.receiver.rooms and pages and not use.returned:
                held = {"full": GroupOffer(pages=tuple(pages[:1])), "sliding": GroupOffer(pages=())}
                with pytest.raises(PageHeld):
                    self._open(room, held, 1)
        found = world.offer(first_page + count, first_page)
        if found is None:
            return
        offer, items = found
        try:
            opened = self._open(room, offer, first_page + count, policy)
        except TransferError:
            for kind, numbers in items.items():
                world.memory.give(kind, numbers)
            return
        firsts = {kind: offer[kind[0]].first_page if kind in PAGES else 0 for kind in items}
        world.uses.append(Use(opened, world.life, items, firsts, policy))
        world.post()

    @rule(stage=STAGE, room=ROOM)
    def open_at_sender(self, stage: int, room: int) -> None:
        world, peer = self.world, self.world.peers[stage]
        if not peer.alive or any(len(peer.memory.free[kind]) < LONGEST for kind in PAGES) or not peer.memory.free[ROW]:
            return
        try:
            opened = peer.core.open_room(room, world.now)
        except TransferError:
            return
        if opened is None:
            return
        assert opened.offer is not None
        tokens = opened.offer.tokens
        items = {kind: peer.memory.take(kind, tokens if kind in PAGES else 1, world.dice) for kind in (*PAGES, ROW)}
        unsent = list(range(opened.offer.groups["full"].first_page, tokens))
        if room in peer.rooms:
            peer.ended.append(peer.rooms[room])
        peer.rooms[room] = Sending(opened, peer.life, items, unsent)

    @rule(stage=STAGE, room=ROOM, count=st.integers(1, 3), layer_wise=st.booleans())
    def send(self, stage: int, room: int, count: int, layer_wise: bool = False) -> None:
        """Some pages, or the row when all pages are sent; layer-wise ones are computed later."""
        peer = self.world.peers[stage]
        sending = peer.rooms.get(room)
        if not peer.alive or sending is None or sending.released or not (sending.unsent or sending.row_unsent):
            return
        if not layer_wise:
            for layer in sorted(self._layers(peer) - sending.marked):
                self.world.compute(sending, peer, layer)
        ready = sending.marks if layer_wise else None
        chunk, planner = sending.unsent[:count], sending.room.planner
        try:
            if chunk:
                pages = {kind[0]: sending.items[kind][chunk[0] : chunk[-1] + 1] for kind in PAGES}
                sending.room.send(planner.chunk(pages, chunk[0], ready=ready), self.world.now)
                del sending.unsent[: len(chunk)]
            else:
                sending.room.send(planner.row({"full": sending.items[ROW][0]}, ready=ready), self.world.now)
                sending.row_unsent = False
        except TransferError:
            return

    def _layers(self, peer: Peer) -> set[int]:
        return {name[2] for kind in (*PAGES, ROW) for name in peer.memory.names(kind)}

    @rule(stage=STAGE, room=ROOM, dice=st.integers(0, 2))
    def compute(self, stage: int, room: int, dice: int) -> None:
        """The next layer, or any, or all of them."""
        peer = self.world.peers[stage]
        sending = peer.rooms.get(room)
        if not peer.alive or sending is None or sending.released:
            return
        left = sorted(self._layers(peer) - sending.marked)
        for layer in (left[:1], left[-1:], left)[dice]:
            self.world.compute(sending, peer, layer)

    @rule(stage=STAGE, room=ROOM)
    def finish(self, stage: int, room: int) -> None:
        world, peer = self.world, self.world.peers[stage]
        sending = peer.rooms.get(room)
        if not peer.alive or sending is None:
            return
        sendable = sending.room.state is SenderState.SENDING
        complete = not sending.unsent and not sending.row_unsent
        rows = {"first_token": sending.room.generation.to_bytes(8, "little")} if stage == STAGES - 1 else None
        try:
            sending.room.finish({"stage": stage}, world.now, rows)
        except TransferError as error:
            assert not (complete and sendable) or isinstance(error, TransferFailed)
        else:
            assert complete

    @rule(stage=STAGE, room=ROOM)
    def abort_at_sender(self, stage: int, room: int) -> None:
        peer = self.world.peers[stage]
        if peer.alive and room in peer.rooms:
            peer.rooms[room].room.fail(SessionStateError("given up by the test"))

    @rule(stage=STAGE, room=ROOM)
    def reject_at_sender(self, stage: int, room: int) -> None:
        peer = self.world.peers[stage]
        if peer.alive and peer.core.error is None and room not in peer.core.rooms:
            peer.core.reject(room, "rejected by the test")
            self.world.post()

    @rule(room=ROOM)
    def abort_at_receiver(self, room: int) -> None:
        opened = self.world.receiver.rooms.get(room)
        if opened is not None:
            self.world.receiver.fail_room(opened, SessionStateError("given up by the test"))
            self.world.post()
            self.world.reclaim()

    @rule(stage=STAGE, to_receiver=st.booleans(), count=st.integers(1, 5))
    def deliver(self, stage: int, to_receiver: bool, count: int) -> None:
        peer = self.world.peers[stage]
        if to_receiver or peer.alive:
            self.world.deliver(peer, to_receiver, count)

    @rule(stage=STAGE, to_receiver=st.booleans(), dice=st.integers(0, 99))
    def reorder(self, stage: int, to_receiver: bool, dice: int) -> None:
        """A message comes after its successor; no network of ours does it."""
        peer = self.world.peers[stage]
        queue = peer.to_receiver if to_receiver else peer.to_sender
        if len(queue) > 1:
            at = dice % len(queue)
            data = queue[at]
            del queue[at]
            queue.insert(at + 1, data)

    @rule(stage=STAGE, to_receiver=st.booleans(), dice=st.integers(0, 99))
    def duplicate(self, stage: int, to_receiver: bool, dice: int) -> None:
        """A message that was heard comes again, however late; no network of ours does it."""
        peer = self.world.peers[stage]
        heard = peer.heard[to_receiver]
        if heard:
            (peer.to_receiver if to_receiver else peer.to_sender).append(heard[dice % len(heard)])

    @rule(stage=STAGE, blocks=st.integers(1, 6))
    def step(self, stage: int, blocks: int) -> None:
        self.world.step(self.world.peers[stage], blocks)

    @rule(stage=STAGE)
    def batch_fails(self, stage: int) -> None:
        self.world.fail_batch(self.world.peers[stage])

    @rule(blocks=st.integers(1, 6))
    def hardware_runs(self, blocks: int) -> None:
        for process in self.world.processes:
            process.run(blocks, self.world.now)

    @rule(stage=STAGE)
    def stall(self, stage: int) -> None:
        """A process hears and says nothing for longer than a peer may."""
        for _ in range(6):
            self.world.tick(0.9, stopped=stage)
            for peer in self.world.peers:
                if peer.stage != stage and peer.alive:
                    self.world.deliver(peer, True, 1000)
                    self.world.deliver(peer, False, 1000)

    @rule(seconds=st.sampled_from([0.1, 0.5, 0.9]), ticks=st.integers(1, 3))
    def time_passes(self, seconds: float, ticks: int) -> None:
        for _ in range(ticks):
            self.world.tick(seconds)

    @rule(stage=STAGE, room=ROOM, count=st.integers(1, 3), steps=st.integers(0, 9), layer_wise=st.booleans())
    def work(self, stage: int, room: int, count: int, steps: int, layer_wise: bool = False) -> None:
        """What a prefill process does most of the time: takes the room, sends pages, finishes when all are sent."""
        peer = self.world.peers[stage]
        self.deliver(stage, True, 5)
        if peer.alive:
            self.deliver(stage, False, 5)
        if room not in peer.rooms or peer.rooms[room].room.is_terminal:
            self.open_at_sender(stage, room)
        self.send(stage, room, count, layer_wise)
        self.send(stage, room, count, layer_wise)
        self.compute(stage, room, 0)
        self.step(stage, steps)
        if room in peer.rooms and not peer.rooms[room].unsent and not peer.rooms[room].row_unsent:
            self.finish(stage, room)
        self.compute(stage, room, 2)
        self.step(stage, steps)

    @rule(room=ROOM, count=st.integers(1, 3), steps=st.integers(0, 9), layer_wise=st.booleans(), policy=POLICY)
    def work_everywhere(
        self, room: int, count: int, steps: int, layer_wise: bool = False, policy: Policy = "fail"
    ) -> None:
        if room not in self.world.receiver.rooms:
            self.open_at_receiver(room, count, count % 2, policy)
        for stage in range(STAGES):
            self.work(stage, room, count, steps, layer_wise)
            self.deliver(stage, True, 5)

    @rule(stage=STAGE, dice=st.integers(0, 5))
    def crash(self, stage: int, dice: int) -> None:
        """The process is gone with what it had not sent; bytes that left it still arrive."""
        peer = self.world.peers[stage]
        if peer.alive and dice == 5:
            peer.process.alive = False
            peer.process.died_at = self.world.now
            peer.to_sender.clear()

    @rule(dice=st.integers(0, 9))
    def receiver_restarts(self, dice: int) -> None:
        """The decode process dies and a new one listens at its address; the senders hear of it later."""
        if dice == 9:
            self.world.start_receiver()
            self.world.post()

    @precondition(lambda self: self.must_restart)
    @rule()
    def restart(self) -> None:
        world = self.world
        for stage, peer in enumerate(world.peers):
            if not peer.alive:
                world.peers[stage] = world.start_peer(stage)
            elif peer.core.is_over and not peer.core.rooms:
                world.reclaim()
                world.peers[stage] = world.start_peer(stage, peer)
        world.post()
        world.settle(TIMEOUTS.dead_writer_grace)

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @invariant()
    def free_items_are_untouched(self) -> None:
        assert self.world.memory.dirty() == []
        assert all(peer.memory.dirty() == [] for peer in self.world.peers if peer.alive)

    @invariant()
    def nothing_is_lost(self) -> None:
        world = self.world
        for kind, free in world.memory.free.items():
            held = [number for use in world.uses if not use.returned for number in use.items[kind]]
            assert sorted(free + held) == list(range(1, 9)), kind

    def teardown(self) -> None:
        world = self.world
        for room in list(world.receiver.rooms.values()):
            if world.dice.random() < 0.5:
                world.receiver.fail_room(room, SessionStateError("the test ends"))
        for _ in range(60):
            world.settle(0.5)
        assert not world.receiver.rooms
        assert all(sorted(free) == list(range(1, 9)) for free in world.memory.free.values())
        for peer in world.peers:
            if peer.alive:
                assert not peer.core.rooms
                assert all(sending.room.is_terminal for sending in peer.rooms.values())
                assert all(sorted(free) == list(range(1, 9)) for free in peer.memory.free.values())
        self._both_sides_agree()
        for use in world.uses:
            assert (use.room.state is ReceiverState.COMPLETE) is (use.room.result is not None)
            assert not (use.room.result is not None and use.room.error is not None)
        world.engine.close()
        for process in world.processes:
            process.engine.close()

    def _both_sides_agree(self) -> None:
        """A sender is told that its part arrived only when it did, and no room is complete without all parts."""
        world = self.world
        said_done: dict[tuple[int, int], set[int]] = {}
        for peer in world.everyone:
            for sending in peer.sendings:
                use = world.use_of(sending)
                assert use is not None
                if (peer.identity, "sender", sending.room.room, sending.room.generation) in world.terminal:
                    said_done.setdefault((sending.life, sending.room.generation), set()).add(peer.stage)
                if sending.room.state is SenderState.FINISHED:
                    parts = [own for rank, own in use.room.writers.items() if rank.pp == peer.stage]
                    assert all(own.done is not None for own in parts)
        for use in world.uses:
            if use.room.state is ReceiverState.COMPLETE:
                assert said_done[use.life, use.room.offer.generation] == set(range(STAGES))
