"""Owns paged attention in plain torch, as the operators `spec_kernels::paged_attention` and `ragged_paged_attention`.

Lengths are keyword arguments of the operator, so that a recorded call can be replayed with others under the key
`kv_lens`. Values read from `block_table` are page ids; nothing multiplies them, so int32 is wide enough. It does not
check shapes (see `spec_kernels.attention`); lengths are checked again here, because a replay brings new ones.
"""

from __future__ import annotations

import torch

from spec_kernels.attention_checks import AttentionExtras, CacheSizes
from spec_kernels.paged_metadata import PagedAttentionMetadata, check_kv_lens

__all__ = ["SCHEMA", "paged_attention", "paged_attention_fake", "ragged_paged_attention", "run"]

_SCORE_ELEMENTS = 1 << 22
"""Scores at a time: 16 MiB in float32."""


SCHEMA = (
    "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor? mask=None, "
    "Tensor? sinks=None, Tensor? query_rope=None, Tensor? key_rope_cache=None, *, "
    "int[] q_lens, int[] kv_lens, float scale, bool causal, int? window=None) -> Tensor"
)


@torch.library.custom_op("spec_kernels::paged_attention", mutates_args=(), schema=SCHEMA)
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
    """See `spec_kernels.paged_attention`; the first `q_lens[row]` queries of a row are live, the others give zeros."""
    width, page_size = query.shape[1], CacheSizes.of(key_cache).page_size
    check_kv_lens(kv_lens, columns=block_table.shape[1], page_size=page_size, q_len=max(q_lens, default=width))
    out = query.new_zeros((*query.shape[:3], CacheSizes.of(value_cache).dims))
    caches = (key_cache, value_cache, key_rope_cache)
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if q_len and kv_len:
            rope = None if query_rope is None else query_rope[row, :q_len]
            hidden = None if mask is None else mask[row, :q_len, :kv_len]
            out[row, :q_len] = _attend(
                query[row, :q_len], rope, caches, block_table[row], kv_len, scale, causal, window, sinks, hidden
            )
    return out


