"""npu_moe_distribute_combine_add_rms_norm: combine, then the residual's sum and its norm."""

from __future__ import annotations

import torch

from .errors import KernelNotCovered
from .expert_parallel import check_layout, refuse
from .moe_combine import combine
from .norms import npu_add_rms_norm
from .rules import declare, online

OP = "npu::npu_moe_distribute_combine_add_rms_norm"

declare(
    "npu_moe_distribute_combine_add_rms_norm",
    online("torch_npu-npu_moe_distribute_combine_add_rms_norm"),
    "test_kernels_expert_parallel.py",
    {
        "ep-norm-dtype": ("expand_x of bfloat16", "cast it"),
        "ep-norm-residual": ("residual_x (BS, 1, H), gamma (H,), both bfloat16", "cast and reshape them"),
        "ep-norm-usual": (
            "no activation_scale, weight_scale, group_list; out_dtype, comm_quant_mode, group_list_type 0; comm_alg ''",
            "leave them out",
        ),
    },
)


def npu_moe_distribute_combine_add_rms_norm(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    expand_idx: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    residual_x: torch.Tensor,
    gamma: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    group_list: torch.Tensor | None = None,
    expand_scales: torch.Tensor | None = None,
    shared_expert_x: torch.Tensor | None = None,
    elastic_info: torch.Tensor | None = None,
    ori_x: torch.Tensor | None = None,
    const_expert_alpha_1: torch.Tensor | None = None,
    const_expert_alpha_2: torch.Tensor | None = None,
    const_expert_v: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    out_dtype: int = 0,
    comm_quant_mode: int = 0,
    group_list_type: int = 0,
    comm_alg: str = "",
    norm_eps: float = 1e-06,
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``npu_moe_distribute_combine_v2``, then ``residual_x`` added and normalised as ``npu_add_rms_norm`` does.

    Args as there, and:
        expand_idx: dispatch's third output, of its second version.
        residual_x: Shape: [BS, 1, H]; bfloat16.
        gamma: Shape: [H]; bfloat16.
        norm_eps: added to the mean square.

    Returns:
        The normalised sum [BS, 1, H], the reciprocal root [BS, 1, 1] (float32), and the sum [BS, 1, H].

    Source:
        op-plugin, torch_npu-npu_moe_distribute_combine_add_rms_norm.md.
    """
    if elastic_info is not None:
        raise KernelNotCovered(OP, "elastic_info", elastic_info)
    unused = {
        "activation_scale": activation_scale, "weight_scale": weight_scale, "group_list": group_list,
        "out_dtype": out_dtype or None, "comm_quant_mode": comm_quant_mode or None,
        "group_list_type": group_list_type or None, "comm_alg": comm_alg or None,
    }  # fmt: skip
    for name, value in unused.items():
        if value is not None:
            refuse(OP, "ep-norm-usual", name, value if not isinstance(value, torch.Tensor) else "a tensor")
    if expand_x.dtype != torch.bfloat16:
        refuse(OP, "ep-norm-dtype", "expand_x", expand_x.dtype)
    wanted = (expert_ids.size(0), 1, expand_x.size(-1))
    for tensor, name, shape in ((residual_x, "residual_x", wanted), (gamma, "gamma", wanted[2:])):
        if tensor.dtype != torch.bfloat16 or tuple(tensor.shape) != shape:
            refuse(OP, "ep-norm-residual", name, f"{tensor.dtype}, shape {tuple(tensor.shape)}, wanted {shape}")
    options: dict[str, int | str] = {
        "tp_world_size": tp_world_size, "expert_shard_type": expert_shard_type,
        "shared_expert_rank_num": shared_expert_rank_num,
    }  # fmt: skip
    kinds = (zero_expert_num, copy_expert_num, const_expert_num)
    special = (*kinds, ori_x, const_expert_alpha_1, const_expert_alpha_2, const_expert_v)
    layout = check_layout(OP, group_ep, ep_world_size, ep_rank_id, moe_expert_num, options, sum(kinds))
    sums = combine(
        OP, expand_x, expert_ids, expand_idx, ep_send_counts, expert_scales, layout, x_active_mask, shared_expert_x,
        special,
    )  # fmt: skip
    return npu_add_rms_norm(sums.to(expand_x.dtype)[:, None], residual_x, gamma, norm_eps)


KERNELS = {OP: npu_moe_distribute_combine_add_rms_norm}
