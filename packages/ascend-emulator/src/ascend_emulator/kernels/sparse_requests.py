"""What the sparse attention ops share: requests from length tensors, and rows of keys, dense or paged.

This module owns the refusals that bind the lightning indexers and the sparse attentions alike. It computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .caches import block_ids
from .errors import DeviceFault
from .faults import layer_of, place, poisoned_rows
from .fia_requests import Request
from .rules import declare, note, online, refuse

_FAMILY = "npu_[quant_]lightning_indexer, npu_[kv_quant_]sparse_flash_attention"
_DOC = online("torch_npu-npu_sparse_flash_attention")
MAX_TOKENS = 2**63 - 1
TEST = "test_kernels_sparse.py"

declare(
    _FAMILY,
    _DOC,
    TEST,
    {
        "choice-dtype": ("unquantised: float16 or bfloat16, query and keys alike", "cast them to one dtype"),
        "choice-layout": (
            "query BSND or TND; keys of the query's layout, or PA_BSND with a block_table",
            "spell a supported layout",
        ),
        "choice-rank": ("tensors of the ranks that their layouts spell, one key head, not empty", "reshape them"),
        "choice-contiguous": (
            "contiguous tensors; npu_quant_lightning_indexer's keys in PA_BSND but for axis 0",
            "call .contiguous() on it",
        ),
        "choice-lens": (
            "int32 lengths (requests,), needed in TND (cumulative) and for keys in PA_BSND (one each)",
            "pass them as a tensor",
        ),
        "choice-table": ("an int32 block table (requests, blocks)", "cast and reshape it"),
        "choice-block-size": ("a block size that is a multiple of 16, at most 1024", "use blocks of 128 tokens"),
        "choice-mode": ("sparse_mode 0 or 3", "pass 3 for causal attention"),
        "choice-band": ("pre_tokens and next_tokens of 2 ** 63 - 1", "leave them out"),
    },
)
note(
    _FAMILY,
    "lengths between 0 and the tensors' own, cumulative ones that never fall, tables wide enough",
    _DOC,
    "lengths lie on the device: others are a `DeviceFault` (507015): " + TEST,
)
note(
    _FAMILY,
    "(not documented) keys that are read were written",
    "—",
    "a row of poison bytes is a `DeviceFault` (507015): " + TEST,
)
note(
    "npu_lightning_indexer, npu_[kv_quant_]sparse_flash_attention",
    "950: keys need not be contiguous in axis 0",
    _DOC,
    "contiguous on every chip",
)


@dataclass(frozen=True)
class SparseCall:
    """What these ops are given, under common names.

    Attributes:
        op: full op name.
        kv_lens_name: name of the argument ``kv_lens``.
    """

    op: str
    query: torch.Tensor
    keys: dict[str, torch.Tensor]
    q_lens: torch.Tensor | None
    kv_lens: torch.Tensor | None
    table: torch.Tensor | None
    layout_query: str
    layout_kv: str
    kv_lens_name: str

    @property
    def paged(self) -> bool:
        """True when keys are caches of blocks."""
        return self.layout_kv == "PA_BSND"


def check(
    call: SparseCall,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    *,
    alike: bool = True,
    blocks_apart: bool = False,
) -> None:
    """Refuses what the documents refuse alike.

    Args:
        call: the call.
        sparse_mode: the op's argument.
        pre_tokens: the op's argument.
        next_tokens: the op's argument.
        alike: whether keys have the query's dtype.
        blocks_apart: whether blocks of keys need not follow each other in memory.

    Raises:
        OpRefused: a documented constraint is broken.
    """
    pairs = {"BSND": ("BSND", "PA_BSND"), "TND": ("TND", "PA_BSND")}
    if call.layout_kv not in pairs.get(call.layout_query, ()):
        refuse(call.op, "choice-layout", "layout_query", f"{call.layout_query!r} with keys {call.layout_kv!r}")
    if call.paged != (call.table is not None):
        refuse(call.op, "choice-layout", "block_table", f"{'a' if call.table is not None else 'no'} table")
    rank = 4 if call.paged or call.layout_kv == "BSND" else 3
    if call.query.dim() != len(call.layout_query) or call.query.numel() == 0:
        refuse(call.op, "choice-rank", "query", f"shape {tuple(call.query.shape)} in {call.layout_query}")
    for name, tensor in (("query", call.query), *call.keys.items()):
        if alike and (tensor.dtype not in (torch.float16, torch.bfloat16) or tensor.dtype != call.query.dtype):
            refuse(call.op, "choice-dtype", name, tensor.dtype)
        apart = blocks_apart and call.paged and name != "query" and tensor.dim() == 4 and tensor.size(0) > 0
        if not (tensor[0] if apart else tensor).is_contiguous():
            refuse(call.op, "choice-contiguous", name, f"strides {tensor.stride()} of {tuple(tensor.shape)}")
        if name != "query" and (tensor.dim() != rank or tensor.size(-2) != 1 or tensor.numel() == 0):
            refuse(call.op, "choice-rank", name, f"shape {tuple(tensor.shape)} in {call.layout_kv}")
    named = (("actual_seq_lengths_query", call.q_lens, call.layout_query == "TND"),)
    for name, lens, needed in (*named, (call.kv_lens_name, call.kv_lens, call.layout_kv != "BSND")):
        if lens is None and needed:
            refuse(call.op, "choice-lens", name, None)
        if lens is not None and (lens.dtype != torch.int32 or lens.dim() != 1):
            refuse(call.op, "choice-lens", name, f"{lens.dtype}, shape {tuple(lens.shape)}")
    requests = call.query.size(0) if call.q_lens is None else call.q_lens.size(0)
    if call.kv_lens is not None and call.kv_lens.size(0) != requests:
        refuse(call.op, "choice-lens", call.kv_lens_name, f"{call.kv_lens.size(0)} lengths for {requests} requests")
    if call.table is not None:
        if call.table.dtype != torch.int32 or call.table.dim() != 2 or call.table.size(0) != requests:
            refuse(call.op, "choice-table", "block_table", f"{call.table.dtype}, shape {tuple(call.table.shape)}")
        size = next(iter(call.keys.values())).size(1)
        if size % 16 or size > 1024:
            refuse(call.op, "choice-block-size", "key", f"blocks of {size} tokens")
    if sparse_mode not in (0, 3):
        refuse(call.op, "choice-mode", "sparse_mode", sparse_mode)
    for name, tokens in (("pre_tokens", pre_tokens), ("next_tokens", next_tokens)):
        if tokens != MAX_TOKENS:
            refuse(call.op, "choice-band", name, tokens)


def _spans(op: str, lens: list[int], packed: bool, limit: int, name: str) -> list[tuple[int, int]]:
    """(start, length) of each request along its axis."""
    if not packed:
        spans = [(0, length) for length in lens]
    else:
        spans = [(start, end - start) for start, end in zip([0, *lens], lens, strict=False)]
    for row, (start, length) in enumerate(spans):
        if length < 0 or start + length > limit:
            raise DeviceFault(op, f"{name} gives request {row} the tokens {start} to {start + length} of {limit}")
    return spans


def requests(call: SparseCall) -> list[Request]:
    """The requests of a checked call.

    Raises:
        DeviceFault: lengths outside the tensors.
    """
    packed = call.layout_query == "TND"
    count = call.query.size(0) if call.q_lens is None else call.q_lens.size(0)
    q_limit = call.query.size(0 if packed else 1)
    q_lens = [q_limit] * count if call.q_lens is None else call.q_lens.tolist()
    key = next(iter(call.keys.values()))
    if call.table is not None:
        kv_limit = call.table.size(1) * key.size(1)
    else:
        kv_limit = key.size(0 if call.layout_kv == "TND" else 1)
    kv_lens = [kv_limit] * count if call.kv_lens is None else call.kv_lens.tolist()
    q_spans = _spans(call.op, q_lens, packed, q_limit, "actual_seq_lengths_query")
    kv_spans = _spans(call.op, kv_lens, call.layout_kv == "TND", kv_limit, call.kv_lens_name)
    return [
        Request(row, *q_span, *kv_span) for row, (q_span, kv_span) in enumerate(zip(q_spans, kv_spans, strict=True))
    ]


def key_rows(call: SparseCall, name: str, request: Request) -> torch.Tensor:
    """Rows of one request, one key head.

    Args:
        call: the checked call.
        name: which of its keys.
        request: the request.

    Returns:
        Shape: [kv_len, dim]; a view or a copy.

    Raises:
        DeviceFault: a block outside the cache.
    """
    tensor = call.keys[name]
    if call.table is not None:
        size = tensor.size(1)
        ids = block_ids(call.op, call.table, request.row, 0, -(-request.kv_len // size), tensor, "block_table")
        return tensor[torch.tensor(ids, dtype=torch.int64)].view(-1, tensor.size(-1))[: request.kv_len]
    if call.layout_kv == "TND":
        return tensor[request.kv_start : request.kv_start + request.kv_len, 0]
    return tensor[request.row, : request.kv_len, 0]


def query_rows(tensor: torch.Tensor, layout: str, request: Request) -> torch.Tensor:
    """Query tokens of one request. Shape: [q_len, ...]; a view."""
    if layout == "TND":
        return tensor[request.q_start : request.q_start + request.q_len]
    return tensor[request.row, : request.q_len]


def check_written(call: SparseCall, name: str, rows: torch.Tensor, request: Request) -> None:
    """Faults on rows that were never written.

    Args:
        call: the call.
        name: which of its keys.
        rows: Shape: [tokens, dim]; those that the query reads.
        request: the request.

    Raises:
        DeviceFault: one of them is poison.
    """
    bad = poisoned_rows(rows)
    if bad is None:
        return
    layer = layer_of(call.keys[name])
    detail = f"attention reads {name}{place(layer)} where it was never written: request {request.row}, "
    raise DeviceFault(call.op, f"{detail}{int(bad.sum())} such tokens", layer=layer)


def chosen(op: str, indices: torch.Tensor, size: int, seen: int, request: Request) -> torch.Tensor:
    """Positions that one row of sparse indices names, of those that the token sees.

    Args:
        op: full op name.
        indices: blocks of ``size`` tokens; negative ones name none. Shape: [n]; int32.
        size: tokens an index names.
        seen: the token sees those before this one.
        request: the request.

    Returns:
        Shape: [tokens]; int64.

    Raises:
        DeviceFault: a block past the request's keys.
    """
    blocks = indices[indices >= 0].long()
    if blocks.numel() and int(blocks.max()) * size >= request.kv_len:
        detail = f"sparse_indices name block {int(blocks.max())} of request {request.row}"
        raise DeviceFault(op, f"{detail}, which has {request.kv_len} keys")
    tokens = (blocks.unsqueeze(-1) * size + torch.arange(size)).flatten()
    return tokens[tokens < seen]
