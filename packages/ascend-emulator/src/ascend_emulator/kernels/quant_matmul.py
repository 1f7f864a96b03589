"""npu_quant_matmul: products of int8 matrices, scaled back.

This module owns the op's refusals and its order of operations, and the exact product that other ops share. Weights
packed in int4, float8 and per-group scales are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import KernelNotCovered
from .quant_matmul_mx import is_microscaling, mx_product
from .quant_params import unpacked_int4, unpacked_scale
from .quantising import dtype_of, to_integer
from .rules import declare, note, online, refuse

OP_QUANT = "npu::npu_quant_matmul"
_TEST = "test_kernels_matmul.py"
_QUANT_DOC = online("torch_npu-npu_quant_matmul")

declare(
    "npu_quant_matmul",
    _QUANT_DOC,
    _TEST,
    {
        "qmm-dtype": ("x1, x2 both int8, or both int32 that hold eight 4-bit integers each", "quantise them"),
        "qmm-packed": (
            "4-bit integers: a contiguous x1 (m, k / 8), and x2 a contiguous (k, n / 8), or (k / 8, n), the transpose "
            "of a contiguous (n, k / 8)",
            "pack the last axis",
        ),
        "qmm-rank": ("x1, x2 of 2 to 6 axes with inner sizes that match", "reshape them"),
        "qmm-last": ("last axes of at most 65535", "split the matrix"),
        "qmm-scale": ("a scale (1,) or (n,) of float32, bfloat16, or int64 of npu_trans_quant_param", "reshape it"),
        "qmm-pertoken": ("a float32 pertoken_scale (m,)", "pass one scale a row of x1"),
        "qmm-offset": ("a float32 offset (1,) or (n,) with int8 output only", "leave it None"),
        "qmm-bias": ("a bias (n,) or (batch, 1, n) of a dtype that the output takes", "cast and reshape the bias"),
        "qmm-combination": (
            "scale, pertoken_scale, bias and output of one row of the document's table 2",
            "use bfloat16 output, or float16 output with pertoken_scale and a float32 scale",
        ),
    },
)
note(
    "npu_quant_matmul",
    "scales and offsets of 2 axes, y_scale, the forms of a 950 but for microscaling",
    _QUANT_DOC,
    "not computed: `KernelNotCovered`: " + _TEST,
)
note(
    "npu_quant_matmul, npu_grouped_matmul",
    "weights in format NZ",
    _QUANT_DOC,
    "the format stays ND; the results are the same",
)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 product of floats; exact int64 product of int8 (float64 holds every partial sum)."""
    if x.dtype == torch.int8:
        return (x.double() @ weight.double()).long()
    return x.float() @ weight.float()


def _check_quant(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    pertoken: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    packed: bool,
) -> None:
    for name, tensor in (("x1", x1), ("x2", x2)):
        ranks = all(2 <= part.dim() <= 6 for part in (x1, x2))
        if not ranks or tensor.numel() == 0 or x1.size(-1) != x2.size(-2):
            refuse(OP_QUANT, "qmm-rank", name, f"{tuple(x1.shape)} @ {tuple(x2.shape)}")
        if tensor.size(-1) > 65535:
            refuse(OP_QUANT, "qmm-last", name, tensor.size(-1))
    m, n = x1.size(-2), x2.size(-1)
    if scale.dtype not in (torch.float32, torch.bfloat16, torch.int64) or tuple(scale.shape) not in ((1,), (n,)):
        refuse(OP_QUANT, "qmm-scale", "scale", f"{scale.dtype}, shape {tuple(scale.shape)} for n = {n}")
    if pertoken is not None and (pertoken.dtype != torch.float32 or tuple(pertoken.shape) != (m,)):
        refuse(OP_QUANT, "qmm-pertoken", "pertoken_scale", f"{pertoken.dtype}, shape {tuple(pertoken.shape)}")
    if offset is not None and (
        offset.dtype != torch.float32 or tuple(offset.shape) not in ((1,), (n,)) or dtype != torch.int8
    ):
        refuse(OP_QUANT, "qmm-offset", "offset", f"{offset.dtype}, shape {tuple(offset.shape)} with {dtype} output")
    if bias is not None and not (tuple(bias.shape) == (n,) or (bias.dim() == 3 and tuple(bias.shape[1:]) == (1, n))):
        refuse(OP_QUANT, "qmm-bias", "bias", f"shape {tuple(bias.shape)} for n = {n}")
    kind = None if bias is None else bias.dtype
    plain, any_bias = kind in (None, torch.int32), kind in (None, torch.int32, torch.bfloat16, torch.float32)
    fixed = scale.dtype in (torch.float32, torch.int64) and pertoken is None and plain
    if packed:
        by_row = pertoken is not None and scale.dtype == torch.float32 and bias is None
        rows = {torch.float16: fixed or by_row, torch.bfloat16: by_row}
    else:
        rows = {
            torch.int8: fixed,
            torch.int32: scale.dtype != torch.int64 and plain,
            torch.bfloat16: scale.dtype != torch.int64 and any_bias,
            torch.float16: fixed if pertoken is None else scale.dtype == torch.float32 and any_bias,
        }
    if not rows.get(dtype, False):
        given = f"{dtype} with {'4-bit' if packed else 'int8'} matrices, scale {scale.dtype}, bias {kind}, "
        given += f"pertoken_scale {pertoken is not None}"
        refuse(OP_QUANT, "qmm-combination", "output_dtype", given)


