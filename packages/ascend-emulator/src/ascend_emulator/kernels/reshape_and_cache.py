"""atb::_npu_reshape_and_cache and its form for one cache: writing new keys and values into paged caches by slot.

This module owns the ops: checks, the range check of slots, and the write.
"""

from __future__ import annotations

import torch

from .caches import check_slots, write_slots
from .rules import declare, note, refuse

OP = "atb::_npu_reshape_and_cache"
OP_SISO = "atb::_npu_reshape_and_cache_siso"
_FAMILY = "atb::_npu_reshape_and_cache[_siso]"
_DTYPES = (torch.float16, torch.bfloat16, torch.int8)

declare(
    _FAMILY,
    "operator list of akg, yaml/doc/reshape_and_cache.md; vllm-ascend#706",
    "test_kernels_other_refusals.py",
    {
        "cache-dtype": ("float16, bfloat16 or int8 throughout", "cast keys, values and caches to one dtype"),
        "cache-slots-dtype": ("slots of dtype int32", "call .to(torch.int32) on the slots"),
        "cache-slots-shape": ("slots of shape (tokens,)", "pass one slot a token"),
        "cache-shapes": (
            "keys and values (tokens, heads, dim), caches (blocks, block_size, heads, dim) with the same heads and dim",
            "reshape keys, values or caches",
        ),
        "cache-contiguous": ("contiguous caches", "pass the cache itself, one layer's view of it at most"),
    },
)
note(
    _FAMILY,
    "(not documented) slots past the caches",
    "—",
    "a `DeviceFault` (507015), and nothing is written: test_kernels_faults.py",
)
note(
    _FAMILY,
    "negative slots",
    "CANN's kernels",
    "not refused: such tokens are skipped: test_kernels_writes.py",
)
note(
    _FAMILY,
    "caches in NZ format",
    "akg, yaml/doc/reshape_and_cache.md",
    "format NZ does not exist in the emulator; caches of rank 3 are refused by `cache-shapes`",
)


def _check_part(op: str, name: str, rows: torch.Tensor, cache: torch.Tensor) -> None:
    for argument, tensor in ((name, rows), (f"{name}_cache", cache)):
        if tensor.dtype not in _DTYPES or tensor.dtype != rows.dtype:
            refuse(op, "cache-dtype", argument, tensor.dtype)
    if rows.dim() != 3 or cache.dim() != 4 or rows.shape[1:] != cache.shape[2:]:
        refuse(op, "cache-shapes", name, f"shape {tuple(rows.shape)} for a cache of {tuple(cache.shape)}")
    if not cache.is_contiguous():
        refuse(op, "cache-contiguous", f"{name}_cache", f"strides {cache.stride()} of shape {tuple(cache.shape)}")


def _check_slots(op: str, slots: torch.Tensor, rows: torch.Tensor) -> None:
    if slots.dtype != torch.int32:
        refuse(op, "cache-slots-dtype", "slot_indices", slots.dtype)
    if slots.dim() != 1 or slots.size(0) != rows.size(0):
        refuse(op, "cache-slots-shape", "slot_indices", f"shape {tuple(slots.shape)} for {rows.size(0)} tokens")


def _write(parts: list[tuple[torch.Tensor, torch.Tensor]], slots: torch.Tensor, op: str) -> None:
    for _, cache in parts:
        check_slots(op, slots, cache, cache.size(1), "slot_indices")
    for rows, cache in parts:
        write_slots(cache, slots, rows)


def npu_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Writes token i's key and value into slot ``slot_indices[i]`` of the caches; tokens of negative slot are skipped.

    Args:
        key: Shape: [tokens, heads, dim]; float16, bfloat16 or int8.
        value: Shape: [tokens, heads, value_dim]; the same dtype.
        key_cache: Shape: [blocks, block_size, heads, dim]; contiguous. *Mutated*.
        value_cache: Shape: [blocks, block_size, heads, value_dim]; contiguous. *Mutated*.
        slot_indices: Shape: [tokens]; int32. Slot s is token ``s % block_size`` of block ``s // block_size``.
            *Padding*: negative slots.

    Raises:
        OpRefused: a documented constraint is broken.
        DeviceFault: a slot past the end of the caches; nothing is written then.

    Source:
        reshape_and_cache of CANN's transformer operators: forms in akg, yaml/doc/reshape_and_cache.md; int32 slots
        also in vllm-ascend#706; the kernels leave out tokens of negative slot.
    """
    _check_part(OP, "key", key, key_cache)
    _check_part(OP, "value", value, value_cache)
    if value.dtype != key.dtype:
        refuse(OP, "cache-dtype", "value", f"{value.dtype} beside a key of {key.dtype}")
    if key.shape[:2] != value.shape[:2] or key_cache.shape[:3] != value_cache.shape[:3]:
        refuse(OP, "cache-shapes", "value", f"shape {tuple(value.shape)} beside a key of {tuple(key.shape)}")
    _check_slots(OP, slot_indices, key)
    _write([(key, key_cache), (value, value_cache)], slot_indices.long(), OP)


def npu_reshape_and_cache_siso(key: torch.Tensor, key_cache: torch.Tensor, slot_indices: torch.Tensor) -> None:
    """Writes one tensor's tokens into one cache; see ``npu_reshape_and_cache``. *Mutates* ``key_cache``."""
    _check_part(OP_SISO, "key", key, key_cache)
    _check_slots(OP_SISO, slot_indices, key)
    _write([(key, key_cache)], slot_indices.long(), OP_SISO)


KERNELS = {OP: npu_reshape_and_cache, OP_SISO: npu_reshape_and_cache_siso}
