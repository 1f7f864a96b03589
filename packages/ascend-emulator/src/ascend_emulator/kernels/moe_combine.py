"""npu_moe_distribute_combine and its second version: experts' results go back to their tokens.

This module owns the ops' refusals; sums are float32, in the order of a token's choices, and rounded once.
"""

from __future__ import annotations

import torch

from .errors import DeviceFault, KernelNotCovered
from .expert_groups import exchange
from .expert_parallel import Layout, check_ids, check_layout, check_tokens, refuse
from .moe_dispatch import first_index

OP = "npu::npu_moe_distribute_combine"
OP_V2 = "npu::npu_moe_distribute_combine_v2"
Special = tuple[int, int, int, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
NO_SPECIAL: Special = (0, 0, 0, None, None, None, None)


def _check(
    op: str,
    rows: torch.Tensor,
    counts: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    shape: tuple[int, int],
    layout: Layout,
) -> None:
    if rows.dtype not in (torch.bfloat16, torch.float16) or rows.dim() != 2:
        refuse(op, "ep-rows", "expand_x", f"{rows.dtype}, shape {tuple(rows.shape)}")
    if counts.dtype != torch.int32 or counts.dim() != 1 or counts.numel() < layout.experts:
        refuse(op, "ep-counts", "ep_send_counts", f"{counts.dtype}, shape {tuple(counts.shape)}")
    length = shape[0] * shape[1] if op == OP else 128 * rows.size(0)
    if index.dtype != torch.int32 or index.dim() != 1 or index.numel() < length:
        name = "assist_info_for_combine" if op == OP_V2 else "expand_idx"
        refuse(op, "ep-index", name, f"{index.dtype}, shape {tuple(index.shape)} for {length}")
    if weights.dtype != torch.float32 or tuple(weights.shape) != shape:
        refuse(op, "ep-expert-scales", "expert_scales", f"{weights.dtype}, shape {tuple(weights.shape)}")


def _returned(
    op: str, rows: torch.Tensor, counts: torch.Tensor, index: torch.Tensor, experts: torch.Tensor, layout: Layout
) -> torch.Tensor:
    """The rows of this rank's choices, in the order of ``experts``. Shape: [choices, H]."""
    ends = counts[: layout.experts].long()
    lengths = ends.diff(prepend=ends.new_zeros(1))
    if bool((lengths < 0).any()) or int(ends[-1]) > rows.size(0):
        raise DeviceFault(op, f"ep_send_counts end at {int(ends[-1])} of {rows.size(0)} rows")
    sources = torch.arange(layout.ranks).repeat(layout.local).repeat_interleave(lengths)
    if op != OP and bool((index[: 3 * sources.numel()].view(-1, 3)[:, 0] != sources).any()):
        raise DeviceFault(op, "assist_info_for_combine and ep_send_counts do not come from one dispatch")
    given = lengths.view(layout.local, layout.ranks).t().contiguous()
    taken = exchange(layout.group, given)
    wanted = experts.bincount(minlength=layout.experts).view(layout.ranks, layout.local)
    if bool((taken != wanted).any()):
        raise DeviceFault(op, f"the ranks return {taken.tolist()} rows an expert, {wanted.tolist()} were sent")
    order = sources.argsort(stable=True)
    return exchange(layout.group, rows[order], given.sum(1).tolist(), taken.sum(1).tolist())


def _special(
    op: str, out: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first: int, special: Special
) -> None:
    """Adds what copy and constant experts give; zero experts give nothing. Mutates ``out``."""
    zeros, copies, constants, x, alpha, beta, bias = special
    if not copies + constants:
        return
    if x is None:
        refuse(op, "ep-ori-x", "ori_x", None)
    first += zeros
    share = (weights * ((ids >= first) & (ids < first + copies))).sum(-1, keepdim=True)
    out += share * x.float()
    for number in range(constants):
        if alpha is None or beta is None or bias is None:
            refuse(op, "ep-ori-x", "const_expert_v", None)
        value = alpha[number].float() * x.float() + beta[number].float() * bias[number].float()
        out += (weights * (ids == first + copies + number)).sum(-1, keepdim=True) * value


def combine(
    op: str,
    rows: torch.Tensor,
    ids: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    weights: torch.Tensor,
    layout: Layout,
    mask: torch.Tensor | None,
    shared: torch.Tensor | None,
    special: Special = NO_SPECIAL,
    algorithm: str = "",
) -> torch.Tensor:
    """Checks a call and adds up.

    Args:
        op: full op name; the first version's index has another form.
        rows: expand_x.
        ids: expert_ids.
        index: expand_idx or assist_info_for_combine.
        counts: ep_send_counts.
        weights: expert_scales.
        layout: the experts' layout.
        mask: x_active_mask.
        shared: shared_expert_x.
        special: numbers of zero, copy and constant experts, ori_x, and the constants.
        algorithm: comm_alg.

    Returns:
        Sums of the experts' rows. Shape: [BS, H]; float32.
    """
    count = ids.size(0)
    experts, places = check_ids(op, layout, ids, count, mask, algorithm)
    each = ids.size(1)
    _check(op, rows, counts, index, weights, (count, each), layout)
    hidden = rows.size(1)
    check_tokens(op, count, hidden, algorithm)
    if shared is not None and (shared.dtype != rows.dtype or shared.numel() != count * hidden):
        refuse(op, "ep-shared-x", "shared_expert_x", f"{shared.dtype}, shape {tuple(shared.shape)}")
    x = special[3]
    if x is not None and (x.dtype != rows.dtype or tuple(x.shape) != (count, hidden)):
        refuse(op, "ep-ori-x", "ori_x", f"{x.dtype}, shape {tuple(x.shape)}")
    if op == OP and not torch.equal(first_index(experts, places, count * each)[places], index[places]):
        raise DeviceFault(op, "expand_idx does not come from a dispatch of these expert_ids")
    results = torch.zeros(count * each, hidden)
    results[places] = _returned(op, rows, counts, index, experts, layout).float()
    out = torch.zeros(count, hidden)
    for number, part in enumerate(results.view(count, each, hidden).unbind(1)):
        out += weights[:, number, None] * part
    active = torch.ones(count, 1) if mask is None else mask.view(count, -1).any(-1, keepdim=True)
    chosen = weights if mask is None else weights * mask.view(count, -1)
    _special(op, out, ids, chosen, layout.experts, special)
    if shared is not None:
        out += shared.reshape(count, hidden).float() * active
    return out


def npu_moe_distribute_combine(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    expand_idx: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
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
) -> torch.Tensor:
    """Brings the experts' rows back and adds them up: ``sum of expert_scales * row``, and ``shared_expert_x``.

    Args:
        expand_x: the experts' results where dispatch put their tokens. Shape: [A, H]; bfloat16 or float16.
        expert_ids: as in dispatch, as is ``x_active_mask``.
        expand_idx: dispatch's third output.
        ep_send_counts: dispatch's fifth output.
        expert_scales: Shape: [BS, K]; float32.
        group_ep: as in dispatch, as the group's, ranks' and experts' other arguments.
        shared_expert_x: BS * H elements of ``expand_x``'s dtype.
        tp_send_counts: no effect, as every argument that is not named here.

    Returns:
        Shape: [BS, H]; dtype of ``expand_x``.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_moe_distribute_combine.md.
    """
    options: dict[str, int | str] = {
        "tp_world_size": tp_world_size, "expert_shard_type": expert_shard_type, "comm_quant_mode": comm_quant_mode,
        "shared_expert_rank_num": shared_expert_rank_num,
    }  # fmt: skip
    layout = check_layout(OP, group_ep, ep_world_size, ep_rank_id, moe_expert_num, options)
    return combine(
        OP, expand_x, expert_ids, expand_idx, ep_send_counts, expert_scales, layout, x_active_mask, shared_expert_x
    ).to(expand_x.dtype)


def npu_moe_distribute_combine_v2(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    assist_info_for_combine: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expand_scales: torch.Tensor | None = None,
    shared_expert_x: torch.Tensor | None = None,
    elastic_info: torch.Tensor | None = None,
    ori_x: torch.Tensor | None = None,
    const_expert_alpha_1: torch.Tensor | None = None,
    const_expert_alpha_2: torch.Tensor | None = None,
    const_expert_v: torch.Tensor | None = None,
    performance_info: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> torch.Tensor:
    """As ``npu_moe_distribute_combine``, after ``npu_moe_distribute_dispatch_v2``.

    Args as there, and:
        ori_x: the tokens before dispatch, for copy and constant experts. Shape: [BS, H].
        const_expert_alpha_1: Shape: [constant experts, H], as the next two: ``alpha_1 * ori_x + alpha_2 * v``.

    Source:
        op-plugin, torch_npu-npu_moe_distribute_combine_v2.md.
    """
    for name, value in (("elastic_info", elastic_info), ("performance_info", performance_info)):
        if value is not None:
            raise KernelNotCovered(OP_V2, name, value)
    options: dict[str, int | str] = {
        "tp_world_size": tp_world_size, "expert_shard_type": expert_shard_type, "comm_quant_mode": comm_quant_mode,
        "shared_expert_rank_num": shared_expert_rank_num, "comm_alg": comm_alg,
    }  # fmt: skip
    kinds = (zero_expert_num, copy_expert_num, const_expert_num)
    special = (*kinds, ori_x, const_expert_alpha_1, const_expert_alpha_2, const_expert_v)
    layout = check_layout(OP_V2, group_ep, ep_world_size, ep_rank_id, moe_expert_num, options, sum(kinds))
    return combine(
        OP_V2, expand_x, expert_ids, assist_info_for_combine, ep_send_counts, expert_scales, layout, x_active_mask,
        shared_expert_x, special, comm_alg,
    ).to(expand_x.dtype)  # fmt: skip


KERNELS = {OP: npu_moe_distribute_combine, OP_V2: npu_moe_distribute_combine_v2}
