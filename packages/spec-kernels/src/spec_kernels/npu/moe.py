"""Owns expert-parallel MoE over torch_npu: distribute-dispatch, grouped matmul, SwiGLU, distribute-combine.

Every rank passes `layout.max_tokens` rows; those past its own, and padded choices, are masked out. The contract is in
`spec_kernels.moe`, and so is the predicate that says which sizes the operators take.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch_npu

from spec_kernels.moe import ExpertLayout

__all__ = ["Dispatched", "dispatch", "run"]


class Dispatched(NamedTuple):
    """What the dispatch operator gave, and the arguments that combine must repeat.

    Attributes:
        rows: Expert after expert; of one expert by source rank, token, choice. What no row reaches is undefined.
            Shape: [room, hidden].
        counts: Rows of each expert of this rank. Shape: [local experts]; int64.
        assist: Where the rows came from, as combine wants it.
        send_counts: Running sums of the rows, as combine wants them.
        expert_ids: Chosen experts, padded. Shape: [max_tokens, choices]; int32.
        active: Which choices travel. Shape: [max_tokens, choices]; bool.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    assist: torch.Tensor
    send_counts: torch.Tensor
    expert_ids: torch.Tensor
    active: torch.Tensor


def dispatch(hidden_states: torch.Tensor, expert_ids: torch.Tensor, layout: ExpertLayout) -> Dispatched:
    """Send every token to the ranks of its experts; the layout has a limit of tokens and a name of the group."""
    assert layout.max_tokens is not None
    missing = layout.max_tokens - hidden_states.shape[0]
    ids = torch.nn.functional.pad(expert_ids.to(torch.int32), (0, 0, 0, missing), value=-1)
    active = ids >= 0
    ids = ids.clamp(min=0)
    rows = torch.nn.functional.pad(hidden_states, (0, 0, 0, missing)).contiguous()
    out = torch_npu.npu_moe_distribute_dispatch_v2(
        rows, ids, **_place(layout), x_active_mask=active, expert_token_nums_type=1
    )
    return Dispatched(out[0], out[3], out[2], out[4], ids, active)


def run(
    hidden_states: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    layout: ExpertLayout,
    group: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Backend entry; the operators address `group` by the layout's name of it."""
    given = dispatch(hidden_states, expert_ids, layout)
    ends = given.counts.cumsum(0)
    inner = _grouped(given.rows, w13, ends)
    results = _grouped(torch_npu.npu_swiglu(inner), w2, ends)
    tokens = hidden_states.shape[0]
    missing = given.expert_ids.shape[0] - tokens
    weights = torch.nn.functional.pad(expert_weights.float(), (0, 0, 0, missing))
    out = torch_npu.npu_moe_distribute_combine_v2(
        results, given.expert_ids, given.assist, given.send_counts, torch.where(given.active, weights, 0.0),
        **_place(layout), x_active_mask=given.active,
    )  # fmt: skip
    return out[:tokens], given.counts


def _grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`rows @ weights[expert].T` for the rows of each expert; weights are read where they lie."""
    out: torch.Tensor = torch_npu.npu_grouped_matmul(
        [rows], [weights.transpose(1, 2)], group_list=ends, group_list_type=0, group_type=0, split_item=2
    )[0]
    return out


def _place(layout: ExpertLayout) -> dict[str, Any]:
    return {
        "group_ep": layout.comm_name,
        "ep_world_size": layout.ranks,
        "ep_rank_id": layout.rank,
        "moe_expert_num": layout.num_experts,
    }
