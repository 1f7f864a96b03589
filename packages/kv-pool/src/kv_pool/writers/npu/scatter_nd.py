"""Owns the writer over `torch_npu.npu_scatter_nd_update_`: one launch for K, one for V, rows of the flattened pages.

It does not check slot values: the operator does not either, and reading them would wait for the device.
"""

from __future__ import annotations

import torch
import torch_npu

from kv_pool.writers._checks import Store, as_bits, check_apart, check_write

__all__ = ["ScatterNdWriter"]


class ScatterNdWriter:
    """Scatter by row index; slots int32 or int64; every dtype: 8-bit floats and unsigned bytes travel as int8.

    Source: the operator's documentation in torch_npu (A2 and A3 chips).
    """

    name = "scatter_nd"
    max_slots = 2**63 - 1
    pairs_only = False

    def write_rows(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """See `Writer.write_rows`."""
        self._store(slots, (("rows", rows, cache),))

    def write(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """See `Writer.write`."""
        self._store(slots, (("key", key, key_cache), ("value", value, value_cache)))

    def _store(self, slots: torch.Tensor, stores: tuple[Store, ...]) -> None:
        check_write(slots, stores, (torch.int32, torch.int64))
        check_apart(slots, stores)
        if not slots.shape[0]:
            return
        index = slots.view(-1, 1)
        for _, rows, cache in stores:
            torch_npu.npu_scatter_nd_update_(as_bits(cache).view(-1, *cache.shape[2:]), index, as_bits(rows))
