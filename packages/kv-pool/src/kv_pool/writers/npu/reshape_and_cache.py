"""Owns the writer over `torch_npu._npu_reshape_and_cache` (ATB): one launch for K and V together, int32 slots.

It does not narrow int64 slots, which would wrap large ones or wait for the device; it refuses them.
"""

from __future__ import annotations

import torch
import torch_npu

from kv_pool.errors import DtypeMismatch, UnknownWriter
from kv_pool.writers._checks import check_apart, check_write

__all__ = ["ReshapeAndCacheWriter"]

_DTYPES = (torch.float16, torch.bfloat16, torch.int8)


class ReshapeAndCacheWriter:
    """One fused launch; slots int32; K and V of one dtype out of float16, bfloat16 and int8."""

    name = "reshape_and_cache"
    max_slots = 2**31
    pairs_only = True

    def write_rows(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """See `Writer.write_rows`; always refused."""
        raise UnknownWriter(
            "writer",
            given=self.name,
            expected="a writer of single components",
            consequence="the operator stores K and V together only",
            remedy="use the scatter_nd or index writer",
        )

    def write(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """See `Writer.write`."""
        stores = (("key", key, key_cache), ("value", value, value_cache))
        check_write(slots, stores, (torch.int32,))
        check_apart(slots, stores)
        if key_cache.dtype not in _DTYPES or key_cache.dtype != value_cache.dtype:
            raise DtypeMismatch(
                "key, value",
                given=f"{key_cache.dtype}, {value_cache.dtype}",
                expected=f"one dtype out of {' or '.join(str(dtype) for dtype in _DTYPES)}",
                consequence="the operator takes K and V of one dtype only",
                remedy="use the scatter_nd writer",
            )
        if not slots.shape[0]:
            return
        torch_npu._npu_reshape_and_cache(
            key=key.contiguous(),
            value=value.contiguous(),
            key_cache=key_cache,
            value_cache=value_cache,
            slot_indices=slots,
        )
