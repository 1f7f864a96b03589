"""Cutting what a forward returned to the live rows.

It owns the rule that the first dimension of every output is rows of the batch, and the copy of outputs on request. An
output is a tensor, a tuple or list of tensors and None, or a dict of them (such as the tensors that a pipeline stage
hands on).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from .errors import OutputShapeError

__all__ = ["OutputRows", "check_output", "clone_output", "cut_output"]

OutputRows: TypeAlias = "int | Sequence[int] | Mapping[str, int]"
"""Output rows a request: for all outputs, or one number an output, in order or by name."""


def check_output(output: Any, bs: int, per_request: OutputRows) -> None:
    """Compares the outputs with the rows that they should have.

    Args:
        output: What the forward returned.
        bs: Rows of the bucket.
        per_request: See `OutputRows`.

    Raises:
        OutputShapeError: Something else was returned, or with other rows.
    """
    items = _named(output)
    if not isinstance(per_request, int):
        stated = list(per_request) if isinstance(per_request, Mapping) else list(range(len(per_request)))
        if stated != list(items) and (not isinstance(per_request, Mapping) or set(stated) != set(items)):
            raise _wrong("outputs", f"{stated}, as output_rows_per_request says", list(items))
    for name, item in items.items():
        rows = bs * _factor(per_request, name)
        if item is None:
            continue
        if not isinstance(item, torch.Tensor):
            raise _wrong(f"output {name!r}", "a tensor or None", type(item).__name__)
        if item.dim() == 0 or item.shape[0] != rows:
            raise _wrong(f"output {name!r}", f"{rows} rows for bucket {bs}", f"shape {tuple(item.shape)}")


def cut_output(output: Any, raw_bs: int, per_request: OutputRows) -> Any:
    """The outputs of the live rows, as views, in the structure of the output (a list becomes a tuple).

    Args:
        output: What `check_output` accepted.
        raw_bs: Live rows.
        per_request: See `OutputRows`.
    """
    return _each(output, lambda name, item: item[: raw_bs * _factor(per_request, name)])


def clone_output(output: Any) -> Any:
    """Copies of the tensors of an output, in its structure."""
    return _each(output, lambda name, item: item.clone())


def _named(output: Any) -> dict[Any, Any]:
    if isinstance(output, Mapping):
        return dict(output)
    return dict(enumerate(output)) if isinstance(output, (tuple, list)) else {0: output}


def _factor(per_request: OutputRows, name: Any) -> int:
    return per_request if isinstance(per_request, int) else per_request[name]


def _each(output: Any, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> Any:
    changed = {name: None if item is None else change(name, item) for name, item in _named(output).items()}
    if isinstance(output, Mapping):
        return changed
    return tuple(changed.values()) if isinstance(output, (tuple, list)) else changed[0]


def _wrong(subject: str, expected: str, got: object) -> OutputShapeError:
    return OutputShapeError(
        subject,
        expected=expected,
        got=got,
        consequence="Padded rows could not be cut off, or live rows would be.",
        remedy="Return tensors whose first dimension is rows, whatever raw_bs is; see output_rows_per_request.",
    )
