"""npu_kv_quant_sparse_flash_attention: latent attention over chosen positions of a quantised cache.

This module owns the op's own refusals, the layout of a cached row (512 latent numbers of 8 bits, 64 rope numbers of the
query's dtype, one float32 scale for every 128 latent numbers) and the attention over the rows that the indices name, in
float32, rounded once.
"""

from __future__ import annotations

import torch

from .errors import KernelNotCovered
from .pose import Scope
from .rules import declare, holds, note, online, refuse
from .sparse_requests import MAX_TOKENS, SparseCall, check, check_written, chosen, key_rows, query_rows, requests

OP = "npu::npu_kv_quant_sparse_flash_attention"
TEST = "test_kernels_quant_sparse.py"
_NAME = "npu_kv_quant_sparse_flash_attention"
_DOC = online("torch_npu-npu_kv_quant_sparse_flash_attention")
LATENT, ROPE, TILE = 512, 64, 128
ROW = LATENT + 2 * ROPE + 4 * (LATENT // TILE)

declare(
    _NAME,
    _DOC,
    TEST,
    {
        "qsfa-modes": (
            "attention_mode 2, key_quant_mode and value_quant_mode 2, quant_scale_repo_mode 1, tile_size 128, "
            "rope_head_dim 64",
            "pass these values",
        ),
        "qsfa-query": ("a float16 or bfloat16 query of width 576", "join the latent and the rope part"),
        "qsfa-key": ("a key of width 656 and a value of its dtype, one head each", "join latent, rope and scales"),
        "qsfa-key-dtype": ("int8 or float8_e4m3fn keys", "quantise the latent part"),
        "qsfa-scales": ("no key_dequant_scale, no value_dequant_scale: they lie in the rows", "leave them None"),
        "qsfa-indices": ("contiguous int32 indices (..., 1, n), the query's tokens first", "cast and reshape them"),
    },
)
declare(
    _NAME,
    _DOC,
    TEST,
    {
        "qsfa-heads": ("1, 2, 4, 8, 16, 32, 64 or 128 query heads", "pad the heads"),
        "qsfa-int8": ("int8 keys", "quantise to int8"),
        "qsfa-block": ("a sparse_block_size of 1, 2, 4, 8 or 16 that divides the block size", "pass 1"),
    },
    Scope(chips=("910B", "910C")),
)
declare(
    _NAME,
    _DOC,
    TEST,
    {
        "qsfa-heads-950": ("1, 2, 4, 8, 16, 32, 48, 64 or 128 query heads", "pad the heads"),
        "qsfa-block-950": ("a sparse_block_size of 1", "pass 1"),
    },
    Scope(chips=("950",)),
)
note(_NAME, "hifloat8; key_dtype and value_dtype, which name it", _DOC, "not computed: `KernelNotCovered`: " + TEST)
note(_NAME, "sinks", _DOC, "torch_npu's schema has no such argument up to 2.13")
note(_NAME, "the output has the query's shape", _DOC, "without the rope part, as the Meta kernel has it: " + TEST)
note(
    _NAME,
    "(not documented) value, beside a key that holds latent and scales",
    "—",
    "attention_mode 2 says that keys and values are one; only its dtype and heads are looked at",
)
note(_NAME, "valid indices before padding; indices past the keys", _DOC, "as npu_sparse_flash_attention: " + TEST)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: torch.Tensor,
    options: dict[str, int],
    size: int,
    paged: bool,
) -> None:
    wanted = {"attention_mode": 2, "key_quant_mode": 2, "value_quant_mode": 2, "quant_scale_repo_mode": 1}
    for name, only in (wanted | {"tile_size": TILE, "rope_head_dim": ROPE}).items():
        if options[name] != only:
            refuse(OP, "qsfa-modes", name, options[name])
    if query.dtype not in (torch.float16, torch.bfloat16) or query.size(-1) != LATENT + ROPE:
        refuse(OP, "qsfa-query", "query", f"{query.dtype}, shape {tuple(query.shape)}")
    if key.dtype not in (torch.int8, torch.float8_e4m3fn):
        refuse(OP, "qsfa-key-dtype", "key", key.dtype)
    if holds("qsfa-int8") and key.dtype != torch.int8:
        refuse(OP, "qsfa-int8", "key", key.dtype)
    if key.size(-1) != ROW or value.dtype != key.dtype or value.shape[:-1] != key.shape[:-1]:
        given = f"{key.dtype} {tuple(key.shape)}, value {value.dtype} {tuple(value.shape)}"
        refuse(OP, "qsfa-key", "key", given)
    fits = indices.shape[:-1] == (*query.shape[:-2], 1) and indices.numel() and indices.is_contiguous()
    if indices.dtype != torch.int32 or not fits:
        refuse(OP, "qsfa-indices", "sparse_indices", f"{indices.dtype}, shape {tuple(indices.shape)}")
    heads = query.size(-2)
    if holds("qsfa-heads") and heads not in (1, 2, 4, 8, 16, 32, 64, 128):
        refuse(OP, "qsfa-heads", "query", f"{heads} heads")
    if holds("qsfa-heads-950") and heads not in (1, 2, 4, 8, 16, 32, 48, 64, 128):
        refuse(OP, "qsfa-heads-950", "query", f"{heads} heads")
    divides = not paged or (size > 0 and key.size(1) % size == 0)
    if holds("qsfa-block") and (size not in (1, 2, 4, 8, 16) or not divides):
        refuse(OP, "qsfa-block", "sparse_block_size", size)
    if holds("qsfa-block-950") and size != 1:
        refuse(OP, "qsfa-block-950", "sparse_block_size", size)


