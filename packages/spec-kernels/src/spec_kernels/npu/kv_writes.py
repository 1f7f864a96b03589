"""Owns KV writes over torch_npu's reshape_and_cache, which takes int32 slots and skips negative ones."""

from __future__ import annotations

import torch
import torch_npu

from spec_kernels.native.kv_writes import live_slots

__all__ = ["write_kv"]


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    num_valid: torch.Tensor | None,
    tiled: bool,
) -> None:
    """Backend entry of `spec_kernels.write_kv`; arguments have been checked there, and `tiled` is False."""
    live = live_slots(slots, num_valid, key_cache.shape[0] * key_cache.shape[1])
    narrow = torch.where(live, slots, -1).to(torch.int32)
    torch_npu._npu_reshape_and_cache(key.contiguous(), value.contiguous(), key_cache, value_cache, narrow)
