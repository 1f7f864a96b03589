"""Owns the checks that contracts share: shape, dtype, device and memory of a named tensor, and whole numbers in range.

It reads no value of a tensor, so no check waits for a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from spec_kernels.errors import AliasError, DeviceError, DtypeError, IndexWidthError, ShapeError

__all__ = ["FLOATS", "INTEGERS", "check_disjoint", "check_number", "check_tensor", "output", "span"]

INTEGERS = (torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Shape: TypeAlias = "Sequence[int | str]"


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Shape,
    *,
    dtypes: Sequence[torch.dtype] = INTEGERS,
    device: torch.device | None = None,
) -> None:
    """Refuse a tensor of another shape (a string stands for any size), dtype or device."""
    fits = tensor.ndim == len(shape) and all(
        isinstance(want, str) or size == want for size, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        raise ShapeError(
            name,
            given=f"shape {tuple(tensor.shape)}",
            expected=f"[{', '.join(map(str, shape))}]",
            consequence="one request would read another's values",
            remedy="pass one row a request, padded rows included",
        )
    if tensor.dtype not in dtypes:
        raise DtypeError(
            name,
            given=tensor.dtype,
            expected=" or ".join(map(str, dtypes)),
            consequence="values would be rounded, wrapped or misread",
            remedy="convert it where its range is known",
        )
    if device is not None and tensor.device != device:
        raise DeviceError(
            name,
            given=tensor.device,
            expected=f"{device}, like the other arguments",
            consequence="the op would wait for a copy, and could not be captured",
            remedy="move it first",
        )


def check_number(name: str, value: int, *, least: int, most: int | None = None) -> None:
    """Refuse a size outside its range."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        raise ShapeError(
            name,
            given=value,
            expected=f"a whole number of at least {least}" + ("" if most is None else f" and at most {most}"),
            consequence="rows would overlap or end early",
            remedy="pass the sizes of the captured step",
        )


def output(
    name: str,
    given: torch.Tensor | None,
    shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    holds: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the caller's output after checks, or a new one; `holds` is a dtype whose values must fit it."""
    if given is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    check_tensor(name, given, shape, dtypes=(dtype,) if dtype.is_floating_point else INTEGERS, device=device)
    if not given.is_contiguous():
        raise ShapeError(
            name,
            given=f"strides {given.stride()}",
            expected="a contiguous output",
            consequence="backends would write to different places",
            remedy="pass a contiguous buffer or a slice of its first axis",
        )
    if holds is not None and given.dtype.itemsize < holds.itemsize:
        raise IndexWidthError(
            name,
            given=given.dtype,
            expected=f"at least {holds}, the dtype of the slots",
            consequence="a slot past the narrower range would wrap to another address",
            remedy="pass an int64 output, or keep the table in int32",
        )
    return given


def check_disjoint(outputs: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> None:
    """Refuse an output that shares memory with an input or with another output."""
    taken = [(name, span(tensor)) for name, tensor in inputs.items() if tensor.numel()]
    for name, tensor in outputs.items():
        if not tensor.numel():
            continue
        start, end = span(tensor)
        for other, (begin, stop) in taken:
            if start < stop and begin < end:
                raise AliasError(
                    f"{name}, {other}",
                    given="tensors that share memory",
                    expected="outputs in memory of their own",
                    consequence="the result would depend on the order of writes, and backends would differ",
                    remedy="clone the input, or give the output its own buffer",
                )
        taken.append((name, (start, end)))


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last byte that a tensor touches."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
