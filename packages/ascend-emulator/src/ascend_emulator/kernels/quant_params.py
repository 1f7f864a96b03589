"""Preparing quantised products: npu_convert_weight_to_int4pack and npu_trans_quant_param.

This module owns the ops' refusals and the bit layouts of their results.
"""

from __future__ import annotations

import torch

from .errors import KernelNotCovered
from .rules import META, declare, note, online, refuse

OP_PACK = "npu::npu_convert_weight_to_int4pack"
OP_SCALE = "npu::npu_trans_quant_param"
_PACK_DOC = online("torch_npu-npu_convert_weight_to_int4pack")
_SCALE_DOC = online("torch_npu-npu_trans_quant_param")
_TEST = "test_kernels_quant_params.py"

declare(
    "npu_convert_weight_to_int4pack",
    _PACK_DOC,
    _TEST,
    {
        "int4pack-weight": ("a contiguous int32 weight of 2 axes, the last a multiple of 8", "cast, copy and pad it"),
        "int4pack-range": ("values from -8 to 7", "quantise the weight to 4 bits first"),
    },
)
declare(
    "npu_trans_quant_param",
    f"{_SCALE_DOC}; {META}",
    _TEST,
    {
        "quant-param-scale": ("a contiguous float32 scale (n,) or (1, n), n > 0", "cast and reshape the scale"),
        "quant-param-offset": (
            "a contiguous float32 offset: beside (n,): (n,), or one of the two of 1 element; beside (1, n): (1, n)",
            "cast and reshape the offset",
        ),
        "quant-param-round": ("round_mode 0 or 1", "pass 0 or 1"),
    },
)
note(
    "npu_convert_weight_to_int4pack",
    "float32 weights become 4-bit floats (chip 950)",
    META,
    "`KernelNotCovered`: " + _TEST,
)
note("npu_convert_weight_to_int4pack", "weights in format FRACTAL_NZ", _PACK_DOC, "packed as they are seen")
note(
    "npu_trans_quant_param",
    "scales (g, 1) and (g, n) for grouped products",
    _SCALE_DOC,
    f"refused, as in {META}: {_TEST}",
)
note(
    "npu_trans_quant_param",
    "round_mode 1 rounds the scale to 19 bits",
    _SCALE_DOC,
    "to nearest, halves to even; the document does not say which way halves go: " + _TEST,
)


def npu_convert_weight_to_int4pack(weight: torch.Tensor, inner_k_tiles: int = 0) -> torch.Tensor:
    """Packs eight 4-bit integers into each 32-bit one, the first in the lowest bits.

    Args:
        weight: values from -8 to 7. Shape: [rows, columns], columns a multiple of 8; int32; contiguous.
        inner_k_tiles: not used.

    Returns:
        Shape: [rows, columns / 8]; int32.

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_convert_weight_to_int4pack.md.
    """
    if weight.dtype == torch.float32:
        raise KernelNotCovered(OP_PACK, "weight", "a float32 tensor (4-bit floats)")
    if weight.dtype != torch.int32 or weight.dim() != 2 or weight.size(1) % 8 or not weight.is_contiguous():
        shown = f"{weight.dtype}, shape {tuple(weight.shape)}, strides {weight.stride()}"
        refuse(OP_PACK, "int4pack-weight", "weight", shown)
    if weight.numel() and not -8 <= int(weight.min()) <= int(weight.max()) <= 7:
        refuse(OP_PACK, "int4pack-range", "weight", f"values from {int(weight.min())} to {int(weight.max())}")
    parts = (weight & 15).view(weight.size(0), weight.size(1) // 8, 8)
    packed = parts[..., 7] << 28
    for place in range(7):
        packed |= parts[..., place] << 4 * place
    return packed


def unpacked_int4(packed: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """4-bit integers of 32-bit ones, the lowest bits first.

    Args:
        packed: int32.
        axis: the axis that becomes eight times as long: -1, or -2.

    Returns:
        int8.
    """
    packed = packed if axis == -1 else packed.transpose(-1, -2)
    digits = packed.unsqueeze(-1) >> 4 * torch.arange(8, dtype=torch.int32) & 15
    out = torch.where(digits > 7, digits - 16, digits).to(torch.int8).flatten(-2)
    return out if axis == -1 else out.transpose(-1, -2)


def unpacked_scale(scale: torch.Tensor) -> torch.Tensor:
    """float32 scales of a quantised product: those that npu_trans_quant_param packed, and any others as they are."""
    if scale.dtype != torch.int64:
        return scale.float()
    low = scale & 0xFFFFE000
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32).view(torch.float32)


def _check(scale: torch.Tensor, offset: torch.Tensor | None, round_mode: int | None) -> None:
    fits = scale.dim() == 1 or (scale.dim() == 2 and scale.size(0) == 1)
    if scale.dtype != torch.float32 or not fits or not scale.numel() or not scale.is_contiguous():
        refuse(OP_SCALE, "quant-param-scale", "scale", f"{scale.dtype}, shape {tuple(scale.shape)}")
    if round_mode not in (None, 0, 1):
        refuse(OP_SCALE, "quant-param-round", "round_mode", round_mode)
    if offset is None:
        return
    fits = offset.shape == scale.shape or (offset.dim() == scale.dim() == 1 and 1 in (len(offset), len(scale)))
    if offset.dtype != torch.float32 or not fits or not offset.numel() or not offset.is_contiguous():
        shown = f"{offset.dtype}, shape {tuple(offset.shape)} beside a scale of {tuple(scale.shape)}"
        refuse(OP_SCALE, "quant-param-offset", "offset", shown)


def npu_trans_quant_param(
    scale: torch.Tensor, offset: torch.Tensor | None = None, round_mode: int | None = 0
) -> torch.Tensor:
    """Packs scales and offsets of a quantised product into 64 bits each.

    Args:
        scale: Shape: [n] or [1, n]; float32; finite.
        offset: None, or Shape: as the scale, or one of the two of 1 element; float32; finite.
        round_mode: 0 cuts the scale to its upper 19 bits, 1 rounds it to them.

    Returns:
        The scale's 19 bits in place in bits 0 to 31, the rounded offset (-256 to 255) in bits 37 to 45, 1 in bit 46.
        Shape: that of the longer argument; int64.

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        op-plugin, torch_npu-npu_trans_quant_param.md.
    """
    _check(scale, offset, round_mode)
    bits = scale.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    if round_mode:
        bits = bits + 0xFFF + (bits >> 13 & 1)
    out = bits & 0xFFFFE000 | 1 << 46
    if offset is not None:
        out = out | (offset.round().clamp(-256, 255).to(torch.int64) & 0x1FF) << 37
    return out


KERNELS = {OP_PACK: npu_convert_weight_to_int4pack, OP_SCALE: npu_trans_quant_param}
