"""Owns block drafting as Triton kernels; contracts in `spec_kernels.dflash`."""

# Kernels are written in Triton's language, which has no types of Python's.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels._custom import filling_op
from spec_kernels.tiling import grid, tile
from spec_kernels.triton.cache_locs import lookup

__all__ = ["accept_block", "prepare_block"]


@triton.jit
def _prepare_kernel(
    table, height, columns, row_step, column_step, requests, prefixes, bonus, ids, positions, locs, bs, block,
    mask_token, TILE: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), bs, tl.num_programs(0)):
        wide = tl.full((), row, tl.int64)
        request = tl.load(requests + row).to(tl.int64)
        prefix = tl.load(prefixes + row).to(tl.int64)
        first_token = tl.maximum(tl.load(bonus + row).to(tl.int64), 0)
        for first in range(0, block, TILE):
            step = first + tl.arange(0, TILE)
            inside = step < block
            tl.store(ids + wide * block + step, tl.where(step == 0, first_token, mask_token), mask=inside)
            tl.store(positions + wide * block + step, prefix + step, mask=inside)
            found = lookup(table, height, columns, row_step, column_step, request, prefix + step, inside)
            tl.store(locs + wide * block + step, found, mask=inside)


@filling_op("prepare_block_triton", "ids", "positions", "locs")
def prepare_block(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    bonus: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    locs: torch.Tensor,
    mask_token: int,
) -> None:
    """See `spec_kernels.prepare_block`."""
    bs = bonus.shape[0]
    block = ids.shape[0] // bs
    _prepare_kernel[grid(bs)](
        req_to_token, *req_to_token.shape, *req_to_token.stride(), req_pool_indices.contiguous(),
        prefix_lens.contiguous(), bonus.contiguous(), ids, positions, locs, bs, block, mask_token,
        TILE=tile(block, itemsize=8),
    )  # fmt: skip


@triton.jit
def _accept_kernel(
    drafts, draft_row, draft_step, target, target_row, target_step, prefixes, rows, tokens, bs, block,
    TILE: tl.constexpr,
):  # fmt: skip
    for index in range(tl.program_id(0), bs, tl.num_programs(0)):
        row = tl.full((), index, tl.int64)
        correct = tl.full((), 0, tl.int64) + block - 1
        for first in range(0, block - 1, TILE):
            step = (first + tl.arange(0, TILE)).to(tl.int64)
            inside = step < block - 1
            draft = tl.load(drafts + row * draft_row + (step + 1) * draft_step, mask=inside, other=-1).to(tl.int64)
            wanted = tl.load(target + row * target_row + step * target_step, mask=inside, other=-1).to(tl.int64)
            falls = inside & ((draft != wanted) | (draft < 0))
            correct = tl.minimum(correct, tl.min(tl.where(falls, step, block - 1)))
        bonus = tl.load(target + row * target_row + correct * target_step).to(tl.int64)
        for first in range(0, block, TILE):
            step = (first + tl.arange(0, TILE)).to(tl.int64)
            shifted = tl.load(drafts + row * draft_row + (step + 1) * draft_step, mask=step < block - 1, other=0)
            tl.store(tokens + row * block + step, tl.where(step == correct, bonus, shifted), mask=step < block)
        tl.store(rows + row, correct)
        tl.store(rows + bs + row, correct + 1)
        tl.store(rows + 2 * bs + row, bonus)
        tl.store(rows + 3 * bs + row, tl.load(prefixes + row).to(tl.int64) + correct + 1)


@filling_op("accept_block_triton", "rows", "tokens")
def accept_block(
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    prefix_lens: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """See `spec_kernels.accept_block`."""
    bs, block = candidates.shape
    _accept_kernel[grid(bs)](
        candidates, *candidates.stride(), target_predict, *target_predict.stride(), prefix_lens.contiguous(), rows,
        tokens, bs, block, TILE=tile(block, itemsize=8),
    )  # fmt: skip
