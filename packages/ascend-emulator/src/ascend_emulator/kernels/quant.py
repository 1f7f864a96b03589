"""npu_dynamic_quant and npu_quantize: activations to int8.

This module owns the two ops' refusals; rounding and scales are in ``quantising.py``.
"""

from __future__ import annotations

import torch

from .errors import DeviceFault, KernelNotCovered
from .pose import Scope
from .quant_params import npu_convert_weight_to_int4pack
from .quantising import MOST, dtype_of, float8_of, quantise_rows, to_integer
from .rules import declare, holds, note, online, refuse

OP_DYNAMIC = "npu::npu_dynamic_quant"
OP_QUANTIZE = "npu::npu_quantize"
_TEST = "test_kernels_quant.py"
_DYNAMIC_DOC = online("torch_npu-npu_dynamic_quant")
_QUANTIZE_DOC = online("torch_npu-npu_quantize")
_HALVES = (torch.float16, torch.bfloat16)
_QUINT4X2 = 16
"""c10's number of quint4x2."""
_TARGETS = {0: torch.uint8, 1: torch.int8, 3: torch.int32, 12: torch.int8, 13: torch.uint8, 14: torch.int32}
"""Results of npu_quantize by dtype number: uint8, int8, int32, and qint8, quint8, qint32."""

declare(
    "npu_dynamic_quant",
    _DYNAMIC_DOC,
    _TEST,
    {
        "dynamic-dtype": ("an input and smooth_scales of float16 or bfloat16", "cast them"),
        "dynamic-rank": ("an input of 2 axes or more", "add an axis"),
        "dynamic-smooth": (
            "smooth_scales (last axis,), or (groups, last axis) with group_index",
            "reshape smooth_scales",
        ),
        "dynamic-group": ("an int32 group_index (groups,), with smooth_scales", "cast it; pass smooth_scales too"),
        "dynamic-mode": ("quant_mode pertoken, perchannel or pertensor", "pass 'pertoken'"),
    },
)
declare(
    "npu_dynamic_quant",
    _DYNAMIC_DOC,
    _TEST,
    {"dynamic-int4": ("quint4x2: a last axis that is a multiple of 8, one scale a row", "pad the last axis")},
)
declare(
    "npu_dynamic_quant",
    _DYNAMIC_DOC,
    _TEST,
    {"dynamic-integer": ("a dst_type of int8 or quint4x2", "pass torch.int8")},
    Scope(chips=("910B", "910C")),
)
note(
    "npu_dynamic_quant",
    "float8 results: largest magnitude / largest number of the type",
    "ops-nn e5c3fa932, quant/dynamic_quant/docs/aclnnDynamicQuantV3.md",
    "as written, for chip 950: " + _TEST,
)
declare(
    "npu_quantize",
    _QUANTIZE_DOC,
    _TEST,
    {
        "quantize-dtype": ("an input of float32, float16 or bfloat16", "cast the input"),
        "quantize-scales": (
            "div_mode True: scales float32 or bfloat16, zero_points int8, uint8, int32 or bfloat16; False: scales and "
            "zero_points of the input's dtype",
            "cast scales and zero_points",
        ),
        "quantize-shape": (
            "scales and zero_points alike: (n,) or as many axes as the input, with n or 1 on the chosen axis",
            "reshape them",
        ),
        "quantize-axis": ("an axis of the input; div_mode False: -2 or the last", "pass -1"),
        "quantize-target": ("div_mode True: qint8, quint8, int32; False: qint8, quint4x2", "ask for torch.qint8"),
    },
)
note(
    "npu_dynamic_quant",
    "a group_index that rises to the number of rows",
    _DYNAMIC_DOC,
    "another one is a `DeviceFault` (507015): " + _TEST,
)
note("npu_dynamic_quant", "(not documented) a row of zeros", "—", "scale 0, result 0: " + _TEST)
note(
    "npu_dynamic_quant, npu_quantize",
    "hifloat8 results, npu_quantize also int4 and float8; inputs in format NZ; dst_type_max",
    _DYNAMIC_DOC,
    "not computed: `KernelNotCovered`: " + _TEST,
)


def _smoothed(rows: torch.Tensor, smooth: torch.Tensor | None, group_index: torch.Tensor | None) -> torch.Tensor:
    if smooth is None:
        return rows
    if group_index is None:
        return rows * smooth.float()
    ends = group_index.tolist()
    if sorted(ends) != ends or ends[-1] != rows.size(0):
        raise DeviceFault(OP_DYNAMIC, f"group_index {ends} does not rise to the {rows.size(0)} rows of the input")
    counts = torch.tensor([end - start for start, end in zip([0, *ends], ends, strict=False)])
    return rows * smooth.float().repeat_interleave(counts, 0)


