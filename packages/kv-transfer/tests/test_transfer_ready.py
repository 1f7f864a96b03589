"""Layer-wise sends: a layer is read when it is computed, not before, and the room ends when all are."""

from __future__ import annotations

import dataclasses
import math
import threading
import time

import numpy as np
import pytest
from transfer_memory import make_layout, stages, whole
from transfer_pair import HeldEngine, Pair, eventually

import kv_transfer as kt
from kv_transfer.engine import Blocks
from kv_transfer.loop import POLL_SECONDS

SMALL = kt.Limits(ready_step_bytes=1)


class Guard(kt.LayerMarks):
    """Remembers which layers were asked for, and when each was first told to be there."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[tuple[str, int]] = set()

    def query(self, part: str, layer_id: int) -> bool:
        self.asked.add((part, layer_id))
        return super().query(part, layer_id)  # type: ignore[arg-type]


def test_each_layer_is_read_after_its_mark(pairs: list[Pair]) -> None:
    pair = Pair(stages(make_layout(draft=1), 1), whole(make_layout(draft=1)), limits=SMALL)
    pairs.append(pair)
    session = pair.receiver.open(0, [4, 2])
    prefill, names = pair.prefill[0], pair.prefill[0].names
    right = {name: prefill.buffer(name).copy() for name in names}
    for name in names:
        prefill.buffer(name)[:] = 0x11  # not computed yet: whoever reads it now sends these
    marks = Guard()
    sending = pair.senders[0].open(0)
    sending.send([1], start=0, ready=marks)
    sending.send([5], start=1, ready=marks)
    sending.finish(wait=False)
    order = [("target", 0), ("target", 1), ("target", 2), ("target", 3), ("draft", 4)]
    assert eventually(lambda: marks.asked == set(order))
    for count, (part, layer) in enumerate(order):
        for name in names:
            if name[1:] == (part, layer):
                prefill.buffer(name)[:] = right[name]
                assert (pair.decode.buffer(name)[[4, 2]] == 0xEE).all()
        assert session.poll() is None
        marks.mark(layer, part)  # type: ignore[arg-type]
        here = [name for name in names if name[1:] == (part, layer)]
        assert eventually(
            lambda here=here: all(  # type: ignore[misc]
                np.array_equal(pair.decode.buffer(name)[[4, 2]], right[name][[1, 5]]) for name in here
            )
        ), count
    session.wait(60)
    assert pair.decode.faults({4: 1, 2: 5}) == []


@pytest.mark.parametrize("last", [("target", 0), ("target", 2), ("target", 3), ("draft", 4)])
def test_no_layer_can_be_read_before_all_have_arrived_h14(pairs: list[Pair], last: tuple[str, int]) -> None:
    """Decode has no mark of a layer's own that a branch could forget: pages are its own when the last layer is there.

    All layers but one have arrived, whichever it is: whoever asks for the pages is told who is not done, and no call
    of the session hands them out, as whole or in part.
    """
    pair = Pair(stages(make_layout(draft=1), 1), whole(make_layout(draft=1)), limits=SMALL)
    pairs.append(pair)
    session = pair.receiver.open(0, [4, 2])
    marks, sending = kt.LayerMarks(), pair.senders[0].open(0)
    sending.send([1, 5], start=0, ready=marks)
    sending.finish(wait=False)
    layers = {name[1:] for name in pair.decode.names}
    for part, layer in layers - {last}:
        marks.mark(layer, part)  # type: ignore[arg-type]
    missing = [name for name in pair.decode.names if name[1:] == last]
    assert eventually(lambda: len(pair.decode.faults({4: 1, 2: 5})) == 2 * len(missing))
    assert (session.state, session.poll(), session.error) == (kt.ReceiverState.OPEN, None, None)
    assert not session.pages_released and session.failed_pages == {} and session.writing == (kt.Rank(),)
    assert session.wait_released(0) is False
    with pytest.raises(kt.TransferTimeout, match=r"room 0 \(generation 1\): prefill ranks pp0 tp0 are not done"):
        session.wait(0)
    with pytest.raises(kt.PageHeld, match="page 2 is held by room 0"):
        pair.receiver.open(1, [2])
    public = {name for name in dir(session) if not name.startswith("_")}
    assert public == {
        "abort", "error", "failed_pages", "generation", "pages_released", "poll", "room", "state", "wait",
        "wait_released", "writing",
    }, "a call that tells of single layers needs a guard that refuses a layer before its mark"  # fmt: skip
    marks.mark(last[1], last[0])  # type: ignore[arg-type]
    assert session.wait(5).pages == 2 and session.wait_released(0) is True
    assert pair.decode.faults({4: 1, 2: 5}) == []


def test_a_short_request_goes_in_one_piece(pairs: list[Pair]) -> None:
    pair = Pair(stages(make_layout(), 1), whole(make_layout()))
    pairs.append(pair)
    session = pair.receiver.open(0, [4])
    marks = kt.LayerMarks()
    sending = pair.senders[0].open(0)
    sending.send([1], start=0, ready=marks)
    assert len(sending._room.awaited) == 1
    marks.mark([0, 1, 2])
    time.sleep(0.05)
    assert all((pair.decode.buffer(name)[4] == 0xEE).all() for name in pair.decode.names)
    marks.mark(3)
    sending.finish()
    session.wait(60)
    assert pair.decode.faults({4: 1}) == []


def test_finish_sleeps_until_the_last_layer_is_there(pairs: list[Pair]) -> None:
    pair = Pair(stages(make_layout(), 1), whole(make_layout()), limits=SMALL)
    pairs.append(pair)
    session = pair.receiver.open(0, [4])
    marks = kt.LayerMarks()
    assert isinstance(marks, kt.Ready)
    sending = pair.senders[0].open(0)
    sending.send([1], start=0, ready=marks)
    thread = threading.Thread(target=sending.finish)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    for layer in range(4):
        marks.mark(layer)
    thread.join(60)
    assert not thread.is_alive()
    assert session.wait(60).pages == 1


def test_an_abort_does_not_wait_for_layers(pairs: list[Pair]) -> None:
    pair = Pair(stages(make_layout(), 1), whole(make_layout()), limits=SMALL)
    pairs.append(pair)
    session = pair.receiver.open(0, [4])
    marks = kt.LayerMarks()
    sending = pair.senders[0].open(0)
    sending.send([1], start=0, ready=marks)
    sending.finish(wait=False)
    session.abort("the client left")
    assert session.wait_released(60)
    with pytest.raises(kt.TransferAborted, match="the client left"):
        sending.wait(60)
    marks.mark(range(4))
    time.sleep(0.05)
    assert pair.decode.faults({}) == []


class Silent:
    """A `Ready` that does not say when it changes."""

    def __init__(self) -> None:
        self.marks = kt.LayerMarks()

    def query(self, part: str, layer_id: int) -> bool:
        return self.marks.query(part, layer_id)  # type: ignore[arg-type]

    def wait(self, part: str, layer_id: int, seconds: float) -> bool:
        return self.marks.wait(part, layer_id, seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize("notifies", [True, False])
def test_a_layer_leaves_at_its_mark_whether_or_not_it_is_announced(pairs: list[Pair], notifies: bool) -> None:
    pair = Pair(stages(make_layout(), 1), whole(make_layout()), limits=SMALL)
    pairs.append(pair)
    marks = kt.LayerMarks()
    silent = Silent()
    assert isinstance(marks, kt.NotifyingReady) and not isinstance(silent, kt.NotifyingReady)
    ready: kt.Ready = marks if notifies else silent
    session = pair.receiver.open(0, [4])
    sending = pair.senders[0].open(0)
    sending.send([1], start=0, ready=ready)
    core = pair.senders[0]._core
    assert core is not None
    assert eventually(lambda: core.must_ask is not notifies)
    (marks if notifies else silent.marks).mark(range(4))
    sending.finish()
    session.wait(60)
    assert pair.decode.faults({4: 1}) == []


def test_marks_call_each_subscriber_after_each_change() -> None:
    marks, calls = kt.LayerMarks(), list[str]()

    def one() -> None:
        calls.append("one")

    marks.subscribe(one)
    marks.subscribe(one)
    marks.subscribe(lambda: calls.append(f"{marks.query('target', 3)}"))
    marks.mark(3)
    assert sorted(calls) == ["True", "one"]
    marks.mark([4], "draft")
    assert sorted(calls) == ["True", "True", "one", "one"]


def test_a_ready_that_raises_ends_its_room_only(pairs: list[Pair]) -> None:
    class Broken(kt.LayerMarks):
        def query(self, part: str, layer_id: int) -> bool:
            raise RuntimeError("the event is destroyed")

    pair = Pair(stages(make_layout(), 1), whole(make_layout()))
    pairs.append(pair)
    session = pair.receiver.open(0, [4])
    sending = pair.senders[0].open(0)
    sending.send([1], start=0, ready=Broken())
    with pytest.raises(kt.TransferAborted, match="the event is destroyed"):
        session.wait(60)
    with pytest.raises(kt.TransferFailed, match="the event is destroyed"):
        sending.wait(60)
    second = pair.receiver.open(1, [5])
    other = pair.senders[0].open(1)
    other.send([2], start=0)
    other.finish()
    assert second.wait(60).pages == 1


@pytest.mark.parametrize(
    ("kind", "pause"),
    [
        ({"settles_itself": True, "progress_on_poll": False}, math.inf),
        ({"settles_itself": False, "progress_on_poll": False}, POLL_SECONDS),
        ({"settles_itself": False, "progress_on_poll": True}, 0.0),
    ],
)
def test_a_sender_polls_only_engines_that_need_it(pairs: list[Pair], kind: dict[str, bool], pause: float) -> None:
    class Engine(HeldEngine):
        held: list[kt.TransferHandle]

        @property
        def capabilities(self) -> kt.EngineCapabilities:
            return dataclasses.replace(super().capabilities, **kind)

        def submit(self, peer: str, batch: Blocks) -> kt.TransferHandle:
            handle = super().submit(peer, batch)
            self.held = [handle]
            return handle

    pair = Pair(stages(make_layout(), 1), whole(make_layout()), Engine)
    pairs.append(pair)
    engine, sender = pair.engines[0], pair.senders[0]
    assert isinstance(engine, Engine)
    session = pair.receiver.open(0, [4])
    sending = sender.open(0)
    sending.send([1], start=0)
    sending.finish(wait=False)
    assert eventually(lambda: engine.begun == 1)
    with sender.lock:
        assert sender._advance(time.monotonic()) == pause
    engine.go.set()
    if kind["settles_itself"]:
        engine.poll(engine.held[0])  # as a thread of the library would
    assert session.wait(60).pages == 1
    with sender.lock:
        assert sender._advance(time.monotonic()) == math.inf


def test_marks_are_layer_ids() -> None:
    marks = kt.LayerMarks()
    for wrong in ("1", None, 1.5, -1, ["1"]):
        with pytest.raises(kt.ArgumentError, match="layer_ids: expected a whole number"):
            marks.mark(wrong)  # type: ignore[arg-type]
    marks.mark(np.int64(3))
    marks.mark(range(2))
    assert [layer for layer in range(5) if marks.query("target", layer)] == [0, 1, 3]
