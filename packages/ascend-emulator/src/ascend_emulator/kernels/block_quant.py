"""npu_dynamic_block_quant and npu_kronecker_quant: dynamic quantisation of blocks, and of a twice rotated matrix.

This module owns the ops' refusals; rounding is in ``quantising.py``.
"""

from __future__ import annotations

import torch

from .errors import KernelNotCovered
from .pose import Scope
from .quant_params import npu_convert_weight_to_int4pack
from .quantising import MOST, dtype_of, float8_of, to_integer
from .rules import declare, document, holds, note, online, refuse

OP_BLOCK = "npu::npu_dynamic_block_quant"
OP_KRONECKER = "npu::npu_kronecker_quant"
_TEST = "test_kernels_block_quant.py"
_BLOCK_DOC = online("torch_npu-npu_dynamic_block_quant")
_ACLNN_BLOCK = "ops-nn e5c3fa932, quant/dynamic_block_quant/docs/aclnnDynamicBlockQuant.md"
_KRONECKER_DOC = document("npu_kronecker_quant")
_ACLNN_FLAT = "hiascend.com, aclnnFlatQuant of CANN 8.2 to 8.5"
_HALVES = (torch.float16, torch.bfloat16)

declare(
    "npu_dynamic_block_quant",
    _ACLNN_BLOCK,
    _TEST,
    {
        "block-input": ("an input of 2 or 3 axes, not empty, of float16, bfloat16 or float32", "cast and reshape it"),
        "block-min": ("a min_scale of 0 or more", "pass 0"),
        "block-round": ("round_mode rint (hifloat8: round)", "pass 'rint'"),
        "block-sizes": ("row_block_size 1, 64, 128, 256 or 512; col_block_size 64, 128, 192 or 256", "pass 1 and 128"),
    },
)
declare(
    "npu_dynamic_block_quant",
    _BLOCK_DOC,
    _TEST,
    {
        "block-int8": ("int8 results of float16 or bfloat16", "pass dst_type=1"),
        "block-row": ("row_block_size 1 and col_block_size 128", "pass 1 and 128"),
    },
    Scope(chips=("910B", "910C")),
)
note(
    "npu_dynamic_block_quant",
    "scale = min(largest of the type / largest magnitude, 1 / min_scale)",
    _BLOCK_DOC,
    "x / scale would overflow; as its aclnn page has it: min(largest magnitude / largest of the type, 1 / min_scale)",
)
note("npu_dynamic_block_quant", "hifloat8; dst_type_max", _ACLNN_BLOCK, "not computed: `KernelNotCovered`: " + _TEST)
note("npu_dynamic_block_quant", "(not documented) a block of zeros", "—", "scale 0, results 0: " + _TEST)
declare(
    "npu_kronecker_quant",
    _KRONECKER_DOC,
    _TEST,
    {
        "kronecker-dtype": ("x, kronecker_p1 and kronecker_p2 all float16 or all bfloat16", "cast them"),
        "kronecker-shape": (
            "x (K, M, N), N a multiple of 8, none of them 0; kronecker_p1 (M, M), kronecker_p2 (N, N)",
            "reshape them",
        ),
        "kronecker-clip": ("a clip_ratio above 0, at most 1", "pass 1"),
        "kronecker-max": ("a dst_type_max of 0 or 6 to 12", "leave it out"),
    },
)
declare(
    "npu_kronecker_quant",
    _ACLNN_FLAT,
    _TEST,
    {"kronecker-rows-82": ("K of at most 8192", "split x by rows")},
    Scope(before=(8, 3)),
)
declare(
    "npu_kronecker_quant",
    _ACLNN_FLAT,
    _TEST,
    {
        "kronecker-rows-83": ("K of at most 32768", "split x by rows"),
        "kronecker-size-83": ("M and N of at most 128", "choose smaller factors"),
    },
    Scope(before=(8, 5)),
)
declare(
    "npu_kronecker_quant",
    _ACLNN_FLAT,
    _TEST,
    {
        "kronecker-rows": ("K of at most 262144", "split x by rows"),
        "kronecker-size": ("M and N of at most 256", "choose smaller factors"),
    },
)
note(
    "npu_kronecker_quant",
    "quant_scale: largest magnitude / (7 * clip_ratio) up to CANN 8.2, / (7 / clip_ratio) from 8.3 on",
    _ACLNN_FLAT,
    "the later: a smaller clip_ratio gives a smaller scale; results saturate at -8 and 7: " + _TEST,
)
note("npu_kronecker_quant", "(not documented) where products are rounded", "—", "at the end: float32 throughout")
note("npu_kronecker_quant", "(not documented) a row of zeros", "—", "scale 0, results 0: " + _TEST)
note(
    "npu_kronecker_quant", "float4 results; dst_type_max", _KRONECKER_DOC, "not computed: `KernelNotCovered`: " + _TEST
)


