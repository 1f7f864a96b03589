"""npu_dual_level_quant_matmul: products of what npu_dynamic_dual_level_mx_quant gives.

This module owns the op's refusals; products are float32 and rounded once.
"""

from __future__ import annotations

import torch

from .mx_format import dequantised, unpacked
from .quantising import dtype_of
from .rules import declare, note, refuse

OP = "npu::npu_dual_level_quant_matmul"
_NAME = "npu_dual_level_quant_matmul"
_DOC = "ops-nn e5c3fa932, matmul/dual_level_quant_batch_matmul/docs/aclnnDualLevelQuantMatmulWeightNz.md"
_TEST = "test_kernels_dual_level.py"
_OUTER, _INNER = 512, 32

declare(
    _NAME,
    _DOC,
    _TEST,
    {
        "dual-dtype": (
            "x1 and x2 of two 4-bit floats a byte (uint8 or int8), level-0 scales of float32, level-1 scales of "
            "float8_e8m0fnu or their bytes",
            "quantise with npu_dynamic_dual_level_mx_quant",
        ),
        "dual-shape": (
            "contiguous x1 (m, k / 2), x2 (n, k / 2), x1_level0_scale (m, ceil(k / 512)), x2_level0_scale "
            "(ceil(k / 512), n), x1_level1_scale (m, ceil(k / 64), 2), x2_level1_scale (n, ceil(k / 64), 2)",
            "reshape them",
        ),
        "dual-bias": ("a float32 bias (n,)", "cast and reshape the bias"),
        "dual-output": ("float16 or bfloat16 output", "pass one of them"),
    },
)
note(_NAME, "x2 in format NZ", _DOC, "a format cast keeps ND here; the results are the same")
note(_NAME, "the axes of the scales", _DOC, "the document names their number alone; as SGLang passes them: " + _TEST)


def npu_dual_level_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    x1_level0_scale: torch.Tensor,
    x2_level0_scale: torch.Tensor,
    x1_level1_scale: torch.Tensor,
    x2_level1_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    output_dtype: int | torch.dtype = 15,
) -> torch.Tensor:
    """``x1 @ x2.T + bias`` of 4-bit floats with a float32 scale for 512 numbers and a power of two for 32.

    Args:
        x1: Shape: [m, k / 2]; uint8 or int8, two floats a byte.
        x2: Shape: [n, k / 2]; likewise.
        x1_level0_scale: Shape: [m, ceil(k / 512)]; float32.
        x2_level0_scale: Shape: [ceil(k / 512), n]; float32.
        x1_level1_scale: Shape: [m, ceil(k / 64), 2]; float8_e8m0fnu or uint8.
        x2_level1_scale: Shape: [n, ceil(k / 64), 2]; likewise.
        bias: None, or Shape: [n]; float32.
        output_dtype: bfloat16 or float16.

    Returns:
        Shape: [m, n].

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        ops-nn, aclnnDualLevelQuantMatmulWeightNz.md.
    """
    kinds = {
        "x1": (x1, (torch.uint8, torch.int8)),
        "x2": (x2, (torch.uint8, torch.int8)),
        "x1_level0_scale": (x1_level0_scale, (torch.float32,)),
        "x2_level0_scale": (x2_level0_scale, (torch.float32,)),
        "x1_level1_scale": (x1_level1_scale, (torch.uint8, torch.float8_e8m0fnu)),
        "x2_level1_scale": (x2_level1_scale, (torch.uint8, torch.float8_e8m0fnu)),
    }
    for name, (tensor, dtypes) in kinds.items():
        if tensor.dtype not in dtypes:
            refuse(OP, "dual-dtype", name, tensor.dtype)
    for name, tensor in (("x1", x1), ("x2", x2)):
        if tensor.dim() != 2:
            refuse(OP, "dual-shape", name, f"shape {tuple(tensor.shape)}")
    m, k, n = x1.size(0), 2 * x1.size(-1), x2.size(0)
    outer, pairs = -(-k // _OUTER), -(-k // (2 * _INNER))
    shapes = (m, k // 2), (n, k // 2), (m, outer), (outer, n), (m, pairs, 2), (n, pairs, 2)
    for (name, (tensor, _)), shape in zip(kinds.items(), shapes, strict=True):
        if tuple(tensor.shape) != shape or not tensor.is_contiguous() or not tensor.numel():
            refuse(OP, "dual-shape", name, f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, wanted {shape}")
    if bias is not None and (bias.dtype != torch.float32 or tuple(bias.shape) != (n,)):
        refuse(OP, "dual-bias", "bias", f"{bias.dtype}, shape {tuple(bias.shape)}")
    target = dtype_of(OP, "output_dtype", output_dtype, torch.bfloat16)
    if target not in (torch.float16, torch.bfloat16):
        refuse(OP, "dual-output", "output_dtype", target)

    def wide(packed: torch.Tensor, outer_scale: torch.Tensor, inner_scale: torch.Tensor) -> torch.Tensor:
        inner = dequantised(unpacked(packed.view(torch.uint8)), inner_scale, _INNER)
        return inner * outer_scale.repeat_interleave(_OUTER, -1)[:, :k]

    out = wide(x1, x1_level0_scale, x1_level1_scale) @ wide(x2, x2_level0_scale.T, x2_level1_scale).T
    return (out if bias is None else out + bias).to(target)


KERNELS = {OP: npu_dual_level_quant_matmul}
