"""Owns cache locations as Triton kernels; contracts in `spec_kernels.cache_locs`."""

# Kernels are written in Triton's language, which has no types of Python's.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels._custom import filling_op
from spec_kernels.tiling import grid, tile

__all__ = [
    "compact_window_rows",
    "extend_cache_locs",
    "fill_block_table",
    "lookup",
    "translate_locs",
    "uniform_cache_locs",
]


@triton.jit
def lookup(table, height, width, row_step, column_step, row, column, live):
    """Entries of a table; 0 outside it and where it holds a negative value."""
    row = row.to(tl.int64)
    column = column.to(tl.int64)
    inside = live & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    found = tl.load(table + row * row_step + column * column_step, mask=inside, other=0).to(tl.int64)
    return tl.maximum(found, 0)


@triton.jit
def _uniform_kernel(
    table, height, columns, row_step, column_step, requests, starts, out, positions, bs, width, per_row,
    TILE: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), bs, tl.num_programs(0)):
        wide = tl.full((), row, tl.int64)
        request = tl.load(requests + wide).to(tl.int64)
        start = tl.load(starts + wide).to(tl.int64)
        for first in range(0, width, TILE):
            step = first + tl.arange(0, TILE)
            live = step < width
            found = lookup(table, height, columns, row_step, column_step, request, start + step, live)
            tl.store(out + wide * width + step, found, mask=live)
            if per_row >= 0:
                tl.store(positions + wide * width + step, start + step, mask=live)
            else:
                tl.store(positions - wide * per_row + step, start + step * 0, mask=step < -per_row)


@filling_op("uniform_cache_locs_triton", "out", "positions_out")
def uniform_cache_locs(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    positions_out: torch.Tensor,
    width: int,
    per_row: int,
) -> None:
    """See `spec_kernels.cache_locs`; `per_row` below 0 asks for copies of the start as positions."""
    bs = req_pool_indices.shape[0]
    _uniform_kernel[grid(bs)](
        req_to_token, *req_to_token.shape, *req_to_token.stride(), req_pool_indices.contiguous(), starts.contiguous(),
        out, positions_out, bs, width, per_row, TILE=tile(width, itemsize=8),
    )  # fmt: skip


@triton.jit
def _extend_kernel(
    table, height, columns, row_step, column_step, requests, starts, ends, out, bs, total, TILE: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), bs + 1, tl.num_programs(0)):
        before = tl.zeros((), tl.int64)
        for head in range(0, row, TILE):
            other = head + tl.arange(0, TILE)
            begin = tl.load(starts + other, mask=other < row, other=0).to(tl.int64)
            end = tl.load(ends + other, mask=other < row, other=0).to(tl.int64)
            before += tl.sum(tl.maximum(end - begin, 0))
        if row < bs:
            request = tl.load(requests + row).to(tl.int64)
            start = tl.load(starts + row).to(tl.int64)
            length = tl.minimum(tl.load(ends + row).to(tl.int64) - start, total - before)
            for first in range(0, length, TILE):
                step = first + tl.arange(0, TILE)
                live = step < length
                found = lookup(table, height, columns, row_step, column_step, request, start + step, live)
                tl.store(out + before + step, found, mask=live)
        else:  # the last unit of work clears what no request writes
            for first in range(before, total, TILE):
                step = first + tl.arange(0, TILE)
                tl.store(out + step, tl.zeros((TILE,), tl.int64), mask=step < total)


