"""npu_gather_pa_kv_cache, its functional form, and atb's npu_paged_cache_load: contiguous keys and values from pages.

This module owns the ops' refusals and the copy. It tests nothing for having been written.
"""

from __future__ import annotations

import torch

from .caches import block_ids, nz_by_token, nz_width
from .errors import DeviceFault
from .rules import declare, note, refuse

OP = "npu::npu_gather_pa_kv_cache"
OP_FUNCTIONAL = "npu::npu_gather_pa_kv_cache_functional"
OP_LOAD = "atb::npu_paged_cache_load"
OP_LOAD_OUT = "atb::npu_paged_cache_load.out"
_FAMILY = "npu_gather_pa_kv_cache[_functional], atb::npu_paged_cache_load"
_DOC = "ops-transformer, gather_pa_kv_cache/docs/aclnnGatherPaKvCache.md"
_DTYPES = (torch.float16, torch.bfloat16, torch.int8)
TOKEN_BYTES = 148 * 1024

declare(
    _FAMILY,
    _DOC,
    "test_kernels_paged.py",
    {
        "gather-pa-dtype": (
            "float16, bfloat16, int8; outputs of the caches' dtype",
            "cast outputs to the cache's dtype",
        ),
        "gather-pa-contiguous": ("contiguous tensors", "call .contiguous() on it; pass a cache itself"),
        "gather-pa-empty": ("no empty tensor", "skip the call"),
        "gather-pa-index-dtype": ("tables, lengths and offsets of dtype int32", "call .to(torch.int32) on it"),
        "gather-pa-index-shape": (
            "a table (requests, blocks), lengths (requests,), cumulative (requests + 1,), offsets (requests,)",
            "pass one row, length and offset a request",
        ),
        "gather-pa-cache": (
            "ND: caches (blocks, block_size, heads, dim) with outputs (tokens, heads, dim); NZ: (blocks, heads * dim / "
            "c0, block_size, c0) with outputs (tokens, heads * dim)",
            "reshape cache or output",
        ),
        "gather-pa-nz": ("NZ: c0 of 32 bytes", "use 16 elements for 2-byte dtypes, 32 for int8"),
        "gather-pa-token": ("at most 148 KiB a token", "split the heads"),
    },
)
note(
    _FAMILY,
    "as many output tokens as the lengths add up to",
    _DOC,
    "more lengths than tokens: a `DeviceFault` (507015); fewer: the rest is left alone: test_kernels_paged.py",
)
note(_FAMILY, "block ids within the cache", _DOC, "a `DeviceFault` (507015): test_kernels_paged.py")
note(
    _FAMILY,
    "seq_offset / block_size is the first entry of the table",
    _DOC,
    "as written: an offset that starts no block is rounded down: test_kernels_paged.py",
)
note(
    "atb::npu_paged_cache_load",
    "NZ form: neither cumulative lengths nor starts",
    "CANN 9.0, ATB API, PagedCacheLoadOperation",
    "torch_npu's door passes ND caches only; caches of other forms are refused by `gather-pa-cache`",
)
note(
    _FAMILY,
    "int64 tables and lengths, and more dtypes, on 950",
    _DOC,
    "the narrower list of 910B and 910C holds on every chip",
)


