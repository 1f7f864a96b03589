"""Owns rolling state as Triton kernels; contracts in `spec_kernels.rolling`."""

# Kernels are written in Triton's language, which has no types of Python's.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels._custom import filling_op
from spec_kernels.tiling import grid, tile

__all__ = ["causal_conv1d_update", "keep_states"]


@triton.jit
def _conv_kernel(
    x, batch_step, channel_step, token_step, state, weight, weight_row, weight_step, bias, indices, out, bs, channels,
    tokens, rows, state_len, kernel, BIAS: tl.constexpr, SILU: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(channels, TILE)
    for work in range(tl.program_id(0), bs * tiles, tl.num_programs(0)):
        row = tl.full((), work // tiles, tl.int64)
        channel = ((work % tiles) * TILE + tl.arange(0, TILE)).to(tl.int64)
        inside = channel < channels
        index = tl.load(indices + row).to(tl.int64)
        live = (index >= 0) & (index < rows)
        held = state + (index * channels + channel) * state_len
        fresh = x + row * batch_step + channel * channel_step
        for token in range(0, tokens):
            total = tl.zeros((TILE,), tl.float32)
            if BIAS:
                total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
            for tap in range(0, kernel):
                at = state_len + token - kernel + 1 + tap
                old = tl.load(held + at, mask=inside & live & (at < state_len), other=0.0).to(tl.float32)
                new = tl.load(fresh + (at - state_len) * token_step, mask=inside & live & (at >= state_len), other=0.0)
                scale = tl.load(weight + channel * weight_row + tap * weight_step, mask=inside, other=0.0)
                total += (old + new.to(tl.float32)) * scale.to(tl.float32)
            if SILU:
                total = total / (1.0 + tl.exp(-total))
            total = tl.where(live, total, 0.0)
            tl.store(out + (row * channels + channel) * tokens + token, total, mask=inside)
        for at in range(0, state_len):  # reads stay ahead of writes, channel by channel
            source = at + tokens
            old = tl.load(held + source, mask=inside & live & (source < state_len), other=0.0)
            new = tl.load(
                fresh + (source - state_len) * token_step, mask=inside & live & (source >= state_len), other=0.0
            )
            tl.store(held + at, tl.where(source < state_len, old, new), mask=inside & live)


@filling_op("causal_conv1d_update_triton", "state", "out")
def causal_conv1d_update(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state_indices: torch.Tensor,
    out: torch.Tensor,
    silu: bool,
) -> None:
    """See `spec_kernels.causal_conv1d_update`."""
    bs, channels, tokens = x.shape
    rows, _, state_len = state.shape
    size = tile(min(channels, 256), itemsize=8, live=8)
    _conv_kernel[grid(bs * -(-channels // size))](
        x, *x.stride(), state, weight, *weight.stride(), weight if bias is None else bias.contiguous(),
        state_indices.contiguous(), out, bs, channels, tokens, rows, state_len, weight.shape[1],
        BIAS=bias is not None, SILU=silu, TILE=size,
    )  # fmt: skip


@triton.jit
def _keep_kernel(states, given, indices, steps, bs, rows, width, size, TILE: tl.constexpr):
    tiles = tl.cdiv(size, TILE)
    for work in range(tl.program_id(0), bs * tiles, tl.num_programs(0)):
        request = tl.full((), work // tiles, tl.int64)
        index = tl.load(indices + request).to(tl.int64)
        step = tl.load(steps + request).to(tl.int64)
        column = ((work % tiles) * TILE + tl.arange(0, TILE)).to(tl.int64)
        live = (index >= 0) & (index < rows) & (step >= 0) & (step < width) & (column < size)
        value = tl.load(given + (request * width + step) * size + column, mask=live)
        tl.store(states + index * size + column, value, mask=live)


@filling_op("keep_states_triton", "states")
def keep_states(
    states: torch.Tensor, step_states: torch.Tensor, state_indices: torch.Tensor, steps: torch.Tensor, width: int
) -> None:
    """See `spec_kernels.keep_states`; states are bytes, one row each."""
    rows, size = states.shape
    bs, step = state_indices.shape[0], tile(min(size, 1024), itemsize=8)
    _keep_kernel[grid(bs * -(-size // step))](
        states, step_states, state_indices.contiguous(), steps.contiguous(), bs, rows, width, size, TILE=step
    )
