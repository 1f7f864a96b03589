"""The records that pass between a runner, its forward and its caller.

It owns no behaviour beyond naming and counting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

__all__ = ["CaptureReport", "Decision", "EagerReason", "Mode", "RunnerCounters", "StepInputs", "StepResult"]

Mode = Literal["graph", "eager"]
"""How a step ran."""

EagerReason = Literal["no_bucket", "not_captured", "capture_failed", "graph_broken", "forced", "peers"]
"""Why a step ran without a graph; ``peers``: another rank has none for it."""


@dataclass(frozen=True)
class StepInputs:
    """What a forward reads.

    Attributes:
        tensors: Field name to static view; rows of the bucket (of the live batch in an eager step).
        host: Host list name to lengths, padded to `bs` with 0. Only lists of the update are here: any other would be
            baked into the graph.
        bs: Rows of the bucket, padded ones included.
        raw_bs: Live rows; 0 at capture and in an idle step.
    """

    tensors: Mapping[str, torch.Tensor]
    host: Mapping[str, list[int]]
    bs: int
    raw_bs: int


@dataclass(frozen=True)
class Decision:
    """Whether a batch can be replayed.

    Attributes:
        bucket: The bucket to replay, or None for an eager step.
        reason: Why eager; None with a bucket.
        detail: The same for a reader, with numbers.
    """

    bucket: int | None
    reason: EagerReason | None
    detail: str = ""


@dataclass(frozen=True)
class StepResult:
    """What a step gave.

    Attributes:
        output: The forward's tensor or tuple, cut to the live rows. After a replay these are views of static memory,
            which the next step overwrites, unless `run` was asked for a clone.
        mode: ``"graph"`` or ``"eager"``.
        bucket: The replayed bucket, or None.
        reason: Why eager, or None.
    """

    output: Any
    mode: Mode
    bucket: int | None
    reason: EagerReason | None


@dataclass(frozen=True)
class CaptureReport:
    """What a capture gave.

    Attributes:
        captured: Buckets that can be replayed.
        failed: Bucket to reason.
        updatable_ops: Bucket to number of captured ops that take updates.
        memory: Bucket to bytes that the device holds since its capture. Buckets share a pool and the largest is
            captured first, so a smaller one shows what it added.
    """

    captured: tuple[int, ...]
    failed: Mapping[int, str]
    updatable_ops: Mapping[int, int]
    memory: Mapping[int, int]


@dataclass
class RunnerCounters:
    """Steps of one runner.

    Attributes:
        graph_replays: Steps that were replayed.
        eager_steps: Reason to steps that were not.
        padded_rows: Rows replayed without a request.
    """

    graph_replays: int = 0
    eager_steps: dict[EagerReason, int] = field(default_factory=dict)
    padded_rows: int = 0
