"""Refusals before anything happened: held pages, arguments, memory, and handshakes that would fail in every room."""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
from collections.abc import Callable

import kv_planner as kp
import numpy as np
import pytest
from transfer_memory import Owned, RankMemory, make_layout, stages, whole
from transfer_pair import FAST, Pair, eventually, held_engine

import kv_transfer as kt
from kv_transfer.engines.loopback import LoopbackEngine
from kv_transfer.page_holds import PageHolds, Thing
from kv_transfer.regions import register_manifests

ONE_LAYER: Owned = {("key", "target"): [0], ("value", "target"): [0]}


def test_pages_of_an_open_room_are_offered_to_no_other(two_stages: Pair) -> None:
    receiver = two_stages.receiver
    first = receiver.open(1, [4, 7])
    for pages in ([4, 7], [7], [2, 3, 4]):
        with pytest.raises(kt.PageHeld, match=r"is held by room 1 \(generation 1\).*room 2") as caught:
            receiver.open(2, pages)
        assert caught.value.page in (4, 7)
        assert caught.value.holder == first._room.name
    assert isinstance(caught.value, kt.SessionStateError)
    second = receiver.open(2, [2, 3])
    for sender in two_stages.senders:
        for room, pages in ((1, [5, 6]), (2, [8, 9])):
            sending = sender.open(room)
            sending.send(pages, start=0)
            sending.finish()
    first.wait(60)
    second.wait(60)
    assert receiver.open(3, [7, 2]).state is kt.ReceiverState.OPEN


def test_pages_that_a_writer_still_holds_are_offered_to_no_room(held: Pair) -> None:
    session = held.receiver.open(1, [4, 7])
    sending = held.senders[0].open(1)
    sending.send([1, 2], start=0)
    assert eventually(lambda: held_engine(held).begun > 0)
    assert not session.failed_pages
    session.abort("the client left")
    assert session.failed_pages == {"main": (4, 7)}
    with pytest.raises(kt.PageHeld, match="page 7 is held by room 1"):
        held.receiver.open(2, [7])
    held_engine(held).go.set()
    assert session.wait_released(60)
    assert held.receiver.open(2, [7]).state is kt.ReceiverState.OPEN


def test_holds_are_those_of_a_plain_model() -> None:
    def things(pages: list[int]) -> list[Thing]:
        return [("main", "page", page) for page in pages]

    dice = random.Random(3)
    holds, rooms = PageHolds(), dict[str, list[int]]()
    for step in range(600):
        if rooms and dice.random() < 0.4:
            holds.give(things(rooms.pop(dice.choice(sorted(rooms)))))
            continue
        pages = dice.sample(range(1, 12), dice.randrange(4))
        taken = {page: room for room, held in rooms.items() for page in held}
        if any(page in taken for page in pages):
            with pytest.raises(kt.PageHeld) as caught:
                holds.take(f"room {step}", things(pages))
            assert taken[caught.value.page] == caught.value.holder
        else:
            holds.take(f"room {step}", things(pages))
            rooms[f"room {step}"] = pages


@pytest.mark.parametrize("room", [-1, 1.5, True, np.True_, 2**63, "1", None, np.float64(1)])
def test_a_room_is_a_whole_number(two_stages: Pair, room: int) -> None:
    for call in (
        lambda: two_stages.receiver.open(room, [1]),
        lambda: two_stages.senders[0].open(room, timeout=0),
    ):
        with pytest.raises(kt.ArgumentError, match=r"room: expected a whole number from 0 to \d+, got"):
            call()
    assert two_stages.receiver.open(np.int64(3), [1]).room == 3


