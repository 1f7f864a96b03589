"""Refusals of fused_infer_attention_score for the packed layouts TND, NTD, TND_NTD and NTD_TND.

Lengths are checked where they are resolved (``fia_requests``); this module checks dtype, head dims, sparse mode and
band.
"""

from __future__ import annotations

import torch

from .fia_call import FiaCall
from .fia_requests import Geometry
from .fia_rules import holds, refuse

MAX_TOKENS = 1 << 20
_TND_DIMS = {(128, 128), (192, 128), (192, 192)}
_NTD_DIMS = {(128, 128), (192, 128)}


def check_packed(call: FiaCall) -> None:
    """Refuses empty and too long packed tensors, before the requests are known.

    Raises:
        OpRefused: a documented constraint is broken.
    """
    for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        if tensor.numel() == 0:
            refuse(call.op, "tnd-empty", name, f"shape {tuple(tensor.shape)}")
    tokens = call.query.size(call.layout.query.index("T"))
    if tokens > MAX_TOKENS:
        refuse(call.op, "tnd-tokens", "query", f"T = {tokens}")


def check_packed_form(call: FiaCall, geometry: Geometry) -> None:
    """Refuses dtypes, head dims and caches that the packed layouts do not take.

    Raises:
        OpRefused: a documented constraint is broken.
    """
    dims = (geometry.head_dim, geometry.value_dim)
    layout = call.input_layout
    if geometry.head_dim == 512:
        if call.query_rope is None:
            refuse(call.op, "tnd-dims", "query", f"head dims {dims} without query_rope in {layout}")
        if call.layout.query == "NTD":
            refuse(call.op, "tnd-layout", "input_layout", f"{layout} with head dim 512")
        return
    if layout == "TND_NTD":
        refuse(call.op, "tnd-layout", "input_layout", f"{layout} with head dim {geometry.head_dim}")
    if call.query.dtype != torch.bfloat16 and holds("tnd-dtype"):
        refuse(call.op, "tnd-dtype", "query", f"{call.query.dtype} in {layout} with head dim {geometry.head_dim}")
    roped = call.query_rope is not None
    allowed = {(128, 128)} if roped else _TND_DIMS if call.layout.query == "TND" else _NTD_DIMS
    if dims == (64, 64) and call.layout.query == "TND" and not roped:
        if holds("tnd-dims-64"):
            refuse(call.op, "tnd-dims-64", "query", f"head dims {dims} in {layout}")
        if call.heads != call.kv_heads:
            refuse(call.op, "tnd-dims-mha", "query", f"head dims {dims}, {call.heads} heads on {call.kv_heads}")
    elif dims not in allowed:
        refuse(
            call.op,
            "tnd-dims",
            "query",
            f"query/key and value head dims {dims} in {layout}{', roped' if roped else ''}",
        )
    if call.paged and (roped or call.layout.query == "NTD"):
        refuse(call.op, "tnd-paged", "block_table", f"a table in {layout} with head dim {geometry.head_dim}")


def check_packed_sparse(call: FiaCall, geometry: Geometry) -> None:
    """Refuses sparse modes, bands and lengths that the packed layouts do not take.

    A request without key/value is exempt from the length rule: padded rows of captured graphs have length 0, and rows
    without key/value are documented to give zeros.

    Raises:
        OpRefused: a documented constraint is broken.
    """
    masked = call.mask is not None
    if call.sparse_mode not in (0, 3, 4) or (call.sparse_mode == 0) == masked:
        refuse(call.op, "tnd-sparse", "sparse_mode", f"{call.sparse_mode} {'with' if masked else 'without'} atten_mask")
    for request in geometry.requests:
        q_len, kv_len = request.q_len, request.kv_len
        if call.sparse_mode == 3 and q_len > kv_len > 0:
            refuse(
                call.op, "tnd-longer", call.names.kv_lens, f"{kv_len} for {q_len} query tokens of request {request.row}"
            )
        if call.sparse_mode == 4 and kv_len > 0:
            pre, following = call.pre_tokens, call.next_tokens
            if pre < -q_len or following < -kv_len or pre + following < 0:
                refuse(call.op, "tnd-band", "pre_tokens", f"{pre}, next_tokens {following}, request {request.row}")
