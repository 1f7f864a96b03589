"""vLLM-Ascend's sparse attention and its product of heads: builds of operators that torch_npu and sgl_kernel_npu have.

This module owns the ops' definitions (torch_npu has none of them in this space), and largest scores and sums over paged
keys, which torch_npu's operator refuses and this one gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import lightning_indexer, quant_lightning_indexer, quant_sparse_attention, sgl_matmul, sparse_flash_attention
from .definitions import define
from .errors import KernelNotCovered
from .rules import declare, note, refuse
from .same_operator import called_as
from .sparse_requests import MAX_TOKENS, SparseCall, key_rows, requests

OP_INDEXER = "_C_ascend::npu_lightning_indexer"
OP_QUANT_INDEXER = "_C_ascend::npu_lightning_indexer_quant"
OP_ATTENTION = "_C_ascend::npu_sparse_flash_attention"
OP_QUANT_ATTENTION = "_C_ascend::npu_kv_quant_sparse_flash_attention"
OP_PRODUCT = "_C_ascend::batch_matmul_transpose"
_LENS = "Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, "
_WINDOW = "int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, "
SCHEMAS = (
    "npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, " + _LENS + 'str layout_query="BSND", '
    'str layout_key="BSND", int sparse_count=2048, int sparse_mode=3, ' + _WINDOW + "bool return_value=False) -> "
    "(Tensor sparse_indices, Tensor sparse_values)",
    "npu_lightning_indexer_quant(Tensor query, Tensor key, Tensor weights, Tensor query_dequant_scale, "
    "Tensor key_dequant_scale, *, " + _LENS + "int query_quant_mode=0, int key_quant_mode=0, "
    "str layout_query='BSND', str layout_key='BSND', int sparse_count=2048, int sparse_mode=3) -> Tensor",
    "npu_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, float scale_value, *, "
    "Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, "
    "Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str layout_query='BSND', "
    "str layout_kv='BSND', int sparse_mode=3, " + _WINDOW + "int attention_mode=2, bool return_softmax_lse=False) -> "
    "(Tensor attention_out, Tensor softmax_max, Tensor softmax_sum)",
    "npu_kv_quant_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, "
    "float scale_value, *, int key_quant_mode=1, int value_quant_mode=1, Tensor? key_dequant_scale=None, "
    "Tensor? value_dequant_scale=None, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
    "Tensor? actual_seq_lengths_kv=None, int sparse_block_size=1, str layout_query='BSND', str layout_kv='BSND', "
    "int sparse_mode=3, " + _WINDOW + "int attention_mode=2, int quant_scale_repo_mode=1, int tile_size=128, "
    "int rope_head_dim=64, bool return_softmax_lse=False) -> (Tensor attention_out, Tensor softmax_max, "
    "Tensor softmax_sum)",
    "batch_matmul_transpose(Tensor tensor_a, Tensor tensor_b, Tensor tensor_c, str? format_mode=None, "
    "str? quant_mode=None) -> ()",
)
_FAMILY = (
    "_C_ascend::npu_lightning_indexer, npu_lightning_indexer_quant, npu_sparse_flash_attention, "
    "npu_kv_quant_sparse_flash_attention"
)
_SOURCE = "vllm-ascend v0.23.0, csrc/"
_TEST = "test_kernels_vllm_sparse.py"

declare(
    _FAMILY,
    _SOURCE + "attention/*_torch_adpt.h",
    _TEST,
    {"vsparse-empty": ("no empty query, key, value, weights or indices", "skip the call")},
)
note(
    _FAMILY,
    "dtypes, shapes, layouts and counts",
    _SOURCE + "attention (the same operators as torch_npu's)",
    "as the rows of npu_lightning_indexer, npu_quant_lightning_indexer, npu_sparse_flash_attention and "
    "npu_kv_quant_sparse_flash_attention say, under this op's name: " + _TEST,
)
note(
    "_C_ascend::npu_sparse_flash_attention",
    "return_softmax_lse with PA_BSND",
    _SOURCE + "attention/sparse_flash_attention/sparse_flash_attention_torch_adpt.h",
    "is computed; torch_npu's op of this name refuses it: " + _TEST,
)
note(
    "_C_ascend::npu_kv_quant_sparse_flash_attention",
    "return_softmax_lse",
    _SOURCE + "attention/kv_quant_sparse_flash_attention",
    "not computed: `KernelNotCovered`: " + _TEST,
)
note(
    "_C_ascend::batch_matmul_transpose",
    "all of it; the schema has no mark on tensor_c",
    _SOURCE + "batch_matmul_transpose/op_host (the same code as sgl_kernel_npu's)",
    "as the rows of npu::batch_matmul_transpose say, under this op's name; tensor_c is written: " + _TEST,
)


def _refuse_empty(op: str, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            refuse(op, "vsparse-empty", name, f"shape {tuple(tensor.shape)}")


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
    """As ``npu::npu_lightning_indexer``, of the same operator."""
    _refuse_empty(OP_INDEXER, query=query, key=key, weights=weights)
    return called_as(
        OP_INDEXER, lightning_indexer.npu_lightning_indexer, query, key, weights,
        actual_seq_lengths_query=actual_seq_lengths_query, actual_seq_lengths_key=actual_seq_lengths_key,
        block_table=block_table, layout_query=layout_query, layout_key=layout_key, sparse_count=sparse_count,
        sparse_mode=sparse_mode, pre_tokens=pre_tokens, next_tokens=next_tokens, return_value=return_value,
    )  # fmt: skip


def npu_lightning_indexer_quant(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    query_dequant_scale: torch.Tensor,
    key_dequant_scale: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_key: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
) -> torch.Tensor:
    """As ``npu::npu_quant_lightning_indexer``, of the same operator."""
    _refuse_empty(OP_QUANT_INDEXER, query=query, key=key)
    return called_as(
        OP_QUANT_INDEXER, quant_lightning_indexer.npu_quant_lightning_indexer, query, key, weights,
        query_dequant_scale, key_dequant_scale, query_quant_mode, key_quant_mode,
        actual_seq_lengths_query=actual_seq_lengths_query, actual_seq_lengths_key=actual_seq_lengths_key,
        block_table=block_table, layout_query=layout_query, layout_key=layout_key, sparse_count=sparse_count,
        sparse_mode=sparse_mode,
    )  # fmt: skip


def _dense(call: SparseCall, keys: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Arguments that hold the same keys without pages, in the query's layout."""
    parts = {name: [key_rows(call, name, request) for request in requests(call)] for name in keys}
    lens = [part.size(0) for part in parts["key"]]
    packed = call.layout_query == "TND"
    numbers = torch.tensor(lens, dtype=torch.int32)
    out: dict[str, Any] = {"layout_kv": call.layout_query, "block_table": None}
    out["actual_seq_lengths_kv"] = numbers.cumsum(0, dtype=torch.int32) if packed else numbers
    for name, rows in parts.items():
        out[name] = torch.cat(rows) if packed else torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        out[name] = out[name].unsqueeze(-2)
    return out