@pytest.mark.parametrize("value", [-1, 1.5, True, "4", 2**64])
@pytest.mark.parametrize("name", ["tokens", "first_page"])
def test_tokens_and_first_page_are_whole_numbers(two_stages: Pair, name: str, value: int) -> None:
    with pytest.raises(kt.ArgumentError, match=f"{name}: expected a whole number"):
        two_stages.receiver.open(1, [1], **{name: value})
    two_stages.receiver.open(1, [1])


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, True, "1"])
def test_a_time_out_is_a_time(two_stages: Pair, seconds: float) -> None:
    receiver, sender = two_stages.receiver, two_stages.senders[0]
    receiver.open(2, [2])
    session, sending = receiver.open(1, [1]), sender.open(2)
    lonely = kt.Sender(two_stages.prefill[0].manifest, two_stages.engines[0], endpoint="tcp://127.0.0.1:1")
    calls: list[Callable[[], object]] = [
        lambda: receiver.open(3, [3], timeout=seconds),
        lambda: receiver.wait_ready(seconds),
        lambda: session.wait(seconds),
        lambda: session.wait_released(seconds),
        lambda: sender.open(3, timeout=seconds),
        lambda: sender.wait_ready(seconds),
        lambda: sending.wait(seconds),
        lambda: lonely.connect(seconds),
    ]
    for call in calls:
        with pytest.raises(kt.ArgumentError, match="timeout: expected a finite number of seconds"):
            call()
    assert lonely._thread is None
    lonely.close()


@pytest.mark.parametrize("kind", [kt.EngineError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("accepted", [0, 1, 3])
@pytest.mark.parametrize("stubborn", [False, True])
def test_memory_that_is_refused_in_part_is_not_registered(
    kind: type[BaseException], accepted: int, stubborn: bool
) -> None:
    class Engine(LoopbackEngine):
        left: set[int]

        def register(self, address: int, nbytes: int) -> None:
            if len(self.left) == accepted:
                raise kind("no more memory")
            self.left.add(address)
            super().register(address, nbytes)

        def unregister(self, address: int) -> None:
            self.left.discard(address)
            super().unregister(address)
            if stubborn:
                raise RuntimeError("told twice")

    engine = Engine()
    engine.left = set()
    with pytest.raises(kind, match="no more memory"):
        register_manifests(engine, [whole(make_layout()).manifest])
    assert engine.left == set()
    engine.close()


def _open_things() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("reason", ["hello too large", "no endpoint", "no thread", "nobody there"])
def test_a_connect_that_fails_leaves_nothing_open(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LoopbackEngine()
    limits, layers = (kt.Limits(message_bytes=1 << 16), 200) if reason == "hello too large" else (None, 4)
    endpoint = "tcp://no host:5000" if reason == "no endpoint" else "tcp://127.0.0.1:1"
    memory = stages(make_layout(layers=layers), 1)[0]
    sender = kt.Sender(memory.manifest, engine, endpoint=endpoint, timeouts=FAST, limits=limits)
    if reason == "no thread":

        def refuse(*arguments: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr("threading.Thread.start", refuse)
    before = _open_things()
    kept = []
    for _ in range(3):
        with pytest.raises((kt.MessageTooLarge, ValueError, RuntimeError, kt.TransferTimeout)) as caught:
            sender.connect(0.05)
        assert not isinstance(caught.value, kt.SessionStateError)
        kept.append(caught.value)
    assert eventually(lambda: _open_things() == before)
    monkeypatch.undo()
    sender.close()
    engine.close()


def test_each_data_parallel_group_has_receivers_of_its_own() -> None:
    layout = make_layout(layers=1)
    engines = LoopbackEngine(), LoopbackEngine()
    for group in (1, 2):
        memory = RankMemory(layout, ONE_LAYER, placement=kp.Placement(dp_rank=group, dp_size=3)).fill()
        decode = RankMemory(layout, ONE_LAYER, placement=kp.Placement(dp_rank=3, dp_size=4))
        with (
            kt.Receiver(decode.manifest, engines[0], prefill_ranks=1, prefill_dp_rank=1, timeouts=FAST) as receiver,
            kt.Sender(memory.manifest, engines[1], endpoint=receiver.endpoint, timeouts=FAST) as sender,
        ):
            if group == 2:
                with pytest.raises(kt.PeerRefused, match=r"dp_rank: rank pp0 tp0 dp2 is of .* group 2 of 3") as caught:
                    sender.connect()
                assert caught.value.code == "deployment"
                with pytest.raises(kt.PeerRefused, match="this receiver serves group 1"):
                    receiver.wait_ready(60)
                continue
            sender.connect()
            receiver.wait_ready(60)
            session, sending = receiver.open(0, [3]), sender.open(0)
            sending.send([8], start=0)
            sending.finish()
            assert list(session.wait(60).metadata) == [kt.Rank(dp=1)]
            assert decode.faults({3: 8}) == []
    for engine in engines:
        engine.close()


def _replicas(ranges: list[tuple[int, int]]) -> tuple[list[RankMemory], RankMemory]:
    layout = make_layout(layers=1)
    prefill = [
        RankMemory(
            layout, ONE_LAYER, placement=kp.Placement(tp_rank=rank, tp_size=len(ranges)), head_range=heads
        ).fill()
        for rank, heads in enumerate(ranges)
    ]
    return prefill, whole(layout)


@pytest.mark.parametrize("ranges", [[(0, 1)] * 3 + [(1, 2)], [(0, 1)] * 5 + [(1, 2)]])
def test_ranks_that_misjudge_what_they_send_are_refused_before_a_room(ranges: list[tuple[int, int]]) -> None:
    prefill, decode = _replicas(ranges)
    engines = [LoopbackEngine() for _ in range(len(prefill) + 1)]
    receiver = kt.Receiver(decode.manifest, engines[-1], prefill_ranks=len(prefill), timeouts=FAST)
    senders = [
        kt.Sender(memory.manifest, engine, endpoint=receiver.endpoint, timeouts=FAST)
        for memory, engine in zip(prefill, engines, strict=False)
    ]
    refused = []
    for sender in senders:
        with contextlib.suppress(kt.PeerRefused):  # the last one may hear of it before connect() returns
            sender.connect()
    for sender in senders:
        try:
            sender.wait_ready(60)
        except kt.PeerRefused as error:
            refused.append(error)
    assert refused
    assert {difference.field.split(" that rank ")[0] for difference in refused[0].differences} == {
        "layers",
        "bytes per page",
    }
    assert all(difference.local != difference.remote for difference in refused[0].differences)
    assert eventually(lambda: not receiver.is_ready)
    assert any("disagree about what the rank sends" in str(error) for error in receiver.take_refusals())
    with pytest.raises(kt.PeerLost, match="is lost: it refused"):
        receiver.open(0, [1])
    for sender in senders:
        sender.close()
    receiver.close()
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 1), (0, 1), (1, 2), (1, 2)],
        [(0, 1), (1, 2), (0, 1), (1, 2)],
        [(0, 2)],
        [(0, 1), (1, 2)],
    ],
)
def test_replicas_that_judge_right_or_send_nothing_serve(ranges: list[tuple[int, int]], pairs: list[Pair]) -> None:
    prefill, decode = _replicas(ranges)
    pair = Pair(prefill, decode)
    pairs.append(pair)
    session = pair.receiver.open(1, [1, 2])
    for sender in pair.senders:
        sender.wait_ready(60)
        sending = sender.open(1)
        sending.send([3, 4], start=0)
        sending.finish()
    session.wait(60)
    assert decode.faults({1: 3, 2: 4}) == []


