"""Who is let in, who is refused with what text on both sides, and that ranks count once."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import kv_planner as kp
import pytest
import zmq
from transfer_memory import Owned, RankMemory, make_layout, stages, whole
from transfer_pair import FAST

import kv_transfer as kt
from kv_transfer.engines.loopback import LoopbackEngine
from kv_transfer.messages import (
    Aborted,
    Agreed,
    GroupManifest,
    Heartbeat,
    Hello,
    Refusal,
    RefusalCode,
    Welcome,
    decode,
    encode,
)
from kv_transfer.process import process_name


class Desk:
    """Makes receivers and senders, and closes them."""

    def __init__(self) -> None:
        self._open: list[kt.Receiver | kt.Sender | kt.TransferEngine] = []

    def receiver(self, memory: RankMemory, ranks: int, timeouts: kt.Timeouts = FAST) -> kt.Receiver:
        engine = LoopbackEngine()
        receiver = kt.Receiver(memory.manifest, engine, prefill_ranks=ranks, timeouts=timeouts)
        self._open += [engine, receiver]
        return receiver

    def sender(self, memory: RankMemory, receiver: kt.Receiver, engine: kt.TransferEngine | None = None) -> kt.Sender:
        used = engine or LoopbackEngine()
        sender = kt.Sender(memory.manifest, used, endpoint=receiver.endpoint, timeouts=FAST)
        self._open += [used, sender]
        return sender

    def close(self) -> None:
        for thing in reversed(self._open):
            thing.close()


def hello(manifest: str) -> Hello:
    return Hello(
        engine="loopback", session="x", groups={"main": GroupManifest(manifest=manifest)}, process=process_name()
    )


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.close()


def test_page_sizes_64_and_128_are_refused_on_both_sides(desk: Desk) -> None:
    receiver = desk.receiver(whole(make_layout(page_size=128)), 1)
    sender = desk.sender(stages(make_layout(page_size=64), 1)[0], receiver)
    with pytest.raises(kt.PeerRefused, match="page_size: local 64, remote 128") as at_sender:
        sender.connect()
    with pytest.raises(kt.PeerRefused, match="page_size: local 128, remote 64") as at_receiver:
        receiver.wait_ready()
    assert at_sender.value.code == at_receiver.value.code == "layout"
    assert {difference.field for difference in at_sender.value.differences} >= {"page_size"}
    with pytest.raises(kt.PeerRefused):
        sender.open(0)


def test_a_refusal_carries_all_differences(desk: Desk) -> None:
    receiver = desk.receiver(whole(make_layout(key_dims=16, fingerprint="model-b", layers=6)), 1)
    sender = desk.sender(stages(make_layout(), 1)[0], receiver)
    with pytest.raises(kt.PeerRefused) as caught:
        sender.connect()
    fields = " ".join(difference.field for difference in caught.value.differences)
    assert "fingerprint" in fields
    assert len(caught.value.differences) >= 3
    assert all(difference.consequence and difference.remedy for difference in caught.value.differences)


def test_different_engines_are_refused(desk: Desk) -> None:
    class Other(LoopbackEngine):
        @property
        def name(self) -> str:
            return "other"

    receiver = desk.receiver(whole(make_layout()), 1)
    with pytest.raises(kt.PeerRefused, match="local 'loopback', remote 'other'"):
        desk.sender(stages(make_layout(), 1)[0], receiver, Other()).connect()


def test_the_same_rank_twice_does_not_count(desk: Desk) -> None:
    layout = make_layout()
    receiver = desk.receiver(whole(layout), 2)
    memory = stages(layout, 2)[0]
    desk.sender(memory, receiver).connect()
    with pytest.raises(kt.PeerRefused, match="rank pp0 tp0 is connected already"):
        desk.sender(memory, receiver).connect()
    assert receiver.members == (kt.Rank(pp=0),)
    assert receiver.take_refusals()[0].code == "rank-taken"
    with pytest.raises(kt.TransferTimeout, match=r"1 of 2 prefill ranks are there \(pp0 tp0\)"):
        receiver.wait_ready(0.1)
    with pytest.raises(kt.SessionStateError, match="not ready: 1 of 2"):
        receiver.open(0, [1])


def test_a_closed_rank_can_come_back_in_its_place(desk: Desk) -> None:
    layout = make_layout()
    decode = whole(layout)
    receiver = desk.receiver(decode, 2)
    first, second = stages(layout, 2)
    old = desk.sender(first, receiver)
    old.connect()
    other = desk.sender(second, receiver)
    other.connect()
    receiver.wait_ready()
    old.close()
    new = desk.sender(first, receiver)
    new.connect()
    receiver.wait_ready()
    session = receiver.open(0, [2])
    for sender in (new, other):
        sending = sender.open(0)
        sending.send([5], start=0)
        sending.finish()
    session.wait(60)
    assert decode.faults({2: 5}) == []


def test_a_rank_that_died_without_a_word_is_replaced_at_once(desk: Desk) -> None:
    """Its connection is probed before the second one is called a double, so nobody waits for a heartbeat to fail."""
    layout = make_layout()
    patient = kt.Timeouts(handshake=60, heartbeat_interval=30, peer_lost_after=100)
    engine = LoopbackEngine()
    memory = stages(layout, 1)[0]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with kt.Receiver(whole(layout).manifest, engine, prefill_ranks=1, timeouts=patient) as receiver:
        first = context.socket(zmq.DEALER)
        first.connect(receiver.endpoint)
        first.send(encode(hello(memory.manifest.to_json())))
        assert isinstance(decode(first.recv()), Welcome)
        first.send(encode(Agreed()))
        receiver.wait_ready()
        first.close(linger=0)
        context.term()
        desk.sender(memory, receiver).connect()
        receiver.wait_ready()
        assert receiver.members == (kt.Rank(),)
    engine.close()


def test_the_number_of_ranks_must_be_the_same_on_both_sides(desk: Desk) -> None:
    layout = make_layout()
    receiver = desk.receiver(whole(layout), 3)
    with pytest.raises(kt.PeerRefused, match=r"waits for 3 ranks, rank pp0 tp0 says its side has 2"):
        desk.sender(stages(layout, 2)[0], receiver).connect()


def test_a_prefill_side_that_is_not_whole_is_refused_to_all_its_ranks(desk: Desk) -> None:
    layout = make_layout()
    ids: Owned = {("key", "target"): [0, 1], ("value", "target"): [0, 1]}
    receiver = desk.receiver(whole(layout), 2)
    both_the_same_layers = [
        RankMemory(layout, ids, placement=kp.Placement(pp_rank=rank, pp_size=2)) for rank in range(2)
    ]
    senders = [desk.sender(memory, receiver) for memory in both_the_same_layers]
    senders[0].connect()
    with pytest.raises(kt.PeerRefused, match=r"prefill side of ranks pp0 tp0, pp1 tp0 is not whole") as caught:
        senders[1].connect()
        senders[1].wait_ready()
    assert caught.value.code == "deployment"
    with pytest.raises(kt.PeerRefused, match="is not whole"):
        senders[0].wait_ready()
    with pytest.raises(kt.PeerRefused, match="is not whole"):
        receiver.wait_ready()


def test_components_of_single_tokens_are_refused_before_any_handshake() -> None:
    layout = kp.ModelLayout(
        [
            kp.ComponentSpec(
                "state",
                layer_ids=[0],
                dtype="float32",
                total_heads=1,
                dims=4,
                item_kind="token",
            )
        ],
        page_size=4,
        fingerprint="m",
    )
    item = layout.item_bytes("state")
    entry = kp.BufferEntry(
        "state",
        "target",
        0,
        device="cpu",
        address=4096,
        nbytes=item * 4,
        item_stride=item,
        item_bytes=item,
        head_range=(0, 1),
    )
    manifest = kp.RankManifest(layout, kp.Placement(), [entry])
    engine = LoopbackEngine()
    with pytest.raises(kt.UnsupportedLayout, match="'token'"):
        kt.Receiver(manifest, engine, prefill_ranks=1)
    engine.close()


def test_a_taken_port_is_an_error_and_registers_nothing(desk: Desk) -> None:
    memory = whole(make_layout())
    receiver = desk.receiver(memory, 1)
    engine = LoopbackEngine()
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be bound"):
            kt.Receiver(memory.manifest, engine, bind=receiver.endpoint, prefill_ranks=1)
    engine.close()


def test_nobody_there_is_a_timeout_and_can_be_tried_again(desk: Desk) -> None:
    decode = whole(make_layout())
    first = desk.receiver(decode, 1)
    first.close()
    sender = desk.sender(stages(make_layout(), 1)[0], first)
    for _ in range(2):
        with pytest.raises(kt.TransferTimeout, match=r"the receiver did not answer within 0\.2 s"):
            sender.connect(0.2)
    with pytest.raises(kt.SessionStateError, match="closed"):
        sender.open(0)
    engine = LoopbackEngine()
    with kt.Receiver(decode.manifest, engine, bind=first.endpoint, prefill_ranks=1, timeouts=FAST) as second:
        sender.connect()
        second.wait_ready()
        sender.wait_ready()
    engine.close()


def test_strangers_do_no_harm(desk: Desk) -> None:
    """Garbage, words before a hello and another version are answered with a refusal; the next peer is served."""
    layout = make_layout()
    receiver = desk.receiver(whole(layout), 1)
    manifest = stages(layout, 1)[0].manifest.to_json()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for data, code in [
            (b"\x00garbage", RefusalCode.MALFORMED),
            (encode(Heartbeat()), RefusalCode.UNEXPECTED),
            (b'{"v":9,"type":"hello"}', RefusalCode.VERSION),
            (encode(hello("{}")), RefusalCode.MALFORMED),
            (encode(hello(manifest[:-2])), RefusalCode.MALFORMED),
        ]:
            stranger = context.socket(zmq.DEALER)
            stranger.connect(receiver.endpoint)
            stranger.send(data)
            assert stranger.poll(60_000)
            answer = decode(stranger.recv())
            assert isinstance(answer, Refusal)
            assert answer.code is code
            stranger.close(linger=0)
        multipart = context.socket(zmq.DEALER)
        multipart.connect(receiver.endpoint)
        multipart.send_multipart([b"a", b"b", b"c"])
        assert multipart.poll(60_000)
        multipart.close(linger=0)
    finally:
        context.term()
    receiver.take_refusals()
    desk.sender(stages(layout, 1)[0], receiver).connect()
    receiver.wait_ready()


def test_a_member_that_turns_malformed_is_let_go_and_the_others_stay(desk: Desk) -> None:
    layout = make_layout()
    receiver = desk.receiver(whole(layout), 2)
    first, second = stages(layout, 2)
    desk.sender(second, receiver).connect()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        member = context.socket(zmq.DEALER)
        member.connect(receiver.endpoint)
        member.send(encode(hello(first.manifest.to_json())))
        assert isinstance(decode(member.recv()), Welcome)
        member.send(encode(Agreed()))
        receiver.wait_ready()
        session = receiver.open(0, [1])
        member.send(b"{")
        with pytest.raises(kt.PeerLost, match=r"pp0 tp0 is lost: it was refused"):
            session.wait(60)
        assert receiver.members == (kt.Rank(pp=1),)
        assert not session.pages_released
        member.close(linger=0)
        assert session.wait_released(60)
    finally:
        context.term()


def test_a_silent_peer_is_lost_in_time_but_its_pages_are_held(desk: Desk) -> None:
    layout = make_layout()
    receiver = desk.receiver(whole(layout), 1, dataclasses.replace(FAST, peer_lost_after=2))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        member = context.socket(zmq.DEALER)
        member.connect(receiver.endpoint)
        member.send(encode(hello(stages(layout, 1)[0].manifest.to_json())))
        assert isinstance(decode(member.recv()), Welcome)
        member.send(encode(Agreed()))
        receiver.wait_ready()
        session = receiver.open(0, [1])
        with pytest.raises(kt.PeerLost, match="silent for"):
            session.wait(60)
        assert not session.wait_released(0.5)
        member.send(encode(Aborted(room=0, generation=session.generation, reason="woke up")))
        assert session.wait_released(60)
        member.close(linger=0)
    finally:
        context.term()


def test_connect_waits_for_no_other_rank(desk: Desk) -> None:
    layout = make_layout()
    receiver = desk.receiver(whole(layout), 2)
    first, second = (desk.sender(memory, receiver) for memory in stages(layout, 2))
    first.connect()
    with pytest.raises(kt.TransferTimeout, match="not all prefill ranks were there"):
        first.wait_ready(0.05)
    waiting = threading.Thread(target=first.wait_ready)
    waiting.start()
    second.connect()
    waiting.join(60)
    assert not waiting.is_alive()
    with pytest.raises(kt.SessionStateError, match="is connected"):
        first.connect()


def test_the_lower_limit_of_messages_holds_for_both() -> None:
    """What is too long for one end is refused by the other, and the conversation goes on."""
    layout = make_layout(layers=1)
    low, high = kt.Limits(message_bytes=1 << 16), kt.Limits(message_bytes=1 << 20)
    long = {"text": "x" * (1 << 16)}
    for here, there in ((low, high), (high, low)):
        engines = LoopbackEngine(), LoopbackEngine()
        memory, decode = stages(layout, 1)[0], whole(layout, pages=1 << 14)
        with (
            kt.Receiver(decode.manifest, engines[0], prefill_ranks=1, limits=here) as receiver,
            kt.Sender(memory.manifest, engines[1], endpoint=receiver.endpoint, limits=there) as sender,
        ):
            sender.connect()
            receiver.wait_ready(60)
            with pytest.raises(kt.MessageTooLarge, match=r"'offer': .* the limit is 65536"):
                receiver.open(0, range(1, 1 << 14))
            session = receiver.open(0, [1])
            sending = sender.open(0)
            sending.send([1], start=0)
            with pytest.raises(kt.MessageTooLarge, match=r"'done': .* the limit is 65536"):
                sending.finish(long)
            sending.finish()
            assert session.wait(60).pages == 1


def test_a_hello_that_is_too_long_there_is_named() -> None:
    memory, decode = stages(make_layout(layers=200), 1)[0], whole(make_layout())
    with (
        kt.Receiver(
            decode.manifest, LoopbackEngine(), prefill_ranks=1, limits=kt.Limits(message_bytes=1 << 16)
        ) as receiver,
        kt.Sender(memory.manifest, LoopbackEngine(), endpoint=receiver.endpoint) as sender,
        pytest.raises(kt.PeerLost, match=r"a hello of \d+ bytes is not too long there"),
    ):
        sender.connect()
