"""Owns the contract of `paged_attention`: what it computes, what it refuses, and which update key each backend rebinds.

The same checks run before every backend. It does not own how a backend computes, and it does not write the cache.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, cast

import torch

from spec_kernels.attention_checks import AttentionExtras, check_call, check_extras, check_mask, check_uniform
from spec_kernels.dispatch import BackendName, choose, load
from spec_kernels.errors import BackendError, LengthError, MetadataError
from spec_kernels.paged_metadata import PagedAttentionMetadata, check_kv_lens

__all__ = ["FiaVersion", "paged_attention", "paged_attention_update_keys", "ragged_paged_attention"]

FiaVersion: TypeAlias = Literal["v1", "v2"]

_UPDATE_KEYS: dict[tuple[BackendName, FiaVersion], dict[str, str]] = {
    ("native", "v2"): {"kv_lens": "kv_lens"},
    ("triton", "v2"): {"kv_lens": "kv_lens"},
    ("npu", "v2"): {"actual_seq_kvlen": "kv_lens"},
    ("npu", "v1"): {"actual_seq_lengths_kv": "kv_lens"},
}
_QUERY_KEYS: dict[tuple[BackendName, FiaVersion], dict[str, str]] = {
    ("native", "v2"): {"q_lens": "q_lens"},
    ("triton", "v2"): {"q_lens": "q_lens"},
    ("npu", "v2"): {"actual_seq_qlen": "q_ends"},
    ("npu", "v1"): {"actual_seq_lengths": "q_ends"},
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
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope_cache: torch.Tensor | None = None,
    backend: BackendName | None = None,
    fia: FiaVersion = "v2",
) -> torch.Tensor:
    """Attend from each request's last query tokens to its paged K and V.

    Query token `i` of a request with query width `q` and KV length `n` stands at position `n - q + i` and, when
    `causal`, sees positions up to its own. `metadata.mask` replaces that rule: a query token then sees what lies below
    `n` and is not hidden. With a window of `w` a query token sees exactly `w` tokens, its own and the `w - 1` before
    it, or all there are. Rope parts add their product to the scores. Scores and sums are computed in float32 (float64
    for float64 inputs), whatever the dtype.

    Args:
        query: Shape: [rows, q, heads, dims].
        key_cache: Shape: [pages, page_size, kv_heads, dims], or tiled (NZ) [pages, kv_heads, dims / 16, page_size, 16];
            contiguous; dtype of the query.
        value_cache: Likewise with value_dims, in the form of the keys; contiguous; dtype of the query.
        metadata: Block table and lengths; every query length equals `q`.
        scale: Factor on the scores, usually `dims ** -0.5`.
        page_size: Tokens in a page, as in the caches.
        causal: Whether a query sees only positions up to its own; False with a mask.
        window: Tokens that a query token sees, itself included.
        sinks: A logit of each head that takes part in the softmax and adds nothing. Shape: [heads]; floating point.
        query_rope: Shape: [rows, q, heads, rope]; dtype of the query.
        key_rope_cache: Likewise with rope dims, in the form of the keys; contiguous; dtype of the query.
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
        LengthError: A length does not fit the query, or the window is below 1 or not causal.
        MetadataError: A mask together with `causal`, which would say twice what a query sees.
        TableCapacityError: A KV length exceeds the table.
        UnsupportedByOp: (npu) The operator documents that it refuses these sizes.
        CaptureError: (npu) The first call for q > 1 happens inside graph capture.

    Under graph capture on npu the operator is called directly, with its lengths as lists, so that torch_npu's capture
    records it; see `paged_attention_update_keys` for the key to update.
    """
    chosen = _choose(query, backend, fia)
    extras = AttentionExtras(window, sinks, query_rope, key_rope_cache)
    check_call(query, key_cache, value_cache, metadata, page_size, axes=("rows", "q", "heads", "dims"))
    check_uniform(query, metadata, page_size)
    check_extras(query, key_cache, extras, causal=causal)
    if metadata.mask is not None:
        check_mask(query, metadata, metadata.mask, page_size, causal)
    run = load("paged_attention", chosen)
    result = run(
        query, key_cache, value_cache, metadata, scale=float(scale), causal=bool(causal), fia=fia, extras=extras
    )
    return cast(torch.Tensor, result)


def ragged_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: PagedAttentionMetadata,
    *,
    scale: float,
    page_size: int,
    causal: bool = True,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope_cache: torch.Tensor | None = None,
    backend: BackendName | None = None,
    fia: FiaVersion = "v2",
) -> torch.Tensor:
    """As `paged_attention`, for requests of unlike query lengths: extend, mixed and widened draft-extend steps.

    Args:
        query: Query tokens, request after request. Shape: [tokens, heads, dims], `tokens >= sum(metadata.q_lens)`.
        key_cache: See `paged_attention`.
        value_cache: See `paged_attention`.
        metadata: Block table and lengths, one of each a request; a query length may be 0. Without a mask.
        scale: See `paged_attention`.
        page_size: See `paged_attention`.
        causal: See `paged_attention`.
        window: See `paged_attention`.
        sinks: See `paged_attention`.
        query_rope: Shape: [tokens, heads, rope].
        key_rope_cache: See `paged_attention`.
        backend: See `paged_attention`.
        fia: See `paged_attention`.

    Returns:
        Shape: [tokens, heads, value_dims]; dtype of the query.

    Mutates: nothing.

    Padding: token rows past the last request, and those of requests with KV length 0, give zeros.

    Raises: as `paged_attention`; LengthError also where a query is longer than its KV, or `query` is too short.
        CaptureError: (npu) Sizes for which the operator takes one request a call, or query tokens without a request,
            inside graph capture.
    """
    chosen = _choose(query, backend, fia)
    extras = AttentionExtras(window, sinks, query_rope, key_rope_cache)
    check_call(query, key_cache, value_cache, metadata, page_size, axes=("tokens", "heads", "dims"))
    check_extras(query, key_cache, extras, causal=causal)
    if metadata.mask is not None:
        raise MetadataError(
            "metadata.mask",
            given="a mask",
            expected="None for ragged queries",
            consequence="its rows could not be assigned to query tokens",
            remedy="pad to one width and use paged_attention",
        )
    columns = int(metadata.block_table.shape[1])
    for index, (q_len, kv_len) in enumerate(zip(metadata.q_lens, metadata.kv_lens, strict=True)):
        check_kv_lens([kv_len], columns=columns, page_size=page_size, q_len=q_len)
        if q_len < 0:
            raise LengthError(
                f"metadata.q_lens[{index}]",
                given=q_len,
                expected="0 or more",
                consequence="later requests would read earlier ones' queries",
                remedy="clamp lengths at 0",
            )
    if sum(metadata.q_lens) > query.shape[0]:
        raise LengthError(
            "metadata.q_lens",
            given=f"{sum(metadata.q_lens)} query tokens",
            expected=f"at most {query.shape[0]}, the token rows of the query",
            consequence="the last requests would have no queries",
            remedy="pass lengths of each request, not cumulative ones",
        )
    run = load("ragged_paged_attention", chosen)
    result = run(
        query, key_cache, value_cache, metadata, scale=float(scale), causal=bool(causal), fia=fia, extras=extras
    )
    return cast(torch.Tensor, result)


def _choose(query: torch.Tensor, backend: BackendName | None, fia: FiaVersion) -> BackendName:
    chosen = choose("paged_attention", query.device, backend)
    if (chosen, fia) not in _UPDATE_KEYS:
        raise BackendError(
            "fia",
            given=f"{fia} with backend {chosen}",
            expected="v1 or v2 with npu; the default otherwise",
            consequence="the version would be ignored, and with it the update key",
            remedy="leave fia out",
        )
    return chosen


def paged_attention_update_keys(
    backend: BackendName, *, fia: FiaVersion = "v2", ragged: bool = False
) -> dict[str, str]:
    """Return which captured argument must be rebound before each replay, and from which metadata field.

    Args:
        backend: The backend that was captured.
        fia: Version of the fused operator that was captured.
        ragged: Whether `ragged_paged_attention` was captured, whose query lengths change too.

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
    return keys | _QUERY_KEYS[backend, fia] if ragged else dict(keys)