@pytest.mark.parametrize(("heads", "size"), [(3, 2), (3, 4), (2, 3)])
def test_heads_that_do_not_split_over_the_ranks_are_refused_when_an_end_is_made(heads: int, size: int) -> None:
    layout = make_layout(layers=1, heads=heads)
    placement = kp.Placement(tp_rank=1, tp_size=size)
    memory = RankMemory(layout, ONE_LAYER, placement=placement, head_range=(1, 2))
    engine = LoopbackEngine()
    for make in (
        lambda: kt.Receiver(memory.manifest, engine, prefill_ranks=1),
        lambda: kt.Sender(memory.manifest, engine, endpoint="tcp://127.0.0.1:1"),
    ):
        with pytest.raises(kt.UnsupportedLayout, match=rf"target key: total_heads: {heads} against {size}") as caught:
            make()
        assert isinstance(caught.value.__cause__, kp.HeadsDoNotSplit)
    engine.register(memory.manifest.entries[0].address, memory.manifest.entries[0].nbytes)  # nothing was registered
    engine.close()


_ENDS: list[tuple[str, object]] = [
    ("manifest", None),
    ("manifest", {"main": None}),
    ("windows", ["main"]),
    ("aux", 5),
    ("aux", ["first_token"]),
    ("timeouts", 5),
    ("limits", {}),
    ("secret", b"sixteen letters or more"),
]


