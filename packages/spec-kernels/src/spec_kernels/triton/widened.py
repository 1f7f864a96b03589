"""Owns rotation, stash and widened windows as Triton kernels; contracts in `spec_kernels.widened`."""

# Kernels are written in Triton's language, which has no types of Python's.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels._custom import filling_op
from spec_kernels.tiling import grid, tile
from spec_kernels.triton.cache_locs import lookup

__all__ = ["append_to_stash", "rotate_input_ids", "widened_inputs", "widened_locs"]


@triton.jit
def _rotate_kernel(
    ids, held, tokens, starts, lens, next_tokens, next_step, select, bs, SELECT: tl.constexpr, TILE: tl.constexpr
):
    for row in range(tl.program_id(0), bs, tl.num_programs(0)):
        start = tl.load(starts + row).to(tl.int64)
        end = tl.minimum(start + tl.load(lens + row).to(tl.int64), tokens)
        start = tl.maximum(start, 0)
        for first in range(start, end - 1, TILE):
            at = first + tl.arange(0, TILE)
            tl.store(ids + at, tl.load(held + at + 1, mask=at < end - 1, other=0), mask=at < end - 1)
        cell = end - 1
        if SELECT:
            cell = tl.load(select + row).to(tl.int64)
        token = tl.load(next_tokens + tl.full((), row, tl.int64) * next_step)
        tl.store(ids + cell, token, mask=(cell >= start) & (cell < end))


@filling_op("rotate_input_ids_triton", "input_ids")
def rotate_input_ids(
    input_ids: torch.Tensor,
    start_locs: torch.Tensor,
    seq_lens: torch.Tensor,
    next_tokens: torch.Tensor,
    select_index: torch.Tensor | None,
) -> None:
    """See `spec_kernels.rotate_input_ids`; tokens are read from a copy, so that no write can overtake a read."""
    bs = start_locs.shape[0]
    select = start_locs if select_index is None else select_index
    _rotate_kernel[grid(bs)](
        input_ids, input_ids.clone(), input_ids.shape[0], start_locs.contiguous(), seq_lens.contiguous(), next_tokens,
        next_tokens.stride(0), select.contiguous(), bs, SELECT=select_index is not None,
        TILE=tile(1024, itemsize=8),
    )  # fmt: skip


@triton.jit
def _copy_row(target, source, step, width, TILE: tl.constexpr):
    for first in range(0, width, TILE):
        column = (first + tl.arange(0, TILE)).to(tl.int64)
        value = tl.load(source + column * step, mask=column < width)
        tl.store(target + column, value, mask=column < width)


