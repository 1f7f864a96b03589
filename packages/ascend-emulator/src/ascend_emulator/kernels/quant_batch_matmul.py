"""npu_transpose_quant_batchmatmul: products of float8 matrices, batch and rows exchanged on the way in and out.

This module owns the op's refusals; products are float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import KernelNotCovered
from .mx_format import dequantised
from .quantising import dtype_of, float8_of
from .rules import declare, note, online, refuse

OP = "npu::npu_transpose_quant_batchmatmul"
_NAME = "npu_transpose_quant_batchmatmul"
_DOC = online("torch_npu-npu_transpose_quant_batchmatmul")
_TEST = "test_kernels_quant_batch_matmul.py"
_BLOCK = 32

declare(
    _NAME,
    _DOC,
    _TEST,
    {
        "tqbm-dtype": ("x1, x2 of float8_e4m3fn or float8_e5m2; with scales of blocks both float8_e4m3fn", "cast them"),
        "tqbm-shape": (
            "x1 (m, b, k), and x2 (b, k, n) with perm_x2 [0, 1, 2] or (b, n, k) with [0, 2, 1], not empty",
            "reshape them",
        ),
        "tqbm-perm": ("perm_x1 [1, 0, 2], perm_y [1, 0, 2], perm_x2 [0, 1, 2] or [0, 2, 1]", "pass them"),
        "tqbm-output": ("a dtype of float16 or bfloat16", "pass one of them"),
        "tqbm-bias": ("no bias", "add it afterwards"),
        "tqbm-split": ("batch_split_factor 1", "leave it out"),
        "tqbm-channel": (
            "scales of rows and columns: float32 x1_scale (m,) and x2_scale (n,), k = 512, n = 128, perm_x2 [0, 1, 2]",
            "pass these shapes",
        ),
        "tqbm-blocks": (
            "scales of blocks: float8_e8m0fnu x1_scale (m, b, k / 64, 2) and x2_scale (b, k / 64, n, 2), with perm_x2 "
            "[0, 2, 1] (b, n, k / 64, 2); k a multiple of 64",
            "reshape the scales",
        ),
        "tqbm-group": ("group_sizes: with scales of blocks [0 or 1, 0 or 1, 32], else none", "pass [0, 0, 32]"),
    },
)
note(
    _NAME, "hifloat8, inputs and output; one scale of x1 beside it", _DOC, "not computed: `KernelNotCovered`: " + _TEST
)
note(_NAME, "x2 in format NZ", _DOC, "the format stays ND; the results are the same")
note(_NAME, "for chip 950 alone", _DOC, "taken on every chip: no other has such numbers to refuse them beside")


def _widened(
    x1: torch.Tensor, x2: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor], turned: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 matrices [b, m, k] and [b, k, n] of ones with scales of blocks."""
    first, second = scales
    m, b, k = x1.shape
    n = x2.size(1 if turned else 2)
    wanted = (m, b, k // 64, 2), (b, n, k // 64, 2) if turned else (b, k // 64, n, 2)
    for name, scale, shape in zip(("x1_scale", "x2_scale"), scales, wanted, strict=True):
        if scale.dtype != torch.float8_e8m0fnu or tuple(scale.shape) != shape or k % 64:
            refuse(OP, "tqbm-blocks", name, f"{scale.dtype}, shape {tuple(scale.shape)}, wanted {shape}")
    right, pairs = (x2, second) if turned else (x2.transpose(1, 2), second.transpose(1, 2))
    wide = dequantised(right, pairs.contiguous(), _BLOCK).transpose(1, 2)
    return dequantised(x1, first.contiguous(), _BLOCK).transpose(0, 1), wide


def npu_transpose_quant_batchmatmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    dtype: int | torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    x1_scale: torch.Tensor | None = None,
    x2_scale: torch.Tensor | None = None,
    group_sizes: Sequence[int] | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
) -> torch.Tensor:
    """A product a batch of ``x1 [m, b, k]`` and ``x2``, scaled.

    Args:
        x1: Shape: [m, b, k]; float8_e4m3fn or float8_e5m2.
        x2: Shape: [b, k, n], or [b, n, k] as ``perm_x2`` says; likewise.
        dtype: of the result: float16 or bfloat16.
        bias: None.
        x1_scale: one a row, [m] float32; or one for 32 numbers, in pairs, [m, b, k / 64, 2] float8_e8m0fnu.
        x2_scale: one a column, [n] float32; or one for 32 numbers, [b, k / 64, n, 2], or [b, n, k / 64, 2].
        group_sizes: with scales of blocks: [0 or 1, 0 or 1, 32].
        perm_x1: [1, 0, 2].
        perm_x2: [0, 1, 2] or [0, 2, 1].
        perm_y: [1, 0, 2].
        batch_split_factor: 1.
        x1_dtype: None, or the number of ``x1``'s dtype.
        x2_dtype: likewise.

    Returns:
        Shape: [m, b, n].

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_transpose_quant_batchmatmul.md.
    """
    for name, number, tensor in (("x1_dtype", x1_dtype, x1), ("x2_dtype", x2_dtype, x2)):
        if number is not None and float8_of(number) != tensor.dtype:
            raise KernelNotCovered(OP, name, number)
        if tensor.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            refuse(OP, "tqbm-dtype", name.removesuffix("_dtype"), tensor.dtype)
    target = dtype_of(OP, "dtype", dtype, torch.bfloat16)
    if target not in (torch.float16, torch.bfloat16):
        refuse(OP, "tqbm-output", "dtype", target)
    if bias is not None:
        refuse(OP, "tqbm-bias", "bias", f"a tensor of shape {tuple(bias.shape)}")
    if batch_split_factor not in (None, 1):
        refuse(OP, "tqbm-split", "batch_split_factor", batch_split_factor)
    perms = [list(perm or ()) for perm in (perm_x1, perm_x2, perm_y)]
    if perms[0] != [1, 0, 2] or perms[2] != [1, 0, 2] or perms[1] not in ([0, 1, 2], [0, 2, 1]):
        refuse(OP, "tqbm-perm", "perm_x1", f"{perm_x1}, perm_x2 {perm_x2}, perm_y {perm_y}")
    turned = perms[1] == [0, 2, 1]
    fits = x1.dim() == x2.dim() == 3 and x1.numel() and x2.numel() and x1.size(1) == x2.size(0)
    if not fits or x1.size(2) != x2.size(2 if turned else 1):
        refuse(OP, "tqbm-shape", "x1", f"{tuple(x1.shape)}, x2 {tuple(x2.shape)}, perm_x2 {perm_x2}")
    sizes = list(group_sizes or ())
    if x1_scale is None or x2_scale is None:
        refuse(OP, "tqbm-channel", "x1_scale" if x1_scale is None else "x2_scale", None)
    if x1_scale.dim() == 4 or x2_scale.dim() == 4:
        if x1.dtype != torch.float8_e4m3fn or x2.dtype != x1.dtype:
            refuse(OP, "tqbm-dtype", "x1", f"{x1.dtype}, x2 {x2.dtype} with scales of blocks")
        if len(sizes) != 3 or sizes[2] != _BLOCK or not {*sizes[:2]} <= {0, 1}:
            refuse(OP, "tqbm-group", "group_sizes", group_sizes)
        left, right = _widened(x1, x2, (x1_scale, x2_scale), turned)
        return torch.bmm(left, right).to(target).transpose(0, 1).contiguous()
    if sizes:
        refuse(OP, "tqbm-group", "group_sizes", group_sizes)
    m, k, n = x1.size(0), x1.size(2), x2.size(2)
    for name, scale, count in (("x1_scale", x1_scale, m), ("x2_scale", x2_scale, n)):
        if scale.dtype != torch.float32 or tuple(scale.shape) != (count,) or (k, n) != (512, 128) or turned:
            refuse(OP, "tqbm-channel", name, f"{scale.dtype}, shape {tuple(scale.shape)}, k = {k}, n = {n}")
    out = torch.bmm(x1.float().transpose(0, 1), x2.float()) * x2_scale * x1_scale.unsqueeze(-1)
    return out.to(target).transpose(0, 1).contiguous()


KERNELS = {OP: npu_transpose_quant_batchmatmul}
