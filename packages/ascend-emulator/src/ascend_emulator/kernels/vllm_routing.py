"""vLLM-Ascend's moe_gating_top_k and npu_moe_init_routing_custom: which experts, and rows in their order.

This module owns the ops' definitions (torch_npu has none). They are builds of operators that torch_npu has as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import moe_gating, moe_routing
from .definitions import define
from .faults import fill_poison_
from .rules import note
from .same_operator import called_as

OP_GATING = "_C_ascend::moe_gating_top_k"
OP_ROUTING = "_C_ascend::npu_moe_init_routing_custom"
SCHEMAS = (
    "moe_gating_top_k(Tensor x, int k, int k_group, int group_count, int group_select_mode, int renorm, int norm_type, "
    "bool out_flag, float routed_scaling_factor, float eps, Tensor? bias_opt=None) -> (Tensor y, Tensor expert_idx, "
    "Tensor out)",
    "npu_moe_init_routing_custom(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, "
    "int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0, "
    "bool expert_tokens_num_flag=False, int quant_mode=0, int[2] active_expert_range=[], int row_idx_type=0) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)

note(
    "_C_ascend::moe_gating_top_k, npu_moe_init_routing_custom",
    "dtypes, shapes and ranges",
    "vllm-ascend v0.23.0, csrc/moe (the same operators as torch_npu's)",
    "as the rows of npu_moe_gating_top_k and npu_moe_init_routing_v2 say, under this op's name; capacities "
    "(drop_pad_mode 1) are not computed: `KernelNotCovered`: test_kernels_vllm_experts.py",
)


def moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``npu::npu_moe_gating_top_k``, of the same operator; ``bias_opt`` is its ``bias``."""
    return called_as(
        OP_GATING, moe_gating.npu_moe_gating_top_k, x, k, bias=bias_opt, k_group=k_group, group_count=group_count,
        group_select_mode=group_select_mode, renorm=renorm, norm_type=norm_type, out_flag=out_flag,
        routed_scaling_factor=routed_scaling_factor, eps=eps,
    )  # fmt: skip


def npu_moe_init_routing_custom(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``npu::npu_moe_init_routing_v2``, with another default of ``quant_mode``.

    Counts and scales have their shapes whether they are wanted or not; they are poison then.
    """
    chosen = tuple(active_expert_range) or (0, expert_num)
    rows, index, counts, scales = called_as(
        OP_ROUTING, moe_routing.npu_moe_init_routing_v2, x, expert_idx, scale=scale, offset=offset,
        active_num=active_num, expert_capacity=expert_capacity, expert_num=expert_num, drop_pad_mode=drop_pad_mode,
        expert_tokens_num_type=expert_tokens_num_type, expert_tokens_num_flag=expert_tokens_num_flag,
        quant_mode=quant_mode, active_expert_range=chosen, row_idx_type=row_idx_type,
    )  # fmt: skip
    if not expert_tokens_num_flag:
        shape = (expert_num, 2) if expert_tokens_num_type == 2 else (chosen[1] - chosen[0],)
        counts = fill_poison_(torch.empty(shape, dtype=torch.int64))
    if quant_mode == 0:
        scales = fill_poison_(torch.empty(rows.size(0), dtype=torch.float32))
    return rows, index, counts, scales


def _gating_meta(x: torch.Tensor, k: int, *rest: Any) -> tuple[torch.Tensor, ...]:
    rows = x.size(0)
    return x.new_empty(rows, k), x.new_empty((rows, k), dtype=torch.int32), x.new_empty(x.shape, dtype=torch.float32)


def _routing_meta(x: torch.Tensor, expert_idx: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    experts, capacity = options.get("expert_num", -1), options.get("expert_capacity", -1)
    first, last = options.get("active_expert_range") or (0, experts)
    rows, active = expert_idx.numel(), options.get("active_num", -1)
    kept = min(rows, active) if active > 0 else rows
    shape: tuple[int, ...] = (kept, x.size(1))
    if options.get("drop_pad_mode", 0) == 1:
        shape = (experts, capacity, x.size(1))
    dtype = x.dtype if options.get("quant_mode", 0) == -1 else torch.int8
    counts = (experts, 2) if options.get("expert_tokens_num_type", 0) == 2 else (last - first,)
    return (
        x.new_empty(shape, dtype=dtype),
        expert_idx.new_empty(rows),
        x.new_empty(counts, dtype=torch.int64),
        x.new_empty(math.prod(shape[:-1]), dtype=torch.float32),
    )


_METAS: tuple[Callable[..., Any], ...] = (_gating_meta, _routing_meta)
for _schema, _meta in zip(SCHEMAS, _METAS, strict=True):
    define(_schema, "_C_ascend", _meta)
KERNELS = {OP_GATING: moe_gating_top_k, OP_ROUTING: npu_moe_init_routing_custom}
