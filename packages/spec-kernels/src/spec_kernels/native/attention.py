"""Owns paged attention in plain torch, as the custom operator `spec_kernels::paged_attention`.

Lengths are keyword arguments of the operator, so that a recorded call can be replayed with others under the key
`kv_lens`. Values read from `block_table` are page ids; nothing multiplies them, so int32 is wide enough. It does not
check shapes (see `spec_kernels.attention`); lengths are checked again here, because a replay brings new ones.
"""

from __future__ import annotations

import torch

from spec_kernels.paged_metadata import PagedAttentionMetadata, check_kv_lens

__all__ = ["paged_attention", "run"]

_SCORE_ELEMENTS = 1 << 22
"""Scores at a time: 16 MiB in float32."""


@torch.library.custom_op(
    "spec_kernels::paged_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor? mask=None, *, "
    "int[] q_lens, int[] kv_lens, float scale, bool causal) -> Tensor",
)
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    q_lens: list[int],
    kv_lens: list[int],
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """See `spec_kernels.paged_attention`; the first `q_lens[row]` queries of a row are live, the others give zeros."""
    rows, width, heads, _ = query.shape
    page_size = key_cache.shape[1]
    check_kv_lens(kv_lens, columns=block_table.shape[1], page_size=page_size, q_len=max(q_lens, default=width))
    out = query.new_zeros((rows, width, heads, value_cache.shape[3]))
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if not q_len or not kv_len:
            continue
        pages = block_table[row, : -(-kv_len // page_size)]
        keys = key_cache.index_select(0, pages).flatten(0, 1)[:kv_len]
        values = value_cache.index_select(0, pages).flatten(0, 1)[:kv_len]
        hidden = None if mask is None else mask[row, :q_len, :kv_len]
        out[row, :q_len] = _attend(query[row, :q_len], keys, values, scale, causal, hidden)
    return out


@paged_attention.register_fake
def _paged_attention_fake(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    q_lens: list[int],
    kv_lens: list[int],
    scale: float,
    causal: bool,
) -> torch.Tensor:
    return query.new_empty((query.shape[0], query.shape[1], query.shape[2], value_cache.shape[3]))


def run(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: PagedAttentionMetadata,
    *,
    scale: float,
    causal: bool,
    fia: str,
) -> torch.Tensor:
    """Backend entry; `fia` has been checked to be the default."""
    out: torch.Tensor = paged_attention(
        query,
        key_cache,
        value_cache,
        metadata.block_table,
        metadata.mask,
        q_lens=metadata.q_lens,
        kv_lens=metadata.kv_lens,
        scale=scale,
        causal=causal,
    )
    return out


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    causal: bool,
    hidden: torch.Tensor | None,
) -> torch.Tensor:
    """One request; query heads that share a KV head are folded into the token axis, so K and V are never repeated.

    Queries go in blocks that bound the scores; a block looks no further than its last query sees. The softmax is
    written out because torch's fused attention takes a row of NaN scores for a masked one: here NaN stays NaN.
    """
    q_len, heads, dims = query.shape
    kv_len, kv_heads, _ = keys.shape
    group = heads // kv_heads
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = query.to(compute).view(q_len, kv_heads, group, dims).permute(1, 2, 0, 3)
    keys = keys.to(compute).permute(1, 2, 0)
    values = values.to(compute).permute(1, 0, 2)
    masked = causal and q_len > 1
    step = max(1, _SCORE_ELEMENTS // (heads * kv_len))
    blocks = []
    for start in range(0, q_len, step):
        end = min(start + step, q_len)
        seen = kv_len - q_len + end if masked else kv_len
        scores = torch.bmm(grouped[:, :, start:end].reshape(kv_heads, -1, dims), keys[:, :, :seen]).mul_(scale)
        if masked:
            by_query = scores.view(kv_heads, group, end - start, seen)
            by_query.masked_fill_(_hidden(end - start, seen, query.device), float("-inf"))
        if hidden is not None:
            scores.view(kv_heads, group, end - start, seen).masked_fill_(hidden[start:end], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        if hidden is not None:  # who sees nothing attends to nothing
            blind = hidden[start:end].all(-1, keepdim=True)
            weights.view(kv_heads, group, end - start, seen).masked_fill_(blind, 0.0)
        result = torch.bmm(weights, values[:, :seen])
        blocks.append(result.view(kv_heads, group, end - start, -1).permute(2, 0, 1, 3))
    return torch.cat(blocks).reshape(q_len, heads, -1).to(query.dtype)


def _hidden(q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
    """Which keys queries do not see that end where the keys end. Shape: [q_len, kv_len]; dtype bool."""
    return torch.ones((q_len, kv_len), dtype=torch.bool, device=device).triu(kv_len - q_len + 1)
