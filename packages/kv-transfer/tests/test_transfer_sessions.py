"""Rooms that arrive: every byte where it belongs, and refusals that leave a room as it was."""

from __future__ import annotations

import threading

import kv_planner as kp
import numpy as np
import pytest
from transfer_memory import RankMemory, make_layout, stages, whole
from transfer_pair import Pair

import kv_transfer as kt


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
    result = session.wait(60)
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
    session.wait(60)
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
    session.wait(60)
    assert pair.decode.faults({4: 1, 5: 2, 6: 3}) == []


def test_a_page_sent_twice_or_past_the_end_is_refused_and_the_room_goes_on(two_stages: Pair) -> None:
    session = two_stages.receiver.open(2, [5, 6, 7])
    first, second = (sender.open(2) for sender in two_stages.senders)
    first.send([1, 2], start=0)
    with pytest.raises(kt.CoverageError, match="target layer 0, page 1 of the request was sent already") as caught:
        first.send([2, 3], start=1)
    assert caught.value.cells[0] == ("target", 0, 1)
    with pytest.raises(kt.CoverageError, match=r"the receiver offers pages \[0, 3\)"):
        first.send([3, 4], start=2)
    with pytest.raises(kt.CoverageError, match="page 2 of the request was never sent"):
        first.finish()
    with pytest.raises(kp.ReservedPage):
        first.send([0], start=2)
    with pytest.raises(ValueError, match="source_pages: expected a 1-D"):
        first.send(3, start=2)
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
    session.wait(60)
    assert two_stages.decode.faults({5: 1, 6: 2, 7: 3}) == []


def test_an_empty_request_completes(two_stages: Pair) -> None:
    session = two_stages.receiver.open(3, [], tokens=0)
    for sender in two_stages.senders:
        sender.open(3).finish({"cached": True})
    assert session.wait(60).nbytes == 0


def test_pages_behind_a_prefix_hit_travel_with_their_index(two_stages: Pair) -> None:
    """11 tokens on 3 pages; decode holds the first page already, the sender counts from the prompt's first page."""
    session = two_stages.receiver.open(3, [6, 4], tokens=11, first_page=1)
    for sender in two_stages.senders:
        sending = sender.open(3)
        assert (sending.first_page, sending.pages, sending.tokens) == (1, 2, 11)
        with pytest.raises(kt.CoverageError, match=r"pages \[0, 2\) of the request, .* offers pages \[1, 3\)"):
            sending.send([8, 9], start=0)
        with pytest.raises(kt.CoverageError, match=r"pages \[2, 4\)"):
            sending.send([8, 9], start=2)
        sending.send([10], start=2)
        with pytest.raises(kt.CoverageError, match="page 2 of the request was sent already"):
            sending.send([10], start=2)
        with pytest.raises(kt.CoverageError, match="page 1 of the request was never sent"):
            sending.finish()
        sending.send([9], start=1)
        sending.finish()
    result = session.wait(60)
    assert (result.pages, result.tokens) == (2, 11)
    assert two_stages.decode.faults({6: 9, 4: 10}) == []


def test_a_prefix_hit_of_the_whole_prompt_needs_no_page(two_stages: Pair) -> None:
    session = two_stages.receiver.open(3, [], tokens=8, first_page=2)
    for sender in two_stages.senders:
        sender.open(3).finish({"cached": True})
    assert session.wait(60).nbytes == 0
    for first_page, text in ((2, "3 pages of 4, got 2 from page 2 on"), (-1, "first_page: expected a whole number")):
        with pytest.raises(ValueError, match=text):
            two_stages.receiver.open(4, [1, 2], tokens=11, first_page=first_page)
    assert two_stages.receiver.open(4, [1, 2], first_page=5)._room.offer.tokens == 28


def test_wrong_destination_pages_are_refused_at_once(two_stages: Pair) -> None:
    with pytest.raises(kp.ReservedPage):
        two_stages.receiver.open(0, [0, 1])
    with pytest.raises(kp.DuplicateDestination):
        two_stages.receiver.open(0, [1, 1])
    with pytest.raises(ValueError, match="page 16 is outside the pool of 16 pages"):
        two_stages.receiver.open(0, [16])
    with pytest.raises(ValueError, match="9 tokens need 3 pages of 4, got 2 from page 0 on"):
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
    assert session.wait(60).metadata == {kt.Rank(pp=1): {"token": 1}}
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
    session.wait(60)
    assert pair.decode.faults({5: 7, 2: 1}) == []


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
        assert set(map(str, session.wait(60).metadata.values())) == {str({"room": room})}
    for thread in threads:
        thread.join(60)
    assert faults == []
    assert pair.decode.faults({1 + room: 39 - room for room in rooms}) == []
