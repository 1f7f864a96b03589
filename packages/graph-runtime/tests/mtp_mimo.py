"""A small random model in the shape of MiMo-V2-Flash, on the emulated NPU and in plain loops on the CPU.

Full and sliding-window layers mixed, K of 192 and V of 128 channels, sinks on the window layers, three draft layers,
an untied head. Linear layers run in float32, K, V and attention in bfloat16. Two forms of attention: with exact host
lengths (TND, a learnable sink, a band), and with host bounds under a mask made from device lengths, which the packed
form does not take (BSND; the sink scales the output by its share of the softmax sum).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

HIDDEN, HEADS, KEY, VALUE, VOCAB = 48, 2, 192, 128, 59
PAGE, PAGES, COLUMNS, BAND = 128, 14, 3, 24
TARGET_BANDS = (None, BAND, None)
DRAFTS = 3
PREFILL_EXACT = True
EDGES = {"band": (23, 24, 25, 26), "page": (126, 127, 128, 129)}
WINDOW = DRAFTS + 1


@dataclass
class Layer:
    """Weights of one layer. band: tokens that a query sees, or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    sinks: torch.Tensor | None
    band: int | None
    mix: torch.Tensor | None = None

    def to(self, device: str) -> Layer:
        moved = {name: None if part is None else part.to(device) for name, part in vars(self).items() if name != "band"}
        return Layer(**moved, band=self.band)  # type: ignore[arg-type]


@dataclass
class Weights:
    """Layers 0 to 2 are the target's, 3 to 5 the drafts'."""

    embedding: torch.Tensor
    head: torch.Tensor
    layers: list[Layer]

    def to(self, device: str) -> Weights:
        layers = [layer.to(device) for layer in self.layers]
        return Weights(self.embedding.to(device), self.head.to(device), layers)


def random_weights(seed: int = 12) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        drawn: torch.Tensor = torch.randn(rows, columns, generator=generator) * (scale * rows**-0.5)
        return drawn

    layers = []
    for number in range(len(TARGET_BANDS) + DRAFTS):
        draft = number >= len(TARGET_BANDS)
        band = BAND if draft else TARGET_BANDS[number]
        layers.append(
            Layer(
                draw(HIDDEN, HEADS * KEY, 2.0),
                draw(HIDDEN, KEY, 2.0),
                draw(HIDDEN, VALUE, 2.0),
                draw(HEADS * VALUE, HIDDEN, 3.0),
                draw(HIDDEN, 2 * HIDDEN),
                draw(2 * HIDDEN, HIDDEN),
                None if band is None else torch.randn(HEADS, generator=generator).bfloat16(),
                band,
                draw(2 * HIDDEN, HIDDEN) if draft else None,
            )
        )
    return Weights(draw(VOCAB, HIDDEN, 0.3 * VOCAB**0.5), draw(HIDDEN, VOCAB, 3.0), layers)


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the first 64 channels. Shapes: x [tokens, heads, dims], positions [tokens]."""
    rates = 1000.0 ** (-torch.arange(32, device=x.device) / 32)
    angle = positions.float()[:, None, None] * rates
    cos, sin = angle.cos(), angle.sin()
    even, odd = x[..., :32], x[..., 32:64]
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos, x[..., 64:]], -1)


def qkv(layer: Layer, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, normed = x.shape[0], norm(x)
    query = turned((normed @ layer.q).view(tokens, HEADS, KEY), positions).bfloat16()
    key = turned((normed @ layer.k).view(tokens, 1, KEY), positions).bfloat16()
    return query, key, (normed @ layer.v).view(tokens, 1, VALUE).bfloat16()


def finish(layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    x = x + attended.reshape(x.shape[0], -1).float() @ layer.o
    return x + torch.relu(norm(x) @ layer.up) @ layer.down


def draft_input(weights: Weights, layer: Layer, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    assert layer.mix is not None
    return torch.cat([norm(weights.embedding[ids]), norm(hidden)], -1) @ layer.mix


class Plain:
    """Whole sequences on the CPU, without cache, graph or FIA."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def layer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        layer = self.weights.layers[number]
        count = x.shape[0]
        query, key, value = qkv(layer, x, torch.arange(count))
        place = torch.arange(count)
        hidden = place > place[:, None]
        if layer.band is not None:
            hidden |= place <= place[:, None] - layer.band
        attended = torch.zeros(count, HEADS, VALUE)
        for head in range(HEADS):
            scores = (query[:, head].float() @ key[:, 0].float().t() * KEY**-0.5).masked_fill(hidden, float("-inf"))
            if layer.sinks is not None:
                scores = torch.cat([scores, layer.sinks[head].float().expand(count, 1)], 1)
            attended[:, head] = torch.softmax(scores, 1)[:, :count] @ value[:, 0].float()
        return finish(layer, x, attended.bfloat16())

    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        x = self.weights.embedding[torch.tensor(tokens)]
        for number in range(len(TARGET_BANDS)):
            x = self.layer(number, x)
        return x

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        return norm(self.hidden(tokens)[-1:]) @ self.weights.head

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[len(prompt) :]

    def drafts(self, tokens: Sequence[int]) -> list[int]:
        """What the draft layers propose after `tokens`, the last of which has no KV yet."""
        hidden, ids = self.hidden(tokens[:-1]), list(tokens[1:])
        drawn = []
        for number in range(len(TARGET_BANDS), len(self.weights.layers)):
            x = draft_input(self.weights, self.weights.layers[number], torch.tensor(ids), hidden)
            hidden = self.layer(number, x)
            drawn.append(int((norm(hidden[-1:]) @ self.weights.head).argmax()))
            ids = [*ids[1:], drawn[-1]]
        return drawn


