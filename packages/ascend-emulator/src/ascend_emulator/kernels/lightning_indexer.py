"""npu_lightning_indexer: for each query token, the positions whose keys score highest.

This module owns the op's own refusals and the scores ``sum over heads of weight * relu(q . k)`` in float32. Of equal
scores the earlier position wins.
"""

from __future__ import annotations

import torch

from .errors import KernelNotCovered
from .rules import declare, note, online, refuse
from .sparse_requests import MAX_TOKENS, TEST, SparseCall, check, check_written, key_rows, query_rows, requests

OP = "npu::npu_lightning_indexer"
_NAME = "npu_lightning_indexer"
_DOC = online("torch_npu-npu_lightning_indexer")
_COUNTS = (*range(1, 2049), 3072, 4096, 5120, 6144, 7168, 8192)

declare(
    _NAME,
    _DOC,
    TEST,
    {
        "indexer-heads": ("at most 64 query heads of width 128, as wide as the key's", "split the heads"),
        "indexer-weights": (
            "weights shaped as the query without D, of its dtype or float32, contiguous",
            "cast and reshape the weights",
        ),
        "indexer-count": ("sparse_count 1 to 2048, or a multiple of 1024 up to 8192", "pass a supported count"),
    },
)
note(_NAME, "(not documented) places past the positions that a token sees", "—", "-1, as engines expect them: " + TEST)
note(_NAME, "(not documented) the order of the positions", "—", "by falling score here; do not depend on it")
note(_NAME, "return_value in training, dense keys only", _DOC, "not computed: `KernelNotCovered`: " + TEST)
note(
    _NAME, "950: 8, 16, 24, 32 or 64 heads; weights not float32", _DOC, "the list of 910B and 910C holds on every chip"
)


def npu_lightning_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_key: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = MAX_TOKENS,
    next_tokens: int = MAX_TOKENS,
    return_value: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the highest scores.

    Args:
        query: Shape: [B, S, N, 128] or [T, N, 128]; float16 or bfloat16.
        key: Shape: as the query with one head, or [blocks, block_size, 1, 128]; the query's dtype.
        weights: Shape: [B, S, N] or [T, N]; the query's dtype or float32.
        actual_seq_lengths_query: query tokens of each request; cumulative in TND. Shape: [B]; int32.
        actual_seq_lengths_key: key tokens of each request; cumulative in TND, not in PA_BSND. Shape: [B]; int32.
        block_table: pages of each request, for PA_BSND. Shape: [B, blocks]; int32.
        layout_query: BSND or TND.
        layout_key: the query's layout, or PA_BSND.
        sparse_count: positions a token.
        sparse_mode: 0 all keys, 3 causal, the last query token seeing the last key.
        pre_tokens: 2 ** 63 - 1.
        next_tokens: 2 ** 63 - 1.
        return_value: False.

    Returns:
        Positions [..., 1, sparse_count] int32, counted from each request's first key, -1 for none; and an empty tensor.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_lightning_indexer.md.
    """
    if return_value:
        raise KernelNotCovered(OP, "return_value", return_value)
    lens = actual_seq_lengths_query, actual_seq_lengths_key
    call = SparseCall(OP, query, {"key": key}, *lens, block_table, layout_query, layout_key, "actual_seq_lengths_key")
    check(call, sparse_mode, pre_tokens, next_tokens)
    if query.size(-2) > 64 or query.size(-1) != 128 or key.size(-1) != 128:
        refuse(OP, "indexer-heads", "query", f"{tuple(query.shape)}, key {tuple(key.shape)}")
    fits = weights.shape == query.shape[:-1] and weights.is_contiguous()
    if weights.dtype not in (query.dtype, torch.float32) or not fits:
        refuse(OP, "indexer-weights", "weights", f"{weights.dtype}, shape {tuple(weights.shape)}")
    if sparse_count not in _COUNTS:
        refuse(OP, "indexer-count", "sparse_count", sparse_count)
    out = torch.full((*query.shape[:-2], 1, sparse_count), -1, dtype=torch.int32)
    for request in requests(call):
        if not request.q_len or not request.kv_len:
            continue
        rows = key_rows(call, "key", request)
        check_written(call, "key", rows, request)
        products = torch.relu(query_rows(query, layout_query, request).float() @ rows.float().T)
        factors = query_rows(weights, layout_query, request).float().unsqueeze(-1)
        scores = (products * factors).sum(1)
        target = query_rows(out, layout_query, request)
        for i in range(request.q_len):
            seen = request.kv_len
            if sparse_mode == 3:
                seen = max(0, request.kv_len - request.q_len + i + 1)
            picks = scores[i, :seen].sort(descending=True, stable=True).indices[:sparse_count]
            target[i, 0, : picks.numel()] = picks.to(torch.int32)
    return out, torch.empty(0, dtype=query.dtype)


KERNELS = {OP: npu_lightning_indexer}
