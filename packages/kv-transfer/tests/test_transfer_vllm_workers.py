"""The workers' halves of vLLM's connector over real senders and receivers: bytes, prefix hits, aborts, losses.

Long because every event of a request's life is played in the same small world.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import kv_planner as kp
import pytest
from transfer_memory import RankMemory, make_layout, stages, whole
from transfer_pair import HeldEngine, eventually
from vllm_pieces import Request, blocks, full, groups, step

import kv_transfer as kt
from kv_transfer.engine import Blocks, TransferHandle, TransferState, TransferStatus
from kv_transfer.engines.loopback import LoopbackEngine
from kv_transfer.integrations.vllm.caches import PageGroup
from kv_transfer.integrations.vllm.decode import DecodeWorker
from kv_transfer.integrations.vllm.groups import block_groups
from kv_transfer.integrations.vllm.prefill import PrefillWorker
from kv_transfer.integrations.vllm.ready import StepLayers
from kv_transfer.integrations.vllm.scheduler import SchedulerSide
from kv_transfer.integrations.vllm.words import Chunk, Load, StepWords, Stretch

TIMEOUTS = kt.Timeouts(
    handshake=2.0,
    offer=60.0,
    transfer=120,
    heartbeat_interval=0.05,
    peer_lost_after=10.0,
    dead_writer_grace=0.2,
    drain=1,
)
LAYER_BY_LAYER = kt.Limits(ready_step_bytes=1)
PAGE, KERNEL_BLOCKS = 4, 2  # a block of the engine is two pages
GROUPS = (PageGroup(("main",), "full", KERNEL_BLOCKS, PAGE),)
SOURCE, DESTINATION = (3, 1, 6), (5, 2, 4)
TOKENS = 21  # two blocks of eight and five more: one of them is on the last block's second page


class World:
    """Prefill stages and a decode rank, each with the engine's half around it."""

    def __init__(self, keep: contextlib.ExitStack) -> None:
        self.keep = keep
        self.directory = kt.Directory()
        self.layout = make_layout(page_size=PAGE)
        self.sources = stages(self.layout, 2)
        self.target = whole(self.layout)
        self.engines: list[LoopbackEngine] = []
        self.prefill: list[PrefillWorker] = []
        self.prefill_ends: list[kt.PrefillEnd] = []

    def start_prefill(self, memory: RankMemory, engine: type[LoopbackEngine] = LoopbackEngine) -> PrefillWorker:
        self.engines.append(engine())
        end = kt.PrefillEnd(
            memory.manifest, self.engines[-1], self.directory, timeouts=TIMEOUTS, limits=LAYER_BY_LAYER, every=0.02
        )
        self.keep.callback(end.close)
        worker = PrefillWorker(end, GROUPS, 120.0)
        self.keep.callback(worker.close)
        self.prefill_ends.append(end)
        self.prefill.append(worker)
        return worker

    def start_decode(self, memory: RankMemory | None = None) -> DecodeWorker:
        manifest = (memory or self.target).manifest
        end = kt.DecodeEnd(
            manifest,
            kt.create_engine("loopback"),
            self.directory,
            timeouts=TIMEOUTS,
            every=0.02,
            on_failed_pages="recompute",
        )
        self.keep.callback(end.close)
        self.decode_end = end
        return DecodeWorker(end, GROUPS, TIMEOUTS.handshake)

    def start(self, engine: type[LoopbackEngine] = LoopbackEngine) -> DecodeWorker:
        for memory in self.sources:
            self.start_prefill(memory, engine)
        decode = self.start_decode()
        self.decode_end.wait_ready(60)
        for end in self.prefill_ends:
            end.wait_ready(60)
        return decode

    def push(self, *chunks: Chunk, ready: Any = None) -> None:
        for worker in self.prefill:
            worker.take(StepWords(chunks=chunks), ready)

    def faults(self, blocks: dict[int, int]) -> list[str]:
        """Of decode pages, when decode block d should hold source block blocks[d]."""
        return self.target.faults({d * 2 + half: s * 2 + half for d, s in blocks.items() for half in range(2)})


