"""A contiguous range of decoder layers over a paged KV pool: the served model.

Linear layers run in float32, K, V and attention in the pool's dtype. It is given its pool and its attention op, and
knows nothing of transfer or of graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_planner import Part
    from kv_pool import MhaPool
    from spec_kernels import PagedAttentionMetadata

    from .weights import LayerWeights, Weights

import spec_kernels


class _Layer:
    """One layer's weights on the device, with Q, K and V, and gate and up, joined into one matrix each."""

    def __init__(self, weights: LayerWeights, device: torch.device) -> None:
        self.attention_norm = weights.attention_norm.to(device)
        self.query_key_value = torch.cat([weights.query, weights.key, weights.value]).to(device)
        self.output = weights.output.to(device)
        self.ffn_norm = weights.ffn_norm.to(device)
        self.gate_up = torch.cat([weights.gate, weights.up]).to(device)
        self.down = weights.down.to(device)
        self.sinks = None if weights.sinks is None else weights.sinks.to(device, torch.bfloat16)
        self.mix = None if weights.mix is None else weights.mix.to(device)


class Stage:
    """Runs its layers on rows of hidden states, reading and writing the pool."""

    def __init__(self, weights: Weights, pool: MhaPool, *, device: torch.device, kv_dtype: torch.dtype) -> None:
        """Move `weights` to `device`; `pool` must own the same layers."""
        shape = weights.shape
        self.shape, self.pool, self.device, self.kv_dtype = shape, pool, device, kv_dtype
        self.first_layer = weights.first_layer
        self.layers = [_Layer(layer, device) for layer in weights.layers]
        self.drafts = [_Layer(layer, device) for layer in weights.drafts]
        self.embedding = None if weights.embedding is None else weights.embedding.to(device)
        self.final_norm = None if weights.final_norm is None else weights.final_norm.to(device)
        tied = weights.head is not None and weights.head is weights.embedding
        self.head = self.embedding if tied else None if weights.head is None else weights.head.to(device)
        pairs = torch.arange(0, shape.key_dim, 2) / shape.key_dim
        angle = torch.arange(shape.context)[:, None] * shape.rope_base ** (-pairs)[None, :]
        self.cos, self.sin = angle.cos().to(device), angle.sin().to(device)
        self.widths = [
            shape.query_heads * shape.key_dim,
            shape.kv_heads * shape.key_dim,
            shape.kv_heads * shape.value_dim,
        ]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Shape: ids [tokens] to [tokens, hidden]; float32."""
        if self.embedding is None:
            raise ValueError("this stage holds neither the first layer nor draft layers")
        return self.embedding[ids]

    def run(
        self,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        slots: torch.Tensor,
        metadata: PagedAttentionMetadata,
        before_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Run the layers.

        Args:
            hidden: Shape [tokens, hidden]; the rows of all requests, in order, equally many a request.
            positions: Shape [tokens]; position of each row in its request.
            slots: Shape [tokens]; where K and V of each row are written.
            metadata: block table and lengths of the requests; causal unless it has a mask.
            before_layer: called with each layer's number before it runs, to wait for KV that is being loaded.

        Returns:
            Shape [tokens, hidden]; float32.
        """
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        requests = len(metadata.kv_lens)
        for offset, layer in enumerate(self.layers):
            if before_layer is not None:
                before_layer(self.first_layer + offset)
            hidden = self._layer(hidden, layer, self.first_layer + offset, cos, sin, slots, metadata, requests)
        return hidden

    def draft(
        self,
        step: int,
        ids: torch.Tensor,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        slots: torch.Tensor,
        metadata: PagedAttentionMetadata,
    ) -> torch.Tensor:
        """Run one draft layer.

        Args:
            step: Which.
            ids: The token after each row, `step` places further on for each draft layer. Shape: [tokens]; int64.
            hidden: What the layer before it gave, the target's last one for step 0. Shape: [tokens, hidden]; float32.
            positions: See `run`.
            slots: See `run`.
            metadata: See `run`.

        Returns:
            Shape: [tokens, hidden]; float32.
        """
        layer = self.drafts[step]
        assert layer.mix is not None
        mixed = torch.cat([self.embed(ids), self._unit(hidden)], -1)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        number, requests = self.shape.layers + step, len(metadata.kv_lens)
        return self._layer(functional.linear(mixed, layer.mix), layer, number, cos, sin, slots, metadata, requests)

    def next_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """Greedy tokens after the rows of `hidden`. Shape: [rows]; int64."""
        if self.head is None or self.final_norm is None:
            raise ValueError("this stage does not hold the last layer")
        return functional.linear(self._norm(hidden, self.final_norm), self.head).argmax(-1)

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape.norm_eps)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._unit(x) * weight

    def _layer(
        self,
        hidden: torch.Tensor,
        layer: _Layer,
        number: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: torch.Tensor,
        metadata: PagedAttentionMetadata,
        requests: int,
    ) -> torch.Tensor:
        rows, shape = hidden.shape[0], self.shape
        mixed = functional.linear(self._norm(hidden, layer.attention_norm), layer.query_key_value)
        q, k, v = torch.split(mixed, self.widths, -1)
        query = _rotate(q.reshape(rows, shape.query_heads, -1), cos, sin).to(self.kv_dtype)
        key = _rotate(k.reshape(rows, shape.kv_heads, -1), cos, sin).to(self.kv_dtype)
        part: Part = "target" if layer.mix is None else "draft"
        self.pool.write(number, slots, key, v.reshape(rows, shape.kv_heads, -1).to(self.kv_dtype), part)
        attended = spec_kernels.paged_attention(
            query.view(requests, rows // requests, shape.query_heads, shape.key_dim),
            self.pool.key(number, part),
            self.pool.value(number, part),
            metadata,
            scale=shape.key_dim**-0.5,
            page_size=self.pool.layout.page_size,
            causal=metadata.mask is None,
            window=shape.window(number),
            sinks=layer.sinks,
        )
        hidden = hidden + functional.linear(attended.reshape(rows, -1).float(), layer.output)
        gate, up = functional.linear(self._norm(hidden, layer.ffn_norm), layer.gate_up).chunk(2, -1)
        return hidden + functional.linear(functional.silu(gate) * up, layer.down)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of neighbouring channel pairs. Shape: x [rows, heads, dim], cos and sin [rows, 1, dim / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