def npu_dynamic_quant(
    input: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric quantisation with scales of its own: largest magnitude / largest number (127; 4-bit: 7).

    Args:
        input: Shape: [..., n], 2 axes or more; float16 or bfloat16.
        smooth_scales: None, or factors before quantisation. Shape: [n], or [groups, n] with ``group_index``.
        group_index: None, or ends of the groups of rows. Shape: [groups]; int32.
        dst_type: None or int8; quint4x2; on a 950 float8_e4m3fn or float8_e5m2.
        quant_mode: one scale a row (pertoken), a column of the last two axes (perchannel), or one (pertensor).
        dst_type_max: 0.

    Returns:
        int8 or float8 of the input's shape, quint4x2: eight each in int32 [..., n / 8]; scales float32 of shape [...],
        [..., n] without the last but one, or [1].

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_dynamic_quant.md; perchannel and pertensor: torch_npu's Meta kernel.
    """
    four_bits = dst_type in (_QUINT4X2, torch.quint4x2)
    target = torch.int8 if four_bits else float8_of(dst_type) or dtype_of(OP_DYNAMIC, "dst_type", dst_type, torch.int8)
    if target not in MOST:
        raise KernelNotCovered(OP_DYNAMIC, "dst_type", dst_type)
    if target != torch.int8 and holds("dynamic-integer"):
        refuse(OP_DYNAMIC, "dynamic-integer", "dst_type", target)
    if four_bits and (input.size(-1) % 8 or quant_mode != "pertoken"):
        refuse(OP_DYNAMIC, "dynamic-int4", "dst_type", f"quint4x2, shape {tuple(input.shape)}, {quant_mode}")
    if dst_type_max:
        raise KernelNotCovered(OP_DYNAMIC, "dst_type_max", dst_type_max)
    if quant_mode not in ("pertoken", "perchannel", "pertensor"):
        refuse(OP_DYNAMIC, "dynamic-mode", "quant_mode", repr(quant_mode))
    for name, tensor in (("input", input), ("smooth_scales", smooth_scales)):
        if tensor is not None and tensor.dtype not in _HALVES:
            refuse(OP_DYNAMIC, "dynamic-dtype", name, tensor.dtype)
    if input.dim() < 2:
        refuse(OP_DYNAMIC, "dynamic-rank", "input", f"shape {tuple(input.shape)}")
    wanted: tuple[int, ...] = (input.size(-1),)
    if group_index is not None:
        if group_index.dtype != torch.int32 or group_index.dim() != 1 or smooth_scales is None:
            refuse(OP_DYNAMIC, "dynamic-group", "group_index", f"{group_index.dtype}, {tuple(group_index.shape)}")
        wanted = (group_index.size(0), input.size(-1))
    if smooth_scales is not None and tuple(smooth_scales.shape) != wanted:
        refuse(OP_DYNAMIC, "dynamic-smooth", "smooth_scales", f"shape {tuple(smooth_scales.shape)}, wanted {wanted}")
    rows = _smoothed(input.float().reshape(-1, input.size(-1)), smooth_scales, group_index).view(input.shape)
    if four_bits:
        digits, scale = quantise_rows(rows, most=7.0)
        packed = npu_convert_weight_to_int4pack(digits.to(torch.int32).view(-1, input.size(-1)))
        return packed.view(*input.shape[:-1], -1), scale
    if quant_mode == "pertensor":
        out, scale = quantise_rows(rows.view(1, -1), target=target)
        return out.view(input.shape), scale
    return quantise_rows(rows, (-2,) if quant_mode == "perchannel" else (-1,), target)


def npu_quantize(
    input: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """Quantises with given scales: ``round(input / scales + zero_points)``, or times the scales.

    Args:
        input: float32, float16 or bfloat16.
        scales: Shape: [n or 1], n the size of the chosen axis, or as many axes as the input with 1 on all others.
        zero_points: None, or shape of ``scales``.
        dtype: number of qint8, int8, quint8, uint8, qint32 or int32.
        axis: axis along which scales differ; when multiplying, -2 or anything else for the last.
        div_mode: True divides, False multiplies.

    Returns:
        The input's shape; int8, uint8 or int32.

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_quantize.md.
    """
    if input.dtype not in (torch.float32, *_HALVES):
        refuse(OP_QUANTIZE, "quantize-dtype", "input", input.dtype)
    if div_mode:
        scale_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
        point_dtypes: tuple[torch.dtype, ...] = (torch.int8, torch.uint8, torch.int32, torch.bfloat16)
    else:
        scale_dtypes = point_dtypes = (input.dtype,)
    if not -input.dim() <= axis < input.dim():
        refuse(OP_QUANTIZE, "quantize-axis", "axis", f"{axis} of shape {tuple(input.shape)}")
    chosen = axis % input.dim() if div_mode else input.dim() - (2 if axis == -2 else 1)
    one = [1] * input.dim()
    shapes = [[n] for n in (1, input.size(chosen))]
    shapes += [[*one[:chosen], n, *one[chosen + 1 :]] for n in (1, input.size(chosen))]
    for name, tensor, dtypes in (("scales", scales, scale_dtypes), ("zero_points", zero_points, point_dtypes)):
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            refuse(OP_QUANTIZE, "quantize-scales", name, f"{tensor.dtype} with div_mode {div_mode}")
        if list(tensor.shape) not in shapes or tensor.shape != scales.shape:
            refuse(OP_QUANTIZE, "quantize-shape", name, f"{tuple(tensor.shape)} for {tuple(input.shape)}, axis {axis}")
    if dtype == 16:  # quint4x2
        raise KernelNotCovered(OP_QUANTIZE, "dtype", dtype)
    target = _TARGETS.get(dtype)
    if target is None or (not div_mode and target != torch.int8):
        refuse(OP_QUANTIZE, "quantize-target", "dtype", f"{dtype} with div_mode {div_mode}")
    row = [*one[:chosen], -1, *one[chosen + 1 :]]
    factor = scales.float().view(row)
    values = input.float() / factor if div_mode else input.float() * factor
    return to_integer(values if zero_points is None else values + zero_points.float().view(row), target)


KERNELS = {OP_DYNAMIC: npu_dynamic_quant, OP_QUANTIZE: npu_quantize}
