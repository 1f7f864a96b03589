"""Reading the key and value rows of one request, dense or through the block table, and faulting as a device would.

This module owns the gather, the range check of block ids and the test for rows that were never written. It computes
no scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import DeviceFault
from .faults import layer_of, place, poisoned_rows
from .fia_call import FiaCall, heads_first
from .fia_requests import Request
from .fia_visibility import Visible


@dataclass(frozen=True)
class Rows:
    """Keys and values of one request.

    Attributes:
        key: Shape: [kv_heads, kv_len, head_dim (+ rope)]; the dtype of the call; any strides.
        value: Shape: [kv_heads, kv_len, value_dim].
    """

    key: torch.Tensor
    value: torch.Tensor


def _pages(call: FiaCall, request: Request) -> list[int]:
    table = call.block_table
    assert table is not None
    pages: list[int] = table[request.row, : -(-request.kv_len // call.block_size)].tolist()
    blocks = call.key.size(0)
    for index, page in enumerate(pages):
        if not 0 <= page < blocks:
            layer = layer_of(call.key)
            slot = page * call.block_size
            raise DeviceFault(
                call.op,
                f"request {request.row} reads page {page} (slots from {slot}; block_table[{request.row}, {index}]), "
                f"outside the cache{place(layer)} of {blocks} pages",
                layer=layer,
                page=page,
                slot=slot,
            )
    return pages


def _gather(cache: torch.Tensor, index: torch.Tensor, kv_heads: int, kv_len: int) -> torch.Tensor:
    """Rows of the indexed pages, heads first. Shape: [kv_heads, kv_len, dims]."""
    blocks = cache.index_select(0, index)
    if cache.dim() == 5:
        return blocks.permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)[:, :kv_len]
    if cache.dim() == 3:
        return blocks.view(-1, kv_heads, cache.size(-1) // kv_heads)[:kv_len].transpose(0, 1)
    return blocks.transpose(0, 1).flatten(1, 2)[:, :kv_len]


def _check_written(
    call: FiaCall, request: Request, see: Visible, rows: torch.Tensor, name: str, pages: list[int]
) -> bool:
    """Faults on a never-written row that a query token sees; returns True when there are such rows that none sees."""
    bad = poisoned_rows(rows)
    if bad is None:
        return False
    tokens = bad.any(0).nonzero().flatten()
    seen = tokens[see.sees(tokens)]
    if seen.numel() == 0:
        return True
    token = int(seen[0])
    head = int(bad[:, token].nonzero()[0])
    layer = layer_of(call.key if name.startswith("key") else call.value)
    where = f"token {token}, head {head} of request {request.row}; {seen.numel()} such tokens"
    if not pages:
        detail = f"attention reads {name}{place(layer)} where it was never written: {where}"
        raise DeviceFault(call.op, detail, layer=layer)
    page, offset = pages[token // call.block_size], token % call.block_size
    slot = page * call.block_size + offset
    raise DeviceFault(
        call.op,
        f"attention reads {name}{place(layer)} in page {page}, slot {slot} (offset {offset}), which was never written: "
        f"{where}",
        layer=layer,
        page=page,
        slot=slot,
    )


def read_rows(call: FiaCall, request: Request, see: Visible) -> Rows:
    """Keys (rope joined) and values of one request.

    Args:
        call: the checked call.
        request: a request with at least one key/value token.
        see: what its query tokens see.

    Returns:
        The rows. Never-written rows that no query token sees are zero.

    Raises:
        DeviceFault: a block id outside the cache, or a never-written row that a query token sees.
    """
    sources = [("key", call.key), ("value", call.value)]
    if call.key_rope is not None:
        sources.append(("key_rope", call.key_rope))
    pages: list[int] = []
    parts = []
    if call.paged:
        pages = _pages(call, request)
        index = torch.tensor(pages, dtype=torch.int64)
        for _, source in sources:
            parts.append(_gather(source, index, call.kv_heads, request.kv_len))
    else:
        for _, source in sources:
            rows = heads_first(source, call.layout.query, call.kv_heads)
            rows = rows if call.layout.packed else rows[request.row]
            parts.append(rows[:, request.kv_start : request.kv_start + request.kv_len])
    for number, (name, _) in enumerate(sources):
        if _check_written(call, request, see, parts[number], name, pages):
            hidden = poisoned_rows(parts[number])
            assert hidden is not None
            parts[number] = parts[number].masked_fill(hidden.unsqueeze(-1), 0)
    key = torch.cat((parts[0], parts[2]), -1) if len(parts) == 3 else parts[0]
    return Rows(key, parts[1])
