"""npu_grouped_matmul_swiglu_quant and its version 2: an expert's first product, activation and quantisation in one.

This module owns the ops' refusals; products are exact, the rest is float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import DeviceFault, KernelNotCovered
from .faults import fill_poison_
from .quant_matmul import product
from .quantising import quantise_rows
from .rules import declare, note, online, refuse

OP = "npu::npu_grouped_matmul_swiglu_quant"
OP_V2 = "npu::npu_grouped_matmul_swiglu_quant_v2"
_NAME = "npu_grouped_matmul_swiglu_quant[_v2]"
_DOC = online("torch_npu-npu_grouped_matmul_swiglu_quant_v2")
_TEST = "test_kernels_matmul.py"
FLOAT32 = 6
"""Number of float32 among c10 ScalarTypes."""

declare(
    _NAME,
    _DOC,
    _TEST,
    {
        "gsq-x": ("x (M, K) of int8, one weight (E, K, N) of int8, N even", "quantise and reshape them"),
        "gsq-scale": (
            "weight_scale (E, N) of float32, float16 or bfloat16, x_scale (M,) of float32",
            "cast and reshape the scales",
        ),
        "gsq-group": ("an int64 group_list (E,), group_list_type 0 (ends) or 1 (counts)", "cast it, or pass its type"),
        "gsq-none": ("no bias, no offset", "leave them None"),
        "gsq-mode": (
            "dequant_mode and quant_mode 0, dequant_dtype 0 or float32, quant_dtype 0 or 1 (int8)",
            "leave them alone, but pass dequant_dtype=torch.float32 where shapes are inferred",
        ),
    },
)
note(_NAME, "int8 weights in format NZ only", _DOC, "the format stays ND, so it cannot be checked")
note(
    "npu_grouped_matmul_swiglu_quant_v2",
    "dequant_dtype 0 only, its default",
    _DOC,
    "torch_npu's own Meta kernel refuses 0 and takes float32, so both are taken",
)
note(_NAME, "int4, float8 and microscaling forms; smooth_scale", _DOC, "not computed: `KernelNotCovered`: " + _TEST)
note(
    _NAME,
    "a group_list that never falls, nor goes past the rows",
    _DOC,
    "another one is a `DeviceFault` (507015); rows past it are poison: " + _TEST,
)


def _run(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    group_list: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor,
    kind: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    for name, tensor, rank in (("x", x, 2), ("weight", weight, 3)):
        if tensor.dtype == torch.int32:
            raise KernelNotCovered(op, name, "a tensor of dtype int32 (int4 packed)")
        if tensor.dtype != torch.int8 or tensor.dim() != rank:
            refuse(op, "gsq-x", name, f"{tensor.dtype}, shape {tuple(tensor.shape)}")
    experts, inner, columns = weight.shape
    if x.size(1) != inner or columns % 2:
        refuse(op, "gsq-x", "weight", f"shape {tuple(weight.shape)} for x of {tuple(x.shape)}")
    floats = (torch.float32, torch.float16, torch.bfloat16)
    if weight_scale.dtype not in floats or tuple(weight_scale.shape) != (experts, columns):
        refuse(op, "gsq-scale", "weight_scale", f"{weight_scale.dtype}, shape {tuple(weight_scale.shape)}")
    if x_scale.dtype != torch.float32 or tuple(x_scale.shape) != (x.size(0),):
        refuse(op, "gsq-scale", "x_scale", f"{x_scale.dtype}, shape {tuple(x_scale.shape)}")
    if group_list.dtype != torch.int64 or tuple(group_list.shape) != (experts,) or kind not in (0, 1):
        refuse(op, "gsq-group", "group_list", f"{group_list.dtype}, shape {tuple(group_list.shape)}, type {kind}")
    ends = (group_list.cumsum(0) if kind else group_list).tolist()
    if sorted(ends) != ends or ends[0] < 0 or ends[-1] > x.size(0):
        raise DeviceFault(op, f"group_list ends at rows {ends} of {x.size(0)}")
    out = fill_poison_(torch.empty(x.size(0), columns // 2, dtype=torch.int8))
    scales = fill_poison_(torch.empty(x.size(0), dtype=torch.float32))
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start == end:
            continue
        values = product(x[start:end], weight[expert]).float() * weight_scale[expert].float()
        gate, linear = (values * x_scale[start:end].view(-1, 1)).chunk(2, -1)
        out[start:end], scales[start:end] = quantise_rows(torch.nn.functional.silu(gate) * linear)
    return out, scales


def npu_grouped_matmul_swiglu_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_list: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Multiplies each expert's rows, scales them back, activates and quantises them.

    Args:
        x: Shape: [M, K]; int8.
        weight: Shape: [E, K, N]; int8. The first half of N is the gate.
        group_list: ends of the experts' rows. Shape: [E]; int64.
        weight_scale: Shape: [E, N].
        x_scale: Shape: [M]; float32.
        bias: None.
        offset: None.

    Returns:
        int8 [M, N / 2], scales float32 [M], and an undefined number. Rows past the last group are poison.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_grouped_matmul_swiglu_quant_v2.md (its int8 form).
    """
    for name, tensor in (("bias", bias), ("offset", offset)):
        if tensor is not None:
            refuse(OP, "gsq-none", name, f"shape {tuple(tensor.shape)}")
    out, scales = _run(OP, x, weight, group_list, weight_scale, x_scale, 0)
    return out, scales, fill_poison_(torch.empty((), dtype=torch.float32))


def npu_grouped_matmul_swiglu_quant_v2(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_scale: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    smooth_scale: torch.Tensor | None = None,
    weight_assist_matrix: Sequence[torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    dequant_mode: int | None = 0,
    dequant_dtype: int | None = 0,
    quant_mode: int | None = 0,
    quant_dtype: int | None = 1,
    group_list_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    weight_scale_dtype: int | None = None,
    x_scale_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with lists of one weight and one scale, and counts as ``group_list_type`` 1.

    See ``npu_grouped_matmul_swiglu_quant``; arguments that are not there must keep their defaults.
    """
    forms = {"smooth_scale": smooth_scale, "weight_assist_matrix": weight_assist_matrix, "x_dtype": x_dtype}
    forms |= {"weight_dtype": weight_dtype, "weight_scale_dtype": weight_scale_dtype, "x_scale_dtype": x_scale_dtype}
    for name, form in forms.items():
        if form is not None:
            raise KernelNotCovered(OP_V2, name, "a value")
    if bias is not None:
        refuse(OP_V2, "gsq-none", "bias", f"shape {tuple(bias.shape)}")
    if dequant_mode or dequant_dtype not in (0, FLOAT32) or quant_mode or quant_dtype not in (0, 1):
        given = f"{dequant_mode}, dequant_dtype {dequant_dtype}, quant_mode {quant_mode}, quant_dtype {quant_dtype}"
        refuse(OP_V2, "gsq-mode", "dequant_mode", given)
    if len(weight) != 1 or len(weight_scale) != 1:
        refuse(OP_V2, "gsq-x", "weight", f"{len(weight)} weights, {len(weight_scale)} scales")
    return _run(OP_V2, x, weight[0], group_list, weight_scale[0], x_scale, group_list_type)


KERNELS = {OP: npu_grouped_matmul_swiglu_quant, OP_V2: npu_grouped_matmul_swiglu_quant_v2}
