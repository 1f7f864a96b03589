"""Owns expert-parallel MoE in plain torch and torch.distributed; the contract is in `spec_kernels.moe`.

It is no custom operator: it sizes its messages by what the ranks tell each other, so it cannot be captured.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from spec_kernels.moe import ExpertLayout

__all__ = ["run"]


def run(
    hidden_states: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    layout: ExpertLayout,
    group: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Backend entry."""
    tokens, hidden = hidden_states.shape
    choices = expert_ids.shape[1]
    flat = expert_ids.reshape(-1).to(torch.int64)
    order = torch.where(flat >= 0, flat, layout.num_experts).argsort(stable=True)
    order = order[: int((flat >= 0).sum())]  # by expert, then token, then choice; padding is left out
    sent = torch.bincount(flat[order], minlength=layout.num_experts)
    rows = hidden_states[torch.div(order, max(choices, 1), rounding_mode="floor")]
    received, counts = _exchange(rows, sent, layout, group)
    results = torch.empty(received.shape, dtype=torch.float32, device=received.device)
    by_source = counts.view(layout.ranks, layout.local)
    for expert, places in enumerate(_places(by_source)):
        results[places] = _expert(received[places], w13[expert], w2[expert])
    returned = _give_back(results, sent, counts, layout, group)
    parts = torch.zeros((tokens * choices, hidden), dtype=torch.float32, device=hidden_states.device)
    parts[order] = returned
    weighted = parts.view(tokens, choices, hidden) * expert_weights.float().unsqueeze(2)
    live = (expert_ids >= 0).unsqueeze(2)
    return torch.where(live, weighted, 0.0).sum(1).to(hidden_states.dtype), by_source.sum(0)


def _expert(rows: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = (rows.float() @ w13.float().t()).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ w2.float().t()


def _places(counts: torch.Tensor) -> list[torch.Tensor]:
    """Received rows of each local expert, in the order of the source ranks. Counts: [ranks, local experts]."""
    owner = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    owner = owner.repeat_interleave(counts.flatten())
    return [(owner == expert).nonzero().flatten() for expert in range(counts.shape[1])]


def _splits(counts: torch.Tensor, layout: ExpertLayout) -> list[int]:
    split: list[int] = counts.view(layout.ranks, layout.local).sum(1).tolist()
    return split


def _exchange(
    rows: torch.Tensor, sent: torch.Tensor, layout: ExpertLayout, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows for this rank's experts, source rank after source rank, and how many each rank sent each expert."""
    if layout.ranks == 1:
        return rows, sent
    counts = torch.empty_like(sent)
    dist.all_to_all_single(counts, sent, group=group)
    arriving = _splits(counts, layout)
    received = rows.new_empty((sum(arriving), rows.shape[1]))
    dist.all_to_all_single(received, rows.contiguous(), arriving, _splits(sent, layout), group=group)
    return received, counts


def _give_back(
    results: torch.Tensor, sent: torch.Tensor, counts: torch.Tensor, layout: ExpertLayout, group: Any
) -> torch.Tensor:
    if layout.ranks == 1:
        return results
    returned = results.new_empty((int(sent.sum()), results.shape[1]))
    dist.all_to_all_single(returned, results, _splits(sent, layout), _splits(counts, layout), group=group)
    return returned
