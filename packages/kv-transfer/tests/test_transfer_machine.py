"""Random schedules over the cores, by hypothesis and by seeded dice: nothing is lost, nothing is reused too early."""

from __future__ import annotations

from hypothesis import settings
from transfer_machine import STAGES, Transfers
from transfer_schedules import run_schedules

from kv_transfer.states import ReceiverState

SCHEDULES = 60

TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


def test_random_schedules_lose_nothing() -> None:
    """More and longer schedules than hypothesis draws; the seeds are fixed, and each kind of end must have occurred."""
    ends = run_schedules(range(SCHEDULES))
    assert {"NoneType", "PeerLost", "TransferAborted", "SessionStateError"} <= set(ends), ends


def test_the_schedule_can_complete_rooms() -> None:
    """The machine above is able to succeed: else its invariants would hold on nothing."""
    machine = Transfers()
    machine.open_at_receiver(0, 3)
    machine._settle()
    for stage in range(STAGES):
        machine.deliver(stage, False, 5)
        machine.open_at_sender(stage, 0)
        machine.send(stage, 0, 2)
        machine.send(stage, 0, 1)
        machine.finish(stage, 0)
    machine._settle()
    assert machine.uses[0].room.state is ReceiverState.COMPLETE
    result = machine.uses[0].room.result
    assert result is not None
    assert result.pages == 3
    assert result.nbytes == 3 * sum(
        machine.layout.item_bytes(spec.component) * len(spec.layer_ids) for spec in machine.layout.components
    )
    assert {rank.pp: dict(data) for rank, data in result.metadata.items()} == {0: {"stage": 0}, 1: {"stage": 1}}
    machine.teardown()
