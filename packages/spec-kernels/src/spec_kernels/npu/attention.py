"""Owns paged attention over torch_npu's fused infer attention, versions 1 and 2.

The operator is called directly, never inside a custom operator: torch_npu's graph capture sees only direct calls, and
rebinds a length list only if it was passed as a keyword at capture. Caches are passed as `[pages, page_size, kv_heads *
dims]`, the one paged form that BSND accepts, tiled ones as they are. It does not choose layouts (see `fia_rules`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu

from spec_kernels.attention_checks import AttentionExtras, CacheSizes
from spec_kernels.capabilities import detect
from spec_kernels.errors import CaptureError, UnsupportedByOp
from spec_kernels.exact_mask import exact_length_mask
from spec_kernels.fia_rules import FiaPlan, FiaShape, plan_fia
from spec_kernels.paged_metadata import PagedAttentionMetadata

__all__ = ["run", "run_ragged"]

_MASK_SIZE = 2048
_masks: dict[torch.device, torch.Tensor] = {}


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
    """Backend entry of `spec_kernels.paged_attention`; arguments have been checked there."""
    rows, width, heads, dims = query.shape
    shape = _shape(query, key_cache, value_cache, metadata, fia, extras, width=width, rows=rows)
    plan = plan_fia(shape, causal=causal, masked=metadata.mask is not None, cann=detect().cann)
    if not rows or not width:
        return query.new_empty((rows, width, heads, shape.value_dims))
    mask = None
    if metadata.mask is not None:
        mask = metadata.mask.unsqueeze(1)
    elif plan.full_mask:
        mask = _window_mask(metadata, width, shape.page_size, extras.window)
    packed, rope = query.contiguous(), extras.query_rope
    q_lens = list(metadata.q_lens)
    if plan.layout == "TND":
        packed = packed.view(rows * width, heads, dims)
        rope = None if rope is None else rope.reshape(rows * width, heads, -1)
        q_lens = metadata.q_ends
    out = _call(packed, rope, key_cache, value_cache, metadata, plan, mask, q_lens, scale, fia, extras)
    return out.view(rows, width, heads, -1)


def run_ragged(
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
    """Backend entry of `spec_kernels.ragged_paged_attention`: packed where the operator takes it, else row by row."""
    out = query.new_zeros((*query.shape[:2], CacheSizes.of(value_cache).dims))
    live = [row for row, length in enumerate(metadata.q_lens) if length]
    if torch_npu.npu.is_current_stream_capturing():  # another row may be empty at replay
        _check_whole(metadata, query.shape[0])
        live = list(range(len(metadata.q_lens)))
    if not live:
        return out
    q_lens, kv_lens = [metadata.q_lens[row] for row in live], [metadata.kv_lens[row] for row in live]
    table = metadata.block_table
    if len(live) < len(metadata.q_lens):
        table = table.index_select(0, torch.tensor(live, device=table.device))
    kept = PagedAttentionMetadata(table, q_lens, kv_lens)
    shape = _shape(query, key_cache, value_cache, kept, fia, extras, width=max(q_lens), rows=len(live), ragged=True)
    try:
        plan = plan_fia(shape, causal=causal, cann=detect().cann)
    except UnsupportedByOp:
        return _row_by_row(out, query, key_cache, value_cache, kept, scale=scale, causal=causal, fia=fia, extras=extras)
    tokens = sum(q_lens)
    rope = None if extras.query_rope is None else extras.query_rope[:tokens].contiguous()
    packed = query[:tokens].contiguous()
    ends = kept.q_ends
    out[:tokens] = _call(packed, rope, key_cache, value_cache, kept, plan, None, ends, scale, fia, extras)
    return out


def _check_whole(metadata: PagedAttentionMetadata, tokens: int) -> None:
    if sum(metadata.q_lens) != tokens:
        raise CaptureError(
            "metadata.q_lens",
            given=f"{sum(metadata.q_lens)} query tokens, inside graph capture",
            expected=f"{tokens}, the token rows of the query, here and at every replay",
            consequence="the rows left over would keep what an earlier replay left",
            remedy="give them to a padded row of KV length 0, which gives zeros",
        )


def _row_by_row(
    out: torch.Tensor,
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
    if torch_npu.npu.is_current_stream_capturing():
        raise CaptureError(
            "ragged_paged_attention",
            given="sizes for which the operator takes one request a call, inside graph capture",
            expected="sizes that TND takes, or one query length",
            consequence="each request would be a record of its own, with lengths to update one by one",
            remedy="pad to one width and use paged_attention",
        )
    start = 0
    for row, (q_len, kv_len) in enumerate(zip(metadata.q_lens, metadata.kv_lens, strict=True)):
        end = start + q_len
        rope = None if extras.query_rope is None else extras.query_rope[start:end].unsqueeze(0)
        one = PagedAttentionMetadata(metadata.block_table[row : row + 1], [q_len], [kv_len])
        own = AttentionExtras(extras.window, extras.sinks, rope, extras.key_rope_cache)
        part = query[start:end].unsqueeze(0)
        out[start:end] = run(
            part, key_cache, value_cache, one, scale=scale, causal=causal, fia=fia, extras=own
        ).squeeze(0)
        start = end
    return out


def _shape(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: PagedAttentionMetadata,
    fia: str,
    extras: AttentionExtras,
    *,
    width: int,
    rows: int,
    ragged: bool = False,
) -> FiaShape:
    pages, page_size, kv_heads, dims, tiled = CacheSizes.of(key_cache)
    return FiaShape(
        rows,
        width,
        query.shape[-2],
        kv_heads,
        dims,
        CacheSizes.of(value_cache).dims,
        page_size,
        pages,
        query.dtype,
        longest=max(metadata.kv_lens, default=0),
        blocks=sum(-(-length // page_size) for length in metadata.kv_lens),
        rope=0 if extras.query_rope is None else extras.query_rope.shape[-1],
        window=extras.window is not None,
        sinks=extras.sinks is not None,
        tiled=tiled,
        ragged=ragged,
        fia=fia,
    )


def _call(
    query: torch.Tensor,
    query_rope: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: PagedAttentionMetadata,
    plan: FiaPlan,
    mask: torch.Tensor | None,
    q_lens: list[int],
    scale: float,
    fia: str,
    extras: AttentionExtras,
) -> torch.Tensor:
    """One call of the operator. Heads beside rope parts are padded with zeros to a power of two, and cut off again."""
    heads, sizes = query.shape[-2], CacheSizes.of(key_cache)
    options: dict[str, Any] = {
        "atten_mask": _causal_mask(query.device) if plan.needs_mask else mask,
        "block_table": metadata.block_table,
        "num_key_value_heads": sizes.kv_heads,
        "input_layout": plan.layout,
        "sparse_mode": plan.sparse_mode,
        "block_size": sizes.page_size,
    }
    if plan.sparse_mode == 4:  # a band counts the tokens before the query's own
        options.update(pre_tokens=(extras.window or 1) - 1, next_tokens=0)
    padded = heads
    if query_rope is not None and extras.key_rope_cache is not None:
        padded = 1 << (heads - 1).bit_length()
        query, query_rope = _pad_heads(query, padded), _pad_heads(query_rope, padded)
        options.update(query_rope=query_rope, key_rope=_flat(extras.key_rope_cache))
    if extras.sinks is not None:
        options["learnable_sink"] = extras.sinks.to(torch.bfloat16)
    keys, values = _flat(key_cache), _flat(value_cache)
    kv_lens = list(metadata.kv_lens)
    if fia == "v1":
        out = torch_npu.npu_fused_infer_attention_score(
            query, keys, values, actual_seq_lengths=q_lens, actual_seq_lengths_kv=kv_lens, num_heads=padded,
            scale=scale, **options,
        )[0]  # fmt: skip
    else:
        out = torch_npu.npu_fused_infer_attention_score_v2(
            query, keys, values, actual_seq_qlen=q_lens, actual_seq_kvlen=kv_lens, num_query_heads=padded,
            softmax_scale=scale, **options,
        )[0]  # fmt: skip
    attended: torch.Tensor = out
    return attended if padded == heads else attended[..., :heads, :].contiguous()


def _pad_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    if tensor.shape[-2] == heads:
        return tensor.contiguous()
    return torch.nn.functional.pad(tensor, (0, 0, 0, heads - tensor.shape[-2]))


def _window_mask(metadata: PagedAttentionMetadata, width: int, page_size: int, window: int | None) -> torch.Tensor:
    """A window for rows of one query token, from host lengths. Shape: [rows, 1, 1, tokens]."""
    table = metadata.block_table
    if torch_npu.npu.is_current_stream_capturing():
        raise CaptureError(
            "window",
            given="a window for one query token a row, inside graph capture, in sizes that TND does not take",
            expected="a mask that reads lengths on the device",
            consequence="the window of the captured lengths would be replayed",
            remedy="pass metadata.mask = exact_length_mask(lengths, window=...) and causal=False",
        )
    lens = torch.tensor(metadata.kv_lens, dtype=torch.int64).to(table.device)
    mask = exact_length_mask(lens, q_len=width, columns=table.shape[1], page_size=page_size, window=window)
    return mask.unsqueeze(1)


def _flat(cache: torch.Tensor) -> torch.Tensor:
    return cache if cache.ndim == 5 else cache.view(cache.shape[0], cache.shape[1], -1)


def _causal_mask(device: torch.device) -> torch.Tensor:
    """The operator's fixed mask, True above the diagonal, one a device; it outlives every graph that captured it."""
    mask = _masks.get(device)
    if mask is None:
        if torch_npu.npu.is_current_stream_capturing():
            raise CaptureError(
                "paged_attention",
                given="a first call for more than one query token inside graph capture",
                expected="one call before capture",
                consequence="the mask would live in the graph's memory pool and be overwritten",
                remedy="run the step once eagerly (warm-up), then capture",
            )
        ones = torch.ones((_MASK_SIZE, _MASK_SIZE), dtype=torch.bool)
        mask = _masks[device] = ones.triu(1).to(device)
    return mask
