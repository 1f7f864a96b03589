"""Operators that touch only some rows of a tensor, and which: a cache that one stream reads and another one fills at
other pages is no race. An operator that is not here touches its arguments whole.

Pages of attention caches are whole: which slots of a page an operator reads is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

__all__ = ["REFINED", "UNMARKED_WRITES", "Refine", "Rows"]

Get: TypeAlias = Callable[[str], Any]

Refine: TypeAlias = "Callable[[Get], dict[str, Rows]]"

# Operators that write arguments which their schema does not mark.
UNMARKED_WRITES: dict[str, tuple[str, ...]] = {
    "npu::npu_fused_infer_attention_score": ("out",),
    "npu::npu_fused_infer_attention_score_v2": ("out",),
    "npu::npu_kv_rmsnorm_rope_cache": ("k_cache", "ckv_cache"),
    "npu::cache_loc_assign": ("token_pool",),
    "npu::cache_loc_update": ("out_cache_loc",),
    "npu::causal_conv1d": ("conv_states",),
    "npu::apply_token_bitmask": ("logits",),
    "npu::build_tree_kernel_efficient": (
        "tree_mask",
        "positions",
        "retrive_index",
        "retrive_next_token",
        "retrive_next_sibling",
    ),
}


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor.

    Attributes:
        index: which; any shape, any integer dtype; negative ones count from the end, those outside the tensor are the
            kernel's to refuse.
        leading: how many leading dimensions a row number runs over, 1 or 2.
    """

    index: torch.Tensor
    leading: int = 1

    def runs(self, extent: int) -> Iterator[tuple[int, int]]:
        """First row and number of rows of each run of consecutive rows, ascending."""
        rows = {row if row >= 0 else row + extent for row in self.index.reshape(-1).tolist()}
        first = count = 0
        for row in sorted(rows):
            if not 0 <= row < extent:
                continue
            if count and row == first + count:
                count += 1
                continue
            if count:
                yield first, count
            first, count = row, 1
        if count:
            yield first, count


