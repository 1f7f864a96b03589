"""Random schedules over the cores, by hypothesis and by seeded dice: nothing is lost, nothing is reused too early."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from hypothesis import settings
from transfer_machine import ROOMS, STAGES, Transfers

from kv_transfer.states import ReceiverState

SCHEDULES = 60

TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


def _random_step(machine: Transfers, dice: random.Random) -> None:
    stage, room = dice.randrange(STAGES), dice.randrange(ROOMS)
    steps: list[tuple[int, Callable[[], object]]] = [
        (8, lambda: machine.work_everywhere(room, dice.randint(1, 3), dice.randint(0, 4))),
        (8, lambda: machine.work(stage, room, dice.randint(1, 3), dice.randint(0, 4))),
        (6, lambda: machine.open_at_receiver(room, dice.randint(0, 3))),
        (4, lambda: machine.hardware_runs(dice.randint(1, 6))),
        (4, lambda: machine.step(stage, dice.randint(0, 4))),
        (4, lambda: machine.deliver(stage, dice.random() < 0.5, dice.randint(1, 5))),
        (3, lambda: machine.abort_at_receiver(room)),
        (1, lambda: machine.abort_at_sender(stage, room)),
        (1, lambda: machine.reject_at_sender(stage, room)),
        (2, lambda: machine.time_passes(dice.choice([0.1, 0.5, 0.9]), dice.randint(1, 3))),
        (1, lambda: machine.stall(stage)),
        (1, lambda: machine.crash(stage, 5)),
        (1, machine.settle),
    ]
    dice.choices([step for _, step in steps], [weight for weight, _ in steps])[0]()
    if any(not peer.alive or peer.core.is_over for peer in machine.peers) and dice.random() < 0.2:
        machine.restart()
    machine.free_pages_are_untouched()
    machine.no_page_is_lost()


def test_random_schedules_lose_nothing() -> None:
    """More and longer schedules than hypothesis draws; the seeds are fixed, and each kind of end must have occurred."""
    ends: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        dice = random.Random(seed)
        machine = Transfers()
        for _ in range(60):
            _random_step(machine, dice)
        machine.teardown()
        ends.update(type(use.room.error).__name__ for use in machine.uses)
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
