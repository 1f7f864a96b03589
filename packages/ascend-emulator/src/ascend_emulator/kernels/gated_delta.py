"""Decoding with gated delta rules: npu_recurrent_gated_delta_rule and sgl_kernel_npu's recurrent_gated_delta_rule.

This module owns both ops' refusals and the latter's definition. The state of a request is float32 from its first token
to its last and rounded where it is written: after every token.
"""

from __future__ import annotations

import torch

from .definitions import define
from .errors import DeviceFault, KernelNotCovered
from .faults import fill_poison_
from .rules import declare, note, online, refuse

OP = "npu::npu_recurrent_gated_delta_rule"
OP_FUNCTIONAL = "npu::npu_recurrent_gated_delta_rule_functional"
OP_SGL = "npu::recurrent_gated_delta_rule"
SCHEMA = (
    "recurrent_gated_delta_rule(Tensor mix_qkv, Tensor(a!) recurrent_state, Tensor beta, float scale, Tensor "
    "actual_seq_lengths, Tensor ssm_state_indices, int nk, int nv, Tensor(b!)? intermediate_state=None, Tensor? "
    "cache_indices=None, Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor"
)
_TEST = "test_kernels_gated_delta.py"
_DOC = online("torch_npu-npu_recurrent_gated_delta_rule")
_SGL = "sgl-kernel-npu f425bdf, csrc/recurrent_gated_delta_rule"
_EPSILON = 1e-6
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32

declare(
    "npu_recurrent_gated_delta_rule[_functional]",
    _DOC,
    _TEST,
    {
        "delta-dtype": (
            "bfloat16 query, key, value, state and beta; float32 g and gk; int32 lengths, indices, accepted",
            "cast them",
        ),
        "delta-shape": (
            "query, key (T, Nk, Dk), value (T, Nv, Dv), state (blocks, Nv, Dv, Dk), beta, g (T, Nv), gk (T, Nv, Dk), "
            "one index a token, one number of accepted tokens a request",
            "reshape them",
        ),
        "delta-heads": ("1 to 256 heads, Nv a multiple of Nk; widths of 1 to 512", "split the heads over ranks"),
        "delta-blocks": ("at least as many blocks of state as tokens", "pass the whole pool"),
    },
)
declare(
    "npu::recurrent_gated_delta_rule",
    _SGL,
    _TEST,
    {
        "delta-mixed": (
            "mix_qkv (b, s, 2 * nk * dk + nv * dv), recurrent_state (slots, nv, dv, dk), beta (b, s, nv), "
            "ssm_state_indices (b, s)",
            "reshape them",
        ),
        "delta-mixed-dtype": (
            "contiguous; bfloat16 mix_qkv, states and beta, int32 lengths and ssm_state_indices (the kernel reads them "
            "as such)",
            "cast them",
        ),
        "delta-mixed-s": ("at most 8 tokens a request", "split the call"),
        "delta-mixed-gk": ("no gk: the kernel takes it and does not read it", "leave it out"),
        "delta-mixed-cache": ("cache_indices with intermediate_state", "pass one slot a request"),
    },
)
note(
    "npu_recurrent_gated_delta_rule[_functional]",
    "lengths of 1 to 8, accepted tokens of 1 to the length, state indices within the blocks",
    _DOC,
    "others are a `DeviceFault` (507015): " + _TEST,
)
note(
    "npu_recurrent_gated_delta_rule[_functional]",
    "beta, scale, actual_seq_lengths and ssm_state_indices may be None",
    _DOC,
    "without saying what that means: `KernelNotCovered`, a NotImplementedError",
)
note(
    "npu_recurrent_gated_delta_rule[_functional]",
    "(not documented) Nv a multiple of Nk",
    "—",
    "head n of value uses head n // (Nv / Nk) of key: `delta-heads`",
)
note(
    "npu::recurrent_gated_delta_rule",
    "(not documented) state indices and slots within the states, accepted tokens within the request",
    "—",
    "others are a `DeviceFault` (507015): " + _TEST,
)