@paged_attention.register_fake
def paged_attention_fake(
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
    """Shape and dtype of the result of either op, on any backend."""
    return query.new_empty((*query.shape[:-1], CacheSizes.of(value_cache).dims))


@torch.library.custom_op("spec_kernels::ragged_paged_attention", mutates_args=(), schema=SCHEMA)
def ragged_paged_attention(
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
    """See `spec_kernels.ragged_paged_attention`; `mask` is None."""
    out = query.new_zeros((*query.shape[:2], CacheSizes.of(value_cache).dims))
    caches, page_size = (key_cache, value_cache, key_rope_cache), CacheSizes.of(key_cache).page_size
    start = 0
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        check_kv_lens([kv_len], columns=block_table.shape[1], page_size=page_size, q_len=q_len)
        end = start + q_len
        if q_len and kv_len:
            rope = None if query_rope is None else query_rope[start:end]
            out[start:end] = _attend(
                query[start:end], rope, caches, block_table[row], kv_len, scale, causal, window, sinks, None
            )
        start = end
    return out


ragged_paged_attention.register_fake(paged_attention_fake)


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
    """Backend entry of both ops, by the query's axes; `fia` has been checked to be the default."""
    op = paged_attention if query.ndim == 4 else ragged_paged_attention
    out: torch.Tensor = op(
        query,
        key_cache,
        value_cache,
        metadata.block_table,
        metadata.mask,
        extras.sinks,
        extras.query_rope,
        extras.key_rope_cache,
        q_lens=metadata.q_lens,
        kv_lens=metadata.kv_lens,
        scale=scale,
        causal=causal,
        window=extras.window,
    )
    return out


def _attend(
    query: torch.Tensor,
    query_rope: torch.Tensor | None,
    caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    table: torch.Tensor,
    kv_len: int,
    scale: float,
    causal: bool,
    window: int | None,
    sinks: torch.Tensor | None,
    hidden: torch.Tensor | None,
) -> torch.Tensor:
    """One request; query heads that share a KV head are folded into the token axis, so K and V are never repeated.

    Queries go in blocks that bound the scores; a block looks no further than its last query sees, and no page before
    the first window is gathered. The softmax is written out because torch's fused attention takes a row of NaN scores
    for a masked one: here NaN stays NaN.
    """
    q_len, heads, _ = query.shape
    keys, values, rope = (
        None if cache is None else _gather(cache, table, kv_len, _first_seen(q_len, kv_len, window)) for cache in caches
    )
    assert keys is not None and values is not None
    if query_rope is not None and rope is not None:
        query, keys = torch.cat((query, query_rope), -1), torch.cat((keys, rope), -1)
    kv_len, kv_heads, dims = keys.shape  # from here on the tokens before the first window do not exist
    group = heads // kv_heads
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = (query.to(compute) * scale).view(q_len, kv_heads, group, dims).permute(1, 2, 0, 3)
    keys = keys.to(compute).permute(1, 2, 0)
    values = values.to(compute).permute(1, 0, 2)
    masked = causal and (q_len > 1 or window is not None)
    step = max(1, _SCORE_ELEMENTS // (heads * kv_len))
    blocks = []
    for start in range(0, q_len, step):
        end = min(start + step, q_len)
        seen = kv_len - q_len + end if masked else kv_len
        scores = torch.bmm(grouped[:, :, start:end].reshape(kv_heads, -1, dims), keys[:, :, :seen])
        by_query = scores.view(kv_heads, group, end - start, seen)
        if masked:
            _hide(by_query, window)
        if hidden is not None:
            by_query.masked_fill_(hidden[start:end], float("-inf"))
        weights = _softmax(by_query, sinks)
        if hidden is not None:  # who sees nothing attends to nothing
            blind = hidden[start:end].all(-1, keepdim=True)
            weights.masked_fill_(blind, 0.0)
        result = torch.bmm(weights.reshape(kv_heads, -1, seen), values[:, :seen])
        blocks.append(result.view(kv_heads, group, end - start, -1).permute(2, 0, 1, 3))
    return torch.cat(blocks).reshape(q_len, heads, -1).to(query.dtype)


def _first_seen(q_len: int, kv_len: int, window: int | None) -> int:
    return 0 if window is None else max(0, kv_len - q_len - window + 1)


def _gather(cache: torch.Tensor, table: torch.Tensor, kv_len: int, first: int) -> torch.Tensor:
    """Tokens `first..kv_len` of a request. Shape: [kv_len - first, kv_heads, dims]."""
    page_size = CacheSizes.of(cache).page_size
    start = first // page_size
    pages = cache.index_select(0, table[start : -(-kv_len // page_size)])
    if cache.ndim == 5:  # pieces of 16 dims come after the tokens
        pages = pages.permute(0, 3, 1, 2, 4).flatten(3)
    tokens = pages.flatten(0, 1)
    return tokens[first - start * page_size : kv_len - start * page_size]


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Over the last axis. Shape: [kv_heads, group, queries, keys]; a sink takes its share and is dropped."""
    if sinks is None:
        return torch.softmax(scores, -1)
    kv_heads, group, queries, _ = scores.shape
    extra = sinks.to(scores.dtype).view(kv_heads, group, 1, 1).expand(-1, -1, queries, -1)
    return torch.softmax(torch.cat((scores, extra), -1), -1)[..., :-1].clone()


def _hide(scores: torch.Tensor, window: int | None) -> None:
    """Hide what queries do not see that end where the keys end. Shape: [kv_heads, group, queries, keys]."""
    queries, keys = scores.shape[2:]
    ones = torch.ones((queries, queries), dtype=torch.bool, device=scores.device)
    scores[..., keys - queries :].masked_fill_(ones.triu(1), float("-inf"))
    if window is not None:
        older = torch.ones((queries, keys), dtype=torch.bool, device=scores.device).tril(keys - queries - window)
        scores.masked_fill_(older, float("-inf"))
