"""Pages that an engine could not move: the end of the room, another try, or a report of tokens to compute."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Literal

import kv_planner as kp
import numpy as np
import pytest
from transfer_image import EMPTY, Image, byte_of, side
from transfer_pair import FAST, eventually

import kv_transfer as kt
from kv_transfer import sender_room
from kv_transfer.engine import Blocks, TransferHandle, TransferState, TransferStatus
from kv_transfer.engines.loopback import LoopbackEngine
from kv_transfer.errors import EngineError
from kv_transfer.groups import Groups
from kv_transfer.messages import GroupOffer, Offer
from kv_transfer.shares import Shares

PAGE = 4
Policy = Literal["fail", "retry", "recompute"]


def layout(*more: kp.ComponentSpec) -> kp.ModelLayout:
    specs = [
        kp.ComponentSpec(kind, layer_ids=[0, 1], dtype="uint8", total_heads=2, dims=3) for kind in ("key", "value")
    ]
    return kp.ModelLayout([*specs, *more], page_size=PAGE, fingerprint="failing")


STATE = kp.ComponentSpec("state", layer_ids=[0], dtype="uint8", total_heads=2, dims=5, item_kind="request_row")


class Failing(LoopbackEngine):
    """Fails with the batches that it is told, counted from 0 over all tries, in one of the ways of engines.

    Batches that are held do not move until they are let go.
    """

    def __init__(self, way: str = "status") -> None:
        super().__init__(max_entries_per_batch=64)
        self.fails: set[int] = set()
        self.way = way
        self.begun = 0
        self.open: set[TransferHandle] = set()
        self.held: set[int] = set()
        self.waiting: dict[TransferHandle, int] = {}
        self.partial = False

    def submit(self, peer: str, batch: Blocks) -> TransferHandle:
        number, self.begun = self.begun, self.begun + 1
        if number in self.fails and self.way == "submit":
            raise EngineError(f"batch {number} is refused by the test")
        handle = super().submit(peer, batch)
        if number in self.fails:
            self.open.add(handle)
        self.waiting[handle] = number
        return handle

    def poll(self, handle: TransferHandle) -> TransferStatus:
        if self.waiting[handle] in self.held:
            return handle.status
        if handle not in self.open:
            return super().poll(handle)
        if self.partial:
            super().poll(handle)  # the bytes are there, and the engine says otherwise
        if self.way == "poll":
            raise EngineError("poll is broken by the test")
        return TransferStatus(TransferState.FAILED, "the wire is cut by the test")

    def cancel(self, handle: TransferHandle) -> None:
        return


class Sides:
    """Prefill ranks with engines that can fail, and one decode rank."""

    def __init__(
        self, policy: Policy, prefill: list[Image], decode: Image, way: str, windows: dict[str, int] | None
    ) -> None:
        self.policy, self.prefill, self.decode = policy, prefill, decode
        self.engines = [Failing(way) for _ in prefill]
        self.here = LoopbackEngine()
        self.receiver = kt.Receiver(
            decode.manifest,
            self.here,
            prefill_ranks=len(prefill),
            timeouts=FAST,
            on_failed_pages=policy,
            windows=windows,
        )
        limits = kt.Limits(batches_in_flight=1)
        self.senders = []
        for own, engine in zip(prefill, self.engines, strict=True):
            own.fill()
            sender = kt.Sender(
                own.manifest,
                engine,
                endpoint=self.receiver.endpoint,
                timeouts=FAST,
                limits=limits,
                windows=windows,
            )
            self.senders.append(sender)
            sender.connect()
        self.receiver.wait_ready()

    def send(self, pages: list[int], row: int | None = None) -> list[kt.SenderSession]:
        """Each page is a chunk, and so a batch of its own."""
        sessions = []
        for sender in self.senders:
            session = sender.open(0)
            sessions.append(session)
            for start, page in enumerate(pages):
                session.send([page], start=start)
            if row is not None:
                session.send_states(row)
            session.finish(wait=False)
        return sessions

    def close(self) -> None:
        ends: list[kt.Sender | kt.Receiver | LoopbackEngine] = [*self.senders, self.receiver, *self.engines, self.here]
        for own in ends:
            own.close()


Make = Callable[..., Sides]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Sides] = []

    def build(
        policy: Policy,
        *,
        pp: int = 1,
        way: str = "status",
        model: kp.ModelLayout | None = None,
        windows: dict[str, int] | None = None,
    ) -> Sides:
        own = model or layout()
        made.append(Sides(policy, side(own, 2, pp, 1), Image(own, [0, 1], padding=1), way, windows))
        return made[-1]

    yield build
    for own in made:
        own.close()


def test_by_default_the_room_ends_and_all_its_pages_are_named(make: Make) -> None:
    sides = make("fail")
    sides.engines[0].fails = {1}
    session = sides.receiver.open(0, [4, 7, 2])
    with contextlib.suppress(kt.TransferFailed):  # the room may have ended before its last chunk is handed over
        sides.send([1, 2, 3])
    with pytest.raises(kt.TransferAborted, match="the wire is cut by the test"):
        session.wait(60)
    assert session.failed_pages == {"main": (4, 7, 2)}
    assert session.wait_released(60)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("way", ["status", "poll", "submit"])
def test_a_batch_is_tried_again(make: Make, way: str, partial: bool) -> None:
    """Twice: the same bytes into the same pages; the source stays held until the last try."""
    sides = make("retry", way=way)
    engine = sides.engines[0]
    engine.fails, engine.partial, engine.held = {1, 3}, partial, {4}
    session = sides.receiver.open(0, [4, 7, 2])
    (sending,) = sides.send([1, 2, 3])
    assert eventually(lambda: engine.begun == 5) and not sending.pages_released
    engine.held = set()
    result = session.wait(60)
    sending.wait(60)
    assert engine.begun == 5 and sending.state is kt.SenderState.FINISHED
    assert sides.decode.faults(sides.decode.expected({4: 1, 7: 2, 2: 3})) == []
    assert result.failed_pages == session.failed_pages == {} and result.recompute == ()
    assert result.nbytes == len(sides.decode.expected({4: 1, 7: 2, 2: 3}))


def test_tries_are_bounded(make: Make) -> None:
    """`Limits.batch_retries` is 2: the third failure ends the room, and nothing else was submitted after it."""
    sides = make("retry")
    sides.engines[0].fails = set(range(1, 99))
    session = sides.receiver.open(0, [4])
    sessions = sides.receiver.open(1, [5])
    sending = sides.senders[0].open(0)
    sides.engines[0].begun = 1
    sending.send([1], start=0)
    with pytest.raises(kt.TransferFailed, match="the wire is cut by the test"):
        sending.finish()
    with pytest.raises(kt.TransferAborted, match="the wire is cut"):
        session.wait(60)
    assert sides.engines[0].begun == 4
    sides.engines[0].fails = set()
    other = sides.senders[0].open(1)
    other.send([1], start=0)
    other.finish()
    sessions.wait(60)


def test_a_room_that_is_aborted_meanwhile_is_not_tried_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_room, "_VERDICT", 1000.0)  # the pause before another try
    sides = make("retry")
    sides.engines[0].fails = {0}
    session = sides.receiver.open(0, [4])
    (sending,) = sides.send([1])
    assert eventually(lambda: bool(sending._room._waiting_again))
    session.abort("the client left")
    with pytest.raises(kt.TransferAborted, match="the client left"):
        sending.wait(60)
    assert session.wait_released(60)
    assert sides.engines[0].begun == 1


def test_tokens_of_failed_pages_are_reported(make: Make) -> None:
    """Stage 0 fails with page 1, stage 1 with pages 1 and 3: tokens 4..8 and 12..14 of 14; all others arrive."""
    sides = make("recompute", pp=2)
    sides.engines[0].fails, sides.engines[1].fails = {1}, {1, 3}
    session = sides.receiver.open(0, [4, 7, 2, 9], tokens=14)
    for sending in sides.send([1, 2, 3, 5]):
        sending.wait(60)
        assert sending.state is kt.SenderState.FINISHED
    result = session.wait(60)
    assert session.failed_pages == result.failed_pages == {"main": (7, 9)}
    assert result.recompute == ((4, 8), (12, 14))
    sent = {4: 1, 7: 2, 2: 3, 9: 5}
    expected = sides.decode.expected(sent)
    lost = {(0, 7), (1, 7), (1, 9)}
    arrived = {
        at: label for at, label in expected.items()
        if (label.layer_id, next(to for to, page in sent.items() if page == label.item)) not in lost
    }  # fmt: skip
    assert sides.decode.faults(arrived) == []
    assert result.nbytes == len(arrived)


def test_neighbouring_tokens_are_one_range_behind_a_prefix(make: Make) -> None:
    sides = make("recompute")
    sides.engines[0].fails = {1, 2}
    session = sides.receiver.open(0, [4, 7, 2], tokens=5 * PAGE, first_page=2)
    sending = sides.senders[0].open(0)
    for start, page in ((2, 1), (3, 2), (4, 3)):
        sending.send([page], start=start)
    sending.finish()
    result = session.wait(60)
    assert result.failed_pages == {"main": (7, 2)}
    assert result.recompute == ((3 * PAGE, 5 * PAGE),)


def test_all_is_to_be_computed_where_a_state_depends_on_it(make: Make) -> None:
    """A state is of the whole prompt, and so is a page of a model that has states: nothing of it can be had alone."""
    sides = make("recompute", model=layout(STATE))
    for failing, pages in (({2}, {}), ({1}, {"main": (7,)})):
        sides.engines[0].begun = 0
        sides.engines[0].fails = failing
        session = sides.receiver.open(0, [4, 7], tokens=6, row=3)
        for sending in sides.send([1, 2], row=5):
            sending.wait(60)
        result = session.wait(60)
        assert result.failed_pages == pages
        assert result.recompute == ((0, 6),)


def test_all_is_to_be_computed_where_there_is_a_window(make: Make) -> None:
    sides = make("recompute", windows={"main": 4})
    sides.engines[0].fails = {1}
    session = sides.receiver.open(0, [4, 7], tokens=11)
    for sending in sides.send([1, 2, 3]):
        sending.wait(60)
    result = session.wait(60)
    assert result.failed_pages == {"main": (7,)} and result.recompute == ((0, 11),)


def test_a_real_fault_of_the_receivers_memory_is_tried_again(make: Make) -> None:
    """The receiver's memory is closed to peers for a moment: the engine refuses, and moves all at the next try."""
    sides = make("retry")
    sides.engines[0].held = {2, 3}  # the second tries
    regions = dict.fromkeys(entry.address for entry in sides.decode.manifest.entries)
    sizes = sides.here._regions.sizes()
    assert set(sizes) <= set(regions)
    for address in sizes:
        sides.here.unregister(address)
    session = sides.receiver.open(0, [4, 7])
    (sending,) = sides.send([1, 2])
    assert eventually(lambda: sides.engines[0].begun == 3)
    for address, nbytes in sizes.items():
        sides.here.register(address, nbytes)
    sides.engines[0].held = set()
    assert session.wait(60).failed_pages == {}
    sending.wait(60)
    assert sides.engines[0].begun == 4
    assert sides.decode.faults(sides.decode.expected({4: 1, 7: 2})) == []