def npu_dynamic_block_quant(
    x: torch.Tensor,
    *,
    min_scale: float = 0.0,
    round_mode: str = "rint",
    dst_type: int | torch.dtype = 1,
    row_block_size: int = 1,
    col_block_size: int = 128,
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric quantisation with one scale a block: its largest magnitude / the largest number of the type.

    Args:
        x: Shape: [M, N] or [B, M, N]; float16 or bfloat16, on a 950 also float32.
        min_scale: scales are at most 1 / min_scale; 0 for no limit.
        round_mode: rint.
        dst_type: int8, on a 950 also float8_e4m3fn and float8_e5m2.
        row_block_size: rows of a block.
        col_block_size: columns of a block.
        dst_type_max: 0.

    Returns:
        Numbers of ``dst_type`` shaped as x, and float32 scales [..., ceil(M / rows), ceil(N / columns)].

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_dynamic_block_quant.md; ops-nn, aclnnDynamicBlockQuant.md.
    """
    if x.dim() not in (2, 3) or not x.numel() or x.dtype not in (*_HALVES, torch.float32):
        refuse(OP_BLOCK, "block-input", "x", f"{x.dtype}, shape {tuple(x.shape)}")
    if min_scale < 0:
        refuse(OP_BLOCK, "block-min", "min_scale", min_scale)
    target = float8_of(dst_type) or dtype_of(OP_BLOCK, "dst_type", dst_type, torch.int8)
    if target not in MOST:
        raise KernelNotCovered(OP_BLOCK, "dst_type", dst_type)
    if dst_type_max:
        raise KernelNotCovered(OP_BLOCK, "dst_type_max", dst_type_max)
    if round_mode != "rint":
        refuse(OP_BLOCK, "block-round", "round_mode", repr(round_mode))
    if holds("block-int8") and (target != torch.int8 or x.dtype == torch.float32):
        refuse(OP_BLOCK, "block-int8", "dst_type", f"{target} of {x.dtype}")
    height, width = row_block_size, col_block_size
    if height not in (1, 64, 128, 256, 512) or width not in (64, 128, 192, 256):
        refuse(OP_BLOCK, "block-sizes", "row_block_size", f"{height}, col_block_size {width}")
    if holds("block-row") and (height, width) != (1, 128):
        refuse(OP_BLOCK, "block-row", "row_block_size", f"{height}, col_block_size {width}")
    rows, columns = x.shape[-2:]
    tall, wide = -(-rows // height), -(-columns // width)
    padded = torch.nn.functional.pad(x.float(), (0, wide * width - columns, 0, tall * height - rows))
    blocks = padded.view(-1, tall, height, wide, width)
    scale = blocks.abs().amax((2, 4)) / MOST[target]
    if min_scale:
        scale = scale.clamp(max=1 / min_scale)
    divisor = scale.view(-1, tall, 1, wide, 1)
    quotient = torch.where(divisor == 0, 0.0, blocks / divisor).view(padded.shape)[..., :rows, :columns]
    out = to_integer(quotient) if target == torch.int8 else quotient.clamp(-MOST[target], MOST[target]).to(target)
    return out.contiguous(), scale.view(*x.shape[:-2], tall, wide)


def npu_kronecker_quant(
    x: torch.Tensor,
    kronecker_p1: torch.Tensor,
    kronecker_p2: torch.Tensor,
    clip_ratio: float | None = None,
    dst_dtype: int | torch.dtype | None = None,
    dst_type_max: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises ``kronecker_p1 @ x @ kronecker_p2`` to 4-bit integers with one scale for each matrix of x.

    Args:
        x: Shape: [K, M, N]; float16 or bfloat16.
        kronecker_p1: Shape: [M, M]; dtype of x.
        kronecker_p2: Shape: [N, N]; dtype of x.
        clip_ratio: part of the largest magnitude that becomes 7; None for 1.
        dst_dtype: None or int32.
        dst_type_max: None or 0.

    Returns:
        Eight 4-bit integers in each number, the first in the lowest bits, [K, M, N / 8] int32, and scales [K] float32.

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        Document of torch_npu.npu_kronecker_quant in the torch_npu 2.12.0 wheel; hiascend.com, aclnnFlatQuant.
    """
    for name, tensor in (("x", x), ("kronecker_p1", kronecker_p1), ("kronecker_p2", kronecker_p2)):
        if tensor.dtype not in _HALVES or tensor.dtype != x.dtype:
            refuse(OP_KRONECKER, "kronecker-dtype", name, tensor.dtype)
    fits = x.dim() == 3 and x.numel() and x.size(2) % 8 == 0
    if not fits or kronecker_p1.shape != (x.size(1),) * 2 or kronecker_p2.shape != (x.size(2),) * 2:
        given = f"{tuple(x.shape)}, kronecker_p1 {tuple(kronecker_p1.shape)}, kronecker_p2 {tuple(kronecker_p2.shape)}"
        refuse(OP_KRONECKER, "kronecker-shape", "x", given)
    clip = 1.0 if clip_ratio is None else clip_ratio
    if not 0 < clip <= 1:
        refuse(OP_KRONECKER, "kronecker-clip", "clip_ratio", clip)
    if dst_type_max and not 6 <= dst_type_max <= 12:
        refuse(OP_KRONECKER, "kronecker-max", "dst_type_max", dst_type_max)
    if dtype_of(OP_KRONECKER, "dst_dtype", dst_dtype, torch.int32) != torch.int32:
        raise KernelNotCovered(OP_KRONECKER, "dst_dtype", dst_dtype)
    if dst_type_max:
        raise KernelNotCovered(OP_KRONECKER, "dst_type_max", dst_type_max)
    for suffix, rows, most in (("-82", 8192, None), ("-83", 32768, 128), ("", 262144, 256)):
        if x.size(0) > rows and holds(f"kronecker-rows{suffix}"):
            refuse(OP_KRONECKER, f"kronecker-rows{suffix}", "x", f"K = {x.size(0)}")
        if most and max(x.shape[1:]) > most and holds(f"kronecker-size{suffix}"):
            refuse(OP_KRONECKER, f"kronecker-size{suffix}", "x", f"M = {x.size(1)}, N = {x.size(2)}")
    rotated = kronecker_p1.float() @ (x.float() @ kronecker_p2.float())
    scale = rotated.abs().amax((1, 2)) * clip / 7
    divisor = scale.view(-1, 1, 1)
    digits = torch.where(divisor == 0, 0.0, rotated / divisor).round().clamp(-8, 7).to(torch.int32)
    packed = npu_convert_weight_to_int4pack(digits.view(-1, x.size(2)))
    return packed.view(x.size(0), x.size(1), -1), scale


KERNELS = {OP_BLOCK: npu_dynamic_block_quant, OP_KRONECKER: npu_kronecker_quant}
