"""A small random model in the shape of DeepSeek's sparse latent attention, on the emulated NPU and in plain loops.

Latent K and V of 512 channels beside 64 rotary ones, an indexer that picks the tokens to attend to on the first and
last layer, a dense layer between them, one draft layer that runs again on its own output, an untied head. Linear layers
run in float32, caches and attention in bfloat16. Sparse layers take device lengths; the dense ones take exact host
lengths (FIA), or, where the host knows bounds only, the sparse operator with every position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mtp_mimo import norm, turned

HIDDEN, HEADS, NOPE, LATENT, ROPE, VALUE, VOCAB = 48, 2, 32, 512, 64, 32, 59
INDEX_HEADS, INDEX_DIM, PICKED = 4, 128, 12
PAGE, PAGES, COLUMNS = 128, 14, 3
TARGET_INDEXED = (True, False, True)
DRAFTS = 3
PREFILL_EXACT = False
EDGES = {"picked": (11, 12, 13, 14), "page": (126, 127, 128, 129)}
WINDOW = DRAFTS + 1
SCALE = (NOPE + ROPE) ** -0.5


@dataclass
class Layer:
    """Weights of one layer; those of the indexer are None on a dense one, mix on a layer of the target."""

    query: torch.Tensor
    latent: torch.Tensor
    rope: torch.Tensor
    keys_up: torch.Tensor
    values_up: torch.Tensor
    out: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    index: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    mix: torch.Tensor | None

    def to(self, device: str) -> Layer:
        def move(part: Any) -> Any:
            return tuple(map(move, part)) if isinstance(part, tuple) else None if part is None else part.to(device)

        return Layer(**{name: move(part) for name, part in vars(self).items()})


@dataclass
class Weights:
    """Layers 0 to 2 are the target's, 3 the draft's."""

    embedding: torch.Tensor
    head: torch.Tensor
    layers: list[Layer]

    def to(self, device: str) -> Weights:
        return Weights(self.embedding.to(device), self.head.to(device), [layer.to(device) for layer in self.layers])


def random_weights(seed: int = 3, *, indexed_draft: bool = False) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        drawn: torch.Tensor = torch.randn(*shape, generator=generator) * (scale * shape[-2] ** -0.5)
        return drawn

    layers: list[Layer] = []
    for indexed in (*TARGET_INDEXED, indexed_draft):
        index = draw(HIDDEN, INDEX_HEADS * INDEX_DIM), draw(HIDDEN, INDEX_DIM), draw(HIDDEN, INDEX_HEADS)
        layers.append(
            Layer(
                draw(HIDDEN, HEADS * (NOPE + ROPE), scale=2.0),
                draw(HIDDEN, LATENT),
                draw(HIDDEN, ROPE, scale=2.0),
                draw(HEADS, NOPE, LATENT, scale=0.7),
                draw(HEADS, LATENT, VALUE, scale=2.0),
                draw(HEADS * VALUE, HIDDEN, scale=3.0),
                draw(HIDDEN, 2 * HIDDEN),
                draw(2 * HIDDEN, HIDDEN),
                index if indexed else None,
                draw(2 * HIDDEN, HIDDEN) if len(layers) == len(TARGET_INDEXED) else None,
            )
        )
    return Weights(draw(VOCAB, HIDDEN, scale=0.3 * VOCAB**0.5), draw(HIDDEN, VOCAB, scale=3.0), layers)


@dataclass
class Rows:
    """What a layer makes of its input rows: bfloat16, but the indexer's weights in float32."""

    query: torch.Tensor
    query_rope: torch.Tensor
    latent: torch.Tensor
    rope: torch.Tensor
    index_query: torch.Tensor | None = None
    index_key: torch.Tensor | None = None
    index_weights: torch.Tensor | None = None


def rows_of(layer: Layer, x: torch.Tensor, positions: torch.Tensor) -> Rows:
    count, normed = x.shape[0], norm(x)
    query = (normed @ layer.query).view(count, HEADS, NOPE + ROPE)
    plain, rotary = query[..., :NOPE], query[..., NOPE:]
    rows = Rows(
        torch.einsum("thn,hnl->thl", plain, layer.keys_up).bfloat16().contiguous(),
        turned(rotary, positions).bfloat16().contiguous(),
        norm(normed @ layer.latent).view(count, 1, LATENT).bfloat16(),
        turned((normed @ layer.rope).view(count, 1, ROPE), positions).bfloat16(),
    )
    if layer.index is not None:
        query, key, weights = layer.index
        rows.index_query = turned((normed @ query).view(count, INDEX_HEADS, INDEX_DIM), positions).bfloat16()
        rows.index_key = turned((normed @ key).view(count, 1, INDEX_DIM), positions).bfloat16()
        rows.index_weights = normed @ weights
    return rows


