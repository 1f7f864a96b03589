"""Owns the softmax of wide rows as two Triton kernels: maxima and sums of blocks, then the rows.

A block of minus infinity alone counts nothing instead of making its row NaN. The contract is in `spec_kernels.softmax`.
"""

# Kernels are written in Triton's language, which has no types of Python's.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels._custom import filling_op
from spec_kernels.tiling import grid, tile

__all__ = ["wide_row_softmax"]


@triton.jit
def _values(logits, row_step, column_step, temperatures, row, column, inside, HEAT: tl.constexpr):
    value = tl.load(logits + row * row_step + column * column_step, mask=inside, other=-float("inf")).to(tl.float32)
    if HEAT:
        value = value / tl.load(temperatures + row).to(tl.float32)
    return tl.where(inside, value, -float("inf"))


@triton.jit
def _blocks_kernel(
    logits, row_step, column_step, temperatures, maxima, sums, rows, width, tiles, HEAT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    for work in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = tl.full((), work // tiles, tl.int64)
        column = ((work % tiles) * TILE + tl.arange(0, TILE)).to(tl.int64)
        value = _values(logits, row_step, column_step, temperatures, row, column, column < width, HEAT)
        top = tl.max(value)
        shift = tl.where(top == -float("inf"), 0.0, top)
        tl.store(maxima + work, top)
        tl.store(sums + work, tl.sum(tl.exp(value - shift)))  # NaN makes the sum NaN, and with it the row


@triton.jit
def _rows_kernel(
    logits, row_step, column_step, temperatures, maxima, sums, out, out_step, rows, width, tiles, HEAT: tl.constexpr,
    TILE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    for work in range(tl.program_id(0), rows * tiles, tl.num_programs(0)):
        row = tl.full((), work // tiles, tl.int64)
        top = tl.full((), -float("inf"), tl.float32)
        for first in range(0, tiles, BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            top = tl.maximum(top, tl.max(tl.load(maxima + row * tiles + block, mask=block < tiles, other=top)))
        shift = tl.where(top == -float("inf"), 0.0, top)
        total = tl.zeros((), tl.float32)
        for first in range(0, tiles, BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            part = tl.load(sums + row * tiles + block, mask=block < tiles, other=0.0)
            most = tl.load(maxima + row * tiles + block, mask=block < tiles, other=0.0)
            total += tl.sum(tl.where(part == 0.0, 0.0, part * tl.exp(most - shift)))
        column = ((work % tiles) * TILE + tl.arange(0, TILE)).to(tl.int64)
        value = _values(logits, row_step, column_step, temperatures, row, column, column < width, HEAT)
        weight = tl.exp(value - shift)
        tl.store(out + row * out_step + column, weight / tl.where(total == 0.0, 1.0, total), mask=column < width)


@filling_op("wide_row_softmax_triton", "out")
def wide_row_softmax(logits: torch.Tensor, temperatures: torch.Tensor | None, out: torch.Tensor) -> None:
    """See `spec_kernels.wide_row_softmax`."""
    rows, width = logits.shape
    size = tile(min(width, 4096), itemsize=4, live=8)
    tiles = -(-width // size)
    partial = torch.empty((2, rows * tiles), dtype=torch.float32, device=logits.device)
    heat = partial if temperatures is None else temperatures.contiguous()
    given, programs = temperatures is not None, grid(rows * tiles)
    _blocks_kernel[programs](
        logits, *logits.stride(), heat, partial[0], partial[1], rows, width, tiles, HEAT=given, TILE=size
    )
    _rows_kernel[programs](
        logits, *logits.stride(), heat, partial[0], partial[1], out, out.stride(0), rows, width, tiles, HEAT=given,
        TILE=size, BLOCKS=tile(min(tiles, 256), itemsize=4, live=8),
    )  # fmt: skip
