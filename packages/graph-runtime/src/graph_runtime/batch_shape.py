"""What kind of batch a step is, and how many token rows it needs, from numbers alone.

It owns the rules that decide whether a decode graph may serve a batch. It chooses no bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from .errors import BatchShapeError

__all__ = ["BatchShape", "batch_shape", "row_starts", "token_capacity"]


class BatchShape(str, Enum):
    """What a batch asks for."""

    PREFILL = "prefill"
    MIXED = "mixed"
    DECODE = "decode"


def batch_shape(query_lens: Sequence[int], computed: Sequence[int], *, window: int = 1) -> BatchShape:
    """Whether a graph of `window` tokens a request may serve a batch.

    The number of query tokens alone does not tell: a prompt as long as the window is no decode step, and the first step
    of a decode process after a transfer, with all but one prompt token computed, is one.

    Args:
        query_lens: Tokens of each request in this step.
        computed: Tokens of each request whose KV exists.
        window: Tokens a request that the graph was captured for.

    Returns:
        DECODE for a window of every request, all of them with KV before it, and for no request at all; PREFILL where no
        request has KV; else MIXED.

    Raises:
        BatchShapeError: The lists differ in length, or a number is negative or no query.
    """
    if len(query_lens) != len(computed) or any(n < 1 for n in query_lens) or any(n < 0 for n in computed):
        raise BatchShapeError(
            "query_lens, computed",
            expected="as many lengths of 1 or more as numbers of computed tokens",
            got=(list(query_lens), list(computed)),
            consequence="Requests would be served by a graph of another shape.",
            remedy="Give both for the live requests.",
        )
    started = [n > 0 for n in computed]
    if all(started) and all(n == window for n in query_lens):
        return BatchShape.DECODE
    return BatchShape.MIXED if any(started) else BatchShape.PREFILL


def token_capacity(token_budget: int, requests: int, *, draft_tokens: int) -> int:
    """Token rows of buffers that a scheduler and a draft model both write.

    A draft model adds all but one of its tokens to what was scheduled. Writer and reader take their size from here.

    Args:
        token_budget: Most tokens that the scheduler puts into a step.
        requests: Most requests of a step.
        draft_tokens: Tokens drafted for a request; 0 without drafts.
    """
    return token_budget + max(draft_tokens - 1, 0) * requests


def row_starts(requests: int, rows_per_request: int) -> list[int]:
    """First row of each request, and the end; the stride is what the buffers were laid out with, whatever the step.

    Args:
        requests: Requests of the bucket.
        rows_per_request: Rows of each.
    """
    return [request * rows_per_request for request in range(requests + 1)]
