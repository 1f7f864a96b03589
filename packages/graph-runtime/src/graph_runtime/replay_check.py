"""Replay equals eager, for any runner: batches of changing sizes in random order, compared output by output.

It owns the comparison. It is given the batches, for it does not know what a runner's inputs mean.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .device import HostLengths
from .errors import GraphError
from .outputs import clone_output
from .runner import DecodeRunner

__all__ = ["Batch", "ReplayCheck", "ReplayDiffers", "check_replay_equals_eager"]


class ReplayDiffers(GraphError, AssertionError):
    """A replay gave something else than the eager step on the same batch, or nothing was replayed at all."""


@dataclass(frozen=True)
class Batch:
    """What `DecodeRunner.run` takes for a step."""

    values: Mapping[str, Any]
    host_lists: Mapping[str, HostLengths]


@dataclass(frozen=True)
class ReplayCheck:
    """What a check saw.

    Attributes:
        replays: Bucket to number of replays that were compared.
        largest: The largest difference of an element.
    """

    replays: Mapping[int, int]
    largest: float


def check_replay_equals_eager(
    runner: DecodeRunner,
    draw: Callable[[random.Random, int], Batch],
    *,
    steps: int,
    seed: int,
    restore: Callable[[], object] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> ReplayCheck:
    """Runs every batch from a graph and eagerly, and compares.

    Sizes from no row to the largest bucket come in random order, each equally often, so that a large batch is followed
    by a small one in the same bucket, and the other way round. Give the runner buffers in poison mode.

    Args:
        runner: A captured runner.
        draw: Makes a batch of so many requests.
        steps: Batches.
        seed: Of the order and of what `draw` is given.
        restore: Called before every single run: puts back state that the forward changes.
        rtol: Relative tolerance where the eager step has fewer rows than the bucket: products of other shapes may be
            summed in another order. A batch that fills its bucket must give the same bits.
        atol: Absolute tolerance, likewise.

    Raises:
        ReplayDiffers: See the class; the text names the step, its rows and the bucket.
    """
    generator = random.Random(seed)
    sizes: list[int] = []
    replays: dict[int, int] = {}
    largest = 0.0
    for step in range(steps):
        if not sizes:
            sizes = list(range(runner.buckets.largest + 1))
            generator.shuffle(sizes)
        rows = sizes.pop()
        batch = draw(generator, rows)
        outputs: list[dict[Any, Any]] = []
        for eager in (True, False):
            if restore is not None:
                restore()
            result = runner.run(batch.values, batch.host_lists, rows, eager=eager)
            outputs.append(_flat(clone_output(result.output)))
        if result.bucket is None:
            continue
        replays[result.bucket] = replays.get(result.bucket, 0) + 1
        expected, got = outputs
        tolerance = (0.0, 0.0) if rows == result.bucket else (rtol, atol)
        for name, value in expected.items():
            difference = _difference(value, got[name], *tolerance)
            if difference is None:
                raise ReplayDiffers(
                    f"output {name!r} of step {step} (seed {seed}, {rows} rows, bucket {result.bucket})",
                    expected=f"what the eager step gives: {value}",
                    got=got[name],
                    consequence="The graph reads something that is not loaded or updated every step.",
                    remedy="Look for Python values and tensors that the forward reads and that are no static field.",
                )
            largest = max(largest, difference)
    if not replays:
        raise ReplayDiffers(
            "check",
            expected="at least one replay",
            got=runner.can_run(runner.buckets.largest),
            consequence="Nothing was compared.",
            remedy="Capture the runner first.",
        )
    return ReplayCheck(dict(sorted(replays.items())), largest)


def _flat(output: Any) -> dict[Any, torch.Tensor]:
    if isinstance(output, Mapping):
        items = dict(output)
    else:
        items = dict(enumerate(output)) if isinstance(output, tuple) else {0: output}
    return {name: item.cpu() for name, item in items.items() if item is not None}


def _difference(expected: torch.Tensor, got: torch.Tensor, rtol: float, atol: float) -> float | None:
    """The largest difference, or None where it is too large or the shapes or dtypes differ."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return None
    if not torch.allclose(got.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True):
        return None
    return float((got.double() - expected.double()).nan_to_num().abs().max()) if got.numel() else 0.0
