"""Which key/value tokens each query token sees.

This module turns sparse mode, band and lengths into one interval per query token; an explicit mask comes on top of it.
It reads no key or value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .fia_call import UNBOUNDED, FiaCall
from .fia_checks_mask import full_mask, sparse_mode_applies
from .fia_requests import Geometry, Request


@dataclass(frozen=True)
class Visible:
    """Query token i sees tokens j with ``i + low <= j < i + high`` and ``0 <= j < kv_len`` that the mask leaves.

    Attributes:
        q_len: query tokens.
        kv_len: key/value tokens.
        low: lower bound relative to i; None for no bound.
        high: upper bound relative to i; None for no bound.
        mask: None, or bool of shape [>= q_len, >= kv_len]; True hides.
    """

    q_len: int
    kv_len: int
    low: int | None
    high: int | None
    mask: torch.Tensor | None

    def rows(self) -> tuple[int, int]:
        """Query tokens whose interval is not empty, as a half-open range (the mask not counted)."""
        if self.kv_len <= 0 or (self.low is not None and self.high is not None and self.high <= self.low):
            return 0, 0
        first = 0 if self.high is None else max(0, 1 - self.high)
        last = self.q_len if self.low is None else min(self.q_len, self.kv_len - self.low)
        return (first, last) if first < last else (0, 0)

    def columns(self, first: int, last: int) -> tuple[int, int]:
        """Tokens that any query token of [first, last) sees, as a half-open range (the mask not counted)."""
        low = 0 if self.low is None else max(0, first + self.low)
        high = self.kv_len if self.high is None else min(self.kv_len, last - 1 + self.high)
        return low, high

    def hidden(self, first: int, last: int) -> torch.Tensor | None:
        """What query tokens [first, last) do not see of ``columns(first, last)``.

        Returns:
            None when they see all of it; else bool, shape: [last - first, columns]. True hides.
        """
        low, high = self.columns(first, last)
        parts = []
        if self.high is not None and first + self.high < high:
            limit = torch.arange(first, last).unsqueeze(1) + self.high
            parts.append(torch.arange(low, high).unsqueeze(0) >= limit)
        if self.low is not None and last - 1 + self.low > low:
            limit = torch.arange(first, last).unsqueeze(1) + self.low
            parts.append(torch.arange(low, high).unsqueeze(0) < limit)
        if self.mask is not None:
            parts.append(self.mask[first:last, low:high])
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else torch.stack(parts).any(0)

    def sees(self, tokens: torch.Tensor) -> torch.Tensor:
        """Which of the given tokens any query token sees. Shape: [n] int64 -> [n] bool."""
        first, last = self.rows()
        if first == last:
            return torch.zeros_like(tokens, dtype=torch.bool)
        low, high = self.columns(first, last)
        seen = (tokens >= low) & (tokens < high)
        if self.mask is not None:
            inside = tokens[seen]
            hidden = self.hidden(first, last)
            assert hidden is not None
            seen[seen.clone()] = ~hidden[:, inside - low].all(0)
        return seen


def _bound(tokens: int) -> int | None:
    return None if tokens >= UNBOUNDED else tokens


def _interval(call: FiaCall, request: Request) -> tuple[int | None, int | None]:
    mode = call.sparse_mode
    shift = request.kv_len - request.q_len
    if mode == 2:
        return None, 1
    if mode == 3:
        return None, shift + 1
    if mode == 1 or (mode == 0 and call.mask is None):
        return None, None
    pre, following = _bound(call.pre_tokens), _bound(call.next_tokens)
    shift = shift if mode == 4 else 0
    return None if pre is None else shift - pre, None if following is None else shift + following + 1


def visibility(call: FiaCall, geometry: Geometry) -> list[Visible]:
    """What each request's query tokens see.

    Modes 0 (with a mask) and 2 count from the first query and the first key/value token; modes 3 and 4 align the last
    query with the last key/value token. ``pre_tokens = w`` lets a query token see w tokens before its own, and its own.
    """
    masks = full_mask(call, geometry)
    applies = sparse_mode_applies(call, geometry)
    out = []
    for request in geometry.requests:
        low, high = _interval(call, request) if applies else (None, None)
        mask = None if masks is None else masks[min(request.row, masks.size(0) - 1)]
        out.append(Visible(request.q_len, request.kv_len, low, high, mask))
    return out
