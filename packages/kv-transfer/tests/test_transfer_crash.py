"""An endpoint whose thread ends by an error: everybody is told, and no page is called free that is still written."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator

import kv_planner as kp
import pytest
from transfer_memory import make_layout, stages, whole
from transfer_pair import FAST, Hardware, HeldEngine, Pair, eventually, held_engine

import kv_transfer as kt
from kv_transfer import receiver_core, sender_core
from kv_transfer.engine import Blocks, TransferHandle, TransferStatus
from kv_transfer.engines.loopback import LoopbackEngine


class Panic(BaseException):
    """As the panics of Rust libraries: no Exception."""


KINDS: list[type[BaseException]] = [RuntimeError, MemoryError, Panic, SystemExit]
FAULTS: list[type[BaseException]] = [RuntimeError, MemoryError, Panic]


def _raising(kind: type[BaseException]) -> Callable[..., object]:
    def fail(*arguments: object, **options: object) -> object:
        raise kind("broken by the test")

    return fail


@pytest.mark.parametrize(
    ("where", "kind", "lost"),
    [
        ("_advance", RuntimeError, True),
        *(("_advance", kind, False) for kind in KINDS),
        *((where, Panic, False) for where in ("_read", "_flush", "_pause")),
    ],
)
def test_a_broken_sender_holds_the_pages_until_its_engine_let_go(
    layout: kp.ModelLayout, pairs: list[Pair], where: str, kind: type, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the receiver has heard nothing of it for so long that it takes it for lost."""
    timeouts = dataclasses.replace(FAST, peer_lost_after=2) if lost else FAST
    hardware = Pair(stages(layout, 1), whole(layout), Hardware, timeouts)
    pairs.append(hardware)
    sender, engine = hardware.senders[0], hardware.engines[0]
    assert isinstance(engine, Hardware)
    session = hardware.receiver.open(1, [3])
    sending = sender.open(1)
    sending.send([1], start=0)
    assert eventually(lambda: len(engine.begun) > 0)
    monkeypatch.setattr(sender, where, _raising(kind))
    with pytest.raises(kt.SessionStateError, match="its thread ended by an error"):
        sending.wait(60)
    with pytest.raises(kt.SessionStateError, match="broken by the test"):
        sender.open(2, timeout=60)
    assert not lost or eventually(lambda: not hardware.receiver.is_ready)
    assert session.wait_released(0.3) is False
    assert not sending.pages_released
    assert engine.begun
    engine.run(1000)
    assert session.wait_released(60)
    with pytest.raises(kt.TransferError):
        session.wait(60)
    assert eventually(lambda: sending.pages_released)
    hardware.decode.wipe([3])
    engine.run(1000)
    assert hardware.decode.faults({}) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_receiver_tells_everybody(two_stages: Pair, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = two_stages.receiver
    session = receiver.open(0, [1], timeout=600)
    told: list[BaseException] = []

    def wait() -> None:
        try:
            session.wait()
        except kt.TransferError as error:
            told.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    monkeypatch.setattr(receiver, "_advance", _raising(kind))
    waiting.join(60)
    assert not waiting.is_alive()
    calls: list[Callable[[], object]] = [
        lambda: receiver.is_ready,
        lambda: receiver.wait_ready(600),
        lambda: receiver.open(1, [2]),
        lambda: session.wait(600),
        lambda: session.wait_released(600),
        session.poll,
    ]
    for call in calls:
        with pytest.raises(kt.SessionStateError, match=r"its thread ended by an error: .*broken by the test") as caught:
            call()
        assert isinstance(caught.value.__cause__, kind)
    assert isinstance(told[0], kt.SessionStateError)
    assert not session.pages_released
    for sender in two_stages.senders:
        with pytest.raises((kt.PeerLost, kt.TransferAborted)):
            sender.open(0, timeout=60).wait(60)


def test_what_was_complete_before_the_crash_stays_complete(two_stages: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    session = two_stages.receiver.open(0, [1])
    for sender in two_stages.senders:
        sending = sender.open(0)
        sending.send([2], start=0)
        sending.finish()
    session.wait(60)
    monkeypatch.setattr(two_stages.receiver, "_advance", _raising(Panic))
    assert eventually(lambda: two_stages.receiver._crash is not None)
    assert session.wait(60).pages == 1
    assert session.wait_released(60)


def test_a_broken_sender_can_connect_again(two_stages: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = two_stages.senders[0]
    with monkeypatch.context() as broken:
        broken.setattr(sender, "_advance", _raising(Panic))
        with pytest.raises(kt.SessionStateError, match="ended by an error"):
            sender.open(0, timeout=60)
    sender.connect()
    two_stages.receiver.wait_ready(60)
    session = two_stages.receiver.open(0, [1])
    for each in two_stages.senders:
        each.wait_ready(60)
        sending = each.open(0)
        sending.send([2], start=0)
        sending.finish()
    session.wait(60)
    assert two_stages.decode.faults({1: 2}) == []


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("by_receiver", [True, False])
def test_an_engine_that_takes_no_cancel_is_waited_for(
    layout: kp.ModelLayout, pairs: list[Pair], kind: type, by_receiver: bool
) -> None:
    class Engine(HeldEngine):
        def cancel(self, handle: TransferHandle) -> None:
            raise kind("no such handle")

    pair = Pair(stages(layout, 1), whole(layout), Engine)
    pairs.append(pair)
    session = pair.receiver.open(1, [3])
    sending = pair.senders[0].open(1)
    sending.send([1], start=0)
    assert eventually(lambda: held_engine(pair).begun > 0)
    (session if by_receiver else sending).abort("the client left")
    assert session.wait_released(0.3) is False
    held_engine(pair).go.set()
    assert session.wait_released(60)
    after = pair.receiver.open(2, [4])
    sending = pair.senders[0].open(2)
    sending.send([2], start=0)
    sending.finish()
    assert after.wait(60).pages == 1


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("call", ["submit", "poll"])
def test_an_engine_that_breaks_ends_its_room_only(
    layout: kp.ModelLayout, pairs: list[Pair], kind: type, call: str
) -> None:
    class Engine(LoopbackEngine):
        broken = True

        def submit(self, peer: str, batch: Blocks) -> TransferHandle:
            if self.broken and call == "submit":
                raise kind("the library broke")
            return super().submit(peer, batch)

        def poll(self, handle: TransferHandle) -> TransferStatus:
            if self.broken:
                raise kind("the library broke")
            return super().poll(handle)

    pair = Pair(stages(layout, 1), whole(layout), Engine)
    pairs.append(pair)
    session = pair.receiver.open(1, [3])
    sending = pair.senders[0].open(1)
    sending.send([1], start=0)
    with pytest.raises(kt.TransferFailed, match="the library broke"):
        sending.wait(60)
    assert session.wait_released(60)
    engine = pair.engines[0]
    assert isinstance(engine, Engine)
    engine.broken = False
    after = pair.receiver.open(2, [4])
    sending = pair.senders[0].open(2)
    sending.send([2], start=0)
    sending.finish()
    assert after.wait(60).pages == 1


def test_an_engine_that_answers_nonsense_ends_its_room_only(layout: kp.ModelLayout, pairs: list[Pair]) -> None:
    class Engine(LoopbackEngine):
        def poll(self, handle: TransferHandle) -> TransferStatus:
            return None  # type: ignore[return-value]

    pair = Pair(stages(layout, 1), whole(layout), Engine)
    pairs.append(pair)
    session = pair.receiver.open(1, [3])
    sending = pair.senders[0].open(1)
    sending.send([1], start=0)
    with pytest.raises(kt.TransferFailed, match="expected a TransferStatus, got None"):
        sending.wait(60)
    assert session.wait_released(60)
    assert pair.receiver.is_ready


@pytest.fixture
def ends() -> Iterator[tuple[kt.Receiver, kt.Sender]]:
    layout = make_layout()
    engines = LoopbackEngine(), LoopbackEngine()
    with (
        kt.Receiver(whole(layout).manifest, engines[0], prefill_ranks=1, timeouts=FAST) as receiver,
        kt.Sender(stages(layout, 1)[0].manifest, engines[1], endpoint=receiver.endpoint, timeouts=FAST) as sender,
    ):
        yield receiver, sender
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("name", ["parse_groups", "agree_pair"])
@pytest.mark.parametrize("side", [receiver_core, sender_core])
def test_words_that_break_their_reader_end_one_conversation(
    ends: tuple[kt.Receiver, kt.Sender], side: object, name: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, sender = ends
    with monkeypatch.context() as broken:
        broken.setattr(side, name, _raising(kind))
        with pytest.raises(kt.PeerRefused, match=r"broke its reader.*broken by the test") as caught:
            sender.connect()
        assert caught.value.code == "malformed"
        with pytest.raises(kt.PeerRefused, match="broke its reader"):
            receiver.wait_ready(60)
    sender.connect()
    receiver.wait_ready(60)
    assert receiver.is_ready
