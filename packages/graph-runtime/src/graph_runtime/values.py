"""Checks and conversion of one value for one field of the static buffers.

It owns the rules for rows, width and dtype; it writes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from kv_planner import RowField

from .errors import RowCountError, RowDtypeError, RowWidthError

__all__ = ["poison_bytes", "to_tensor", "torch_dtype"]

_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "bool": torch.bool,
}

# A NaN for floats, a far negative number for ints: never a sensible input. Little-endian, last byte most significant.
_POISON: dict[str, bytes] = {
    "float32": b"\xa5\xa5\xa5\x7f",
    "float16": b"\xa5\x7d",
    "bfloat16": b"\xa5\x7f",
    "int8": b"\x85",
    "uint8": b"\xa5",
    "int32": b"\xa5\xa5\xa5\x85",
    "int64": b"\xa5\xa5\xa5\xa5\xa5\xa5\xa5\x85",
    "float8_e4m3fn": b"\x7f",
    "float8_e5m2": b"\x7d",
    "bool": b"\xa5",
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a kv-planner dtype name."""
    return _DTYPES[name]


def poison_bytes(name: str) -> bytes:
    """The byte pattern of one poisoned element, least significant byte first."""
    return _POISON[name]


def to_tensor(field: RowField, value: Any, rows: int) -> torch.Tensor:
    """A value as a tensor of the field's dtype.

    Args:
        field: The field.
        value: A tensor or numpy array of exactly the field's dtype, or (nested) lists of numbers that fit it.
            Shape: [rows] or [rows, 1] for width 1, else [rows, width].
        rows: Announced number of live rows.

    Returns:
        Shape: [rows] for width 1, else [rows, width]; on the value's device.

    Raises:
        RowDtypeError: Another dtype, or a number that does not fit.
        RowCountError: Another number of rows.
        RowWidthError: Another width.
    """
    tensor = _convert(field, value)
    if rows == 0 and tensor.dim() > 0 and tensor.numel() == 0:
        return tensor.reshape(0) if field.width == 1 else tensor.reshape(0, field.width)
    if tensor.dim() == 0 or tensor.shape[0] != rows:
        raise RowCountError(
            f"value of field {field.name!r}",
            expected=f"{rows} rows, as announced",
            got=f"shape {tuple(tensor.shape)}",
            consequence="Rows would belong to other requests, or stay from an earlier step.",
            remedy="Pass exactly the live rows and their number.",
        )
    if field.width == 1 and tuple(tensor.shape[1:]) == (1,):
        return tensor.reshape(rows)
    wanted = () if field.width == 1 else (field.width,)
    if tuple(tensor.shape[1:]) != wanted:
        raise RowWidthError(
            f"value of field {field.name!r}",
            expected=f"rows of shape {wanted}",
            got=f"shape {tuple(tensor.shape)}",
            consequence="A row would spill into the next, or keep old elements.",
            remedy="Reshape to [rows, width], or change the layout.",
        )
    return tensor


def _convert(field: RowField, value: Any) -> torch.Tensor:
    dtype = _DTYPES[field.dtype]
    if isinstance(value, torch.Tensor):
        if value.dtype != dtype:
            raise _wrong_dtype(field, value.dtype)
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf" or str(value.dtype) != field.dtype:
            raise _wrong_dtype(field, f"numpy {value.dtype}")
        return torch.from_numpy(np.require(value, requirements=("C", "W")))
    if not isinstance(value, (list, tuple)):
        raise _wrong_dtype(field, type(value).__name__)
    try:
        array = np.asarray(value) if len(value) else np.zeros(0, dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise _wrong_dtype(field, f"a list that is no array ({error})") from error
    return _from_list(field, array, dtype)


def _from_list(field: RowField, array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    kind = array.dtype.kind
    if array.size == 0:
        return torch.zeros(array.shape, dtype=dtype)
    if dtype is torch.bool:
        accepted = kind == "b"
    elif dtype.is_floating_point:
        accepted = kind in "iuf"
        if accepted:
            finite = np.abs(array[np.isfinite(array)]).max(initial=0)
            if float(finite) > torch.finfo(dtype).max:
                raise _wrong_dtype(field, f"a number of size {finite}")
    else:
        accepted = kind in "iu"
        if accepted:
            limits = torch.iinfo(dtype)
            if int(array.min()) < limits.min or int(array.max()) > limits.max:
                raise _wrong_dtype(field, f"numbers from {array.min()} to {array.max()}")
    if not accepted:
        raise _wrong_dtype(field, f"a list of {array.dtype}")
    if dtype.is_floating_point:
        return torch.from_numpy(array.astype(np.float64)).to(dtype)
    return torch.from_numpy(array.astype(field.dtype))


def _wrong_dtype(field: RowField, got: object) -> RowDtypeError:
    return RowDtypeError(
        f"value of field {field.name!r}",
        expected=f"a tensor or array of {field.dtype}, or lists of numbers that fit it",
        got=got,
        consequence="Bytes would be read as something else, or cut.",
        remedy=f"Convert to {field.dtype} where the value is made.",
    )
