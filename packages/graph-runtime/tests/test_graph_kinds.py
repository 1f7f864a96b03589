"""Runners of every kind on a CPU: who counts the window, one update an op, buffers and tokens a step, exact slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from graph_lengths import ATTEND, lengths, shown
from graph_runtime import (
    DecodeRunner,
    DraftDecodeRunner,
    DraftExtendRunner,
    HostResults,
    MultiStepDraftExtendRunner,
    Rotation,
    RunnerKind,
    StaticBuffers,
    StepInputs,
    TargetVerifyRunner,
    get_device,
    get_runner,
    register_runner,
    step_layers,
)
from graph_runtime.errors import (
    BucketError,
    FenceTimeout,
    OutputShapeError,
    SlotBusy,
    StepKindError,
    UnwrittenRows,
)
from graph_runtime.request_rows import RequestRows
from graph_runtime.testing import RecordingDevice
from kv_planner import RowField, RowLayout


@pytest.mark.parametrize(
    ("kind", "prefix", "kv"),
    [
        ("eagle", [100, 7], [116, 23]),
        ("mtp", [100, 7], [116, 23]),
        ("dflash", [116, 23], [116, 23]),
        ("dspark", [116, 23], [116, 23]),
        ("none", [100, 7], [100, 7]),
    ],
)
def test_the_window_is_counted_once(closing: Callable[[Any], Any], kind: Any, prefix: list[int], kv: list[int]) -> None:
    """E12: naively worker and backend both add the block, and the scheduler's array grows in place."""
    device = get_device("cpu", updatable=ATTEND)
    layout = RowLayout([RowField("ids", "int64", rows=4 * 16)])

    def forward(step: StepInputs) -> torch.Tensor:
        return lengths(step, step.host["kv_lens"]) + step.tensors["ids"].view(step.bs, 16).sum(1)

    runner = closing(
        TargetVerifyRunner(
            window=16,
            kind=kind,
            device=device,
            forward=forward,
            buffers=StaticBuffers(layout, device),
            buckets=[2, 4],
            token_fields=["ids"],
            output_rows_per_request=1,
        )
    )
    runner.capture(progress=False)
    given = np.array(prefix, dtype=np.int32)
    values = {"ids": torch.zeros(32, dtype=torch.int64)}
    for eager in (False, True, False):
        found = runner.run(values, {"kv_lens": given}, 2, eager=eager, clone=True).output.tolist()
        assert found == pytest.approx([shown(length) for length in kv])
    assert given.tolist() == prefix
    naive = [length + 16 for length in kv]
    assert found != pytest.approx([shown(length) for length in naive])
    assert runner.run({}, {"kv_lens": []}, 0).bucket == 2  # an idle rank replays the captured window
    with pytest.raises(BucketError):
        TargetVerifyRunner(window=0, kind=kind)


def test_outputs_are_cut_by_their_own_rows(closing: Callable[[Any], Any]) -> None:
    """A-10: naively the tensors of a pipeline stage are cut to bs rows instead of bs × width."""
    device = get_device("cpu", updatable=ATTEND)
    layout = RowLayout([RowField("ids", "int64", rows=8 * 4)])

    def forward(step: StepInputs) -> dict[str, torch.Tensor | None]:
        ids = step.tensors["ids"].float()
        last = lengths(step, step.host["kv_lens"])
        return {"logits": ids[:, None] * 2, "hidden": ids[:, None].expand(-1, 3) + 0, "last": last, "residual": None}

    runner = closing(
        TargetVerifyRunner(
            window=4,
            kind="eagle",
            device=device,
            forward=forward,
            buffers=StaticBuffers(layout, device),
            buckets=[8],
            token_fields=["ids"],
            output_rows_per_request={"last": 1, "logits": 4, "hidden": 4, "residual": 4},
        )
    )
    runner.capture(progress=False)
    for eager in (False, True):
        out = runner.run({"ids": torch.arange(24)}, {"kv_lens": [1] * 6}, 6, eager=eager, clone=True).output
        assert list(out) == ["logits", "hidden", "last", "residual"] and out["residual"] is None
        assert out["logits"][:, 0].tolist() == [2.0 * i for i in range(24)]
        assert out["hidden"].shape == (24, 3) and out["last"].shape == (6,)
        assert forward_rows_naive(out["hidden"], 6).shape[0] != 24
    wrong = closing(
        TargetVerifyRunner(
            window=4,
            kind="eagle",
            device=device,
            forward=forward,
            buffers=StaticBuffers(layout, device),
            buckets=[8],
            token_fields=["ids"],
            output_rows_per_request={"logits": 4, "hidden": 4},
        )
    )
    with pytest.raises(OutputShapeError, match="residual"):
        wrong.capture(progress=False)


