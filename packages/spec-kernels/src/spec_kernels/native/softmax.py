"""Owns the softmax of wide rows in plain torch; the contract is in `spec_kernels.softmax`."""

from __future__ import annotations

import torch

from spec_kernels._custom import filling_op

__all__ = ["wide_row_softmax"]


@filling_op("wide_row_softmax", "out")
def wide_row_softmax(logits: torch.Tensor, temperatures: torch.Tensor | None, out: torch.Tensor) -> None:
    """See `spec_kernels.wide_row_softmax`."""
    scaled = logits.to(torch.float32)
    if temperatures is not None:
        scaled = scaled / temperatures.to(torch.float32).unsqueeze(1)
    nothing = (scaled == float("-inf")).all(1, keepdim=True)
    out.copy_(torch.softmax(scaled, 1).masked_fill_(nothing, 0.0))