@pytest.mark.parametrize(("name", "value"), _ENDS)
@pytest.mark.parametrize("end", ["Receiver", "Sender", "PrefillEnd", "DecodeEnd"])
def test_an_argument_of_another_kind_is_named_before_anything_is_registered(end: str, name: str, value: object) -> None:
    engine, directory, before = LoopbackEngine(), kt.Directory(), set(threading.enumerate())
    options: dict[str, object] = {"manifest": whole(make_layout()).manifest, "engine": engine}
    if end == "Receiver":
        options["prefill_ranks"] = 1
    elif end == "Sender":
        options["endpoint"] = "tcp://127.0.0.1:7"
    else:
        options["directory"] = directory
    with pytest.raises(kt.ArgumentError, match=name):
        getattr(kt, end)(**{**options, name: value})
    assert (len(engine._regions), directory.members("prefill"), set(threading.enumerate()) - before) == (0, (), set())
    with pytest.raises(ValueError, match="parts: expected some of"):
        getattr(kt, end)(**options, parts=None)
    with pytest.raises(kt.EngineError, match="does not satisfy TransferEngine"):
        getattr(kt, end)(**{**options, "engine": None})


@pytest.mark.parametrize("bind", [5, None, "tcp://127.0.0.1:99999", "tcp://127.0.0.1", "nonsense"])
def test_an_address_that_is_none_leaves_no_memory_registered(bind: str) -> None:
    """ZeroMQ takes port 99999 for 34463."""
    engine = LoopbackEngine()
    with pytest.raises(ValueError, match="bind: "):
        kt.Receiver(whole(make_layout()).manifest, engine, prefill_ranks=1, bind=bind)
    with pytest.raises(ValueError, match="bind: "):
        kt.DirectoryServer(bind=bind)
    assert len(engine._regions) == 0


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:99999"])
def test_an_endpoint_without_a_port_that_there_is_is_refused(endpoint: str) -> None:
    with pytest.raises(kt.ArgumentError, match=r"endpoint: .* port from 1 to 65535"):
        kt.DirectoryClient(endpoint)


@pytest.mark.parametrize("ranks", [0, 1.5, "1", None, True])
def test_prefill_ranks_are_counted(ranks: int) -> None:
    with pytest.raises(kt.ArgumentError, match="prefill_ranks: expected "):
        kt.Receiver(whole(make_layout()).manifest, LoopbackEngine(), prefill_ranks=ranks)


def test_lists_and_mappings_are_asked_for_by_name(two_stages: Pair) -> None:
    receiver, sender = two_stages.receiver, two_stages.senders[0]
    receiver.open(1, [1])
    sending = sender.open(1)
    calls: list[tuple[str, Callable[..., object], tuple[object, ...], dict[str, object]]] = [
        ("layer_ids: expected a list", sending.send, ([1],), {"start": 0, "layer_ids": 5}),
        ("parts: expected a list", sending.send, ([1],), {"start": 0, "parts": "target"}),
        ("source_pages: expected a 1-D", sending.send, ([[1], [1, 2]],), {"start": 0}),
        ("source_pages: expected a 1-D", sending.send, ([True],), {"start": 0}),
        ("destination_pages: expected a 1-D", receiver.open, (2, [1.5]), {}),
        ("first_page: expected a whole", receiver.open, (2, [2]), {"first_page": [1]}),
        ("room: expected a whole", sender.reject, ("2", "no"), {}),
    ]
    for text, call, arguments, options in calls:
        with pytest.raises(kt.ArgumentError, match=text):
            call(*arguments, **options)
    sending.send([1], start=0)
    for name in ("metadata", "rows"):
        with pytest.raises(kt.ArgumentError, match=f"{name}: expected Mapping"):
            sending.finish(**{name: 5})  # type: ignore[arg-type]
    assert receiver.open(2, {}, tokens=0).pages_released is False
    sending.finish({}, wait=False)
