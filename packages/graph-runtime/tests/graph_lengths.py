"""An op whose output tells which KV lengths a graph really used."""

from __future__ import annotations

import torch
from graph_runtime import StepInputs

__all__ = ["ATTEND", "lengths", "shown"]

ATTEND = {"graph_test::attend": ("q_lens", "kv_lens")}


def lengths(step: StepInputs, lens: list[int]) -> torch.Tensor:
    """The KV lengths that a captured op reads, as an output of one row a request."""
    cache = torch.ones(1, 160, 1)
    query, table = torch.zeros(step.bs, 1), torch.zeros(step.bs, 1, dtype=torch.int64)
    values = torch.arange(160.0).view(1, 160, 1)  # the mean of the first n numbers tells n
    mean: torch.Tensor = torch.ops.graph_test.attend(query, cache, values, table, [1] * step.bs, lens)
    return mean[:, 0] * 2


def shown(length: int) -> float:
    """What `lengths` gives for a length."""
    return float(max(length - 1, 0))
