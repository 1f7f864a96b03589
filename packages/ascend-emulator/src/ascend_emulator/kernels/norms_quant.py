"""npu_add_rms_norm_quant, npu_add_rms_norm_dynamic_quant and npu_rms_norm_quant.

This module owns root-mean-square normalisation that ends in int8. The sum is rounded to the inputs' dtype first, as the
op returns it; the rest is float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import KernelNotCovered
from .faults import fill_poison_
from .norms import check_sum
from .quantising import dtype_of, quantise_rows, to_integer
from .rules import declare, note, online, refuse

OP_QUANT = "npu::npu_add_rms_norm_quant"
OP_DYNAMIC = "npu::npu_add_rms_norm_dynamic_quant"
OP_PLAIN = "npu::npu_rms_norm_quant"
_TEST = "test_kernels_norms.py"
_DOC = online("torch_npu-npu_add_rms_norm_quant")
_DOC_DYNAMIC = online("torch_npu-npu_add_rms_norm_dynamic_quant")
_DOC_PLAIN = online("torch_npu-npu_rms_norm_quant")
_HALVES = (torch.float16, torch.bfloat16)

declare(
    "npu_add_rms_norm_quant",
    _DOC,
    _TEST,
    {
        "norm-quant-scales": (
            "scales shaped as gamma: float32 beside float16, bfloat16 beside bfloat16",
            "cast and reshape the scales",
        ),
        "norm-quant-zero-points": (
            "zero points shaped as gamma: int32 beside float16, bfloat16 beside bfloat16",
            "cast and reshape the zero points",
        ),
        "norm-quant-beta": ("beta of gamma's shape and dtype", "cast and reshape beta"),
        "norm-quant-axis": ("axis -1", "pass -1"),
    },
)
declare(
    "npu_add_rms_norm_dynamic_quant",
    _DOC_DYNAMIC,
    _TEST,
    {
        "norm-dynamic-row": ("gamma, smooth scales and beta of one axis, the last of x1, in its dtype", "reshape them"),
        "norm-dynamic-mask": (
            "an output_mask of 2, not both False, True where a smooth scale is given",
            "pass [] or the outputs that you want",
        ),
    },
)
declare(
    "npu_rms_norm_quant",
    _DOC_PLAIN,
    _TEST,
    {
        "rms-quant-dtype": ("x, gamma, beta, scale float16 or bfloat16, all alike; offset int8", "cast them"),
        "rms-quant-shape": ("gamma, beta (n,) or (1, n) for x (..., n); scale, offset (1,)", "reshape them"),
    },
)
note("npu_add_rms_norm_quant", "scales other than 0", _DOC, "values are not looked at")
note("npu_add_rms_norm_quant", "without scales2 the second output means nothing", _DOC, "it is poison")
note(
    "npu_add_rms_norm_dynamic_quant",
    "an output that output_mask leaves out is empty",
    _DOC_DYNAMIC,
    "y2 has shape [0]; y1 and the scales keep their shapes, as in the Meta kernel, and are poison",
)
note(
    "npu_add_rms_norm[_quant, _dynamic_quant], npu_rms_norm_quant",
    "int4 and float8 outputs; float32 inputs and more scale dtypes on 950",
    _DOC_PLAIN,
    "not computed: `KernelNotCovered`; the lists of 910B and 910C hold on every chip: " + _TEST,
)


def _unrounded(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    axes = tuple(range(-gamma.dim(), 0))
    wide = x.float()
    out = wide * torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon) * gamma.float()
    return out if beta is None else out + beta.float()


def _static(
    values: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor | None, div_mode: bool
) -> torch.Tensor:
    scaled = values / scales.float() if div_mode else values * scales.float()
    return to_integer(scaled if zero_points is None else scaled + zero_points.float())


def _int8_only(op: str, argument: str, number: int | torch.dtype | None) -> None:
    if dtype_of(op, argument, number, torch.int8) != torch.int8:
        raise KernelNotCovered(op, argument, number)


def npu_add_rms_norm_quant(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    scales1: torch.Tensor,
    zero_points1: torch.Tensor | None,
    beta: torch.Tensor | None = None,
    scales2: torch.Tensor | None = None,
    zero_points2: torch.Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-06,
    div_mode: bool = True,
    dst_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Adds, normalises, and quantises with given scales: ``round(y / scales + zero_points)``.

    Args:
        x1: 1 to 8 axes; float16 or bfloat16.
        x2: shape and dtype of ``x1``.
        gamma: Shape: the last axes of ``x1``; its dtype.
        scales1: Shape: that of gamma; float32 beside float16, bfloat16 beside bfloat16.
        zero_points1: None, or shape of gamma; int32 beside float16, bfloat16 beside bfloat16.
        beta: None, or added after gamma; shape and dtype of gamma.
        scales2: None, or scales of the second output.
        zero_points2: None, or zero points of the second output.
        axis: -1.
        epsilon: added to the mean square.
        div_mode: False multiplies by the scales.
        dst_type: None or int8.

    Returns:
        Two int8 tensors (the second poison without ``scales2``), and the sum.

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_add_rms_norm_quant.md.
    """
    check_sum(OP_QUANT, x1, x2, gamma)
    if x1.dtype not in _HALVES:
        refuse(OP_QUANT, "norm-half", "x1", x1.dtype)
    _int8_only(OP_QUANT, "dst_type", dst_type)
    if axis != -1:
        refuse(OP_QUANT, "norm-quant-axis", "axis", axis)
    half = x1.dtype == torch.float16
    rows = (
        ("norm-quant-scales", "scales1", scales1, torch.float32 if half else torch.bfloat16),
        ("norm-quant-scales", "scales2", scales2, torch.float32 if half else torch.bfloat16),
        ("norm-quant-zero-points", "zero_points1", zero_points1, torch.int32 if half else torch.bfloat16),
        ("norm-quant-zero-points", "zero_points2", zero_points2, torch.int32 if half else torch.bfloat16),
        ("norm-quant-beta", "beta", beta, gamma.dtype),
    )
    for rule, name, tensor, dtype in rows:
        if tensor is not None and (tensor.dtype != dtype or tensor.shape != gamma.shape):
            refuse(OP_QUANT, rule, name, f"{tensor.dtype}, shape {tuple(tensor.shape)}")
    total = x1 + x2
    values = _unrounded(total, gamma, beta, epsilon)
    first = _static(values, scales1, zero_points1, div_mode)
    if scales2 is None:
        return first, fill_poison_(torch.empty_like(first)), total
    return first, _static(values, scales2, zero_points2, div_mode), total


