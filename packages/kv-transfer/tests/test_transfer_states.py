"""States with a row a request, resharded over tensor-parallel ranks, and auxiliary rows."""

from __future__ import annotations

from collections.abc import Iterator

import kv_planner as kp
import numpy as np
import pytest
from transfer_image import Image, side
from transfer_pair import FAST, eventually

import kv_transfer as kt
from kv_transfer.engines.loopback import LoopbackEngine

HYBRID = kp.ModelLayout(
    [
        kp.ComponentSpec("key", layer_ids=[1, 3], dtype="uint8", total_heads=2, dims=3),
        kp.ComponentSpec("value", layer_ids=[1, 3], dtype="uint8", total_heads=2, dims=2),
        kp.ComponentSpec(
            "state",
            layer_ids=[0, 2],
            dtype="uint8",
            total_heads=4,
            dims=4,
            item_kind="request_row",
            rows=3,
            groups=[1, 1, 2],
        ),
    ],
    page_size=2,
    fingerprint="hybrid",
)
AUX = [kt.AuxField("first_token", "int64"), kt.AuxField("hidden", "bfloat16", 6)]


class Sides:
    """Prefill ranks connected to every decode rank."""

    def __init__(self, prefill: list[Image], decode: list[Image], aux: list[kt.AuxField] | None = None) -> None:
        self.engines = [LoopbackEngine(blocks_per_poll=3, max_entries_per_batch=4) for _ in (*prefill, *decode)]
        engines = iter(self.engines)
        self.receivers = [
            kt.Receiver(own.manifest, next(engines), prefill_ranks=len(prefill), timeouts=FAST, aux=aux or [])
            for own in decode
        ]
        self.senders = []
        for own in prefill:
            engine = next(engines)
            for receiver in self.receivers:
                sender = kt.Sender(own.manifest, engine, endpoint=receiver.endpoint, timeouts=FAST, aux=aux or [])
                self.senders.append(sender)
                sender.connect()
        for receiver in self.receivers:
            receiver.wait_ready()

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        for receiver in self.receivers:
            receiver.close()
        for engine in self.engines:
            engine.close()


@pytest.fixture
def made() -> Iterator[list[Sides]]:
    sides: list[Sides] = []
    yield sides
    for own in sides:
        own.close()


@pytest.mark.parametrize(("pp", "tp", "tp_decode"), [(1, 1, 1), (2, 2, 1), (1, 1, 4), (2, 4, 2)])
def test_states_arrive_whole_whatever_the_ranks(made: list[Sides], pp: int, tp: int, tp_decode: int) -> None:
    prefill = [own.fill() for own in side(HYBRID, 4, pp, tp)]
    decode = side(HYBRID, 4, 1, tp_decode, padding=3)
    sides = Sides(prefill, decode)
    made.append(sides)
    sessions = [receiver.open(0, [4, 2], tokens=3, row=5) for receiver in sides.receivers]
    for sender in sides.senders:
        sending = sender.open(0)
        sending.send([7, 9], start=0)
        sending.send_states(3)
        sending.finish()
    for session, own in zip(sessions, decode, strict=True):
        result = session.wait(60)
        assert own.faults(own.expected({4: 7, 2: 9}, {5: 3})) == []
        assert result.nbytes == len(own.expected({4: 7, 2: 9}, {5: 3}))


def test_a_room_without_its_states_stays_open(made: list[Sides]) -> None:
    sides = Sides([side(HYBRID, 4, 1, 1)[0].fill()], side(HYBRID, 4, 1, 1))
    made.append(sides)
    session = sides.receivers[0].open(0, [4], row=2)
    sending = sides.senders[0].open(0)
    sending.send([1], start=0)
    with pytest.raises(kt.CoverageError, match="target layer 0"):
        sending.finish()
    sending.send_states(1, layer_ids=[2])
    with pytest.raises(kt.CoverageError, match="target layer 2"):
        sending.send_states(1)
    with pytest.raises(kp.PlanError):
        sending.send_states(99, layer_ids=[0])
    sending.send_states(1, layer_ids=[0])
    sending.finish()
    assert session.wait(60).pages == 1


