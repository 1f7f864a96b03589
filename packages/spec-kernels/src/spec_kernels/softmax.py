"""Owns the softmax of wide rows: a vocabulary a row, with a temperature each."""

from __future__ import annotations

import torch

from spec_kernels._checks import FLOATS, check_disjoint, check_tensor
from spec_kernels.dispatch import BackendName, choose, load
from spec_kernels.errors import ShapeError

__all__ = ["wide_row_softmax"]


def wide_row_softmax(
    logits: torch.Tensor,
    *,
    temperatures: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: BackendName | None = None,
) -> torch.Tensor:
    """Return the softmax of `logits / temperature`, row by row, in float32.

    Args:
        logits: Shape: [rows, vocabulary]; floating point; any strides.
        temperatures: Above 0. None means 1. Shape: [rows] or [rows, 1]; floating point.
        out: Shape: [rows, vocabulary]; float32; the rows may be further apart than their width.
        backend: Insist on a backend.

    Returns:
        Shape: [rows, vocabulary]; dtype float32. Minus infinity gives 0, a whole block of it too.

    Padding: a row of minus infinity alone gives zeros. NaN, and plus infinity, make their own row NaN and no other.

    Mutates: `out`, every element of its rows; what lies between the rows stays.

    Raises:
        ShapeError, DtypeError, DeviceError: An argument does not fit its role.
        AliasError: `out` shares memory with another argument.

    Source: contracts.md §1.2 and §A-29.
    """
    check_tensor("logits", logits, ("rows", "vocabulary"), dtypes=FLOATS)
    rows, vocabulary = (int(size) for size in logits.shape)
    device, inputs = logits.device, {"logits": logits}
    if temperatures is not None:
        temperatures = temperatures.squeeze(1) if temperatures.ndim == 2 else temperatures
        check_tensor("temperatures", temperatures, (rows,), dtypes=FLOATS, device=device)
        inputs["temperatures"] = temperatures
    found = torch.empty((rows, vocabulary), dtype=torch.float32, device=device) if out is None else out
    check_tensor("out", found, (rows, vocabulary), dtypes=(torch.float32,), device=device)
    if vocabulary > 1 and (found.stride(1) != 1 or (rows > 1 and found.stride(0) < vocabulary)):
        raise ShapeError(
            "out",
            given=f"strides {found.stride()}",
            expected=f"rows of adjacent elements, at least {vocabulary} apart",
            consequence="rows would overwrite each other",
            remedy="pass a slice of a wider buffer's columns",
        )
    check_disjoint({"out": found}, inputs)
    chosen = choose("wide_row_softmax", device, backend)
    if found.numel():
        load("wide_row_softmax", chosen)(logits, temperatures, found)
    return found
