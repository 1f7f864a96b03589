"""npu_moe_distribute_dispatch and its second version: every token goes to the ranks of its experts.

This module owns the order in which rows travel and lie: by expert, then by the rank they come from, then by token.
"""

from __future__ import annotations

import torch

from .errors import KernelNotCovered
from .expert_groups import exchange, gather
from .expert_parallel import Layout, check_ids, check_layout, check_tokens, refuse
from .faults import fill_poison_
from .quantising import to_integer

OP = "npu::npu_moe_distribute_dispatch"
OP_V2 = "npu::npu_moe_distribute_dispatch_v2"
_FLOATS = (torch.bfloat16, torch.float16)
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _check(
    op: str, x: torch.Tensor, ids: torch.Tensor, layout: Layout, quant: int, scales: torch.Tensor | None, counts: int
) -> None:
    if x.dtype == torch.int32:
        raise KernelNotCovered(op, "x", x.dtype)
    if x.dtype not in _FLOATS or x.dim() != 2:
        refuse(op, "ep-x", "x", f"{x.dtype}, shape {tuple(x.shape)}")
    if quant not in (0, 2) or (quant == 0 and scales is not None):
        refuse(op, "ep-quant", "quant_mode", f"{quant} with{'out' if scales is None else ''} scales")
    if scales is not None:
        fits = scales.dtype == torch.float32 and tuple(scales.shape) == (layout.experts, x.size(1))
        if not fits or not scales.is_contiguous():
            refuse(op, "ep-quant", "scales", f"{scales.dtype}, shape {tuple(scales.shape)}")
    if counts not in (0, 1):
        refuse(op, "ep-nums-type", "expert_token_nums_type", counts)


def _agree(op: str, x: torch.Tensor, each: int, layout: Layout, quant: int, global_bs: int, whole: bool) -> int:
    """Compares the ranks' calls; the number of tokens over all ranks that outputs have room for."""
    alike = [x.size(1), each, _FLOATS.index(x.dtype), layout.experts, layout.special, quant, global_bs]
    calls = gather(layout.group, [x.size(0), int(whole), *alike])
    if bool((calls[:, 2:] != calls[0, 2:]).any()):
        refuse(op, "ep-agree", "moe_expert_num", calls[:, 2:].tolist())
    tokens = calls[:, 0]
    uneven = bool((tokens != tokens[0]).any())
    if uneven and not bool(calls[:, 1].all()):
        refuse(op, "ep-mask-uneven", "x_active_mask", f"BS of {tokens.tolist()}")
    most = int(tokens.max()) * layout.ranks
    roomy = global_bs == 256 * layout.ranks and op == OP
    if (global_bs == 0 and uneven) or (global_bs not in (0, most) and not roomy):
        refuse(op, "ep-global-bs", "global_bs", f"{global_bs} for BS of {tokens.tolist()}")
    return global_bs or most