class OnDevice:
    """The same layers over paged caches; `exact` says whether host lengths are, or bounds under a mask."""

    def __init__(self, weights: Weights, device: str = "npu:0") -> None:
        self.weights = weights.to(device)
        count = len(weights.layers)
        self.keys = [torch.zeros(PAGES, PAGE, KEY, dtype=torch.bfloat16, device=device) for _ in range(count)]
        self.values = [torch.zeros(PAGES, PAGE, VALUE, dtype=torch.bfloat16, device=device) for _ in range(count)]
        self.triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1).to(device)

    def layer(self, number: int, x: torch.Tensor, at: Any, *, exact: bool) -> torch.Tensor:
        """One layer over rows of requests. `at`: positions and table, width, KV lengths on host and device."""
        import torch_npu

        layer = self.weights.layers[number]
        positions = at.positions.flatten()
        query, key, value = qkv(layer, x, positions)
        slots = at.table.gather(1, at.positions // PAGE).long() * PAGE + at.positions % PAGE
        for cache, new in ((self.keys[number], key), (self.values[number], value)):
            torch_npu.npu_scatter_nd_update_(cache.view(PAGES * PAGE, -1), slots.view(-1, 1), new.flatten(1))
        bs, width = at.positions.shape
        options: dict[str, Any] = {
            "block_table": at.table,
            "block_size": PAGE,
            "num_query_heads": HEADS,
            "num_key_value_heads": 1,
            "softmax_scale": KEY**-0.5,
            "actual_seq_kvlen": at.kv_lens,
        }
        if exact:
            options["actual_seq_qlen"] = [width * (row + 1) for row in range(bs)]
            options.update(input_layout="TND", atten_mask=self.triangle, sparse_mode=3)
            if layer.band is not None:
                options.update(sparse_mode=4, pre_tokens=layer.band - 1, next_tokens=0, learnable_sink=layer.sinks)
            attended = torch_npu.npu_fused_infer_attention_score_v2(
                query, self.keys[number], self.values[number], **options
            )[0]
            return finish(layer, x, attended)
        place = torch.arange(COLUMNS * PAGE, device=x.device)
        hidden = place > at.positions.unsqueeze(2)
        if layer.band is not None:
            hidden = hidden | (place <= at.positions.unsqueeze(2) - layer.band)
        attended, lse = torch_npu.npu_fused_infer_attention_score_v2(
            query.view(bs, width, HEADS, KEY),
            self.keys[number],
            self.values[number],
            actual_seq_qlen=[width] * bs,
            input_layout="BSND",
            sparse_mode=0,
            atten_mask=hidden.unsqueeze(1),
            return_softmax_lse=layer.sinks is not None,
            **options,
        )
        if layer.sinks is not None:  # e^lse / (e^lse + e^sink)
            share = torch.sigmoid(lse.view(bs, HEADS, width) - layer.sinks.float()[:, None])
            attended = (attended.float() * share.transpose(1, 2).unsqueeze(3)).bfloat16()
        return finish(layer, x, attended)

    def target(self, ids: torch.Tensor, at: Any, *, exact: bool) -> torch.Tensor:
        x = self.weights.embedding[ids.flatten()]
        for number in range(len(TARGET_BANDS)):
            x = self.layer(number, x, at, exact=exact)
        return x

    def draft(self, step: int, ids: torch.Tensor, hidden: torch.Tensor, at: Any, *, exact: bool) -> torch.Tensor:
        number = len(TARGET_BANDS) + step
        x = draft_input(self.weights, self.weights.layers[number], ids.flatten(), hidden)
        return self.layer(number, x, at, exact=exact)

    def tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        return (norm(hidden) @ self.weights.head).argmax(-1)
