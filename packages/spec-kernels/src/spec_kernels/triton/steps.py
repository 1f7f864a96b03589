"""Owns the bookkeeping of speculative steps as Triton kernels; contracts in `spec_kernels.steps`."""

# Kernels are written in Triton's language, which has no types of Python's.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels._custom import filling_op
from spec_kernels.tiling import grid, tile
from spec_kernels.triton.cache_locs import lookup

__all__ = ["bonus_tokens", "draft_extend_inputs", "draft_extend_layout", "verify_commit_outputs"]

_ROWS = 256


def _row_tile(rows: int) -> int:
    return tile(min(rows, _ROWS), itemsize=8, live=16)


@triton.jit
def _bonus_kernel(tokens, token_step, lens, out, bs, stride, TILE: tl.constexpr):
    for first in range(tl.program_id(0) * TILE, bs, tl.num_programs(0) * TILE):
        row = (first + tl.arange(0, TILE)).to(tl.int64)
        last = tl.load(lens + row, mask=row < bs, other=0).to(tl.int64) - 1
        live = (row < bs) & (last >= 0) & (last < stride)
        token = tl.load(tokens + (row * stride + last) * token_step, mask=live, other=0)
        tl.store(out + row, token, mask=row < bs)


@filling_op("bonus_tokens_triton", "out")
def bonus_tokens(accept_tokens: torch.Tensor, accept_lens: torch.Tensor, out: torch.Tensor, stride: int) -> None:
    """See `spec_kernels.bonus_tokens`."""
    bs = out.shape[0]
    size = _row_tile(bs)
    _bonus_kernel[grid(-(-bs // size))](
        accept_tokens, accept_tokens.stride(0), accept_lens.contiguous(), out, bs, stride, TILE=size
    )


@triton.jit
def _commit_kernel(
    predict, predict_step, entries, depth, row_step, column_step, lens, seq_lens, results, bs, width,
    INTERVAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    for first in range(tl.program_id(0) * TILE, bs, tl.num_programs(0) * TILE):
        row = (first + tl.arange(0, TILE)).to(tl.int64)
        inside = row < bs
        accepted = tl.maximum(tl.load(lens + row, mask=inside, other=0).to(tl.int64), 0)
        before = tl.load(seq_lens + row, mask=inside, other=0).to(tl.int64)
        live = inside & (accepted > 0)
        last = lookup(entries, bs, depth, row_step, column_step, row, accepted - 1, live) - row * width
        last = tl.where(live & (last >= 0) & (last < width), last, 0)
        new = before + accepted
        correct = tl.maximum(accepted - 1, 0)
        bonus = tl.load(predict + (row * width + last) * predict_step, mask=live, other=0).to(tl.int64)
        track = row * 0 - 1
        if INTERVAL > 0:
            track = tl.where(live & (new // INTERVAL > before // INTERVAL), last, track)
        tl.store(results + row, new, mask=inside)
        tl.store(results + bs + row, bonus, mask=inside)
        tl.store(results + 2 * bs + row, last, mask=inside)
        tl.store(results + 3 * bs + row, track, mask=inside)
        tl.store(results + 4 * bs + row, correct, mask=inside)
        tl.store(results + 5 * bs + row, row * width + correct, mask=inside)


@filling_op("verify_commit_outputs_triton", "results")
def verify_commit_outputs(
    predict: torch.Tensor,
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    results: torch.Tensor,
    width: int,
    track_interval: int,
) -> None:
    """See `spec_kernels.verify_commit_outputs`."""
    bs, depth = accept_index.shape
    size = _row_tile(bs)
    _commit_kernel[grid(-(-bs // size))](
        predict, predict.stride(0), accept_index, depth, *accept_index.stride(), accept_lens.contiguous(),
        seq_lens.contiguous(), results, bs, width, INTERVAL=track_interval, TILE=size,
    )  # fmt: skip


@triton.jit
def _inputs_kernel(predict, predict_step, lens, rows, ids, bs, width, TILE: tl.constexpr):
    for first in range(tl.program_id(0) * TILE, bs * width, tl.num_programs(0) * TILE):
        at = (first + tl.arange(0, TILE)).to(tl.int64)
        token = tl.load(predict + at * predict_step, mask=at < bs * width, other=0).to(tl.int64)
        tl.store(ids + at, tl.maximum(token, 0), mask=at < bs * width)
        correct = tl.maximum(tl.load(lens + at, mask=at < bs, other=1).to(tl.int64) - 1, 0)
        tl.store(rows + at, correct, mask=at < bs)
        tl.store(rows + bs + at, at * width + correct, mask=at < bs)


@filling_op("draft_extend_inputs_triton", "rows", "ids")
def draft_extend_inputs(
    predict: torch.Tensor, accept_lens: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, width: int
) -> None:
    """See `spec_kernels.draft_extend_inputs`."""
    bs, size = accept_lens.shape[0], _row_tile(ids.shape[0])
    _inputs_kernel[grid(-(-ids.shape[0] // size))](
        predict, predict.stride(0), accept_lens.contiguous(), rows, ids, bs, width, TILE=size
    )


@triton.jit
def _layout_kernel(seq_lens, rows, positions, bs, width, front, TILE: tl.constexpr):
    window = width + front
    for first in range(tl.program_id(0) * TILE, bs * window, tl.num_programs(0) * TILE):
        at = (first + tl.arange(0, TILE)).to(tl.int64)
        inside = at < bs * window
        base = tl.maximum(tl.load(seq_lens + at // window, mask=inside, other=0).to(tl.int64), 0)
        tl.store(positions + at, tl.maximum(base - front + at % window, 0), mask=inside)
        length = tl.maximum(tl.load(seq_lens + at, mask=at < bs, other=0).to(tl.int64), 0)
        tl.store(rows + at, tl.maximum(length - front, 0), mask=at < bs)
        tl.store(rows + bs + at, at * 0 + window, mask=at < bs)
        tl.store(rows + 2 * bs + at, length + width, mask=at < bs)
        tl.store(rows + 3 * bs + at, at * window, mask=at < bs)


@filling_op("draft_extend_layout_triton", "rows", "positions")
def draft_extend_layout(
    seq_lens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, width: int, front: int
) -> None:
    """See `spec_kernels.draft_extend_layout`."""
    bs, size = seq_lens.shape[0], _row_tile(positions.shape[0])
    _layout_kernel[grid(-(-positions.shape[0] // size))](
        seq_lens.contiguous(), rows, positions, bs, width, front, TILE=size
    )
