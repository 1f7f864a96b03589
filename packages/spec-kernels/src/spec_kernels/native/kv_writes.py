"""Owns KV writes in plain torch, byte by byte, so that every dtype is written alike; see `spec_kernels.write_kv`."""

from __future__ import annotations

import torch

from spec_kernels._custom import filling_op

__all__ = ["live_slots", "settled_slots", "write_kv"]


def live_slots(slots: torch.Tensor, num_valid: torch.Tensor | None, total: int) -> torch.Tensor:
    """Which tokens are written. Shape: [tokens]; bool."""
    live = (slots >= 0) & (slots < total)
    if num_valid is not None:
        live &= torch.arange(slots.shape[0], device=slots.device) < num_valid
    return live


def settled_slots(
    slots: torch.Tensor, num_valid: torch.Tensor | None, total: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For writers that skip nothing: whether any token is live, and a token and a slot in range for each token.

    A skipped token repeats what the first live one writes; with no live one, all name slot 0.
    """
    live = live_slots(slots, num_valid, total)
    token = torch.arange(slots.shape[0], device=slots.device)
    chosen = torch.where(live, token, live.to(torch.int64).argmax())
    return live.any(), chosen, torch.where(live.any(), slots.to(torch.int64)[chosen], 0)


@filling_op("write_kv", "key_cache", "value_cache")
def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    num_valid: torch.Tensor | None,
    tiled: bool,
) -> None:
    """See `spec_kernels.write_kv`. A skipped token repeats what the first live one writes, or what is there."""
    page_size = key_cache.shape[2 if tiled else 1]
    some, chosen, slot = settled_slots(slots, num_valid, key_cache.shape[0] * page_size)
    page, offset = torch.div(slot, page_size, rounding_mode="floor"), slot % page_size
    for rows, cache in ((key, key_cache), (value, value_cache)):
        view = cache.view(torch.uint8)
        places = view.transpose(1, 2) if tiled else view  # [pages, page_size, pieces, bytes]
        given = rows.contiguous().view(torch.uint8).reshape(slots.shape[0], *places.shape[2:])
        places[page, offset] = torch.where(some, given[chosen], places[page, offset])
