"""Order around graphs: replays against streams and against each other, inside a capture, updates, external events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ascend_emulator as emulator
import pytest
import torch
import torch_npu

Stream = torch_npu.npu.Stream


def on(stream: Any, work: Callable[[], Any]) -> Any:
    with torch_npu.npu.stream(stream):
        return work()


def capture(work: Callable[[], object], **options: Any) -> torch_npu.npu.NPUGraph:
    graph = torch_npu.npu.NPUGraph()
    with torch_npu.npu.graph(graph, **options):
        work()
    return graph


class Doubler:
    """A graph that writes twice its static input to its output."""

    def __init__(self, pool: Any = None) -> None:
        self.source = torch.ones(4, device="npu")
        torch_npu.npu.synchronize()
        self.graph = capture(self.work, pool=pool)

    def work(self) -> None:
        self.out = self.source * 2


def test_a_replay_counts_for_the_stream_that_it_runs_on() -> None:
    case, side = Doubler(), Stream()
    on(side, case.graph.replay)
    with pytest.raises(emulator.RaceError, match=r"aten::mul.Tensor \(node 0 of graph \d+\) writes result") as caught:
        case.out + 1
    assert caught.value.earlier.stream_address == side.npu_stream
    with pytest.raises(emulator.RaceError, match=r"aten::fill_\S* writes self .*\(node 0 of graph \d+\) reads self"):
        case.source.fill_(3)
    torch_npu.npu.current_stream().wait_stream(side)
    case.source.fill_(3)
    assert (case.out + 1).tolist() == [3] * 4


def test_a_replay_is_checked_against_earlier_work_each_time() -> None:
    case, side = Doubler(), Stream()
    case.graph.replay()
    for _ in range(2):
        side.wait_stream(torch_npu.npu.current_stream())
        on(side, lambda: case.source.add_(1))
        with pytest.raises(emulator.RaceError, match=r"\(node 0 of graph \d+\) reads self"):
            case.graph.replay()
        torch_npu.npu.current_stream().wait_stream(side)
        case.graph.replay()
        torch_npu.npu.synchronize()


def test_replays_of_one_graph_on_two_streams() -> None:
    case, side = Doubler(), Stream()
    case.graph.replay()
    with pytest.raises(emulator.RaceError, match=r"node 0 of graph .*node 0 of graph"):
        on(side, case.graph.replay)
    side.wait_stream(torch_npu.npu.current_stream())
    on(side, case.graph.replay)
    torch_npu.npu.synchronize()


def test_graphs_that_share_a_pool_must_not_run_side_by_side() -> None:
    pool, side = torch_npu.npu.graph_pool_handle(), Stream()
    source = torch.ones(1000, device="npu")
    torch_npu.npu.synchronize()
    graphs = [capture(lambda: source.mul(2).add(1).sum(), pool=pool) for _ in range(2)]
    for graph in graphs:
        graph.replay()
    torch_npu.npu.synchronize()
    graphs[0].replay()
    with pytest.raises(emulator.RaceError, match="graph"):
        on(side, graphs[1].replay)


@pytest.mark.parametrize("missing", ["", "fork", "join"])
def test_streams_inside_a_capture(side: Any, missing: str) -> None:
    source = torch.ones(4, device="npu")
    out: list[torch.Tensor] = []
    torch_npu.npu.synchronize()

    def work() -> None:
        current = torch_npu.npu.current_stream()
        if missing == "fork":
            side.wait_stream(current)
        doubled = source * 2
        if missing != "fork":
            side.wait_stream(current)
        on(side, lambda: out.append(doubled + 1))
        if missing == "join":
            out.append(out[0] * 10)
        current.wait_stream(side)
        out.append(out[0] * 10)

    if not missing:
        graph = capture(work)
        source.fill_(2)
        graph.replay()
        assert out[1].tolist() == [50] * 4
        return
    graph = torch_npu.npu.NPUGraph()
    with pytest.raises(emulator.RaceError, match="in one capture") as caught, torch_npu.npu.graph(graph):
        work()
    assert caught.value.captured
    with pytest.raises(emulator.CaptureFailedError, match="race on 16 bytes"):
        graph.replay()
    assert (source + 1).tolist() == [2] * 4


def test_an_external_event_orders_a_replay_behind_another_stream(short_wait: float) -> None:
    source, side, gate = torch.ones(4, device="npu"), Stream(), torch_npu.npu.ExternalEvent()
    out: list[torch.Tensor] = []
    torch_npu.npu.synchronize()

    def work() -> None:
        gate.wait(torch_npu.npu.current_stream())
        gate.reset(torch_npu.npu.current_stream())
        out.append(source * 2)

    graph = capture(work)
    graph.replay()
    on(side, lambda: source.fill_(5))
    gate.record(side)
    torch_npu.npu.synchronize()
    assert out[0].tolist() == [10] * 4
    graph.replay()
    gate.record(side)  # before the write: it orders nothing
    on(side, lambda: source.fill_(6))
    with pytest.raises(emulator.RaceError, match=r"node \d of graph \d+"):
        torch_npu.npu.synchronize()


def test_a_graph_publishes_what_is_before_its_record_and_no_more() -> None:
    """A stream that waits for an external event recorded inside a graph knows the nodes before it."""
    source, side, done = torch.ones(4, device="npu"), Stream(), torch_npu.npu.ExternalEvent()
    first, second = torch.zeros(4, device="npu"), torch.zeros(4, device="npu")
    torch_npu.npu.synchronize()

    def work() -> None:
        first.copy_(source)
        done.record(torch_npu.npu.current_stream())
        second.copy_(source)

    done.wait(torch_npu.npu.current_stream())  # a wait creates the event
    done.record(side)
    torch_npu.npu.synchronize()
    done.reset(side)
    torch_npu.npu.synchronize()
    graph = capture(work)
    graph.replay()
    done.wait(side)
    assert on(side, lambda: first.tolist()) == [1] * 4
    with pytest.raises(emulator.RaceError):
        on(side, lambda: second + 1)


def test_an_update_before_the_previous_replay_was_waited_for(attention: Any) -> None:
    attention.update(5)
    attention.graph.replay()
    with pytest.raises(emulator.FenceError, match="record 0"):
        attention.update(6)
    fence = torch_npu.npu.Event()
    fence.record()
    fence.synchronize()
    attention.update(6)
    attention.graph.replay()
    attention.check(6)


def test_pages_that_a_replay_reads_follow_its_update(attention: Any) -> None:
    side = Stream()
    torch_npu.npu.synchronize()
    attention.update(128)  # page 1 only
    attention.graph.replay()
    on(side, lambda: attention.key_cache[3].fill_(0))
    torch_npu.npu.synchronize()
    attention.update(300)  # pages 1 to 3
    attention.graph.replay()
    torch_npu.npu.synchronize()
    attention.update(300)
    on(side, lambda: attention.key_cache[3].fill_(0))
    attention.graph.replay()
    with pytest.raises(emulator.RaceError, match=r"npu_fused_infer_attention_score_v2\.out .*reads key"):
        torch_npu.npu.synchronize()


def test_replays_with_pinned_copies() -> None:
    given, landed = torch.zeros(2).pin_memory(), torch.zeros(2).pin_memory()
    static, side = torch.zeros(2, device="npu"), Stream()
    torch_npu.npu.synchronize()

    def work() -> None:
        static.copy_(given, non_blocking=True)
        landed.copy_(static, non_blocking=True)

    graph = capture(work)
    graph.replay()
    with pytest.raises(emulator.RaceError, match=r"aten::copy_ \(node 1 of graph \d+\) writes self"):
        on(side, lambda: torch.empty(2, device="npu").copy_(landed, non_blocking=True))
