"""Random schedules of the machine by seeded dice, and random words; `nox -s tests` runs a slice, `nox -s soak` all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

from transfer_machine import ROOMS, Transfers
from transfer_world import STAGES

from kv_transfer.errors import ProtocolError
from kv_transfer.messages import Heartbeat, Message, Policy, decode, encode

POLICIES: tuple[Policy, ...] = ("fail", "retry", "recompute")


def _random_step(machine: Transfers, dice: random.Random) -> None:
    stage, room = dice.randrange(STAGES), dice.randrange(ROOMS)
    policy = dice.choice(POLICIES)
    steps: list[tuple[int, Callable[[], object]]] = [
        (8, lambda: machine.work_everywhere(room, dice.randint(1, 3), dice.randint(0, 4), dice.random() < 0.5, policy)),
        (8, lambda: machine.work(stage, room, dice.randint(1, 3), dice.randint(0, 4), dice.random() < 0.5)),
        (6, lambda: machine.open_at_receiver(room, dice.randint(0, 3), dice.randint(0, 1), policy)),
        (2, lambda: machine.compute(stage, room, dice.randrange(3))),
        (1, lambda: machine.batch_fails(stage)),
        (1, lambda: machine.reorder(stage, dice.random() < 0.5, dice.randrange(100))),
        (2, lambda: machine.duplicate(stage, dice.random() < 0.5, dice.randrange(100))),
        (4, lambda: machine.hardware_runs(dice.randint(1, 6))),
        (4, lambda: machine.step(stage, dice.randint(0, 4))),
        (4, lambda: machine.deliver(stage, dice.random() < 0.5, dice.randint(1, 5))),
        (3, lambda: machine.abort_at_receiver(room)),
        (1, lambda: machine.abort_at_sender(stage, room)),
        (1, lambda: machine.reject_at_sender(stage, room)),
        (2, lambda: machine.time_passes(dice.choice([0.1, 0.5, 0.9]), dice.randint(1, 3))),
        (1, lambda: machine.stall(stage)),
        (1, lambda: machine.crash(stage, 5)),
        (1, lambda: machine.receiver_restarts(dice.randrange(10))),
        (1, machine.settle),
    ]
    dice.choices([step for _, step in steps], [weight for weight, _ in steps])[0]()
    if machine.must_restart and dice.random() < 0.2:
        machine.restart()
    machine.free_items_are_untouched()
    machine.nothing_is_lost()


def run_schedules(seeds: Iterable[int]) -> Counter[str]:
    """How the rooms of all schedules ended, by the class of their error; every schedule is checked to its end."""
    ends: Counter[str] = Counter()
    for seed in seeds:
        dice = random.Random(seed)
        machine = Transfers()
        for _ in range(60):
            _random_step(machine, dice)
        machine.teardown()
        ends.update(type(use.room.error).__name__ for use in machine.uses)
    return ends


def run_words(examples: list[Message], count: int, seed: int) -> Counter[str]:
    """Right messages with bytes changed, cut, doubled or moved: each is a message or a named error."""
    dice = random.Random(seed)
    ends: Counter[str] = Counter()
    right = [encode(message) for message in examples]
    for _ in range(count):
        data = bytearray(dice.choice(right))
        for _ in range(dice.choice((1, 1, 1, 2, 5))):
            at = dice.randrange(len(data) + 1)
            kind = dice.randrange(4)
            if kind == 0:
                data[at : at + 1] = bytes([dice.randrange(256)])
            elif kind == 1:
                del data[at : at + dice.randrange(1, 9)]
            elif kind == 2:
                data[at:at] = data[at : at + dice.randrange(1, 9)]
            else:
                data[at : at + 1] = dice.choice(
                    (b"0", b"-1", b"null", b"1e999", b"[", b"}", b'"', b"99999999999999999999")
                )
        try:
            decode(bytes(data))
            ends["messages"] += 1
        except ProtocolError as error:
            assert str(error)
            ends["named errors"] += 1
    assert decode(encode(Heartbeat())) == Heartbeat()
    return ends