def _unpacked(x1: torch.Tensor, x2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 matrices of 4-bit ones."""
    k = 8 * x1.size(-1)
    across = x2.dim() > 1 and x2.is_contiguous() and x2.size(-2) == k
    along = x2.dim() > 1 and x2.transpose(-1, -2).is_contiguous() and 8 * x2.size(-2) == k
    if not x1.is_contiguous() or not (across or along):
        given = f"shape {tuple(x1.shape)}, strides {x1.stride()}, x2 {tuple(x2.shape)}, {x2.stride()}"
        refuse(OP_QUANT, "qmm-packed", "x1", given)
    return unpacked_int4(x1), unpacked_int4(x2, -1 if across else -2)


def npu_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Product of int8 or 4-bit matrices, scaled by column and, when wanted, by row.

    Args:
        x1: Shape: [..., m, k]; int8, or eight 4-bit integers each, [..., m, k / 8]; int32.
        x2: Shape: [..., k, n]; int8; 4-bit: [..., k, n / 8], or a transposed [..., n, k / 8]; int32.
        scale: Shape: [1] or [n]; float32, bfloat16, or int64 of ``npu_trans_quant_param``.
        offset: None, or added to int8 output. Shape: [1] or [n]; float32.
        pertoken_scale: None, or Shape: [m]; float32.
        bias: None, or Shape: [n] or [batch, 1, n]; int32 is added before scaling, floats after.
        output_dtype: number of int8 (None too), float16, bfloat16 or int32 (no scaling).
        x1_dtype: None; these five are for microscaling, see ``quant_matmul_mx``.
        x2_dtype: None.
        pertoken_scale_dtype: None.
        scale_dtype: None.
        group_sizes: None.
        y_scale: None.

    Returns:
        Shape: [..., m, n].

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_quant_matmul.md.
    """
    if y_scale is None and is_microscaling(scale_dtype, pertoken_scale_dtype):
        numbers = x1_dtype, x2_dtype, scale_dtype, pertoken_scale_dtype
        dtype = dtype_of(OP_QUANT, "output_dtype", output_dtype, torch.int8)
        return mx_product((x1, x2), (scale, pertoken_scale), numbers, (offset, bias, group_sizes, dtype))
    given = {"x1_dtype": x1_dtype, "x2_dtype": x2_dtype, "group_sizes": group_sizes, "y_scale": y_scale}
    given |= {"pertoken_scale_dtype": pertoken_scale_dtype, "scale_dtype": scale_dtype}
    for name, value in given.items():
        if value is not None:
            raise KernelNotCovered(OP_QUANT, name, "a value")
    if x1.dtype != x2.dtype or x1.dtype not in (torch.int8, torch.int32):
        refuse(OP_QUANT, "qmm-dtype", "x1", f"{x1.dtype}, x2 {x2.dtype}")
    packed = x1.dtype == torch.int32
    if packed:
        x1, x2 = _unpacked(x1, x2)
    dtype = dtype_of(OP_QUANT, "output_dtype", output_dtype, torch.int8)
    _check_quant(x1, x2, scale, offset, pertoken_scale, bias, dtype, packed)
    total = product(x1, x2)
    if bias is not None and bias.dtype == torch.int32:
        total = total + bias
    if dtype == torch.int32:
        return total.to(torch.int32)
    out = total.float() * unpacked_scale(scale)
    if pertoken_scale is not None:
        out = out * pertoken_scale.view(-1, 1)
    if bias is not None and bias.dtype != torch.int32:
        out = out + bias.float()
    if dtype == torch.int8:
        return to_integer(out if offset is None else out + offset)
    return out.to(dtype)


KERNELS = {OP_QUANT: npu_quant_matmul}
