"""What a capture records, what it computes (nothing), and what it refuses; the process stays usable after a refusal."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any

import ascend_emulator as emulator
import pytest
import torch
import torch_npu


def capture(work: Callable[[], object]) -> torch_npu.npu.NPUGraph:
    graph = torch_npu.npu.NPUGraph()
    with torch_npu.npu.graph(graph):
        work()
    return graph


def test_nothing_is_computed_at_capture() -> None:
    source, target = torch.ones(4, device="npu"), torch.zeros(4, device="npu")
    made: list[torch.Tensor] = []

    def work() -> None:
        made.append(source * 2)
        made.append(made[0].long())
        target.add_(5)
        torch.mul(source, 3, out=target)

    graph = capture(work)
    assert bool(made[0].isnan().all())
    assert bool(emulator.poison.is_poisoned(made[1].cpu()).all())
    assert target.cpu().tolist() == [0] * 4
    graph.replay()
    assert made[0].cpu().tolist() == [2] * 4
    assert made[1].cpu().tolist() == [2] * 4
    assert target.cpu().tolist() == [3] * 4


def test_replay_reads_the_static_inputs_again() -> None:
    static = torch.zeros(2, 3, device="npu")
    out: list[torch.Tensor] = []
    graph = capture(lambda: out.append(static.t().contiguous().view(-1).softmax(0).cumsum(0)))
    for step in range(3):
        rows = torch.arange(6.0).view(2, 3) * step
        static.copy_(rows)
        graph.replay()
        torch.testing.assert_close(out[0].cpu(), rows.t().reshape(-1).softmax(0).cumsum(0))


def test_views_in_place_and_index_put() -> None:
    base, index = torch.zeros(4, 6, device="npu"), torch.tensor([1, 1, 3], device="npu")
    ones = torch.ones(3, 6, device="npu")

    def work() -> None:
        base.zero_()
        base.index_put_((index,), ones, accumulate=True)
        base.t()[2].mul_(10)
        base[0].copy_(base[3])

    graph = capture(work)
    for _ in range(2):
        graph.replay()
        expected = torch.zeros(4, 6)
        expected[1], expected[3] = 2, 1
        expected[:, 2] *= 10
        expected[0] = expected[3]
        assert torch.equal(base.cpu(), expected)


def test_factories_and_casting_copies_are_recorded() -> None:
    target = torch.zeros(3, dtype=torch.float16, device="npu")
    made: list[torch.Tensor] = []

    def work() -> None:
        made.append(torch.full((3,), 2.5, device="npu"))
        made.append(torch.arange(3, device="npu"))
        target.copy_(made[0])
        made[0].zero_()

    graph = capture(work)
    graph.replay()
    graph.replay()
    assert target.cpu().tolist() == [2.5] * 3
    assert made[0].cpu().tolist() == [0] * 3
    assert made[1].cpu().tolist() == [0, 1, 2]


def test_random_numbers_differ_from_replay_to_replay() -> None:
    out: list[torch.Tensor] = []
    graph = capture(
        lambda: out.extend([torch.rand(16, device="npu"), torch.nn.functional.dropout(torch.ones(64, device="npu"))])
    )
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append([x.cpu() for x in out])
    assert not torch.equal(seen[0][0], seen[1][0])
    assert not torch.equal(seen[0][1], seen[1][1])
    for _ in range(2):  # and follow the seed that was set before the replay
        torch.manual_seed(11)
        graph.replay()
        graph.replay()
        seen.append([x.cpu() for x in out])
    assert torch.equal(seen[2][0], seen[3][0])
    assert torch.equal(seen[2][1], seen[3][1])


def test_side_streams_join_and_leave_the_capture(side: Any) -> None:
    source = torch.ones(3, device="npu")
    out: list[torch.Tensor] = []

    def work() -> None:
        current = torch_npu.npu.current_stream()
        doubled = source * 2
        side.wait_stream(current)
        with torch_npu.npu.stream(side):
            out.append(doubled + 1)
        current.wait_stream(side)
        out.append(out[0] * 10)

    graph = capture(work)
    source.fill_(2)
    graph.replay()
    assert out[1].cpu().tolist() == [50] * 3
    with torch_npu.npu.stream(side):
        assert (source + 1).cpu().tolist() == [3] * 3


def test_graphs_that_share_a_pool_are_replayed_in_any_order() -> None:
    pool = torch_npu.npu.graph_pool_handle()
    source = torch.ones(1000, device="npu")
    graphs, outs = [], []
    for factor in (2, 3, 4):
        graph = torch_npu.npu.NPUGraph()
        with torch_npu.npu.graph(graph, pool=pool):
            outs.append((source * factor).square() + 1)
        graphs.append(graph)
    for i in (2, 0, 1, 0):
        graphs[i].replay()
        assert set(outs[i].cpu().tolist()) == {(i + 2) ** 2 + 1}


def test_a_chain_reuses_memory_inside_the_graph() -> None:
    source = torch.ones(1 << 20, device="npu")
    torch_npu.npu.empty_cache()
    before = torch_npu.npu.memory_reserved()

    def work() -> torch.Tensor:
        x = source
        for _ in range(50):
            x = x + 1
        return x

    out: list[torch.Tensor] = []
    graph = capture(lambda: out.append(work()))
    assert torch_npu.npu.memory_reserved() - before < 10 * (4 << 20)
    graph.replay()
    assert out[0].cpu()[0].item() == 51


def test_pinned_copies_are_recorded_in_both_directions() -> None:
    given, landed = torch.zeros(2).pin_memory(), torch.zeros(2).pin_memory()
    static = torch.zeros(2, device="npu")

    def work() -> None:
        static.copy_(given, non_blocking=True)
        landed.copy_(static * 2, non_blocking=True)

    graph = capture(work)
    for step in (1.0, 4.0):
        given.fill_(step)
        graph.replay()
        assert bool(landed.isnan().all())
        torch_npu.npu.synchronize()
        assert landed.tolist() == [2 * step] * 2
    graph.replay()
    given.fill_(9)
    with pytest.raises(emulator.HostRaceError):
        torch_npu.npu.synchronize()


def on_the_default_stream(made: torch.Tensor) -> torch.Tensor:
    """Something that is not captured reads what the capture only records."""
    with torch_npu.npu.stream(torch_npu.npu.default_stream()):
        return made + 1


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "cpu": lambda x: x.cpu(),
    "pageable copy": lambda x: x.copy_(torch.ones(4)),
    "new tensor from a list": lambda x: torch.tensor([1.0, 2.0], device="npu"),
    "nonzero": lambda x: x.nonzero(),
    "boolean mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x.clone()),
    "device synchronize": lambda x: torch_npu.npu.synchronize(),
    "stream synchronize": lambda x: torch_npu.npu.current_stream().synchronize(),
    "unregistered operator": lambda x: torch.linalg.inv(x.view(2, 2)),
    "stream query": lambda x: torch_npu.npu.current_stream().query(),
    "empty_cache": lambda x: torch_npu.npu.empty_cache(),
    "a capture inside": lambda x: capture(lambda: x + 1),
    "a result on the default stream": lambda x: on_the_default_stream(x * 2),
    "out= of another size": lambda x: torch.cat([x, x], out=torch.zeros(3, device="npu")),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_host_is_refused(name: str) -> None:
    tensor = torch.ones(4, device="npu")
    with pytest.raises(RuntimeError, match="107027"):
        capture(lambda: REFUSED[name](tensor))
    assert tensor.sum().item() == 4
    out: list[torch.Tensor] = []
    graph = capture(lambda: out.append(tensor + 1))
    graph.replay()
    assert out[0].cpu().tolist() == [2] * 4


def test_wrong_shapes_are_refused_at_capture() -> None:
    tensor = torch.ones(4, device="npu")
    with pytest.raises(RuntimeError, match="broadcast"):
        capture(lambda: tensor.add_(torch.ones(3, device="npu")))
    with pytest.raises(RuntimeError):
        capture(lambda: tensor @ torch.ones(3, device="npu"))


def test_a_graph_on_the_second_device() -> None:
    torch_npu.npu.graph(torch_npu.npu.NPUGraph())  # makes the process's capture stream, on the device current then
    torch_npu.npu.set_device(1)
    try:
        source, out = torch.ones(3, device="npu"), []
        graph = torch_npu.npu.NPUGraph()
        with torch_npu.npu.graph(
            graph, stream=torch_npu.npu.Stream()
        ):  # the default capture stream is the first device's
            out.append(source + 1)
        source.fill_(4)
        graph.replay()
        assert out[0].device.index == 1
        assert out[0].cpu().tolist() == [5] * 3
    finally:
        torch_npu.npu.set_device(0)


def test_an_error_inside_a_replay_names_the_node_and_leaves_the_process_usable() -> None:
    index, source = torch.tensor([0, 1], device="npu"), torch.arange(3.0).to("npu")
    out: list[torch.Tensor] = []
    graph = capture(lambda: out.append(source.index_select(0, index) + 1))
    index.fill_(99)
    graph.replay()
    with pytest.raises(emulator.DeferredExecutionError, match="index_select"):
        torch_npu.npu.synchronize()
    index.fill_(2)
    graph.replay()
    assert out[0].cpu().tolist() == [3, 3]


def test_capture_of_an_operator_without_a_meta_kernel() -> None:
    with torch.library._scoped_library("emulator_test", "FRAGMENT") as library:
        library.define("first_rows(Tensor x, int n) -> Tensor")
        library.define("broken(Tensor x) -> Tensor")
        emulator.register_kernel("emulator_test::first_rows", lambda x, n: x[:n] * 2)
        source, out = torch.arange(6.0).view(3, 2).to("npu"), []
        assert torch.ops.emulator_test.first_rows(source, 1).cpu().tolist() == [[0, 2]]
        graph = capture(lambda: out.append(torch.ops.emulator_test.first_rows(source, 2)))
        source += 1
        graph.replay()
        assert out[0].cpu().tolist() == [[2, 4], [6, 8]]
        with pytest.raises(NotImplementedError, match="broken"):
            torch.ops.emulator_test.broken(source)


def test_a_capture_that_was_refused_something_leaves_no_graph() -> None:
    tensor = torch.ones(4, device="npu")
    streams = torch_npu.npu.current_stream()
    graph = torch_npu.npu.NPUGraph()
    with pytest.raises(emulator.CaptureError, match=r"\.item\(\)"), torch_npu.npu.graph(graph):
        tensor.add_(1)
        tensor.sum().item()
    with pytest.raises(emulator.CaptureFailedError, match=r"\.item\(\)"):
        graph.replay()
    assert torch_npu.npu.current_stream() == streams and not torch_npu.npu.is_current_stream_capturing()
    assert tensor.tolist() == [1] * 4


def test_a_refusal_that_the_capture_swallows_is_told_at_its_end() -> None:
    tensor = torch.ones(4, device="npu")

    def work() -> None:
        with contextlib.suppress(RuntimeError):
            torch_npu.npu.current_stream().synchronize()
        tensor.add_(1)

    with pytest.raises(emulator.CaptureFailedError, match="synchronize of the stream"):
        capture(work)
    assert (tensor + 1).tolist() == [2] * 4


def test_a_stream_that_took_part_must_be_waited_for(side: Any) -> None:
    tensor = torch.ones(4, device="npu")
    torch_npu.npu.synchronize()
    graph = torch_npu.npu.NPUGraph()

    def work(join: bool) -> None:
        side.wait_stream(torch_npu.npu.current_stream())
        with torch_npu.npu.stream(side):
            tensor.add_(1)
        if join:
            torch_npu.npu.current_stream().wait_stream(side)

    with pytest.raises(emulator.CaptureFailedError, match="107025"), torch_npu.npu.graph(graph):
        work(join=False)
    with pytest.raises(emulator.CaptureFailedError, match="did not wait for it"):
        graph.replay()
    capture(lambda: work(join=True)).replay()
    assert tensor.tolist() == [2] * 4


def test_the_default_stream_is_not_captured() -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch_npu.npu.graph(torch_npu.npu.NPUGraph(), stream=torch_npu.npu.default_stream()).__enter__()
    torch_npu.npu.set_stream(torch_npu.npu.default_stream())


def test_an_event_of_the_running_capture_cannot_be_asked() -> None:
    def query() -> None:
        mark = torch_npu.npu.Event()
        mark.record()
        mark.query()

    def wait() -> None:
        mark = torch_npu.npu.Event()
        mark.record()
        mark.synchronize()

    for work in (query, wait):
        with pytest.raises(RuntimeError, match="107028"):
            capture(work)


def test_memory_from_outside_of_the_pool_stays_usable_while_it_lives() -> None:
    """torch_npu's allocator serves other streams from its common pool during a capture, as on a device."""
    kept: list[torch.Tensor] = []

    def work() -> None:
        with torch_npu.npu.stream(torch_npu.npu.Stream()):
            kept.append(torch.full((4,), 3.0, device="npu"))
        kept.append(torch.full((4,), 2.0, device="npu"))

    graph = capture(work)
    graph.replay()
    torch_npu.npu.synchronize()
    assert [x.tolist() for x in kept] == [[3] * 4, [2] * 4]


