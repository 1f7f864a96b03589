"""Replay equals eager, over random batches in random order; and the check finds what a naive forward bakes in."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_runtime import (
    DecodeRunner,
    DraftDecodeRunner,
    StaticBuffers,
    StepInputs,
    TargetVerifyRunner,
    get_device,
    step_list,
)
from graph_runtime.keys import DerivedUpdate
from graph_runtime.testing import Batch, ReplayDiffers, check_replay_equals_eager
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_planner import RowField, RowLayout

PAGE, COLUMNS, WIDTH = 4, 3, 6
_CACHE = torch.randn(40, PAGE, WIDTH, generator=torch.Generator().manual_seed(5))


def _attend(x: torch.Tensor, table: torch.Tensor, lens: list[int]) -> torch.Tensor:
    attended: torch.Tensor = torch.ops.graph_test.attend(x, _CACHE, _CACHE, table, [1] * len(lens), lens)
    return attended


def _decode(step: StepInputs) -> torch.Tensor:
    return _attend(step.tensors["x"], step.tensors["table"], step.host["kv_lens"]) + step.tensors["noise"][:, None]


def _verify(step: StepInputs) -> dict[str, torch.Tensor]:
    seen = _decode(step)
    return {"first": seen, "window": step.tensors["ids"] * seen.sum(1).repeat_interleave(2, output_size=2 * step.bs)}


def _draft(step: StepInputs) -> tuple[torch.Tensor, None]:
    x = step.tensors["x"]
    for k in range(2):
        x = torch.tanh(x + _attend(x, step.tensors["table"], step.host[step_list("kv_lens", k)]))
    return x + step.tensors["noise"][:, None], None


KINDS: dict[str, tuple[Any, Callable[[StepInputs], Any], dict[str, Any]]] = {
    "decode": (DecodeRunner, _decode, {"update": DerivedUpdate()}),
    "verify": (
        TargetVerifyRunner,
        _verify,
        {"window": 2, "kind": "eagle", "token_fields": ["ids"], "output_rows_per_request": {"first": 1, "window": 2}},
    ),
    "draft": (DraftDecodeRunner, _draft, {"steps": 2, "rows_per_request": {"ids": 2}}),
}


def _make(kind: str, forward: Callable[[StepInputs], Any] | None = None) -> DecodeRunner:
    device = get_device("cpu", updatable={"graph_test::attend": ("q_lens", "kv_lens")})
    layout = RowLayout(
        [
            RowField("x", "float32", rows=5, width=WIDTH, fill=0),
            RowField("table", "int64", rows=5, width=COLUMNS),
            RowField("ids", "float32", rows=10, fill=0),
            RowField("noise", "float32", rows=5, fill=0),
        ]
    )
    cls, own, options = KINDS[kind]
    rows = {"rows_per_request": {"ids": 2}} if kind == "decode" else {}
    noise = torch.zeros(5)

    def before(step: StepInputs) -> None:  # written on the device, poisoned by the load
        step.tensors["noise"].copy_(noise[: step.bs])

    buffers = StaticBuffers(layout, device, device_written=["noise"], poison=True)
    made: DecodeRunner = cls(
        device=device, forward=forward or own, buffers=buffers, buckets=[1, 2, 5], before_step=before, **rows, **options
    )
    made.capture(progress=False)
    return made


def _draw(generator: random.Random, rows: int) -> Batch:
    made = torch.Generator().manual_seed(generator.randrange(1 << 30))
    return Batch(
        {
            "x": torch.randn(rows, WIDTH, generator=made),
            "table": torch.randint(1, 40, (rows, COLUMNS), generator=made),
            "ids": torch.randn(2 * rows, generator=made),
        },
        {"kv_lens": [generator.randint(1, PAGE * COLUMNS - 2) for _ in range(rows)]},
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=3)
@given(seed=st.integers(0, 1 << 30))
def test_replay_equals_eager(kind: str, seed: int) -> None:
    runner = _make(kind)
    seen = check_replay_equals_eager(runner, _draw, steps=18, seed=seed, rtol=1e-6, atol=1e-6)
    assert seen.replays == {1: 6, 2: 3, 5: 9} and seen.largest <= 1e-5
    runner.close()


def test_what_a_forward_bakes_in_is_found() -> None:
    """Naive: the forward reads a Python number, and a tensor that is made anew each step."""
    scale = [1.0]

    def number(step: StepInputs) -> torch.Tensor:
        scale[0] += 1.0
        return _decode(step) * scale[0]

    def live_rows(step: StepInputs) -> torch.Tensor:
        out = _decode(step)
        out[: step.raw_bs] += 1.0
        return out

    for forward in (number, live_rows):
        runner = _make("decode", forward)
        with pytest.raises(ReplayDiffers, match="static field") as caught:
            check_replay_equals_eager(runner, _draw, steps=12, seed=1, atol=1e-5)
        assert isinstance(caught.value, AssertionError) and "seed 1" in str(caught.value)
        runner.close()


def test_a_check_of_nothing_is_an_error() -> None:
    runner = _make("decode")
    runner._graphs.close()
    with pytest.raises(ReplayDiffers, match="Nothing was compared"):
        check_replay_equals_eager(runner, _draw, steps=6, seed=1)


def test_state_is_restored_before_every_run() -> None:
    total = torch.zeros(WIDTH)

    def forward(step: StepInputs) -> torch.Tensor:
        total.add_(1.0)
        return _decode(step) + total

    runner = _make("decode", forward)
    with pytest.raises(ReplayDiffers):
        check_replay_equals_eager(runner, _draw, steps=12, seed=2, atol=1e-5)
    check_replay_equals_eager(runner, _draw, steps=12, seed=2, restore=total.zero_, atol=1e-5)
