"""Cutting what a forward returned to the live rows.

It owns the rule that the first dimension of every output is rows of the batch, and the copy of outputs on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .errors import OutputShapeError

__all__ = ["check_output", "clone_output", "cut_output"]


def check_output(output: Any, bs: int, per_request: int | Sequence[int]) -> None:
    """Compares the outputs with the rows that they should have.

    Args:
        output: A tensor, or a tuple or list of tensors and None.
        bs: Rows of the bucket.
        per_request: Output rows a request, for all outputs or one number an output.

    Raises:
        OutputShapeError: Something else was returned, or with other rows.
    """
    items = output if isinstance(output, (tuple, list)) else (output,)
    if not isinstance(per_request, int) and len(per_request) != len(items):
        raise _wrong("number of outputs", f"{len(per_request)}, as output_rows_per_request says", len(items))
    for index, item in enumerate(items):
        rows = bs * (per_request if isinstance(per_request, int) else per_request[index])
        if item is None:
            continue
        if not isinstance(item, torch.Tensor):
            raise _wrong(f"output {index}", "a tensor or None", type(item).__name__)
        if item.dim() == 0 or item.shape[0] != rows:
            raise _wrong(f"output {index}", f"{rows} rows for bucket {bs}", f"shape {tuple(item.shape)}")


def cut_output(output: Any, raw_bs: int, per_request: int | Sequence[int]) -> Any:
    """The outputs of the live rows, as views.

    Args:
        output: What `check_output` accepted.
        raw_bs: Live rows.
        per_request: See `check_output`.
    """
    if isinstance(output, torch.Tensor):
        factor = per_request if isinstance(per_request, int) else per_request[0]
        return output[: raw_bs * factor]
    if output is None:
        return None
    factors = [per_request] * len(output) if isinstance(per_request, int) else per_request
    return tuple(
        None if item is None else item[: raw_bs * factor] for item, factor in zip(output, factors, strict=True)
    )


def clone_output(output: Any) -> Any:
    """Copies of the tensors of an output, in its structure."""
    if isinstance(output, torch.Tensor):
        return output.clone()
    return None if output is None else tuple(None if item is None else item.clone() for item in output)


def _wrong(subject: str, expected: str, got: object) -> OutputShapeError:
    return OutputShapeError(
        subject,
        expected=expected,
        got=got,
        consequence="Padded rows could not be cut off, or live rows would be.",
        remedy="Return tensors whose first dimension is rows, whatever raw_bs is; see output_rows_per_request.",
    )
