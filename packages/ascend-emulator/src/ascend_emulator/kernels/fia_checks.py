"""Refusals of fused_infer_attention_score that bind every call: layout, ranks, dtypes, heads, head dims.

This module checks in the order in which later checks need earlier ones, then hands over to the checks of paged caches,
packed layouts, masks, rope and sinks. It computes no attention.
"""

from __future__ import annotations

import torch

from .errors import KernelNotCovered
from .fia_antiquant import check_antiquant, check_antiquant_sizes
from .fia_call import LAYOUTS, FiaCall, value_dim
from .fia_checks_mask import check_mask
from .fia_checks_packed import check_packed
from .fia_checks_paged import check_paged
from .fia_checks_rope import check_rope, check_sink
from .fia_requests import Geometry, resolve
from .fia_rules import refuse

FLOATS = (torch.float16, torch.bfloat16)
_QUANTISED = (torch.int8, torch.int32)


def _check_query(call: FiaCall) -> None:
    if call.input_layout not in LAYOUTS:
        refuse(call.op, "layout", "input_layout", repr(call.input_layout))
    rank = len(call.layout.query)
    if call.query.dim() != rank:
        refuse(call.op, "query-rank", "query", f"shape {tuple(call.query.shape)} for layout {call.layout.query}")
    if call.heads <= 0:
        refuse(call.op, "heads", call.names.heads, call.heads)
    if call.kv_heads_given < 0:
        refuse(call.op, "heads", "num_key_value_heads", call.kv_heads_given)
    if call.query.dtype == torch.int8:
        raise KernelNotCovered(call.op, "query", "a tensor of dtype int8 (quantised form)")
    if call.query.dtype not in FLOATS:
        refuse(call.op, "query-dtype", "query", call.query.dtype)


def _check_key_value(call: FiaCall) -> None:
    if call.antiquant is not None:
        check_antiquant(call, call.antiquant)
    for name, tensor in (("key", call.key), ("value", call.value)):
        if call.antiquant is None and tensor.dtype in _QUANTISED:
            raise KernelNotCovered(call.op, name, f"a tensor of dtype {tensor.dtype} (quantised form)")
        if call.antiquant is None and tensor.dtype != call.query.dtype:
            refuse(call.op, "kv-dtype", name, f"{tensor.dtype} beside a query of {call.query.dtype}")
        if tensor.dim() not in ((3, 4, 5) if call.paged else (call.query.dim(),)):
            refuse(
                call.op, "value-rank", name, f"shape {tuple(tensor.shape)} beside a query of rank {call.query.dim()}"
            )
    for name, some in (("key", call.key), ("value", call.value), ("atten_mask", call.mask)):
        if some is not None and not some.is_contiguous():
            refuse(call.op, "contiguous", name, f"shape {tuple(some.shape)} with strides {some.stride()}")


def _check_heads(call: FiaCall) -> None:
    heads, kv_heads = call.heads, call.kv_heads
    if heads % kv_heads:
        refuse(call.op, "heads-multiple", call.names.heads, f"{heads} beside {kv_heads} key/value heads")
    # Latent attention shares one key/value head among up to 128 query heads; its own rule bounds them.
    if heads // kv_heads > 64 and call.query_rope is None:
        refuse(call.op, "heads-ratio", call.names.heads, f"{heads} beside {kv_heads} key/value heads")
    if heads > 256:
        refuse(call.op, "heads-limit", call.names.heads, heads)
    axes = call.layout.query
    named = [("query", call.query, heads)]
    if not call.paged:
        named += [("key", call.key, kv_heads), ("value", call.value, kv_heads)]
    for name, tensor, count in named:
        if "N" in axes and tensor.size(axes.index("N")) != count:
            refuse(call.op, "head-axis", name, f"shape {tuple(tensor.shape)} ({axes}) for {count} heads")
        if "H" in axes and tensor.size(-1) % count:
            refuse(call.op, "width", name, f"H = {tensor.size(-1)} for {count} heads")


def _check_dense(call: FiaCall) -> None:
    axes = call.layout.query
    key, value = call.key.shape, call.value.shape
    if key[:-1] != value[:-1]:
        refuse(call.op, "kv-shape", "value", f"shape {tuple(value)} beside a key of {tuple(key)}")
    if "B" in axes and key[0] != call.query.size(0):
        refuse(call.op, "kv-batch", "key", f"batch {key[0]} beside a query batch of {call.query.size(0)}")


def key_dim(call: FiaCall) -> int:
    """Width of one key head."""
    return value_dim(call.key, call.layout.query, call.kv_heads, call.paged)


def _check_sizes(call: FiaCall, geometry: Geometry) -> None:
    dim, q_seq = geometry.head_dim, geometry.q_seq
    if key_dim(call) != dim:
        refuse(call.op, "head-dim-equal", "key", f"head dim {key_dim(call)} beside {dim} of the query")
    for name, wide in (("query", dim), ("value", geometry.value_dim)):
        if wide > 512:
            refuse(call.op, "head-dim", name, wide)
        if q_seq > 1 and wide % 16:
            refuse(call.op, "head-dim-align", name, wide)
    if geometry.batch > 65536:
        refuse(call.op, "batch-limit", "query", f"batch {geometry.batch}")
    if q_seq > 20_971_520:
        refuse(call.op, "q-limit", "query", f"Q_S = {q_seq}")
    if q_seq == 1 and not call.layout.packed and max((r.kv_len for r in geometry.requests), default=0) > 262_144:
        refuse(call.op, "kv-limit", call.names.kv_lens, max(r.kv_len for r in geometry.requests))
    latent = call.query_rope is not None
    if q_seq > 1 and call.layout.query in ("BSH", "BSND") and call.heads * dim >= 65535 and not latent:
        refuse(call.op, "hidden-limit", "query", f"N * D = {call.heads * dim}")
    if call.input_layout == "BNSD_BSND" and q_seq == 1:
        refuse(call.op, "bnsd-bsnd", "input_layout", "BNSD_BSND with Q_S = 1")
    if call.layout.output == "NBSD" and not 1 <= q_seq <= 16:
        refuse(call.op, "nbsd", "input_layout", f"{call.input_layout} with Q_S = {q_seq}")
    precise = (0, 1) if q_seq == 1 and not call.layout.packed else (0, 1, 2, 3)
    if call.inner_precise not in precise:
        refuse(call.op, "inner-precise", "inner_precise", f"{call.inner_precise} with Q_S = {q_seq}")


def check(call: FiaCall, *, contents: bool = True) -> Geometry:
    """Refuses a call that the documents refuse.

    Args:
        call: the call.
        contents: whether tensors hold values yet; False while a graph is captured.

    Returns:
        Its sizes and requests.

    Raises:
        OpRefused: a documented constraint is broken.
        KernelNotCovered: a documented form that this emulator does not compute.
    """
    _check_query(call)
    _check_key_value(call)
    _check_heads(call)
    if call.paged:
        check_paged(call)
    else:
        _check_dense(call)
    if call.layout.packed:
        check_packed(call)
    geometry = resolve(call)
    _check_sizes(call, geometry)
    if call.antiquant is not None:
        check_antiquant_sizes(call, geometry, call.antiquant)
    check_rope(call, geometry)
    check_mask(call, geometry, contents=contents)
    check_sink(call, geometry)
    return geometry
