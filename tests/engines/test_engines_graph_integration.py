"""graph_runtime.integrations.sglang over the installed engine: signatures, results, order of calls, what is refused."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_npu
from engines_attention import PAGE, World
from engines_graphs import KEY, Step, TheirGraphs
from graph_runtime.errors import (
    CaptureRefused,
    HostListError,
    MissingUpdate,
    UnknownUpdateKey,
    UpdateCountMismatch,
    UpdateFailed,
)
from graph_runtime.integrations.sglang import GraphBackend, MultiLayerDraftExtendRunner, MultiStepDraftExtendRunner
from sglang.srt.hardware_backend.npu.attention import ascend_backend
from sglang.srt.hardware_backend.npu.graph_runner import multi_layer_eagle_draft_extend_npu_graph_runner as theirs
from sglang.srt.hardware_backend.npu.graph_runner.npu_cudagraph_backend import NPUCudaGraphBackend
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import multi_layer_eagle_draft_extend_cuda_graph_runner as bases
from test_engines_graphs import Spy, compare

LENGTHS = [1, PAGE - 2, PAGE, 2 * PAGE - 1]


@pytest.fixture(autouse=True)
def no_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_backend, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=None))
    monkeypatch.setenv("ASCEND_USE_FIA", "1")


class OurGraphs(TheirGraphs):
    """SGLang's attention and buffers, our backend."""

    def __init__(self, world: World, bucket: int) -> None:
        super().__init__(world, bucket)
        self.graphs.cleanup()
        with get_parallel().override(tp_group=SimpleNamespace(barrier=lambda: None)):
            self.graphs = GraphBackend(SimpleNamespace(device_module=torch.get_device_module("npu")))


@pytest.fixture
def ours() -> Iterator[OurGraphs]:
    made = OurGraphs(World(list(LENGTHS)), bucket=4)
    made.capture()
    yield made
    made.graphs.cleanup()


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


def test_the_backend_has_the_signatures_of_theirs() -> None:
    names = [name for name, value in vars(NPUCudaGraphBackend).items() if inspect.isfunction(value)]
    assert {"capture_session", "capture_one", "replay_with_input_update", "cleanup"} < set(names)
    for name in names:
        if name == "replay_with_input_update":  # a key need not be given; all else is equal
            assert [each[0] for each in parameters(getattr(GraphBackend, name))] == [
                each[0] for each in parameters(getattr(NPUCudaGraphBackend, name))
            ]
            continue
        assert parameters(getattr(GraphBackend, name)) == parameters(getattr(NPUCudaGraphBackend, name)), name
    assert issubclass(GraphBackend, BaseCudaGraphBackend) and not GraphBackend.__abstractmethods__


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (MultiLayerDraftExtendRunner, theirs.MultiLayerEagleDraftExtendNpuGraphRunner),
        (MultiStepDraftExtendRunner, theirs.MultiLayerEagleMultiStepDraftExtendNpuGraphRunner),
    ],
)
def test_the_runners_override_what_theirs_do_and_only_what_the_base_has(own: Any, other: Any) -> None:
    assert own.__mro__[1] is other.__mro__[1]
    mine = {name for name, value in vars(own).items() if inspect.isfunction(value)}
    assert {name for name, value in vars(other).items() if inspect.isfunction(value)} <= mine
    for name in mine:
        assert parameters(getattr(own, name)) == parameters(getattr(own.__mro__[1], name)), name


def test_what_the_runners_read_is_there() -> None:
    """The fields of the shared buffers, and the order in which the base calls what is overridden."""
    fields = {field.name for field in dataclasses.fields(bases.MultiLayerEagleDraftExtendInputBuffers)}
    assert {"input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens"} <= fields
    capture = inspect.getsource(bases.MultiLayerEagleDraftExtendCudaGraphRunner.init_buffers_and_capture)
    assert capture.index("self.backend = ") < capture.index("self.capture()")
    prepare = inspect.getsource(bases.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner.prepare)
    assert prepare.index("self.bs = bs") < prepare.index("self._prepare_extra(forward_batch)")
    replay = inspect.getsource(bases.MultiLayerEagleDraftExtendCudaGraphRunner.replay)
    assert "seq_lens_cpu=seq_lens_cpu" in replay and "self._replay_graph(shape_key, fb_view)" in replay


def test_replays_equal_theirs(ours: OurGraphs) -> None:
    """Random batch sizes in one bucket, with the key that SGLang gives and with the one of the captured ops."""
    other = TheirGraphs(World(list(LENGTHS)), bucket=4)
    other.capture()
    draw = random.Random(2)
    for turn in range(6):
        rows = draw.randint(1, 4)
        step, same = Step(ours.world, rows), Step(other.world, rows)
        if turn % 2:
            found = ours.run(step)
        else:
            out = ours.graphs.replay_with_input_update(4, ours.load(step))
            found = out[:rows].cpu().view(rows, *step.expected.shape[1:])
        assert torch.equal(found, other.run(same))
        compare(found, step.expected)
    other.graphs.cleanup()