class Faulty(LoopbackEngine):
    """Cannot write at some addresses."""

    def __init__(self) -> None:
        super().__init__(max_entries_per_batch=1)
        self.bad: set[int] = set()

    def submit(self, peer: str, batch: Blocks) -> TransferHandle:
        handle = super().submit(peer, batch)
        if int(batch.destination[0]) in self.bad:
            handle.settle(TransferStatus(TransferState.FAILED, "broken by the test"))
        return handle


@pytest.fixture
def world() -> Iterator[World]:
    with contextlib.ExitStack() as keep:
        yield World(keep)


def chunk(name: str = "a", room: int = 7, first: int = 0, count: int = 3, last: bool = True) -> Chunk:
    return Chunk(name, room, TOKENS, (Stretch(first, SOURCE[first : first + count]),), last)


def load(name: str = "b", room: int = 7, first: int = 0) -> Load:
    return Load(name, room, 0, TOKENS, (Stretch(first, DESTINATION[first:]),))


def wait_finished(call: Callable[[], set[str]], wanted: set[str], seconds: float = 60.0) -> None:
    """Requests are reported once each."""
    found: set[str] = set()
    deadline = time.monotonic() + seconds
    while found != wanted:
        new = call()
        assert not new & found
        found |= new
        assert time.monotonic() < deadline, (found, wanted)
        time.sleep(0.005)


WHOLE = dict(zip(DESTINATION, SOURCE, strict=True))


@pytest.mark.parametrize("first", ["decode", "prefill"])
def test_blocks_arrive_whichever_side_begins(world: World, first: str) -> None:
    decode = world.start()
    if first == "decode":
        decode.take(StepWords(loads=(load(),)))
    world.push(chunk(count=1, last=False))
    assert [worker.finished({"a"}) for worker in world.prefill] == [set(), set()]
    world.push(chunk(first=1, count=2))
    if first == "prefill":
        time.sleep(0.05)
        assert [worker.finished(set()) for worker in world.prefill] == [set(), set()]
        decode.take(StepWords(loads=(load(),)))
    wait_finished(decode.finished, {"b"})
    for worker in world.prefill:
        wait_finished(lambda own=worker: own.finished(set()), {"a"})  # type: ignore[misc]
    assert decode.failed_blocks() == set()
    assert world.faults(WHOLE) == []


def test_the_engine_ends_a_request_after_its_blocks_are_sent(world: World) -> None:
    decode = world.start()
    decode.take(StepWords(loads=(load(),)))
    world.push(chunk())
    wait_finished(decode.finished, {"b"})
    time.sleep(0.05)
    for worker in world.prefill:
        assert worker.finished(set()) == set(), "it may not be reported before the engine has ended it"
        assert worker.finished({"a", "another"}) == {"a"} and worker.finished(set()) == set()


def test_blocks_that_decode_has_are_not_sent(world: World) -> None:
    decode = world.start()
    decode.take(StepWords(loads=(load(first=1),)))
    world.push(chunk(count=2, last=False))
    world.push(chunk(first=2, count=1))
    wait_finished(decode.finished, {"b"})
    assert world.faults({d: s for d, s in WHOLE.items() if d != DESTINATION[0]}) == []


def test_a_whole_hit_lets_prefill_go(world: World) -> None:
    decode = world.start()
    decode.take(StepWords(loads=(Load("b", 7, 0, TOKENS, (Stretch(3, ()),)),)))
    world.push(chunk())
    for worker in world.prefill:
        wait_finished(lambda own=worker: own.finished({"a"}), {"a"})  # type: ignore[misc]
    assert decode.finished() == set() and world.faults({}) == []


def test_layers_go_as_they_are_computed(world: World) -> None:
    decode = world.start()
    decode.take(StepWords(loads=(load(),)))
    marks = StepLayers(None, None)
    world.push(chunk(), ready=marks)
    time.sleep(0.1)
    assert decode.finished() == set() and world.faults({}) == []
    marks.passed("target", 0)
    assert marks.wait("target", 0, 1.0) and not marks.wait("target", 1, 0.01)
    assert eventually(lambda: len(world.faults({})) == 12, 60), "keys and values of layer 0 on six pages"
    assert all("', 0)" in fault for fault in world.faults({}))
    waiting = threading.Thread(target=lambda: marks.wait("target", 3, 10.0))
    waiting.start()
    marks.passed_all()  # as after a replayed graph: no layer said anything
    waiting.join(60)
    assert not waiting.is_alive()
    wait_finished(decode.finished, {"b"})
    assert world.faults(WHOLE) == []


