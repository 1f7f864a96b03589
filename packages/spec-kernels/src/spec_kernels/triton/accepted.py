"""Owns slots and moves of accepted tokens as Triton kernels; contracts in `spec_kernels.accepted`."""

# Kernels are written in Triton's language, which has no types of Python's.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels._custom import filling_op
from spec_kernels.tiling import grid, tile
from spec_kernels.triton.cache_locs import lookup

__all__ = ["accepted_moves", "compact_accepted_locs", "move_kv"]


@triton.jit
def _compact_kernel(slots, tokens, slot_step, entries, out, count, TILE: tl.constexpr):
    packed = tl.zeros((), tl.int64)
    for first in range(0, count, TILE):
        at = first + tl.arange(0, TILE)
        entry = tl.load(entries + at, mask=at < count, other=-1).to(tl.int64)
        live = (entry >= 0) & (entry < tokens)
        slot = lookup(slots, 1, tokens, 0, slot_step, entry * 0, entry, live)
        place = packed + tl.cumsum(live.to(tl.int64), 0) - 1
        tl.store(out + place, slot, mask=live)
        packed += tl.sum(live.to(tl.int64))
    for first in range(packed, count, TILE):
        at = first + tl.arange(0, TILE)
        tl.store(out + at, tl.zeros((TILE,), tl.int64), mask=at < count)


@filling_op("compact_accepted_locs_triton", "out")
def compact_accepted_locs(out_cache_loc: torch.Tensor, accept_index: torch.Tensor, out: torch.Tensor) -> None:
    """See `spec_kernels.compact_accepted_locs`; one program, since each place depends on all before it."""
    count = accept_index.shape[0]
    _compact_kernel[grid(1)](
        out_cache_loc, out_cache_loc.shape[0], out_cache_loc.stride(0), accept_index.contiguous(), out, count,
        TILE=tile(min(count, 1024), itemsize=8),
    )  # fmt: skip


@triton.jit
def _moves_kernel(
    slots, tokens, slot_step, entries, row_step, column_step, sources, targets, bs, depth, width, TILE: tl.constexpr
):
    for row in range(tl.program_id(0), bs, tl.num_programs(0)):
        wide = tl.full((), row, tl.int64)
        for first in range(0, depth, TILE):
            column = (first + tl.arange(0, TILE)).to(tl.int64)
            inside = column < depth
            entry = tl.load(entries + wide * row_step + column * column_step, mask=inside, other=-1).to(tl.int64)
            live = (entry >= 0) & (entry < tokens)
            source = lookup(slots, 1, tokens, 0, slot_step, entry * 0, entry, live)
            target = lookup(slots, 1, tokens, 0, slot_step, entry * 0, wide * width + column, live)
            tl.store(sources + wide * depth + column, source, mask=inside)
            tl.store(targets + wide * depth + column, target, mask=inside)


@filling_op("accepted_moves_triton", "sources", "targets")
def accepted_moves(
    out_cache_loc: torch.Tensor, accept_index: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, width: int
) -> None:
    """See `spec_kernels.accepted_moves`."""
    bs, depth = accept_index.shape
    _moves_kernel[grid(bs)](
        out_cache_loc, out_cache_loc.shape[0], out_cache_loc.stride(0), accept_index, *accept_index.stride(), sources,
        targets, bs, depth, width, TILE=tile(depth, itemsize=8),
    )  # fmt: skip


@triton.jit
def _copy_rows_kernel(out, rows, sources, targets, slots, count, width, GATHER: tl.constexpr, TILE: tl.constexpr):
    tiles = tl.cdiv(width, TILE)
    for work in range(tl.program_id(0), count * tiles, tl.num_programs(0)):
        move = tl.full((), work // tiles, tl.int64)
        source = tl.load(sources + move).to(tl.int64)
        target = tl.load(targets + move).to(tl.int64)
        if (source > 0) & (target > 0) & (source < slots) & (target < slots):
            column = (work % tiles) * TILE + tl.arange(0, TILE)
            if GATHER:
                value = tl.load(rows + source * width + column, mask=column < width)
                tl.store(out + move * width + column, value, mask=column < width)
            else:
                value = tl.load(rows + move * width + column, mask=column < width)
                tl.store(out + target * width + column, value, mask=column < width)


@filling_op("move_kv_triton", "caches")
def move_kv(caches: list[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """See `spec_kernels.move_kv`; a gather into a buffer, then a scatter, so that all reads come first."""
    count = sources.shape[0]
    for cache in caches:
        words = cache.view(torch.int32) if cache.shape[1] % 4 == 0 and cache.data_ptr() % 4 == 0 else cache
        slots, width = words.shape
        held = words.new_empty((count, width))
        size = tile(min(width, 1024), itemsize=4)
        programs = grid(count * -(-width // size))
        _copy_rows_kernel[programs](held, words, sources, targets, slots, count, width, GATHER=True, TILE=size)
        _copy_rows_kernel[programs](words, held, sources, targets, slots, count, width, GATHER=False, TILE=size)