def test_a_row_is_given_where_there_are_states_and_held_as_pages_are(made: list[Sides]) -> None:
    sides = Sides([side(HYBRID, 4, 1, 1)[0].fill()], side(HYBRID, 4, 1, 1))
    made.append(sides)
    receiver = sides.receivers[0]
    with pytest.raises(kt.ArgumentError, match="row: the layout has components with a row a request, got None"):
        receiver.open(0, [4])
    with pytest.raises(kt.ArgumentError, match="row: expected a whole number from 0 to 11"):
        receiver.open(0, [4], row=12)
    with pytest.raises(kp.PlanError):
        receiver.open(0, [4], row=0)
    session = receiver.open(0, [4], row=2)
    with pytest.raises(kt.PageHeld, match="destination_row: row 2 is held by room 0") as caught:
        receiver.open(1, [5], row=2)
    assert caught.value.page == 2
    session.abort("enough")
    assert eventually(lambda: session.pages_released)
    assert receiver.open(1, [5], row=2).state is kt.ReceiverState.OPEN
    plain = Image(kp.ModelLayout(HYBRID.components[:2], page_size=2, fingerprint="m"), [1, 3])
    lone = Sides([plain], [Image(plain.manifest.layout, [1, 3])])
    made.append(lone)
    with pytest.raises(kt.ArgumentError, match="row: the layout has no component with a row a request, got 3"):
        lone.receivers[0].open(0, [4], row=3)


def test_auxiliary_rows_come_from_the_rank_that_has_them(made: list[Sides]) -> None:
    sides = Sides([own.fill() for own in side(HYBRID, 4, 2, 1)], side(HYBRID, 4, 1, 1), AUX)
    made.append(sides)
    session = sides.receivers[0].open(0, [4], row=2)
    rows = {"first_token": np.array([151643]), "hidden": np.arange(6, dtype=np.uint16)}
    for stage, sender in enumerate(sides.senders):
        sending = sender.open(0)
        sending.send([1], start=0)
        sending.send_states(1)
        for wrong in ({"hidden": rows["hidden"]}, {**rows, "hidden": b"short"}, {**rows, "more": b""}):
            with pytest.raises(kt.ArgumentError, match="rows"):
                sending.finish(rows=wrong)
        sending.finish(rows=rows if stage == 1 else None)
    result = session.wait(60)
    assert {name: data for name, data in result.rows.items()} == {name: row.tobytes() for name, row in rows.items()}


def test_a_room_whose_rows_nobody_brings_fails(made: list[Sides]) -> None:
    sides = Sides([own.fill() for own in side(HYBRID, 4, 2, 1)], side(HYBRID, 4, 1, 1), AUX)
    made.append(sides)
    session = sides.receivers[0].open(0, [4], row=2)
    for sender in sides.senders:
        sending = sender.open(0)
        sending.send([1], start=0)
        sending.send_states(1)
        sending.finish(wait=False)
    with pytest.raises(kt.ProtocolError, match=r"none brought first_token: int64\[1\], hidden: bfloat16\[6\]"):
        session.wait(60)


def test_a_draft_of_another_width_is_refused_at_the_handshake() -> None:
    image, engines = Image(HYBRID, range(4)), (LoopbackEngine(), LoopbackEngine())
    with (
        kt.Receiver(image.manifest, engines[0], prefill_ranks=1, aux=AUX, timeouts=FAST) as receiver,
        kt.Sender(
            image.manifest,
            engines[1],
            endpoint=receiver.endpoint,
            aux=[kt.AuxField("hidden", "bfloat16", 8)],
            timeouts=FAST,
        ) as sender,
        pytest.raises(kt.PeerRefused) as caught,
    ):
        sender.connect()
    found = {difference.field: (difference.local, difference.remote) for difference in caught.value.differences}
    assert found == {
        "aux.first_token": ("none", "first_token: int64[1]"),
        "aux.hidden": ("hidden: bfloat16[8]", "hidden: bfloat16[6]"),
    }
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("fields", [[AUX[0], kt.AuxField("first_token", "int32")]])
def test_rows_have_one_name_each(fields: list[kt.AuxField]) -> None:
    engine = LoopbackEngine()
    with pytest.raises(kt.ArgumentError, match="not unique"):
        kt.Receiver(Image(HYBRID, range(4)).manifest, engine, prefill_ranks=1, aux=fields)
    with pytest.raises(kt.ArgumentError, match="aux"):
        kt.AuxField("hidden", "float99", 3)  # type: ignore[arg-type]
    with pytest.raises(kt.ArgumentError, match="aux"):
        kt.AuxField("hidden", "float32", 0)
    engine.close()