def npu_add_rms_norm_dynamic_quant(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    *,
    smooth_scale1: torch.Tensor | None = None,
    smooth_scale2: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-06,
    output_mask: Sequence[bool] | None = (),
    y_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Adds, normalises, and quantises each row with a scale of its own: largest magnitude / 127.

    Args:
        x1: 1 to 8 axes; float16 or bfloat16.
        x2: shape and dtype of ``x1``.
        gamma: Shape: [last axis of x1]; its dtype.
        smooth_scale1: None, or a factor of the row before quantisation. Shape: that of gamma.
        smooth_scale2: the same for the second output, which exists with both scales or when the mask says so.
        beta: None, or added after gamma.
        epsilon: added to the mean square.
        output_mask: empty or None (torch_npu before 2.13 and from it on), or which of the two outputs are wanted.
        y_dtype: None or int8.

    Returns:
        int8 outputs 1 and 2, the sum, and float32 scales 1 and 2 (without the last axis). An output that is not wanted
        is poison.

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_add_rms_norm_dynamic_quant.md.
    """
    check_sum(OP_DYNAMIC, x1, x2, gamma)
    if x1.dtype not in _HALVES:
        refuse(OP_DYNAMIC, "norm-half", "x1", x1.dtype)
    _int8_only(OP_DYNAMIC, "y_dtype", y_dtype)
    row = (x1.size(-1),)
    named = {"gamma": gamma, "smooth_scale1": smooth_scale1, "smooth_scale2": smooth_scale2, "beta": beta}
    for name, tensor in named.items():
        if tensor is not None and (tensor.dtype != x1.dtype or tuple(tensor.shape) != row):
            refuse(OP_DYNAMIC, "norm-dynamic-row", name, f"{tensor.dtype}, shape {tuple(tensor.shape)}")
    mask = list(output_mask or ())
    if mask:
        lacks = [
            scale is not None and not mask[i] for i, scale in enumerate((smooth_scale1, smooth_scale2)) if i < len(mask)
        ]
        if len(mask) != 2 or not any(mask) or any(lacks):
            refuse(OP_DYNAMIC, "norm-dynamic-mask", "output_mask", mask)
    else:
        mask = [True, smooth_scale1 is not None and smooth_scale2 is not None]
    total = x1 + x2
    values = _unrounded(total, gamma, beta, epsilon)
    outs = []
    for number, smooth in enumerate((smooth_scale1, smooth_scale2)):
        if mask[number]:
            outs.append(quantise_rows(values if smooth is None else values * smooth.float()))
        else:
            whole = not _leaves_out_whole_results()
            shape = x1.shape if whole and not (number and output_mask) else (0,)
            rows = x1.shape[:-1] if whole else (0,)
            blank = torch.empty(shape, dtype=torch.int8), torch.empty(rows, dtype=torch.float32)
            outs.append((fill_poison_(blank[0]), fill_poison_(blank[1])))
    return outs[0][0], outs[1][0], total, outs[0][1], outs[1][1]


def _leaves_out_whole_results() -> bool:
    """Whether results that are not wanted are empty with their scales: from torch_npu 2.13 on, as its schema tells."""
    op = getattr(torch.ops.npu, OP_DYNAMIC.partition("::")[2], None)
    arguments = [] if op is None else op.default._schema.arguments
    return any(argument.name == "output_mask" and argument.default_value is None for argument in arguments)


def npu_rms_norm_quant(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    epsilon: float = 1e-06,
    *,
    dst_dtype: int | None = None,
) -> torch.Tensor:
    """Normalises and quantises with one scale: ``round(y * scale + offset)``.

    Args:
        x: 1 to 8 axes; float16 or bfloat16.
        gamma: Shape: [n] or [1, n], n the last axis of ``x``; dtype of ``x``.
        beta: Shape and dtype of gamma; added after it.
        scale: Shape: [1]; dtype of ``x``.
        offset: Shape: [1]; int8.
        epsilon: added to the mean square.
        dst_dtype: None or int8.

    Returns:
        int8 of the shape of ``x``.

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_rms_norm_quant.md.
    """
    _int8_only(OP_PLAIN, "dst_dtype", dst_dtype)
    for name, tensor in (("x", x), ("gamma", gamma), ("beta", beta), ("scale", scale)):
        if tensor.dtype not in _HALVES or tensor.dtype != x.dtype:
            refuse(OP_PLAIN, "rms-quant-dtype", name, tensor.dtype)
    if offset.dtype != torch.int8:
        refuse(OP_PLAIN, "rms-quant-dtype", "offset", offset.dtype)
    width = x.size(-1) if x.dim() else 0
    shapes = (("gamma", gamma, ((width,), (1, width))), ("beta", beta, (tuple(gamma.shape),)))
    for name, tensor, wanted in (*shapes, ("scale", scale, ((1,),)), ("offset", offset, ((1,),))):
        if tuple(tensor.shape) not in wanted or not 1 <= x.dim() <= 8 or x.numel() == 0:
            refuse(OP_PLAIN, "rms-quant-shape", name, f"{tuple(tensor.shape)} for x of {tuple(x.shape)}")
    values = _unrounded(x, gamma.view(-1), beta.view(-1), epsilon)
    return to_integer(values * scale.float() + offset.float())


KERNELS = {
    OP_QUANT: npu_add_rms_norm_quant,
    OP_DYNAMIC: npu_add_rms_norm_dynamic_quant,
    OP_PLAIN: npu_rms_norm_quant,
}
