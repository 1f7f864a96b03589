"""Owns greedy acceptance of a chain of drafts as a Triton kernel; the contract is in `spec_kernels.chain`."""

# Kernels are written in Triton's language, which has no types of Python's.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels._custom import filling_op
from spec_kernels.tiling import grid, tile

__all__ = ["accept_chain"]


@triton.jit
def _chain_kernel(
    candidates, candidate_row, candidate_step, predicted, predicted_row, predicted_step, drafts, drafts_step,
    correct, bonus, bs, width, TILE: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), bs, tl.num_programs(0)):
        wide = tl.full((), row, tl.int64)
        count = tl.load(drafts + wide * drafts_step).to(tl.int64)
        accepted = tl.minimum(tl.maximum(count, 0), width - 1)
        for first in range(0, width - 1, TILE):
            draft = (first + tl.arange(0, TILE)).to(tl.int64)
            inside = draft < width - 1
            token = tl.load(candidates + wide * candidate_row + (draft + 1) * candidate_step, mask=inside, other=-1)
            wanted = tl.load(predicted + wide * predicted_row + draft * predicted_step, mask=inside, other=-1)
            fails = inside & ((token.to(tl.int64) != wanted.to(tl.int64)) | (token < 0))
            accepted = tl.minimum(accepted, tl.min(tl.where(fails, draft, width)))
        tl.store(correct + wide, accepted.to(tl.int32))
        tl.store(bonus + wide, tl.load(predicted + wide * predicted_row + accepted * predicted_step))


@filling_op("accept_chain_triton", "correct", "bonus")
def accept_chain(
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    num_drafts: torch.Tensor,
    correct: torch.Tensor,
    bonus: torch.Tensor,
) -> None:
    """See `spec_kernels.accept_chain`."""
    bs, width = candidates.shape
    _chain_kernel[grid(bs)](
        candidates, *candidates.stride(), target_predict, *target_predict.stride(), num_drafts, num_drafts.stride(0),
        correct, bonus, bs, width, TILE=tile(min(max(width - 1, 1), 1024), itemsize=8),
    )  # fmt: skip
