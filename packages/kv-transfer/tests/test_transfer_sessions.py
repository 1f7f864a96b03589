"""Rooms between real senders and receivers in one process: ZeroMQ on loopback, the loopback engine, labelled bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import kv_planner as kp
import numpy as np
import pytest
from transfer_memory import RankMemory, make_layout, stages, whole

import kv_transfer as kt
from kv_transfer.engine import Blocks, TransferHandle, TransferStatus
from kv_transfer.engines.loopback import LoopbackEngine

FAST = kt.Timeouts(
    handshake=10,
    offer=5,
    transfer=20,
    heartbeat_interval=0.05,
    peer_lost_after=1.0,
    dead_writer_grace=0.2,
    drain=2,
)


class HeldEngine(LoopbackEngine):
    """Begins a batch and finishes it when told: a library whose running call cannot be cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.begun = 0

    def submit(self, peer: str, batch: Blocks) -> TransferHandle:
        self.begun += 1
        return super().submit(peer, batch)

    def poll(self, handle: TransferHandle) -> TransferStatus:
        return super().poll(handle) if self.go.is_set() else handle.status

    def cancel(self, handle: TransferHandle) -> None:
        return


class Pair:
    """Prefill stages and one decode rank, ready."""

    def __init__(
        self,
        prefill: list[RankMemory],
        decode: RankMemory,
        engine: Callable[[], LoopbackEngine] = LoopbackEngine,
        timeouts: kt.Timeouts = FAST,
        limits: kt.Limits | None = None,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.engines = [engine() for _ in range(len(prefill))]
        self.receiver_engine = LoopbackEngine()
        self.receiver = kt.Receiver(
            decode.manifest, self.receiver_engine, prefill_ranks=len(prefill), timeouts=timeouts, limits=limits
        )
        self.senders = [
            kt.Sender(memory.manifest, used, endpoint=self.receiver.endpoint, timeouts=timeouts, limits=limits)
            for memory, used in zip(prefill, self.engines, strict=True)
        ]
        for sender in self.senders:
            sender.connect()
        self.receiver.wait_ready()

    def close(self) -> None:
        for engine in self.engines:
            if isinstance(engine, HeldEngine):
                engine.go.set()
        for sender in self.senders:
            sender.close()
        self.receiver.close()
        for engine in (*self.engines, self.receiver_engine):
            engine.close()


@pytest.fixture
def layout() -> kp.ModelLayout:
    return make_layout()


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


@pytest.fixture
def two_stages(layout: kp.ModelLayout, pairs: list[Pair]) -> Pair:
    pairs.append(Pair(stages(layout, 2), whole(layout)))
    return pairs[0]


@pytest.fixture
def held(layout: kp.ModelLayout, pairs: list[Pair]) -> Pair:
    pairs.append(Pair(stages(layout, 1), whole(layout), HeldEngine))
    return pairs[0]


def held_engine(pair: Pair) -> HeldEngine:
    engine = pair.engines[0]
    assert isinstance(engine, HeldEngine)
    return engine


def eventually(what: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.005)
    return False


def test_two_stages_chunked_and_permuted(two_stages: Pair) -> None:
    pair = two_stages
    session = pair.receiver.open(0, np.array([7, 2, 9, 4, 11]), tokens=18)
    sources = [[3, 8, 1, 5, 2], [6, 1, 9, 4, 15]]
    for stage, sender in enumerate(pair.senders):
        sending = sender.open(0)
        assert (sending.pages, sending.tokens, sending.generation) == (5, 18, session.generation)
        sending.send(np.array(sources[stage][:2], np.int32), start=0)
        sending.send(np.array(sources[stage][2:], np.int64), start=2)
        assert session.poll() is None
        sending.finish({"stage": stage, "token": 42})
        assert sending.state is kt.SenderState.FINISHED
    result = session.wait(5)
    assert session.state is kt.ReceiverState.COMPLETE
    assert session.pages_released
    for stage, memory in enumerate(pair.prefill):
        for name in memory.names:
            for page, source in zip([7, 2, 9, 4, 11], sources[stage], strict=True):
                assert (pair.decode.buffer(name)[page] == memory.page_labels(name, source)).all()
    same = dict.fromkeys([1, 3, 5, 6, 8, 10, 12, 13, 14, 15, 0])
    for name in pair.decode.names:
        assert (pair.decode.buffer(name)[sorted(same)] == 0xEE).all()
    assert result.metadata == {
        kt.Rank(pp=0): {"stage": 0, "token": 42},
        kt.Rank(pp=1): {"stage": 1, "token": 42},
    }
    assert result.nbytes == 5 * sum(
        pair.decode.layout.item_bytes(spec.component) * len(spec.layer_ids) for spec in pair.decode.layout.components
    )
    assert (result.pages, result.tokens, result.room) == (5, 18, 0)


def test_same_pages_everywhere_touch_nothing_else(two_stages: Pair) -> None:
    session = two_stages.receiver.open(5, [3, 1])
    for sender in two_stages.senders:
        sending = sender.open(5)
        sending.send([9, 12], start=0)
        sending.finish()
    session.wait(5)
    assert two_stages.decode.faults({3: 9, 1: 12}) == []


def test_layer_by_layer_with_a_draft_on_the_last_stage(pairs: list[Pair]) -> None:
    layout = make_layout(draft=1)
    pair = Pair(stages(layout, 2), whole(layout))
    pairs.append(pair)
    session = pair.receiver.open(1, [4, 5, 6])
    first, second = (sender.open(1) for sender in pair.senders)
    for layer in (1, 0):
        first.send([1, 2, 3], start=0, layer_ids=[layer])
    second.send([1, 2, 3], start=0, parts=["target"])
    with pytest.raises(kt.CoverageError, match="draft layer 4, page 0 of the request was never sent"):
        second.finish()
    with pytest.raises(ValueError, match="layer_ids: \\[0\\] are not on this rank's route"):
        second.send([1], start=0, layer_ids=[0])
    with pytest.raises(ValueError, match="parts"):
        first.send([1], start=0, parts=["draft"])
    second.send([1, 2, 3], start=0, parts=["draft"])
    first.finish()
    second.finish()
    session.wait(5)
    assert pair.decode.faults({4: 1, 5: 2, 6: 3}) == []


def test_a_page_sent_twice_or_past_the_end_is_refused_and_the_room_goes_on(two_stages: Pair) -> None:
    session = two_stages.receiver.open(2, [5, 6, 7])
    first, second = (sender.open(2) for sender in two_stages.senders)
    first.send([1, 2], start=0)
    with pytest.raises(kt.CoverageError, match="target layer 0, page 1 of the request was sent already") as caught:
        first.send([2, 3], start=1)
    assert caught.value.cells[0] == ("target", 0, 1)
    with pytest.raises(kt.CoverageError, match="the receiver offers 3"):
        first.send([3, 4], start=2)
    with pytest.raises(kt.CoverageError, match="page 2 of the request was never sent"):
        first.finish()
    with pytest.raises(kp.ReservedPage):
        first.send([0], start=2)
    with pytest.raises(kp.PageOutOfRange):
        first.send([16], start=2)
    with pytest.raises(kt.ProtocolError, match="metadata"):
        first.send([3], start=2)
        first.finish({"bytes": b"x"})  # type: ignore[dict-item]
    first.finish({"ok": True})
    with pytest.raises(kt.SessionStateError, match="send after finish"):
        first.send([3], start=2)
    second.send([1, 2, 3], start=0)
    second.finish()
    session.wait(5)
    assert two_stages.decode.faults({5: 1, 6: 2, 7: 3}) == []


def test_an_empty_request_completes(two_stages: Pair) -> None:
    session = two_stages.receiver.open(3, [], tokens=0)
    for sender in two_stages.senders:
        sender.open(3).finish({"cached": True})
    assert session.wait(5).nbytes == 0


def test_wrong_destination_pages_are_refused_at_once(two_stages: Pair) -> None:
    with pytest.raises(kp.ReservedPage):
        two_stages.receiver.open(0, [0, 1])
    with pytest.raises(kp.DuplicateDestination):
        two_stages.receiver.open(0, [1, 1])
    with pytest.raises(ValueError, match="page 16 is outside the pool of 16 pages"):
        two_stages.receiver.open(0, [16])
    with pytest.raises(ValueError, match="9 tokens need 3 pages of 4, got 2"):
        two_stages.receiver.open(0, [1, 2], tokens=9)
    with pytest.raises(ValueError, match="room"):
        two_stages.receiver.open(-1, [1])


def test_ranks_that_send_nothing_are_told(pairs: list[Pair]) -> None:
    """Decode holds one layer of two only, as a stage of its own side: the other prefill stage has nothing for it."""
    layout = make_layout(layers=2)
    decode = RankMemory(
        layout, {("key", "target"): [1], ("value", "target"): [1]}, placement=kp.Placement(pp_rank=1, pp_size=2)
    )
    pair = Pair(stages(layout, 2), decode)
    pairs.append(pair)
    for sender in pair.senders:
        sender.wait_ready()
    assert [sender.sends_nothing for sender in pair.senders] == [True, False]
    session = pair.receiver.open(4, [2])
    idle = pair.senders[0].open(4)
    idle.send([3], start=0)
    idle.finish({"nobody": "reads this"})
    assert idle.state is kt.SenderState.FINISHED
    assert session.poll() is None
    sending = pair.senders[1].open(4)
    sending.send([3], start=0)
    sending.finish({"token": 1})
    assert session.wait(5).metadata == {kt.Rank(pp=1): {"token": 1}}
    assert decode.faults({2: 3}) == []


def test_tensor_parallel_prefill_fans_in(pairs: list[Pair]) -> None:
    layout = make_layout(heads=4)
    ids = list(range(4))
    prefill = [
        RankMemory(
            layout,
            {("key", "target"): ids, ("value", "target"): ids},
            placement=kp.Placement(tp_rank=rank, tp_size=2),
            head_range=(2 * rank, 2 * rank + 2),
        ).fill()
        for rank in range(2)
    ]
    pair = Pair(prefill, whole(layout))
    pairs.append(pair)
    session = pair.receiver.open(0, [5, 2])
    for sender in pair.senders:
        sending = sender.open(0)
        sending.send([7, 1], start=0)
        sending.finish()
    session.wait(5)
    assert pair.decode.faults({5: 7, 2: 1}) == []


def test_receiver_aborts_and_holds_the_pages_until_the_writer_stopped(held: Pair) -> None:
    engine = held_engine(held)
    session = held.receiver.open(0, [3])
    sending = held.senders[0].open(0)
    sending.send([1], start=0)
    assert eventually(lambda: engine.begun > 0)
    session.abort("client went away")
    with pytest.raises(kt.TransferAborted, match="client went away"):
        session.wait(5)
    assert eventually(lambda: sending.state is kt.SenderState.ABORTING)
    assert not session.pages_released
    assert session.writing == (kt.Rank(),)
    with pytest.raises(kt.SessionStateError, match="still aborting"):
        held.receiver.open(0, [4])
    assert held.receiver.open(1, [4]).state is kt.ReceiverState.OPEN
    assert not session.wait_released(0.2)
    engine.go.set()
    assert session.wait_released(5)
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
        session.wait(5)
    assert caught.value.by == "pp0 tp0"
    with pytest.raises(kt.TransferAborted, match="aborted by the receiver"):
        second.wait(5)
    assert session.wait_released(5)
    first.abort("again")
    session.abort("again")
    assert session.state is kt.ReceiverState.ABORTED


def test_a_room_can_be_rejected_before_and_after_its_offer(two_stages: Pair) -> None:
    first, second = two_stages.senders
    second.wait_ready()
    second.reject(8, "too long")
    session = two_stages.receiver.open(8, [1])
    with pytest.raises(kt.TransferAborted, match="pp1 tp0: too long"):
        session.wait(5)
    assert session.wait_released(5)
    with pytest.raises(kt.TransferAborted, match="too long"):
        first.open(8, timeout=5)


def test_abort_before_the_sender_opened_is_told_at_once(two_stages: Pair) -> None:
    for sender in two_stages.senders:
        sender.wait_ready()
    session = two_stages.receiver.open(6, [1])
    session.abort("changed my mind")
    assert session.wait_released(5)
    started = time.monotonic()
    with pytest.raises(kt.TransferAborted, match="changed my mind"):
        two_stages.senders[0].open(6, timeout=5)
    assert time.monotonic() - started < 1


def test_timeouts_name_what_was_awaited(two_stages: Pair) -> None:
    with pytest.raises(kt.TransferTimeout, match=r"room 9: the receiver offered no pages within 0\.1 s"):
        two_stages.senders[0].open(9, timeout=0.1)
    session = two_stages.receiver.open(9, [1], timeout=0.3)
    with pytest.raises(kt.TransferTimeout, match="the room goes on"):
        session.wait(0.05)
    with pytest.raises(kt.TransferTimeout, match=r"pp0 tp0, pp1 tp0 were not done within 0\.3 s"):
        session.wait(5)
    assert session.wait_released(5)
    assert isinstance(session.error, TimeoutError)


def test_a_sender_without_progress_gives_up(layout: kp.ModelLayout, pairs: list[Pair]) -> None:
    quick = kt.Timeouts(transfer=0.3, heartbeat_interval=0.05, peer_lost_after=2)
    pair = Pair(stages(layout, 1), whole(layout), timeouts=quick)
    pairs.append(pair)
    session = pair.receiver.open(0, [1], timeout=10)
    sending = pair.senders[0].open(0)
    with pytest.raises(kt.TransferTimeout, match="no progress while sending"):
        sending.wait(5)
    with pytest.raises(kt.TransferAborted, match="no progress while sending"):
        session.wait(5)


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
        sending.wait(5)
    with pytest.raises(kt.TransferAborted, match="the link went down"):
        session.wait(5)
    assert session.wait_released(5)
    again = pair.receiver.open(0, [1])
    sending = pair.senders[0].open(0)
    sending.send([2], start=0)
    sending.finish()
    assert again.wait(5).pages == 1


def test_memory_that_was_unregistered_fails_the_room(two_stages: Pair) -> None:
    session = two_stages.receiver.open(0, [1])
    two_stages.receiver_engine.close()
    sending = two_stages.senders[0].open(0)
    sending.send([2], start=0)
    with pytest.raises(kt.TransferFailed, match="no engine with session"):
        sending.wait(5)
    with pytest.raises(kt.TransferAborted, match="no engine with session"):
        session.wait(5)
    assert two_stages.decode.faults({}) == []


def test_many_rooms_from_many_threads(layout: kp.ModelLayout, pairs: list[Pair]) -> None:
    pair = Pair(stages(layout, 2, pages=40), whole(layout, pages=40))
    pairs.append(pair)
    rooms = range(24)
    sessions = {room: pair.receiver.open(room, [1 + room]) for room in rooms}
    faults: list[BaseException] = []

    def serve(sender: kt.Sender, mine: range) -> None:
        try:
            for room in mine:
                sending = sender.open(room)
                sending.send([39 - room], start=0)
                sending.finish({"room": room})
        except BaseException as error:
            faults.append(error)
            raise

    threads = [
        threading.Thread(target=serve, args=(sender, rooms[part::2])) for sender in pair.senders for part in range(2)
    ]
    for thread in threads:
        thread.start()
    for room, session in sessions.items():
        assert set(map(str, session.wait(10).metadata.values())) == {str({"room": room})}
    for thread in threads:
        thread.join(10)
    assert faults == []
    assert pair.decode.faults({1 + room: 39 - room for room in rooms}) == []


def test_closing_the_receiver_ends_senders_and_leaves_no_thread(layout: kp.ModelLayout) -> None:
    before = threading.active_count()
    pair = Pair(stages(layout, 1), whole(layout))
    session = pair.receiver.open(0, [1])
    sending = pair.senders[0].open(0)
    pair.receiver.close()
    with pytest.raises(kt.TransferAborted, match="receiver was closed"):
        session.wait(5)
    assert session.pages_released
    with pytest.raises(kt.TransferError, match="closed"):
        sending.wait(5)
    assert eventually(lambda: _raises(kt.PeerLost, lambda: pair.senders[0].open(1, timeout=0)))
    with pytest.raises(kt.TransferAborted, match="closed"):
        pair.receiver.open(1, [1])
    pair.close()
    pair.close()
    with pytest.raises(kt.SessionStateError, match="closed"):
        pair.senders[0].connect()
    assert eventually(lambda: threading.active_count() == before)


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
        session.wait(5)
    assert session.wait_released(5)
    closing.join(5)
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
