"""sgl_kernel_npu's causal_conv1d: the short convolution before linear attention, and its state.

This module owns the op's definition (torch_npu has none) and its refusals; sums are float32 and rounded once.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from .definitions import define
from .errors import DeviceFault
from .faults import fill_poison_
from .rules import declare, note, refuse

OP = "npu::causal_conv1d"
SCHEMA = (
    "causal_conv1d(Tensor x, Tensor weight, Tensor conv_states, Tensor? bias=None, Tensor? query_start_loc=None, "
    "Tensor? cache_indices=None, Tensor? has_initial_state=None, Tensor? num_accepted_tokens=None, int "
    "activation_mode=0, int pad_slot_id=-1, int run_mode=0) -> Tensor"
)
_SOURCE = "sgl-kernel-npu f425bdf, csrc/causal_conv1d"
_TEST = "test_kernels_gated_delta.py"

declare(
    OP,
    _SOURCE,
    _TEST,
    {
        "conv-rank": ("x of 2 or 3 axes, weight (width, dim), conv_states (slots, rows, dim)", "reshape them"),
        "conv-dtype": ("bfloat16 or float16 alike for x, weight and conv_states", "cast them"),
        "conv-contiguous": ("contiguous x, weight and conv_states", "call .contiguous()"),
        "conv-width": ("a width of 2 to 4", "use a shorter kernel"),
        "conv-starts": ("query_start_loc of at least 2 numbers", "pass the running sum of lengths"),
        "conv-flat": (
            "x (tokens, dim): query_start_loc; without it the kernel writes nothing",
            "pass torch.arange(requests + 1) for one token a request",
        ),
        "conv-rows": ("conv_states of at least width - 1 rows (the kernel reads past a slot otherwise)", "widen it"),
        "conv-mode": ("run_mode 0 or 1", "pass 1 for decoding"),
    },
)
declare(
    OP,
    "(not documented) indices of other operators of the library",
    _TEST,
    {
        "conv-numbers": ("int32 or int64 numbers of one axis, has_initial_state bool too", "cast and reshape them"),
    },
)
note(OP, "the schema has no mark on conv_states", _SOURCE, "it is written nevertheless")
note(
    OP,
    "(not documented) slots within conv_states, query_start_loc that rises within x",
    "—",
    "others are a `DeviceFault` (507015): " + _TEST,
)
note(OP, "num_accepted_tokens with a width other than 4", _SOURCE, "without effect, as in the kernel")
note(OP, "accepted tokens past the rows of conv_states", _SOURCE, "clamped, as in the kernel")


def _check(x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, starts: torch.Tensor | None, mode: int) -> None:
    if (
        x.dim() not in (2, 3)
        or weight.dim() != 2
        or states.dim() != 3
        or len({t.size(-1) for t in (x, weight, states)}) > 1
    ):
        refuse(OP, "conv-rank", "x", f"shapes {tuple(x.shape)}, {tuple(weight.shape)}, {tuple(states.shape)}")
    for name, tensor in (("x", x), ("weight", weight), ("conv_states", states)):
        if tensor.dtype not in (torch.bfloat16, torch.float16) or tensor.dtype != x.dtype:
            refuse(OP, "conv-dtype", name, tensor.dtype)
        if not tensor.is_contiguous():
            refuse(OP, "conv-contiguous", name, f"strides {tensor.stride()}")
    if not 2 <= weight.size(0) <= 4:
        refuse(OP, "conv-width", "weight", f"shape {tuple(weight.shape)}")
    if starts is not None and starts.numel() < 2:
        refuse(OP, "conv-starts", "query_start_loc", f"shape {tuple(starts.shape)}")
    if starts is None and x.dim() == 2:
        refuse(OP, "conv-flat", "query_start_loc", None)
    if states.size(1) < weight.size(0) - 1:
        refuse(OP, "conv-rows", "conv_states", f"shape {tuple(states.shape)} for a width of {weight.size(0)}")
    if mode not in (0, 1):
        refuse(OP, "conv-mode", "run_mode", mode)


def _check_numbers(**numbers: torch.Tensor | None) -> None:
    for name, tensor in numbers.items():
        kinds = (torch.int32, torch.int64, *((torch.bool,) if name == "has_initial_state" else ()))
        if tensor is not None and (tensor.dtype not in kinds or tensor.dim() != 1):
            refuse(OP, "conv-numbers", name, f"{tensor.dtype}, shape {tuple(tensor.shape)}")


def _windows(x: torch.Tensor, starts: torch.Tensor | None) -> list[tuple[int, int]]:
    """First token and end of each request in the tokens of ``x``."""
    if x.dim() == 3:
        return [(number * x.size(1), (number + 1) * x.size(1)) for number in range(x.size(0))]
    assert starts is not None
    ends = starts.tolist()
    if ends[0] < 0 or ends[-1] > x.size(0) or any(end < first for first, end in pairwise(ends)):
        raise DeviceFault(OP, f"query_start_loc {ends} of {x.size(0)} tokens")
    return list(pairwise(ends))


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    conv_states: torch.Tensor,
    bias: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    activation_mode: int = 0,
    pad_slot_id: int = -1,
    run_mode: int = 0,
) -> torch.Tensor:
    """Convolves every channel over a request's tokens and the last ones before them, and keeps the new last ones.

    Args:
        x: Shape: [tokens, dim], or [requests, tokens, dim]; bfloat16 or float16.
        weight: Shape: [width, dim]; dtype of ``x``.
        conv_states: the tokens before each request, in its first width - 1 rows. Shape: [slots, rows, dim]; dtype of
            ``x``. *Mutated*. With ``num_accepted_tokens``, a width of 4 and 2 + tokens rows or more: the rows from that
            number - 1 on are read, and all tokens of the request are kept behind the last two before them.
        bias: Shape: [dim].
        query_start_loc: first token of each request, and the end; needed for [tokens, dim]. Shape: [requests + 1].
        cache_indices: slot of each request, ``pad_slot_id`` for none; None: in order. Shape: [requests].
        has_initial_state: run_mode 0: whether the slot is read; None: none is. Shape: [requests].
        num_accepted_tokens: run_mode 1. Shape: [requests].
        activation_mode: 1 for SiLU.
        pad_slot_id: slot of requests that are skipped.
        run_mode: 0 for prompts, 1 for decoding.

    Returns:
        Shape and dtype of ``x``. Tokens of skipped requests are poison.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        sgl-kernel-npu f425bdf, csrc/causal_conv1d.
    """
    _check(x, weight, conv_states, query_start_loc, run_mode)
    _check_numbers(
        query_start_loc=query_start_loc,
        cache_indices=cache_indices,
        has_initial_state=has_initial_state,
        num_accepted_tokens=num_accepted_tokens,
    )
    windows = _windows(x, query_start_loc)
    slots = list(range(len(windows))) if cache_indices is None else cache_indices.tolist()
    width, rows = weight.size(0), conv_states.size(1)
    drafts = run_mode == 1 and num_accepted_tokens is not None and width == 4
    offsets = [0] * len(windows)
    if drafts and num_accepted_tokens is not None:
        offsets = [min(max(n - 1, 0), rows - width + 1) for n in num_accepted_tokens.tolist()]
    read = [run_mode == 1] * len(windows)
    if run_mode == 0 and has_initial_state is not None:
        read = [bool(flag) for flag in has_initial_state.tolist()]
    out = fill_poison_(torch.empty(x.shape, dtype=x.dtype))
    flat, tokens = out.view(-1, x.size(-1)), x.view(-1, x.size(-1))
    for number, (first, end) in enumerate(windows):
        slot, count = slots[number], end - first
        if count == 0 or (cache_indices is not None and slot == pad_slot_id):
            continue
        if not 0 <= slot < conv_states.size(0):
            raise DeviceFault(OP, f"slot {slot} of request {number} lies outside {conv_states.size(0)}", slot=slot)
        state = conv_states[slot]
        before = state[offsets[number] : offsets[number] + width - 1].clone()
        joined = torch.cat([before if read[number] else torch.zeros_like(before), tokens[first:end]])
        sums = sum((joined[tap : tap + count].float() * weight[tap].float() for tap in range(width)), torch.zeros(()))
        sums = sums if bias is None else sums + bias.float()
        flat[first:end] = (torch.nn.functional.silu(sums) if activation_mode else sums).to(x.dtype)
        if drafts and 2 + count <= rows:
            state[: 2 + count] = joined[1:]
        else:
            state[: width - 1] = joined[1 - width :]
    return out


KERNELS = {OP: causal_conv1d}
UNDECLARED_WRITES = {OP: ("conv_states",)}
define(SCHEMA)
