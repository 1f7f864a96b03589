"""Paged caches in memory: their two forms, slots of tokens, and faults of slots outside.

This module owns the arithmetic from a slot to a place in a cache [blocks, block_size, ...] (ND) or
[blocks, width / c0, block_size, c0] (NZ: 32 bytes of the width, then the next token). It refuses no call.
"""

from __future__ import annotations

import torch

from .errors import DeviceFault
from .faults import layer_of, place

NZ_BYTES = 32
"""Bytes of one token that lie together in an NZ cache."""


def nz_width(dtype: torch.dtype) -> int:
    """Elements of one token that lie together in an NZ cache of this dtype."""
    return NZ_BYTES // dtype.itemsize


def nz_by_token(cache: torch.Tensor) -> torch.Tensor:
    """Views an NZ cache by token.

    Args:
        cache: Shape: [blocks, heads * dim / c0, block_size, c0].

    Returns:
        A view. Shape: [blocks, block_size, heads * dim / c0, c0].
    """
    return cache.permute(0, 2, 1, 3)


def check_slots(op: str, slots: torch.Tensor, cache: torch.Tensor, page_size: int, name: str) -> None:
    """Faults on a slot past the end of a cache.

    Args:
        op: full op name.
        slots: Shape: [tokens] int64; negative ones are the caller's business.
        cache: the cache, blocks first.
        page_size: tokens in a block.
        name: argument that holds the slots.

    Raises:
        DeviceFault: a slot past the end.
    """
    total = cache.size(0) * page_size
    if slots.numel() == 0 or int(slots.max()) < total:
        return
    token = int((slots >= total).nonzero()[0])
    slot, layer = int(slots[token]), layer_of(cache)
    raise DeviceFault(
        op,
        f"{name}[{token}] = {slot} (page {slot // page_size}) lies outside the cache{place(layer)} of {cache.size(0)} "
        "pages; nothing was written",
        layer=layer,
        page=slot // page_size,
        slot=slot,
    )


def write_slots(by_token: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes rows at slots; negative slots are skipped.

    Args:
        by_token: Shape: [blocks, block_size, *item]; any strides. *Mutated*.
        slots: Shape: [tokens] int64, below blocks * block_size.
        rows: Shape: [tokens, ...] with the elements of an item each; dtype of the cache.
    """
    if slots.numel() == 0:
        return
    if bool((slots < 0).any()):
        keep = slots >= 0
        slots, rows = slots[keep], rows[keep]
    rows = rows.reshape(-1, *by_token.shape[2:])
    if by_token.is_contiguous():
        by_token.view(-1, *by_token.shape[2:]).index_copy_(0, slots, rows)
    else:
        size = by_token.size(1)
        by_token[slots // size, slots % size] = rows


def block_ids(
    op: str, table: torch.Tensor, row: int, first: int, count: int, cache: torch.Tensor, name: str
) -> list[int]:
    """Block ids of one request, checked.

    Args:
        op: full op name.
        table: Shape: [requests, blocks]; an integer dtype.
        row: the request.
        first: first entry of its row.
        count: number of entries.
        cache: the cache, blocks first.
        name: argument that holds the table.

    Returns:
        ``count`` block ids.

    Raises:
        DeviceFault: the row is too short, or an id lies outside the cache.
    """
    ids: list[int] = table[row, first : first + count].tolist()
    layer = layer_of(cache)
    if len(ids) < count:
        detail = f"request {row} needs entries {first} to {first + count - 1} of {name}, which is {table.size(1)} wide"
        raise DeviceFault(op, detail, layer=layer)
    for index, page in enumerate(ids):
        if not 0 <= page < cache.size(0):
            where = f"{name}[{row}, {first + index}]"
            detail = (
                f"request {row} reads page {page} ({where}), outside the cache{place(layer)} of {cache.size(0)} pages"
            )
            raise DeviceFault(op, detail, layer=layer, page=page)
    return ids
