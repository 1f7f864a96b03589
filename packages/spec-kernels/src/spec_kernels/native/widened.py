"""Owns rotation, stash and widened windows in plain torch; contracts in `spec_kernels.widened`."""

from __future__ import annotations

import torch

from spec_kernels._custom import filling_op
from spec_kernels.native.cache_locs import lookup

__all__ = ["append_to_stash", "rotate_input_ids", "widened_inputs", "widened_locs"]


@filling_op("rotate_input_ids", "input_ids")
def rotate_input_ids(
    input_ids: torch.Tensor,
    start_locs: torch.Tensor,
    seq_lens: torch.Tensor,
    next_tokens: torch.Tensor,
    select_index: torch.Tensor | None,
) -> None:
    """See `spec_kernels.rotate_input_ids`."""
    tokens = input_ids.shape[0]
    start = start_locs.to(torch.int64)
    end = (start + seq_lens.to(torch.int64)).clamp(max=tokens)
    start = start.clamp(min=0)
    live = end > start
    # +1 where a segment starts, -1 at its last cell: the running sum tells which cells take their neighbour's value.
    edges = torch.zeros(tokens + 1, dtype=torch.int64, device=input_ids.device)
    ones = live.to(torch.int64)
    edges.index_add_(0, torch.where(live, start, tokens), ones)
    edges.index_add_(0, torch.where(live, end - 1, tokens), -ones)
    moves = edges[:tokens].cumsum(0) > 0
    rotated = torch.cat((torch.where(moves, input_ids.roll(-1), input_ids), input_ids[:1]))
    cell = end - 1 if select_index is None else select_index.to(torch.int64)
    own = live & (cell >= start) & (cell < end)
    rotated[torch.where(own, cell, tokens)] = next_tokens.to(input_ids.dtype)  # the last element takes what is void
    input_ids.copy_(rotated[:tokens])


@filling_op("append_to_stash", "stash_tokens", "stash_hidden", "stash_valid")
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
    rows, front = stash_tokens.shape
    count = tokens.shape[0]
    request = req_pool_indices.to(torch.int64)
    live = (request >= 0) & (request < rows)
    request = request.clamp(0, rows - 1)
    end = row_ends.to(torch.int64).clamp(0, count)
    taken = torch.where(live, torch.minimum(num_available.to(torch.int64), end).clamp(0, front), 0)
    slot = torch.arange(front, device=tokens.device).unsqueeze(0)
    kept = slot < (front - taken).unsqueeze(1)
    old = (slot + taken.unsqueeze(1)).clamp(max=front - 1)
    source = (end.unsqueeze(1) - front + slot).clamp(min=0, max=max(count - 1, 0))
    row = request.unsqueeze(1)
    new_tokens, new_hidden = stash_tokens[row, old], stash_hidden[row, old]
    if count:
        new_tokens = torch.where(kept, new_tokens, tokens[source].to(stash_tokens.dtype))
        new_hidden = torch.where(kept.unsqueeze(2), new_hidden, hidden_states[source])
    before = stash_valid[request].to(torch.int64)
    valid = torch.where(live, taken if fresh else (before + taken).clamp(max=front), before)
    # A skipped request repeats what the first live one writes; without a live one, all write what was there.
    first = live.to(torch.int64).argmax()
    chosen = torch.where(live, torch.arange(request.shape[0], device=tokens.device), first)
    stash_tokens[request[chosen]] = new_tokens[chosen]
    stash_hidden[request[chosen]] = new_hidden[chosen]
    stash_valid[request[chosen]] = valid[chosen].to(stash_valid.dtype)


def _first_valid(front: int, valid: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """First front row that holds something. Shape: [bs, 1]."""
    return torch.maximum(front - valid, front - seq_lens).clamp_(min=0).unsqueeze(1)


@filling_op("widened_inputs", "ids", "states")
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
    rows, front = stash_tokens.shape
    bs, hidden = req_pool_indices.shape[0], states.shape[1]
    windows, held = ids.view(bs, front + width), states.view(bs, front + width, hidden)
    windows[:, front:].copy_(predict.reshape(bs, width))
    held[:, front:].copy_(hidden_states.reshape(bs, width, hidden))
    if not front:
        return
    request = req_pool_indices.to(torch.int64)
    valid = lookup(stash_valid.unsqueeze(0), torch.zeros_like(request), request)
    first = _first_valid(front, valid, seq_lens.to(torch.int64))
    live = torch.arange(front, device=ids.device) >= first
    if not rows:
        windows[:, :front].zero_()
        held[:, :front].zero_()
        return
    at = request.clamp(0, rows - 1)
    windows[:, :front].copy_(torch.where(live, stash_tokens[at], 0))
    held[:, :front].copy_(torch.where(live.unsqueeze(2), stash_hidden[at], 0))


@filling_op("widened_locs", "locs", "positions")
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
    request, length = req_pool_indices.to(torch.int64), seq_lens.to(torch.int64)
    valid = lookup(stash_valid.unsqueeze(0), torch.zeros_like(request), request)
    first = _first_valid(front, valid, length)
    step = torch.arange(locs.shape[0] // request.shape[0], device=locs.device).unsqueeze(0)
    position = length.unsqueeze(1) - front + step
    found = lookup(req_to_token, request.unsqueeze(1), position)
    locs.copy_(torch.where(step >= (first + warmup).clamp(max=front), found, 0).reshape(-1))
    positions.copy_(torch.where(step >= first, position, 0).reshape(-1))