@filling_op("extend_cache_locs_triton", "out")
def extend_cache_locs(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `spec_kernels.extend_cache_locs`."""
    bs = req_pool_indices.shape[0]
    _extend_kernel[grid(bs + 1)](
        req_to_token, *req_to_token.shape, *req_to_token.stride(), req_pool_indices.contiguous(), starts.contiguous(),
        ends.contiguous(), out, bs, out.shape[0], TILE=tile(1024, itemsize=8),
    )  # fmt: skip


@triton.jit
def _translate_kernel(locs, page_map, pages, map_step, out, tokens, page_size, TILE: tl.constexpr):
    for first in range(tl.program_id(0) * TILE, tokens, tl.num_programs(0) * TILE):
        token = first + tl.arange(0, TILE)
        live = token < tokens
        loc = tl.load(locs + token, mask=live, other=0).to(tl.int64)
        loc = tl.maximum(loc, 0)
        mapped = lookup(page_map, 1, pages, 0, map_step, loc * 0, loc // page_size, live & (loc > 0))
        found = tl.where(mapped > 0, mapped * page_size + loc % page_size, 0)
        tl.store(out + token, found, mask=live)


@filling_op("translate_locs_triton", "out")
def translate_locs(locs: torch.Tensor, page_map: torch.Tensor, out: torch.Tensor, page_size: int) -> None:
    """See `spec_kernels.translate_locs`."""
    tokens, size = locs.shape[0], tile(min(locs.shape[0], 1024), itemsize=8)
    _translate_kernel[grid(-(-tokens // size))](
        locs.contiguous(), page_map, page_map.shape[0], page_map.stride(0), out, tokens, page_size, TILE=size
    )


@triton.jit
def _table_kernel(
    out, columns, table, height, width, row_step, column_step, requests, lens, slot_map, slots, map_step, rows, bs,
    page_size, MAPPED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        wide = tl.full((), row, tl.int64)
        request = tl.load(requests + wide, mask=wide < bs, other=-1).to(tl.int64)
        length = tl.load(lens + wide, mask=wide < bs, other=0).to(tl.int64)
        for start in range(0, columns, TILE):
            column = (start + tl.arange(0, TILE)).to(tl.int64)
            first = column * page_size
            live = (column < columns) & (first < length)
            slot = lookup(table, height, width, row_step, column_step, request, first, live)
            if MAPPED:
                slot = lookup(slot_map, 1, slots, 0, map_step, slot * 0, slot, live & (slot > 0))
            page = slot // page_size
            page = tl.where(page <= 2147483647, page, 0)
            tl.store(out + wide * columns + column, page.to(tl.int32), mask=column < columns)


@filling_op("fill_block_table_triton", "out")
def fill_block_table(
    out: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    slot_map: torch.Tensor | None,
    page_size: int,
) -> None:
    """See `spec_kernels.fill_block_table`."""
    rows, columns = out.shape
    given = kv_lens if slot_map is None else slot_map  # an absent one is never read
    _table_kernel[grid(rows)](
        out, columns, req_to_token, *req_to_token.shape, *req_to_token.stride(), req_pool_indices.contiguous(),
        kv_lens.contiguous(), given, given.shape[0], given.stride(0), rows, req_pool_indices.shape[0], page_size,
        MAPPED=slot_map is not None, TILE=tile(min(columns, 1024), itemsize=8),
    )  # fmt: skip


@triton.jit
def _window_kernel(
    draft, width, table, height, columns, row_step, column_step, requests, starts, lengths,
    verify, verify_width, verify_row_step, verify_step, bs, TILE: tl.constexpr,
):  # fmt: skip
    for row in range(tl.program_id(0), bs, tl.num_programs(0)):
        request = tl.load(requests + row).to(tl.int64)
        if (request >= 0) & (request < height):
            start = tl.load(starts + row).to(tl.int64)
            length = tl.maximum(tl.load(lengths + row).to(tl.int64), 0)
            wide = tl.full((), row, tl.int64)
            for first in range(0, width, TILE):
                column = first + tl.arange(0, TILE)
                live = column < width
                window = lookup(
                    table, height, columns, row_step, column_step, request, start + column, live & (column < length)
                )
                block = lookup(
                    verify, bs, verify_width, verify_row_step, verify_step, wide, column - length, column >= length
                )
                tl.store(draft + request * width + column, window + block, mask=live)


@filling_op("compact_window_rows_triton", "draft_req_to_token")
def compact_window_rows(
    draft_req_to_token: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    verify_locs: torch.Tensor,
) -> None:
    """See `spec_kernels.compact_window_rows`."""
    bs, width = req_pool_indices.shape[0], draft_req_to_token.shape[1]
    _window_kernel[grid(bs)](
        draft_req_to_token, width, req_to_token, *req_to_token.shape, *req_to_token.stride(),
        req_pool_indices.contiguous(), starts.contiguous(), lengths.contiguous(),
        verify_locs, verify_locs.shape[1], *verify_locs.stride(), bs, TILE=tile(min(width, 1024), itemsize=8),
    )  # fmt: skip
