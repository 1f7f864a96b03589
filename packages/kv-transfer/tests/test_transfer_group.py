"""Several decode ranks read one request: pages are free when all of them have it."""

from __future__ import annotations

from collections.abc import Iterator

import kv_planner as kp
import numpy as np
import pytest
from transfer_image import Image, side
from transfer_pair import FAST, HeldEngine

import kv_transfer as kt
from kv_transfer.engines.loopback import LoopbackEngine

LAYOUT = kp.ModelLayout(
    [kp.ComponentSpec(kind, layer_ids=[0, 1], dtype="uint8", total_heads=2, dims=3) for kind in ("key", "value")],
    page_size=2,
    fingerprint="read by two",
)


class Readers:
    """One prefill rank with an engine that finishes when told, and two tensor-parallel decode ranks."""

    def __init__(self) -> None:
        self.prefill = Image(LAYOUT, [0, 1]).fill()
        self.decode = side(LAYOUT, 2, 1, 2)
        self.engines = [LoopbackEngine(), LoopbackEngine()]
        self.held = [HeldEngine(), HeldEngine()]
        self.receivers = [
            kt.Receiver(own.manifest, engine, prefill_ranks=1, timeouts=FAST)
            for own, engine in zip(self.decode, self.engines, strict=True)
        ]
        self.senders = [
            kt.Sender(self.prefill.manifest, held, endpoint=own.endpoint, timeouts=FAST)
            for own, held in zip(self.receivers, self.held, strict=True)
        ]
        for sender, receiver in zip(self.senders, self.receivers, strict=True):
            sender.connect()
            receiver.wait_ready()
        self.group = kt.SenderGroup(self.senders)

    def close(self) -> None:
        for held in self.held:
            held.go.set()
        for sender, receiver in zip(self.senders, self.receivers, strict=True):
            sender.close()
            receiver.close()
        for engine in (*self.engines, *self.held):
            engine.close()


@pytest.fixture
def readers() -> Iterator[Readers]:
    made = Readers()
    yield made
    made.close()


def test_pages_are_free_when_the_last_reader_has_them(readers: Readers) -> None:
    sessions = [receiver.open(0, [4, 2]) for receiver in readers.receivers]
    group = readers.group.open(0)
    group.send([7, 9], start=0)
    group.finish(wait=False)
    assert [own.pages_released for own in group.sessions] == [False, False]
    readers.held[0].go.set()
    sessions[0].wait(60)
    assert sessions[1].poll() is None
    assert [group.pages_released, *(own.pages_released for own in group.sessions)] == [False, True, False]
    readers.held[1].go.set()
    sessions[1].wait(60)
    group.wait(60)
    assert group.pages_released
    for own in readers.decode:
        assert own.faults(own.expected({4: 7, 2: 9})) == []


def test_each_reader_skips_the_prefix_that_it_has(readers: Readers) -> None:
    for engine in readers.held:
        engine.go.set()
    sessions = [
        readers.receivers[0].open(0, [5], tokens=6, first_page=2),
        readers.receivers[1].open(0, [4, 2], tokens=6, first_page=1),
    ]
    group = readers.group.open(0)
    assert group.first_page == 1
    group.send([7, 9], start=1)
    group.finish()
    for session in sessions:
        session.wait(60)
    assert readers.decode[0].faults(readers.decode[0].expected({5: 9})) == []
    assert readers.decode[1].faults(readers.decode[1].expected({4: 7, 2: 9})) == []


def test_chunks_that_one_reader_has_already_go_to_the_other(readers: Readers) -> None:
    """Chunks of one page, of which two lie before the first page of a reader."""
    for engine in readers.held:
        engine.go.set()
    sessions = [
        readers.receivers[0].open(0, [5], tokens=6, first_page=2),
        readers.receivers[1].open(0, [6, 4, 2], tokens=6),
    ]
    group = readers.group.open(0)
    for start, page in enumerate([7, 9, 3]):
        group.send([page], start=start)
    group.finish()
    assert [session.wait(60).pages for session in sessions] == [1, 3]
    assert readers.decode[0].faults(readers.decode[0].expected({5: 3})) == []
    assert readers.decode[1].faults(readers.decode[1].expected({6: 7, 4: 9, 2: 3})) == []


