"""npu_moe_init_routing_quant: tokens sorted by expert and quantised.

This module owns the op's refusals. The forms with a place for each token of an expert (drop/pad) are not computed.
"""

from __future__ import annotations

import torch

from .errors import DeviceFault, KernelNotCovered
from .quantising import quantise_rows, to_integer
from .rules import declare, note, refuse

OP = "npu::npu_moe_init_routing_quant"
_NAME = "npu_moe_init_routing_quant"
_DOC = "ops-transformer, moe/moe_init_routing_quant_v2/README.md"
_CODE = "op-plugin 517f2e7, op_plugin/ops/opapi/MoeInitRoutingQuantKernelNpuOpApi.cpp"
_TEST = "test_kernels_moe_quant.py"

declare(
    _NAME,
    _DOC,
    _TEST,
    {
        "routingq-x": ("x (rows, H) of float16, bfloat16 or float32", "cast and reshape x"),
        "routingq-experts": ("an int32 expert_idx (rows, K)", "cast and reshape it"),
        "routingq-scale": (
            "a float32 scale: static (1,), needed; dynamic (expert_num or 1, H) or none",
            "cast and reshape the scale",
        ),
        "routingq-offset": ("a float32 offset (1,) in static quantisation, needed there, and nowhere else", "pass it"),
        "routingq-active": ("an active_num of 0 or more", "pass 0 for all rows"),
    },
)
declare(
    _NAME,
    _CODE,
    _TEST,
    {
        "routingq-type": (
            "drop_pad_mode and quant_mode 0 or 1, expert_tokens_num_mode 0, 1 or 2",
            "pass a supported mode",
        )
    },
)
declare(
    _NAME,
    "(not documented) the limit of npu_moe_init_routing_v2",
    _TEST,
    {
        "routingq-num": ("an expert_num of 1 to 10240", "pass the number of experts"),
    },
)
note(_NAME, "experts within expert_num", _DOC, "others are a `DeviceFault` (507015): " + _TEST)
note(_NAME, "drop_pad_mode 1", _DOC, "not computed: `KernelNotCovered`: " + _TEST)
note(_NAME, "outputs that no argument asks for", _CODE, "undefined tensors, in Python None: " + _TEST)


def _check(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    scale: torch.Tensor | None,
    offset: torch.Tensor | None,
    expert_num: int,
    quant_mode: int,
) -> None:
    if x.dim() != 2 or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        refuse(OP, "routingq-x", "x", f"{x.dtype}, shape {tuple(x.shape)}")
    if expert_idx.dtype != torch.int32 or expert_idx.dim() != 2 or expert_idx.size(0) != x.size(0):
        refuse(OP, "routingq-experts", "expert_idx", f"{expert_idx.dtype}, shape {tuple(expert_idx.shape)}")
    shapes = [(expert_num, x.size(1)), (1, x.size(1))] if quant_mode else [(1,)]
    if scale is None and quant_mode == 0:
        refuse(OP, "routingq-scale", "scale", None)
    if scale is not None and (scale.dtype != torch.float32 or tuple(scale.shape) not in shapes):
        refuse(OP, "routingq-scale", "scale", f"{scale.dtype}, shape {tuple(scale.shape)}")
    if (offset is None) == (quant_mode == 0):
        refuse(OP, "routingq-offset", "offset", f"{'a tensor' if offset is not None else None}, mode {quant_mode}")
    if offset is not None and (offset.dtype != torch.float32 or tuple(offset.shape) != (1,)):
        refuse(OP, "routingq-offset", "offset", f"{offset.dtype}, shape {tuple(offset.shape)}")


def npu_moe_init_routing_quant(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = 1024,
    expert_capacity: int = 0,
    expert_num: int = 256,
    drop_pad_mode: int = 0,
    expert_tokens_num_mode: int = 0,
    expert_tokens_before_capacity_flag: bool = False,
    quant_mode: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None, torch.Tensor | None]:
    """Sorts tokens by expert, each as often as it has experts, and quantises them to int8.

    Args:
        x: Shape: [rows, H]; float16, bfloat16 or float32.
        expert_idx: experts of each row. Shape: [rows, K]; int32.
        scale: static: [1]; dynamic: None, or factors before quantisation, [expert_num or 1, H]; float32.
        offset: static: [1]; float32.
        active_num: most expanded rows; 0 for all.
        expert_capacity: no effect without drop_pad_mode.
        expert_num: number of experts.
        drop_pad_mode: 0.
        expert_tokens_num_mode: 0 none, 1 running sums, 2 counts.
        expert_tokens_before_capacity_flag: no effect without drop_pad_mode.
        quant_mode: 0 static, 1 dynamic.

    Returns:
        Expanded rows [min(rows * K, active_num), H] int8; place of each (row, k) among them [rows * K] int32; tokens
        of the experts [expert_num] int32 or None; None; scales of the expanded rows float32, static: None.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        ops-transformer, moe_init_routing_quant_v2/README.md; op-plugin, MoeInitRoutingQuantKernelNpuOpApi.cpp.
    """
    modes = {"drop_pad_mode": (drop_pad_mode, 1), "quant_mode": (quant_mode, 1)}
    for name, (mode, last) in (modes | {"expert_tokens_num_mode": (expert_tokens_num_mode, 2)}).items():
        if not 0 <= mode <= last:
            refuse(OP, "routingq-type", name, mode)
    if drop_pad_mode:
        raise KernelNotCovered(OP, "drop_pad_mode", drop_pad_mode)
    if active_num < 0:
        refuse(OP, "routingq-active", "active_num", active_num)
    if not 0 < expert_num <= 10240:
        refuse(OP, "routingq-num", "expert_num", expert_num)
    _check(x, expert_idx, scale, offset, expert_num, quant_mode)
    experts = expert_idx.flatten().long()
    if experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < expert_num:
        raise DeviceFault(OP, f"expert_idx reaches from {int(experts.min())} to {int(experts.max())} of {expert_num}")
    order = experts.argsort(stable=True)
    kept = order[: active_num or None]
    rows = x.float()[kept // max(1, expert_idx.size(1))]
    scales = None
    if quant_mode == 0 and scale is not None and offset is not None:
        expanded = to_integer(rows * scale + offset)
    else:
        if scale is not None:
            rows = rows * scale[experts[kept] if scale.size(0) > 1 else torch.zeros_like(kept)]
        expanded, scales = quantise_rows(rows)
    counts = None
    if expert_tokens_num_mode:
        counts = torch.bincount(experts, minlength=expert_num)
        counts = (counts.cumsum(0) if expert_tokens_num_mode == 1 else counts).to(torch.int32)
    return expanded, order.argsort().to(torch.int32), counts, None, scales


KERNELS = {OP: npu_moe_init_routing_quant}
