"""Refusals of fused_infer_attention_score about masks and sparse modes, and which mask really applies.

This module owns what ``sparse_mode`` means for a call: nothing when each request has one query token and no rope. The
visibility that follows is computed in ``fia_compute``.
"""

from __future__ import annotations

import torch

from .errors import KernelNotCovered
from .fia_call import FiaCall
from .fia_checks_packed import check_packed_sparse
from .fia_requests import Geometry
from .fia_rules import refuse

COMPRESSED = 2048
_MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)


def sparse_mode_applies(call: FiaCall, geometry: Geometry) -> bool:
    """False when the document calls sparse_mode, pre_tokens and next_tokens without effect: Q_S = 1 without rope.

    The packed layouts have no axis Q_S; there the mode always applies.
    """
    return call.layout.packed or geometry.q_seq != 1 or call.query_rope is not None


def _compressed(mask: torch.Tensor) -> bool:
    shape = tuple(mask.shape)
    return shape[-2:] == (COMPRESSED, COMPRESSED) and len(shape) <= 4 and all(size == 1 for size in shape[:-2])


def _check_triangle(call: FiaCall, mask: torch.Tensor) -> None:
    """Spot check: the document leaves the content to the caller; a wrong mask gives wrong numbers silently."""
    square = mask.reshape(COMPRESSED, COMPRESSED)
    right = bool(square[0, 1:].all()) and not bool(square[:, 0].any()) and not bool(square[-1].any())
    if not right or bool(square.diagonal().any()) or not bool(square.diagonal(1).all()):
        refuse(call.op, "mask-triangle", "atten_mask", "a mask that is no strict upper triangle")


def _fits(size: int, wanted: int) -> bool:
    return wanted <= size <= -(-wanted // 32) * 32


def _check_full(call: FiaCall, geometry: Geometry, mask: torch.Tensor) -> None:
    batch, q_seq = geometry.batch, geometry.q_seq
    shape = tuple(mask.shape)
    kv_seq = geometry.kv_seq
    if call.paged and q_seq > 1:
        longest = max((request.kv_len for request in geometry.requests), default=0)
        kv_seq = -(-longest // call.block_size) * call.block_size
    wide_enough = len(shape) > 1 and (shape[-1] >= kv_seq if call.paged else _fits(shape[-1], kv_seq))
    leading = {3: ((1,),), 4: ((batch, 1), (1, 1))}.get(len(shape))
    if leading is not None:
        fits = shape[:-2] in leading and _fits(shape[-2], q_seq)
    else:
        plain = call.input_layout in ("BSH", "BSND", "BNSD", "BNSD_BSND") and call.query_rope is None
        fits = len(shape) == 2 and plain and geometry.head_dim == geometry.value_dim
        fits = fits and (shape[0] == batch if q_seq == 1 else _fits(shape[0], q_seq))
    if not (fits and wide_enough):
        wanted = f"batch {batch}, Q_S {q_seq}, KV_S {kv_seq}, layout {call.input_layout}"
        refuse(call.op, "mask-full", "atten_mask", f"shape {shape} for {wanted}")


def full_mask(call: FiaCall, geometry: Geometry) -> torch.Tensor | None:
    """The explicit mask of a checked call, if one applies.

    Returns:
        None, or a bool view or copy. Shape: [1 or B, Q, KV] with Q >= Q_S and KV at least every kv_len; True is
        masked out.
    """
    mask = call.mask
    if mask is None or (call.sparse_mode in (2, 3, 4) and _compressed(mask)):
        return None
    if mask.dim() == 2:
        mask = mask.unsqueeze(1 if geometry.q_seq == 1 else 0)
    elif mask.dim() == 4:
        mask = mask.squeeze(1)
    return mask.bool()


def check_mask(call: FiaCall, geometry: Geometry, *, contents: bool) -> None:
    """Refuses sparse modes and masks that do not belong together, and masks of the wrong dtype or shape.

    Args:
        call: the call.
        geometry: its sizes.
        contents: whether the mask holds values to look at.

    Raises:
        OpRefused: a documented constraint is broken.
        KernelNotCovered: the tree mask of sparse_mode 9.
    """
    mode, mask = call.sparse_mode, call.mask
    if mode == 9:
        raise KernelNotCovered(call.op, "sparse_mode", mode)
    if mode not in (0, 1, 2, 3, 4):
        refuse(call.op, "sparse-mode", "sparse_mode", mode)
    if mask is not None and mask.dtype not in _MASK_DTYPES:
        refuse(call.op, "mask-dtype", "atten_mask", mask.dtype)
    applies = sparse_mode_applies(call, geometry)
    if call.layout.packed:
        check_packed_sparse(call, geometry)
    if mask is None:
        if mode and applies:
            refuse(call.op, "mask-missing", "atten_mask", f"None with sparse_mode {mode}")
        return
    if mode in (2, 3, 4):
        if _compressed(mask):
            if contents:
                _check_triangle(call, mask)
            return
        if applies:
            refuse(call.op, "mask-compressed", "atten_mask", f"shape {tuple(mask.shape)} with sparse_mode {mode}")
    _check_full(call, geometry, mask)