def _check_part(op: str, name: str, cache: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Checks one cache and its output, and views the cache by token."""
    tensors = [(f"{name}_cache", cache)] + ([] if out is None else [(name, out)])
    for argument, tensor in tensors:
        if tensor.dtype not in _DTYPES or tensor.dtype != cache.dtype:
            refuse(op, "gather-pa-dtype", argument, tensor.dtype)
        if not tensor.is_contiguous():
            refuse(op, "gather-pa-contiguous", argument, f"strides {tensor.stride()} of {tuple(tensor.shape)}")
        if tensor.numel() == 0:
            refuse(op, "gather-pa-empty", argument, f"shape {tuple(tensor.shape)}")
    if cache.dim() != 4:
        refuse(op, "gather-pa-cache", f"{name}_cache", f"shape {tuple(cache.shape)}")
    if out is not None and out.dim() == 2:
        if cache.size(3) != nz_width(cache.dtype):
            refuse(op, "gather-pa-nz", f"{name}_cache", f"c0 = {cache.size(3)} for {cache.dtype}")
        cache = nz_by_token(cache)
        fits = cache.size(2) * cache.size(3) == out.size(1)
    else:
        fits = out is None or cache.shape[2:] == out.shape[1:]
    if not fits:
        given = None if out is None else tuple(out.shape)
        refuse(op, "gather-pa-cache", f"{name}_cache", f"shape {tuple(cache.shape)} for an output of {given}")
    if cache.size(2) * cache.size(3) * cache.element_size() > TOKEN_BYTES:
        refuse(op, "gather-pa-token", f"{name}_cache", f"{cache.size(2) * cache.size(3) * cache.element_size()} bytes")
    return cache


def _spans(
    op: str, table: torch.Tensor, lens: torch.Tensor, offset: torch.Tensor | None, cumulative: bool, lens_name: str
) -> list[tuple[int, int]]:
    """Length and first token of each request."""
    named = [("block_tables", table), (lens_name, lens)] + ([] if offset is None else [("seq_offset", offset)])
    for argument, tensor in named:
        if tensor.dtype != torch.int32:
            refuse(op, "gather-pa-index-dtype", argument, tensor.dtype)
    wanted = (table.size(0) + cumulative,)
    if table.dim() != 2 or tuple(lens.shape) != wanted:
        given = f"{tuple(lens.shape)} for a table of {tuple(table.shape)}, cumulative {cumulative}"
        refuse(op, "gather-pa-index-shape", lens_name, given)
    if offset is not None and tuple(offset.shape) != (table.size(0),):
        refuse(op, "gather-pa-index-shape", "seq_offset", f"{tuple(offset.shape)} for {table.size(0)} requests")
    sizes = (lens.diff() if cumulative else lens).tolist()
    starts = [0] * len(sizes) if offset is None else offset.tolist()
    return list(zip(sizes, starts, strict=True))


def _gather(
    op: str,
    view: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    spans: list[tuple[int, int]],
    out: torch.Tensor,
) -> None:
    size = view.size(1)
    done = 0
    for row, (length, start) in enumerate(spans):
        if length <= 0:
            continue
        if done + length > out.size(0):
            detail = (
                f"request {row} ends at token {done + length}, the output has {out.size(0)}; nothing more is written"
            )
            raise DeviceFault(op, detail)
        ids = block_ids(op, table, row, start // size, -(-length // size), cache, "block_tables")
        tokens = view[torch.tensor(ids)].flatten(0, 1)[:length]
        out[done : done + length] = tokens.reshape(length, *out.shape[1:])
        done += length


def npu_gather_pa_kv_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    seq_offset: torch.Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Copies the tokens of every request from the pages of its table row, one request after the other.

    Args:
        key_cache: ND: Shape: [blocks, block_size, heads, dim]; NZ: [blocks, heads * dim / c0, block_size, c0].
        value_cache: likewise, with a width of its own.
        block_tables: Shape: [requests, blocks]; int32.
        seq_lens: Shape: [requests], or [requests + 1] when cumulative; int32.
        key: ND: Shape: [tokens, heads, dim]; NZ: [tokens, heads * dim]. *Mutated*.
        value: likewise. *Mutated*.
        seq_offset: None, or first token of each request, rounded down to its block. Shape: [requests]; int32.
        is_seq_lens_cumsum: whether ``seq_lens`` are running sums that start with 0.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        ops-transformer, aclnnGatherPaKvCache.md.
    """
    _run(OP, key_cache, value_cache, block_tables, seq_lens, key, value, seq_offset, is_seq_lens_cumsum)


def _run(
    op: str,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offset: torch.Tensor | None,
    cumulative: bool,
) -> None:
    views = [_check_part(op, "key", key_cache, key), _check_part(op, "value", value_cache, value)]
    spans = _spans(op, table, lens, offset, cumulative, "context_lens" if op.startswith("atb") else "seq_lens")
    for view, cache, out in zip(views, (key_cache, value_cache), (key, value), strict=True):
        _gather(op, view, cache, table, spans, out)


def npu_gather_pa_kv_cache_functional(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    seq_offset: torch.Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same into copies of ``key`` and ``value``, which are returned; see ``npu_gather_pa_kv_cache``."""
    out = key.clone(), value.clone()
    _run(OP_FUNCTIONAL, key_cache, value_cache, block_tables, seq_lens, *out, seq_offset, is_seq_lens_cumsum)
    return out


def npu_paged_cache_load_out(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    seq_starts: torch.Tensor | None = None,
    cumsum: bool = False,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``npu_gather_pa_kv_cache`` of ND caches under atb's names. *Mutates* and returns ``key`` and ``value``."""
    _run(OP_LOAD_OUT, key_cache, value_cache, block_table, context_lens, key, value, seq_starts, cumsum)
    return key, value


def npu_paged_cache_load(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    seq_starts: torch.Tensor | None = None,
    cumsum: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same into new tensors [sum of lengths, heads, dim]; see ``npu_paged_cache_load_out``."""
    for name, cache in (("key", key_cache), ("value", value_cache)):
        _check_part(OP_LOAD, name, cache, None)
    spans = _spans(OP_LOAD, block_table, context_lens, seq_starts, cumsum, "context_lens")
    tokens = sum(length for length, _ in spans)
    outs = [cache.new_empty(tokens, *cache.shape[2:]) for cache in (key_cache, value_cache)]
    for cache, out in zip((key_cache, value_cache), outs, strict=True):
        _gather(OP_LOAD, cache, cache, block_table, spans, out)
    return outs[0], outs[1]


KERNELS = {
    OP: npu_gather_pa_kv_cache,
    OP_FUNCTIONAL: npu_gather_pa_kv_cache_functional,
    OP_LOAD: npu_paged_cache_load,
    OP_LOAD_OUT: npu_paged_cache_load_out,
}