def test_a_reader_that_has_all_pages_is_sent_none(readers: Readers) -> None:
    for engine in readers.held:
        engine.go.set()
    sessions = [
        readers.receivers[0].open(0, [], tokens=4, first_page=2),
        readers.receivers[1].open(0, [4, 2], tokens=4),
    ]
    group = readers.group.open(0)
    group.send([7, 9], start=0)
    group.finish({"first_token": 5})
    assert [session.wait(60).pages for session in sessions] == [0, 2]
    assert readers.decode[0].faults({}) == []


def test_one_reader_that_gives_up_ends_the_room_for_all(readers: Readers) -> None:
    sessions = [receiver.open(0, [4]) for receiver in readers.receivers]
    group = readers.group.open(0)
    group.send([7], start=0)
    sessions[1].abort("out of memory")
    for engine in readers.held:
        engine.go.set()
    with pytest.raises(kt.TransferAborted, match="out of memory"):
        group.finish()
        group.wait(60)
    assert isinstance(group.error, kt.TransferError)
    assert all(session.wait_released(60) for session in sessions)
    assert group.pages_released


def test_a_room_that_one_reader_does_not_open_is_aborted_at_the_others(readers: Readers) -> None:
    session = readers.receivers[0].open(0, [4])
    with pytest.raises(kt.TransferTimeout, match="offered no pages"):
        readers.group.open(0, timeout=0.2)
    with pytest.raises(kt.TransferAborted, match="another decode rank cannot be served"):
        session.wait(60)


def test_a_group_is_of_one_rank() -> None:
    with pytest.raises(ValueError, match="expected those of one prefill rank, got none"):
        kt.SenderGroup([])


@pytest.mark.parametrize("start", [-1, None, "0", 0.0, True, [0], {}, {"main": None}, {"main": -1}])
def test_a_start_is_a_whole_number(readers: Readers, start: object) -> None:
    """One page of the two would lie at the place of the other."""
    for engine in readers.held:
        engine.go.set()
    sessions = [receiver.open(0, [4, 2]) for receiver in readers.receivers]
    group = readers.group.open(0)
    for call in (group.send, group.sessions[0].send):
        with pytest.raises(kt.ArgumentError, match="start: "):
            call([7, 9], start=start)  # type: ignore[arg-type]
    group.send([7, 9], start=np.int64(0))
    group.finish()
    for session, own in zip(sessions, readers.decode, strict=True):
        session.wait(60)
        assert own.faults(own.expected({4: 7, 2: 9})) == []


def test_what_one_reader_still_needs_keeps_all_rooms_open(readers: Readers) -> None:
    for engine in readers.held:
        engine.go.set()
    sessions = [
        readers.receivers[0].open(0, [5], tokens=4, first_page=1),
        readers.receivers[1].open(0, [4, 2], tokens=4),
    ]
    group = readers.group.open(0)
    group.send([9], start=1)
    with pytest.raises(kt.CoverageError, match="page 0 of the request was never sent"):
        group.finish()
    assert [own.state for own in group.sessions] == [kt.SenderState.SENDING] * 2
    group.send([7], start=0)
    group.finish()
    for session in sessions:
        session.wait(60)
    for own, places in zip(readers.decode, ({5: 9}, {4: 7, 2: 9}), strict=True):
        assert own.faults(own.expected(places)) == []


def test_a_chunk_that_one_reader_refuses_is_sent_to_none(readers: Readers) -> None:
    for engine in readers.held:
        engine.go.set()
    sessions = [
        readers.receivers[0].open(0, [5], tokens=4, first_page=1),
        readers.receivers[1].open(0, [4, 2], tokens=4),
    ]
    group = readers.group.open(0)
    group.send([7], start=0)
    with pytest.raises(kt.CoverageError, match="page 0 of the request was sent already"):
        group.send([7, 9], start=0)
    group.send([9], start=1)
    group.finish()
    for session in sessions:
        session.wait(60)
