"""Cases of the field with the numbers that their reports give, where no other test has them."""

from __future__ import annotations

import sys
import threading
from typing import Any

import kv_planner as kp
import numpy as np
import pytest
from memfabric_recorder import Recorder, make_module
from transfer_memory import RankMemory, make_layout, stages, whole
from transfer_pair import Pair

import kv_transfer as kt
from kv_transfer.engine import Blocks
from kv_transfer.engines.loopback import LoopbackEngine
from kv_transfer.integrations.sglang import SessionEngine
from kv_transfer.integrations.sglang.engine import BlockList
from kv_transfer.regions import plan_regions


def test_the_ranks_that_a_rank_sends_to_are_flat_and_unique_b06() -> None:
    """Prefill TP 2, decode TP 4, 8 heads: whole numbers, each decode rank once."""
    layout = make_layout(heads=8)
    ids = list(range(4))

    def rank(number: int, size: int) -> kp.RankManifest:
        heads = kp.split_heads(8, tp_rank=number, tp_size=size)
        return RankMemory(
            layout,
            {("key", "target"): ids, ("value", "target"): ids},
            placement=kp.Placement(tp_rank=number, tp_size=size),
            head_range=heads,
        ).manifest

    prefill, decode = ([rank(number, size) for number in range(size)] for size in (2, 4))
    agreement = kp.agree(kp.Deployment(prefill), kp.Deployment(decode))
    found = [[to for to in range(4) if agreement.route(sender, to)] for sender in range(2)]
    assert found == [[0, 1], [2, 3]]


def test_decode_that_holds_five_of_six_pages_is_sent_the_sixth_c16(layout: kp.ModelLayout, pairs: list[Pair]) -> None:
    pair = Pair(stages(layout, 1), whole(layout))
    pairs.append(pair)
    session = pair.receiver.open(1, [9], tokens=6 * layout.page_size, first_page=5)
    sending = pair.senders[0].open(1)
    assert (sending.first_page, sending.pages) == (5, 1)
    sending.send([4], start=5)
    sending.finish()
    assert session.wait(60).pages == 1
    assert pair.decode.faults({9: 4}) == []


class Counting(LoopbackEngine):
    """Counts the batches that it is given."""

    def __init__(self) -> None:
        super().__init__(max_entries_per_batch=4096)
        self.batches: list[int] = []

    def submit(self, peer: str, batch: Blocks) -> kt.TransferHandle:
        self.batches.append(len(batch.nbytes))
        return super().submit(peer, batch)


@pytest.mark.parametrize(("blocks", "batches"), [(0, []), (4096, [4096]), (4097, [4096, 1])])
def test_4096_blocks_are_a_batch_and_one_more_are_two_d10(blocks: int, batches: list[int]) -> None:
    engine = Counting()
    memory = np.zeros(2 * blocks + 1, np.uint8)
    session = SessionEngine(engine)
    session.batch_register([memory.ctypes.data], [memory.nbytes])
    sources = [memory.ctypes.data + at for at in range(blocks)]
    targets = [memory.ctypes.data + blocks + at for at in range(blocks)]
    assert session.batch_transfer_sync(session.get_session_id(), sources, targets, [1] * blocks) == 0
    assert engine.batches == batches
    session.close()


def test_blocks_without_bytes_are_left_out_d19() -> None:
    blocks = BlockList.of([4096, 4100, 4200], [8192, 8200, 8300], [0, 5, 0])
    assert [column.tolist() for column in (blocks.source, blocks.destination, blocks.nbytes)] == [[4100], [8200], [5]]
    assert len(BlockList.of([4096], [8192], [0]).nbytes) == 0


@pytest.mark.parametrize("gibibytes", [32, 100])
def test_a_segment_over_32_gib_is_refused_with_the_limit_d11(gibibytes: int) -> None:
    """The limit is the engine's `max_region_bytes`; the driver that has it is whoever sets that number's business."""

    class Limited(LoopbackEngine):
        @property
        def capabilities(self) -> kt.EngineCapabilities:
            return kt.EngineCapabilities(max_region_bytes=32 << 30)

    size = gibibytes << 30
    engine: Any = Limited()
    if gibibytes == 32:
        assert plan_regions(engine, [(1 << 40, size)]) == ((1 << 40, size),)
        return
    with pytest.raises(kt.RegionError, match=str(32 << 30)) as caught:
        plan_regions(engine, [(1 << 40, size)])
    assert str(size) in str(caught.value)


def test_every_worker_binds_its_device_once_before_its_first_batch_e15(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread starts on device 0: two workers, each held in its first batch until the other has one."""
    made = Recorder()
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", make_module(made))
    made.codes["get_rpc_port"] = [0, 15_001]
    notes: list[tuple[int, str]] = []
    both = threading.Barrier(2, timeout=20)

    def bind() -> None:
        notes.append((threading.get_ident(), "bind"))

    engine: Any = kt.create_engine(
        "memfabric", store_url="tcp://10.0.0.1:1", role="Prefill", device_id=3, workers=2, bind_device=bind
    )

    def write(peer: str, source: list[int], destination: list[int], nbytes: list[int]) -> int:
        notes.append((threading.get_ident(), "write"))
        both.wait()
        return 0

    monkeypatch.setattr(engine, "_write", write)
    memory = np.zeros(8, np.uint8)
    engine.register(memory.ctypes.data, 8)
    one = BlockList.of([memory.ctypes.data], [4096], [8])
    for _ in range(3):
        handles = [engine.submit("10.0.0.8:1", one) for _ in range(2)]
        assert [handle.wait(60).state for handle in handles] == [kt.TransferState.DONE] * 2
    for worker in {ident for ident, _ in notes}:
        own = [note for ident, note in notes if ident == worker]
        assert own[0] == "bind" and own.count("bind") == 1 and own.count("write") == 3
    assert len({ident for ident, _ in notes}) == 2
    engine.close()


def test_a_device_that_cannot_be_bound_fails_the_batch_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Recorder()
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", make_module(made))
    made.codes["get_rpc_port"] = [0, 15_001]
    outcomes = [RuntimeError("device 9 is not there"), None]

    def bind() -> None:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome

    engine: Any = kt.create_engine(
        "memfabric", store_url="tcp://10.0.0.1:1", role="Prefill", device_id=9, bind_device=bind
    )
    memory = np.zeros(8, np.uint8)
    engine.register(memory.ctypes.data, 8)
    one = BlockList.of([memory.ctypes.data], [4096], [8])
    first = engine.submit("10.0.0.8:1", one).wait(60)
    assert first.state is kt.TransferState.FAILED and "device 9 is not there" in first.error
    assert engine.submit("10.0.0.8:1", one).wait(60).state is kt.TransferState.DONE and outcomes == []
    engine.close()
