"""Owns the draft-extend buffer fill as three Triton kernels: token rows, request rows, hidden states.

The contract is in `spec_kernels.draft_extend`. Sources do not alias destinations here. A buffer with gaps is written
through a dense one.
"""

# Kernels are written in Triton's language, which has no types of Python's.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.draft_extend import DraftExtendBatch, DraftExtendBuffers
from spec_kernels.native.draft_extend import as_op, entry
from spec_kernels.tiling import grid, tile

__all__ = ["fill_draft_extend_buffers", "run"]


@triton.jit
def _token_kernel(ids, positions, locs, src_ids, src_positions, src_locs, tokens, max_tokens, TILE: tl.constexpr):
    for first in range(tl.program_id(0) * TILE, max_tokens, tl.num_programs(0) * TILE):
        at = first + tl.arange(0, TILE)
        live = at < tokens
        tl.store(ids + at, tl.load(src_ids + at, mask=live, other=0), mask=at < max_tokens)
        tl.store(positions + at, tl.load(src_positions + at, mask=live, other=0), mask=at < max_tokens)
        tl.store(locs + at, tl.load(src_locs + at, mask=live, other=0), mask=at < max_tokens)


@triton.jit
def _row_kernel(
    seq_lens, requests, drafts, accepted, select, temperatures, counts, logprob_counts,
    src_lens, src_requests, src_drafts, src_accepted, src_temperatures,
    raw_bs, max_rows, ranks, logprob_ranks, bs, width, front, fill, HEAT: tl.constexpr, SRC_HEAT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    most = tl.maximum(max_rows, tl.maximum(ranks, logprob_ranks))
    for first in range(tl.program_id(0) * TILE, most, tl.num_programs(0) * TILE):
        row = first + tl.arange(0, TILE)
        live = row < raw_bs
        inside = row < max_rows
        tl.store(seq_lens + row, tl.load(src_lens + row, mask=live, other=fill), mask=inside)
        tl.store(requests + row, tl.load(src_requests + row, mask=live, other=0), mask=inside)
        count = tl.load(src_drafts + row, mask=live, other=0).to(tl.int64)
        tl.store(drafts + row, count, mask=inside)
        tl.store(accepted + row, tl.load(src_accepted + row, mask=live, other=-1), mask=inside)
        tl.store(select + row, row.to(tl.int64) * width + front + count, mask=inside)
        if HEAT:
            heat = tl.full((TILE,), 1.0, tl.float32)
            if SRC_HEAT:
                heat = tl.load(src_temperatures + row, mask=live, other=1.0).to(tl.float32)
            tl.store(temperatures + row, heat, mask=inside)
        total = tl.zeros((TILE,), tl.int64) + bs * width
        tl.store(counts + row, total, mask=row < ranks)
        tl.store(logprob_counts + row, total, mask=row < logprob_ranks)


@triton.jit
def _hidden_kernel(hidden, source, row_step, column_step, tokens, max_tokens, width, TILE: tl.constexpr):
    tiles = tl.cdiv(width, TILE)
    for work in range(tl.program_id(0), max_tokens * tiles, tl.num_programs(0)):
        row = tl.full((), work // tiles, tl.int64)
        column = ((work % tiles) * TILE + tl.arange(0, TILE)).to(tl.int64)
        inside = column < width
        value = tl.load(source + row * row_step + column * column_step, mask=inside & (row < tokens), other=0.0)
        tl.store(hidden + row * width + column, value, mask=inside)


def _fill(buffers: DraftExtendBuffers, batch: DraftExtendBatch, *, bs: int, width: int, front: int, fill: int) -> None:
    written: list[tuple[torch.Tensor, torch.Tensor]] = []

    def dense(buffer: torch.Tensor) -> torch.Tensor:
        if buffer.is_contiguous():
            return buffer
        written.append((buffer, torch.empty_like(buffer, memory_format=torch.contiguous_format)))
        return written[-1][1]

    def dense_or_void(buffer: torch.Tensor | None) -> torch.Tensor:
        return batch.seq_lens if buffer is None else dense(buffer)  # an absent one is never written

    tokens, max_tokens = batch.input_ids.shape[0], buffers.input_ids.shape[0]
    size = tile(min(max_tokens, 1024), itemsize=8)
    if max_tokens:
        _token_kernel[grid(-(-max_tokens // size))](
            dense(buffers.input_ids), dense(buffers.positions), dense(buffers.out_cache_loc),
            batch.input_ids.contiguous(), batch.positions.contiguous(), batch.out_cache_loc.contiguous(), tokens,
            max_tokens, TILE=size,
        )  # fmt: skip
    max_rows = buffers.seq_lens.shape[0]
    counts, logprob_counts = buffers.global_num_tokens, buffers.global_num_tokens_for_logprob
    ranks, logprob_ranks = (0 if part is None else part.shape[0] for part in (counts, logprob_counts))
    most = max(max_rows, ranks, logprob_ranks)
    size = tile(min(most, 256), itemsize=8, live=12)
    heat = batch.temperatures
    if most:
        _row_kernel[grid(-(-most // size))](
            dense(buffers.seq_lens), dense(buffers.req_pool_indices), dense(buffers.num_correct_drafts),
            dense(buffers.num_accept_tokens), dense(buffers.select_index), dense_or_void(buffers.temperatures),
            dense_or_void(counts), dense_or_void(logprob_counts), batch.seq_lens.contiguous(),
            batch.req_pool_indices.contiguous(), batch.num_correct_drafts.contiguous(),
            batch.num_accept_tokens.contiguous(), batch.seq_lens if heat is None else heat.contiguous(),
            batch.seq_lens.shape[0], max_rows, ranks, logprob_ranks, bs, width, front, fill,
            HEAT=buffers.temperatures is not None, SRC_HEAT=heat is not None, TILE=size,
        )  # fmt: skip
    hidden = buffers.hidden_states
    if hidden is not None and hidden.numel():
        source = hidden if batch.hidden_states is None else batch.hidden_states
        rows, columns = hidden.shape
        size = tile(min(columns, 2048), itemsize=8)
        _hidden_kernel[grid(rows * -(-columns // size))](
            dense(hidden), source, *source.stride(), 0 if batch.hidden_states is None else tokens, rows, columns,
            TILE=size,
        )  # fmt: skip
    for buffer, held in written:
        buffer.copy_(held)


fill_draft_extend_buffers = as_op("fill_draft_extend_buffers_triton", _fill)
run = entry(fill_draft_extend_buffers)
