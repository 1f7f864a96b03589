"""Owns the bookkeeping of speculative steps in plain torch; contracts in `spec_kernels.steps`."""

from __future__ import annotations

import torch

from spec_kernels._custom import filling_op
from spec_kernels.native.cache_locs import lookup

__all__ = ["bonus_tokens", "draft_extend_inputs", "draft_extend_layout", "verify_commit_outputs"]


@filling_op("bonus_tokens", "out")
def bonus_tokens(accept_tokens: torch.Tensor, accept_lens: torch.Tensor, out: torch.Tensor, stride: int) -> None:
    """See `spec_kernels.bonus_tokens`."""
    rows = torch.arange(accept_lens.shape[0], device=accept_lens.device)
    last = accept_lens.to(torch.int64) - 1
    live = (last >= 0) & (last < stride)
    at = rows * stride + last.clamp(0, stride - 1)
    out.copy_(torch.where(live, accept_tokens[at], 0))


@filling_op("verify_commit_outputs", "results")
def verify_commit_outputs(
    predict: torch.Tensor,
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    results: torch.Tensor,
    width: int,
    track_interval: int,
) -> None:
    """See `spec_kernels.verify_commit_outputs`; `results` has the six rows of `VerifyCommit`."""
    rows = torch.arange(accept_lens.shape[0], device=accept_lens.device)
    accepted = accept_lens.to(torch.int64).clamp(min=0)
    live = accepted > 0
    before = seq_lens.to(torch.int64)
    last = lookup(accept_index, rows, accepted - 1) - rows * width
    last = torch.where(live & (last >= 0) & (last < width), last, 0)
    new = before + accepted
    correct = (accepted - 1).clamp(min=0)
    track = torch.full_like(new, -1)
    if track_interval:
        crossed = live & (
            torch.div(new, track_interval, rounding_mode="floor")
            > torch.div(before, track_interval, rounding_mode="floor")
        )
        track = torch.where(crossed, last, -1)
    bonus = torch.where(live, predict[rows * width + last].to(torch.int64), 0)
    for row, value in enumerate((new, bonus, last, track, correct, rows * width + correct)):
        results[row].copy_(value)


@filling_op("draft_extend_inputs", "rows", "ids")
def draft_extend_inputs(
    predict: torch.Tensor, accept_lens: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, width: int
) -> None:
    """See `spec_kernels.draft_extend_inputs`; `rows` are the drafts and the token rows."""
    correct = (accept_lens.to(torch.int64) - 1).clamp(min=0)
    rows[0].copy_(correct)
    rows[1].copy_(torch.arange(accept_lens.shape[0], device=ids.device) * width + correct)
    ids.copy_(predict.clamp(min=0))


@filling_op("draft_extend_layout", "rows", "positions")
def draft_extend_layout(
    seq_lens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, width: int, front: int
) -> None:
    """See `spec_kernels.draft_extend_layout`; `rows` are the first four fields of `DraftExtendLayout`."""
    base = seq_lens.to(torch.int64).clamp(min=0)
    window = width + front
    rows[0].copy_((base - front).clamp(min=0))
    rows[1].fill_(window)
    rows[2].copy_(base + width)
    rows[3].copy_(torch.arange(base.shape[0], device=base.device) * window)
    steps = torch.arange(window, device=base.device)
    positions.copy_((base.unsqueeze(1) - front + steps).clamp(min=0).reshape(-1))
