"""What one call of fused_infer_attention_score asks for: its sizes, and its requests one by one.

This module turns lengths as given (none, one for all, one each, cumulative) into requests, and refuses lengths that the
document refuses. It looks at no tensor values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .fia_call import FiaCall, heads_first, value_dim
from .fia_rules import refuse

MAX_PACKED_LENGTHS = 4096


@dataclass(frozen=True)
class Request:
    """One sequence of the batch.

    Attributes:
        row: index in the batch, and row of the block table.
        q_start: first token on the packed axis; 0 in layouts with a batch axis.
        q_len: query tokens.
        kv_start: first key/value token on the packed axis; 0 elsewhere and in caches.
        kv_len: key/value tokens.
    """

    row: int
    q_start: int
    q_len: int
    kv_start: int
    kv_len: int


@dataclass(frozen=True)
class Geometry:
    """Sizes of a call.

    Attributes:
        batch: requests.
        q_seq: Q_S; in packed layouts the longest query.
        kv_seq: KV_S; paged, the width of the block table times the block size; packed and dense, T of the key.
        head_dim: width of a query and key head, without rope.
        value_dim: width of a value head.
        requests: the requests, in order.
    """

    batch: int
    q_seq: int
    kv_seq: int
    head_dim: int
    value_dim: int
    requests: tuple[Request, ...]


def _one_each(call: FiaCall, lens: Sequence[int] | None, batch: int, limit: int, argument: str, rule: str) -> list[int]:
    if lens is None:
        return [limit] * batch
    if len(lens) == 1:
        lens = [*lens] * batch
    elif len(lens) < batch:
        refuse(call.op, f"{rule}-count", argument, f"{len(lens)} lengths for {batch} requests")
    lens = [int(n) for n in lens[:batch]]
    for row, length in enumerate(lens):
        if not 0 <= length <= limit:
            refuse(call.op, f"{rule}-value", argument, f"{length} for request {row}, limit {limit}")
    return lens


def _running_sums(call: FiaCall, lens: Sequence[int], total: int, argument: str) -> list[int]:
    ends = [int(n) for n in lens]
    for row, end in enumerate(ends):
        if end < (ends[row - 1] if row else 0):
            refuse(call.op, "tnd-monotonic", argument, ends)
    if ends and ends[-1] > total:
        refuse(call.op, "tnd-total", argument, f"{ends[-1]} for T = {total}")
    return ends


def _kv_seq(call: FiaCall) -> int:
    if call.block_table is not None:
        return call.block_table.size(-1) * call.block_size
    return heads_first(call.key, call.layout.query, call.kv_heads).size(-2)


def _packed(call: FiaCall, tokens: int, kv_seq: int) -> list[Request]:
    names = call.names
    if call.q_lens is None:
        refuse(call.op, "tnd-q-lens", names.q_lens, None)
    if call.kv_lens is None:
        refuse(call.op, "paged-kv-lens" if call.paged else "tnd-kv-lens", names.kv_lens, None)
    for argument, lens in ((names.q_lens, call.q_lens), (names.kv_lens, call.kv_lens)):
        if len(lens) > MAX_PACKED_LENGTHS:
            refuse(call.op, "tnd-entries", argument, f"{len(lens)} lengths")
    if len(call.kv_lens) != len(call.q_lens):
        refuse(call.op, "kv-lens-count", names.kv_lens, f"{len(call.kv_lens)} lengths for {len(call.q_lens)} requests")
    q_ends = _running_sums(call, call.q_lens, tokens, names.q_lens)
    if call.paged:
        kv_lens = _one_each(call, call.kv_lens, len(q_ends), kv_seq, names.kv_lens, "kv-lens")
        kv_starts = [0] * len(q_ends)
    else:
        kv_ends = _running_sums(call, call.kv_lens, kv_seq, names.kv_lens)
        kv_starts = [0, *kv_ends][: len(kv_ends)]
        kv_lens = [end - start for start, end in zip(kv_starts, kv_ends, strict=True)]
    q_starts = [0, *q_ends][: len(q_ends)]
    return [
        Request(row, q_start, q_end - q_start, kv_starts[row], kv_lens[row])
        for row, (q_start, q_end) in enumerate(zip(q_starts, q_ends, strict=True))
    ]


def resolve(call: FiaCall) -> Geometry:
    """Sizes and requests of a call whose layout, ranks and head counts were checked.

    Args:
        call: the call.

    Returns:
        The geometry.

    Raises:
        OpRefused: missing, surplus, falling, negative or too large lengths.
    """
    layout = call.layout
    query = heads_first(call.query, layout.query, call.heads)
    kv_seq = _kv_seq(call)
    if layout.packed:
        requests = _packed(call, query.size(-2), kv_seq)
        batch, q_seq = len(requests), max((r.q_len for r in requests), default=0)
    else:
        batch, q_seq = query.size(0), query.size(2)
        if call.paged and call.kv_lens is None:
            refuse(call.op, "paged-kv-lens", call.names.kv_lens, None)
        given = None if q_seq == 1 else call.q_lens
        q_lens = _one_each(call, given, batch, q_seq, call.names.q_lens, "q-lens")
        rule = "table-width" if call.paged else "kv-lens-value"
        if call.paged and call.kv_lens and max(call.kv_lens) > kv_seq:
            refuse(call.op, rule, "block_table", f"{kv_seq} tokens wide for {max(call.kv_lens)} tokens")
        kv_lens = _one_each(call, call.kv_lens, batch, kv_seq, call.names.kv_lens, "kv-lens")
        requests = [Request(row, 0, q_lens[row], 0, kv_lens[row]) for row in range(batch)]
    return Geometry(
        batch,
        q_seq,
        kv_seq,
        query.size(-1),
        value_dim(call.value, layout.query, call.kv_heads, call.paged),
        tuple(requests),
    )