def advance(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token. Shapes: state [Nv, Dv, Dk], q and k [Nv, Dk], v [Nv, Dv], beta [Nv], decay broadcast over state."""
    state = state * decay
    delta = (v - (state * k[:, None]).sum(-1)) * beta[:, None]
    state = state + delta[..., None] * k[:, None]
    return state, (state * q[:, None]).sum(-1)


def _index(op: str, name: str, index: int, size: int) -> int:
    if not 0 <= index < size:
        raise DeviceFault(op, f"{name} {index} lies outside {size} states", slot=index)
    return index


def _check(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    gates: dict[str, torch.Tensor | None],
    numbers: dict[str, torch.Tensor | None],
) -> None:
    wide = {"query": query, "key": key, "value": value, "state": state, "beta": gates["beta"]}
    for group, dtype in ((wide, BF16), ({"g": gates["g"], "gk": gates["gk"]}, F32), (numbers, I32)):
        for name, tensor in group.items():
            if tensor is not None and tensor.dtype != dtype:
                refuse(op, "delta-dtype", name, tensor.dtype)
    for name, tensor, rank in (("query", query, 3), ("key", key, 3), ("value", value, 3), ("state", state, 4)):
        if tensor.dim() != rank:
            refuse(op, "delta-shape", name, f"shape {tuple(tensor.shape)}")
    (tokens, key_heads, key_dim), (value_heads, value_dim) = key.shape, value.shape[1:]
    lengths = numbers["actual_seq_lengths"]
    wanted = {
        "query": (tokens, key_heads, key_dim), "value": (tokens, value_heads, value_dim),
        "state": (state.size(0), value_heads, value_dim, key_dim), "beta": (tokens, value_heads),
        "g": (tokens, value_heads), "gk": (tokens, value_heads, key_dim), "ssm_state_indices": (tokens,),
        "num_accepted_tokens": None if lengths is None else tuple(lengths.shape),
    }  # fmt: skip
    for name, tensor in (wide | gates | numbers).items():
        shape = wanted.get(name)
        if tensor is not None and shape is not None and tuple(tensor.shape) != shape:
            refuse(op, "delta-shape", name, f"shape {tuple(tensor.shape)}, wanted {shape}")
    if not (1 <= key_heads <= 256 and 1 <= value_heads <= 256) or value_heads % key_heads:
        refuse(op, "delta-heads", "value", f"{value_heads} heads on {key_heads}")
    if not (1 <= key_dim <= 512 and 1 <= value_dim <= 512):
        refuse(op, "delta-heads", "value", f"widths {key_dim}, {value_dim}")
    if state.size(0) < tokens:
        refuse(op, "delta-blocks", "state", f"{state.size(0)} for {tokens} tokens")


def _recurrent(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    beta: torch.Tensor | None,
    scale: float | None,
    actual_seq_lengths: torch.Tensor | None,
    ssm_state_indices: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
    g: torch.Tensor | None,
    gk: torch.Tensor | None,
) -> torch.Tensor:
    numbers = {
        "actual_seq_lengths": actual_seq_lengths, "ssm_state_indices": ssm_state_indices,
        "num_accepted_tokens": num_accepted_tokens,
    }  # fmt: skip
    _check(op, query, key, value, state, {"beta": beta, "g": g, "gk": gk}, numbers)
    if beta is None or scale is None or actual_seq_lengths is None or ssm_state_indices is None:
        raise KernelNotCovered(op, "beta, scale, actual_seq_lengths, ssm_state_indices", None)
    tokens, heads = value.shape[:2]
    lengths, places = actual_seq_lengths.tolist(), ssm_state_indices.tolist()
    if any(not 1 <= n <= 8 for n in lengths) or sum(lengths) != tokens:
        raise DeviceFault(op, f"actual_seq_lengths {lengths} of {tokens} tokens")
    accepted = [1] * len(lengths) if num_accepted_tokens is None else num_accepted_tokens.tolist()
    for place in places:
        _index(op, "state index", place, state.size(0))
    each = heads // key.size(1)
    q, k = (x.float().repeat_interleave(each, 1) for x in (query, key))
    decay = torch.ones(tokens, heads, 1, 1) if g is None else g.exp()[..., None, None]
    if gk is not None:
        decay = decay * gk.exp()[:, :, None]
    out = torch.empty(value.shape)
    first = 0
    for length, taken in zip(lengths, accepted, strict=True):
        if not 1 <= taken <= length:
            raise DeviceFault(op, f"{taken} accepted tokens of {length}")
        current = state[places[first + taken - 1]].float()
        for token in range(first, first + length):
            current, out[token] = advance(
                current, q[token] * scale, k[token], value[token].float(), beta[token].float(), decay[token]
            )
            state[places[token]] = current.to(BF16)
        first += length
    return out.to(BF16)


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
        state: Shape: [blocks, Nv, Dv, Dk]; bfloat16. *Mutated*: the state after each token, at the token's index.
        beta: b. Shape: [T, Nv]; bfloat16.
        scale: factor of the query.
        actual_seq_lengths: tokens of each request. Shape: [B]; int32.
        ssm_state_indices: block of each token. Shape: [T]; int32.
        num_accepted_tokens: a request starts from the state of its token of this number, counted from 1 (None: 1).
        g: logarithm of a. Shape: [T, Nv]; float32.
        gk: logarithm of a by column of the state. Shape: [T, Nv, Dk]; float32.

    Returns:
        Shape: [T, Nv, Dv]; bfloat16.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_recurrent_gated_delta_rule.md.
    """
    return _recurrent(
        OP, query, key, value, state, beta, scale, actual_seq_lengths, ssm_state_indices, num_accepted_tokens, g, gk
    )


def npu_recurrent_gated_delta_rule_functional(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, with the states returned and ``state`` left alone."""
    after = state.clone()
    out = _recurrent(
        OP_FUNCTIONAL, query, key, value, after, beta, scale, actual_seq_lengths, ssm_state_indices,
        num_accepted_tokens, g, gk,
    )  # fmt: skip
    return out, after


def _check_mixed(
    mixed: torch.Tensor, states: dict[str, torch.Tensor], beta: torch.Tensor, numbers: dict[str, torch.Tensor],
    heads: tuple[int, int], gk: torch.Tensor | None, slots: torch.Tensor | None,
) -> None:  # fmt: skip
    state, places = states["recurrent_state"], numbers["ssm_state_indices"]
    (nk, nv), shape = heads, tuple(mixed.shape)
    if mixed.dim() != 3 or state.dim() != 4 or state.size(1) != nv or nk < 1 or nv % nk:
        refuse(OP_SGL, "delta-mixed", "mix_qkv", f"shape {shape}, states {tuple(state.shape)}, {nk} and {nv} heads")
    if shape[2] != 2 * nk * state.size(3) + nv * state.size(2):
        refuse(OP_SGL, "delta-mixed", "mix_qkv", f"shape {shape} for states {tuple(state.shape)}, {nk} key heads")
    if tuple(beta.shape) != (*shape[:2], nv) or tuple(places.shape) != shape[:2]:
        refuse(OP_SGL, "delta-mixed", "beta", f"shape {tuple(beta.shape)}, indices {tuple(places.shape)}")
    for dtype, named in ((BF16, {"mix_qkv": mixed, "beta": beta, **states}), (I32, numbers)):
        for name, tensor in named.items():
            if tensor.dtype != dtype or not tensor.is_contiguous():
                refuse(OP_SGL, "delta-mixed-dtype", name, tensor.dtype)
    if shape[1] > 8:
        refuse(OP_SGL, "delta-mixed-s", "mix_qkv", f"shape {shape}")
    if gk is not None:
        refuse(OP_SGL, "delta-mixed-gk", "gk", f"shape {tuple(gk.shape)}")
    if "intermediate_state" in states and slots is None:
        refuse(OP_SGL, "delta-mixed-cache", "cache_indices", None)


def recurrent_gated_delta_rule(
    mix_qkv: torch.Tensor,
    recurrent_state: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    actual_seq_lengths: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    nk: int,
    nv: int,
    intermediate_state: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same on query, key and value in one tensor; normalises query and key, and takes ``beta`` before its sigmoid.

    Args:
        mix_qkv: Shape: [b, s, 2 * nk * dk + nv * dv]; bfloat16.
        recurrent_state: Shape: [slots, nv, dv, dk]; bfloat16. *Mutated* without ``intermediate_state``.
        beta: Shape: [b, s, nv]; bfloat16.
        scale: factor of the query.
        actual_seq_lengths: tokens of each request, of its s. Shape: [b]; int32.
        ssm_state_indices: state of each token. Shape: [b, s]; int32.
        nk: heads of query and key.
        nv: heads of value.
        intermediate_state: states of the tokens of drafts. Shape: [states, nv, dv, dk] in memory; bfloat16. *Mutated*;
            a request whose first state has an index that s divides starts from ``recurrent_state``.
        cache_indices: slot of each request in ``recurrent_state``. Shape: [b].
        num_accepted_tokens: a request starts from the state of its token of this number, counted from 1 (None: 1).
        g: logarithm of the decay. Shape: [b, s, nv].
        gk: None.

    Returns:
        Shape: [b, s, nv, dv]; bfloat16. Tokens beyond a request's length are poison.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        sgl-kernel-npu f425bdf, csrc/recurrent_gated_delta_rule.
    """
    states = {"recurrent_state": recurrent_state}
    if intermediate_state is not None:
        states["intermediate_state"] = intermediate_state
    numbers = {"actual_seq_lengths": actual_seq_lengths, "ssm_state_indices": ssm_state_indices}
    _check_mixed(mix_qkv, states, beta, numbers, (nk, nv), gk, cache_indices)
    batch, width, _ = mix_qkv.shape
    dv, dk = recurrent_state.shape[2:]
    pool = recurrent_state if intermediate_state is None else intermediate_state.view(-1, nv, dv, dk)
    places, lengths = ssm_state_indices.tolist(), actual_seq_lengths.tolist()
    accepted = [1] * batch if num_accepted_tokens is None else num_accepted_tokens.tolist()
    q, k, v = torch.split(mix_qkv.float(), [nk * dk, nk * dk, nv * dv], -1)
    q, k = (x.reshape(batch, width, nk, dk) for x in (q, k))
    q, k = (x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(nv // nk, 2) for x in (q * scale, k))
    v, gate = v.reshape(batch, width, nv, dv), beta.float().sigmoid()
    decay = torch.ones(batch, width, nv) if g is None else g.float().reshape(batch, width, nv).exp()
    out = fill_poison_(torch.empty(batch, width, nv, dv, dtype=BF16))
    for request in range(batch):
        if not 1 <= accepted[request] <= width or not 0 <= lengths[request] <= width:
            raise DeviceFault(OP_SGL, f"request {request}: {accepted[request]} accepted of {lengths[request]} tokens")
        start = _index(OP_SGL, "state index", places[request][accepted[request] - 1], pool.size(0))
        current = pool[start].float()
        if intermediate_state is not None and cache_indices is not None and start % width == 0:
            slot = _index(OP_SGL, "slot", int(cache_indices[request]), recurrent_state.size(0))
            current = recurrent_state[slot].float()
        for token in range(lengths[request]):
            at = request, token
            current, row = advance(current, q[at], k[at], v[at], gate[at], decay[at][:, None, None])
            pool[_index(OP_SGL, "state index", places[request][token], pool.size(0))] = current.to(BF16)
            out[at] = row.to(BF16)
    return out


KERNELS = {
    OP: npu_recurrent_gated_delta_rule,
    OP_FUNCTIONAL: npu_recurrent_gated_delta_rule_functional,
    OP_SGL: recurrent_gated_delta_rule,
}
define(SCHEMA)