def forward_rows_naive(hidden: torch.Tensor, bs: int) -> torch.Tensor:
    """One slice for every output."""
    return hidden[:bs]


def _rotate_tokens(ids: torch.Tensor, fresh: torch.Tensor, window: int) -> torch.Tensor:
    rows = ids.view(-1, window)
    return torch.cat([rows[:, 1:], fresh.view(-1, 1)], 1).flatten()


def _multi(closing: Callable[[Any], Any], **options: Any) -> tuple[MultiStepDraftExtendRunner, list[Rotation]]:
    device = get_device("cpu", updatable=ATTEND)
    layout = RowLayout([RowField("ids", "int64", rows=4 * 3, fill=-7), RowField("row", "int64", rows=4)])
    seen: list[Rotation] = []

    def layer(number: int) -> Callable[[StepInputs], torch.Tensor]:
        def forward(step: StepInputs) -> torch.Tensor:
            ids = step.tensors["ids"].view(step.bs, 3)
            drawn = ids.sum(1) * 10 + number + step.tensors["row"]
            return drawn + lengths(step, step.host["kv_lens"]).round().long() * 1000

        return forward

    def rotate(rotation: Rotation) -> None:
        seen.append(rotation)
        live = rotation.output.shape[0] * 3
        fresh = rotation.output % 1000
        rotation.inputs.tensors["ids"][:live] = _rotate_tokens(rotation.previous.tensors["ids"][:live], fresh, 3)

    arguments: dict[str, Any] = {
        "device": device,
        "forwards": [layer(number) for number in range(3)],
        "layout": layout,
        "buckets": [1, 2, 4],
        "window": 3,
        "rotate": rotate,
        "rotated": ["ids"],
        "token_fields": ["ids"],
        "output_rows_per_request": 1,
        "poison": True,
    }
    maker = options.pop("maker", MultiStepDraftExtendRunner)
    return closing(maker(**{**arguments, **options})), seen


def _plain(ids: list[int], row: int, length: int, layers: tuple[int, ...]) -> list[int]:
    window, drawn = list(ids), []
    for number in layers:
        drawn.append(sum(window) * 10 + number + row + 1000 * (length - 1))
        window = [*window[1:], drawn[-1] % 1000]
    return drawn


@pytest.mark.parametrize("eager", [False, True])
def test_layers_run_in_order_over_rotated_tokens(closing: Callable[[Any], Any], eager: bool) -> None:
    """F02: naively every step runs one layer's function; stale rows would show after a larger batch."""
    runner, _ = _multi(closing)
    assert all(report.captured == (1, 2, 4) for report in runner.capture(progress=False))
    generator = np.random.default_rng(4)
    for n in (4, 2, 3, 1, 0, 4):
        ids = generator.integers(0, 50, (n, 3))
        lens = generator.integers(1, 90, n)
        values = {"ids": ids.reshape(-1), "row": np.arange(n)}
        results = runner.run(values, {"kv_lens": lens}, n, eager=eager)
        assert {result.mode for result in results} == {"eager" if eager else "graph"}
        for row in range(n):
            drawn = [int(result.output[row]) for result in results]
            assert drawn == _plain(ids[row].tolist(), row, int(lens[row]), (0, 1, 2))
            assert drawn != _plain(ids[row].tolist(), row, int(lens[row]), (2, 2, 2))


def test_buffers_of_steps_do_not_overlap(closing: Callable[[Any], Any]) -> None:
    runner, seen = _multi(closing)
    runner.capture(progress=False)
    spans = []
    for step in runner.steps:
        view = step._buffers.view("ids")
        start = view.untyped_storage().data_ptr()
        spans.append((start, start + view.untyped_storage().nbytes()))
    spans.sort()
    assert spans[0][1] <= spans[1][0] and spans[1][1] <= spans[2][0]
    runner.run({"ids": [1, 2, 3], "row": [0]}, {"kv_lens": [4]}, 1)
    assert seen[0].previous.tensors["ids"][:3].tolist() == [1, 2, 3]  # intact after all steps


