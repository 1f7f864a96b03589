"""npu_weight_quant_batchmatmul: products with int8 or 4-bit weights that are scaled back first.

This module owns the op's refusals; weights are scaled and multiplied in float32 and rounded once.
"""

from __future__ import annotations

import torch

from .errors import KernelNotCovered
from .quant_params import unpacked_int4
from .rules import declare, note, online, refuse

OP = "npu::npu_weight_quant_batchmatmul"
_NAME = "npu_weight_quant_batchmatmul"
_DOC = online("torch_npu-npu_weight_quant_batchmatmul")
_TEST = "test_kernels_matmul.py"

declare(
    _NAME,
    _DOC,
    _TEST,
    {
        "wqm-x": ("x (M, K) of float16 or bfloat16", "cast and reshape x"),
        "wqm-weight": (
            "a weight (K, N) of int8, or of 4-bit integers in int32: contiguous (K, N / 8) or transposed (N, K / 8)",
            "quantise and reshape it",
        ),
        "wqm-scale": (
            "antiquant_scale and antiquant_offset of the dtype of x, alike: (1,), (1, 1), (N,), (1, N), or (groups, N)",
            "cast and reshape them",
        ),
        "wqm-group": ("antiquant_group_size 0, or a multiple of 32 from 32 to K - 1", "pass 0 for one scale a column"),
        "wqm-bias": ("a bias (N,) or (1, N): float16 beside float16, float32 beside bfloat16", "cast and reshape it"),
    },
)
note(
    _NAME,
    "int64 scales, quantised results",
    _DOC,
    "not computed: `KernelNotCovered`: " + _TEST,
)


def npu_weight_quant_batchmatmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    antiquant_scale: torch.Tensor,
    antiquant_offset: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> torch.Tensor:
    """``x @ ((weight + offset) * scale) + bias``.

    Args:
        x: Shape: [M, K]; float16 or bfloat16.
        weight: Shape: [K, N]; int8; or eight 4-bit integers each, [K, N / 8] or a transposed [N, K / 8]; int32.
        antiquant_scale: one, one a column, or one a column and group of rows; dtype of ``x``.
        antiquant_offset: None, or as the scale.
        quant_scale: not computed.
        quant_offset: not computed.
        bias: None, or Shape: [N] or [1, N]; float16, or float32 beside bfloat16.
        antiquant_group_size: rows of the weight that share a scale; 0 for all.
        inner_precise: no effect.
        weight_dtype: None.

    Returns:
        Shape: [M, N]; dtype of ``x``.

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_weight_quant_batchmatmul.md.
    """
    for name, form in (("quant_scale", quant_scale), ("quant_offset", quant_offset), ("weight_dtype", weight_dtype)):
        if form is not None:
            raise KernelNotCovered(OP, name, "a value")
    if antiquant_scale.dtype == torch.int64:
        raise KernelNotCovered(OP, "antiquant_scale", "a tensor of dtype int64")
    if x.dtype not in (torch.float16, torch.bfloat16) or x.dim() != 2:
        refuse(OP, "wqm-x", "x", f"{x.dtype}, shape {tuple(x.shape)}")
    if weight.dtype == torch.int32 and weight.dim() == 2:
        if weight.is_contiguous() and weight.size(0) == x.size(1):
            weight = unpacked_int4(weight)
        elif weight.T.is_contiguous():
            weight = unpacked_int4(weight, -2)
    if weight.dtype != torch.int8 or weight.dim() != 2 or weight.size(0) != x.size(1):
        refuse(OP, "wqm-weight", "weight", f"{weight.dtype}, shape {tuple(weight.shape)} for x of {tuple(x.shape)}")
    inner, columns = weight.shape
    size = antiquant_group_size
    if size and (size % 32 or not 32 <= size < inner):
        refuse(OP, "wqm-group", "antiquant_group_size", f"{size} for K = {inner}")
    shapes = ((1,), (1, 1), (columns,), (1, columns)) if not size else ((-(-inner // size), columns),)
    for name, tensor in (("antiquant_scale", antiquant_scale), ("antiquant_offset", antiquant_offset)):
        if tensor is None:
            continue
        if tensor.dtype != x.dtype or tuple(tensor.shape) not in shapes or tensor.shape != antiquant_scale.shape:
            refuse(OP, "wqm-scale", name, f"{tensor.dtype}, shape {tuple(tensor.shape)}")
    if bias is not None:
        wanted = torch.float16 if x.dtype == torch.float16 else torch.float32
        if bias.dtype != wanted or tuple(bias.shape) not in ((columns,), (1, columns)):
            refuse(OP, "wqm-bias", "bias", f"{bias.dtype}, shape {tuple(bias.shape)}")

    def full(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float().repeat_interleave(size, 0)[:inner] if size else tensor.float()

    wide = weight.float()
    if antiquant_offset is not None:
        wide = wide + full(antiquant_offset)
    out = x.float() @ (wide * full(antiquant_scale))
    return (out if bias is None else out + bias.float()).to(x.dtype)


KERNELS = {OP: npu_weight_quant_batchmatmul}
