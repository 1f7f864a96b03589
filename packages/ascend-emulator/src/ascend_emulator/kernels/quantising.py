"""Rounding and saturating to 8-bit integers, and the scales of symmetric dynamic quantisation.

This module owns the arithmetic that the quantising ops share; it refuses no call.
"""

from __future__ import annotations

import torch

from .errors import KernelNotCovered

_DTYPE_NUMBERS = {0: torch.uint8, 1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
_FLOAT8_NUMBERS = {
    **{23: torch.float8_e5m2, 24: torch.float8_e4m3fn},
    **{291: torch.float8_e5m2, 292: torch.float8_e4m3fn},
}
"""float8 dtypes by c10's numbers and by torch_npu's own."""


def dtype_of(op: str, argument: str, number: int | torch.dtype | None, usual: torch.dtype) -> torch.dtype:
    """The torch dtype that a schema's dtype number or dtype stands for.

    Args:
        op: full op name.
        argument: name of the argument.
        number: a c10 ScalarType number, a dtype, or None.
        usual: what None means.

    Returns:
        The dtype.

    Raises:
        KernelNotCovered: a dtype that is not computed here (int4, hifloat8, float8 and the microscaling formats).
    """
    if number is None:
        return usual
    dtype = number if isinstance(number, torch.dtype) else _DTYPE_NUMBERS.get(number)
    if dtype is None or dtype not in _DTYPE_NUMBERS.values():
        raise KernelNotCovered(op, argument, number)
    return dtype


def float8_of(number: int | torch.dtype | None) -> torch.dtype | None:
    """The float8 dtype that a schema's dtype number or dtype stands for; None for any other."""
    dtype = number if isinstance(number, torch.dtype) else _FLOAT8_NUMBERS.get(-1 if number is None else number)
    return dtype if dtype in _FLOAT8_NUMBERS.values() else None


def to_integer(values: torch.Tensor, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Rounds to the nearest integer, halves to even, and saturates at the limits of an integer dtype."""
    limits = torch.iinfo(dtype)
    return values.round().clamp(limits.min, limits.max).to(dtype)


MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Largest number of each result of dynamic quantisation."""


def quantise_rows(
    values: torch.Tensor, dims: tuple[int, ...] = (-1,), target: torch.dtype = torch.int8, most: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric quantisation with one scale for every group of elements.

    Args:
        values: Shape: [...]; float32.
        dims: axes over which one scale holds.
        target: one of ``MOST``.
        most: what the largest magnitude becomes; None for the target's largest number.

    Returns:
        ``target`` of the same shape, and the scale: largest magnitude / ``most`` (float32, without ``dims``). A group
        of zeros has scale 0 and quantises to 0.
    """
    scale = values.abs().amax(dims, keepdim=True) / (MOST[target] if most is None else most)
    quotient = torch.where(scale == 0, torch.zeros_like(values), values / scale)
    for axis in sorted((dim % values.dim() for dim in dims), reverse=True):
        scale = scale.squeeze(axis)
    if target == torch.int8:
        return to_integer(quotient), scale
    return quotient.clamp(-MOST[target], MOST[target]).to(target), scale
