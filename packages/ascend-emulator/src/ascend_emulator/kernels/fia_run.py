"""Running one normalised call of fused_infer_attention_score: allocate or take the outputs, check, compute.

This module is what both versions of the op share behind their own signatures (``fia_v1``, ``fia_v2``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import KernelNotCovered
from .faults import fill_poison_
from .fia_call import LAYOUTS, FiaCall, output_shapes
from .fia_checks import check
from .fia_compute import attend, shapes
from .fia_rules import refuse


def not_covered(op: str, **given: object) -> None:
    """Refuses to answer for forms that are not computed here.

    Args:
        op: full op name.
        **given: arguments that ask for such a form unless they are None.

    Raises:
        KernelNotCovered: one of them is not None.
    """
    for argument, value in given.items():
        if value is not None:
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value
            raise KernelNotCovered(op, argument, shown)


def run(call: FiaCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes a call into new outputs.

    Args:
        call: the call.

    Returns:
        Attention output in the output layout, dtype of the query; log-sum-exp float32, of shape [0] when it is not
        wanted. Tokens past a request's query length are poison, as fresh device memory is.

    Raises:
        OpRefused: a documented constraint is broken.
        KernelNotCovered: a form that is not computed here.
        DeviceFault: the call reads memory that it must not.
    """
    geometry = check(call)
    out_shape, lse_shape = shapes(call)
    out = fill_poison_(torch.empty(out_shape, dtype=call.query.dtype))
    lse = fill_poison_(torch.empty(lse_shape if call.want_lse else (0,), dtype=torch.float32))
    if call.query.numel():
        attend(call, geometry, out, lse if call.want_lse else None)
    return out, lse


def run_out(
    call: FiaCall, workspace: torch.Tensor | None, out: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes a call into given outputs.

    Args:
        call: the call.
        workspace: None, or a tensor of rank 1 and the query's dtype; not used.
        out: attention output and log-sum-exp, of the shapes and dtypes that ``run`` returns; the second is left alone
            when no log-sum-exp is wanted. Mutated.

    Returns:
        The two tensors of ``out``.

    Raises:
        OpRefused: a documented constraint is broken, or ``out`` or ``workspace`` do not fit.
        KernelNotCovered: a form that is not computed here.
        DeviceFault: the call reads memory that it must not.
    """
    geometry = check(call)
    if workspace is not None and (workspace.dim() != 1 or workspace.dtype != call.query.dtype):
        refuse(call.op, "workspace", "workspace", f"shape {tuple(workspace.shape)}, {workspace.dtype}")
    if len(out) != 2:
        refuse(call.op, "out-list", "out", f"{len(out)} tensors")
    wanted = list(zip(out, shapes(call), (call.query.dtype, torch.float32), strict=True))
    for tensor, shape, dtype in wanted if call.want_lse else wanted[:1]:
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            refuse(
                call.op, "out-list", "out", f"shape {tuple(tensor.shape)}, {tensor.dtype}; inferred {shape}, {dtype}"
            )
    if call.query.numel():
        attend(call, geometry, out[0], out[1] if call.want_lse else None)
    return out[0], out[1]


def infer_output(
    op: str,
    query: torch.Tensor,
    value: torch.Tensor,
    *,
    heads_name: str,
    input_layout: str,
    paged: bool,
    heads: int,
    kv_heads: int,
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates outputs of the inferred shapes.

    Args:
        op: full op name.
        query: query of the call; its values are not read.
        value: value, or value cache.
        heads_name: name of the argument ``heads``.
        input_layout: layout of the call.
        paged: whether a block table is given.
        heads: query heads.
        kv_heads: key/value heads; 0 for as many as query heads.
        want_lse: whether the log-sum-exp is wanted; else its shape is [0].

    Returns:
        New tensors of undefined (poison) content: output of the query's dtype, log-sum-exp float32.

    Raises:
        OpRefused: the layout, a rank or the number of heads is refused by torch_npu's shape rule.
    """
    if heads <= 0:
        refuse(op, "heads", heads_name, heads)
    if input_layout not in LAYOUTS:
        refuse(op, "layout", "input_layout", repr(input_layout))
    layout = LAYOUTS[input_layout]
    if query.dim() != len(layout.query):
        refuse(op, "query-rank", "query", f"shape {tuple(query.shape)} for layout {layout.query}")
    if value.dim() not in ((3, 4, 5) if paged else (query.dim(),)):
        refuse(op, "value-rank", "value", f"shape {tuple(value.shape)} beside a query of rank {query.dim()}")
    out_shape, lse_shape = output_shapes(query, value, layout, heads, kv_heads or heads, paged)
    out = fill_poison_(torch.empty(out_shape, dtype=query.dtype))
    return out, fill_poison_(torch.empty(lse_shape if want_lse else (0,), dtype=torch.float32))


def workspace(call: FiaCall) -> torch.Tensor:
    """Allocates scratch memory for a call: one float32 accumulator an output element, counted in the query's dtype.

    Returns:
        A tensor of rank 1, dtype of the query, undefined content.

    Raises:
        OpRefused: a documented constraint is broken.
    """
    check(call, contents=False)
    elements = 1
    for size in shapes(call)[0]:
        elements *= size
    return torch.empty(elements * 4 // call.query.element_size(), dtype=call.query.dtype)
