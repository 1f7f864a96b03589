"""Owns KV writes over torch_npu: reshape_and_cache, scatter_pa_kv_cache, scatter_nd_update.

Which of them takes a call is said in `spec_kernels.kv_writes.npu_writer`. The first two skip negative slots; the last
skips nothing, so a padded token repeats a live one's write.
"""

from __future__ import annotations

import torch
import torch_npu

from spec_kernels.kv_writes import npu_writer
from spec_kernels.native.kv_writes import live_slots, settled_slots

__all__ = ["write_kv"]

_SCATTERED = (torch.float32, torch.float16, torch.bfloat16, torch.int8)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    num_valid: torch.Tensor | None,
    tiled: bool,
) -> None:
    """Backend entry of `spec_kernels.write_kv`; arguments have been checked there."""
    total = key_cache.shape[0] * key_cache.shape[2 if tiled else 1]
    writer = npu_writer(key, value, tiled=tiled)
    if writer == "scatter_nd":
        some, chosen, slot = settled_slots(slots, num_valid, total)
        place = slot.to(torch.int32 if total < 2**31 else torch.int64)
        _scatter(key, key_cache, some, chosen, slot, place)
        _scatter(value, value_cache, some, chosen, slot, place)
        return
    narrow = torch.where(live_slots(slots, num_valid, total), slots, -1).to(torch.int32)
    caches = (key.contiguous(), value.contiguous(), key_cache, value_cache, narrow)
    if writer == "scatter_pa":
        torch_npu.npu_scatter_pa_kv_cache(*caches, cache_mode="PA_NZ" if tiled else "Norm")
    else:
        torch_npu._npu_reshape_and_cache(*caches)


def _scatter(
    rows: torch.Tensor,
    cache: torch.Tensor,
    some: torch.Tensor,
    chosen: torch.Tensor,
    slot: torch.Tensor,
    place: torch.Tensor,
) -> None:
    """Write rows into a cache seen as [slots, heads * dims]; dtypes that the operator does not take go as bytes."""
    dtype = rows.dtype if rows.dtype in _SCATTERED else torch.int8
    flat = cache.view(cache.shape[0] * cache.shape[1], -1).view(dtype)
    given = rows.reshape(rows.shape[0], -1).contiguous().view(dtype)
    torch_npu.npu_scatter_nd_update_(flat, place.unsqueeze(1), torch.where(some, given[chosen], flat[slot]))