def test_the_order_of_calls(ours: OurGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """wait(previous) → update → replay → fence: theirs launches the replay before it knows how the update ends."""
    lens = ours.load(Step(ours.world, 2))
    spy = Spy(monkeypatch)
    for _ in range(3):
        ours.graphs.replay_with_input_update(4, seq_lens=lens, attr_name=KEY, attr_type=[])
    one = ["update", "updated", "replay", "fence"]
    assert spy.events == [*one, "wait", *one, "wait", *one]
    monkeypatch.undo()


def test_what_would_be_silent_or_hang_is_refused(ours: OurGraphs) -> None:
    """A-24: the other version's key. §3.3: a replay without its update. A-42: another number of ops."""
    step = Step(ours.world, 4)
    lens = ours.load(step)
    with pytest.raises(UnknownUpdateKey, match="v1 and v2"):
        ours.graphs.replay_with_input_update(4, seq_lens=lens, attr_name="actual_seq_kvlen", attr_type=[])
    with pytest.raises(MissingUpdate):
        ours.graphs.replay(4, None)
    with pytest.raises(UpdateCountMismatch):
        ours.graphs.replay_with_input_update(4, None, cpu_update_input=[{KEY: lens}] * 2)
    with pytest.raises(HostListError):
        ours.graphs.replay_with_input_update(4, None)
    torch_npu.npu.synchronize()  # nothing waits for an update that never comes
    compare(ours.run(step), step.expected)


def test_a_failed_update_leaves_nothing_in_flight(ours: OurGraphs) -> None:
    """A-50: theirs has launched the replay by then (`test_engines_graphs`)."""
    lens = ours.load(Step(ours.world, 4))
    with pytest.raises(UpdateFailed):
        ours.graphs.replay_with_input_update(4, seq_lens=[9999, *lens[1:]], attr_name=KEY, attr_type=[])
    torch_npu.npu.synchronize()
    assert not ours.graphs.can_run(None, 4) and not ours.graphs.can_run(None, 5)


def test_graphs_in_the_memory_saver_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
    runner = SimpleNamespace(device_module=torch.get_device_module("npu"))
    with pytest.raises(CaptureRefused, match="SGLANG_MEMORY_SAVER_CUDA_GRAPH"):
        GraphBackend(runner, enable_memory_saver=True)


class Heard:
    """A backend that hears the lengths."""

    def __init__(self) -> None:
        self.lens: list[list[int]] = []

    def replay_with_input_update(self, shape_key: Any, seq_lens: list[int]) -> None:
        self.lens.append(seq_lens)


def test_the_runner_pads_lengths_and_refuses_those_of_another_batch() -> None:
    """Theirs reads the shared host buffer, which keeps an earlier batch's lengths where this one published none."""
    runner = object.__new__(MultiLayerDraftExtendRunner)
    runner.backend, runner.raw_bs, runner.bs, runner.model_context = Heard(), 2, 4, nullcontext
    runner._replay_graph("shape", SimpleNamespace(seq_lens_cpu=torch.tensor([7, 9, 5, 5])))
    assert runner.backend.lens == [[7, 9, 0, 0]]
    with pytest.raises(HostListError, match="earlier batch"):
        runner._replay_graph("shape", SimpleNamespace(seq_lens_cpu=None))


def composite(kind: Any) -> Any:
    """The part of a multi-step runner that prepares a batch, without models."""
    made = object.__new__(kind)
    zeros: dict[str, Any] = {
        field.name: None for field in dataclasses.fields(bases.MultiLayerEagleDraftExtendInputBuffers)
    }
    with torch.device("npu"):
        for name in ("input_ids", "out_cache_loc", "positions"):
            zeros[name] = torch.zeros(16, dtype=torch.int64)
        for name in ("seq_lens", "num_correct_drafts", "num_accept_tokens", "extend_seq_lens"):
            zeros[name] = torch.zeros(4, dtype=torch.int32)
        for name in ("req_pool_indices", "select_index"):
            zeros[name] = torch.zeros(4, dtype=torch.int64)
        zeros["hidden_states"] = torch.zeros(16, 8)
    zeros["seq_lens_cpu"] = torch.ones(4, dtype=torch.int32)
    made.buffers = SimpleNamespace(**zeros)
    made.require_mlp_tp_gather = made.require_gathered_buffer = False
    made.runners = [SimpleNamespace(_pad_to_bucket=lambda rows, sizes: 4)]
    made.capture_bs, made.captured_req_width, made.num_front_tokens, made.seq_len_fill_value = [4], 4, 0, 1
    made.draft_extend_attn_backend_list = []
    return made


def batch(rows: int) -> SimpleNamespace:
    """`rows` requests of 4 tokens, all of them in slots of their own."""
    with torch.device("npu"):
        tokens = torch.arange(100, 100 + 4 * rows)
        ones = torch.ones(rows, dtype=torch.int32)
        return SimpleNamespace(
            batch_size=rows, out_cache_loc_virtual=None, kv_loc_plan=None, kv_loc_cols=None, mamba_track_indices=None,
            input_ids=tokens, positions=tokens, out_cache_loc=tokens, seq_lens=ones * 20,
            req_pool_indices=torch.arange(1, rows + 1), seq_lens_cpu=torch.full((rows,), 20), seq_lens_sum=20 * rows,
            sampling_info=None,
            spec_info=SimpleNamespace(
                num_correct_drafts=ones, num_accept_tokens=ones + 1, hidden_states=torch.ones(4 * rows, 8)
            ),
        )  # fmt: skip


def test_padded_rows_write_to_no_slot_of_an_earlier_batch() -> None:
    """A-03, E01: four requests, then three in the same bucket; theirs is the naive version."""
    for kind, stale in (
        (theirs.MultiLayerEagleMultiStepDraftExtendNpuGraphRunner, True),
        (MultiStepDraftExtendRunner, False),
    ):
        made = composite(kind)
        for rows in (4, 3):
            made.prepare(batch(rows))
        buffers = made.buffers
        assert buffers.out_cache_loc[:12].tolist() == list(range(100, 112))
        assert buffers.out_cache_loc[12:].any().item() is stale
        if not stale:
            assert not buffers.input_ids[12:].any() and not buffers.positions[12:].any()
            assert buffers.req_pool_indices.tolist() == [1, 2, 3, 0] and buffers.seq_lens.tolist() == [20, 20, 20, 1]
