"""npu_quant_lightning_indexer: the positions whose keys score highest, of 8-bit queries and keys.

This module owns the op's own refusals and the scores ``sum over heads of weight * relu(q . k * scale_q * scale_k)`` in
float32. Of equal scores the earlier position wins.
"""

from __future__ import annotations

import dataclasses

import torch

from .errors import KernelNotCovered
from .pose import Scope
from .rules import declare, holds, note, online, refuse
from .sparse_requests import MAX_TOKENS, SparseCall, check, check_written, key_rows, query_rows, requests

OP = "npu::npu_quant_lightning_indexer"
TEST = "test_kernels_quant_sparse.py"
_NAME = "npu_quant_lightning_indexer"
_DOC = online("torch_npu-npu_quant_lightning_indexer")
_HALF = (torch.float16, torch.float16, torch.float16)
_WIDE = (torch.bfloat16, torch.float32, torch.float32)

declare(
    _NAME,
    _DOC,
    TEST,
    {
        "qindexer-heads": ("1 to 64 query heads of width 128, as wide as the key's", "split the heads"),
        "qindexer-dtype": ("query and key both int8 or both float8_e4m3fn", "quantise both alike"),
        "qindexer-shapes": (
            "weights, query_dequant_scale shaped as the query without D, key_dequant_scale as the key without D; the "
            "first two contiguous",
            "reshape them",
        ),
        "qindexer-scales": (
            "weights, query_dequant_scale, key_dequant_scale all float16; float8: or bfloat16, float32, float32",
            "cast them",
        ),
        "qindexer-mode": ("query_quant_mode and key_quant_mode 0", "pass 0"),
        "qindexer-count": ("sparse_count 1 to 2048", "pass a supported count"),
    },
)
declare(
    _NAME,
    _DOC,
    TEST,
    {"qindexer-int8": ("int8 query and key", "quantise to int8")},
    Scope(chips=("910B", "910C")),
)
declare(
    _NAME,
    _DOC,
    TEST,
    {"qindexer-heads-950": ("8, 16, 24, 32 or 64 query heads", "pad the heads")},
    Scope(chips=("950",)),
)
note(_NAME, "hifloat8; query_dtype and key_dtype, which name it", _DOC, "not computed: `KernelNotCovered`: " + TEST)
note(_NAME, "weights * query_dequant_scale within float16", _DOC, "not checked: the product is in float32 here")
note(_NAME, "the order of NaN scores is undefined", _DOC, "as torch.sort has it")
note(_NAME, "(not documented) places past the positions that a token sees", "—", "-1, as engines expect them: " + TEST)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    query_scale: torch.Tensor,
    key_scale: torch.Tensor,
    modes: dict[str, int],
    sparse_count: int,
) -> None:
    heads = query.size(-2)
    if heads > 64 or query.size(-1) != 128 or key.size(-1) != 128:
        refuse(OP, "qindexer-heads", "query", f"{tuple(query.shape)}, key {tuple(key.shape)}")
    if holds("qindexer-heads-950") and heads not in (8, 16, 24, 32, 64):
        refuse(OP, "qindexer-heads-950", "query", f"{heads} heads")
    if query.dtype != key.dtype or query.dtype not in (torch.int8, torch.float8_e4m3fn):
        refuse(OP, "qindexer-dtype", "query", f"{query.dtype}, key {key.dtype}")
    if holds("qindexer-int8") and query.dtype != torch.int8:
        refuse(OP, "qindexer-int8", "query", query.dtype)
    wanted = {"weights": (weights, query), "query_dequant_scale": (query_scale, query)}
    for name, (tensor, beside) in (wanted | {"key_dequant_scale": (key_scale, key)}).items():
        if tensor.shape != beside.shape[:-1] or (beside is query and not tensor.is_contiguous()):
            refuse(OP, "qindexer-shapes", name, f"shape {tuple(tensor.shape)}, strides {tensor.stride()}")
    dtypes = weights.dtype, query_scale.dtype, key_scale.dtype
    if dtypes != _HALF and (query.dtype == torch.int8 or dtypes != _WIDE):
        refuse(OP, "qindexer-scales", "weights", ", ".join(map(str, dtypes)))
    for name, mode in modes.items():
        if mode != 0:
            refuse(OP, "qindexer-mode", name, mode)
    if not 1 <= sparse_count <= 2048:
        refuse(OP, "qindexer-count", "sparse_count", sparse_count)


