"""The pattern of memory that nobody wrote. It owns the pattern and the question whether a tensor still holds it.

Raw device memory (fresh from the runtime, or freed) is filled with the byte 0xFF. A fresh tensor is filled by dtype:
0xFF for floating point and complex (a NaN in float8_e4m3fn, float8_e5m2, float16, bfloat16, float32 and float64), 0xA5
for all others, so that a never-written integer is far out of the range of any index instead of -1.
"""

from __future__ import annotations

import ctypes

import torch

__all__ = ["POISON_BYTE", "POISON_BYTE_INTEGER", "fill", "is_poisoned", "poison_byte"]

POISON_BYTE = 0xFF
POISON_BYTE_INTEGER = 0xA5

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def poison_byte(dtype: torch.dtype) -> int:
    """Byte that fills a fresh tensor of this dtype."""
    return POISON_BYTE if dtype.is_floating_point or dtype.is_complex else POISON_BYTE_INTEGER


def is_poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements still hold the pattern bit for bit.

    Args:
        tensor: CPU tensor of any shape. Computed NaNs have other bits than the pattern; an int8 element may hold
            0xA5 (-91) legitimately, so judge integers by whole rows.

    Returns:
        Shape: that of `tensor`; dtype bool.
    """
    byte = poison_byte(tensor.dtype)
    size = tensor.element_size()
    if tensor.dtype.is_complex:
        return is_poisoned(torch.view_as_real(tensor)).all(-1)
    pattern = int.from_bytes(bytes([byte]) * size, "little", signed=size > 1)
    mask: torch.Tensor = tensor.view(_SAME_SIZE[size]) == pattern
    return mask


def fill(address: int, nbytes: int, dtype: torch.dtype | None = None) -> None:
    """Poison raw memory that belongs to a tensor of `dtype` (None: raw memory)."""
    if nbytes:
        ctypes.memset(address, POISON_BYTE if dtype is None else poison_byte(dtype), nbytes)
