"""Owns the contract of `paged_attention`: what it computes, what it refuses, and which update key each backend rebinds.

The same checks run before every backend. It does not own how a backend computes, and it does not write the cache.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, cast

import torch

from spec_kernels.dispatch import BackendName, choose, load
from spec_kernels.errors import BackendError, DeviceError, DtypeError, LengthError, MetadataError, ShapeError
from spec_kernels.paged_metadata import PagedAttentionMetadata, check_kv_lens

__all__ = ["FiaVersion", "paged_attention", "paged_attention_update_keys"]

FiaVersion: TypeAlias = Literal["v1", "v2"]

_UPDATE_KEYS: dict[tuple[BackendName, FiaVersion], dict[str, str]] = {
    ("native", "v2"): {"kv_lens": "kv_lens"},
    ("npu", "v2"): {"actual_seq_kvlen": "kv_lens"},
    ("npu", "v1"): {"actual_seq_lengths_kv": "kv_lens"},
}


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: PagedAttentionMetadata,
    *,
    scale: float,
    page_size: int,
    causal: bool = True,
    backend: BackendName | None = None,
    fia: FiaVersion = "v2",
) -> torch.Tensor:
    """Attend from each request's last query tokens to its paged K and V.

    Query token `i` of a request with query width `q` and KV length `n` stands at position `n - q + i` and, when
    `causal`, sees positions up to its own. `metadata.mask` replaces that rule: a query token then sees what lies below
    `n` and is not hidden. Scores and sums are computed in float32 (float64 for float64 inputs),
    whatever the dtype.

    Args:
        query: Shape: [rows, q, heads, dims].
        key_cache: Shape: [pages, page_size, kv_heads, dims]; contiguous; dtype of the query.
        value_cache: Shape: [pages, page_size, kv_heads, value_dims]; contiguous; dtype of the query.
        metadata: Block table and lengths; every query length equals `q`.
        scale: Factor on the scores, usually `dims ** -0.5`.
        page_size: Tokens in a page, as in the caches.
        causal: Whether a query sees only positions up to its own; False with a mask.
        backend: Insist on a backend; the first eligible one when `None`.
        fia: Version of the device's fused operator; for the `npu` backend only.

    Returns:
        Shape: [rows, q, heads, value_dims]; dtype of the query.

    Mutates: nothing.

    Padding: rows with KV length 0, and query tokens that see nothing, give zeros, whatever their table says. Zero rows
        give an empty result.

    Raises:
        BackendError: The backend is not eligible here.
        ShapeError: Sizes do not fit together.
        DtypeError: Dtypes differ, or the device's operator does not take them (float32 on npu).
        DeviceError: Tensors lie on different devices.
        LengthError: A length does not fit the query.
        MetadataError: A mask together with `causal`, which would say twice what a query sees.
        TableCapacityError: A KV length exceeds the table.
        UnsupportedByOp: (npu) The operator documents that it refuses these sizes.
        CaptureError: (npu) The first call for q > 1 happens inside graph capture.

    Under graph capture on npu the operator is called directly, with its lengths as lists, so that torch_npu's capture
    records it; see `paged_attention_update_keys` for the key to update.
    """
    chosen = choose("paged_attention", query.device, backend)
    if (chosen, fia) not in _UPDATE_KEYS:
        raise BackendError(
            "fia",
            given=f"{fia} with backend {chosen}",
            expected="v1 or v2 with npu; the default otherwise",
            consequence="the version would be ignored, and with it the update key",
            remedy="leave fia out",
        )
    _check(query, key_cache, value_cache, metadata, page_size)
    if metadata.mask is not None:
        _check_mask(query, metadata, metadata.mask, page_size, causal)
    run = load("paged_attention", chosen)
    return cast(
        torch.Tensor, run(query, key_cache, value_cache, metadata, scale=float(scale), causal=bool(causal), fia=fia)
    )


def paged_attention_update_keys(backend: BackendName, *, fia: FiaVersion = "v2") -> dict[str, str]:
    """Return which captured argument must be rebound before each replay, and from which metadata field.

    Args:
        backend: The backend that was captured.
        fia: Version of the fused operator that was captured.

    Returns:
        Update key to name of the `PagedAttentionMetadata` field, e.g. `{"actual_seq_kvlen": "kv_lens"}`.

    Raises:
        BackendError: The backend has no such captured call.
    """
    keys = _UPDATE_KEYS.get((backend, fia))
    if keys is None:
        raise BackendError(
            "backend, fia",
            given=(backend, fia),
            expected=f"one of {sorted(_UPDATE_KEYS)}",
            consequence="an update key that the captured call ignores leaves old lengths in place",
            remedy="pass what paged_attention was called with",
        )
    return dict(keys)


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: PagedAttentionMetadata,
    page_size: int,
) -> None:
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        if tensor.ndim != 4:
            raise ShapeError(
                name,
                given=f"shape {tuple(tensor.shape)}",
                expected="four axes",
                consequence="heads and tokens could not be told apart",
                remedy="query is [rows, q, heads, dims], caches are [pages, page_size, kv_heads, dims]",
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
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache), ("metadata.block_table", table)):
        if tensor.device != query.device:
            raise DeviceError(
                name,
                given=tensor.device,
                expected=f"{query.device} like the query",
                consequence="the op would wait for a copy, and could not be captured",
                remedy="move it first",
            )
    rows, width, heads, dims = query.shape
    pages, size, kv_heads, key_dims = key_cache.shape
    if value_cache.shape[:3] != (pages, size, kv_heads):
        raise ShapeError(
            "value_cache",
            given=f"shape {tuple(value_cache.shape)}",
            expected=f"[{pages}, {size}, {kv_heads}, value_dims] like key_cache",
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
    if not table.shape[0] == len(metadata.q_lens) == len(metadata.kv_lens) == rows:
        raise ShapeError(
            "metadata",
            given=f"{table.shape[0]} table rows, {len(metadata.q_lens)} q_lens, {len(metadata.kv_lens)} kv_lens",
            expected=f"{rows} of each, one a row of the query",
            consequence="a request would attend to another's pages",
            remedy="pad the metadata to the rows of the query",
        )
    if any(length != width for length in metadata.q_lens):
        raise LengthError(
            "metadata.q_lens",
            given=metadata.q_lens,
            expected=f"{width} in every row, the width of the query",
            consequence="rows of different query lengths need a ragged layout",
            remedy="group requests by query length, or run one request a call",
        )
    check_kv_lens(metadata.kv_lens, columns=table.shape[1], page_size=page_size, q_len=width)


def _check_mask(
    query: torch.Tensor, metadata: PagedAttentionMetadata, mask: torch.Tensor, page_size: int, causal: bool
) -> None:
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