def _rows(
    x: torch.Tensor, experts: torch.Tensor, tokens: torch.Tensor, quant: int, scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The travelling rows and the scale of each (0 where they are not quantised)."""
    rows = x[tokens]
    if quant == 0:
        return rows, torch.zeros(rows.size(0))
    wide = rows.float()
    if scales is not None:
        wide = wide * scales[experts]
    top = wide.abs().amax(-1, keepdim=True)
    factor = torch.where(top == 0, torch.zeros_like(top), 127 / top)
    return to_integer(wide * factor), (top / 127)[:, 0]


def _dispatch(
    op: str,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    layout: Layout,
    scales: torch.Tensor | None,
    mask: torch.Tensor | None,
    expert_scales: torch.Tensor | None,
    options: dict[str, int | str],
) -> Outputs:
    quant, cumulative = int(options["quant_mode"]), options["expert_token_nums_type"] == 0
    algorithm = str(options.get("comm_alg", ""))
    _check(op, x, expert_ids, layout, quant, scales, int(options["expert_token_nums_type"]))
    count, hidden = x.shape
    check_tokens(op, count, hidden, algorithm)
    experts, places = check_ids(op, layout, expert_ids, count, mask, algorithm)
    each = expert_ids.size(1)
    if expert_scales is not None and (
        expert_scales.dtype != torch.float32 or tuple(expert_scales.shape) != (count, each)
    ):
        refuse(op, "ep-expert-scales", "expert_scales", f"{expert_scales.dtype}, shape {tuple(expert_scales.shape)}")
    whole = mask is None or bool(mask.all())
    room = _agree(op, x, each, layout, quant, int(options["global_bs"]), whole)

    tokens = places // each
    rows, row_scales = _rows(x, experts, tokens, quant, scales)
    weights = torch.zeros(rows.size(0)) if expert_scales is None else expert_scales.reshape(-1)[places]
    sent = experts.bincount(minlength=layout.experts).view(layout.ranks, layout.local)
    received = exchange(layout.group, sent)
    send, receive = sent.sum(1).tolist(), received.sum(1).tolist()
    sources = torch.arange(layout.ranks).repeat_interleave(torch.tensor(receive))
    kinds = torch.arange(layout.local).repeat(layout.ranks).repeat_interleave(received.view(-1))
    order = kinds.argsort(stable=True)
    found = exchange(layout.group, rows, send, receive)[order]
    beside = exchange(layout.group, torch.stack([row_scales, weights], 1), send, receive)[order]
    origin = exchange(layout.group, torch.stack([tokens, places % each], 1).int(), send, receive)

    size = room * min(layout.local, each)
    arrived = found.size(0)
    expand_x = fill_poison_(torch.empty(size, hidden, dtype=found.dtype))
    expand_x[:arrived] = found
    dynamic_scales = fill_poison_(torch.empty(size))
    if quant:
        dynamic_scales[:arrived] = beside[:, 0]
    sums = received.t().reshape(-1).cumsum(0).int()
    expand_scales = torch.empty(0)
    if expert_scales is not None:
        sums = torch.cat([sums, sums.new_zeros(room * 2 * each * (layout.ranks // 8))])
        expand_scales = fill_poison_(torch.empty(size))
        expand_scales[:arrived] = beside[:, 1]
    totals = received.sum(0)
    index = first_index(experts, places, count * each)
    if op == OP_V2:
        index = fill_poison_(torch.empty(max(count * each, size * 128), dtype=torch.int32))
        index[: 3 * arrived] = torch.cat([sources[:, None].int(), origin], 1)[order].view(-1)
    totals = totals.cumsum(0) if cumulative else totals
    beyond = torch.empty(int(options["tp_world_size"]), dtype=torch.int32)
    return expand_x, dynamic_scales, index, totals, sums, fill_poison_(beyond), expand_scales


def first_index(experts: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
    """Version 1's index: how many rows of the same rank a choice's expert has before it; 0 where nothing travels."""
    starts = torch.searchsorted(experts, experts)
    index = torch.zeros(size, dtype=torch.int32)
    index[places] = (torch.arange(experts.numel()) - starts).int()
    return index


def npu_moe_distribute_dispatch(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
) -> Outputs:
    """Sends every token to the ranks of its experts; every rank of the group calls it.

    Args:
        x: Shape: [BS, H]; bfloat16 or float16.
        expert_ids: Shape: [BS, K]; int32.
        group_ep: name of the group; see ``expert_groups``.
        ep_world_size: ranks of the group.
        ep_rank_id: this rank.
        moe_expert_num: experts over all ranks.
        scales: with ``quant_mode`` 2: factors before quantisation. Shape: [experts, H]; float32.
        x_active_mask: tokens that take part. Shape: [BS]; bool.
        expert_scales: weights that travel along. Shape: [BS, K]; float32.
        group_tp: no effect, as ``tp_rank_id`` and ``shared_expert_num``.
        tp_world_size: 0 or 1.
        expert_shard_type: 0, as ``shared_expert_rank_num``: shared experts are not computed.
        quant_mode: 0, or 2 for int8 rows with one scale each.
        global_bs: 0, or the largest BS times the ranks.
        expert_token_nums_type: 1 for counts, 0 for running sums.

    Returns:
        Rows received [A, H]; their scales [A]; for combine: the rows before each choice within its expert [BS * K];
        rows of each local expert (int64); running sums of rows by expert and source rank; ``tp_world_size`` numbers
        without meaning; weights of the rows [A] or nothing. What no row reaches is poison.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``. When one rank alone raises, the others wait for it.

    Source:
        op-plugin, torch_npu-npu_moe_distribute_dispatch.md.
    """
    options: dict[str, int | str] = {
        "tp_world_size": tp_world_size, "expert_shard_type": expert_shard_type, "quant_mode": quant_mode,
        "shared_expert_rank_num": shared_expert_rank_num, "global_bs": global_bs,
        "expert_token_nums_type": expert_token_nums_type,
    }  # fmt: skip
    layout = check_layout(OP, group_ep, ep_world_size, ep_rank_id, moe_expert_num, options)
    return _dispatch(OP, x, expert_ids, layout, scales, x_active_mask, expert_scales, options)


def npu_moe_distribute_dispatch_v2(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
    elastic_info: torch.Tensor | None = None,
    performance_info: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
    y_dtype: int | None = None,
    x_dtype: int | None = None,
    scales_dtype: int | None = None,
) -> Outputs:
    """As ``npu_moe_distribute_dispatch``, with another third output: (source rank, token, k) of every row received.

    Args as there, and:
        x_active_mask: or Shape: [BS, K].
        elastic_info: not computed, as ``performance_info``, ``y_dtype``, ``x_dtype`` and ``scales_dtype``.
        comm_alg: limits of BS, H and K depend on it, results do not.
        zero_expert_num: experts without a rank, with the ids after the others; then copy and constant experts.

    Source:
        op-plugin, torch_npu-npu_moe_distribute_dispatch_v2.md.
    """
    absent = {"elastic_info": elastic_info, "performance_info": performance_info, "y_dtype": y_dtype}
    for name, value in (absent | {"x_dtype": x_dtype, "scales_dtype": scales_dtype}).items():
        if value is not None:
            raise KernelNotCovered(OP_V2, name, value)
    options: dict[str, int | str] = {
        "tp_world_size": tp_world_size, "expert_shard_type": expert_shard_type, "quant_mode": quant_mode,
        "shared_expert_rank_num": shared_expert_rank_num, "global_bs": global_bs,
        "expert_token_nums_type": expert_token_nums_type, "comm_alg": comm_alg,
    }  # fmt: skip
    special = zero_expert_num + copy_expert_num + const_expert_num
    layout = check_layout(OP_V2, group_ep, ep_world_size, ep_rank_id, moe_expert_num, options, special)
    return _dispatch(OP_V2, x, expert_ids, layout, scales, x_active_mask, expert_scales, options)


KERNELS = {OP: npu_moe_distribute_dispatch, OP_V2: npu_moe_distribute_dispatch_v2}
