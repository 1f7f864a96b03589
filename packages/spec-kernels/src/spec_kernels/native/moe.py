"""Owns expert-parallel MoE in plain torch and torch.distributed; the contract is in `spec_kernels.moe`.

It is no custom operator: it sizes its messages by what the ranks tell each other, so it cannot be captured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spec_kernels.moe import ExpertLayout

__all__ = ["Dispatched", "dispatch", "run"]


class Dispatched(NamedTuple):
    """Rows that this rank's experts see.

    Attributes:
        rows: Expert after expert; of one expert by source rank, token, choice. Shape: [rows, hidden].
        counts: Rows of each expert of this rank. Shape: [local experts]; int64.
        order: Place of each row among those that arrived, which lie by source rank. Shape: [rows].
        sent: Rows that this rank sent to each expert. Shape: [experts].
        received: Rows by source rank and local expert. Shape: [ranks * local experts].
        places: Choice of each sent row, in `expert_ids.view(-1)`. Shape: [rows sent].
    """

    rows: torch.Tensor
    counts: torch.Tensor
    order: torch.Tensor
    sent: torch.Tensor
    received: torch.Tensor
    places: torch.Tensor


def dispatch(hidden_states: torch.Tensor, expert_ids: torch.Tensor, layout: ExpertLayout, group: Any) -> Dispatched:
    """Send every token to the ranks of its experts."""
    choices = expert_ids.shape[1]
    flat = expert_ids.reshape(-1).to(torch.int64)
    places = torch.where(flat >= 0, flat, layout.num_experts).argsort(stable=True)
    places = places[: int((flat >= 0).sum())]  # by expert, then token, then choice; padding is left out
    sent = torch.bincount(flat[places], minlength=layout.num_experts)
    rows = hidden_states[torch.div(places, max(choices, 1), rounding_mode="floor")]
    arrived, received = _exchange(rows, sent, layout, group)
    owner = torch.arange(layout.local, device=received.device).repeat(layout.ranks).repeat_interleave(received)
    order = owner.argsort(stable=True)
    counts = received.view(layout.ranks, layout.local).sum(0)
    return Dispatched(arrived[order], counts, order, sent, received, places)


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
    given = dispatch(hidden_states, expert_ids, layout, group)
    results = torch.empty(given.rows.shape, dtype=torch.float32, device=given.rows.device)
    parts = torch.split(given.rows, given.counts.tolist())
    results[given.order] = torch.cat([_expert(*each) for each in zip(parts, w13, w2, strict=True)])
    returned = _give_back(results, given.sent, given.received, layout, group)
    summands = torch.zeros((tokens * choices, hidden), dtype=torch.float32, device=hidden_states.device)
    summands[given.places] = returned
    weighted = summands.view(tokens, choices, hidden) * expert_weights.float().unsqueeze(2)
    live = (expert_ids >= 0).unsqueeze(2)
    return torch.where(live, weighted, 0.0).sum(1).to(hidden_states.dtype), given.counts


def _expert(rows: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = (rows.float() @ w13.float().t()).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ w2.float().t()


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
