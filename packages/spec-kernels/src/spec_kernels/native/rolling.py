"""Owns rolling state in plain torch; contracts in `spec_kernels.rolling`."""

from __future__ import annotations

import torch

from spec_kernels._custom import filling_op

__all__ = ["causal_conv1d_update", "keep_states"]


def _owners(live: torch.Tensor) -> torch.Tensor:
    """The request that each one writes for: itself, or the first live one where it is skipped. Shape: [bs]."""
    own = torch.arange(live.shape[0], device=live.device)
    return torch.where(live, own, live.to(torch.int64).argmax())


@filling_op("causal_conv1d_update", "state", "out")
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
    rows, _, state_len = state.shape
    if not rows:
        out.zero_()
        return
    tokens, kernel = x.shape[2], weight.shape[1]
    index = state_indices.to(torch.int64)
    live = (index >= 0) & (index < rows)
    index = index.clamp(0, rows - 1)
    sequence = torch.cat((state[index], x), 2)
    windows = sequence[:, :, state_len - kernel + 1 :].float().unfold(2, kernel, 1)
    result = (windows * weight.float().unsqueeze(1)).sum(-1)
    if bias is not None:
        result = result + bias.float().unsqueeze(1)
    if silu:
        result = torch.nn.functional.silu(result)
    out.copy_(torch.where(live[:, None, None], result, 0.0))
    rolled = torch.where(live[:, None, None], sequence[:, :, tokens:], state[index])
    owner = _owners(live)
    state[index[owner]] = rolled[owner]


@filling_op("keep_states", "states")
def keep_states(
    states: torch.Tensor, step_states: torch.Tensor, state_indices: torch.Tensor, steps: torch.Tensor, width: int
) -> None:
    """See `spec_kernels.keep_states`; states are bytes, one row each."""
    rows = states.shape[0]
    index, step = state_indices.to(torch.int64), steps.to(torch.int64)
    live = (index >= 0) & (index < rows) & (step >= 0) & (step < width)
    index = index.clamp(0, rows - 1)
    source = torch.arange(index.shape[0], device=index.device) * width + step.clamp(0, width - 1)
    kept = torch.where(live.unsqueeze(1), step_states[source], states[index])
    owner = _owners(live)
    states[index[owner]] = kept[owner]
