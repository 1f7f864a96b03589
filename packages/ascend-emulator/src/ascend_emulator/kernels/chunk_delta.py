"""npu_chunk_gated_delta_rule: the gated delta rule over whole prompts.

This module owns the op's refusals. The result is that of one token after the other, in float32; the op itself takes
chunks of tokens, which is the same sum in another order.
"""

from __future__ import annotations

import torch

from .errors import DeviceFault
from .gated_delta import advance
from .pose import Scope
from .rules import declare, document, holds, note, online, refuse

OP = "npu::npu_chunk_gated_delta_rule"
_NAME = "npu_chunk_gated_delta_rule"
_WHEEL = document(_NAME)
_DOC = online("torch_npu-npu_chunk_gated_delta_rule")
_TEST = "test_kernels_chunk_delta.py"

declare(
    _NAME,
    _DOC,
    _TEST,
    {
        "chunk-given": ("beta, initial_state and actual_seq_lengths", "pass them"),
        "chunk-dtype": ("bfloat16 query, key, value and beta, float32 g, int32 lengths", "cast them"),
        "chunk-state": ("a state of bfloat16, or float32", "cast it"),
        "chunk-shape": (
            "query, key (T, Nk, Dk), value (T, Nv, Dv), beta, g (T, Nv), initial_state (B, Nv, Dv, Dk), lengths (B,)",
            "reshape them",
        ),
        "chunk-empty": ("no empty tensor", "skip the call"),
        "chunk-heads": ("1 to 64 heads, Nv a multiple of Nk; widths of at most 128", "split the heads over ranks"),
    },
)
declare(
    _NAME, _DOC, _TEST, {"chunk-state-a5": ("a state of bfloat16", "cast it")}, Scope(chips=("910B", "910C"))
)  # fmt: skip
declare(_NAME, _WHEEL, _TEST, {"chunk-width": ("widths of 128", "pad the heads")}, Scope(before=(9, 1)))
note(
    _NAME,
    "lengths of at most 8",
    _WHEEL,
    "not enforced: op-plugin's page has no limit, and vLLM-Ascend tries the op with 64",
)
note(_NAME, "lengths that add up to T", _DOC, "others are a `DeviceFault` (507015): " + _TEST)
note(_NAME, "numbers within -1 to 1, g within -1 to 0, beta within 0 to 1", _DOC, "the caller's care: not looked at")


def _check(wide: dict[str, torch.Tensor], state: torch.Tensor, lengths: torch.Tensor, g: torch.Tensor | None) -> None:
    for name, tensor in wide.items():
        if tensor.dtype != torch.bfloat16:
            refuse(OP, "chunk-dtype", name, tensor.dtype)
    if g is not None and g.dtype != torch.float32:
        refuse(OP, "chunk-dtype", "g", g.dtype)
    if lengths.dtype != torch.int32:
        refuse(OP, "chunk-dtype", "actual_seq_lengths", lengths.dtype)
    if state.dtype not in (torch.bfloat16, torch.float32):
        refuse(OP, "chunk-state", "initial_state", state.dtype)
    if state.dtype == torch.float32 and holds("chunk-state-a5"):
        refuse(OP, "chunk-state-a5", "initial_state", state.dtype)
    for name, rank in (("query", 3), ("key", 3), ("value", 3)):
        if wide[name].dim() != rank:
            refuse(OP, "chunk-shape", name, f"shape {tuple(wide[name].shape)}")
    tokens, key_heads, key_dim = wide["key"].shape
    heads, value_dim = wide["value"].shape[1:]
    wanted = {
        "query": (tokens, key_heads, key_dim), "value": (tokens, heads, value_dim), "beta": (tokens, heads),
        "g": (tokens, heads), "initial_state": (lengths.numel(), heads, value_dim, key_dim),
    }  # fmt: skip
    given = wide | {"initial_state": state} | ({} if g is None else {"g": g})
    for name, shape in wanted.items():
        if name in given and tuple(given[name].shape) != shape:
            refuse(OP, "chunk-shape", name, f"shape {tuple(given[name].shape)}, wanted {shape}")
    for name, tensor in given.items():
        if tensor.numel() == 0:
            refuse(OP, "chunk-empty", name, f"shape {tuple(tensor.shape)}")
    if heads > 64 or key_heads > 64 or heads % key_heads or max(key_dim, value_dim) > 128:
        refuse(OP, "chunk-heads", "value", f"{heads} heads on {key_heads}, widths {key_dim}, {value_dim}")
    if (key_dim, value_dim) != (128, 128) and holds("chunk-width"):
        refuse(OP, "chunk-width", "value", f"widths {key_dim}, {value_dim}")


def npu_chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    actual_seq_lengths: torch.Tensor | None = None,
    scale: float | None = None,
    g: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with a state that every token decays and corrects: ``S = a S + b (v - a S k) k'``, ``o = scale S q``.

    Args:
        query: Shape: [T, Nk, Dk]; bfloat16.
        key: Shape: [T, Nk, Dk]; bfloat16.
        value: Shape: [T, Nv, Dv]; bfloat16.
        beta: b. Shape: [T, Nv]; bfloat16.
        initial_state: Shape: [B, Nv, Dv, Dk]; bfloat16 (950: or float32).
        actual_seq_lengths: tokens of each request. Shape: [B]; int32.
        scale: factor of the query; None for 1.
        g: logarithm of a; None for 0. Shape: [T, Nv]; float32.

    Returns:
        The output [T, Nv, Dv] (bfloat16), and the states after each request, as ``initial_state``.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_chunk_gated_delta_rule.md.
    """
    if beta is None or initial_state is None or actual_seq_lengths is None:
        refuse(OP, "chunk-given", "beta, initial_state, actual_seq_lengths", None)
    wide = {"query": query, "key": key, "value": value, "beta": beta}
    _check(wide, initial_state, actual_seq_lengths, g)
    tokens, heads = value.shape[:2]
    lengths = actual_seq_lengths.tolist()
    if any(n < 0 for n in lengths) or sum(lengths) != tokens:
        raise DeviceFault(OP, f"actual_seq_lengths {lengths} of {tokens} tokens")
    each = heads // key.size(1)
    q, k = (x.float().repeat_interleave(each, 1) for x in (query, key))
    q = q if scale is None else q * scale
    v, gate = value.float(), beta.float()
    decay = torch.ones(tokens, heads, 1, 1) if g is None else g.exp()[..., None, None]
    out, after = torch.empty(value.shape), initial_state.clone()
    first = 0
    for request, length in enumerate(lengths):
        state = initial_state[request].float()
        for token in range(first, first + length):
            state, out[token] = advance(state, q[token], k[token], v[token], gate[token], decay[token])
        after[request] = state.to(after.dtype)
        first += length
    return out.to(torch.bfloat16), after


KERNELS = {OP: npu_chunk_gated_delta_rule}