def npu_sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
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
    attention_mode: int = 2,
    return_softmax_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``npu::npu_sparse_flash_attention``, and largest scores and sums over paged keys as well.

    Their shape is [1, T, N] or [B, 1, S, N]; float32. Arguments and errors: see there.
    """
    _refuse_empty(OP_ATTENTION, query=query, key=key, value=value, sparse_indices=sparse_indices)
    keys = {"key": key, "value": value} | ({} if key_rope is None else {"key_rope": key_rope})
    options: dict[str, Any] = {
        "block_table": block_table, "actual_seq_lengths_query": actual_seq_lengths_query,
        "actual_seq_lengths_kv": actual_seq_lengths_kv, "query_rope": query_rope, "key_rope": key_rope,
        "sparse_block_size": sparse_block_size, "layout_query": layout_query, "layout_kv": layout_kv,
        "sparse_mode": sparse_mode, "pre_tokens": pre_tokens, "next_tokens": next_tokens,
        "attention_mode": attention_mode,
    }  # fmt: skip
    paged = layout_kv == "PA_BSND"
    kernel = sparse_flash_attention.npu_sparse_flash_attention
    rest: dict[str, Any] = options | {"return_softmax_lse": return_softmax_lse and not paged}
    out = called_as(OP_ATTENTION, kernel, query, key, value, sparse_indices, scale_value, **rest)
    if not return_softmax_lse or not paged:
        return out
    call = SparseCall(
        OP_ATTENTION, query, keys, actual_seq_lengths_query, actual_seq_lengths_kv, block_table, layout_query,
        layout_kv, "actual_seq_lengths_kv",
    )  # fmt: skip
    dense = options | _dense(call, keys) | {"return_softmax_lse": True}
    parts = dense.pop("key"), dense.pop("value")
    _, top, total = called_as(OP_ATTENTION, kernel, query, *parts, sparse_indices, scale_value, **dense)
    return out[0], top, total


def npu_kv_quant_sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    key_quant_mode: int = 1,
    value_quant_mode: int = 1,
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
    attention_mode: int = 2,
    quant_scale_repo_mode: int = 1,
    tile_size: int = 128,
    rope_head_dim: int = 64,
    return_softmax_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``npu::npu_kv_quant_sparse_flash_attention``, with two empty tensors for largest scores and sums."""
    _refuse_empty(OP_QUANT_ATTENTION, query=query, key=key, value=value, sparse_indices=sparse_indices)
    if return_softmax_lse:
        raise KernelNotCovered(OP_QUANT_ATTENTION, "return_softmax_lse", return_softmax_lse)
    out = called_as(
        OP_QUANT_ATTENTION, quant_sparse_attention.npu_kv_quant_sparse_flash_attention, query, key, value,
        sparse_indices, scale_value, key_quant_mode, value_quant_mode, key_dequant_scale=key_dequant_scale,
        value_dequant_scale=value_dequant_scale, block_table=block_table,
        actual_seq_lengths_query=actual_seq_lengths_query, actual_seq_lengths_kv=actual_seq_lengths_kv,
        sparse_block_size=sparse_block_size, layout_query=layout_query, layout_kv=layout_kv, sparse_mode=sparse_mode,
        pre_tokens=pre_tokens, next_tokens=next_tokens, attention_mode=attention_mode,
        quant_scale_repo_mode=quant_scale_repo_mode, tile_size=tile_size, rope_head_dim=rope_head_dim,
    )  # fmt: skip
    return out, torch.empty(0), torch.empty(0)