def finish(layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    values = torch.einsum("thl,hlv->thv", attended.view(-1, HEADS, LATENT).float(), layer.values_up)
    x = x + values.reshape(x.shape[0], -1) @ layer.out
    return x + torch.relu(norm(x) @ layer.up) @ layer.down


def draft_input(weights: Weights, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    layer = weights.layers[-1]
    assert layer.mix is not None
    return torch.cat([norm(weights.embedding[ids]), norm(hidden)], -1) @ layer.mix


class Plain:
    """Whole sequences on the CPU, without cache, graph or the NPU's operators."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def layer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        layer, count = self.weights.layers[number], x.shape[0]
        rows = rows_of(layer, x, torch.arange(count))
        attended = torch.zeros(count, HEADS, LATENT)
        for at in range(count):
            seen = torch.arange(at + 1)
            if rows.index_query is not None and rows.index_key is not None and rows.index_weights is not None:
                products = torch.relu(rows.index_query[at].float() @ rows.index_key[: at + 1, 0].float().T)
                seen = (rows.index_weights[at] @ products).sort(descending=True, stable=True).indices[:PICKED]
            latent, rope = rows.latent[seen, 0].float(), rows.rope[seen, 0].float()
            scores = (rows.query[at].float() @ latent.T + rows.query_rope[at].float() @ rope.T) * SCALE
            attended[at] = scores.softmax(-1) @ latent
        return finish(layer, x, attended.bfloat16())

    def hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        x = self.weights.embedding[torch.tensor(tokens)]
        for number in range(len(TARGET_INDEXED)):
            x = self.layer(number, x)
        return x

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = norm(self.hidden(tokens)[-1:]) @ self.weights.head
        return logits

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[len(prompt) :]

    def drafts(self, tokens: Sequence[int]) -> list[int]:
        """What the draft layer proposes after `tokens`, the last of which has no KV yet."""
        hidden, ids = self.hidden(tokens[:-1]), list(tokens[1:])
        drawn: list[int] = []
        for _ in range(DRAFTS):
            after = self.layer(len(TARGET_INDEXED), draft_input(self.weights, torch.tensor(ids), hidden))[-1:]
            drawn.append(int((norm(after) @ self.weights.head).argmax()))
            ids, hidden = [*ids, drawn[-1]], torch.cat([hidden, after])
        return drawn


class OnDevice:
    """The same layers over paged caches; `exact` says whether host lengths are, or bounds.

    Attributes:
        chosen: layer to positions that the last eager forward picked; None to keep nothing.
    """

    def __init__(self, weights: Weights, device: str = "npu:0") -> None:
        self.weights = weights.to(device)
        self.latents, self.ropes, self.indices = (
            [torch.zeros(PAGES, PAGE, 1, width, dtype=torch.bfloat16, device=device) for _ in weights.layers]
            for width in (LATENT, ROPE, INDEX_DIM)
        )
        self.triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1).to(device)
        self.chosen: dict[int, torch.Tensor] | None = None

    def layer(self, number: int, x: torch.Tensor, at: Any, *, exact: bool) -> torch.Tensor:
        """One layer over rows of requests. `at`: positions, table, host KV lengths (exact ones only), live rows."""
        import torch_npu

        layer, positions = self.weights.layers[number], at.positions.flatten()
        rows = rows_of(layer, x, positions)
        slots = at.table.gather(1, at.positions // PAGE).long() * PAGE + at.positions % PAGE
        caches = [(self.latents[number], rows.latent), (self.ropes[number], rows.rope)]
        if rows.index_key is not None:
            caches.append((self.indices[number], rows.index_key))
        for cache, new in caches:
            torch_npu.npu_scatter_nd_update_(cache.view(PAGES * PAGE, -1), slots.view(-1, 1), new.flatten(1))
        bs, width = at.positions.shape
        if exact and rows.index_key is None:
            attended = torch_npu.npu_fused_infer_attention_score_v2(
                rows.query,
                self.latents[number].view(PAGES, PAGE, LATENT),
                self.latents[number].view(PAGES, PAGE, LATENT),
                query_rope=rows.query_rope,
                key_rope=self.ropes[number].view(PAGES, PAGE, ROPE),
                block_table=at.table,
                block_size=PAGE,
                num_query_heads=HEADS,
                num_key_value_heads=1,
                softmax_scale=SCALE,
                actual_seq_qlen=[width * (row + 1) for row in range(bs)],
                actual_seq_kvlen=at.kv_lens,
                input_layout="TND",
                atten_mask=self.triangle,
                sparse_mode=3,
            )[0]
            return finish(layer, x, attended)
        lens = ((at.positions[:, -1] + 1) * at.live).int()
        if rows.index_key is None:
            picked = torch.arange(COLUMNS * PAGE, dtype=torch.int32, device=x.device).expand(bs, width, 1, -1)
            picked = torch.where(picked <= at.positions.int().view(bs, width, 1, 1), picked, -1)
            picked = torch.where(at.live.view(bs, 1, 1, 1) > 0, picked, -1).contiguous()
        else:
            assert rows.index_query is not None and rows.index_weights is not None
            picked = torch_npu.npu_lightning_indexer(
                rows.index_query.view(bs, width, INDEX_HEADS, INDEX_DIM),
                self.indices[number],
                rows.index_weights.view(bs, width, INDEX_HEADS),
                actual_seq_lengths_key=lens,
                block_table=at.table,
                layout_key="PA_BSND",
                sparse_count=PICKED,
            )[0]
            if self.chosen is not None:
                self.chosen[number] = picked.cpu()
        attended = torch_npu.npu_sparse_flash_attention(
            rows.query.view(bs, width, HEADS, LATENT),
            self.latents[number],
            self.latents[number],
            picked,
            SCALE,
            block_table=at.table,
            actual_seq_lengths_kv=lens,
            query_rope=rows.query_rope.view(bs, width, HEADS, ROPE),
            key_rope=self.ropes[number],
            layout_kv="PA_BSND",
            attention_mode=2,
        )[0]
        return finish(layer, x, attended)

    def target(self, ids: torch.Tensor, at: Any, *, exact: bool) -> torch.Tensor:
        x = self.weights.embedding[ids.flatten()]
        for number in range(len(TARGET_INDEXED)):
            x = self.layer(number, x, at, exact=exact)
        return x

    def draft(self, ids: torch.Tensor, hidden: torch.Tensor, at: Any, *, exact: bool) -> torch.Tensor:
        x = draft_input(self.weights, ids.flatten(), hidden)
        return self.layer(len(TARGET_INDEXED), x, at, exact=exact)

    def tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        return (norm(hidden) @ self.weights.head).argmax(-1)
