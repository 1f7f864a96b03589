"""The microscaling form of npu_quant_matmul: float8 or 4-bit float matrices with a power of two for 32 numbers.

This module owns the refusals that bind this form; products are float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import KernelNotCovered
from .mx_format import dequantised, unpacked
from .rules import declare, note, refuse

OP = "npu::npu_quant_matmul"
_NAME = "npu_quant_matmul"
_DOC = "ops-nn e5c3fa932, matmul/quant_batch_matmul_v4/docs/aclnnQuantMatmulV5.md"
_TEST = "test_kernels_mx_matmul.py"
_BLOCK = 32
_SCALES = (293, 44)
"""torch_npu's and c10's number of float8_e8m0fnu."""
_FOUR_BITS = 296
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

declare(
    _NAME,
    _DOC,
    _TEST,
    {
        "qmm-mx-dtype": (
            "microscaling: x1 and x2 of float8, or both of two 4-bit floats a byte with x1_dtype and x2_dtype "
            "float4_e2m1fn_x2; scale_dtype and pertoken_scale_dtype both float8_e8m0fnu, of which the scales are bytes",
            "pass torch_npu.float8_e8m0fnu",
        ),
        "qmm-mx-shape": (
            "microscaling: x1 (m, k), x2 (k, n); pertoken_scale (m, ceil(k / 64), 2), scale (ceil(k / 64), n, 2); 4 "
            "bits: a contiguous x1 (m, k / 2) and x2 (k / 2, n), the transpose of a contiguous (n, k / 2), k above 2",
            "reshape them",
        ),
        "qmm-mx-turned": (
            "microscaling: x2 and scale both as they lie in memory, or both transposed",
            "transpose axes 0 and 1 of the scale too",
        ),
        "qmm-mx-bias": ("microscaling: a float32 bias (n,)", "cast the bias"),
        "qmm-mx-output": ("microscaling: float16, bfloat16 or float32 output, no offset", "pass output_dtype"),
        "qmm-mx-group": ("microscaling: group_sizes [1, 1, 32], 0 for what is to be inferred", "pass [1, 1, 32]"),
    },
)
note(
    _NAME,
    "microscaling with a batch axis, or float8 beside 4-bit floats",
    _DOC,
    "not computed: `KernelNotCovered`: " + _TEST,
)


def is_microscaling(scale_dtype: int | None, pertoken_scale_dtype: int | None) -> bool:
    """Whether a call's dtype numbers ask for this form."""
    return scale_dtype in _SCALES or pertoken_scale_dtype in _SCALES


def _turned(tensor: torch.Tensor) -> bool:
    """Whether axes 0 and 1 are exchanged in memory; a size of 1 fits both ways."""
    return not tensor.is_contiguous() and tensor.transpose(0, 1).is_contiguous()


def mx_product(
    tensors: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor, torch.Tensor | None],
    numbers: tuple[int | None, int | None, int | None, int | None],
    rest: tuple[torch.Tensor | None, torch.Tensor | None, Sequence[int] | None, torch.dtype],
) -> torch.Tensor:
    """A product of matrices with scales of blocks.

    Args:
        tensors: x1 and x2.
        scales: of x2, of x1.
        numbers: dtype numbers of x1, of x2, of the scales of x2, of the scales of x1.
        rest: offset, bias, group_sizes and the dtype of the result.

    Returns:
        Shape: [m, n].

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.
    """
    x1, x2 = tensors
    scale, pertoken = scales
    offset, bias, group_sizes, dtype = rest
    four_bits = numbers[:2] == (_FOUR_BITS, _FOUR_BITS)
    if x1.dtype in _FLOAT8 and numbers[1] == _FOUR_BITS:
        raise KernelNotCovered(OP, "x2_dtype", numbers[1])
    if x1.dim() > 2 or x2.dim() > 2:
        raise KernelNotCovered(OP, "x1", f"a tensor of shape {tuple(x1.shape)}, x2 {tuple(x2.shape)}")
    kinds = (torch.uint8,) if four_bits else _FLOAT8
    bytes_alike = pertoken is not None and {scale.dtype, pertoken.dtype} <= {torch.uint8, torch.float8_e8m0fnu}
    if x1.dtype not in kinds or x2.dtype not in kinds or not bytes_alike or not {*numbers[2:]} <= {*_SCALES}:
        refuse(OP, "qmm-mx-dtype", "x1", f"{x1.dtype}, x2 {x2.dtype}, scale {scale.dtype}, dtypes {numbers}")
    assert pertoken is not None
    k = x1.size(-1) * (2 if four_bits else 1)
    pairs = -(-k // 64)
    fits = x1.dim() == x2.dim() == 2 and x1.numel() and x2.numel() and x1.size(1) == x2.size(0)
    if four_bits:
        fits = fits and x1.is_contiguous() and x2.T.is_contiguous() and k > 2
    fits = fits and tuple(pertoken.shape) == (x1.size(0), pairs, 2) and tuple(scale.shape) == (pairs, x2.size(1), 2)
    if not fits:
        given = f"{tuple(x1.shape)}, x2 {tuple(x2.shape)}, scale {tuple(scale.shape)}, {tuple(pertoken.shape)}"
        refuse(OP, "qmm-mx-shape", "x1", given)
    if 1 not in x2.shape and 1 not in scale.shape and _turned(x2) != _turned(scale):
        refuse(OP, "qmm-mx-turned", "scale", f"strides {scale.stride()} beside x2 of {x2.stride()}")
    if bias is not None and (bias.dtype != torch.float32 or tuple(bias.shape) != (x2.size(1),)):
        refuse(OP, "qmm-mx-bias", "bias", f"{bias.dtype}, shape {tuple(bias.shape)}")
    if dtype not in (torch.float16, torch.bfloat16, torch.float32) or offset is not None:
        refuse(OP, "qmm-mx-output", "output_dtype", f"{dtype}, {'an' if offset is not None else 'no'} offset")
    sizes = list(group_sizes or ())
    if len(sizes) != 3 or not {*sizes[:2]} <= {0, 1} or sizes[2] not in (0, _BLOCK):
        refuse(OP, "qmm-mx-group", "group_sizes", group_sizes)
    left, right = (unpacked(x1), unpacked(x2.T)) if four_bits else (x1, x2.T)
    out = dequantised(left, pertoken.contiguous(), _BLOCK)
    out = out @ dequantised(right, scale.transpose(0, 1).contiguous(), _BLOCK).T
    return (out if bias is None else out + bias).to(dtype)
