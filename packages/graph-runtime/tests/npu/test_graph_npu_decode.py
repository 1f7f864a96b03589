"""A decoder over a paged fp16 cache on the NPU: FIA v2 called directly, replayed from graphs, against a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_runtime import Buckets, DecodeRunner, StaticBuffers, StepInputs, UpdateSpec, get_device
from graph_runtime.errors import (
    HostListError,
    KeyNotPassed,
    MissingUpdate,
    UncoveredKey,
    UnknownUpdateKey,
    UpdatePending,
)
from graph_runtime.testing import RecordingDevice
from hypothesis import given, settings
from hypothesis import strategies as st

Make = Callable[..., tuple[DecodeRunner, Any]]


def test_records_are_those_of_torch_npu(toy: Any, make: Make) -> None:
    runner, _ = make()
    report = runner.capture(progress=False)
    assert report.captured == (1, 2, 4) and report.updatable_ops == {1: 2, 2: 2, 4: 2}
    assert set(report.memory) == {1, 2, 4} and report.memory[4] > 0  # the largest first; smaller ones share its pool
    record = runner._graphs[4].graph.records[0]
    assert record.name == "npu_fused_infer_attention_score_v2.out"
    assert record.updatable == ("actual_seq_kvlen",) and record.absent == ("actual_seq_qlen",)
    assert record.lengths == {"actual_seq_kvlen": 4} and record.tensor_valued == ()


@settings(deadline=None, max_examples=6)
@given(st.lists(st.tuples(st.sets(st.integers(0, 3)), st.booleans()), min_size=1, max_size=8))
def test_replay_equals_a_plain_forward_for_every_order_of_batches(toy: Any, steps: list[tuple[set[int], bool]]) -> None:
    device = get_device("npu:0")
    decoder = toy.Decoder()
    runner = DecodeRunner(
        device=device,
        forward=decoder.forward,
        buffers=StaticBuffers(toy.layout(), device),
        buckets=Buckets([1, 2, 4]),
        update=UpdateSpec({"actual_seq_kvlen": "kv_lens"}),
    )
    runner.capture()
    requests = [toy.Request(index) for index in range(4)]
    for chosen, eager in steps:
        batch = [requests[index] for index in sorted(chosen, reverse=eager)]
        result = toy.step(runner, batch, eager=eager)
        assert result.mode == ("eager" if eager else "graph")
        toy.check(result, decoder, batch)
    runner.close()


def test_lengths_over_a_page_edge(toy: Any, make: Make) -> None:
    """E13, E19: every replay uses the lengths of its own step, in graph and eager alike."""
    runner, decoder = make(buckets=Buckets([1]))
    runner.capture()
    request = toy.Request(2)
    for index in range(toy.PAGE + 3):
        result = toy.step(runner, [request], eager=index == 5)
        if index < 4 or index > toy.PAGE - 3:
            toy.check(result, decoder, [request])
    assert runner.counters.graph_replays == toy.PAGE + 2


@pytest.mark.parametrize("history", [[4], [4, 2], [0, 4, 3]])
def test_a_step_does_not_depend_on_the_steps_before(toy: Any, make: Make, history: list[int]) -> None:
    """E01, E18: 4 rows, then 2, then 1 or none."""
    outputs: list[torch.Tensor] = []
    for before in ([], history):
        runner, _ = make()
        runner.capture()
        for n in before:
            toy.step(runner, [toy.Request(index) for index in range(n)])
        outputs.extend(toy.step(runner, [toy.Request(index) for index in range(n)]).output.cpu() for n in (2, 1, 0))
    for first, second in zip(outputs[:3], outputs[3:], strict=True):
        assert torch.equal(first, second)
    assert outputs[2].shape == (0, toy.WIDTH)


def test_the_comparison_could_fail(toy: Any, make: Make) -> None:
    """Lengths short by one, or a changed cache row, give another output."""
    runner, decoder = make()
    runner.capture()
    request = toy.Request(0)
    for _ in range(5):
        toy.step(runner, [request])
    values = {"x": request.xs[-1][None], "slots": [request.slot()], "table": [request.pages]}
    right = runner.run(values, {"kv_lens": [5]}, 1).output.cpu()
    assert (runner.run(values, {"kv_lens": [4]}, 1).output.cpu() - right).abs().max() > 1e-3
    for cache in (*decoder.keys, *decoder.values):
        row = cache[request.pages[0], 2]
        saved = row.clone()
        row.add_(2.0)
        assert (runner.run(values, {"kv_lens": [5]}, 1).output.cpu() - right).abs().max() > 1e-3
        row.copy_(saved)
    assert torch.equal(runner.run(values, {"kv_lens": [5]}, 1).output.cpu(), right)


@pytest.mark.parametrize(
    ("update", "error", "word"),
    [
        (UpdateSpec({"actual_seq_lengths_kv": "kv_lens"}), UnknownUpdateKey, "v1 and v2"),
        (UpdateSpec({"actual_seq_kvlen": "kv_lens", "actual_seq_qlen": "q"}), KeyNotPassed, "silently"),
        (UpdateSpec(), UncoveredKey, "actual_seq_kvlen"),
    ],
)
def test_keys_that_torch_npu_would_ignore(
    toy: Any, make: Make, update: UpdateSpec, error: type[Exception], word: str
) -> None:
    def forward(step: StepInputs) -> Any:
        host = step.host if "kv_lens" in step.host else {"kv_lens": [0] * step.bs}
        return decoder.forward(StepInputs(step.tensors, host, step.bs, step.raw_bs))

    decoder = toy.Decoder()
    runner, _ = make(update=update, forward=forward)
    with pytest.raises(error, match=word):
        runner.capture()


def test_query_lengths_captured_as_a_list_are_named(toy: Any, make: Make) -> None:
    """E19: every captured length is updated, or named as constant."""
    decoder = toy.Decoder()

    def forward(step: StepInputs) -> Any:
        decoder.extra = {"actual_seq_qlen": [1] * step.bs}
        return decoder.forward(step)

    runner, _ = make(forward=forward)
    with pytest.raises(UncoveredKey, match="actual_seq_qlen"):
        runner.capture()
    spec = UpdateSpec({"actual_seq_kvlen": "kv_lens"}, constant=["actual_seq_qlen"])
    runner, _ = make(forward=forward, update=spec)
    runner.capture()
    requests = [toy.Request(index) for index in range(3)]
    toy.check(toy.step(runner, requests), decoder, requests)


def test_the_naive_way_uses_old_lengths(toy: Any, make: Make) -> None:
    """A-24: torch_npu ignores a wrong key; the runner above refuses it, and a replay cannot go without an update."""
    runner, _ = make(buckets=Buckets([1]))
    runner.capture()
    request = toy.Request(0)
    for _ in range(5):
        right = toy.step(runner, [request]).output.cpu()
    graph: Any = runner._graphs[1].graph
    raw = graph._graph
    raw.update(cpu_update_input=[{"actual_seq_lengths_kv": [2]}])  # v1's key on a v2 op
    raw.replay()
    assert torch.equal(runner._graphs[1].output.cpu(), right)
    with pytest.raises(MissingUpdate):
        graph.replay()
    graph.update({"actual_seq_kvlen": [5]})
    with pytest.raises(UpdatePending):
        graph.update({"actual_seq_kvlen": [5]})
    graph.replay()
    assert torch.equal(runner._graphs[1].output.cpu(), right)


def test_missing_lists_are_an_error_before_launch(toy: Any, make: Make) -> None:
    device = RecordingDevice(get_device("npu:0"))
    runner, decoder = make(device=device)
    runner.capture()
    requests = [toy.Request(0)]
    toy.check(toy.step(runner, requests), decoder, requests)
    device.events.clear()
    values = {"x": torch.zeros(1, toy.WIDTH), "slots": [toy.PAGE], "table": [[1, 2, 3]]}
    for lists in (
        {},
        {"kv_lens": [1, 2]},
        {"kv_lens": [-1]},
        {"kv_lens": torch.ones(1, dtype=torch.int64, device="npu:0")},
    ):
        with pytest.raises(HostListError):
            runner.run(values, lists, 1)
    assert device.events == []


def test_order_of_a_step_and_one_copy(toy: Any, make: Make) -> None:
    """E16, E20: wait, load with one copy, update on the worker, replay, fence; no synchronise, no copy to the host."""
    device = RecordingDevice(get_device("npu:0"))
    runner, decoder = make(device=device)
    runner.capture()
    requests = [toy.Request(index) for index in range(3)]
    toy.step(runner, requests)
    device.events.clear()
    result = toy.step(runner, requests)
    assert device.events == ["wait", "wait", "copy", "fence", "update", "updated", "replay", "fence"]
    toy.check(result, decoder, requests)


def test_values_on_the_device(toy: Any, make: Make) -> None:
    runner, decoder = make()
    runner.capture()
    request = toy.Request(0)
    request.advance()
    values = {
        "x": request.xs[-1][None].to("npu:0"),
        "slots": torch.tensor([request.slot()]).to("npu:0"),
        "table": torch.tensor([request.pages], dtype=torch.int32).to("npu:0"),
    }
    toy.check(runner.run(values, {"kv_lens": [1]}, 1), decoder, [request])


@pytest.mark.parametrize("eager", [False, True])
def test_a_draft_runner_inside_before_step(toy: Any, make: Make, eager: bool) -> None:
    """Two runners of one NPU in one step: each has its own buffers, lengths and cache."""
    draft, draft_decoder = make(fence_timeout=20.0)
    drafts: list[tuple[Any, list[Any]]] = []
    draft_requests = [toy.Request(index) for index in (2, 3)]

    def before(step: StepInputs) -> None:
        drafts.append((toy.step(draft, draft_requests, clone=True), draft_requests))

    target, decoder = make(before_step=before, fence_timeout=20.0)
    draft.capture(progress=False)
    target.capture(progress=False)
    requests = [toy.Request(index) for index in (0, 1)]
    for _ in range(toy.PAGE + 2):
        result = toy.step(target, requests, eager=eager)
    assert len(drafts) == toy.PAGE + 2 and drafts[-1][0].mode == "graph"
    toy.check(result, decoder, requests)
    toy.check(drafts[-1][0], draft_decoder, draft_requests)


def test_a_clone_outlives_the_next_step(toy: Any, make: Make) -> None:
    runner, decoder = make()
    runner.capture(progress=False)
    first, second = toy.Request(0), toy.Request(1)
    kept = toy.step(runner, [first], clone=True)
    view = toy.step(runner, [second])
    toy.step(runner, [toy.Request(3)])
    toy.check(kept, decoder, [first])
    with pytest.raises(AssertionError):
        toy.check(view, decoder, [second])
