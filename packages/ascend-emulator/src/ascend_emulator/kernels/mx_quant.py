"""npu_dynamic_mx_quant, its forms behind a norm, and npu_dynamic_dual_level_mx_quant: microscaling of activations.

This module owns the ops' refusals; the arithmetic is in ``mx_format.py``.
"""

from __future__ import annotations

import torch

from .errors import KernelNotCovered
from .mx_format import E2M1, E4M3, E5M2, Format, packed, quantise
from .quantising import float8_of
from .rules import declare, note, online, refuse

OP = "npu::npu_dynamic_mx_quant"
OP_NORM = "npu::npu_rms_norm_dynamic_mx_quant"
OP_ADD = "npu::npu_add_rms_norm_dynamic_mx_quant"
OP_DUAL = "npu::npu_dynamic_dual_level_mx_quant"
_TEST = "test_kernels_mx.py"
_DOC = "ops-nn e5c3fa932, quant/dynamic_mx_quant/docs/aclnnDynamicMxQuantV2.md"
_NORM_DOC = "ops-nn e5c3fa932, norm/add_rms_norm_dynamic_mx_quant/docs/aclnnAddRmsNormDynamicMxQuant.md"
_DUAL_DOC = online("torch_npu-npu_dynamic_dual_level_mx_quant")
_ALL = "npu_[rms_norm_, add_rms_norm_]dynamic_mx_quant"
_NORMS = "npu_[add_]rms_norm_dynamic_mx_quant"
_HALVES = (torch.float16, torch.bfloat16)
_E2M1, _E1M2 = 296, 297

declare(
    _ALL,
    _DOC,
    _TEST,
    {
        "mx-input": ("an input of 1 to 7 axes of float16 or bfloat16 (float32: blocks of 32, at least one)", "cast it"),
        "mx-type": ("dst_type float8_e5m2, float8_e4m3fn, float4_e2m1fn_x2 or float4_e1m2fn_x2", "pass one of them"),
        "mx-even": ("4-bit results: a last axis of even size", "pad the last axis"),
        "mx-round": ("round_mode rint; 4-bit results also floor and round", "pass 'rint'"),
        "mx-algorithm": ("scale_alg 0 or, for float8, 1; 4-bit 0 or, for float4_e2m1fn_x2, 2", "pass 0"),
        "mx-axis": ("an axis of the input", "pass -1"),
        "mx-block": ("a block_size that is a multiple of 32, from 32 to 1024 (scale_alg 2: 32)", "pass 32"),
        "mx-max": ("a dst_type_max of 0, or of 6 to 12 for float4_e2m1fn_x2 in blocks of 32", "leave it out"),
    },
)
declare(
    _NORMS,
    _NORM_DOC,
    _TEST,
    {
        "mx-norm-input": ("x (x1 and x2 alike) of 1 to 7 axes of float16 or bfloat16", "cast and reshape it"),
        "mx-norm-gamma": ("gamma (last axis,) of x's dtype or float32, beta likewise", "cast and reshape them"),
    },
)
declare(
    "npu_dynamic_dual_level_mx_quant",
    _DUAL_DOC,
    _TEST,
    {
        "mx-dual-input": ("an input of 1 to 7 axes of float16 or bfloat16, not empty, its last axis even", "cast it"),
        "mx-dual-smooth": ("no smooth_scale", "leave it None"),
        "mx-dual-round": ("round_mode rint, round or floor", "pass 'rint'"),
    },
)
note(
    _ALL,
    "float4_e1m2fn_x2; scale_alg 2; dst_type_max; max_low_bound",
    _DOC,
    "not computed: `KernelNotCovered`: " + _TEST,
)
note(_ALL, "(not documented) blocks with infinities or NaN", "—", "their scale and numbers mean nothing")
note(_ALL, "(not documented) which of two 4-bit numbers lies in a byte's lower half", "—", "the first: " + _TEST)
note(_ALL, "for chip 950 alone", _DOC, "taken on every chip: no other has such numbers to refuse them beside")
note(_NORMS, "(not documented) whether the norm is rounded before it is quantised", "—", "it is not")
note("npu_dynamic_dual_level_mx_quant", "a block of zeros", "—", "scale 0, numbers 0: " + _TEST)


