"""vLLM-Ascend's ops of linear attention: its convolution, its recurrent delta rule, and the gates of both.

This module owns the ops' definitions (torch_npu has none of them) and their refusals. Sums are float32; states are kept
in their own dtype after every token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import causal_conv
from .definitions import define
from .errors import DeviceFault, KernelNotCovered
from .faults import fill_poison_, poisoned_rows
from .gated_delta import advance
from .rules import declare, note, refuse
from .same_operator import called_as

OP_CONV = "_C_ascend::npu_causal_conv1d_custom"
OP_DELTA = "_C_ascend::npu_recurrent_gated_delta_rule"
OP_GATES = "_C_ascend::npu_fused_gdn_gating"
SCHEMAS = (
    "npu_causal_conv1d_custom(Tensor output, Tensor x, Tensor weight, Tensor conv_state, Tensor? bias_opt, "
    "Tensor? query_start_loc_opt, Tensor? cache_indices_opt, Tensor? initial_state_mode_opt, "
    "Tensor? num_accepted_tokens_opt, int activation_mode, int pad_slot_id, int run_mode) -> (Tensor output)",
    "npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None, "
    "float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, "
    "Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor",
    "npu_fused_gdn_gating(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias, float beta=1.0, float threshold=20.0) -> "
    "(Tensor g, Tensor beta_output)",
)
MAX_TOKENS = 8
"""Tokens of one request that the kernel of the delta rule takes."""
_SOURCE = "vllm-ascend v0.23.0, csrc/"
_TEST = "test_kernels_vllm_delta.py"

declare(
    OP_CONV,
    _SOURCE + "moe/causal_conv1d/op_host",
    _TEST,
    {
        "vconv-output": ("an output of the shape and dtype of x", "allocate it with torch.empty_like"),
        "vconv-dim": ("a dim of a multiple of 16", "pad the channels"),
        "vconv-modes": (
            "activation_mode 0 or 1; initial_state_mode_opt with run_mode 0 alone, num_accepted_tokens_opt with "
            "run_mode 1 alone",
            "leave out what belongs to the other mode",
        ),
        "vconv-batch": (
            "one cache index (or row of them), initial state mode and accepted number a request; enough slots without "
            "indices",
            "pass one a request",
        ),
    },
)
declare(
    OP_DELTA,
    _SOURCE + "attention/recurrent_gated_delta_rule/op_host",
    _TEST,
    {
        "vdelta-dtype": (
            "bfloat16 query, key, value and beta, a bfloat16 or float32 state, float32 g and gk, int32 numbers",
            "cast them",
        ),
        "vdelta-shape": (
            "query and key (T, Nk, Dk), value (T, Nv, Dv), state (blocks, Nv, Dv, Dk), beta and g (T, Nv), gk "
            "(T, Nv, Dk), one axis for numbers, one state index a token",
            "reshape them",
        ),
        "vdelta-heads": ("Nv a multiple of Nk, at most 256 of each, at most 512 for Dk and Dv", "split the heads"),
        "vdelta-scale": ("a scale", "pass Dk ** -0.5"),
    },
)
declare(
    OP_GATES,
    _SOURCE + "attention/fused_gdn_gating",
    _TEST,
    {
        "gates-dtype": (
            "float16 or bfloat16 alike for a and b, float32, float16 or bfloat16 alike for A_log and dt_bias",
            "cast them",
        ),
        "gates-shape": ("A_log and dt_bias (heads,), a and b (tokens, heads) with elements", "reshape them"),
    },
)
note(
    OP_CONV,
    "axes, dtypes, widths and states",
    _SOURCE + "moe/causal_conv1d/op_host",
    "as the rows of npu::causal_conv1d say, of which it is a build, under this op's name; strided tensors are taken: "
    + _TEST,
)
note(OP_CONV, "the schema has no mark on output and conv_state", _SOURCE + "torch_binding.cpp", "they are written")
note(OP_CONV, "cache indices of two axes", _SOURCE + "moe/causal_conv1d/op_host", "the first column counts: " + _TEST)
note(
    OP_DELTA,
    "actual_seq_lengths: the first token, then the length of each request (torch_npu's op of this name has no first "
    "number)",
    _SOURCE + "attention/recurrent_gated_delta_rule/op_kernel",
    "as the kernel reads it; requests of no token are skipped, tokens of none are poison: " + _TEST,
)
note(
    OP_DELTA,
    f"requests of at most {MAX_TOKENS} tokens within T, accepted tokens of 1 to the length, state indices within the "
    "blocks",
    _SOURCE + "attention/recurrent_gated_delta_rule/op_kernel",
    "the kernel stops without a word, or leaves the states; here a `DeviceFault` (507015): " + _TEST,
)
note(
    OP_DELTA,
    "beta, actual_seq_lengths and ssm_state_indices may be None",
    _SOURCE + "torch_binding.cpp",
    "its tiling refuses that: `KernelNotCovered`: " + _TEST,
)


def _check_conv(
    output: torch.Tensor,
    x: torch.Tensor,
    conv_state: torch.Tensor,
    starts: torch.Tensor | None,
    named: dict[str, torch.Tensor | None],
    activation: int,
    mode: int,
) -> None:
    if output.shape != x.shape or output.dtype != x.dtype:
        refuse(OP_CONV, "vconv-output", "output", f"{output.dtype}, shape {tuple(output.shape)}")
    if x.size(-1) % 16:
        refuse(OP_CONV, "vconv-dim", "x", f"shape {tuple(x.shape)}")
    other = {0: "num_accepted_tokens_opt", 1: "initial_state_mode_opt"}.get(mode)
    if activation not in (0, 1) or (other is not None and named[other] is not None):
        refuse(OP_CONV, "vconv-modes", "run_mode", f"{mode} with {other}, activation_mode {activation}")
    requests = x.size(0) if starts is None else starts.numel() - 1
    for name, tensor in named.items():
        if tensor is not None and (tensor.dim() not in (1, 2) or tensor.size(0) != requests):
            refuse(OP_CONV, "vconv-batch", name, f"shape {tuple(tensor.shape)} for {requests} requests")
    if named["cache_indices_opt"] is None and conv_state.size(0) < requests:
        refuse(OP_CONV, "vconv-batch", "conv_state", f"{conv_state.size(0)} slots for {requests} requests")


def npu_causal_conv1d_custom(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_state: torch.Tensor,
    bias_opt: torch.Tensor | None,
    query_start_loc_opt: torch.Tensor | None,
    cache_indices_opt: torch.Tensor | None,
    initial_state_mode_opt: torch.Tensor | None,
    num_accepted_tokens_opt: torch.Tensor | None,
    activation_mode: int,
    pad_slot_id: int,
    run_mode: int,
) -> torch.Tensor:
    """``npu::causal_conv1d`` into a given output; see there.

    Args:
        output: shape and dtype of ``x``. *Mutated*; tokens of skipped requests keep what it has.
        x: Shape: [tokens, dim] or [requests, tokens, dim]; bfloat16 or float16; any strides.
        weight: Shape: [width, dim]; any strides.
        conv_state: Shape: [slots, rows, dim]; any strides. *Mutated*.
        bias_opt: Shape: [dim].
        query_start_loc_opt: Shape: [requests + 1]; None with run_mode 1: one token a request.
        cache_indices_opt: Shape: [requests] or [requests, n], of which the first column counts.
        initial_state_mode_opt: run_mode 0: whether a slot is read. Shape: [requests].
        num_accepted_tokens_opt: run_mode 1. Shape: [requests].
        activation_mode: 1 for SiLU.
        pad_slot_id: slot of requests that are skipped.
        run_mode: 0 for prompts, 1 for decoding.

    Returns:
        ``output``; through the dispatcher a copy of it.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        vllm-ascend v0.23.0, csrc/moe/causal_conv1d.
    """
    named = {"cache_indices_opt": cache_indices_opt, "initial_state_mode_opt": initial_state_mode_opt}
    named |= {"num_accepted_tokens_opt": num_accepted_tokens_opt}
    starts = query_start_loc_opt
    if x.dim() in (2, 3) and conv_state.dim() == 3:
        if starts is None and x.dim() == 2 and run_mode == 1:
            starts = torch.arange(x.size(0) + 1)
        _check_conv(output, x, conv_state, starts, named, activation_mode, run_mode)
    slots = cache_indices_opt
    state = conv_state.contiguous()
    out = called_as(
        OP_CONV, causal_conv.causal_conv1d, x.contiguous(), weight.contiguous(), state, bias_opt, starts,
        slots[:, 0] if slots is not None and slots.dim() == 2 else slots, initial_state_mode_opt,
        num_accepted_tokens_opt, activation_mode, pad_slot_id, run_mode,
    )  # fmt: skip
    if not conv_state.is_contiguous():
        conv_state.copy_(state)
    skipped = poisoned_rows(out)
    output.copy_(out if skipped is None else torch.where(skipped.unsqueeze(-1), output, out))
    return output


def _check_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    gates: dict[str, torch.Tensor | None],
    numbers: dict[str, torch.Tensor | None],
) -> None:
    wide: dict[str, torch.Tensor | None] = {"query": query, "key": key, "value": value, "beta": gates["beta"]}
    floats = {"g": gates["g"], "gk": gates["gk"]}
    for group, dtype in ((wide, torch.bfloat16), (floats, torch.float32), (numbers, torch.int32)):
        for name, tensor in group.items():
            if tensor is not None and tensor.dtype != dtype:
                refuse(OP_DELTA, "vdelta-dtype", name, tensor.dtype)
    if state.dtype not in (torch.bfloat16, torch.float32):
        refuse(OP_DELTA, "vdelta-dtype", "state", state.dtype)
    for name, tensor, rank in (("query", query, 3), ("key", key, 3), ("value", value, 3), ("state", state, 4)):
        if tensor.dim() != rank:
            refuse(OP_DELTA, "vdelta-shape", name, f"shape {tuple(tensor.shape)}")
    (tokens, key_heads, key_dim), (value_heads, value_dim) = key.shape, value.shape[1:]
    if max(key_heads, value_heads) > 256 or max(key_dim, value_dim) > 512 or value_heads % max(key_heads, 1):
        refuse(OP_DELTA, "vdelta-heads", "value", f"{value_heads} heads of {value_dim} on {key_heads} of {key_dim}")
    accepted = numbers["num_accepted_tokens"]
    wanted = {
        "query": (tokens, key_heads, key_dim), "value": (tokens, value_heads, value_dim),
        "state": (state.size(0), value_heads, value_dim, key_dim), "beta": (tokens, value_heads),
        "g": (tokens, value_heads), "gk": (tokens, value_heads, key_dim), "ssm_state_indices": (tokens,),
        "num_accepted_tokens": None if accepted is None else (accepted.numel(),),
    }  # fmt: skip
    for name, tensor in (wide | {"state": state} | gates | numbers).items():
        shape = wanted.get(name)
        if tensor is not None and shape is not None and tuple(tensor.shape) != shape:
            refuse(OP_DELTA, "vdelta-shape", name, f"shape {tuple(tensor.shape)}, wanted {shape}")


def npu_recurrent_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention with a state that every token decays and corrects: ``S = a S + b (v - a S k) k'``, ``o = scale S q``.

    Args:
        query: Shape: [T, Nk, Dk]; bfloat16.
        key: Shape: [T, Nk, Dk]; bfloat16.
        value: Shape: [T, Nv, Dv]; bfloat16.
        state: Shape: [blocks, Nv, Dv, Dk]; bfloat16 or float32. *Mutated*: the state after each token, at its index.
        beta: Shape: [T, Nv]; bfloat16.
        scale: factor of the query.
        actual_seq_lengths: first token, then tokens of each request. Shape: [requests + 1]; int32.
        ssm_state_indices: block of each token. Shape: [T]; int32.
        num_accepted_tokens: the token, counted from 1, whose block a request starts from; None for 1. int32.
        g: logarithm of the decay. Shape: [T, Nv]; float32.
        gk: the same for each element of the key. Shape: [T, Nv, Dk]; float32.

    Returns:
        Shape: [T, Nv, Dv]; bfloat16. Tokens of no request are poison.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        vllm-ascend v0.23.0, csrc/attention/recurrent_gated_delta_rule.
    """
    numbers = {"actual_seq_lengths": actual_seq_lengths, "ssm_state_indices": ssm_state_indices}
    _check_delta(
        query,
        key,
        value,
        state,
        {"beta": beta, "g": g, "gk": gk},
        numbers | {"num_accepted_tokens": num_accepted_tokens},
    )
    if scale is None:
        refuse(OP_DELTA, "vdelta-scale", "scale", None)
    if beta is None or actual_seq_lengths is None or ssm_state_indices is None:
        raise KernelNotCovered(OP_DELTA, "beta, actual_seq_lengths, ssm_state_indices", None)
    tokens, heads = value.shape[:2]
    if actual_seq_lengths.dim() != 1:
        refuse(OP_DELTA, "vdelta-shape", "actual_seq_lengths", f"shape {tuple(actual_seq_lengths.shape)}")
    lengths, places = actual_seq_lengths.tolist(), ssm_state_indices.tolist()
    accepted = [1] * (len(lengths) - 1) if num_accepted_tokens is None else num_accepted_tokens.tolist()
    q, k = (part.float().repeat_interleave(heads // key.size(1), 1) for part in (query, key))
    decay = torch.ones(tokens, heads, 1, 1) if g is None else g.exp()[..., None, None]
    decay = decay if gk is None else decay * gk.exp()[:, :, None]
    out = fill_poison_(torch.empty(value.shape, dtype=torch.bfloat16))
    first = lengths[0] if lengths else 0
    for number, (length, taken) in enumerate(zip(lengths[1:], accepted, strict=False)):
        if length <= 0:
            continue
        if length > MAX_TOKENS or not 0 <= first <= first + length <= tokens or not 1 <= taken <= length:
            detail = f"request {number} has tokens [{first}:{first + length}] of {tokens}, {taken} of them accepted"
            raise DeviceFault(OP_DELTA, detail)
        for place in places[first : first + length]:
            if not 0 <= place < state.size(0):
                raise DeviceFault(OP_DELTA, f"request {number}: state {place} of {state.size(0)}", slot=place)
        current = state[places[first + taken - 1]].float()
        for token in range(first, first + length):
            parts = q[token] * scale, k[token], value[token].float(), beta[token].float(), decay[token]
            current, row = advance(current, *parts)
            out[token] = row.to(torch.bfloat16)
            state[places[token]] = current.to(state.dtype)
        first += length
    return out


def npu_fused_gdn_gating(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates of the delta rule: ``-exp(A_log) * softplus(a + dt_bias)`` and ``sigmoid(b)``.

    Args:
        A_log: Shape: [heads]; float32, float16 or bfloat16.
        a: Shape: [tokens, heads]; float16 or bfloat16.
        b: shape and dtype of ``a``.
        dt_bias: shape and dtype of ``A_log``.
        beta: sharpness of the softplus.
        threshold: above it, times ``beta``, the softplus is its argument.

    Returns:
        float32 [1, tokens, heads], and the second of the dtype of ``b`` and the same shape.

    Raises:
        OpRefused: a constraint of its host code is broken.

    Source:
        vllm-ascend v0.23.0, csrc/attention/fused_gdn_gating.
    """
    halves = (torch.float16, torch.bfloat16)
    for name, tensor, other, dtypes in (
        ("b", b, a, halves),
        ("a", a, b, halves),
        ("dt_bias", dt_bias, A_log, (torch.float32, *halves)),
    ):
        if tensor.dtype not in dtypes or tensor.dtype != other.dtype:
            refuse(OP_GATES, "gates-dtype", name, f"{tensor.dtype} beside {other.dtype}")
    fits = a.dim() == 2 and a.shape == b.shape and a.numel() > 0
    if not fits or tuple(A_log.shape) != (a.size(1),) or tuple(dt_bias.shape) != (a.size(1),):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (A_log, a, b, dt_bias))
        refuse(OP_GATES, "gates-shape", "a", f"shapes {shapes}")
    x = a.float() + dt_bias.float()
    soft = torch.where(beta * x <= threshold, torch.log1p(torch.exp(beta * x)) / beta, x)
    return (-torch.exp(A_log.float()) * soft).unsqueeze(0), torch.sigmoid(b.float()).to(b.dtype).unsqueeze(0)


_METAS: tuple[Callable[..., Any], ...] = (
    lambda output, *rest: torch.empty_like(output),
    lambda query, key, value, *rest, **options: torch.empty_like(value, dtype=torch.bfloat16),
    lambda A_log, a, b, *rest: (a.new_empty((1, *a.shape), dtype=torch.float32), b.new_empty((1, *b.shape))),
)
for _schema, _meta in zip(SCHEMAS, _METAS, strict=True):
    define(_schema, "_C_ascend", _meta)
UNDECLARED_WRITES = {OP_CONV: ("output", "conv_state")}
KERNELS: dict[str, Callable[..., Any]] = {
    OP_CONV: npu_causal_conv1d_custom,
    OP_DELTA: npu_recurrent_gated_delta_rule,
    OP_GATES: npu_fused_gdn_gating,
}
