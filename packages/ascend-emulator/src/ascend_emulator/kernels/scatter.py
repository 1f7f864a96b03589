"""npu::npu_scatter_nd_update and its in-place form.

This module owns both ops: checks of the documented constraints, the range check of indices, and the write.
"""

from __future__ import annotations

import math

import torch

from .errors import DeviceFault
from .faults import layer_of, place
from .rules import declare, document, note, refuse

OP = "npu::npu_scatter_nd_update"
OP_INPLACE = "npu::npu_scatter_nd_update_"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.int8)

declare(
    "npu_scatter_nd_update[_]",
    document("npu_scatter_nd_update_"),
    "test_kernels_other_refusals.py",
    {
        "scatter-dtype": ("float32, float16, bfloat16, bool, int64, int8", "view the bytes as int8"),
        "scatter-same-dtype": ("updates of the input's dtype", "cast the updates"),
        "scatter-rank": ("an input of 1 to 8 axes", "reshape the input"),
        "scatter-index-dtype": ("indices of dtype int32 or int64", "cast the indices"),
        "scatter-index-rank": ("indices of rank 2 or more", "view the indices as (n, 1)"),
        "scatter-index-width": ("a last axis of indices of 1 to input.dim()", "shorten the index tuples"),
        "scatter-updates": (
            "updates of shape indices.shape[:-1] + input.shape[a:], a the last axis of indices",
            "reshape the updates",
        ),
    },
)
declare(
    "npu_scatter_nd_update[_]",
    "SGLang 0.5.23, hardware_backend/npu/memory_pool_npu.py; it names no release",
    "test_kernels_other_refusals.py",
    {
        "scatter-4d": (
            "(not documented) no updates (n, 1, heads, width) of an input (slots, 1, heads, width): the deployed "
            "operator's tiling rejects them",
            "view the input as (slots, heads, width), the updates as (n, heads, width)",
        ),
    },
)
note(
    "npu_scatter_nd_update[_]",
    "int32 indices only; -1 skips a row",
    "vLLM-Ascend pull requests 15290, 16756",
    "its document says int32 or int64, and that no index is out of range: both dtypes pass, -1 is a `DeviceFault`",
)
note(
    "npu_scatter_nd_update[_]",
    "no index out of range",
    "its document",
    "a `DeviceFault` (507015), and nothing is written: test_kernels_faults.py",
)
note(
    "npu_scatter_nd_update[_]",
    "(not documented) which of two updates of one place wins",
    "—",
    "not refused; the last one here",
)


def _check(op: str, input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> None:
    if input.dtype not in _DTYPES:
        refuse(op, "scatter-dtype", "input", input.dtype)
    if updates.dtype != input.dtype:
        refuse(op, "scatter-same-dtype", "updates", f"{updates.dtype} beside an input of {input.dtype}")
    if not 1 <= input.dim() <= 8:
        refuse(op, "scatter-rank", "input", f"{input.dim()} axes")
    if indices.dtype not in (torch.int32, torch.int64):
        refuse(op, "scatter-index-dtype", "indices", indices.dtype)
    if indices.dim() < 2:
        refuse(op, "scatter-index-rank", "indices", f"shape {tuple(indices.shape)}")
    width = indices.size(-1)
    if not 1 <= width <= input.dim():
        refuse(op, "scatter-index-width", "indices", f"shape {tuple(indices.shape)} for an input of {input.dim()} axes")
    wanted = (*indices.shape[:-1], *input.shape[width:])
    if tuple(updates.shape) != wanted:
        refuse(op, "scatter-updates", "updates", f"shape {tuple(updates.shape)}, wanted {wanted}")
    if width == 1 and indices.dim() == 2 and input.dim() == 4 and input.size(1) == 1:
        refuse(op, "scatter-4d", "updates", f"shape {tuple(updates.shape)} for an input of {tuple(input.shape)}")


def _check_range(op: str, input: torch.Tensor, tuples: torch.Tensor) -> None:
    sizes = torch.tensor(input.shape[: tuples.size(-1)])
    outside = (tuples < 0) | (tuples >= sizes)
    if not bool(outside.any()):
        return
    number, axis = (int(n) for n in outside.nonzero()[0])
    layer = layer_of(input)
    raise DeviceFault(
        op,
        f"index {number} = {tuple(tuples[number].tolist())} lies outside the input{place(layer)} of shape "
        f"{tuple(input.shape)} (axis {axis}); nothing was written",
        layer=layer,
        slot=int(tuples[number, 0]),
    )


def _write(op: str, input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    _check(op, input, indices, updates)
    width = indices.size(-1)
    tuples = indices.reshape(-1, width).long()
    if tuples.size(0) == 0:
        return input
    _check_range(op, input, tuples)
    rows = updates.reshape(-1, *input.shape[width:])
    if width == 1:
        input.index_copy_(0, tuples.view(-1), rows)
    elif input.is_contiguous():
        flat = tuples[:, 0]
        for axis in range(1, width):
            flat = flat * input.size(axis) + tuples[:, axis]
        input.view(math.prod(input.shape[:width]), *input.shape[width:]).index_copy_(0, flat, rows)
    else:
        input[tuple(tuples.unbind(-1))] = rows
    return input


def npu_scatter_nd_update_(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """Writes ``updates`` at ``indices``: ``input[indices[i]] = updates[i]``.

    Args:
        input: 1 to 8 axes; float32, float16, bfloat16, bool, int64 or int8; any strides. *Mutated*.
        indices: Shape: [..., a]; int32 or int64.
        updates: Shape: [..., input.shape[a:]]; dtype of the input. Of rows that name one place twice, any may win.

    Returns:
        ``input`` itself.

    Raises:
        OpRefused: a documented constraint is broken.
        DeviceFault: an index outside the input; nothing is written then.

    Source:
        Document of torch_npu.npu_scatter_nd_update_ in the torch_npu 2.12.0 wheel.
    """
    return _write(OP_INPLACE, input, indices, updates)


def npu_scatter_nd_update(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """The same into a copy of ``input``; see ``npu_scatter_nd_update_``."""
    return _write(OP, input.clone(), indices, updates)


KERNELS = {OP: npu_scatter_nd_update, OP_INPLACE: npu_scatter_nd_update_}