def test_calls_that_neither_a_stream_nor_a_capture_orders() -> None:
    """107030: aclrtMemcpy and aclrtMemset while a capture is open, unless its mode or the thread's is relaxed."""
    lib = ctypes.CDLL("libascendcl.so")
    tensor = torch.ones(4, device="npu")
    address, seen = ctypes.c_void_p(tensor.data_ptr()), []

    def call() -> int:
        return int(lib.aclrtMemset(address, ctypes.c_size_t(16), 0, ctypes.c_size_t(0)))

    def relaxed() -> None:
        mode = ctypes.c_int(2)
        lib.aclmdlRICaptureThreadExchangeMode(ctypes.byref(mode))
        seen.append(call())
        lib.aclmdlRICaptureThreadExchangeMode(ctypes.byref(mode))
        seen.append(mode.value)

    def other_thread() -> None:
        thread = threading.Thread(target=lambda: seen.append(call()))
        thread.start()
        thread.join()

    assert call() == 0
    for mode in ("global", "thread_local", "relaxed"):
        with torch_npu.npu.graph(torch_npu.npu.NPUGraph(), capture_error_mode=mode):
            tensor.add_(1)
            seen.append(call())
            relaxed()
            other_thread()
    assert seen == [107030, 0, 2, 107030, 107030, 0, 2, 0, 0, 0, 2, 0]
    assert call() == 0
