"""npu_sparse_flash_attention: latent attention over chosen positions.

This module owns the op's own refusals and the attention of each query token over the tokens that its indices name, in
float32, rounded once.
"""

from __future__ import annotations

import torch

from .errors import KernelNotCovered
from .pose import Scope
from .rules import declare, holds, note, online, refuse
from .sparse_requests import MAX_TOKENS, TEST, SparseCall, check, check_written, chosen, key_rows, query_rows, requests

OP = "npu::npu_sparse_flash_attention"
_NAME = "npu_sparse_flash_attention"
_DOC = online("torch_npu-npu_sparse_flash_attention")
LATENT, ROPE = 512, 64

declare(
    _NAME,
    _DOC,
    TEST,
    {
        "sfa-mode": ("attention_mode 2", "pass 2"),
        "sfa-shape": ("query, key, value of width 512; query_rope, key_rope of width 64, both given", "reshape them"),
        "sfa-indices": ("contiguous int32 indices (..., 1, n), the query's tokens first", "cast and reshape them"),
        "sfa-lse": ("return_softmax_lse with dense keys only", "leave it out"),
    },
)
declare(
    _NAME,
    _DOC,
    TEST,
    {
        "sfa-heads": ("1, 2, 4, … 128 query heads", "pad the heads"),
        "sfa-block": ("a sparse_block_size that is a power of 2, at most 128, and divides the block size", "pass 1"),
    },
    Scope(chips=("910B", "910C")),
)
declare(
    _NAME,
    _DOC,
    TEST,
    {
        "sfa-heads-950": ("1 to 128 query heads", "split the heads"),
        "sfa-block-950": ("a sparse_block_size of 1", "pass 1"),
    },
    Scope(chips=("950",)),
)
note(_NAME, "(not documented) negative indices", "—", "they name no token: indices are padded with -1: " + TEST)
note(
    _NAME,
    "(not documented) indices past the keys, or past what sparse_mode 3 lets a token see",
    "—",
    "past the keys: a `DeviceFault` (507015); past the causal limit: hidden, as documented: " + TEST,
)
note(_NAME, "(not documented) a token that sees nothing", "—", "zeros; its largest score is -inf and its sum 0")
note(
    _NAME,
    "no value (torch_npu from 2.13 on)",
    "torch_npu 2.13.0, its schema",
    "not computed: `KernelNotCovered`: " + TEST,
)
note(_NAME, "sinks (not on 910B, 910C)", _DOC, "not computed: `KernelNotCovered`: " + TEST)
note(
    _NAME,
    "sparse_block_size of 1 only on 950, powers of 2 elsewhere",
    _DOC,
    "without a pose both rows hold, so that 1 alone is taken",
)


def _check_own(
    query: torch.Tensor,
    keys: dict[str, torch.Tensor],
    query_rope: torch.Tensor,
    indices: torch.Tensor,
    sparse_block_size: int,
    attention_mode: int,
    paged: bool,
) -> None:
    if attention_mode != 2:
        refuse(OP, "sfa-mode", "attention_mode", attention_mode)
    widths = {"query": (query, LATENT), "query_rope": (query_rope, ROPE), "key_rope": (keys["key_rope"], ROPE)}
    widths |= {name: (keys[name], LATENT) for name in ("key", "value")}
    for name, (tensor, width) in widths.items():
        beside = query if name.startswith("query") else keys["key"]
        if tensor.shape != (*beside.shape[:-1], width) or tensor.dtype != query.dtype or not tensor.is_contiguous():
            refuse(OP, "sfa-shape", name, f"{tensor.dtype}, shape {tuple(tensor.shape)}")
    fits = indices.shape[:-1] == (*query.shape[:-2], 1) and indices.numel() and indices.is_contiguous()
    if indices.dtype != torch.int32 or not fits:
        refuse(OP, "sfa-indices", "sparse_indices", f"{indices.dtype}, shape {tuple(indices.shape)}")
    heads, size = query.size(-2), sparse_block_size
    if holds("sfa-heads") and heads not in (1, 2, 4, 8, 16, 32, 64, 128):
        refuse(OP, "sfa-heads", "query", f"{heads} heads")
    if holds("sfa-heads-950") and not 1 <= heads <= 128:
        refuse(OP, "sfa-heads-950", "query", f"{heads} heads")
    divides = not paged or (size > 0 and keys["key"].size(1) % size == 0)
    if holds("sfa-block") and (size not in (1, 2, 4, 8, 16, 32, 64, 128) or not divides):
        refuse(OP, "sfa-block", "sparse_block_size", size)
    if holds("sfa-block-950") and size != 1:
        refuse(OP, "sfa-block-950", "sparse_block_size", size)