def test_a_request_is_not_run_before_its_last_layer_has_arrived_h14(world: World) -> None:
    """`wait_for_layer_load` has nothing to wait for: vLLM runs no request that it was told to load and not yet told of.

    Whichever layer is the last one, the request is told of after it, and to the scheduler it is one that loads between
    steps.
    """
    decode = world.start()
    scheduler = SchedulerSide(block_groups(groups(full(PAGE * KERNEL_BLOCKS))), 0, "decode")
    for number, last in enumerate(range(4)):
        name, room = f"b{number}", 20 + number
        request = Request(name, TOKENS, {"do_remote_prefill": True, "room": room})
        assert scheduler.matched(request, 0) == (TOKENS, True), "True: vLLM waits for `get_finished`"
        scheduler.allocated(request, blocks(*DESTINATION), TOKENS)
        decode.take(scheduler.step(step()))
        marks = StepLayers(None, None)
        world.push(chunk(f"a{number}", room), ready=marks)
        for layer in range(4):
            if layer != last:
                marks.passed("target", layer)
        assert eventually(lambda: len(world.faults(WHOLE)) == 12, 60), "keys and values of one layer on six pages"
        assert all(f"', {last})" in fault for fault in world.faults(WHOLE))
        assert decode.finished() == set()
        marks.passed("target", last)
        wait_finished(decode.finished, {name})
        assert world.faults(WHOLE) == []
        for worker in world.prefill:
            wait_finished(lambda own=worker, ended=f"a{number}": own.finished({ended}), {f"a{number}"})  # type: ignore[misc]
        world.target.wipe([block * KERNEL_BLOCKS + half for block in DESTINATION for half in range(KERNEL_BLOCKS)])


def test_nobody_asks_and_the_blocks_are_given_back(world: World) -> None:
    world.start()
    for worker in world.prefill:
        worker._offer = 0.5
    began = time.monotonic()
    world.push(chunk())
    for worker in world.prefill:
        wait_finished(lambda own=worker: own.finished({"a"}), {"a"})  # type: ignore[misc]
    assert time.monotonic() - began >= 0.5


@pytest.mark.parametrize("late", [False, True])
def test_prefill_gives_a_request_up(world: World, late: bool) -> None:
    """Decode hears of it at once, also when it asks afterwards, and has to compute all blocks."""
    decode = world.start()
    if not late:
        decode.take(StepWords(loads=(load(),)))
    world.push(chunk(count=1, last=False))
    for worker in world.prefill:
        worker.take(StepWords(aborts=(("a", "aborted by the user"),)), None)
    if late:
        decode.take(StepWords(loads=(load(),)))
    wait_finished(decode.finished, {"b"})
    assert decode.failed_blocks() == set(DESTINATION) and decode.failed_blocks() == set()
    for worker in world.prefill:
        wait_finished(lambda own=worker: own.finished({"a"}), {"a"})  # type: ignore[misc]
    decode.take(StepWords(loads=(load("c", 8),)))  # the same blocks serve the next request
    world.push(chunk("d", 8))
    wait_finished(decode.finished, {"c"})
    assert world.faults(WHOLE) == []


def test_prefill_never_began(world: World) -> None:
    decode = world.start()
    decode.take(StepWords(loads=(load(),)))
    for worker in world.prefill:
        worker.take(StepWords(rejects=((7, 0, "never scheduled"),)), None)
    wait_finished(decode.finished, {"b"})
    assert decode.failed_blocks() == set(DESTINATION)


def test_decode_gives_a_request_up_before_it_asked(world: World) -> None:
    decode = world.start()
    for worker in world.prefill:
        worker._offer = float("inf")  # nothing but the word of decode ends it
    decode.take(StepWords(rejects=((7, 0, "aborted in the queue"), (9, 5, "of a group that is not there"))))
    world.push(chunk())
    for worker in world.prefill:
        wait_finished(lambda own=worker: own.finished({"a"}), {"a"})  # type: ignore[misc]


