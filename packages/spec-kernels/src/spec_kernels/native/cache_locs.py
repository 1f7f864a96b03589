"""Owns cache locations in plain torch: static shapes, no host synchronisation. Contracts: `spec_kernels.cache_locs`."""

from __future__ import annotations

import torch

from spec_kernels._custom import filling_op

__all__ = [
    "compact_window_rows",
    "extend_cache_locs",
    "fill_block_table",
    "lookup",
    "translate_locs",
    "uniform_cache_locs",
]

_INT32_MAX = 2**31 - 1


def lookup(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Entries of a table; 0 outside it and where it holds a negative value. `rows` and `columns` broadcast; int64."""
    height, width = table.shape
    if not height or not width:
        return torch.zeros_like(rows + columns)
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    found = table[rows.clamp(0, height - 1), columns.clamp(0, width - 1)].to(torch.int64)
    return torch.where(inside, found, 0).clamp_(min=0)


@filling_op("uniform_cache_locs", "out", "positions_out")
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
    begin = starts.to(torch.int64).unsqueeze(1)
    columns = begin + torch.arange(width, device=starts.device)
    out.copy_(lookup(req_to_token, req_pool_indices.to(torch.int64).unsqueeze(1), columns).reshape(-1))
    positions = columns if per_row >= 0 else begin.expand(-1, -per_row)
    positions_out.copy_(positions.reshape(-1))


@filling_op("extend_cache_locs", "out")
def extend_cache_locs(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `spec_kernels.extend_cache_locs`."""
    lengths = (ends.to(torch.int64) - starts.to(torch.int64)).clamp_(min=0)
    stops = lengths.cumsum(0)
    token = torch.arange(out.shape[0], device=out.device)
    row = torch.searchsorted(stops, token, right=True)
    live = row < stops.shape[0]
    row = row.clamp_(max=stops.shape[0] - 1)
    column = starts.to(torch.int64)[row] + token - (stops - lengths)[row]
    found = lookup(req_to_token, req_pool_indices.to(torch.int64)[row], column)
    out.copy_(torch.where(live, found, 0))


@filling_op("translate_locs", "out")
def translate_locs(locs: torch.Tensor, page_map: torch.Tensor, out: torch.Tensor, page_size: int) -> None:
    """See `spec_kernels.translate_locs`."""
    wide = locs.to(torch.int64)
    page = torch.div(wide, page_size, rounding_mode="floor")
    mapped = lookup(page_map.unsqueeze(0), torch.zeros_like(page), page)
    out.copy_(torch.where((wide > 0) & (mapped > 0), mapped * page_size + wide % page_size, 0))


@filling_op("fill_block_table", "out")
def fill_block_table(
    out: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    kv_lens: torch.Tensor,
    slot_map: torch.Tensor | None,
    page_size: int,
) -> None:
    """See `spec_kernels.fill_block_table`."""
    bs = req_pool_indices.shape[0]
    first = torch.arange(0, out.shape[1] * page_size, page_size, device=out.device)
    slot = lookup(req_to_token, req_pool_indices.to(torch.int64).unsqueeze(1), first)
    if slot_map is not None:
        slot = lookup(slot_map.unsqueeze(0), torch.zeros_like(slot), torch.where(slot > 0, slot, -1))
    page = torch.div(slot, page_size, rounding_mode="floor")
    live = (first < kv_lens.to(torch.int64).unsqueeze(1)) & (page <= _INT32_MAX)
    out[:bs].copy_(torch.where(live, page, 0))
    out[bs:].zero_()


@filling_op("compact_window_rows", "draft_req_to_token")
def compact_window_rows(
    draft_req_to_token: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    verify_locs: torch.Tensor,
) -> None:
    """See `spec_kernels.compact_window_rows`."""
    height, width = draft_req_to_token.shape
    column = torch.arange(width, device=starts.device).unsqueeze(0)
    request = req_pool_indices.to(torch.int64)
    length = lengths.to(torch.int64).clamp(min=0).unsqueeze(1)
    window = lookup(req_to_token, request.unsqueeze(1), starts.to(torch.int64).unsqueeze(1) + column)
    block = lookup(verify_locs, torch.arange(request.shape[0], device=starts.device).unsqueeze(1), column - length)
    rows = torch.where(column < length, window, block).to(draft_req_to_token.dtype)
    # One index a table row: which request names it, or none, so that skipped requests write nothing.
    owner = torch.full((height + 1,), -1, dtype=torch.int64, device=starts.device)
    target = torch.where((request >= 0) & (request < height), request, height)
    owner[target] = torch.arange(request.shape[0], device=starts.device)
    owner = owner[:height].unsqueeze(1)
    draft_req_to_token.copy_(torch.where(owner >= 0, rows[owner.squeeze(1).clamp(min=0)], draft_req_to_token))
