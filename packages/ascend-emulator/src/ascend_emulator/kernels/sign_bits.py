"""npu_sign_bits_unpack: bits as signs.

This module owns the op's refusals.
"""

from __future__ import annotations

import torch

from .quantising import dtype_of
from .rules import declare, online, refuse

OP = "npu::npu_sign_bits_unpack"
_DOC = online("（beta）torch_npu-npu_sign_bits_unpack")

declare(
    "npu_sign_bits_unpack",
    _DOC,
    "test_kernels_block_quant.py",
    {
        "signs-input": ("a uint8 input of one axis", "flatten it and view it as uint8"),
        "signs-dtype": ("a dtype of float16 or float32", "pass one of them"),
        "signs-size": ("a size of 1 or more that divides the number of bits", "pass 1"),
    },
)


def npu_sign_bits_unpack(input: torch.Tensor, size: int, dtype: int | torch.dtype) -> torch.Tensor:
    """Makes 1.0 of every set bit and -1.0 of every other one, lowest bit of each byte first.

    Args:
        input: Shape: [n]; uint8.
        size: rows of the result.
        dtype: float16 or float32.

    Returns:
        Shape: [size, 8 * n / size]; ``dtype``.

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        op-plugin, （beta）torch_npu-npu_sign_bits_unpack.md.
    """
    if input.dtype != torch.uint8 or input.dim() != 1:
        refuse(OP, "signs-input", "input", f"{input.dtype}, shape {tuple(input.shape)}")
    target = dtype_of(OP, "dtype", dtype, torch.float32)
    if target not in (torch.float16, torch.float32):
        refuse(OP, "signs-dtype", "dtype", target)
    if size < 1 or 8 * input.numel() % size:
        refuse(OP, "signs-size", "size", f"{size} for {8 * input.numel()} bits")
    bits = input.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return (bits.to(target) * 2 - 1).view(size, 8 * input.numel() // size)


KERNELS = {OP: npu_sign_bits_unpack}
