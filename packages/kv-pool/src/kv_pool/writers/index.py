"""Owns the writer that any device can run: indexed assignment, as the custom operator `kv_pool::index_write`.

The operator is one node to graph capture and `torch.compile`. In host memory it checks slot values at every run,
replays included. It does not own shapes and dtypes (see `_checks`).
"""

from __future__ import annotations

import torch

from kv_pool.writers._checks import check_apart, check_slot_values, check_write

__all__ = ["IndexWriter", "index_write"]


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
    check_apart(key_cache, value_cache, slots, key, value)
    if key_cache.device.type == "cpu":
        check_slot_values(slots, key_cache.shape[0] * key_cache.shape[1])
    rows = slots.to(torch.int64).clamp_min(0)
    key_cache.view(-1, *key_cache.shape[2:]).index_put_((rows,), key)
    value_cache.view(-1, *value_cache.shape[2:]).index_put_((rows,), value)


@index_write.register_fake
def _index_write_fake(
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> None:
    return None


class IndexWriter:
    """Indexed assignment; slots int32 or int64."""

    name = "index"
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
        index_write(slots, key, value, key_cache, value_cache)
