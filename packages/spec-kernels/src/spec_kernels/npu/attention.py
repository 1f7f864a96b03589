"""Owns paged attention over torch_npu's fused infer attention, versions 1 and 2.

The operator is called directly, never inside a custom operator: torch_npu's graph capture sees only direct calls, and
rebinds a length list only if it was passed as a keyword at capture. Caches are passed as `[pages, page_size, kv_heads *
dims]`, the one paged form that BSND accepts. It does not choose layouts (see `fia_rules`).
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch_npu

from spec_kernels.errors import CaptureError, ShapeError
from spec_kernels.fia_rules import FiaShape, plan_fia
from spec_kernels.paged_metadata import PagedAttentionMetadata

__all__ = ["run"]

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
) -> torch.Tensor:
    """Backend entry of `spec_kernels.paged_attention`; arguments have been checked there."""
    rows, width, heads, dims = query.shape
    pages, page_size, kv_heads, value_dims = value_cache.shape
    longest = max(metadata.kv_lens, default=0)
    blocks = sum(-(-length // page_size) for length in metadata.kv_lens)
    shape = FiaShape(
        rows, width, heads, kv_heads, dims, value_dims, page_size, pages, query.dtype, longest=longest, blocks=blocks
    )
    plan = plan_fia(shape, causal=causal, masked=metadata.mask is not None)
    if not rows or not width:
        return query.new_empty((rows, width, heads, value_dims))
    keys, values = _flat("key_cache", key_cache), _flat("value_cache", value_cache)
    mask = _causal_mask(query.device) if plan.needs_mask else None
    if metadata.mask is not None:
        mask = metadata.mask.unsqueeze(1)
    packed = query.contiguous()
    q_lens = list(metadata.q_lens)
    if plan.layout == "TND":
        packed = packed.view(rows * width, heads, dims)
        q_lens = list(accumulate(q_lens))
    kv_lens = list(metadata.kv_lens)
    if fia == "v1":
        out = torch_npu.npu_fused_infer_attention_score(
            packed,
            keys,
            values,
            atten_mask=mask,
            actual_seq_lengths=q_lens,
            actual_seq_lengths_kv=kv_lens,
            block_table=metadata.block_table,
            num_heads=heads,
            num_key_value_heads=kv_heads,
            scale=scale,
            input_layout=plan.layout,
            sparse_mode=plan.sparse_mode,
            block_size=page_size,
        )[0]
    else:
        out = torch_npu.npu_fused_infer_attention_score_v2(
            packed,
            keys,
            values,
            atten_mask=mask,
            actual_seq_qlen=q_lens,
            actual_seq_kvlen=kv_lens,
            block_table=metadata.block_table,
            num_query_heads=heads,
            num_key_value_heads=kv_heads,
            softmax_scale=scale,
            input_layout=plan.layout,
            sparse_mode=plan.sparse_mode,
            block_size=page_size,
        )[0]
    attended: torch.Tensor = out.view(rows, width, heads, value_dims)
    return attended


def _flat(name: str, cache: torch.Tensor) -> torch.Tensor:
    if not cache.is_contiguous():
        raise ShapeError(
            name,
            given=f"strides {cache.stride()}",
            expected="a contiguous cache",
            consequence="the operator reads pages at fixed distances; a copy would be made each step",
            remedy="pass a layer's view of the pool's storage",
        )
    return cache.view(cache.shape[0], cache.shape[1], -1)


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
