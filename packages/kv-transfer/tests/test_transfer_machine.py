"""Random schedules over the cores, by hypothesis and by seeded dice: nothing is lost, nothing is reused too early."""

from __future__ import annotations

import pytest
from hypothesis import settings
from transfer_items import FULL, SLIDING, WINDOW
from transfer_machine import Transfers
from transfer_schedules import run_schedules
from transfer_world import STAGES

from kv_transfer.messages import Offer, Policy, decode
from kv_transfer.states import ReceiverState

SCHEDULES = 40

TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=12, stateful_step_count=40, deadline=None)


def test_random_schedules_lose_nothing() -> None:
    """More and longer schedules than hypothesis draws; the seeds are fixed, and each kind of end must have occurred."""
    ends = run_schedules(range(SCHEDULES))
    assert {"NoneType", "PeerLost", "TransferAborted", "SessionStateError"} <= set(ends), ends


@pytest.mark.parametrize("layer_wise", [True, False])
def test_the_schedule_can_complete_rooms(layer_wise: bool) -> None:
    """The machine above is able to succeed: else its invariants would hold on nothing."""
    machine = Transfers()
    world = machine.world
    machine.open_at_receiver(0, 3, 1)
    world.settle()
    for stage in range(STAGES):
        machine.deliver(stage, False, 5)
        machine.open_at_sender(stage, 0)
        for count in (2, 1, 1):  # pages, pages, the row
            machine.send(stage, 0, count, layer_wise)
        machine.finish(stage, 0)
    world.settle()
    use = machine.uses[0]
    assert use.room.state is (ReceiverState.OPEN if layer_wise else ReceiverState.COMPLETE)
    for stage in range(STAGES):
        machine.compute(stage, 0, 2)
    world.settle()
    result = use.room.result
    assert use.room.state is ReceiverState.COMPLETE and result is not None
    assert (result.tokens, result.pages, world.complete) == (4, 3 + WINDOW, 1)
    pages = 3 * FULL.item_bytes("key") * 2 + 3 * FULL.item_bytes("value") * 2
    sliding = WINDOW * SLIDING.item_bytes("key") * 2 * 2
    assert result.nbytes == pages + sliding + 2 * FULL.item_bytes("state")
    machine.teardown()


@pytest.mark.parametrize("policy", ["fail", "retry", "recompute"])
def test_a_batch_that_fails_ends_as_the_policy_says(policy: Policy) -> None:
    machine = Transfers()
    world = machine.world
    machine.open_at_receiver(0, 2, 0, policy)
    world.settle()
    for stage in range(STAGES):
        machine.open_at_sender(stage, 0)
        machine.send(stage, 0, 2)
        machine.send(stage, 0, 1)
        machine.finish(stage, 0)
    world.peers[0].core.step(world.now)
    machine.batch_fails(0)
    for _ in range(4):
        world.settle(0.5)
    use = machine.uses[0]
    assert use.room.state is (ReceiverState.ABORTED if policy == "fail" else ReceiverState.COMPLETE)
    result = use.room.result
    assert (result is not None and bool(result.recompute)) is (policy == "recompute")
    machine.teardown()


def test_an_offer_that_comes_again_is_no_offer() -> None:
    """Else a rank would write into pages that the receiver has given away since."""
    machine = Transfers()
    world = machine.world
    for room in range(3):
        machine.open_at_receiver(room, 1)
    machine.abort_at_receiver(2)
    for stage in range(STAGES):
        for _ in range(3):
            machine.work(stage, 0, 1, 9)
        machine.deliver(stage, False, 99)
    world.settle()
    assert machine.uses[0].room.state is ReceiverState.COMPLETE
    for peer in world.peers:
        offers = [data for data in peer.heard[False] if isinstance(decode(data), Offer)]
        assert len(offers) == 3
        peer.to_sender.extend(offers)
        world.deliver(peer, False, 99)
        assert peer.core.late_messages == 3
        assert peer.core.open_room(0, world.now) is None
        assert peer.core.open_room(1, world.now) is not None
    machine.teardown()
