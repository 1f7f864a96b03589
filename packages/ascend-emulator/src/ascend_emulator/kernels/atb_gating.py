"""Choosing experts with the ops of atb: _npu_group_topk and npu_fused_add_topk_div.

This module owns the ops' refusals; scores are float32. Of equal scores the lower index wins.
"""

from __future__ import annotations

import torch

from .errors import KernelNotCovered
from .rules import declare, note, refuse

OP_GROUPS = "atb::_npu_group_topk"
OP_FUSED = "atb::npu_fused_add_topk_div"
_GROUPS_DOC = "CANN 8.5, ATB API, GroupTopkOperation"
_FUSED_DOC = "CANN 8.5, ATB API, FusedAddTopkDivOperation"
_FUSED_CODE = "ascend-transformer-boost 1be1368, src/ops_infer/fused_add_topk_div"
_GOLDEN = "op-plugin 517f2e7, test/test_custom_ops/test_fused_add_topk_div.py"
_TEST = "test_kernels_atb_gating.py"
_HALVES = (torch.float16, torch.bfloat16)

declare(
    "_npu_group_topk",
    _GROUPS_DOC,
    _TEST,
    {
        "group-topk-x": ("self (tokens, experts) of float16 or bfloat16, 1 to 1024 experts", "cast and reshape it"),
        "group-topk-groups": ("a group_num from 1 on that divides the experts", "pass another group_num"),
        "group-topk-k": ("k from 1 to group_num", "ask for fewer groups, or name k (its default is 0)"),
        "group-topk-n": ("n from 1 to the experts of a group", "sum fewer"),
    },
)
declare(
    "npu_fused_add_topk_div[.out]",
    f"{_FUSED_DOC}; {_FUSED_CODE}",
    _TEST,
    {
        "fused-topk-x": (
            "x (tokens, experts) and add_num (experts,), both float16, bfloat16 or float32",
            "cast and reshape them",
        ),
        "fused-topk-groups": (
            "a group_num from 1 on that divides the experts into groups of at most 32; more than 32 experts: 8 groups",
            "pass another group_num",
        ),
        "fused-topk-k": (
            "group_topk from 1 to group_num, n from 1 to the experts of a group, k from 1 to the experts",
            "ask for fewer",
        ),
        "fused-topk-activation": ("activation_type None or activation_sigmoid", "leave it None"),
        "fused-topk-out": ("y (tokens, k) of float32 and indices (tokens, k) of int32", "allocate them so"),
    },
)
note(
    "npu_fused_add_topk_div[.out]",
    "enable_expert_mapping: the op picks one of an expert's copies pseudo-randomly",
    _FUSED_DOC,
    "how is not documented: `KernelNotCovered`: " + _TEST,
)
note(
    "npu_fused_add_topk_div[.out]",
    "scores of groups that are not chosen are 0",
    _GOLDEN,
    "as written; they win over negative ones: " + _TEST,
)
note("npu_fused_add_topk_div[.out]", "scale counts after the division", _FUSED_DOC, "without is_norm it has no effect")
note("_npu_group_topk", "the schema has no mark on self", _GROUPS_DOC, "it is written nevertheless: " + _TEST)


def _hide_groups(scores: torch.Tensor, groups: int, kept: int, n: int) -> torch.Tensor:
    """True for experts outside the ``kept`` groups whose n largest scores sum to most. Shape: that of ``scores``."""
    width = scores.size(1) // groups
    sums = scores.view(-1, groups, width).topk(n, -1).values.sum(-1)
    best = sums.sort(dim=-1, descending=True, stable=True).indices[:, :kept]
    hidden = torch.ones_like(sums, dtype=torch.bool).scatter(1, best, False)
    return hidden.repeat_interleave(width, 1)


def _npu_group_topk(self: torch.Tensor, k: int = 0, group_num: int = 1, n: int = 1) -> None:
    """Sets the scores of all but the best groups of experts to 0.

    Args:
        self: Shape: [tokens, experts]; float16 or bfloat16. *Mutated*.
        k: groups to keep.
        group_num: number of groups.
        n: largest scores of a group that are summed to compare it.

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        CANN 8.5, ATB API, GroupTopkOperation.
    """
    if self.dim() != 2 or self.dtype not in _HALVES or not 1 <= self.size(1) <= 1024:
        refuse(OP_GROUPS, "group-topk-x", "self", f"{self.dtype}, shape {tuple(self.shape)}")
    if group_num < 1 or self.size(1) % group_num:
        refuse(OP_GROUPS, "group-topk-groups", "group_num", f"{group_num} of {self.size(1)} experts")
    if not 1 <= k <= group_num:
        refuse(OP_GROUPS, "group-topk-k", "k", f"{k} of {group_num} groups")
    if not 1 <= n <= self.size(1) // group_num:
        refuse(OP_GROUPS, "group-topk-n", "n", f"{n} of {self.size(1) // group_num} experts")
    self.masked_fill_(_hide_groups(self.float(), group_num, k, n), 0)


