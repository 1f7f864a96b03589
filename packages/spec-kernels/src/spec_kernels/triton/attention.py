"""Owns paged attention as one Triton kernel with an online softmax; the contract is in `spec_kernels.attention`.

A program takes a request, a KV head and a block of query tokens with the heads that share it, and walks the pages that
they see: keys of a page lie side by side, so that loads are dense. Lengths are checked again here, because a replay
brings new ones. float32 products are not rounded to narrower formats.
"""

# Kernels are written in Triton's language, which has no types of Python's.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from itertools import accumulate

import torch
import triton
import triton.language as tl

from spec_kernels import tiling
from spec_kernels.attention_checks import AttentionExtras, CacheSizes
from spec_kernels.native import attention as native
from spec_kernels.paged_metadata import PagedAttentionMetadata, check_kv_lens

__all__ = ["paged_attention", "run"]

_LEAST, _MOST = 16, 64
"""Sides of a product that every compiler takes, and that keep enough programs busy."""


@triton.jit
def _keys_at(page, offset, dim, kv_head, kv_heads, page_size, DIMS: tl.constexpr, TILED: tl.constexpr):
    """Where dims (columns) of tokens (rows) of one page lie; pieces of 16 dims in tiled caches."""
    if TILED:
        piece = (page * kv_heads + kv_head) * (DIMS // 16) + dim // 16
        return (piece * page_size + offset) * 16 + dim % 16
    return ((page * page_size + offset) * kv_heads + kv_head) * DIMS + dim


@triton.jit
def _attention_kernel(
    query, query_rope, key, value, key_rope, table, mask, sinks, out, starts, q_lens, kv_lens,
    rows, blocks, tokens, pages, columns, group, kv_heads, page_size, scale, window, mask_row, mask_query, mask_token,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, SINKS: tl.constexpr, TILED: tl.constexpr,
    DIMS: tl.constexpr, VALUE_DIMS: tl.constexpr, ROPE: tl.constexpr, DIM_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr, ROPE_TILE: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    COMPUTE: tl.constexpr = tl.float64 if WIDE else tl.float32
    dim = tl.arange(0, DIM_TILE).to(tl.int64)
    value_dim = tl.arange(0, VALUE_TILE).to(tl.int64)
    rope_dim = tl.arange(0, ROPE_TILE).to(tl.int64)
    for work in range(tl.program_id(0), rows * kv_heads * blocks, tl.num_programs(0)):
        block = work % blocks
        kv_head = tl.full((), (work // blocks) % kv_heads, tl.int64)
        row = tl.full((), work // (blocks * kv_heads), tl.int64)
        q_len = tl.load(q_lens + row)
        kv_len = tl.load(kv_lens + row)
        if (kv_len > 0) & (block * BLOCK < q_len * group):
            each = block * BLOCK + tl.arange(0, BLOCK)
            token = each // group
            live = each < q_len * group
            place = (kv_head * tokens + tl.load(starts + row)) * group + each
            inside = live[:, None] & (dim < DIMS)[None, :]
            vector = tl.load(query + place[:, None] * DIMS + dim[None, :], mask=inside, other=0.0).to(COMPUTE) * scale
            if ROPE:
                inside = live[:, None] & (rope_dim < ROPE)[None, :]
                turned = tl.load(query_rope + place[:, None] * ROPE + rope_dim[None, :], mask=inside, other=0.0)
                turned = turned.to(COMPUTE) * scale
            end = kv_len
            last = tl.zeros((BLOCK,), tl.int32) + kv_len - 1
            if CAUSAL:
                last = kv_len - q_len + token
                end = kv_len - q_len + tl.minimum((block * BLOCK + BLOCK - 1) // group, q_len - 1) + 1
            begin = 0
            if WINDOWED:
                begin = tl.maximum(kv_len - q_len + (block * BLOCK) // group - window + 1, 0)
            top = tl.full((BLOCK,), float("-inf"), COMPUTE)
            total = tl.zeros((BLOCK,), COMPUTE)
            if SINKS:
                top = tl.load(sinks + kv_head * group + each % group, mask=live, other=0.0).to(COMPUTE)
                total = tl.full((BLOCK,), 1.0, COMPUTE)
            seen = tl.zeros((BLOCK,), tl.int32)
            gathered = tl.zeros((BLOCK, VALUE_TILE), COMPUTE)
            parts = tl.cdiv(page_size, KEYS)
            for piece in range((begin // page_size) * parts, tl.cdiv(end, page_size) * parts):
                offset = (piece % parts) * KEYS + tl.arange(0, KEYS)
                position = (piece // parts) * page_size + offset
                page = tl.load(table + row * columns + piece // parts).to(tl.int64)
                limit = tl.minimum(page_size, end - (piece // parts) * page_size)
                here = offset < tl.where((page >= 0) & (page < pages), limit, 0)
                deep = offset.to(tl.int64)[:, None]
                at = _keys_at(page, deep, dim[None, :], kv_head, kv_heads, page_size, DIMS, TILED)
                keys = tl.load(key + at, mask=here[:, None] & (dim < DIMS)[None, :], other=0.0).to(COMPUTE)
                scores = tl.dot(vector, tl.trans(keys), input_precision="ieee", out_dtype=COMPUTE)
                if ROPE:
                    at = _keys_at(page, deep, rope_dim[None, :], kv_head, kv_heads, page_size, ROPE, TILED)
                    keys = tl.load(key_rope + at, mask=here[:, None] & (rope_dim < ROPE)[None, :], other=0.0)
                    scores += tl.dot(turned, tl.trans(keys.to(COMPUTE)), input_precision="ieee", out_dtype=COMPUTE)
                visible = here[None, :] & (position[None, :] <= last[:, None])
                if WINDOWED:
                    visible = visible & (position[None, :] > last[:, None] - window)
                if MASKED:
                    where = row * mask_row + token[:, None].to(tl.int64) * mask_query
                    where += position[None, :].to(tl.int64) * mask_token
                    hidden = tl.load(mask + where, mask=visible & live[:, None], other=1)
                    visible = visible & (hidden == 0)
                scores = tl.where(visible, scores, float("-inf"))
                higher = tl.maximum(top, tl.max(scores, 1))
                base = tl.where(higher == float("-inf"), 0.0, higher)
                weights = tl.where(visible, tl.exp(scores - base[:, None]), 0.0)
                kept = tl.exp(top - base)
                at = _keys_at(page, deep, value_dim[None, :], kv_head, kv_heads, page_size, VALUE_DIMS, TILED)
                values = tl.load(value + at, mask=here[:, None] & (value_dim < VALUE_DIMS)[None, :], other=0.0)
                found = tl.dot(weights, values.to(COMPUTE), input_precision="ieee", out_dtype=COMPUTE)
                gathered = gathered * kept[:, None] + found
                total = total * kept + tl.sum(weights, 1)
                seen = tl.maximum(seen, tl.max(visible.to(tl.int32), 1))
                top = higher
            any_seen = seen > 0
            result = tl.where(any_seen[:, None], gathered / tl.where(any_seen, total, 1.0)[:, None], 0.0)
            inside = live[:, None] & (value_dim < VALUE_DIMS)[None, :]
            tl.store(out + place[:, None] * VALUE_DIMS + value_dim[None, :], result, mask=inside)


@torch.library.custom_op("spec_kernels::paged_attention_triton", mutates_args=(), schema=native.SCHEMA)
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope_cache: torch.Tensor | None = None,
    *,
    q_lens: list[int],
    kv_lens: list[int],
    scale: float,
    causal: bool,
    window: int | None = None,
) -> torch.Tensor:
    """See `spec_kernels.paged_attention`; a query of three axes is ragged."""
    sizes, values = CacheSizes.of(key_cache), CacheSizes.of(value_cache)
    columns = block_table.shape[1]
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        check_kv_lens([kv_len], columns=columns, page_size=sizes.page_size, q_len=q_len)
    shape = (*query.shape[:-1], values.dims)
    rows, longest = len(q_lens), max(q_lens, default=0)
    if not longest or not any(kv_lens) or not query.shape[-2]:
        return query.new_zeros(shape)
    starts = list(range(0, rows * query.shape[1], query.shape[1])) if query.ndim == 4 else [0, *accumulate(q_lens)][:-1]
    lengths = torch.tensor([starts, q_lens, kv_lens], dtype=torch.int32).to(query.device)
    group = query.shape[-2] // sizes.kv_heads
    rope = 0 if query_rope is None else query_rope.shape[-1]
    wide = query.dtype == torch.float64
    tiles = [max(_LEAST, triton.next_power_of_2(dims)) for dims in (sizes.dims, values.dims, rope)]
    block, keys = _tiles(group * longest, sizes.page_size, tiles, 8 if wide else 4)
    blocks = -(-group * longest // block)
    hidden = None if mask is None else mask.view(torch.uint8)
    packed = _by_kv_head(query, sizes.kv_heads)
    tokens = packed.shape[1]
    out = query.new_zeros((sizes.kv_heads, tokens, group, values.dims))
    _attention_kernel[tiling.grid(rows * sizes.kv_heads * blocks)](
        packed, packed if query_rope is None else _by_kv_head(query_rope, sizes.kv_heads), key_cache, value_cache,
        key_cache if key_rope_cache is None else key_rope_cache, block_table.contiguous(),
        block_table if hidden is None else hidden, packed if sinks is None else sinks.contiguous(), out, *lengths,
        rows, blocks, tokens, sizes.pages, columns, group, sizes.kv_heads, sizes.page_size, scale, window or 0,
        *((0, 0, 0) if hidden is None else hidden.stride()), CAUSAL=causal, WINDOWED=window is not None,
        MASKED=hidden is not None, SINKS=sinks is not None, TILED=sizes.tiled, DIMS=sizes.dims,
        VALUE_DIMS=values.dims, ROPE=rope, DIM_TILE=tiles[0], VALUE_TILE=tiles[1], ROPE_TILE=tiles[2], BLOCK=block,
        KEYS=keys, WIDE=wide,
    )  # fmt: skip
    return out.transpose(0, 1).reshape(shape)


paged_attention.register_fake(native.paged_attention_fake)


def _by_kv_head(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Queries of a KV head side by side, so that a program's rows are dense. Shape: [kv_heads, tokens, group, dims]."""
    return query.reshape(-1, kv_heads, query.shape[-2] // kv_heads, query.shape[-1]).transpose(0, 1).contiguous()


def _tiles(queries: int, page_size: int, tiles: list[int], itemsize: int) -> tuple[int, int]:
    """Query rows and keys of a program: powers of two, the most that on-chip memory holds, at least 16 of each."""
    dims, value_dims, rope = tiles
    best = (_LEAST, _LEAST)
    for block in (_LEAST, 2 * _LEAST, _MOST):
        for keys in (_LEAST, 2 * _LEAST, _MOST):
            held = block * (dims + rope + 2 * value_dims) + keys * (dims + rope + value_dims) + 3 * block * keys
            useful = (block == _LEAST or block < 2 * queries) and (keys == _LEAST or keys < 2 * page_size)
            if useful and held * itemsize <= tiling.MAX_TILE_BYTES:
                best = max(best, (block, keys))
    return best


def run(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: PagedAttentionMetadata,
    *,
    scale: float,
    causal: bool,
    fia: str,
    extras: AttentionExtras,
) -> torch.Tensor:
    """Backend entry of both ops; `fia` has been checked to be the default."""
    out: torch.Tensor = paged_attention(
        query, key_cache, value_cache, metadata.block_table, metadata.mask, extras.sinks, extras.query_rope,
        extras.key_rope_cache, q_lens=metadata.q_lens, kv_lens=metadata.kv_lens, scale=scale, causal=causal,
        window=extras.window,
    )  # fmt: skip
    return out
