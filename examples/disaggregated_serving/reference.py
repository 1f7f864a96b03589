"""The judge: one teacher-forced forward over prompt and output, in plain torch on the CPU.

It imports nothing of the packages that it judges. Like the served model it rounds Q, K, V and the attention output to
the KV dtype; unlike it, it knows no pages, no graphs, no stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .weights import ModelShape, Weights


@dataclass(frozen=True)
class Verdict:
    """How the emitted tokens of one request compare.

    Attributes:
        exact: tokens that are the argmax.
        in_margin: tokens that are not, but whose logit lies within the margin of the largest.
        wrong: (position in the output, emitted token, best token, gap in logits) of all others.
    """

    exact: int
    in_margin: int
    wrong: tuple[tuple[int, int, int, float], ...]


def _rotate(x: torch.Tensor, base: float) -> torch.Tensor:
    """Rotary embedding over neighbouring channel pairs. Shape: [tokens, heads, dim]."""
    tokens, _, dim = x.shape
    angle = torch.arange(tokens)[:, None] * base ** (-torch.arange(0, dim, 2) / dim)[None, :]
    turn = torch.polar(torch.ones_like(angle), angle)[:, None, :]
    return torch.view_as_real(torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * turn).flatten(-2)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _windowed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Each query sees its own and the `window - 1` tokens before it; a sink takes its share of the softmax."""
    tokens = q.shape[1]
    place = torch.arange(tokens)
    seen = (place <= place[:, None]) & (place > place[:, None] - window)
    scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.bfloat16().float().view(-1, 1, 1).expand(-1, tokens, 1)], -1)
    mixed: torch.Tensor = scores.softmax(-1)[..., :tokens] @ v
    return mixed


def hidden_states(
    weights: Weights,
    ids: Sequence[int],
    kv_dtype: torch.dtype,
    tamper: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Final hidden states of all positions. Shape: [tokens, hidden]; float32.

    Args:
        weights: the whole model.
        ids: token ids.
        kv_dtype: dtype that Q, K, V and the attention output are rounded to.
        tamper: called with each layer's number, K and V (shape [heads, tokens, dim]) before attention; tests damage
            rows with it.
    """
    shape: ModelShape = weights.shape
    if weights.embedding is None or weights.final_norm is None:
        raise ValueError("the reference needs the whole model")
    x = weights.embedding[torch.tensor(list(ids))]
    for number, layer in enumerate(weights.layers):
        y = _norm(x, layer.attention_norm, shape.norm_eps)
        q = _rotate((y @ layer.query.T).view(len(ids), shape.query_heads, -1), shape.rope_base)
        k = _rotate((y @ layer.key.T).view(len(ids), shape.kv_heads, -1), shape.rope_base)
        v = (y @ layer.value.T).view(len(ids), shape.kv_heads, -1)
        q, k, v = (part.to(kv_dtype).float().transpose(0, 1) for part in (q, k, v))
        if tamper is not None:
            tamper(number, k, v)
        group = shape.query_heads // shape.kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        window, sinks = shape.window(number), layer.sinks
        if window is None and sinks is None:
            mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        else:
            mixed = _windowed(q, k, v, len(ids) if window is None else window, sinks)
        x = x + mixed.to(kv_dtype).float().transpose(0, 1).reshape(len(ids), -1) @ layer.output.T
        y = _norm(x, layer.ffn_norm, shape.norm_eps)
        x = x + (functional.silu(y @ layer.gate.T) * (y @ layer.up.T)) @ layer.down.T
    return _norm(x, weights.final_norm, shape.norm_eps)


def logits(weights: Weights, prompt: Sequence[int], output: Sequence[int], kv_dtype: torch.dtype) -> torch.Tensor:
    """Logits that chose each token of `output`. Shape: [len(output), vocabulary]; float32."""
    if weights.head is None:
        raise ValueError("the reference needs the whole model")
    hidden = hidden_states(weights, [*prompt, *output[:-1]], kv_dtype)
    return hidden[len(prompt) - 1 :] @ weights.head.T


@torch.inference_mode()
def judge(
    weights: Weights, prompt: Sequence[int], output: Sequence[int], *, kv_dtype: torch.dtype, margin: float = 0.05
) -> Verdict:
    """Compare every emitted token with the argmax of the teacher-forced forward."""
    exact = in_margin = 0
    wrong: list[tuple[int, int, int, float]] = []
    for position, (token, row) in enumerate(zip(output, logits(weights, prompt, output, kv_dtype), strict=True)):
        best = int(row.argmax())
        gap = float(row[best] - row[token])
        if token == best:
            exact += 1
        elif gap <= margin:
            in_margin += 1
        else:
            wrong.append((position, token, best, gap))
    return Verdict(exact, in_margin, tuple(wrong))