def npu_sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = MAX_TOKENS,
    next_tokens: int = MAX_TOKENS,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of each query token over the keys that its indices name.

    Args:
        query: latent part. Shape: [B, S, N, 512] or [T, N, 512]; float16 or bfloat16.
        key: latent part. Shape: as the query with one head, or [blocks, block_size, 1, 512].
        value: shape of ``key``; None (from torch_npu 2.13) is not computed.
        sparse_indices: blocks of ``sparse_block_size`` tokens. Shape: [B, S, 1, n] or [T, 1, n]; int32. *Padding*: -1.
        scale_value: factor of the scores.
        block_table: pages of each request, for PA_BSND. Shape: [B, blocks]; int32.
        actual_seq_lengths_query: query tokens of each request; cumulative in TND. Shape: [B]; int32.
        actual_seq_lengths_kv: keys of each request; cumulative in TND, not in PA_BSND. Shape: [B]; int32.
        query_rope: Shape: as ``query``, 64 wide.
        key_rope: Shape: as ``key``, 64 wide.
        sparse_block_size: tokens an index names.
        layout_query: BSND or TND.
        layout_kv: the query's layout, or PA_BSND.
        sparse_mode: 0, or 3 for causal on top of the choice.
        pre_tokens: 2 ** 63 - 1.
        next_tokens: 2 ** 63 - 1.
        attention_mode: 2.
        return_softmax_lse: whether largest scores and sums are wanted (dense keys only).
        sinks: not computed.

    Returns:
        Output (shape and dtype of the query), and float32 largest scores and sums [B, 1, S, N] or [1, T, N], or two
        empty tensors. Tokens past a request's length are zero.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_sparse_flash_attention.md.
    """
    if value is None:
        raise KernelNotCovered(OP, "value", None)
    if sinks is not None:
        raise KernelNotCovered(OP, "sinks", f"a tensor of shape {tuple(sinks.shape)}")
    if query_rope is None or key_rope is None:
        refuse(OP, "sfa-shape", "query_rope" if query_rope is None else "key_rope", None)
    keys = {"key": key, "value": value, "key_rope": key_rope}
    lens = actual_seq_lengths_query, actual_seq_lengths_kv
    call = SparseCall(OP, query, keys, *lens, block_table, layout_query, layout_kv, "actual_seq_lengths_kv")
    check(call, sparse_mode, pre_tokens, next_tokens)
    _check_own(query, keys, query_rope, sparse_indices, sparse_block_size, attention_mode, call.paged)
    if return_softmax_lse and call.paged:
        refuse(OP, "sfa-lse", "return_softmax_lse", f"{return_softmax_lse} with {layout_kv}")
    out = torch.zeros_like(query)
    top = torch.full(query.shape[:-1], float("-inf"), dtype=torch.float32)
    total = torch.zeros_like(top)
    for request in requests(call):
        rows = {name: key_rows(call, name, request) for name in keys}
        parts = [query_rows(x, layout_query, request) for x in (query, query_rope, sparse_indices, out, top, total)]
        for i in range(request.q_len):
            seen = request.kv_len
            if sparse_mode == 3:
                seen = max(0, request.kv_len - request.q_len + i + 1)
            tokens = chosen(OP, parts[2][i, 0], sparse_block_size, min(seen, request.kv_len), request)
            if not tokens.numel():
                continue
            picked = {name: part[tokens] for name, part in rows.items()}
            for name, part in picked.items():
                check_written(call, name, part, request)
            scores = parts[0][i].float() @ picked["key"].float().T + parts[1][i].float() @ picked["key_rope"].float().T
            scores = scores * scale_value
            parts[4][i] = scores.amax(-1)
            weights = torch.exp(scores - parts[4][i].unsqueeze(-1))
            parts[5][i] = weights.sum(-1)
            parts[3][i] = (weights @ picked["value"].float() / parts[5][i].unsqueeze(-1)).to(query.dtype)
    if not return_softmax_lse:
        return out, torch.empty(0), torch.empty(0)
    axis = 0 if layout_query == "TND" else 1
    return out, top.unsqueeze(axis), total.unsqueeze(axis)


KERNELS = {OP: npu_sparse_flash_attention}
