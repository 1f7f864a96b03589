"""Rooms that end badly: both sides learn why, once and in time, and pages stay held as long as somebody may write."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import kv_planner as kp
import pytest
from transfer_memory import stages, whole
from transfer_pair import Pair, eventually, held_engine

import kv_transfer as kt
from kv_transfer.engine import TransferHandle, TransferStatus
from kv_transfer.engines.loopback import LoopbackEngine


def test_receiver_aborts_and_holds_the_pages_until_the_writer_stopped(held: Pair) -> None:
    engine = held_engine(held)
    session = held.receiver.open(0, [3])
    sending = held.senders[0].open(0)
    sending.send([1], start=0)
    assert eventually(lambda: engine.begun > 0)
    session.abort("client went away")
    with pytest.raises(kt.TransferAborted, match="client went away"):
        session.wait(60)
    assert eventually(lambda: sending.state is kt.SenderState.ABORTING)
    assert not session.pages_released
    assert session.writing == (kt.Rank(),)
    with pytest.raises(kt.SessionStateError, match="still aborting"):
        held.receiver.open(0, [4])
    assert held.receiver.open(1, [4]).state is kt.ReceiverState.OPEN
    assert not session.wait_released(0.2)
    engine.go.set()
    assert session.wait_released(60)
    assert session.state is kt.ReceiverState.ABORTED
    assert sending.state is kt.SenderState.ABORTED
    with pytest.raises(kt.TransferAborted, match=r"aborted by the receiver: .*client went away"):
        sending.finish()
    assert held.receiver.open(0, [3]).generation == 3


def test_sender_aborts_and_the_receiver_learns_the_reason(two_stages: Pair) -> None:
    session = two_stages.receiver.open(0, [3, 4])
    first, second = (sender.open(0) for sender in two_stages.senders)
    first.send([1], start=0)
    first.abort("284937 tokens are more than 284928")
    with pytest.raises(kt.TransferAborted, match=r"prefill rank pp0 tp0: .*284937 tokens") as caught:
        session.wait(60)
    assert caught.value.by == "pp0 tp0"
    with pytest.raises(kt.TransferAborted, match="aborted by the receiver"):
        second.wait(60)
    assert session.wait_released(60)
    first.abort("again")
    session.abort("again")
    assert session.state is kt.ReceiverState.ABORTED


def test_a_room_can_be_rejected_before_and_after_its_offer(two_stages: Pair) -> None:
    first, second = two_stages.senders
    second.wait_ready()
    second.reject(8, "too long")
    session = two_stages.receiver.open(8, [1])
    with pytest.raises(kt.TransferAborted, match="pp1 tp0: too long"):
        session.wait(60)
    assert session.wait_released(60)
    with pytest.raises(kt.TransferAborted, match="too long"):
        first.open(8, timeout=60)


def test_a_receiver_rejects_a_room_that_it_will_never_offer(two_stages: Pair) -> None:
    first, second = two_stages.senders
    waited: list[BaseException] = []

    def wait() -> None:
        try:
            first.open(8, timeout=100)
        except kt.TransferAborted as error:
            waited.append(error)

    for sender in two_stages.senders:
        sender.wait_ready()
    thread = threading.Thread(target=wait)
    thread.start()
    two_stages.receiver.reject(8, "the request was given up")
    thread.join(60)
    assert not thread.is_alive()
    assert len(waited) == 1 and "given up" in str(waited[0])
    with pytest.raises(kt.TransferAborted, match="given up"):  # it came before this rank asked
        second.open(8, timeout=60)
    session = two_stages.receiver.open(8, [1])  # the number is free at once, and an old reject does not stick
    opened = [sender.open(8, timeout=60) for sender in two_stages.senders]
    with pytest.raises(kt.SessionStateError, match="abort its session"):
        two_stages.receiver.reject(8, "too late")
    for sending in opened:
        sending.send([1], start=0)
        sending.finish(wait=False)
    assert session.wait(60).pages == 1
    assert all(sender._core is not None and sender._core.late_messages == 0 for sender in two_stages.senders)


def test_abort_before_the_sender_opened_is_told_at_once(two_stages: Pair) -> None:
    for sender in two_stages.senders:
        sender.wait_ready()
    session = two_stages.receiver.open(6, [1])
    session.abort("changed my mind")
    assert session.wait_released(60)
    started = time.monotonic()
    with pytest.raises(kt.TransferAborted, match="changed my mind"):
        two_stages.senders[0].open(6, timeout=100)
    assert time.monotonic() - started < 50, "it waited for an offer"


def test_timeouts_name_what_was_awaited(two_stages: Pair) -> None:
    with pytest.raises(kt.TransferTimeout, match=r"room 9: the receiver offered no pages within 0\.1 s"):
        two_stages.senders[0].open(9, timeout=0.1)
    with pytest.raises(kt.TransferTimeout, match="the room goes on"):
        two_stages.receiver.open(8, [2], timeout=60).wait(0.05)
    session = two_stages.receiver.open(9, [1], timeout=0.3)
    with pytest.raises(kt.TransferTimeout, match=r"pp0 tp0, pp1 tp0 were not done within 0\.3 s"):
        session.wait(60)
    assert session.wait_released(60)
    assert isinstance(session.error, TimeoutError)


def test_a_sender_without_progress_gives_up(layout: kp.ModelLayout, pairs: list[Pair]) -> None:
    quick = kt.Timeouts(transfer=0.3, heartbeat_interval=0.05, peer_lost_after=30)
    pair = Pair(stages(layout, 1), whole(layout), timeouts=quick)
    pairs.append(pair)
    session = pair.receiver.open(0, [1], timeout=60)
    sending = pair.senders[0].open(0)
    with pytest.raises(kt.TransferTimeout, match="no progress while sending"):
        sending.wait(60)
    with pytest.raises(kt.TransferAborted, match="no progress while sending"):
        session.wait(60)


def test_an_engine_failure_ends_one_room_and_no_other(layout: kp.ModelLayout, pairs: list[Pair]) -> None:
    class Fragile(LoopbackEngine):
        fail_next = False

        def poll(self, handle: TransferHandle) -> TransferStatus:
            if self.fail_next:
                self.fail_next = False
                raise OSError("the link went down")
            return super().poll(handle)

    pair = Pair(stages(layout, 1), whole(layout), Fragile)
    pairs.append(pair)
    engine = pair.engines[0]
    assert isinstance(engine, Fragile)
    session = pair.receiver.open(0, [1])
    sending = pair.senders[0].open(0)
    engine.fail_next = True
    sending.send([2], start=0)
    with pytest.raises(kt.TransferFailed, match="the link went down"):
        sending.wait(60)
    with pytest.raises(kt.TransferAborted, match="the link went down"):
        session.wait(60)
    assert session.wait_released(60)
    again = pair.receiver.open(0, [1])
    sending = pair.senders[0].open(0)
    sending.send([2], start=0)
    sending.finish()
    assert again.wait(60).pages == 1


def test_memory_that_was_unregistered_fails_the_room(two_stages: Pair) -> None:
    session = two_stages.receiver.open(0, [1])
    two_stages.receiver_engine.close()
    sending = two_stages.senders[0].open(0)
    sending.send([2], start=0)
    with pytest.raises(kt.TransferFailed, match="no engine with session"):
        sending.wait(60)
    with pytest.raises(kt.TransferAborted, match="no engine with session"):
        session.wait(60)
    assert two_stages.decode.faults({}) == []


def test_closing_the_receiver_ends_senders_and_leaves_no_thread(layout: kp.ModelLayout) -> None:
    before = set(threading.enumerate())
    pair = Pair(stages(layout, 1), whole(layout))
    session = pair.receiver.open(0, [1])
    sending = pair.senders[0].open(0)
    pair.receiver.close()
    with pytest.raises(kt.TransferAborted, match="receiver was closed"):
        session.wait(60)
    assert session.pages_released
    with pytest.raises(kt.TransferError, match="closed"):
        sending.wait(60)
    assert eventually(lambda: _raises(kt.PeerLost, lambda: pair.senders[0].open(1, timeout=0)))
    with pytest.raises(kt.TransferAborted, match="closed"):
        pair.receiver.open(1, [1])
    pair.close()
    pair.close()
    with pytest.raises(kt.SessionStateError, match="closed"):
        pair.senders[0].connect()
    assert eventually(lambda: set(threading.enumerate()) <= before)


def test_closing_a_sender_ends_its_rooms_only_when_the_engine_let_go(held: Pair) -> None:
    engine = held_engine(held)
    session = held.receiver.open(0, [3])
    sending = held.senders[0].open(0)
    sending.send([1], start=0)
    assert eventually(lambda: engine.begun > 0)
    closing = threading.Thread(target=held.senders[0].close)
    closing.start()
    assert eventually(lambda: sending.state is kt.SenderState.ABORTING)
    assert not session.wait_released(0.2)
    engine.go.set()
    with pytest.raises(kt.TransferAborted, match="the sender was closed"):
        session.wait(60)
    assert session.wait_released(60)
    closing.join(60)
    assert not closing.is_alive()
    with pytest.raises(kt.PeerLost, match="pp0 tp0 is lost"):
        assert eventually(lambda: not held.receiver.is_ready)
        held.receiver.open(1, [1])


def _raises(kind: type[Exception], call: Callable[[], object]) -> bool:
    try:
        call()
    except kind:
        return True
    except kt.TransferError:
        return False
    return False