def batch_matmul_transpose(
    tensor_a: torch.Tensor,
    tensor_b: torch.Tensor,
    tensor_c: torch.Tensor,
    format_mode: str | None = None,
    quant_mode: str | None = None,
) -> None:
    """As ``npu::batch_matmul_transpose``: the same code. *Mutates* ``tensor_c``."""
    kernel = sgl_matmul.batch_matmul_transpose
    called_as(OP_PRODUCT, kernel, tensor_a, tensor_b, tensor_c, format_mode, quant_mode)


def _places(query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    count, packed = options.get("sparse_count", 2048), options.get("layout_query", "BSND") != "BSND"
    heads = key.size(1 if packed and options.get("layout_key", "BSND") == "TND" else 2)
    lead = query.shape[:1] if packed else query.shape[:2]
    return query.new_empty((*lead, heads, count), dtype=torch.int32)


def _indexer_meta(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    places = _places(query, key, options)
    return places, torch.empty_like(places if options.get("return_value") else query.new_empty(0), dtype=query.dtype)


def _attention_meta(quantised: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    def meta(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> Any:
        width = query.size(-1) - (options.get("rope_head_dim", 64) if quantised else 0)
        out = query.new_empty((*query.shape[:-1], width))
        shape: tuple[int, ...] = (0,)
        if options.get("return_softmax_lse"):
            heads = query.size(-2)
            shape = (1, query.size(0), heads) if query.dim() == 3 else (query.size(0), 1, query.size(1), heads)
        return out, *(query.new_empty(shape, dtype=torch.float32) for _ in range(2))

    return meta


_METAS: tuple[Callable[..., Any], ...] = (
    _indexer_meta,
    lambda query, key, *rest, **options: _places(query, key, options),
    _attention_meta(False),
    _attention_meta(True),
    lambda *rest: None,
)
for _schema, _meta in zip(SCHEMAS, _METAS, strict=True):
    define(_schema, "_C_ascend", _meta)
UNDECLARED_WRITES = {OP_PRODUCT: ("tensor_c",)}
KERNELS: dict[str, Callable[..., Any]] = {
    OP_INDEXER: npu_lightning_indexer,
    OP_QUANT_INDEXER: npu_lightning_indexer_quant,
    OP_ATTENTION: npu_sparse_flash_attention,
    OP_QUANT_ATTENTION: npu_kv_quant_sparse_flash_attention,
    OP_PRODUCT: batch_matmul_transpose,
}
