"""Attention by its formula, in float64 on the CPU, a request at a time; it shares no code with either side."""

from __future__ import annotations

import torch

__all__ = ["attend"]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    start: int,
    back: int | None = None,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
    slopes: torch.Tensor | None = None,
    causal: bool = True,
) -> torch.Tensor:
    """One request's tokens over all of its K and V.

    Args:
        query: Shape: [tokens, heads, width].
        key: Shape: [length, kv_heads, width].
        value: Shape: [length, kv_heads, value_width].
        scale: Of the scores.
        start: Position of the first query.
        back: How many positions before its own a query sees; None for all.
        sinks: Score of a head's sink, which takes weight and gives nothing. Shape: [heads].
        cap: Scores become `cap * tanh(score / cap)`; 0 for none.
        slopes: ALiBi's, a score's addend is slope times the key's position. Shape: [heads].
        causal: Whether later positions are hidden.

    Returns:
        Shape: [tokens, heads, value_width]; float64.
    """
    tokens, heads, _ = query.shape
    group = heads // key.shape[1]
    result = torch.empty(tokens, heads, value.shape[-1], dtype=torch.float64)
    for row in range(tokens):
        last = start + row + 1 if causal else len(key)
        first = 0 if back is None else max(start + row - back, 0)
        for head in range(heads):
            keys = key[first:last, head // group].double()
            scores = keys @ query[row, head].double() * scale
            if cap:
                scores = cap * torch.tanh(scores / cap)
            if slopes is not None:
                scores = scores + slopes[head].double() * torch.arange(first, last)
            shift = scores.max()
            weights = (scores - shift).exp()
            total = weights.sum()
            if sinks is not None:
                total = total + (sinks[head].double() - shift).exp()
            result[row, head] = (weights / total) @ value[first:last, head // group].double()
    return result
