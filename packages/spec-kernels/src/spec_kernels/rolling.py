"""Owns the rolling state of recurrent layers: the short causal convolution, and the state that a verify step keeps."""

from __future__ import annotations

import torch

from spec_kernels._checks import FLOATS, check_disjoint, check_number, check_tensor
from spec_kernels.dispatch import BackendName, choose, load
from spec_kernels.errors import ShapeError

__all__ = ["causal_conv1d_update", "keep_states"]


def causal_conv1d_update(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    silu: bool = False,
    backend: BackendName | None = None,
) -> torch.Tensor:
    """Convolve each request's new tokens with those before them, and roll its state forward.

    With `seq` the state followed by the new tokens: output `t` is the sum over `k` of
    `weight[k] * seq[end - kernel + k]`, `end` being one past token `t`; the new state is the last
    `state_len` tokens of `seq`, all of them rewritten.

    Args:
        x: New tokens. Shape: [bs, channels, tokens]; floating point; any strides.
        state: Last tokens of each state row. Shape: [rows, channels, state_len], `state_len >= kernel - 1`; dtype of x;
            contiguous.
        weight: Shape: [channels, kernel]; dtype of x.
        state_indices: Distinct state rows. Shape: [bs]; dtype int32 or int64.
        bias: Shape: [channels]; dtype of x.
        silu: Whether the output passes through SiLU.
        backend: Insist on a backend.

    Returns:
        Shape: [bs, channels, tokens]; dtype of x; sums in float32.

    Padding: a request whose index lies outside the state (-1) gives zeros and touches no row.

    Mutates: the named rows of `state`.

    Raises:
        ShapeError, DtypeError, DeviceError, AliasError: See `cache_locs.uniform_cache_locs`.

    Source: field_faults F13.
    """
    check_tensor("x", x, ("bs", "channels", "tokens"), dtypes=FLOATS)
    bs, channels, tokens = (int(size) for size in x.shape)
    same, device = (x.dtype,), x.device
    check_tensor("weight", weight, (channels, "kernel"), dtypes=same, device=device)
    kernel = int(weight.shape[1])
    check_number("weight.shape[1]", kernel, least=1)
    check_tensor("state", state, ("rows", channels, "state_len"), dtypes=same, device=device)
    check_number("state.shape[2]", int(state.shape[2]), least=kernel - 1)
    if not state.is_contiguous():
        raise ShapeError(
            "state",
            given=f"strides {state.stride()}",
            expected="a contiguous state",
            consequence="rows would overlap",
            remedy="pass a layer's view of the pool's storage",
        )
    check_tensor("state_indices", state_indices, (bs,), device=device)
    inputs = {"x": x, "weight": weight, "state_indices": state_indices}
    if bias is not None:
        check_tensor("bias", bias, (channels,), dtypes=same, device=device)
        inputs["bias"] = bias
    check_disjoint({"state": state}, inputs)
    out = torch.empty((bs, channels, tokens), dtype=x.dtype, device=device)
    chosen = choose("causal_conv1d_update", device, backend)
    if out.numel():
        load("causal_conv1d_update", chosen)(x, state, weight, bias, state_indices, out, bool(silu))
    return out


def keep_states(
    states: torch.Tensor,
    step_states: torch.Tensor,
    state_indices: torch.Tensor,
    steps: torch.Tensor,
    *,
    backend: BackendName | None = None,
) -> None:
    """Keep, of the states that a verify step computed after each token, the one after the last accepted token.

    Args:
        states: Shape: [rows, ...]; contiguous; any dtype.
        step_states: State of each request after each token. Shape: [bs, width, ...]; contiguous; dtype of `states`.
        state_indices: Distinct rows of `states`. Shape: [bs]; dtype int32 or int64.
        steps: Column to keep, `VerifyCommit.last_step` or `track_step`. Shape: [bs]; dtype int32 or int64.
        backend: Insist on a backend.

    Padding: a row outside `states` and a step outside the block (-1) keep nothing.

    Mutates: the named rows of `states`.

    Raises: as `causal_conv1d_update`.

    Source: contracts.md §1.4, `prepare_verify_commit_outputs`; field_faults F13.
    """
    check_tensor("state_indices", state_indices, ("bs",))
    bs, device = int(state_indices.shape[0]), state_indices.device
    check_tensor("steps", steps, (bs,), device=device)
    inner = tuple(states.shape[1:])
    check_tensor("states", states, ("rows", *inner), dtypes=(states.dtype,), device=device)
    check_tensor("step_states", step_states, (bs, "width", *inner), dtypes=(states.dtype,), device=device)
    for name, tensor in (("states", states), ("step_states", step_states)):
        if not tensor.is_contiguous():
            raise ShapeError(
                name,
                given=f"strides {tensor.stride()}",
                expected="a contiguous tensor",
                consequence="states would be read across rows",
                remedy="make it contiguous where it is allocated",
            )
    check_disjoint({"states": states}, {"step_states": step_states, "state_indices": state_indices, "steps": steps})
    chosen = choose("keep_states", device, backend)
    if states.numel() and step_states.numel():
        rows, width = int(states.shape[0]), int(step_states.shape[1])
        kept = states.view(rows, -1).view(torch.uint8)
        given = step_states.view(bs * width, -1).view(torch.uint8)
        load("keep_states", chosen)(kept, given, state_indices, steps, width)
