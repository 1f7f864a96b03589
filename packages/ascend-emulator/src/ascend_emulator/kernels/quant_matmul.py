"""npu_quant_matmul: products of int8 matrices, scaled back.

This module owns the op's refusals and its order of operations, and the exact product that other ops share. Weights
packed in int4, float8 and per-group scales are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import KernelNotCovered
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
        "qmm-dtype": ("x1, x2 int8", "quantise them"),
        "qmm-rank": ("x1, x2 of 2 to 6 axes with inner sizes that match", "reshape them"),
        "qmm-last": ("last axes of at most 65535", "split the matrix"),
        "qmm-scale": ("a scale (1,) or (n,) of float32 or bfloat16 (int64 from npu_trans_quant_param)", "reshape it"),
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
    "int32 x1, x2 (int4 packed), int64 scales, group_sizes, y_scale",
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
) -> None:
    for name, tensor in (("x1", x1), ("x2", x2)):
        if tensor.dtype != torch.int8:
            refuse(OP_QUANT, "qmm-dtype", name, tensor.dtype)
        if not 2 <= tensor.dim() <= 6 or tensor.numel() == 0 or x1.size(-1) != x2.size(-2):
            refuse(OP_QUANT, "qmm-rank", name, f"{tuple(x1.shape)} @ {tuple(x2.shape)}")
        if tensor.size(-1) > 65535:
            refuse(OP_QUANT, "qmm-last", name, tensor.size(-1))
    m, n = x1.size(-2), x2.size(-1)
    if scale.dtype not in (torch.float32, torch.bfloat16) or tuple(scale.shape) not in ((1,), (n,)):
        refuse(OP_QUANT, "qmm-scale", "scale", f"{scale.dtype}, shape {tuple(scale.shape)} for n = {n}")
    if pertoken is not None and (pertoken.dtype != torch.float32 or tuple(pertoken.shape) != (m,)):
        refuse(OP_QUANT, "qmm-pertoken", "pertoken_scale", f"{pertoken.dtype}, shape {tuple(pertoken.shape)}")
    if offset is not None and (
        offset.dtype != torch.float32 or tuple(offset.shape) not in ((1,), (n,)) or dtype != torch.int8
    ):
        refuse(OP_QUANT, "qmm-offset", "offset", f"{offset.dtype}, shape {tuple(offset.shape)} with {dtype} output")
    if bias is not None and not (tuple(bias.shape) == (n,) or (bias.dim() == 3 and tuple(bias.shape[1:]) == (1, n))):
        refuse(OP_QUANT, "qmm-bias", "bias", f"shape {tuple(bias.shape)} for n = {n}")
    wide_bias = (None, torch.int32, torch.bfloat16, torch.float32)
    kind = None if bias is None else bias.dtype
    rows = {
        torch.int8: scale.dtype == torch.float32 and pertoken is None and kind in (None, torch.int32),
        torch.int32: kind in (None, torch.int32),
        torch.bfloat16: kind in wide_bias,
        torch.float16: scale.dtype == torch.float32
        and (kind in (None, torch.int32) if pertoken is None else kind in wide_bias),
    }
    if not rows.get(dtype, False):
        given = f"{dtype} with scale {scale.dtype}, bias {kind}, pertoken_scale {pertoken is not None}"
        refuse(OP_QUANT, "qmm-combination", "output_dtype", given)


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
    """Product of int8 matrices, scaled by column and, when wanted, by row.

    Args:
        x1: Shape: [..., m, k]; int8.
        x2: Shape: [..., k, n]; int8.
        scale: Shape: [1] or [n]; float32 or bfloat16.
        offset: None, or added to int8 output. Shape: [1] or [n]; float32.
        pertoken_scale: None, or Shape: [m]; float32.
        bias: None, or Shape: [n] or [batch, 1, n]; int32 is added before scaling, floats after.
        output_dtype: number of int8 (None too), float16, bfloat16 or int32 (no scaling).
        x1_dtype: None.
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
    given = {"x1_dtype": x1_dtype, "x2_dtype": x2_dtype, "group_sizes": group_sizes, "y_scale": y_scale}
    given |= {"pertoken_scale_dtype": pertoken_scale_dtype, "scale_dtype": scale_dtype}
    for name, value in given.items():
        if value is not None:
            raise KernelNotCovered(OP_QUANT, name, "a value")
    for name, tensor in (("x1", x1), ("x2", x2)):
        if tensor.dtype == torch.int32:
            raise KernelNotCovered(OP_QUANT, name, "a tensor of dtype int32 (int4 packed)")
    if scale.dtype == torch.int64:
        raise KernelNotCovered(OP_QUANT, "scale", "a tensor of dtype int64")
    dtype = dtype_of(OP_QUANT, "output_dtype", output_dtype, torch.int8)
    _check_quant(x1, x2, scale, offset, pertoken_scale, bias, dtype)
    total = product(x1, x2)
    if bias is not None and bias.dtype == torch.int32:
        total = total + bias
    if dtype == torch.int32:
        return total.to(torch.int32)
    out = total.float() * scale.float()
    if pertoken_scale is not None:
        out = out * pertoken_scale.view(-1, 1)
    if bias is not None and bias.dtype != torch.int32:
        out = out + bias.float()
    if dtype == torch.int8:
        return to_integer(out if offset is None else out + offset)
    return out.to(dtype)


KERNELS = {OP_QUANT: npu_quant_matmul}