def test_an_aborted_load_is_reported_when_nobody_writes_any_more(world: World) -> None:
    decode = world.start(HeldEngine)
    decode.take(StepWords(loads=(load(),)))
    world.push(chunk())
    held = [engine for engine in world.engines if isinstance(engine, HeldEngine)]
    assert eventually(lambda: all(engine.begun for engine in held), 60)
    decode.take(StepWords(aborts=(("b", "aborted by the user"),)))
    time.sleep(0.1)
    assert decode.finished() == set(), "a writer still holds the blocks"
    assert [worker.finished({"a"}) for worker in world.prefill] == [set(), set()]
    for engine in held:
        engine.go.set()
    wait_finished(decode.finished, {"b"})
    assert decode.failed_blocks() == set(), "nobody is to compute them"
    for worker in world.prefill:
        wait_finished(lambda own=worker: own.finished({"a"}), {"a"})  # type: ignore[misc]


def test_a_preempted_request_is_forgotten_and_decode_computes_it(world: World) -> None:
    decode = world.start()
    decode.take(StepWords(loads=(load(),)))
    world.push(chunk(count=2, last=False))
    for worker in world.prefill:
        worker.drop(("a", "another"))
    wait_finished(decode.finished, {"b"})
    assert decode.failed_blocks() == set(DESTINATION)
    for worker in world.prefill:
        assert worker.finished({"a"}) == set()


def test_a_dead_prefill_rank_and_its_next_life(world: World) -> None:
    decode = world.start()
    decode.take(StepWords(loads=(load(),)))
    world.push(chunk(count=1, last=False))
    world.prefill_ends[1].close()
    wait_finished(decode.finished, {"b"})
    assert decode.failed_blocks() == set(DESTINATION)
    decode._patience = float("inf")  # while it is away: nothing is waited for
    decode.take(StepWords(loads=(load("c", 8),)))
    wait_finished(decode.finished, {"c"})
    assert decode.failed_blocks() == set(DESTINATION)
    wait_finished(lambda: world.prefill[0].finished({"a"}), {"a"})
    world.prefill = [world.prefill[0], world.start_prefill(world.sources[1])]
    world.prefill_ends[2].wait_ready(60)
    world.decode_end.wait_ready(60)
    decode.take(StepWords(loads=(load("e", 9),)))
    world.push(chunk("d", 9))
    wait_finished(decode.finished, {"e"})
    assert world.faults(WHOLE) == []


def test_a_decode_rank_that_dies_is_waited_for_no_longer(world: World) -> None:
    decode = world.start()
    decode.take(StepWords(loads=(load(),)))
    world.push(chunk(count=1, last=False))
    assert eventually(lambda: {name for name in (0, 3) if f"', {name})" in str(world.faults({}))} == {0, 3}, 60)
    world.decode_end.close()
    for worker in world.prefill:
        wait_finished(lambda own=worker: own.finished({"a"}), {"a"})  # type: ignore[misc]


def test_prefill_ranks_that_were_never_there(world: World) -> None:
    decode = world.start_decode()
    decode.take(StepWords(loads=(load(),)))
    assert decode.finished() == set()
    wait_finished(decode.finished, {"b"})
    assert decode.failed_blocks() == set(DESTINATION)
    decode.take(StepWords(loads=(load("c", 8),)))
    decode.take(StepWords(aborts=(("c", "aborted by the user"),)))
    assert decode.finished() == {"c"} and decode.failed_blocks() == set()


