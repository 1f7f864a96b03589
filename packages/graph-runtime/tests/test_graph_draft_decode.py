"""Draft decode on a CPU: each step of one graph with lengths of its own, counted against what was captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_lengths import ATTEND, lengths, shown
from graph_runtime import DraftDecodeRunner, StaticBuffers, StepInputs, get_device, step_list
from graph_runtime.errors import UncoveredKey, UpdateCountMismatch
from kv_planner import RowField, RowLayout


def _draft(closing: Callable[[Any], Any], ops: int = 1, **options: Any) -> DraftDecodeRunner:
    device = get_device("cpu", updatable=ATTEND)
    layout = RowLayout([RowField("x", "float32", rows=4)])

    def forward(step: StepInputs) -> torch.Tensor:
        rows = [lengths(step, step.host[step_list("kv_lens", k)]) for k in range(3) for _ in range(ops)]
        return torch.stack(rows, 1)

    runner: DraftDecodeRunner = closing(
        DraftDecodeRunner(
            steps=3, device=device, forward=forward, buffers=StaticBuffers(layout, device), buckets=[2, 4], **options
        )
    )
    return runner


@pytest.mark.parametrize("ops", [1, 2])
def test_each_draft_step_has_its_own_length(closing: Callable[[Any], Any], ops: int) -> None:
    """E13: [100] is 101, 102, 103 in graph and eager alike."""
    runner = _draft(closing, ops, ops_per_step=ops)
    assert runner.capture(progress=False).updatable_ops == {2: 3 * ops, 4: 3 * ops}
    for lens in ([100, 8], [5, 101]):
        for eager in (False, True):
            found = runner.run({"x": [0.0, 0.0]}, {"kv_lens": lens}, 2, eager=eager).output.tolist()
            for row, length in zip(found, lens, strict=True):
                assert row == pytest.approx([shown(length + k + 1) for k in range(3) for _ in range(ops)])
    assert runner.steps == 3


def test_the_number_of_draft_ops_is_counted(closing: Callable[[Any], Any]) -> None:
    with pytest.raises(UpdateCountMismatch, match="3 steps of 1"):
        _draft(closing, 2).capture(progress=False)


@pytest.mark.parametrize("listed", [False, True])
def test_a_draft_whose_ops_take_devicelengths(closing: Callable[[Any], Any], listed: bool) -> None:
    """It brings no list; an op that was given one all the same would keep it for ever."""
    device = get_device("cpu", updatable=ATTEND)
    layout = RowLayout([RowField("x", "float32", rows=4), RowField("lens", "int64", rows=4)])

    def forward(step: StepInputs) -> torch.Tensor:
        if listed:
            return lengths(step, [7] * step.bs)
        return torch.stack([step.tensors["lens"] + k + 1 for k in range(3)], 1)

    runner = closing(
        DraftDecodeRunner(
            steps=3,
            ops_per_step=0,
            device=device,
            forward=forward,
            buffers=StaticBuffers(layout, device),
            buckets=[2, 4],
        )
    )
    if listed:
        with pytest.raises(UncoveredKey, match="capture time"):
            runner.capture(progress=False)
        return
    runner.capture(progress=False)
    result = runner.run({"x": [0.0, 0.0], "lens": [100, 8]}, {}, 2)
    assert (result.mode, result.output.tolist()) == ("graph", [[101, 102, 103], [9, 10, 11]])


def test_a_draft_at_the_end_of_its_table(closing: Callable[[Any], Any]) -> None:
    """C10: a table of 150 tokens; naively step 2 asks for token 151."""
    runner = _draft(closing, longest=150)
    runner.capture(progress=False)
    found = runner.run({"x": [0.0, 0.0]}, {"kv_lens": [148, 149]}, 2).output.tolist()
    assert found == [pytest.approx([shown(n) for n in row]) for row in ([149, 150, 150], [150, 150, 150])]
