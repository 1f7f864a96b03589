"""Refusals of fused_infer_attention_score for paged caches: block table, block size, cache layout.

What needs the requests' lengths is checked in ``check_blocks``, the rest before the requests are known. Block ids are
not looked at: the op does not check them, the computation faults on them.
"""

from __future__ import annotations

import torch

from .caches import nz_width
from .fia_call import FiaCall
from .fia_requests import Geometry
from .fia_rules import holds, refuse

INT32_MAX = 2**31 - 1


def check_paged(call: FiaCall) -> None:
    """Refuses block tables and caches of the wrong form.

    Raises:
        OpRefused: a documented constraint is broken.
    """
    table = call.block_table
    assert table is not None
    if table.dtype != torch.int32:
        refuse(call.op, "table-dtype", "block_table", table.dtype)
    if table.dim() != 2:
        refuse(call.op, "table-rank", "block_table", f"shape {tuple(table.shape)}")
    for name, cache in (("key", call.key), ("value", call.value)):
        _check_cache(call, name, cache)
    narrow = (2, 4) if call.key.dim() == 5 else (call.key.dim() - 1,)
    alike = [size for axis, size in enumerate(call.key.shape) if axis not in narrow]
    if call.key.dim() != call.value.dim() or alike != [
        size for axis, size in enumerate(call.value.shape) if axis not in narrow
    ]:
        refuse(call.op, "kv-shape", "value", f"shape {tuple(call.value.shape)} beside a key of {tuple(call.key.shape)}")


def _check_cache(call: FiaCall, name: str, cache: torch.Tensor) -> None:
    shape = tuple(cache.shape)
    if cache.dim() == 5:
        if call.query_rope is None and call.antiquant is None:
            refuse(call.op, "cache-nz", name, f"shape {shape} without query_rope")
        if cache.size(1) != call.kv_heads or cache.size(4) != nz_width(cache.dtype):
            refuse(call.op, "cache-nz", name, f"shape {shape} for {call.kv_heads} key/value heads")
    elif cache.dim() == 4:
        # One shared latent head lies in memory alike either way; engines pass it with a head axis in every layout.
        latent = call.query_rope is not None and call.kv_heads == 1
        if call.layout.query in ("BSH", "BSND") and not latent:
            refuse(call.op, "cache-layout", name, f"shape {shape} with {call.layout.query}")
        if cache.size(1) != call.kv_heads:
            refuse(call.op, "cache-layout", name, f"shape {shape} for {call.kv_heads} key/value heads")
    else:
        if cache.size(-1) % call.kv_heads:
            refuse(call.op, "width", name, f"H = {cache.size(-1)} for {call.kv_heads} heads")
        if cache.size(-1) > 65535:
            refuse(call.op, "cache-row", name, f"KV_N * D = {cache.size(-1)}")
    if cache.size(3 if cache.dim() == 5 else -2) != call.block_size:
        refuse(call.op, "block-size-axis", "block_size", f"{call.block_size} for a cache {name} of {shape}")


def _check_block_size(call: FiaCall, geometry: Geometry) -> None:
    size = call.block_size
    if call.query_rope is not None and geometry.head_dim == 512:
        banded = call.sparse_mode == 4
        if banded and size not in (64, 128):
            refuse(call.op, "block-size-band", "block_size", size)
        if size not in (16, 128) and not banded and holds("block-size-mla"):
            refuse(call.op, "block-size-mla", "block_size", size)
        _check_wide(call)
        return
    if call.layout.packed and not holds("block-size-packed"):
        _check_wide(call)
        return
    decode = geometry.q_seq == 1
    step = 16 if decode else 128
    if size % step or not step <= size <= 512:
        rule = "block-size-packed" if call.layout.packed else "block-size-decode" if decode else "block-size"
        refuse(call.op, rule, "block_size", f"{size} with Q_S = {geometry.q_seq}")


def _check_wide(call: FiaCall) -> None:
    if call.block_size % 16 or not 16 <= call.block_size <= 1024:
        refuse(call.op, "block-size-wide", "block_size", call.block_size)


def check_blocks(call: FiaCall, geometry: Geometry) -> None:
    """Refuses block sizes, table shapes and cache sizes that do not fit the requests.

    Raises:
        OpRefused: a documented constraint is broken.
    """
    table = call.block_table
    assert table is not None
    _check_block_size(call, geometry)
    if table.size(0) != geometry.batch:
        refuse(call.op, "table-batch", "block_table", f"{table.size(0)} rows for {geometry.batch} requests")
    needed = sum(-(-request.kv_len // call.block_size) for request in geometry.requests)
    if needed > call.key.size(0):
        refuse(call.op, "blocks-enough", "key", f"{call.key.size(0)} blocks, {needed} needed")
    if geometry.q_seq == 1:
        for name, cache in (("key", call.key), ("value", call.value)):
            if cache.numel() > INT32_MAX:
                refuse(call.op, "cache-int32", name, f"{cache.numel()} elements")
