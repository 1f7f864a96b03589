"""atb's attention over paged caches: paged attention, its form with one cache, prefill with a prefix; and packed.

This module owns the ops' refusals and turns each into one call of the attention of ``fia_compute``, which reads the
pages and faults. Masks other than the causal one are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .fia_call import UNBOUNDED, ArgumentNames, FiaCall
from .fia_compute import attend
from .fia_requests import resolve
from .pose import Scope
from .rules import declare, holds, note, refuse

OP = "atb::_npu_paged_attention"
OP_WORKSPACE = "atb::_npu_paged_attention_get_workspace"
OP_MLA = "atb::_npu_paged_attention_mla"
OP_PREFIX = "atb::_npu_flash_attention_qlens"
OP_UNPAD = "atb::_npu_flash_attention_unpad"
_FAMILY = "atb::_npu_paged_attention[_mla], _npu_flash_attention_qlens, _npu_flash_attention_unpad"
_DOC = "CANN 8.0, ATB API, PagedAttentionOperation"
_TEST = "test_kernels_atb_attention.py"
_NAMES = ArgumentNames("num_heads", "seq_len", "context_lens")
_FLOATS = (torch.float16, torch.bfloat16)
LATENT, ROPE = 512, 64

declare(
    _FAMILY,
    _DOC,
    _TEST,
    {
        "atb-dtype": ("float16, bfloat16 throughout", "cast query, caches and out to one dtype"),
        "atb-heads": ("query heads a positive multiple of the key/value heads", "pass the heads of the tensors"),
        "atb-query": ("a query (tokens, heads, dim) or (tokens, heads * dim) of the caches' dim", "reshape the query"),
        "atb-cache": ("contiguous caches (blocks, block_size, kv heads, dim)", "pass the cache itself"),
        "atb-block-size": ("a block size that is a multiple of 16", "use blocks of 128 tokens"),
        "atb-head-dim": ("head dims of at most 256 (latent: 576)", "use the latent op, or FIA"),
        "atb-table": ("an int32 block table (requests, blocks)", "call .to(torch.int32), one row a request"),
        "atb-lens": ("int32 lengths (requests,); tokens are requests in decoding", "pass one length a request"),
        "atb-out": ("out of the query's shape with the value's dim", "allocate out as the query"),
    },
)
declare(
    _FAMILY,
    "CANN 8.0.RC2, ATB API, PagedAttentionOperation",
    _TEST,
    {"atb-block-bytes": ("at most 128 * 128 elements in dim * block_size", "use blocks of 64 tokens, or FIA")},
    Scope(before=(8, 1)),
)
declare(
    OP_PREFIX,
    "CANN 8.0, ATB API, SelfAttentionOperation (MASK_TYPE_NORM_COMPRESS)",
    _TEST,
    {"atb-mask": ("a square mask that hides exactly what is above the diagonal", "pass the 128 x 128 causal mask")},
)
note(_FAMILY, "block ids within the cache", _DOC, "a `DeviceFault` (507015) for those that are read")
note(_FAMILY, "a request without key/value", "—", "gives zeros, as FIA documents it: padded rows have length 0")
note(
    "atb::_npu_paged_attention",
    "as many table rows as tokens",
    _DOC,
    "more rows are taken: graph runners pass the padded table",
)
note(
    "atb::_npu_paged_attention_splitfuse[_v2], _npu_flash_attention[_v2, _v3, _prefix_v2], npu_ring_mla, "
    "npu_self_attention_prefix_encoder, _npu_paged_attention_quant, _npu_paged_attention_v2",
    "—",
    "no public document gives their masks' meaning",
    "no kernel: the call raises an error that names the op",
)


def _common(
    op: str,
    query: torch.Tensor,
    parts: list[tuple[str, torch.Tensor]],
    heads: int,
    kv_heads: int,
    out: torch.Tensor,
    value_dim: int,
) -> torch.Tensor:
    """Checks what all forms share; the query as [tokens, heads, dim]."""
    for name, tensor in (("query", query), *parts, ("out", out)):
        if tensor.dtype not in _FLOATS or tensor.dtype != query.dtype:
            refuse(op, "atb-dtype", name, tensor.dtype)
    if heads <= 0 or kv_heads <= 0 or heads % kv_heads:
        refuse(op, "atb-heads", "num_heads", f"{heads} beside {kv_heads} key/value heads")
    dim = parts[0][1].size(-1)
    if query.dim() not in (2, 3) or query.numel() != query.size(0) * heads * dim:
        refuse(op, "atb-query", "query", f"shape {tuple(query.shape)} for {heads} heads of {dim}")
    wanted = (query.size(0), heads * value_dim) if query.dim() == 2 else (query.size(0), heads, value_dim)
    if not out.is_contiguous() or out.numel() != query.size(0) * heads * value_dim or out.size(0) != query.size(0):
        refuse(op, "atb-out", "out", f"shape {tuple(out.shape)}, wanted {wanted}")
    return query.reshape(-1, heads, dim)


def _check_cache(op: str, name: str, cache: torch.Tensor, kv_heads: int, limit: int) -> None:
    if cache.dim() != 4 or cache.size(2) != kv_heads or not cache.is_contiguous():
        refuse(op, "atb-cache", name, f"shape {tuple(cache.shape)}, strides {cache.stride()} for {kv_heads} heads")
    size, dim = cache.size(1), cache.size(3)
    if size % 16:
        refuse(op, "atb-block-size", name, f"shape {tuple(cache.shape)}")
    if dim > limit:
        refuse(op, "atb-head-dim", name, dim)
    if limit == 256 and size * dim > 128 * 128 and holds("atb-block-bytes"):
        refuse(op, "atb-block-bytes", name, f"{size} * {dim}")


def _check_table(op: str, table: torch.Tensor, lens: torch.Tensor, requests: int | None) -> None:
    if table.dtype != torch.int32 or table.dim() != 2 or table.size(0) < (lens.size(0) if lens.dim() else 0):
        refuse(op, "atb-table", "block_table", f"{table.dtype}, shape {tuple(table.shape)}")
    if lens.dtype != torch.int32 or lens.dim() != 1 or (requests is not None and lens.size(0) != requests):
        refuse(op, "atb-lens", "context_lens", f"{lens.dtype}, shape {tuple(lens.shape)} for {requests} requests")


def attend_paged(
    op: str,
    layout: str,
    query: torch.Tensor,
    parts: list[torch.Tensor],
    lens: tuple[Sequence[int] | None, Sequence[int]],
    table: torch.Tensor | None,
    scale: float,
    kv_heads: int,
    mode: int,
    outs: tuple[torch.Tensor, torch.Tensor | None],
    ropes: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """One call of FIA's attention.

    Args:
        op: full op name, for faults.
        layout: BSND or TND.
        query: as the layout spells.
        parts: key and value; paged: [blocks, block_size, kv_heads * dim].
        lens: query lengths (cumulative in TND; None: one token each) and key/value lengths (cumulative when dense).
        table: block table, or None for dense keys and values.
        scale: factor of the scores.
        kv_heads: key/value heads.
        mode: 0 for all, 3 for causal, aligned to the last tokens.
        outs: attention output in the layout, and None or the log-sum-exp. *Mutated*.
        ropes: None, or the rope parts of query and key.

    Raises:
        OpRefused: lengths outside the tensors.
        DeviceFault: see ``fia_compute.attend``.
    """
    paged = table is not None
    call = FiaCall(
        op=op,
        names=_NAMES,
        query=query,
        key=parts[0],
        value=parts[1],
        query_rope=None if ropes is None else ropes[0],
        key_rope=None if ropes is None else ropes[1],
        mask=None,
        q_lens=lens[0],
        kv_lens=lens[1],
        block_table=table,
        sink=None,
        heads=query.size(-2),
        kv_heads_given=kv_heads,
        scale=scale,
        pre_tokens=UNBOUNDED,
        next_tokens=UNBOUNDED,
        input_layout=layout,
        sparse_mode=mode,
        block_size=parts[0].size(1) if paged else 0,
        inner_precise=0,
        want_lse=outs[1] is not None,
    )
    if query.numel():
        attend(call, resolve(call), *outs)


def _decode(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_heads: int,
    scale: float,
    table: torch.Tensor,
    lens: torch.Tensor,
    out: torch.Tensor,
) -> None:
    tokens = query.size(0)
    target = out.view(tokens, 1, query.size(1), -1)
    attend_paged(
        op,
        "BSND",
        query.unsqueeze(1),
        [key.flatten(2), value.flatten(2)],
        (None, lens.tolist()),
        table[:tokens],
        scale,
        kv_heads,
        0,
        (target, None),
    )


def npu_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
) -> None:
    """Attention of one query token a request over its pages.

    Args:
        query: Shape: [requests, heads, dim] or [requests, heads * dim]; float16 or bfloat16.
        key_cache: Shape: [blocks, block_size, kv_heads, dim]; the query's dtype.
        value_cache: Shape: [blocks, block_size, kv_heads, value_dim].
        num_kv_heads: key/value heads.
        num_heads: query heads.
        scale_value: factor of the scores.
        block_table: Shape: [at least requests, blocks]; int32.
        context_lens: key/value tokens of each request. Shape: [requests]; int32; on the host or the device.
            *Padding*: 0, which gives zeros.
        out: Shape: as the query, with value_dim. *Mutated*.
        workspace: not used.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        CANN, ATB API, PagedAttentionOperation.
    """
    parts = [("key_cache", key_cache), ("value_cache", value_cache)]
    rows = _common(OP, query, parts, num_heads, num_kv_heads, out, value_cache.size(-1))
    for name, cache in parts:
        _check_cache(OP, name, cache, num_kv_heads, 256)
    _check_table(OP, block_table, context_lens, query.size(0))
    _decode(OP, rows, key_cache, value_cache, num_kv_heads, scale_value, block_table, context_lens, out)


def get_workspace(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Scratch memory for ``npu_paged_attention``: bytes for one float32 accumulator an output element."""
    return torch.empty(out.numel() * 4, dtype=torch.uint8)


