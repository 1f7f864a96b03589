"""Owns the checks that both forms of paged attention share: sizes, dtypes, devices, lengths, and what goes together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from spec_kernels._checks import FLOATS, check_tensor
from spec_kernels.errors import DeviceError, DtypeError, LengthError, MetadataError, ShapeError
from spec_kernels.paged_metadata import PagedAttentionMetadata, check_kv_lens

__all__ = ["AttentionExtras", "CacheSizes", "check_call", "check_extras", "check_mask", "check_uniform"]


_PIECE = 16


class CacheSizes(NamedTuple):
    """Sizes of a paged cache, in either form.

    Attributes:
        pages: Pages.
        page_size: Tokens in a page.
        kv_heads: KV heads.
        dims: Dims of a head.
        tiled: Whether dims lie in pieces of 16 (NZ).
    """

    pages: int
    page_size: int
    kv_heads: int
    dims: int
    tiled: bool

    @staticmethod
    def of(cache: torch.Tensor) -> CacheSizes:
        """Read them off a cache of four axes, or of five when tiled."""
        if cache.ndim == 5:
            pages, kv_heads, pieces, page_size, piece = cache.shape
            return CacheSizes(pages, page_size, kv_heads, pieces * piece, True)
        pages, page_size, kv_heads, dims = cache.shape
        return CacheSizes(pages, page_size, kv_heads, dims, False)


@dataclass(frozen=True, eq=False)
class AttentionExtras:
    """What not every model has.

    Attributes:
        window: Tokens that a query token sees, itself included; None for all.
        sinks: A logit of each head that takes part in the softmax and adds nothing. Shape: [heads].
        query_rope: Rope part of the queries, beside the query. Shape: that of the query with `rope` dims.
        key_rope_cache: Rope part of the keys. Shape: [pages, page_size, kv_heads, rope].
    """

    window: int | None = None
    sinks: torch.Tensor | None = None
    query_rope: torch.Tensor | None = None
    key_rope_cache: torch.Tensor | None = None


def check_extras(query: torch.Tensor, key_cache: torch.Tensor, extras: AttentionExtras, *, causal: bool) -> None:
    """Check what not every model has."""
    window = extras.window
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1 or not causal):
        raise LengthError(
            "window",
            given=f"{window} with causal={causal}",
            expected="a whole number of at least 1, and causal=True",
            consequence="a query token would see nothing, or tokens on both sides",
            remedy="count the query token itself; with a mask, let the mask hide what lies before the window",
        )
    if extras.sinks is not None:
        check_tensor("sinks", extras.sinks, (int(query.shape[-2]),), dtypes=FLOATS, device=query.device)
    if (extras.query_rope is None) != (extras.key_rope_cache is None):
        raise ShapeError(
            "query_rope, key_rope_cache",
            given="one of them",
            expected="both or neither",
            consequence="positions would be left out of the scores",
            remedy="pass both rope parts",
        )
    if extras.query_rope is not None and extras.key_rope_cache is not None:
        rope, dtypes = int(extras.query_rope.shape[-1]), (query.dtype,)
        check_tensor("query_rope", extras.query_rope, (*query.shape[:-1], rope), dtypes=dtypes, device=query.device)
        shape = (*key_cache.shape[:3], rope)
        if key_cache.ndim == 5:
            shape = (*key_cache.shape[:2], rope // _PIECE, *key_cache.shape[3:])
        check_tensor("key_rope_cache", extras.key_rope_cache, shape, dtypes=dtypes, device=query.device)
        _check_contiguous("key_rope_cache", extras.key_rope_cache)


def check_call(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: PagedAttentionMetadata,
    page_size: int,
    *,
    axes: tuple[str, ...],
) -> None:
    """Check query, caches and table; `axes` spells the query's."""
    cache_axes: tuple[str, ...] = ("pages", "page_size", "kv_heads", "dims")
    if key_cache.ndim == 5:
        cache_axes = ("pages", "kv_heads", "pieces", "page_size", str(_PIECE))
    named = (("query", query, axes), ("key_cache", key_cache, cache_axes), ("value_cache", value_cache, cache_axes))
    for name, tensor, spelled in named:
        if tensor.ndim != len(spelled) or (tensor.ndim == 5 and tensor.shape[4] != _PIECE):
            raise ShapeError(
                name,
                given=f"shape {tuple(tensor.shape)}",
                expected=f"[{', '.join(spelled)}]",
                consequence="heads and tokens could not be told apart",
                remedy="add or remove axes of size 1",
            )
        if tensor.dtype != query.dtype or not tensor.dtype.is_floating_point:
            raise DtypeError(
                name,
                given=tensor.dtype,
                expected=f"{query.dtype} like the query, floating point",
                consequence="a hidden cast would round differently on each backend",
                remedy="cast before the call",
            )
    table = metadata.block_table
    if table.dtype != torch.int32 or table.ndim != 2:
        raise DtypeError(
            "metadata.block_table",
            given=f"{table.dtype} of shape {tuple(table.shape)}",
            expected="int32 of shape [rows, columns]",
            consequence="page ids would be misread",
            remedy="build it with build_paged_metadata",
        )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        _check_contiguous(name, cache)
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache), ("metadata.block_table", table)):
        if tensor.device != query.device:
            raise DeviceError(
                name,
                given=tensor.device,
                expected=f"{query.device} like the query",
                consequence="the op would wait for a copy, and could not be captured",
                remedy="move it first",
            )
    heads, dims = query.shape[-2:]
    pages, size, kv_heads, key_dims, _ = CacheSizes.of(key_cache)
    if CacheSizes.of(value_cache)[:3] != (pages, size, kv_heads):
        raise ShapeError(
            "value_cache",
            given=f"shape {tuple(value_cache.shape)}",
            expected=f"{pages} pages of {size} tokens of {kv_heads} heads, like key_cache",
            consequence="K and V of a token would lie in different places",
            remedy="pass both caches of one layer",
        )
    if size != page_size or key_dims != dims or not kv_heads or heads % kv_heads or not heads:
        raise ShapeError(
            "query, key_cache, page_size",
            given=f"page {size}, {kv_heads} KV heads of {key_dims} for {heads} heads of {dims}",
            expected=f"page {page_size}, equal dims, heads a multiple of KV heads",
            consequence="tokens or heads would be paired wrongly",
            remedy="pass the pool's page size and the local heads",
        )
    rows = int(query.shape[0]) if len(axes) == 4 else int(table.shape[0])
    if not table.shape[0] == len(metadata.q_lens) == len(metadata.kv_lens) == rows:
        raise ShapeError(
            "metadata",
            given=f"{table.shape[0]} table rows, {len(metadata.q_lens)} q_lens, {len(metadata.kv_lens)} kv_lens",
            expected=f"{rows} of each, one a row of the query",
            consequence="a request would attend to another's pages",
            remedy="pad the metadata to the rows of the query",
        )


