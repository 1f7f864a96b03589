"""Owns the refusals that all writers share: ranks, widths, row counts, dtypes, devices and shared memory.

Only facts that the host knows without asking a device; the values of slots are checked where they are (see `index`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from kv_pool.errors import AliasedRows, DeviceMismatch, DtypeMismatch, RowMismatch, SlotOutOfRange, WidthMismatch

__all__ = ["Store", "as_bits", "check_apart", "check_device", "check_index", "check_slot_values", "check_write"]

Store: TypeAlias = "tuple[str, torch.Tensor, torch.Tensor]"
"""Name of a component, its rows, and the cache that they go into."""


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view as int8 of dtypes that operators do not know: unsigned bytes and 8-bit floats. Others as they are."""
    known = tensor.element_size() > 1 or tensor.dtype == torch.int8
    return tensor if known else tensor.view(torch.int8)


def check_index(argument: str, slots: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse slots, or rows of requests, that are no list of one of some integer dtypes.

    Raises:
        RowMismatch: No tensor of one axis.
        DtypeMismatch: Another dtype.
    """
    if not isinstance(slots, torch.Tensor) or slots.ndim != 1:
        raise RowMismatch(
            argument,
            given=f"shape {tuple(slots.shape)}" if isinstance(slots, torch.Tensor) else type(slots).__name__,
            expected="a tensor of shape [tokens]",
            consequence="rows could not be told apart",
            remedy="flatten the slots to one a token",
        )
    if slots.dtype not in dtypes:
        raise DtypeMismatch(
            argument,
            given=slots.dtype,
            expected=" or ".join(str(dtype) for dtype in dtypes),
            consequence="a cast would wrap large slots or wait for the device",
            remedy="build the slots in that dtype (kv_pool.narrow_slots), or choose another writer",
        )


def check_device(argument: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse a tensor that is not where the pool is.

    Raises:
        DeviceMismatch: As said.
    """
    if tensor.device != device:
        raise DeviceMismatch(
            argument,
            given=tensor.device,
            expected=f"{device} (the pool's device)",
            consequence="the write would wait for a copy, and could not be captured",
            remedy="move it to the pool's device first",
        )


def check_write(slots: torch.Tensor, stores: Sequence[Store], slot_dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse a write that does not fit; see `Writer.write` for what fits."""
    check_index("slots", slots, slot_dtypes)
    for name, rows, cache in stores:
        if not isinstance(rows, torch.Tensor) or not isinstance(cache, torch.Tensor) or cache.ndim != 4:
            shapes = [list(own.shape) if isinstance(own, torch.Tensor) else type(own).__name__ for own in (rows, cache)]
            raise RowMismatch(
                name,
                given=f"{shapes[0]} for {shapes[1]}",
                expected="tensors of shape [tokens, heads, dims] for [pages, page_size, heads, dims]",
                consequence="rows could not be told apart",
                remedy="pass the rows of the step, and a layer of the pool",
            )
        if rows.ndim != 3 or rows.shape[1:] != cache.shape[2:]:
            raise WidthMismatch(
                name,
                given=f"shape {tuple(rows.shape)}",
                expected=f"[tokens, {cache.shape[2]}, {cache.shape[3]}] (heads, dims of the pool's {name})",
                consequence="the rows would be stored at wrong offsets",
                remedy="reshape or pad before the write; K and V have widths of their own",
            )
        if rows.shape[0] != slots.shape[0]:
            raise RowMismatch(
                name,
                given=f"{rows.shape[0]} rows",
                expected=f"{slots.shape[0]}, one a slot",
                consequence="some tokens would be lost or stored twice",
                remedy="pass one slot a row; padded rows name slot 0",
            )
        if rows.dtype != cache.dtype:
            raise DtypeMismatch(
                name,
                given=rows.dtype,
                expected=f"{cache.dtype} (the pool's {name})",
                consequence="a hidden cast would round differently on each backend",
                remedy=f"cast it with .to({cache.dtype}) before the write",
            )
    device = stores[0][2].device
    for name, tensor in (("slots", slots), *((name, rows) for name, rows, _ in stores)):
        check_device(name, tensor, device)


def check_apart(slots: torch.Tensor, stores: Sequence[Store]) -> None:
    """Refuse sources that share memory with the layer; outside `check_write`, which must stay traceable."""
    for name, tensor in (("slots", slots), *((name, rows) for name, rows, _ in stores)):
        for _, _, cache in stores:
            if _share_memory(tensor, cache):
                raise AliasedRows(
                    name,
                    given="a view of the pool's own memory",
                    expected="memory apart from the layer's K and V",
                    consequence="rows would be overwritten while they are read",
                    remedy="clone it first",
                )


def _share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the byte ranges of two tensors of one storage meet. Reads no values and no addresses."""
    if not first.numel() or not second.numel() or first.device != second.device:
        return False
    if first.untyped_storage()._cdata != second.untyped_storage()._cdata:
        return False
    (start, end), (begin, stop) = _span(first), _span(second)
    return start < stop and begin < end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last byte within the storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = int(tensor.storage_offset()), tensor.element_size()
    return start * size, (start + last + 1) * size


def check_slot_values(slots: torch.Tensor, num_slots: int, argument: str = "slots") -> None:
    """Refuse slots outside `0..num_slots-1`. Reads the values: for tensors in host memory only."""
    if not slots.numel():
        return
    low, high = int(slots.min()), int(slots.max())
    if low < 0 or high >= num_slots:
        raise SlotOutOfRange(
            argument,
            given=f"values from {low} to {high}",
            expected=f"values in 0..{num_slots - 1}",
            consequence="a negative slot would wrap around to the end of the pool, a large one lies outside it",
            remedy="use slots of allocated pages; padded rows name slot 0",
        )
