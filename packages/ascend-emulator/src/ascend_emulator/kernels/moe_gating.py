"""Choosing experts: npu_moe_gating_top_k_softmax (v1, v2), npu_moe_gating_top_k and npu_moe_compute_expert_tokens.

This module owns the ops' refusals; scores are float32. Of equal scores the lower index wins.
"""

from __future__ import annotations

import torch

from .errors import DeviceFault, KernelNotCovered
from .faults import fill_poison_
from .rules import META, declare, document, note, online, refuse

OP_SOFTMAX = "npu::npu_moe_gating_top_k_softmax"
OP_SOFTMAX_V2 = "npu::npu_moe_gating_top_k_softmax_v2"
OP_GROUPS = "npu::npu_moe_gating_top_k"
OP_COUNT = "npu::npu_moe_compute_expert_tokens"
_SOFTMAX = "npu_moe_gating_top_k_softmax[_v2]"
_TEST = "test_kernels_moe.py"
_SOFTMAX_DOC = online("torch_npu-npu_moe_gating_top_k_softmax")
_GROUPS_DOC = online("torch_npu-npu_moe_gating_top_k")
_COUNT_DOC = online("torch_npu-npu_moe_compute_expert_tokens")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)

declare(
    _SOFTMAX,
    _SOFTMAX_DOC,
    _TEST,
    {
        "gating-dtype": ("x of float16, bfloat16 or float32", "cast x"),
        "gating-rank": ("x of 2 or 3 axes", "reshape x"),
        "gating-k": ("k from 1 to the last axis of x, at most 1024", "ask for fewer experts"),
        "gating-finished": ("finished of dtype bool, shaped as x without its last axis", "cast and reshape it"),
    },
)
declare(
    "npu_moe_gating_top_k_softmax_v2",
    document("npu_moe_gating_top_k_softmax_v2"),
    _TEST,
    {"gating-renorm": ("renorm 0 or 1", "pass 0 or 1")},
)
declare(
    "npu_moe_gating_top_k",
    _GROUPS_DOC,
    _TEST,
    {
        "gating-groups-x": ("x (tokens, experts) of float16, bfloat16 or float32, at most 2048 experts", "reshape x"),
        "gating-groups-bias": ("a bias (experts,) of the dtype of x", "cast and reshape the bias"),
        "gating-groups-count": (
            "a group_count that divides the experts, in groups of more than 2; groups padded to 32 hold at most 2048",
            "pass another group_count",
        ),
        "gating-groups-k": (
            "1 <= k_group <= group_count, and k from 1 to the experts of k_group groups",
            "ask for fewer",
        ),
        "gating-groups-mode": ("group_select_mode 0 or 1, norm_type 0 or 1, renorm 0", "pass a supported mode"),
    },
)
declare(
    "npu_moe_compute_expert_tokens",
    _COUNT_DOC,
    _TEST,
    {
        "expert-tokens-rows": ("int32 rows of one axis, fewer than 2 ** 24", "cast and flatten them"),
        "expert-tokens-count": ("num_expert from 1 to 2048", "pass the number of experts"),
    },
)
note(
    _SOFTMAX,
    "finished rows take no part",
    _SOFTMAX_DOC,
    "their experts are the number of experts, their weights as computed: " + _TEST,
)
note(
    "npu_moe_gating_top_k",
    "input_ids with tid2eid (hash mode)",
    _GROUPS_DOC,
    "not computed: `KernelNotCovered`: " + _TEST,
)
note("npu_moe_gating_top_k", "norm_out without out_flag means nothing", _GROUPS_DOC, "it is poison: " + _TEST)
note(
    "npu_moe_gating_top_k",
    "groups of more than 2 experts",
    _GROUPS_DOC,
    "with one group any number of experts is taken",
)
note(
    "npu_moe_compute_expert_tokens",
    "rows that never fall, within the experts",
    _COUNT_DOC,
    "others are a `DeviceFault` (507015): " + _TEST,
)
note("npu_moe_gating_top_k_softmax_v2", "row indices", META, "version 2 returns the softmax in their place")