def test_whatever_fails_is_reported_and_all_else_arrives(make: Make) -> None:
    """60 rooms over pages that are used again: a page is exact, or named; its tokens are those that are reported."""
    dice = random.Random(5)
    sides, incomplete = make("recompute", pp=2), 0
    for room in range(60):
        pages = dice.sample(range(1, 12), dice.randint(1, 5))
        source = dice.sample(range(1, 12), len(pages))
        tokens = len(pages) * PAGE - dice.randrange(PAGE)
        session = sides.receiver.open(room, pages, tokens=tokens)
        for sender, engine in zip(sides.senders, sides.engines, strict=True):
            engine.begun, engine.fails = 0, {n for n in range(5) if dice.random() < 0.2}
            engine.partial = dice.random() < 0.5
            sending, start = sender.open(room), 0
            while start < len(pages):
                count = dice.randint(1, 3)
                sending.send(source[start : start + count], start=start)
                start += count
            sending.finish(wait=False)
        result = session.wait(60)
        failed = set(result.failed_pages.get("main", ()))
        incomplete += bool(failed)
        computed = {token for begin, end in result.recompute for token in range(begin, end)}
        assert computed == {t for t in range(tokens) if pages[t // PAGE] in failed}
        own = sides.decode
        exact = own.expected({to: page for to, page in zip(pages, source, strict=True) if to not in failed})
        base = int(own.arena.ctypes.data)
        assert all(own.arena[at - base] == byte_of(label) for at, label in exact.items())
        own.arena[[at - base for at in own.expected(dict(zip(pages, source, strict=True)))]] = EMPTY
        assert own.faults({}) == []
    assert 10 < incomplete < 50


def test_a_failed_page_is_reported_where_the_start_came_as_a_numpy_number(make: Make) -> None:
    sides = make("recompute")
    sides.engines[0].fails = {0}
    session = sides.receiver.open(1, [4], tokens=PAGE)
    sending = sides.senders[0].open(1)
    sending.send(np.array([1]), start=np.int64(0))
    sending.finish()
    assert session.wait(60).failed_pages == {"main": (4,)}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_failed_page_of_shares_is_the_one_that_holds_a_part_of_it(size: int) -> None:
    own = Image(layout(), [0, 1], kp.Placement(dcp_rank=0, dcp_size=size))
    pages = (5, 6, 7, 8, 9, 10)[: -(-6 // size)]
    offer = Offer(
        room=0, generation=1, groups={"main": GroupOffer(pages=pages, first_page=size)}, tokens=(6 + size) * PAGE
    )
    shares = Shares(Groups.of(own.manifest), offer, "token")
    for page in range(6):
        assert shares.failed_pages({"main": [page + size]}) == {"main": (pages[page // size],)}
    assert shares.failed_pages({"main": []}) == {}


def test_a_policy_is_one_of_the_words() -> None:
    engine = LoopbackEngine()
    own = Image(layout(), [0, 1]).manifest
    with pytest.raises(kt.ArgumentError, match=r"on_failed_pages: expected one of \['fail', 'retry', 'recompute'\]"):
        kt.Receiver(own, engine, prefill_ranks=1, on_failed_pages="ignore")  # type: ignore[arg-type]
    with pytest.raises(kt.ArgumentError, match=r"interleave: expected one of \['page', 'token'\], got 'head'"):
        kt.Receiver(own, engine, prefill_ranks=1, interleave="head")  # type: ignore[arg-type]
    engine.close()
