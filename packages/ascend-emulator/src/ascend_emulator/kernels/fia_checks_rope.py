"""Refusals of fused_infer_attention_score with query_rope and key_rope (latent attention), and with a learnable sink.

This module checks forms only; the rope parts are joined to query and key in ``fia_compute``.
"""

from __future__ import annotations

import torch

from .fia_call import FiaCall
from .fia_checks_packed import check_packed_form
from .fia_checks_paged import check_blocks
from .fia_requests import Geometry
from .fia_rules import refuse

ROPE_DIM = 64
_LATENT_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_NBSD", "BSND_NBSD", "BSH_NBSD", "TND", "TND_NTD")
_LATENT_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)


def _check_pair(call: FiaCall, geometry: Geometry, query_rope: torch.Tensor, key_rope: torch.Tensor) -> None:
    pairs = (("query_rope", query_rope, call.query, call.heads), ("key_rope", key_rope, call.key, call.kv_heads))
    for name, rope, part, heads in pairs:
        if rope.dtype != part.dtype:
            refuse(call.op, "rope-dtype", name, f"{rope.dtype} beside {part.dtype}")
        if name == "key_rope" and not rope.is_contiguous():
            refuse(call.op, "contiguous", name, f"shape {tuple(rope.shape)} with strides {rope.stride()}")
        if part.dim() == 5:  # NZ
            wanted = (*part.shape[:2], ROPE_DIM // part.size(4), *part.shape[3:])
            if tuple(rope.shape) != wanted:
                refuse(call.op, "rope-shape", name, f"shape {tuple(rope.shape)}, wanted {wanted}")
            continue
        joined = part.dim() == 3 and (("H" in call.layout.query) if name == "query_rope" or not call.paged else True)
        wanted = (*part.shape[:-1], ROPE_DIM * heads if joined else ROPE_DIM)
        if tuple(rope.shape) != wanted:
            refuse(call.op, "rope-shape", name, f"shape {tuple(rope.shape)}, wanted {wanted}")
    if geometry.head_dim not in (128, 512):
        refuse(call.op, "rope-head-dim", "query", f"head dim {geometry.head_dim} with query_rope")
    if geometry.head_dim == 128 and not call.layout.packed:
        refuse(call.op, "rope-head-dim", "query", f"head dim 128 with query_rope in {call.input_layout}")


def _check_latent(call: FiaCall, geometry: Geometry) -> None:
    mode, masked = call.sparse_mode, call.mask is not None
    banded = mode == 4 and masked and not call.layout.packed and not call.op.endswith("_v2")
    if call.input_layout not in (("BSND",) if banded else _LATENT_LAYOUTS):
        refuse(call.op, "mla-layout", "input_layout", f"{call.input_layout} with sparse_mode {mode}")
    if call.heads not in ((128,) if banded else _LATENT_HEADS):
        refuse(call.op, "mla-heads", call.names.heads, f"{call.heads} with sparse_mode {mode}")
    if call.kv_heads != 1 or geometry.value_dim != 512:
        refuse(call.op, "mla-kv-heads", "num_key_value_heads", f"{call.kv_heads} of width {geometry.value_dim}")
    if banded:
        for request in geometry.requests:
            if request.q_len > request.kv_len or request.kv_len > 131_088:
                refuse(call.op, "mla-band", call.names.kv_lens, f"{request.kv_len} for {request.q_len} query tokens")
        return
    if not call.paged:
        refuse(call.op, "mla-paged", "block_table", None)
    if not 1 <= geometry.q_seq <= 16:
        refuse(call.op, "mla-q", "query", f"Q_S = {geometry.q_seq}")
    forms = {(0, False), (3, True)} if call.layout.packed else {(0, False) if geometry.q_seq == 1 else (3, True)}
    if (mode, masked) not in forms:
        given = f"{mode} {'with' if masked else 'without'} atten_mask, Q_S = {geometry.q_seq}"
        refuse(call.op, "mla-sparse", "sparse_mode", given)


def check_rope(call: FiaCall, geometry: Geometry) -> None:
    """Refuses rope parts, packed forms and block sizes that do not go together.

    Raises:
        OpRefused: a documented constraint is broken.
    """
    if (call.query_rope is None) != (call.key_rope is None):
        missing = "key_rope" if call.key_rope is None else "query_rope"
        refuse(call.op, "rope-pair", missing, None)
    if call.query_rope is not None and call.key_rope is not None:
        _check_pair(call, geometry, call.query_rope, call.key_rope)
    if call.layout.packed:
        check_packed_form(call, geometry)
    if call.query_rope is not None and geometry.head_dim == 512:
        _check_latent(call, geometry)
    if call.paged:
        check_blocks(call, geometry)


def check_sink(call: FiaCall, geometry: Geometry) -> None:
    """Refuses a learnable sink outside its documented form.

    Raises:
        OpRefused: a documented constraint is broken.
    """
    sink = call.sink
    if sink is None:
        return
    if call.input_layout not in ("TND", "NTD_TND"):
        refuse(call.op, "sink-layout", "learnable_sink", f"given in {call.input_layout}")
    if sink.dtype != torch.bfloat16:
        refuse(call.op, "sink-dtype", "learnable_sink", sink.dtype)
    if tuple(sink.shape) != (call.heads,):
        refuse(call.op, "sink-shape", "learnable_sink", f"shape {tuple(sink.shape)} for {call.heads} heads")
    if geometry.value_dim > 128:
        refuse(call.op, "sink-dim", "learnable_sink", f"value heads of {geometry.value_dim}")