def _check_contiguous(name: str, cache: torch.Tensor) -> None:
    if not cache.is_contiguous():
        raise ShapeError(
            name,
            given=f"strides {cache.stride()}",
            expected="a contiguous cache",
            consequence="pages are read at fixed distances; a copy would be made each step",
            remedy="pass a layer's view of the pool's storage",
        )


def check_uniform(query: torch.Tensor, metadata: PagedAttentionMetadata, page_size: int) -> None:
    """Check the lengths of a batch whose rows all have the query's width."""
    width, table = int(query.shape[1]), metadata.block_table
    if any(length != width for length in metadata.q_lens):
        raise LengthError(
            "metadata.q_lens",
            given=metadata.q_lens,
            expected=f"{width} in every row, the width of the query",
            consequence="rows of different query lengths need a ragged layout",
            remedy="use ragged_paged_attention",
        )
    check_kv_lens(metadata.kv_lens, columns=table.shape[1], page_size=page_size, q_len=width)


def check_mask(
    query: torch.Tensor, metadata: PagedAttentionMetadata, mask: torch.Tensor, page_size: int, causal: bool
) -> None:
    """Check a mask that says alone what a query token sees."""
    if causal:
        raise MetadataError(
            "metadata.mask, causal",
            given="a mask and causal=True",
            expected="causal=False with a mask",
            consequence="causality would count from lengths that are upper bounds, and backends would differ",
            remedy="let the mask hide what a query does not see (exact_length_mask does), and pass causal=False",
        )
    rows, width = query.shape[:2]
    wanted = (rows, width, metadata.block_table.shape[1] * page_size)
    if tuple(mask.shape) != wanted or mask.dtype != torch.bool:
        raise ShapeError(
            "metadata.mask",
            given=f"{mask.dtype} of shape {tuple(mask.shape)}",
            expected=f"torch.bool of shape {list(wanted)}: rows, query tokens, columns * page_size",
            consequence="a query token would see what another one sees",
            remedy="build it with exact_length_mask, or in that shape",
        )
    if mask.device != query.device:
        raise DeviceError(
            "metadata.mask",
            given=mask.device,
            expected=f"{query.device} like the query",
            consequence="the op would wait for a copy, and could not be captured",
            remedy="move it first",
        )