def _dequantise(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent parts [n, 512] and rope parts [n, 64] of cached rows [n, 656], both float32."""
    raw = rows.contiguous().view(torch.uint8)
    latent = raw[:, :LATENT].contiguous().view(rows.dtype).float()
    rope = raw[:, LATENT : LATENT + 2 * ROPE].contiguous().view(dtype).float()
    scales = raw[:, LATENT + 2 * ROPE :].contiguous().view(torch.float32)
    return latent * scales.repeat_interleave(TILE, 1), rope


def npu_kv_quant_sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    key_quant_mode: int,
    value_quant_mode: int,
    *,
    key_dequant_scale: torch.Tensor | None = None,
    value_dequant_scale: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = MAX_TOKENS,
    next_tokens: int = MAX_TOKENS,
    attention_mode: int = 0,
    quant_scale_repo_mode: int = 1,
    tile_size: int = TILE,
    rope_head_dim: int = ROPE,
    key_dtype: int | None = None,
    value_dtype: int | None = None,
) -> torch.Tensor:
    """Attention of each query token over the quantised rows that its indices name.

    Args:
        query: latent and rope part. Shape: [B, S, N, 576] or [T, N, 576]; float16 or bfloat16.
        key: cached rows. Shape: as the query with one head, or [blocks, block_size, 1], 656 wide; int8 or float8.
        value: the same rows; they are read from ``key``.
        sparse_indices: blocks of ``sparse_block_size`` tokens. Shape: [B, S, 1, n] or [T, 1, n]; int32. *Padding*: -1.
        scale_value: factor of the scores.
        key_quant_mode: 2: a scale for every 128 numbers.
        value_quant_mode: 2.
        key_dequant_scale: None.
        value_dequant_scale: None.
        block_table: pages of each request, for PA_BSND. Shape: [B, blocks]; int32.
        actual_seq_lengths_query: query tokens of each request; cumulative in TND. Shape: [B]; int32.
        actual_seq_lengths_kv: keys of each request; cumulative in TND, not in PA_BSND. Shape: [B]; int32.
        sparse_block_size: tokens an index names.
        layout_query: BSND or TND.
        layout_kv: the query's layout, or PA_BSND.
        sparse_mode: 0, or 3 for causal on top of the choice.
        pre_tokens: 2 ** 63 - 1.
        next_tokens: 2 ** 63 - 1.
        attention_mode: 2.
        quant_scale_repo_mode: 1.
        tile_size: 128.
        rope_head_dim: 64.
        key_dtype: not computed.
        value_dtype: not computed.

    Returns:
        Shape: as the query, 512 wide; the query's dtype. Zeros where a token sees nothing.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_kv_quant_sparse_flash_attention.md.
    """
    for name, number in (("key_dtype", key_dtype), ("value_dtype", value_dtype)):
        if number is not None:
            raise KernelNotCovered(OP, name, number)
    for name, scale in (("key_dequant_scale", key_dequant_scale), ("value_dequant_scale", value_dequant_scale)):
        if scale is not None:
            refuse(OP, "qsfa-scales", name, f"a tensor of shape {tuple(scale.shape)}")
    lens = actual_seq_lengths_query, actual_seq_lengths_kv
    call = SparseCall(OP, query, {"key": key}, *lens, block_table, layout_query, layout_kv, "actual_seq_lengths_kv")
    check(call, sparse_mode, pre_tokens, next_tokens, alike=False)
    options = {"attention_mode": attention_mode, "quant_scale_repo_mode": quant_scale_repo_mode}
    options |= {"key_quant_mode": key_quant_mode, "value_quant_mode": value_quant_mode}
    options |= {"tile_size": tile_size, "rope_head_dim": rope_head_dim}
    _check(query, key, value, sparse_indices, options, sparse_block_size, call.paged)
    out = torch.zeros((*query.shape[:-1], LATENT), dtype=query.dtype)
    for request in requests(call):
        rows = key_rows(call, "key", request)
        parts = [query_rows(x, layout_query, request) for x in (query, sparse_indices, out)]
        for i in range(request.q_len):
            seen = request.kv_len
            if sparse_mode == 3:
                seen = max(0, request.kv_len - request.q_len + i + 1)
            tokens = chosen(OP, parts[1][i, 0], sparse_block_size, min(seen, request.kv_len), request)
            if not tokens.numel():
                continue
            picked = rows[tokens]
            check_written(call, "key", picked, request)
            latent, rope = _dequantise(picked, query.dtype)
            asked = parts[0][i].float()
            scores = (asked[:, :LATENT] @ latent.T + asked[:, LATENT:] @ rope.T) * scale_value
            parts[2][i] = (scores.softmax(-1) @ latent).to(query.dtype)
    return out


KERNELS = {OP: npu_kv_quant_sparse_flash_attention}