def npu_quant_lightning_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    query_dequant_scale: torch.Tensor,
    key_dequant_scale: torch.Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
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
    query_dtype: int | None = None,
    key_dtype: int | None = None,
) -> torch.Tensor:
    """Positions of the highest scores of quantised queries and keys.

    Args:
        query: Shape: [B, S, N, 128] or [T, N, 128]; int8, on a 950 also float8_e4m3fn.
        key: Shape: as the query with one head, or [blocks, block_size, 1, 128]; the query's dtype.
        weights: Shape: [B, S, N] or [T, N]; float16, with float8 also bfloat16.
        query_dequant_scale: Shape: as ``weights``; float16, beside bfloat16 weights float32.
        key_dequant_scale: Shape: as ``key`` without its last axis; dtype of ``query_dequant_scale``.
        query_quant_mode: 0: a scale a token and head.
        key_quant_mode: 0.
        actual_seq_lengths_query: query tokens of each request; cumulative in TND. Shape: [B]; int32.
        actual_seq_lengths_key: key tokens of each request; cumulative in TND, not in PA_BSND. Shape: [B]; int32.
        block_table: pages of each request, for PA_BSND. Shape: [B, blocks]; int32.
        layout_query: BSND or TND.
        layout_key: the query's layout, or PA_BSND.
        sparse_count: positions a token.
        sparse_mode: 0 all keys, 3 causal, the last query token seeing the last key.
        pre_tokens: 2 ** 63 - 1.
        next_tokens: 2 ** 63 - 1.
        query_dtype: not computed.
        key_dtype: not computed.

    Returns:
        Positions [..., 1, sparse_count] int32, counted from each request's first key, -1 for none.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_quant_lightning_indexer.md.
    """
    for name, number in (("query_dtype", query_dtype), ("key_dtype", key_dtype)):
        if number is not None:
            raise KernelNotCovered(OP, name, number)
    lens = actual_seq_lengths_query, actual_seq_lengths_key
    call = SparseCall(OP, query, {"key": key}, *lens, block_table, layout_query, layout_key, "actual_seq_lengths_key")
    check(call, sparse_mode, pre_tokens, next_tokens, alike=False, blocks_apart=True)
    modes = {"query_quant_mode": query_quant_mode, "key_quant_mode": key_quant_mode}
    _check(query, key, weights, query_dequant_scale, key_dequant_scale, modes, sparse_count)
    call = dataclasses.replace(call, keys={"key": key, "key_dequant_scale": key_dequant_scale.unsqueeze(-1)})
    out = torch.full((*query.shape[:-2], 1, sparse_count), -1, dtype=torch.int32)
    for request in requests(call):
        if not request.q_len or not request.kv_len:
            continue
        rows = {name: key_rows(call, name, request) for name in call.keys}
        for name, part in rows.items():
            check_written(call, name, part, request)
        parts = [query_rows(x, layout_query, request) for x in (query, query_dequant_scale, weights, out)]
        products = parts[0].float() @ rows["key"].float().T
        scales = parts[1].float().unsqueeze(-1) * rows["key_dequant_scale"].float().T
        scores = (torch.relu(products * scales) * parts[2].float().unsqueeze(-1)).sum(1)
        for i in range(request.q_len):
            seen = request.kv_len
            if sparse_mode == 3:
                seen = max(0, request.kv_len - request.q_len + i + 1)
            picks = scores[i, :seen].sort(descending=True, stable=True).indices[:sparse_count]
            parts[3][i, 0, : picks.numel()] = picks.to(torch.int32)
    return out


KERNELS = {OP: npu_quant_lightning_indexer}