def _slots(cache: torch.Tensor, slots: torch.Tensor, page_size: int) -> Rows:
    """Token slots of a paged cache: slots where they lie one behind the other, else their pages."""
    slots = slots[slots >= 0]
    if cache.dim() > 2 and cache.shape[1] == page_size and cache.stride(0) == cache.shape[1] * cache.stride(1):
        return Rows(slots, leading=2)
    return Rows(slots // page_size)


def _pages(table: torch.Tensor, lengths: Any, page_size: int) -> Rows:
    """Pages that the first `lengths` tokens of each row lie in; all of the table when the lengths are not known."""
    known = lengths.reshape(-1).tolist() if isinstance(lengths, torch.Tensor) else lengths
    if not known or len(known) != table.shape[0]:
        return Rows(table)
    return Rows(torch.cat([row[: -(-length // page_size)] for row, length in zip(table, known, strict=True)]))


# --- aten ---


def _index(get: Get) -> dict[str, Rows]:
    indices = get("indices")
    if not indices or indices[0] is None:
        return {}
    first = indices[0]
    if first.dtype in (torch.bool, torch.uint8):
        return {"self": Rows(first.flatten(1).any(1).nonzero() if first.dim() > 1 else first.nonzero())}
    return {"self": Rows(first)}


def _index_dim(get: Get) -> dict[str, Rows]:
    return {"self": Rows(get("index"))} if get("dim") == 0 else {}


def _embedding(get: Get) -> dict[str, Rows]:
    return {"weight": Rows(get("indices"))}


# --- NPU operators ---

_KEY_VALUE = ("key_cache", "value_cache")


def _scatter_nd(get: Get) -> dict[str, Rows]:
    indices, target = get("indices"), get("input")
    flat = indices.reshape(-1, indices.shape[-1])
    if flat.shape[1] == 2 and target.stride(0) == target.shape[1] * target.stride(1):
        return {"input": Rows(flat[:, 0] * target.shape[1] + flat[:, 1], leading=2)}
    return {"input": Rows(flat[:, 0])}


def _reshape_and_cache(get: Get) -> dict[str, Rows]:
    slots = get("slot_indices")
    caches = {name: get(name) for name in _KEY_VALUE}
    return {name: _slots(cache, slots, cache.shape[1]) for name, cache in caches.items() if cache is not None}


def _scatter_pa(get: Get) -> dict[str, Rows]:
    if get("compress_lens") is not None:
        return {}
    slots, nz = get("slot_mapping"), get("cache_mode") in (None, "PA_NZ") and get("key_cache").dim() == 4
    caches = {name: get(name) for name in _KEY_VALUE}
    return {
        name: _slots(cache, slots, cache.shape[2 if nz and cache.shape[3] in (16, 32) else 1])
        for name, cache in caches.items()
        if cache is not None
    }


def _gather_pa(get: Get) -> dict[str, Rows]:
    whole = get("is_seq_lens_cumsum") or get("seq_offset") is not None
    lengths = None if whole else get("seq_lens")
    return {name: _pages(get("block_tables"), lengths, get(name).shape[1]) for name in _KEY_VALUE}


def _paged(caches: tuple[str, ...], table: str, lengths: str) -> Refine:
    """Operators that read the pages of a block table; the second dimension of a cache is the page's size."""

    def refine(get: Get) -> dict[str, Rows]:
        pages, known = get(table), get(lengths)
        if pages is None:
            return {}
        there = {name: get(name) for name in caches}
        return {name: _pages(pages, known, cache.shape[1]) for name, cache in there.items() if cache is not None}

    return refine


def _fused_attention(lengths: str) -> Refine:
    def refine(get: Get) -> dict[str, Rows]:
        table = get("block_table")
        if table is None or table.dim() != 2:
            return {}
        names = ["key", "value", *(["key_rope"] if get("key_rope") is not None else [])]
        return dict.fromkeys(names, _pages(table, get(lengths), get("block_size") or 1))

    return refine


def _rope_cache(get: Get) -> dict[str, Rows]:
    if not str(get("cache_mode") or "Norm").startswith("PA"):
        return {}
    return {name: Rows(get("index") // get(name).shape[1]) for name in ("k_cache", "ckv_cache")}


# By namespace and name without overload.
REFINED: dict[str, Refine] = {
    "aten::index": _index,
    "aten::_unsafe_index": _index,
    "aten::index_put_": _index,
    "aten::_index_put_impl_": _index,
    "aten::index_select": _index_dim,
    "aten::index_copy_": _index_dim,
    "aten::index_add_": _index_dim,
    "aten::index_fill_": _index_dim,
    "aten::embedding": _embedding,
    "npu::npu_scatter_nd_update_": _scatter_nd,
    "atb::_npu_reshape_and_cache": _reshape_and_cache,
    "atb::_npu_reshape_and_cache_siso": _reshape_and_cache,
    "npu::npu_scatter_pa_kv_cache": _scatter_pa,
    "npu::npu_scatter_pa_cache": _scatter_pa,
    "npu::npu_gather_pa_kv_cache": _gather_pa,
    "npu::npu_gather_pa_kv_cache_functional": _gather_pa,
    "atb::npu_paged_cache_load": _paged(_KEY_VALUE, "block_table", "context_lens"),
    "atb::_npu_paged_attention": _paged(_KEY_VALUE, "block_table", "context_lens"),
    "atb::_npu_paged_attention_mla": _paged(_KEY_VALUE, "block_table", "context_lens"),
    "atb::_npu_flash_attention_qlens": _paged(_KEY_VALUE, "block_table", "context_lens"),
    "atb::npu_multi_head_latent_attention": _paged(("ctkv", "k_rope"), "block_tables", "context_lens"),
    "npu::npu_lightning_indexer": _paged(("key",), "block_table", "actual_seq_lengths_key"),
    "npu::npu_quant_lightning_indexer": _paged(("key", "key_dequant_scale"), "block_table", "actual_seq_lengths_key"),
    "npu::npu_kv_quant_sparse_flash_attention": _paged(("key",), "block_table", "actual_seq_lengths_kv"),
    "npu::npu_sparse_flash_attention": _paged(("key", "value", "key_rope"), "block_table", "actual_seq_lengths_kv"),
    "npu::npu_fused_infer_attention_score": _fused_attention("actual_seq_lengths_kv"),
    "npu::npu_fused_infer_attention_score_v2": _fused_attention("actual_seq_kvlen"),
    "_C_ascend::npu_lightning_indexer": _paged(("key",), "block_table", "actual_seq_lengths_key"),
    "_C_ascend::npu_lightning_indexer_quant": _paged(
        ("key", "key_dequant_scale"), "block_table", "actual_seq_lengths_key"
    ),
    "_C_ascend::npu_sparse_flash_attention": _paged(
        ("key", "value", "key_rope"), "block_table", "actual_seq_lengths_kv"
    ),
    "_C_ascend::npu_kv_quant_sparse_flash_attention": _paged(("key", "value"), "block_table", "actual_seq_lengths_kv"),
    "npu::npu_kv_rmsnorm_rope_cache": _rope_cache,
    "npu::npu_kv_rmsnorm_rope_cache_v2": _rope_cache,
}