def _format(op: str, dst_type: int | torch.dtype) -> Format:
    if dst_type == _E2M1:
        return E2M1
    if dst_type == _E1M2:
        raise KernelNotCovered(op, "dst_type", "float4_e1m2fn_x2")
    found = {torch.float8_e5m2: E5M2, torch.float8_e4m3fn: E4M3, None: None}[float8_of(dst_type)]
    if found is None:
        refuse(op, "mx-type", "dst_type", dst_type)
    return found


def _check(op: str, target: Format, width: int, round_mode: str, algorithm: int) -> None:
    four_bits = target is E2M1
    if four_bits and width % 2:
        refuse(op, "mx-even", "input", f"a last axis of {width}")
    if round_mode not in (("rint", "floor", "round") if four_bits else ("rint",)):
        refuse(op, "mx-round", "round_mode", f"{round_mode!r} for {target.name}")
    if algorithm not in ((0, 2) if four_bits else (0, 1)):
        refuse(op, "mx-algorithm", "scale_alg", f"{algorithm} for {target.name}")
    if algorithm == 2:
        raise KernelNotCovered(op, "scale_alg", algorithm)


def npu_dynamic_mx_quant(
    input: torch.Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int | torch.dtype = _E2M1,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises blocks along an axis, with a power of two as each block's scale.

    Args:
        input: Shape: [..., n, ...]; float16, bfloat16 or float32.
        axis: the axis of the blocks.
        round_mode: rint; 4-bit also floor and round.
        dst_type: float8_e5m2, float8_e4m3fn or float4_e2m1fn_x2, as torch or torch_npu number them.
        block_size: numbers that share a scale.
        scale_alg: 0 by the largest exponent, 1 so that nothing saturates (float8).
        dst_type_max: 0.
        max_low_bound: 0 (from torch_npu 2.13 on).

    Returns:
        float8 of the input's shape, or 4-bit floats, two a byte along the last axis (uint8); scales in pairs, uint8:
        the input's shape with ceil(ceil(n / block_size) / 2) on the axis, and a last axis of 2.

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        ops-nn, aclnnDynamicMxQuantV2.md.
    """
    if not 1 <= input.dim() <= 7 or input.dtype not in (*_HALVES, torch.float32):
        refuse(OP, "mx-input", "input", f"{input.dtype}, shape {tuple(input.shape)}")
    if not -input.dim() <= axis < input.dim():
        refuse(OP, "mx-axis", "axis", f"{axis} of {input.dim()}")
    if input.dtype == torch.float32 and (block_size != 32 or input.size(axis) < 32):
        refuse(OP, "mx-input", "input", f"{input.dtype}, {input.size(axis)} numbers in blocks of {block_size}")
    target = _format(OP, dst_type)
    if block_size % 32 or not 32 <= block_size <= 1024 or (scale_alg == 2 and block_size != 32):
        refuse(OP, "mx-block", "block_size", block_size)
    if dst_type_max and not (6 <= dst_type_max <= 12 and target is E2M1 and block_size == 32):
        refuse(OP, "mx-max", "dst_type_max", dst_type_max)
    _check(OP, target, input.size(-1), round_mode, scale_alg or 0)
    for name, value in (("dst_type_max", dst_type_max), ("max_low_bound", max_low_bound)):
        if value:
            raise KernelNotCovered(OP, name, value)
    axis %= input.dim()
    numbers, pairs = quantise(input.float().movedim(axis, -1), target, scale_alg or 0, round_mode, block_size)
    numbers = numbers.movedim(-1, axis).contiguous()
    return (packed(numbers) if target is E2M1 else numbers), pairs.movedim(-2, axis).contiguous()


def _normed(
    op: str,
    total: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    epsilon: float,
    options: tuple[int, str, int | torch.dtype],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    algorithm, round_mode, dst_type = options
    if not 1 <= total.dim() <= 7 or total.dtype not in _HALVES:
        refuse(op, "mx-norm-input", "x", f"{total.dtype}, shape {tuple(total.shape)}")
    for name, tensor in (("gamma", gamma), ("beta", beta)):
        if tensor is None:
            continue
        if tensor.dtype not in (total.dtype, torch.float32) or tuple(tensor.shape) != (total.size(-1),):
            refuse(
                op, "mx-norm-gamma", name, f"{tensor.dtype}, shape {tuple(tensor.shape)} beside {tuple(total.shape)}"
            )
        if tensor.dtype != gamma.dtype:
            refuse(op, "mx-norm-gamma", name, f"{tensor.dtype} beside gamma of {gamma.dtype}")
    target = _format(op, dst_type)
    _check(op, target, total.size(-1), round_mode, algorithm)
    reciprocal = torch.rsqrt(total.float().square().mean(-1, keepdim=True) + epsilon)
    normed = total.float() * reciprocal * gamma.float()
    numbers, pairs = quantise(normed if beta is None else normed + beta.float(), target, algorithm, round_mode, 32)
    return (packed(numbers) if target is E2M1 else numbers), pairs, reciprocal


def npu_rms_norm_dynamic_mx_quant(
    x: torch.Tensor,
    gamma: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-06,
    scale_alg: int = 0,
    round_mode: str = "rint",
    dst_type: int | torch.dtype = _E2M1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm over the last axis, then ``npu_dynamic_mx_quant`` in blocks of 32.

    Args:
        x: Shape: [..., n]; float16 or bfloat16.
        gamma: Shape: [n]; dtype of x, or float32.
        beta: None, or as gamma.
        epsilon: added to the mean square.
        scale_alg: see ``npu_dynamic_mx_quant``.
        round_mode: likewise.
        dst_type: likewise.

    Returns:
        Numbers and scales as ``npu_dynamic_mx_quant``, and the reciprocal root [..., 1] float32.

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        ops-nn, aclnnAddRmsNormDynamicMxQuant.md and its form without a sum.
    """
    return _normed(OP_NORM, x, gamma, beta, epsilon, (scale_alg, round_mode, dst_type))


def npu_add_rms_norm_dynamic_mx_quant(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-06,
    scale_alg: int = 0,
    round_mode: str = "rint",
    dst_type: int | torch.dtype = _E2M1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of ``x1 + x2``, which is the second result; see ``npu_rms_norm_dynamic_mx_quant``."""
    if x1.dtype != x2.dtype or x1.shape != x2.shape:
        refuse(OP_ADD, "mx-norm-input", "x2", f"{x2.dtype}, shape {tuple(x2.shape)} beside {tuple(x1.shape)}")
    total = x1 + x2
    numbers, pairs, reciprocal = _normed(OP_ADD, total, gamma, beta, epsilon, (scale_alg, round_mode, dst_type))
    return numbers, total, pairs, reciprocal


def npu_dynamic_dual_level_mx_quant(
    input: torch.Tensor, *, smooth_scale: torch.Tensor | None = None, round_mode: str = "rint"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantises to 4-bit floats with a float32 scale for 512 numbers and a power of two for 32.

    Args:
        input: Shape: [..., n]; float16 or bfloat16.
        smooth_scale: None.
        round_mode: rint, round or floor.

    Returns:
        Two 4-bit floats a byte [..., n / 2] uint8; scales [..., ceil(n / 512)] float32; scales in pairs
        [..., ceil(ceil(n / 32) / 2), 2] uint8.

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        op-plugin, torch_npu-npu_dynamic_dual_level_mx_quant.md.
    """
    if not 1 <= input.dim() <= 7 or input.dtype not in _HALVES or not input.numel() or input.size(-1) % 2:
        refuse(OP_DUAL, "mx-dual-input", "input", f"{input.dtype}, shape {tuple(input.shape)}")
    if smooth_scale is not None:
        refuse(OP_DUAL, "mx-dual-smooth", "smooth_scale", f"a tensor of shape {tuple(smooth_scale.shape)}")
    if round_mode not in ("rint", "round", "floor"):
        refuse(OP_DUAL, "mx-dual-round", "round_mode", repr(round_mode))
    n = input.size(-1)
    count = -(-n // 512)
    blocks = torch.nn.functional.pad(input.float(), (0, 512 * count - n)).view(*input.shape[:-1], count, 512)
    outer = blocks.abs().amax(-1) / E2M1.most
    divisor = outer.unsqueeze(-1)
    inner = torch.where(divisor == 0, 0.0, blocks / divisor).to(input.dtype).float().flatten(-2)[..., :n]
    numbers, pairs = quantise(inner, E2M1, 0, round_mode, 32)
    return packed(numbers), outer, pairs


KERNELS = {
    OP: npu_dynamic_mx_quant,
    OP_NORM: npu_rms_norm_dynamic_mx_quant,
    OP_ADD: npu_add_rms_norm_dynamic_mx_quant,
    OP_DUAL: npu_dynamic_dual_level_mx_quant,
}