def _top(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest of the last axis, ties by index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _check_softmax(op: str, x: torch.Tensor, finished: torch.Tensor | None, k: int) -> None:
    if x.dtype not in _FLOATS:
        refuse(op, "gating-dtype", "x", x.dtype)
    if x.dim() not in (2, 3):
        refuse(op, "gating-rank", "x", f"shape {tuple(x.shape)}")
    if not 1 <= k <= min(x.size(-1), 1024):
        refuse(op, "gating-k", "k", f"{k} of {x.size(-1)} experts")
    if finished is not None and (finished.dtype != torch.bool or finished.shape != x.shape[:-1]):
        refuse(op, "gating-finished", "finished", f"{finished.dtype}, shape {tuple(finished.shape)}")


def npu_moe_gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest of a softmax.

    Args:
        x: Shape: [..., experts], 2 or 3 axes; float16, bfloat16 or float32.
        finished: None, or rows whose experts are all ``experts``, that is none. Shape: [...]; bool.
        k: experts a row.

    Returns:
        Weights (dtype of ``x``), experts (int32), and row numbers counted column by column (int32). Shape: [..., k].

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        op-plugin, torch_npu-npu_moe_gating_top_k_softmax.md.
    """
    _check_softmax(OP_SOFTMAX, x, finished, k)
    scores = torch.softmax(x.float(), -1)
    experts = _top(scores, k)
    weights = scores.gather(-1, experts).to(x.dtype)
    if finished is not None:
        experts = experts.masked_fill(finished.unsqueeze(-1), x.size(-1))
    rows = experts.numel() // k
    numbers = torch.arange(rows * k, dtype=torch.int32).view(k, rows).T.contiguous()
    return weights, experts.to(torch.int32), numbers.view(experts.shape)


def npu_moe_gating_top_k_softmax_v2(
    x: torch.Tensor,
    *,
    k: int = 1,
    finished: torch.Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest of a softmax, over all experts or over the chosen ones.

    Args:
        x: Shape: [..., experts], 2 or 3 axes; float16, bfloat16 or float32.
        k: experts a row.
        finished: as in ``npu_moe_gating_top_k_softmax``.
        renorm: 1 takes the softmax of the k largest of ``x``.
        output_softmax: whether the whole softmax is wanted (renorm 0 only).

    Returns:
        Weights (dtype of ``x``) and experts (int32) of shape [..., k]; the softmax (float32), or shape [0].

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        Document of torch_npu.npu_moe_gating_top_k_softmax_v2 in the torch_npu 2.12.0 wheel.
    """
    _check_softmax(OP_SOFTMAX_V2, x, finished, k)
    if renorm not in (0, 1):
        refuse(OP_SOFTMAX_V2, "gating-renorm", "renorm", renorm)
    whole = torch.softmax(x.float(), -1)
    if renorm:
        experts = _top(x.float(), k)
        weights = torch.softmax(x.float().gather(-1, experts), -1)
    else:
        experts = _top(whole, k)
        weights = whole.gather(-1, experts)
    if finished is not None:
        experts = experts.masked_fill(finished.unsqueeze(-1), x.size(-1))
    kept = whole if output_softmax and not renorm else torch.empty(0)
    return weights.to(x.dtype), experts.to(torch.int32), kept


def npu_moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chooses groups of experts, then experts within them.

    Args:
        x: Shape: [tokens, experts]; float16, bfloat16 or float32.
        k: experts a token.
        bias: None, or added to the scores for the choice only. Shape: [experts]; dtype of ``x``.
        input_ids: not computed.
        tid2eid: not computed.
        k_group: groups a token.
        group_count: number of groups.
        group_select_mode: a group's score: 0 its largest, 1 the sum of its two largest.
        renorm: 0.
        norm_type: scores: 0 softmax, 1 sigmoid (then the chosen ones are divided by their sum).
        out_flag: whether the scores are wanted.
        routed_scaling_factor: factor of the weights.
        eps: added to the sum.

    Returns:
        Weights (dtype of ``x``) and experts (int32) of shape [tokens, k]; scores float32 (poison when not wanted).

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_moe_gating_top_k.md.
    """
    for name, tensor in (("input_ids", input_ids), ("tid2eid", tid2eid)):
        if tensor is not None:
            raise KernelNotCovered(OP_GROUPS, name, f"a tensor of shape {tuple(tensor.shape)}")
    if x.dtype not in _FLOATS or x.dim() != 2 or x.size(1) > 2048:
        refuse(OP_GROUPS, "gating-groups-x", "x", f"{x.dtype}, shape {tuple(x.shape)}")
    experts = x.size(1)
    if bias is not None and (bias.dtype != x.dtype or tuple(bias.shape) != (experts,)):
        refuse(OP_GROUPS, "gating-groups-bias", "bias", f"{bias.dtype}, shape {tuple(bias.shape)}")
    if group_select_mode not in (0, 1) or norm_type not in (0, 1) or renorm != 0:
        given = f"{group_select_mode}, norm_type {norm_type}, renorm {renorm}"
        refuse(OP_GROUPS, "gating-groups-mode", "group_select_mode", given)
    width = experts // group_count if group_count > 0 else 0
    fits = group_count > 0 and experts % group_count == 0 and -(-width // 32) * 32 * group_count <= 2048
    if not fits or (group_count > 1 and width <= 2):
        refuse(OP_GROUPS, "gating-groups-count", "group_count", f"{group_count} for {experts} experts")
    if not 1 <= k_group <= group_count or not 1 <= k <= k_group * width:
        refuse(OP_GROUPS, "gating-groups-k", "k", f"{k} of {k_group} groups of {width}")
    scores = torch.sigmoid(x.float()) if norm_type else torch.softmax(x.float(), -1)
    ranked = scores if bias is None else scores + bias.float()
    if group_count > 1:
        grouped = ranked.view(x.size(0), group_count, width)
        best = grouped.topk(2 if group_select_mode else 1, -1).values.sum(-1)
        hidden = torch.ones_like(best, dtype=torch.bool).scatter(1, _top(best, k_group), False)
        ranked = grouped.masked_fill(hidden.unsqueeze(-1), float("-inf")).view_as(ranked)
    chosen = _top(ranked, k)
    weights = scores.gather(1, chosen)
    if norm_type:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    weights = (weights * routed_scaling_factor).to(x.dtype)
    return weights, chosen.to(torch.int32), scores if out_flag else fill_poison_(torch.empty_like(scores))


def npu_moe_compute_expert_tokens(sorted_expert_for_source_row: torch.Tensor, num_expert: int) -> torch.Tensor:
    """Ends of the experts' rows in a sorted list.

    Args:
        sorted_expert_for_source_row: experts of all rows, never falling. Shape: [rows]; int32.
        num_expert: number of experts.

    Returns:
        How many rows belong to experts 0 to i. Shape: [num_expert]; int32.

    Raises:
        OpRefused: a documented constraint is broken.
        DeviceFault: experts that fall, or outside the range.

    Source:
        op-plugin, torch_npu-npu_moe_compute_expert_tokens.md.
    """
    rows = sorted_expert_for_source_row
    if rows.dtype != torch.int32 or rows.dim() != 1 or rows.numel() >= 1 << 24:
        refuse(OP_COUNT, "expert-tokens-rows", "sorted_expert_for_source_row", f"{rows.dtype}, {tuple(rows.shape)}")
    if not 1 <= num_expert <= 2048:
        refuse(OP_COUNT, "expert-tokens-count", "num_expert", num_expert)
    if rows.numel() and (bool((rows.diff() < 0).any()) or int(rows[0]) < 0 or int(rows[-1]) >= num_expert):
        raise DeviceFault(OP_COUNT, f"sorted_expert_for_source_row falls, or leaves the range of {num_expert} experts")
    return torch.searchsorted(rows, torch.arange(num_expert, dtype=torch.int32), right=True).to(torch.int32)


KERNELS = {
    OP_SOFTMAX: npu_moe_gating_top_k_softmax,
    OP_SOFTMAX_V2: npu_moe_gating_top_k_softmax_v2,
    OP_GROUPS: npu_moe_gating_top_k,
    OP_COUNT: npu_moe_compute_expert_tokens,
}
