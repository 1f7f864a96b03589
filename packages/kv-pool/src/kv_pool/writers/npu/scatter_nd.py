"""Owns the writer over `torch_npu.npu_scatter_nd_update_`: one launch for K, one for V, rows of the flattened pages.

It does not check slot values: the operator does not either, and reading them would wait for the device.
"""

from __future__ import annotations

import torch
import torch_npu

from kv_pool.errors import DtypeMismatch
from kv_pool.writers._checks import check_apart, check_write

__all__ = ["ScatterNdWriter"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8)


class ScatterNdWriter:
    """Scatter by row index; slots int32 or int64; pools of float16, bfloat16, float32 and int8.

    Source: the operator's documentation in torch_npu (A2 and A3 chips).
    """

    name = "scatter_nd"
    max_slots = 2**63 - 1

    def write(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """See `Writer.write`."""
        check_write(key_cache, value_cache, slots, key, value, (torch.int32, torch.int64))
        check_apart(key_cache, value_cache, slots, key, value)
        for name, cache in (("key", key_cache), ("value", value_cache)):
            if cache.dtype not in _DTYPES:
                raise DtypeMismatch(
                    name,
                    given=cache.dtype,
                    expected=" or ".join(str(dtype) for dtype in _DTYPES),
                    consequence="the operator refuses it",
                    remedy="use the index writer",
                )
        if not slots.shape[0]:
            return
        rows = slots.view(-1, 1)
        torch_npu.npu_scatter_nd_update_(key_cache.view(-1, *key_cache.shape[2:]), rows, key)
        torch_npu.npu_scatter_nd_update_(value_cache.view(-1, *value_cache.shape[2:]), rows, value)
