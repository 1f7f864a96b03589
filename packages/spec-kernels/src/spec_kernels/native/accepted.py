"""Owns slots and moves of accepted tokens in plain torch; contracts in `spec_kernels.accepted`."""

from __future__ import annotations

import torch

from spec_kernels._custom import filling_op
from spec_kernels.native.cache_locs import lookup

__all__ = ["accepted_moves", "compact_accepted_locs", "move_kv"]


@filling_op("compact_accepted_locs", "out")
def compact_accepted_locs(out_cache_loc: torch.Tensor, accept_index: torch.Tensor, out: torch.Tensor) -> None:
    """See `spec_kernels.compact_accepted_locs`."""
    entry = accept_index.to(torch.int64)
    live = (entry >= 0) & (entry < out_cache_loc.shape[0])
    place = torch.where(live, live.to(torch.int64).cumsum(0) - 1, out.shape[0])
    slots = lookup(out_cache_loc.unsqueeze(0), torch.zeros_like(entry), entry)
    packed = torch.zeros(out.shape[0] + 1, dtype=out.dtype, device=out.device)  # the last element takes what is skipped
    packed[place] = slots.to(out.dtype)
    out.copy_(packed[:-1])


@filling_op("accepted_moves", "sources", "targets")
def accepted_moves(
    out_cache_loc: torch.Tensor, accept_index: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, width: int
) -> None:
    """See `spec_kernels.accepted_moves`."""
    bs, depth = accept_index.shape
    entry = accept_index.to(torch.int64)
    live = (entry >= 0) & (entry < out_cache_loc.shape[0])
    slots = out_cache_loc.unsqueeze(0)
    source = lookup(slots, torch.zeros_like(entry), entry)
    target = lookup(out_cache_loc.reshape(bs, width)[:, :depth], *_grid(bs, depth, entry.device))
    sources.copy_(torch.where(live, source, 0).reshape(-1))
    targets.copy_(torch.where(live, target, 0).reshape(-1))


def _grid(rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows, device=device).unsqueeze(1), torch.arange(columns, device=device).unsqueeze(0)


@filling_op("move_kv", "caches")
def move_kv(caches: list[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """See `spec_kernels.move_kv`; caches are bytes of shape [slots, width]. Skipped pairs copy slot 0 onto itself."""
    slots = caches[0].shape[0]
    live = (sources > 0) & (targets > 0) & (sources < slots) & (targets < slots)
    source = torch.where(live, sources.to(torch.int64), 0)
    target = torch.where(live, targets.to(torch.int64), 0)
    for cache in caches:
        cache.index_copy_(0, target, cache.index_select(0, source))