def npu_paged_attention_mla(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    mla_vheadsize: int,
    out: torch.Tensor,
) -> None:
    """The same over one cache, of which the first ``mla_vheadsize`` elements of a row are the value.

    Args:
        query: this and what is not named here is as in ``npu_paged_attention``.
        key_cache: Shape: [blocks, block_size, kv_heads, dim]; latent part first, then the rope part.
        mla_vheadsize: width of a value head.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        CANN, ATB API, PagedAttentionOperation (MLA).
    """
    rows = _common(OP_MLA, query, [("key_cache", key_cache)], num_heads, num_kv_heads, out, mla_vheadsize)
    _check_cache(OP_MLA, "key_cache", key_cache, num_kv_heads, LATENT + ROPE)
    _check_table(OP_MLA, block_table, context_lens, query.size(0))
    value = key_cache[..., :mla_vheadsize]
    _decode(OP_MLA, rows, key_cache, value, num_kv_heads, scale_value, block_table, context_lens, out)


def _check_causal(mask: torch.Tensor) -> None:
    hidden = mask.reshape(mask.shape[-2:]) != 0 if mask.numel() == mask.size(-1) * mask.size(-2) else None
    if hidden is None or hidden.size(0) != hidden.size(1) or not torch.equal(hidden, torch.ones_like(hidden).triu(1)):
        refuse(OP_PREFIX, "atb-mask", "mask", f"shape {tuple(mask.shape)}, other elements or another form")