class Shared(MultiStepDraftExtendRunner):
    """The naive version: one set of buffers for all steps."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        own = self._runners[1]._buffers  # where the tokens may be left out
        for step in self._runners:
            step._buffers = own
            step._rows = RequestRows(own, step._per_request)


def test_one_set_of_buffers_loses_the_window(closing: Callable[[Any], Any]) -> None:
    """The load of step 1 overwrites what step 0 read, before its tokens were rotated."""
    drawn = []
    for maker in (MultiStepDraftExtendRunner, Shared):
        runner, _ = _multi(closing, maker=maker, poison=False)
        runner.capture(progress=False)
        results = runner.run({"ids": [1, 2, 3], "row": [0]}, {"kv_lens": [4]}, 1)
        drawn.append([int(result.output[0]) for result in results])
    assert drawn[0] == _plain([1, 2, 3], 0, 4, (0, 1, 2)) != drawn[1]


def test_a_rotation_that_leaves_rows_out(closing: Callable[[Any], Any]) -> None:
    """F11: rows of this step that nobody wrote are found."""
    runner, _ = _multi(closing, rotate=lambda rotation: rotation.inputs.tensors["ids"][:2].zero_())
    runner.capture(progress=False)
    with pytest.raises(UnwrittenRows, match="ids"):
        runner.run({"ids": [1, 2, 3], "row": [0]}, {"kv_lens": [4]}, 1)


def test_layers_of_steps_are_stated(closing: Callable[[Any], Any]) -> None:
    assert step_layers(3, 2) == (0, 1) and step_layers(3, 4, wrap=True) == (0, 1, 2, 0)
    for layers, steps in ((3, 4), (0, 1), (3, 0)):
        with pytest.raises(StepKindError):
            step_layers(layers, steps)
    with pytest.raises(StepKindError):
        _multi(closing, forwards=[])  # F06: a model without draft layers
    runner, _ = _multi(closing, steps=4, wrap=True)
    runner.capture(progress=False)
    drawn = [int(r.output[0]) for r in runner.run({"ids": [1, 2, 3], "row": [0]}, {"kv_lens": [1]}, 1)]
    assert drawn == _plain([1, 2, 3], 0, 1, (0, 1, 2, 0))


def test_the_registry_picks_by_kind_and_device() -> None:
    classes = {
        RunnerKind.DECODE: DecodeRunner,
        RunnerKind.TARGET_VERIFY: TargetVerifyRunner,
        RunnerKind.DRAFT_DECODE: DraftDecodeRunner,
        RunnerKind.DRAFT_EXTEND: DraftExtendRunner,
        RunnerKind.MULTI_STEP_DRAFT_EXTEND: MultiStepDraftExtendRunner,
    }
    assert set(classes) == set(RunnerKind)
    for kind, runner in classes.items():
        assert get_runner(kind, "npu:1") is runner and get_runner(kind, "cpu") is runner
    register_runner(RunnerKind.DECODE, "graph-test-device", "graph_runtime.window_runners:DraftExtendRunner")
    assert get_runner(RunnerKind.DECODE, "graph-test-device:3") is DraftExtendRunner
    assert get_runner(RunnerKind.DECODE, "npu") is DecodeRunner
    with pytest.raises(StepKindError):
        register_runner(RunnerKind.DECODE, "npu", "no_colon")
    with pytest.raises(ValueError, match="verify"):
        get_runner("verify", "npu")  # type: ignore[arg-type]


def test_results_are_read_while_the_next_step_runs() -> None:
    device = RecordingDevice(get_device("cpu"))
    results = HostResults(device, rows=3, width=2)
    first = results.fetch(torch.tensor([[1, 2], [3, 4]]))
    second = results.fetch(torch.tensor([[5, 6]]))
    assert device.events == ["copy", "fence"] * 2  # no wait
    with pytest.raises(SlotBusy, match="2 unread"):
        results.fetch(torch.tensor([[7, 8]]))
    assert first.read().tolist() == [[1, 2], [3, 4]] and first.was_read and second.done()
    third = results.fetch(torch.tensor([[7, 8]]))
    assert second.read().tolist() == [[5, 6]] and third.read().tolist() == [[7, 8]]
    for wrong in (torch.ones(4, 2, dtype=torch.int64), torch.ones(1, 3, dtype=torch.int64), torch.ones(1, 2)):
        with pytest.raises(OutputShapeError):
            results.fetch(wrong)


def test_a_result_that_does_not_come() -> None:
    results = HostResults(get_device("cpu"), rows=1, width=1)
    pending = results.fetch(torch.ones(1, 1, dtype=torch.int64))

    class Never:
        def done(self) -> bool:
            return False

        def wait(self, timeout: float | None) -> bool:
            return False

    reached, pending._fence = pending._fence, Never()
    with pytest.raises(FenceTimeout, match="still running"):
        pending.read(0.1)
    assert not pending.was_read
    pending._fence = reached
    assert pending.read().tolist() == [[1]]