def npu_fused_add_topk_div(
    x: torch.Tensor,
    add_num: torch.Tensor,
    *,
    mapping_num: torch.Tensor | None = None,
    mapping_table: torch.Tensor | None = None,
    activation_type: str | None = None,
    group_num: int = 1,
    group_topk: int = 1,
    n: int = 1,
    k: int = 1,
    is_norm: bool = True,
    scale: float = 1.0,
    enable_expert_mapping: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best experts of the best groups, by sigmoid plus bias, and their weights, the sigmoids.

    Args:
        x: Shape: [tokens, experts]; float16, bfloat16 or float32.
        add_num: bias. Shape: [experts]; dtype of ``x``.
        mapping_num: used with ``enable_expert_mapping`` alone.
        mapping_table: likewise.
        activation_type: None or "activation_sigmoid".
        group_num: number of groups.
        group_topk: groups to keep; the others' scores count as 0.
        n: largest scores of a group that are summed to compare it.
        k: experts a token.
        is_norm: whether weights are divided by their sum and multiplied by ``scale``.
        scale: factor.
        enable_expert_mapping: not computed.

    Returns:
        Weights float32 and experts int32. Shape: [tokens, k].

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        CANN 8.5, ATB API, FusedAddTopkDivOperation.
    """
    if x.dim() != 2 or x.dtype not in (*_HALVES, torch.float32):
        refuse(OP_FUSED, "fused-topk-x", "x", f"{x.dtype}, shape {tuple(x.shape)}")
    experts = x.size(1)
    if add_num.dtype != x.dtype or tuple(add_num.shape) != (experts,):
        refuse(OP_FUSED, "fused-topk-x", "add_num", f"{add_num.dtype}, shape {tuple(add_num.shape)}")
    if group_num < 1 or experts % group_num or experts > 32 * group_num or (group_num != 8 and experts > 32):
        refuse(OP_FUSED, "fused-topk-groups", "group_num", f"{group_num} of {experts} experts")
    limits = {"group_topk": (group_topk, group_num), "n": (n, experts // group_num), "k": (k, experts)}
    for name, (value, limit) in limits.items():
        if not 1 <= value <= limit:
            refuse(OP_FUSED, "fused-topk-k", name, f"{value} of {limit}")
    if activation_type not in (None, "activation_sigmoid"):
        refuse(OP_FUSED, "fused-topk-activation", "activation_type", repr(activation_type))
    if enable_expert_mapping:
        raise KernelNotCovered(OP_FUSED, "enable_expert_mapping", True)
    gates = torch.sigmoid(x.float())
    scores = gates + add_num.float()
    scores = scores.masked_fill(_hide_groups(scores, group_num, group_topk, n), 0)
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = gates.gather(1, chosen)
    if is_norm:
        weights = weights / weights.sum(-1, keepdim=True) * scale
    return weights, chosen.to(torch.int32)


def npu_fused_add_topk_div_out(
    x: torch.Tensor,
    add_num: torch.Tensor,
    *,
    mapping_num: torch.Tensor | None = None,
    mapping_table: torch.Tensor | None = None,
    activation_type: str | None = None,
    group_num: int = 1,
    group_topk: int = 1,
    n: int = 1,
    k: int = 1,
    is_norm: bool = True,
    scale: float = 1.0,
    enable_expert_mapping: bool = False,
    y: torch.Tensor,
    indices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same into given outputs. *Mutates* ``y`` and ``indices``; see ``npu_fused_add_topk_div``."""
    weights, chosen = npu_fused_add_topk_div(
        x,
        add_num,
        activation_type=activation_type,
        group_num=group_num,
        group_topk=group_topk,
        n=n,
        k=k,
        is_norm=is_norm,
        scale=scale,
        enable_expert_mapping=enable_expert_mapping,
    )
    for name, out, result in (("y", y, weights), ("indices", indices, chosen)):
        if out.dtype != result.dtype or out.shape != result.shape:
            refuse(OP_FUSED, "fused-topk-out", name, f"{out.dtype}, shape {tuple(out.shape)}")
    return y.copy_(weights), indices.copy_(chosen)


UNDECLARED_WRITES = {OP_GROUPS: ("self",)}
"""Arguments that an op writes although its schema does not say so."""
KERNELS = {
    OP_GROUPS: _npu_group_topk,
    OP_FUSED: npu_fused_add_topk_div,
    f"{OP_FUSED}.out": npu_fused_add_topk_div_out,
}