@triton.jit
def _stash_kernel(
    stash_tokens, stash_hidden, stash_valid, tokens, token_step, states, row_step, column_step, count, ends, available,
    requests, bs, rows, front, hidden, FRESH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    for index in range(tl.program_id(0), bs, tl.num_programs(0)):
        request = tl.load(requests + index).to(tl.int64)
        if (request >= 0) & (request < rows):
            end = tl.minimum(tl.maximum(tl.load(ends + index).to(tl.int64), 0), count)
            taken = tl.minimum(tl.minimum(tl.load(available + index).to(tl.int64), end), front)
            taken = tl.maximum(taken, 0)
            base = request * front
            for slot in range(0, front):
                target = base + slot
                if slot < front - taken:  # reads stay ahead of writes, element by element
                    tl.store(stash_tokens + target, tl.load(stash_tokens + target + taken))
                    _copy_row(stash_hidden + target * hidden, stash_hidden + (target + taken) * hidden, 1, hidden, TILE)
                else:
                    row = end - front + slot
                    tl.store(stash_tokens + target, tl.load(tokens + row * token_step))
                    _copy_row(stash_hidden + target * hidden, states + row * row_step, column_step, hidden, TILE)
            valid = taken
            if not FRESH:
                valid = tl.minimum(tl.load(stash_valid + request).to(tl.int64) + taken, front)
            tl.store(stash_valid + request, valid)


@filling_op("append_to_stash_triton", "stash_tokens", "stash_hidden", "stash_valid")
def append_to_stash(
    stash_tokens: torch.Tensor,
    stash_hidden: torch.Tensor,
    stash_valid: torch.Tensor,
    tokens: torch.Tensor,
    hidden_states: torch.Tensor,
    row_ends: torch.Tensor,
    num_available: torch.Tensor,
    req_pool_indices: torch.Tensor,
    fresh: bool,
) -> None:
    """See `spec_kernels.append_to_stash`."""
    rows, front, hidden = stash_hidden.shape
    bs = req_pool_indices.shape[0]
    _stash_kernel[grid(bs)](
        stash_tokens, stash_hidden, stash_valid, tokens, tokens.stride(0), hidden_states, *hidden_states.stride(),
        tokens.shape[0], row_ends.contiguous(), num_available.contiguous(), req_pool_indices.contiguous(), bs, rows,
        front, hidden, FRESH=fresh, TILE=tile(min(hidden, 1024), itemsize=8),
    )  # fmt: skip


@triton.jit
def _first_valid(valid_lens, stash_rows, valid_step, request, front, length):
    """First front row that holds something."""
    valid = lookup(valid_lens, 1, stash_rows, 0, valid_step, request * 0, request, request >= 0)
    return tl.maximum(tl.maximum(front - valid, front - length), 0)


@triton.jit
def _inputs_kernel(
    stash_tokens, stash_hidden, stash_valid, stash_rows, valid_step, predict, predict_step, states, row_step,
    column_step, lens, requests, ids, out, bs, front, width, hidden, TILE: tl.constexpr,
):  # fmt: skip
    window = front + width
    for work in range(tl.program_id(0), bs * window, tl.num_programs(0)):
        at = tl.full((), work, tl.int64)
        row = at // window
        own = at % window
        request = tl.load(requests + row).to(tl.int64)
        first = _first_valid(stash_valid, stash_rows, valid_step, request, front, tl.load(lens + row).to(tl.int64))
        if own >= front:
            source = row * width + own - front
            tl.store(ids + at, tl.load(predict + source * predict_step).to(tl.int64))
            _copy_row(out + at * hidden, states + source * row_step, column_step, hidden, TILE)
        else:
            live = own >= first
            slot = request * front + own
            tl.store(ids + at, tl.load(stash_tokens + slot, mask=live, other=0).to(tl.int64))
            for start in range(0, hidden, TILE):
                column = start + tl.arange(0, TILE)
                value = tl.load(stash_hidden + slot * hidden + column, mask=live & (column < hidden), other=0.0)
                tl.store(out + at * hidden + column, value, mask=column < hidden)


@filling_op("widened_inputs_triton", "ids", "states")
def widened_inputs(
    stash_tokens: torch.Tensor,
    stash_hidden: torch.Tensor,
    stash_valid: torch.Tensor,
    predict: torch.Tensor,
    hidden_states: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    ids: torch.Tensor,
    states: torch.Tensor,
    width: int,
) -> None:
    """See `spec_kernels.widened_inputs`."""
    rows, front, hidden = stash_hidden.shape
    bs = req_pool_indices.shape[0]
    _inputs_kernel[grid(bs * (front + width))](
        stash_tokens, stash_hidden, stash_valid, rows, stash_valid.stride(0), predict, predict.stride(0),
        hidden_states, *hidden_states.stride(), seq_lens.contiguous(), req_pool_indices.contiguous(), ids, states, bs,
        front, width, hidden, TILE=tile(min(hidden, 1024), itemsize=8),
    )  # fmt: skip


@triton.jit
def _locs_kernel(
    table, height, columns, row_step, column_step, requests, lens, valid_lens, stash_rows, valid_step, locs, positions,
    bs, window, front, warmup, TILE: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), bs, tl.num_programs(0)):
        wide = tl.full((), row, tl.int64)
        request = tl.load(requests + row).to(tl.int64)
        length = tl.load(lens + row).to(tl.int64)
        first = _first_valid(valid_lens, stash_rows, valid_step, request, front, length)
        for start in range(0, window, TILE):
            step = start + tl.arange(0, TILE)
            inside = step < window
            position = length - front + step
            writes = inside & (step >= tl.minimum(first + warmup, front))
            found = lookup(table, height, columns, row_step, column_step, request, position, writes)
            tl.store(locs + wide * window + step, found, mask=inside)
            tl.store(positions + wide * window + step, tl.where(step >= first, position, 0), mask=inside)


@filling_op("widened_locs_triton", "locs", "positions")
def widened_locs(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    stash_valid: torch.Tensor,
    locs: torch.Tensor,
    positions: torch.Tensor,
    front: int,
    warmup: int,
) -> None:
    """See `spec_kernels.widened_locs`."""
    bs = req_pool_indices.shape[0]
    window = locs.shape[0] // bs
    _locs_kernel[grid(bs)](
        req_to_token, *req_to_token.shape, *req_to_token.stride(), req_pool_indices.contiguous(),
        seq_lens.contiguous(), stash_valid, stash_valid.shape[0], stash_valid.stride(0), locs, positions, bs, window,
        front, warmup, TILE=tile(window, itemsize=8),
    )  # fmt: skip
