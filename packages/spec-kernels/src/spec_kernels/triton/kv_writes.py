"""Owns KV writes as a Triton kernel over bytes; see `spec_kernels.write_kv`."""

# Kernels are written in Triton's language, which has no types of Python's.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels._custom import filling_op
from spec_kernels.tiling import grid, tile

__all__ = ["write_kv"]


@triton.jit
def _write_kernel(
    rows, cache, slots, num_valid, tokens, total, page_size, width, piece, LIMITED: tl.constexpr, TILE: tl.constexpr
):
    pieces = width // piece
    tiles = tl.cdiv(width, TILE)
    for work in range(tl.program_id(0), tokens * tiles, tl.num_programs(0)):
        token = tl.full((), work // tiles, tl.int64)
        slot = tl.load(slots + token).to(tl.int64)
        live = (slot >= 0) & (slot < total)
        if LIMITED:
            live = live & (token < tl.load(num_valid).to(tl.int64))
        column = ((work % tiles) * TILE + tl.arange(0, TILE)).to(tl.int64)
        place = ((slot // page_size) * pieces + column // piece) * page_size + slot % page_size
        inside = live & (column < width)
        value = tl.load(rows + token * width + column, mask=inside, other=0)
        tl.store(cache + place * piece + column % piece, value, mask=inside)


@filling_op("write_kv_triton", "key_cache", "value_cache")
def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    num_valid: torch.Tensor | None,
    tiled: bool,
) -> None:
    """See `spec_kernels.write_kv`."""
    page_size = key_cache.shape[2 if tiled else 1]
    packed = slots.contiguous()
    for rows, cache in ((key, key_cache), (value, value_cache)):
        given = rows.contiguous().view(torch.uint8).view(rows.shape[0], -1)
        tokens, width = given.shape
        size = tile(min(width, 1024), itemsize=8)
        _write_kernel[grid(tokens * -(-width // size))](
            given, cache.view(torch.uint8), packed, packed if num_valid is None else num_valid, tokens,
            cache.shape[0] * page_size, page_size, width, 16 * cache.element_size() if tiled else width,
            LIMITED=num_valid is not None, TILE=size,
        )  # fmt: skip
