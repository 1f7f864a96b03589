"""The attention itself: softmax(scale * Q K^T + mask) V per request, in float32, rounded once at the end.

This module owns the arithmetic and its blocking. Query heads that share a key/value head are computed together, so
keys and values are never repeated. Checks and reads are elsewhere.
"""

from __future__ import annotations

import torch

from .fia_antiquant import widened
from .fia_call import FiaCall, heads_first, output_shapes
from .fia_memory import read_rows
from .fia_requests import Geometry, Request
from .fia_visibility import Visible, visibility

SCORES_AT_ONCE = 1 << 21
"""Scores held in memory at a time; longer queries are computed in blocks of query tokens."""


def _softmax_times_value(
    scores: torch.Tensor, value: torch.Tensor, sink: torch.Tensor | None, lse: torch.Tensor | None
) -> torch.Tensor:
    """Rows of -inf only give zeros. ``lse`` [.., 1] is written when given; the sink counts in the weights alone."""
    if lse is not None:
        lse.copy_(torch.logsumexp(scores, -1, keepdim=True))
    top = scores.amax(-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink)
    top.masked_fill_(top == float("-inf"), 0.0)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total += torch.exp(sink - top)
    out = torch.bmm(weights, value)
    return torch.where(total == 0, out.new_zeros(()), out / total)


def _attend_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    see: Visible,
    first: int,
    last: int,
    sink: torch.Tensor | None,
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Query tokens [first, last) of one request.

    Args:
        query: Shape: [kv_heads, group, q_len, dims] float32, scaled.
        key: Shape: [kv_heads, kv_len, dims] float32.
        value: Shape: [kv_heads, kv_len, value_dim] float32.
        see: what the query tokens see; none of [first, last) has an empty interval.
        first: first query token.
        last: end of the query tokens.
        sink: None, or float32 of shape [kv_heads, group].
        want_lse: whether the log-sum-exp is wanted.

    Returns:
        Output [kv_heads, group, last - first, value_dim] and log-sum-exp [kv_heads, group, last - first, 1] or None.
    """
    low, high = see.columns(first, last)
    kv_heads, group = query.shape[:2]
    rows = last - first
    scores = torch.bmm(query[:, :, first:last].reshape(kv_heads, group * rows, -1), key[:, low:high].transpose(1, 2))
    hidden = see.hidden(first, last)
    if hidden is not None:
        scores.view(kv_heads, group, rows, -1).masked_fill_(hidden, float("-inf"))
    value = value[:, low:high]
    lse = scores.new_empty(kv_heads, group * rows, 1) if want_lse else None
    if sink is None and lse is None and see.mask is None:
        out = torch.bmm(torch.softmax(scores, -1), value)
    else:
        each = None if sink is None else sink.repeat_interleave(rows, 1).unsqueeze(-1)
        out = _softmax_times_value(scores, value, each, lse)
    shaped = out.view(kv_heads, group, rows, -1)
    return shaped, None if lse is None else lse.view(kv_heads, group, rows, 1)


def _attend(
    call: FiaCall, request: Request, see: Visible, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    """Writes one request's output [N, q_len, Dv] and log-sum-exp [N, q_len, 1]."""
    first, last = see.rows()
    if (first, last) != (0, request.q_len):
        out.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
    if first == last:
        return
    rows = read_rows(call, request, see)
    if call.antiquant is None:
        key, value = rows.key.float(), rows.value.float()
    else:
        key, value = widened(rows.key, call.antiquant, 0), widened(rows.value, call.antiquant, 1)
    kv_heads = call.kv_heads
    grouped = (query.float() * call.scale).reshape(kv_heads, call.heads // kv_heads, request.q_len, -1)
    sink = None if call.sink is None else call.sink.float().view(kv_heads, -1)
    step = max(16, SCORES_AT_ONCE // (call.heads * request.kv_len))
    for start in range(first, last, step):
        stop = min(last, start + step)
        block, block_lse = _attend_block(grouped, key, value, see, start, stop, sink, lse is not None)
        out[:, start:stop] = block.flatten(0, 1)
        if lse is not None and block_lse is not None:
            lse[:, start:stop] = block_lse.flatten(0, 1)


def attend(call: FiaCall, geometry: Geometry, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Computes a checked call.

    Args:
        call: the call.
        geometry: its sizes and requests.
        out: attention output in the output layout. Mutated; tokens past a request's query length are left as they are.
        lse: log-sum-exp, or None. Mutated likewise.

    Raises:
        DeviceFault: a block id outside the cache, or a visible row that was never written.
    """
    layout = call.layout
    query = heads_first(call.query, layout.query, call.heads)
    if call.query_rope is not None:
        query = torch.cat((query, heads_first(call.query_rope, layout.query, call.heads)), -1)
    target = heads_first(out, layout.output, call.heads)
    lse_target = None if lse is None else (lse.permute(1, 0, 2) if layout.packed else lse)
    for request, see in zip(geometry.requests, visibility(call, geometry), strict=True):
        if request.q_len == 0:
            continue
        span = slice(request.q_start, request.q_start + request.q_len)
        if layout.packed:
            parts = query[:, span], target[:, span], None if lse_target is None else lse_target[:, span]
        else:
            row = request.row
            parts = query[row][:, span], target[row][:, span], None if lse_target is None else lse_target[row][:, span]
        _attend(call, request, see, *parts)


def shapes(call: FiaCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of output and log-sum-exp of a call."""
    return output_shapes(call.query, call.value, call.layout, call.heads, call.kv_heads, call.paged)