def test_two_decode_ranks_share_the_heads(world: World) -> None:
    """Each prefill rank serves both; blocks are free when both have them."""
    prefill = whole(world.layout).fill()
    halves = [
        RankMemory(
            world.layout,
            {(spec.component, spec.part): list(spec.layer_ids) for spec in world.layout.components},
            placement=kp.Placement(tp_rank=rank, tp_size=2),
            head_range=(rank, rank + 1),
        )
        for rank in range(2)
    ]
    worker = world.start_prefill(prefill)
    ranks = [world.start_decode(memory) for memory in halves]
    assert len(world.prefill_ends[0].wait_ready(60)) == 2
    ranks[0].take(StepWords(loads=(load(),)))
    world.push(chunk())
    wait_finished(ranks[0].finished, {"b"})
    assert worker.finished({"a"}) == set()
    ranks[1].take(StepWords(loads=(load(),)))
    wait_finished(ranks[1].finished, {"b"})
    wait_finished(lambda: worker.finished(set()), {"a"})
    moved = {d * 2 + half: s * 2 + half for d, s in WHOLE.items() for half in range(2)}
    for memory in halves:
        assert memory.faults(moved) == []


def test_a_prefill_rank_of_which_nobody_needs_anything_says_so(world: World) -> None:
    """Two ranks hold the same head: one of them sends it, and neither keeps its blocks for ever."""
    world.layout = make_layout(page_size=PAGE, heads=1)
    owned = {(spec.component, spec.part): list(spec.layer_ids) for spec in world.layout.components}
    world.sources = [
        RankMemory(world.layout, owned, placement=kp.Placement(tp_rank=rank, tp_size=2), head_range=(0, 1)).fill()
        for rank in range(2)
    ]
    world.target = whole(world.layout)
    decode = world.start()
    (idle,) = [end for end in world.prefill_ends if end.group()[0].sends_nothing]
    silent = world.prefill[world.prefill_ends.index(idle)]
    world.push(chunk(count=1, last=False))
    time.sleep(0.05)
    assert silent.finished({"a"}) == set(), "its prompt is not whole yet"
    world.push(chunk(first=1, count=2))
    wait_finished(lambda: silent.finished(set()), {"a"})
    decode.take(StepWords(loads=(load(),)))
    wait_finished(decode.finished, {"b"})
    (other,) = [worker for worker in world.prefill if worker is not silent]
    wait_finished(lambda: other.finished({"a"}), {"a"})
    assert world.faults(WHOLE) == []


def test_the_rest_of_a_block_is_not_sent(world: World) -> None:
    """A prompt that ends on a block's first page leaves its second one as it is."""
    decode = world.start()
    decode.take(StepWords(loads=(Load("b", 7, 0, 18, (Stretch(0, DESTINATION),)),)))
    world.push(Chunk("a", 7, 18, (Stretch(0, SOURCE),), True))
    wait_finished(decode.finished, {"b"})
    moved = {d * 2 + half: s * 2 + half for d, s in WHOLE.items() for half in range(2)}
    moved.pop(DESTINATION[2] * 2 + 1)
    assert world.target.faults(moved) == []


def test_only_blocks_that_did_not_come_are_computed_again(world: World) -> None:
    decode = world.start(Faulty)
    layer = next(entry for entry in world.target.manifest.entries if entry.layer_id == 3)
    for engine in world.engines:
        assert isinstance(engine, Faulty)
        engine.bad.add(layer.address + DESTINATION[1] * 2 * layer.item_stride)
    decode.take(StepWords(loads=(load(),)))
    world.push(chunk(count=1, last=False))
    world.push(chunk(first=1, count=2))
    wait_finished(decode.finished, {"b"})
    assert decode.failed_blocks() == set(DESTINATION[1:]), "those of the chunk that the engine gave up"
    assert decode.failed_blocks() == set()
    for worker in world.prefill:
        wait_finished(lambda own=worker: own.finished({"a"}), {"a"})  # type: ignore[misc]
    first = [DESTINATION[0] * 2, DESTINATION[0] * 2 + 1]
    assert not [fault for fault in world.faults(WHOLE) for page in first if f" page {page}:" in fault]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_pusher_is_told_to_the_engine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start()
    worker = world.prefill[0]

    def fail(push: object) -> bool:
        raise MemoryError("broken by the test")

    monkeypatch.setattr(worker, "_advance", fail)
    worker.take(StepWords(chunks=(chunk(),)), None)
    assert eventually(lambda: not worker._thread.is_alive(), 60)
    for call in (lambda: worker.take(StepWords(), None), lambda: worker.finished({"a"})):
        with pytest.raises(kt.SessionStateError, match=r"ended by an error: MemoryError\('broken by the test'\)"):
            call()
