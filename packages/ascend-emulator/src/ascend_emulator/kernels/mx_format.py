"""Microscaling formats: numbers of 8 or 4 bits with one power of two as the scale of a block.

This module owns the arithmetic of scales, rounding and packing; the ops' refusals are in ``mx_quant.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FOUR_BITS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes of float4_e2m1 by their code."""


@dataclass(frozen=True)
class Format:
    """A type of the numbers.

    Attributes:
        name: as torch and torch_npu call it.
        dtype: float8 dtype; uint8 for two 4-bit floats a byte.
        exponent: exponent of the largest power of two.
        most: largest number.
    """

    name: str
    dtype: torch.dtype
    exponent: int
    most: float


E5M2 = Format("float8_e5m2", torch.float8_e5m2, 15, 57344.0)
E4M3 = Format("float8_e4m3fn", torch.float8_e4m3fn, 8, 448.0)
E2M1 = Format("float4_e2m1fn_x2", torch.uint8, 2, 6.0)


def scale_bytes(largest: torch.Tensor, target: Format, algorithm: int) -> torch.Tensor:
    """Scales of blocks: exponents of powers of two, plus 127.

    Args:
        largest: largest magnitude of each block; float32; finite.
        target: the type of the numbers.
        algorithm: 0: the exponent of the largest magnitude, less the type's; 1: of largest / ``target.most``, rounded
            up.

    Returns:
        uint8; 0 for a block of zeros.
    """
    if algorithm == 0:
        exponent = torch.frexp(largest).exponent - 1 - target.exponent + 127
        return torch.where(largest == 0, 0, exponent.clamp(0, 254)).to(torch.uint8)
    bits = (largest / target.most).view(torch.int32)
    exponent, mantissa = bits >> 23 & 255, bits & 0x7FFFFF
    up = ((exponent > 0) & (exponent < 254) & (mantissa > 0)) | ((exponent == 0) & (mantissa > 1 << 22))
    return (exponent + up.int()).to(torch.uint8)


def powers(scales: torch.Tensor) -> torch.Tensor:
    """float32 powers of two that scale bytes (uint8 or float8_e8m0fnu) stand for."""
    numbers = scales.view(torch.uint8).int()
    return torch.where(numbers == 0, 1 << 22, numbers << 23).to(torch.int32).view(torch.float32)


def rounded(values: torch.Tensor, target: Format, mode: str) -> torch.Tensor:
    """Numbers of the target as it keeps them, saturated.

    Args:
        values: scaled numbers; float32.
        target: their type.
        mode: rint (halves to even), round (halves away from zero) or floor; float8: rint.

    Returns:
        ``target.dtype``; 4-bit: codes 0 to 15, one a byte.
    """
    if target.dtype != torch.uint8:
        return values.clamp(-target.most, target.most).to(target.dtype)
    step = torch.ldexp(torch.ones_like(values), (torch.frexp(values).exponent - 1).clamp(min=0) - 1)
    units = values / step
    if mode == "rint":
        units = units.round()
    else:
        units = units.floor() if mode == "floor" else units.sign() * (units.abs() + 0.5).floor()
    kept = (units * step).clamp(-target.most, target.most)
    codes = torch.bucketize(kept.abs(), _FOUR_BITS).to(torch.uint8)
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes, two in a byte, the first in the lower half. Shape: [..., n] -> [..., n / 2]; uint8."""
    pairs = codes.unflatten(-1, (-1, 2))  # type: ignore[no-untyped-call]
    out: torch.Tensor = pairs[..., 0] | pairs[..., 1] << 4
    return out


def unpacked(pairs: torch.Tensor) -> torch.Tensor:
    """float32 numbers of packed 4-bit floats. Shape: [..., n / 2] -> [..., n]."""
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).int()
    return _FOUR_BITS[codes & 7] * torch.where(codes > 7, -1.0, 1.0)


def quantise(
    values: torch.Tensor, target: Format, algorithm: int, mode: str, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises along the last axis.

    Args:
        values: Shape: [..., n]; float32.
        target: type of the numbers.
        algorithm: see ``scale_bytes``.
        mode: see ``rounded``.
        block: numbers that share a scale.

    Returns:
        Numbers (4-bit: codes) [..., n], and scales in pairs [..., ceil(ceil(n / block) / 2), 2] uint8; the pad is 0.
    """
    n = values.size(-1)
    count = -(-n // block)
    blocks = torch.nn.functional.pad(values, (0, count * block - n)).view(*values.shape[:-1], count, block)
    scales = scale_bytes(blocks.abs().amax(-1), target, algorithm)
    numbers = rounded(blocks / powers(scales).unsqueeze(-1), target, mode).flatten(-2)[..., :n]
    pairs = torch.nn.functional.pad(scales, (0, count % 2)).view(*values.shape[:-1], (count + 1) // 2, 2)
    return numbers.contiguous(), pairs


def dequantised(numbers: torch.Tensor, pairs: torch.Tensor, block: int) -> torch.Tensor:
    """float32 values of numbers [..., n] (float8, or float32 of 4-bit ones) with their scales in pairs."""
    scales = powers(pairs).flatten(-2).repeat_interleave(block, -1)[..., : numbers.size(-1)]
    return numbers.float() * scales
