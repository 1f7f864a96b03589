"""npu_dtype_cast, _npu_dtype_cast and the forms of npu_format_cast.

This module owns casts of values. Memory formats other than ND do not exist in the emulator: a format cast keeps ND.
"""

from __future__ import annotations

import torch

from .errors import KernelNotCovered
from .rules import note

_SCALAR_TYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.qint8,
    torch.quint8,
    torch.qint32,
    torch.bfloat16,
)
"""torch dtypes by the number of their c10 ScalarType; the int dtype of npu_dtype_cast's schema."""

note(
    "npu_dtype_cast",
    "dtypes that only a device has; input_dtype",
    "its document",
    "not computed: `KernelNotCovered`: test_kernels_elementwise.py",
)
note(
    "npu_format_cast[_], _npu_format_cast",
    "formats other than ND",
    "its document",
    "the format stays ND and get_npu_format says so; caches whose shapes spell NZ are NZ: test_kernels_paged.py",
)


def _dtype(op: str, dtype: int | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if not 0 <= dtype < len(_SCALAR_TYPES) or _SCALAR_TYPES[dtype].is_complex or "q" in str(_SCALAR_TYPES[dtype]):
        raise KernelNotCovered(op, "dtype", dtype)
    return _SCALAR_TYPES[dtype]


def npu_dtype_cast(input: torch.Tensor, dtype: int | torch.dtype, input_dtype: int | None = None) -> torch.Tensor:
    """Converts values to another dtype.

    Args:
        input: any shape.
        dtype: target, a torch dtype or the number of its ScalarType.
        input_dtype: dtype that the bytes of ``input`` stand for when it differs from the tensor's; only None is
        computed.

    Returns:
        A new tensor of the same shape; floats become integers by dropping the fraction.

    Raises:
        KernelNotCovered: ``input_dtype`` is given, or ``dtype`` is one that only a device has.

    Source:
        Document of torch_npu.npu_dtype_cast in the torch_npu 2.12.0 wheel.
    """
    if input_dtype is not None:
        raise KernelNotCovered("npu::npu_dtype_cast", "input_dtype", input_dtype)
    return input.to(_dtype("npu::npu_dtype_cast", dtype), copy=True)


def _npu_dtype_cast(input: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts values to another dtype; see ``npu_dtype_cast``."""
    return input.to(_dtype("npu::_npu_dtype_cast", dtype), copy=True)


def npu_format_cast(
    input: torch.Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> torch.Tensor:
    """Copies a tensor; the format stays ND whatever is asked for.

    Args:
        input: any shape.
        acl_format: number of the wanted format; kept out of the result.
        customize_dtype: has no effect.
        input_dtype: has no effect.

    Returns:
        A new contiguous tensor of the same shape, dtype and values.

    Source:
        Document of torch_npu.npu_format_cast in the torch_npu 2.12.0 wheel.
    """
    return input.clone(memory_format=torch.contiguous_format)


def _npu_format_cast(input: torch.Tensor, acl_format: int) -> torch.Tensor:
    """Copies a tensor; see ``npu_format_cast``."""
    return input.clone(memory_format=torch.contiguous_format)


def _npu_format_cast_aclnn(input: torch.Tensor, acl_format: int, customize_dtype: int) -> torch.Tensor:
    """Copies a tensor; see ``npu_format_cast``."""
    return input.clone(memory_format=torch.contiguous_format)


def _npu_format_cast_input_dtype(
    input: torch.Tensor, acl_format: int, customize_dtype: int, input_dtype: int
) -> torch.Tensor:
    """Copies a tensor; see ``npu_format_cast``."""
    return input.clone(memory_format=torch.contiguous_format)


def npu_format_cast_like(
    input: torch.Tensor, dst: torch.Tensor, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> torch.Tensor:
    """Copies a tensor, as if into the format of ``dst``; see ``npu_format_cast``."""
    return input.clone(memory_format=torch.contiguous_format)


def npu_format_cast_(
    input: torch.Tensor, src: torch.Tensor, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> torch.Tensor:
    """Leaves a tensor as it is, and returns it; see ``npu_format_cast``."""
    return input


def npu_format_cast_to_(
    input: torch.Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None
) -> torch.Tensor:
    """Leaves a tensor as it is, and returns it; see ``npu_format_cast``."""
    return input


KERNELS = {
    "npu::npu_dtype_cast": npu_dtype_cast,
    "npu::_npu_dtype_cast": _npu_dtype_cast,
    "npu::npu_format_cast": npu_format_cast,
    "npu::npu_format_cast.Tensor": npu_format_cast_like,
    "npu::npu_format_cast_": npu_format_cast_,
    "npu::npu_format_cast_.acl_format": npu_format_cast_to_,
    "npu::_npu_format_cast": _npu_format_cast,
    "npu::_npu_format_cast.aclnn": _npu_format_cast_aclnn,
    "npu::_npu_format_cast.input_dtype": _npu_format_cast_input_dtype,
}