def npu_flash_attention_qlens(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    context_lens: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: torch.Tensor,
) -> None:
    """Causal attention of new tokens over their pages; the last new token of a request is its last in the cache.

    Args:
        query: Shape: [tokens, heads * dim] or [tokens, heads, dim], one request after the other.
        key_cache: Shape: [blocks, block_size, kv_heads, dim].
        value_cache: Shape: [blocks, block_size, kv_heads, value_dim].
        block_table: Shape: [requests, blocks]; int32.
        mask: square, any size: zero on and below the diagonal, anything else above.
        seq_len: new tokens of each request. Shape: [requests]; int32.
        context_lens: all tokens of each request, the new ones included. Shape: [requests]; int32.
        num_kv_heads: key/value heads.
        num_heads: query heads.
        scale_value: factor of the scores.
        out: Shape: as the query, with value_dim. *Mutated*.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        CANN, ATB API, SelfAttentionOperation (prefix encoder).
    """
    parts = [("key_cache", key_cache), ("value_cache", value_cache)]
    rows = _common(OP_PREFIX, query, parts, num_heads, num_kv_heads, out, value_cache.size(-1))
    for name, cache in parts:
        _check_cache(OP_PREFIX, name, cache, num_kv_heads, 256)
    _check_table(OP_PREFIX, block_table, context_lens, None)
    if seq_len.dtype != torch.int32 or seq_len.shape != context_lens.shape:
        refuse(OP_PREFIX, "atb-lens", "seq_len", f"{seq_len.dtype}, shape {tuple(seq_len.shape)}")
    _check_causal(mask)
    lens = seq_len.cumsum(0).tolist(), context_lens.tolist()
    target = out.view(rows.size(0), num_heads, -1)
    caches = [key_cache.flatten(2), value_cache.flatten(2)]
    attend_paged(OP_PREFIX, "TND", rows, caches, lens, block_table, scale_value, num_kv_heads, 3, (target, None))


def npu_flash_attention_unpad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seq_len: torch.Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: torch.Tensor,
) -> None:
    """Unmasked attention within each sequence of a packed batch.

    Args:
        query: Shape: [tokens, heads, dim], one sequence after the other.
        key: Shape: [tokens, kv_heads, dim].
        value: Shape: [tokens, kv_heads, value_dim].
        seq_len: tokens of each sequence. Shape: [sequences]; int32.
        scale_value: factor of the scores.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        out: Shape: [tokens, heads, value_dim]. *Mutated*.

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        CANN, ATB API, SelfAttentionOperation (encoder).
    """
    parts = [(name, part.reshape(part.size(0), num_kv_heads, -1)) for name, part in (("key", key), ("value", value))]
    rows = _common(OP_UNPAD, query, parts, num_heads, num_kv_heads, out, parts[1][1].size(-1))
    if seq_len.dtype != torch.int32 or seq_len.dim() != 1:
        refuse(OP_UNPAD, "atb-lens", "seq_len", f"{seq_len.dtype}, shape {tuple(seq_len.shape)}")
    ends = seq_len.cumsum(0).tolist()
    target = out.view(rows.size(0), num_heads, -1)
    tensors = [part for _, part in parts]
    attend_paged(OP_UNPAD, "TND", rows, tensors, (ends, ends), None, scale_value, num_kv_heads, 0, (target, None))


KERNELS = {
    OP: npu_paged_attention,
    OP_WORKSPACE: get_workspace,
    OP_MLA: npu_paged_attention_mla,
    OP_PREFIX: npu_flash_attention_qlens,
    OP_UNPAD: npu_flash_attention_unpad,
}
