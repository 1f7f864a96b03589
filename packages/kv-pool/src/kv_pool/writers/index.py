"""Owns the writer that any device can run: indexed assignment, as the custom operator `kv_pool::index_write`.

The operator is one node to graph capture and `torch.compile`. In host memory it checks slot values at every run,
replays included. It does not own shapes and dtypes (see `_checks`).
"""

from __future__ import annotations

import torch

from kv_pool.writers._checks import as_bits, check_apart, check_slot_values, check_write

__all__ = ["IndexWriter", "index_write", "index_write_rows"]


@torch.library.custom_op(
    "kv_pool::index_write",
    mutates_args=("key_cache", "value_cache"),
    schema="(Tensor slots, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache) -> ()",
)
def index_write(
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    """Store `key[i]` and `value[i]` at `slots[i]`; see `Writer.write` for shapes.

    Mutates: `key_cache` and `value_cache`.

    Padding: On a device, where values cannot be checked without waiting, a negative slot goes to slot 0, which is
        reserved and read by nobody. Indexed assignment alone would take it for a slot counted from the pool's end.

    Raises:
        AliasedRows: A source lies in the caches.
        SlotOutOfRange: In host memory, a slot is outside the pool.
    """
    check_apart(slots, (("key", key, key_cache), ("value", value, value_cache)))
    if key_cache.device.type == "cpu":
        check_slot_values(slots, key_cache.shape[0] * key_cache.shape[1])
    index = slots.to(torch.int64).clamp_min(0)
    _put(key_cache, index, key)
    _put(value_cache, index, value)


def _put(cache: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    as_bits(cache).view(-1, *cache.shape[2:]).index_put_((index,), as_bits(rows))


@index_write.register_fake
def _index_write_fake(
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    return None


@torch.library.custom_op(
    "kv_pool::index_write_rows",
    mutates_args=("cache",),
    schema="(Tensor slots, Tensor rows, Tensor(a!) cache) -> ()",
)
def index_write_rows(slots: torch.Tensor, rows: torch.Tensor, cache: torch.Tensor) -> None:
    """Store `rows[i]` at `slots[i]`; `index_write` for one component.

    Mutates: `cache`.

    Raises:
        AliasedRows: A source lies in the cache.
        SlotOutOfRange: In host memory, a slot is outside the pool.
    """
    check_apart(slots, (("rows", rows, cache),))
    if cache.device.type == "cpu":
        check_slot_values(slots, cache.shape[0] * cache.shape[1])
    _put(cache, slots.to(torch.int64).clamp_min(0), rows)


@index_write_rows.register_fake
def _index_write_rows_fake(slots: torch.Tensor, rows: torch.Tensor, cache: torch.Tensor) -> None:
    return None


class IndexWriter:
    """Indexed assignment; slots int32 or int64; every dtype."""

    name = "index"
    max_slots = 2**63 - 1
    pairs_only = False

    def write_rows(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """See `Writer.write_rows`."""
        check_write(slots, (("rows", rows, cache),), (torch.int32, torch.int64))
        index_write_rows(slots, rows, cache)

    def write(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """See `Writer.write`."""
        check_write(slots, (("key", key, key_cache), ("value", value, value_cache)), (torch.int32, torch.int64))
        index_write(slots, key, value, key_cache, value_cache)
