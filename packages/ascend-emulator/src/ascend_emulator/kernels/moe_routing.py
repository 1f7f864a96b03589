"""Moving tokens to experts: npu_moe_init_routing (v1, v2), npu_moe_re_routing and npu_moe_token_permute.

This module owns the ops' refusals and the sort by expert, which keeps the order of equal experts. The way back is in
``moe_finalize.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import DeviceFault, KernelNotCovered
from .faults import fill_poison_
from .quantising import quantise_rows, to_integer
from .rules import declare, document, note, online, refuse

OP = "npu::npu_moe_init_routing"
OP_V2 = "npu::npu_moe_init_routing_v2"
OP_RE = "npu::npu_moe_re_routing"
OP_PERMUTE = "npu::npu_moe_token_permute"
_TEST = "test_kernels_moe.py"
_DOC = online("torch_npu-npu_moe_init_routing")
_DOC_V2 = online("torch_npu-npu_moe_init_routing_v2")
_DOC_RE = online("torch_npu-npu_moe_re_routing")
_DOC_PERMUTE = document("npu_moe_token_permute")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)

declare(
    "npu_moe_init_routing",
    _DOC,
    _TEST,
    {
        "routing-x": ("x (rows, H) of float16, bfloat16 or float32", "cast and reshape x"),
        "routing-index": ("row_idx and expert_idx (rows, K) of dtype int32", "cast and reshape them"),
    },
)
declare(
    "npu_moe_init_routing_v2",
    _DOC_V2,
    _TEST,
    {
        "routing2-x": ("x (rows, H) of float16, bfloat16, float32 or int8 (int8 unquantised)", "cast and reshape x"),
        "routing2-experts": ("an int32 expert_idx (rows, K)", "cast and reshape it"),
        "routing2-range": (
            "an active_expert_range within [0, expert_num), expert_num at most 10240 (key/value pairs: 5120)",
            "pass [first, end]",
        ),
        "routing2-type": (
            "drop_pad_mode 0 or 1, expert_tokens_num_type 0, 1 or 2, row_idx_type 0 or 1, active_num of -1 or more",
            "pass a supported mode",
        ),
        "routing2-scale": (
            "a float32 scale: unquantised (rows,); static (1,), needed; dynamic (experts of the range or 1, H)",
            "cast and reshape the scale",
        ),
        "routing2-offset": ("a float32 offset (1,) in static quantisation, needed there, and nowhere else", "pass it"),
        "routing2-quant": ("a quant_mode of the document's list", "pass -1, 0 or 1"),
    },
)
declare(
    "npu_moe_re_routing",
    _DOC_RE,
    _TEST,
    {
        "rerouting-tokens": ("tokens (A, H) of float16, bfloat16 or int8, H below 16384", "cast and reshape them"),
        "rerouting-counts": ("counts (ranks, experts) of dtype int32 or int64", "cast and reshape them"),
        "rerouting-scales": ("float32 per_token_scales (A,)", "cast and reshape them"),
        "rerouting-type": ("expert_token_num_type 1, idx_type 0", "pass 1 and 0"),
    },
)
declare(
    "npu_moe_token_permute",
    _DOC_PERMUTE,
    _TEST,
    {
        "permute-tokens": ("tokens of 2 axes, bfloat16, float16 or float32", "cast and reshape them"),
        "permute-indices": ("int32 or int64 indices (tokens,) or (tokens, K), K at most 512", "cast and reshape them"),
        "permute-padded": ("padded_mode False", "pass False"),
    },
)
note(
    "npu_moe_init_routing_v2",
    "experts within the number of experts",
    _DOC_V2,
    "others are a `DeviceFault` (507015): " + _TEST,
)
note(
    "npu_moe_init_routing_v2",
    "drop_pad_mode 1; float8, hifloat8, int4 and microscaling quantisation",
    _DOC_V2,
    "not computed: `KernelNotCovered`: " + _TEST,
)
note(
    "npu_moe_init_routing_v2",
    "rows and indices past the tokens of active experts; scales without meaning",
    _DOC_V2,
    "they are poison; indices of gather type are -1 there, as documented: " + _TEST,
)
note("npu_moe_init_routing_v2", "(not documented) pairs past the experts that have tokens", "—", "zeros")
note(
    "npu_moe_re_routing",
    "counts above 0, adding up to the tokens",
    _DOC_RE,
    "0 is taken; more than the tokens is a `DeviceFault` (507015), fewer leave poison: " + _TEST,
)
note(
    "npu_moe_token_permute",
    "float16 and float32 tokens",
    _DOC_PERMUTE,
    "taken: the document's list has bfloat16 alone, its page for CANN has all three",
)


def npu_moe_init_routing(
    x: torch.Tensor, row_idx: torch.Tensor, expert_idx: torch.Tensor, active_num: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts tokens by expert.

    Args:
        x: Shape: [rows, H]; float16, bfloat16 or float32.
        row_idx: row numbers counted column by column, as the gating op gives them. Shape: [rows, K]; int32.
        expert_idx: experts of each row. Shape: [rows, K]; int32.
        active_num: most rows of ``x`` to expand.

    Returns:
        Expanded tokens [min(rows, active_num) * K, H]; for each number of ``row_idx`` its place among them [rows * K];
        experts in order [rows * K].

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        op-plugin, torch_npu-npu_moe_init_routing.md.
    """
    if x.dtype not in _FLOATS or x.dim() != 2:
        refuse(OP, "routing-x", "x", f"{x.dtype}, shape {tuple(x.shape)}")
    for name, tensor in (("row_idx", row_idx), ("expert_idx", expert_idx)):
        fits = tensor.dim() == 2 and tensor.size(0) == x.size(0) and tensor.shape == row_idx.shape
        if tensor.dtype != torch.int32 or not fits:
            refuse(OP, "routing-index", name, f"{tensor.dtype}, shape {tuple(tensor.shape)}")
    rows = x.size(0)
    experts, order = expert_idx.flatten().sort(stable=True)
    sources = row_idx.flatten()[order].long()
    places = torch.empty_like(experts)
    places[sources] = torch.arange(experts.numel(), dtype=torch.int32)
    kept = min(active_num, rows) * row_idx.size(1)
    return x[sources[:kept] % rows] if rows else x.clone(), places, experts


def _check_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    scale: torch.Tensor | None,
    offset: torch.Tensor | None,
    quant_mode: int,
    experts: int,
) -> None:
    if x.dim() != 2 or x.dtype not in (*_FLOATS, torch.int8) or (x.dtype == torch.int8 and quant_mode != -1):
        refuse(OP_V2, "routing2-x", "x", f"{x.dtype}, shape {tuple(x.shape)}, quant_mode {quant_mode}")
    if expert_idx.dtype != torch.int32 or expert_idx.dim() != 2 or expert_idx.size(0) != x.size(0):
        refuse(OP_V2, "routing2-experts", "expert_idx", f"{expert_idx.dtype}, shape {tuple(expert_idx.shape)}")
    rows, hidden = x.shape
    shapes: dict[int, tuple[tuple[int, ...], ...]] = {
        -1: ((rows,),),
        0: ((1,),),
        1: ((experts, hidden), (1, hidden)),
    }
    if quant_mode == 0 and scale is None:
        refuse(OP_V2, "routing2-scale", "scale", None)
    if scale is not None and (scale.dtype != torch.float32 or tuple(scale.shape) not in shapes[quant_mode]):
        refuse(OP_V2, "routing2-scale", "scale", f"{scale.dtype}, shape {tuple(scale.shape)}")
    if (offset is None) == (quant_mode == 0):
        refuse(OP_V2, "routing2-offset", "offset", f"{'a tensor' if offset is not None else None}, mode {quant_mode}")
    if offset is not None and (offset.dtype != torch.float32 or tuple(offset.shape) != (1,)):
        refuse(OP_V2, "routing2-offset", "offset", f"{offset.dtype}, shape {tuple(offset.shape)}")


def _expert_counts(counts: torch.Tensor, kind: int, wanted: bool, first: int, expert_num: int) -> torch.Tensor:
    if not wanted:
        return fill_poison_(torch.empty((), dtype=torch.int64))
    if kind == 0:
        return counts.cumsum(0)
    if kind == 1:
        return counts
    pairs = torch.zeros(expert_num, 2, dtype=torch.int64)
    busy = counts.nonzero().flatten()
    pairs[: busy.numel(), 0] = busy + first
    pairs[: busy.numel(), 1] = counts[busy]
    return pairs


def npu_moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts tokens by expert, those of active experts alone, and quantises them when wanted.

    Args:
        x: Shape: [rows, H]; float16, bfloat16, float32, or int8 unquantised.
        expert_idx: experts of each row. Shape: [rows, K]; int32.
        scale: unquantised: carried along, shape [rows]; static: [1]; dynamic: factors, [active experts or 1, H].
        offset: static: [1].
        active_num: most expanded rows; -1 and 0 for all.
        expert_capacity: not used.
        expert_num: number of experts.
        drop_pad_mode: 0.
        expert_tokens_num_type: 0 running sums, 1 counts, 2 pairs of expert and count.
        expert_tokens_num_flag: whether they are wanted; else shape [].
        quant_mode: -1 none, 0 static, 1 dynamic.
        active_expert_range: empty for all, or [first, end).
        row_idx_type: 0 gives the place of each (row, k), -1 without an active expert; 1 the (row, k) at each place.
        x_dtype: None.

    Returns:
        Expanded tokens [rows * K or active_num, H], indices [rows * K] int32, counts int64, and scales float32 of the
        expanded rows (static: shape []). What no active expert fills is poison.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_moe_init_routing_v2.md.
    """
    if drop_pad_mode not in (0, 1) or expert_tokens_num_type not in (0, 1, 2) or row_idx_type not in (0, 1):
        given = f"{drop_pad_mode}, expert_tokens_num_type {expert_tokens_num_type}, row_idx_type {row_idx_type}"
        refuse(OP_V2, "routing2-type", "drop_pad_mode", given)
    if active_num < -1:
        refuse(OP_V2, "routing2-type", "active_num", active_num)
    if quant_mode not in (-1, 0, 1, 2, 3, 6, 7, 8, 9, 11, 12):
        refuse(OP_V2, "routing2-quant", "quant_mode", quant_mode)
    for name, form in (("drop_pad_mode", drop_pad_mode), ("x_dtype", x_dtype)):
        if form:
            raise KernelNotCovered(OP_V2, name, form)
    if quant_mode > 1:
        raise KernelNotCovered(OP_V2, "quant_mode", quant_mode)
    if len(active_expert_range or (0, 0)) != 2:
        refuse(OP_V2, "routing2-range", "active_expert_range", list(active_expert_range or ()))
    first, end = active_expert_range or (0, expert_num)
    if not 0 <= first < end <= expert_num <= (5120 if expert_tokens_num_type == 2 else 10240):
        refuse(OP_V2, "routing2-range", "active_expert_range", f"[{first}, {end}) of {expert_num} experts")
    _check_v2(x, expert_idx, scale, offset, quant_mode, end - first)
    experts = expert_idx.flatten().long()
    if experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < expert_num:
        raise DeviceFault(OP_V2, f"expert_idx reaches from {int(experts.min())} to {int(experts.max())}")
    active = (experts >= first) & (experts < end)
    order = torch.where(active, experts, expert_num).argsort(stable=True)
    available = int(active.sum())
    total = experts.numel()
    length = total if active_num <= 0 else min(active_num, total)
    sources = order[: min(available, length)]
    if row_idx_type == 0:
        indices = torch.full((total,), -1, dtype=torch.int32)
        indices[order[:available]] = torch.arange(available, dtype=torch.int32)
    else:
        indices = fill_poison_(torch.empty(total, dtype=torch.int32))
        indices[:available] = order[:available].to(torch.int32)
    counts = torch.bincount(experts[active] - first, minlength=end - first)
    expanded = fill_poison_(torch.empty(length, x.size(1), dtype=x.dtype if quant_mode == -1 else torch.int8))
    scales = fill_poison_(torch.empty(() if quant_mode == 0 else (length,), dtype=torch.float32))
    rows = x[sources // expert_idx.size(1)] if total else x
    if quant_mode == -1:
        expanded[: sources.numel()] = rows
        if scale is not None:
            scales[: sources.numel()] = scale[sources // expert_idx.size(1)]
    elif quant_mode == 0 and scale is not None and offset is not None:
        expanded[: sources.numel()] = to_integer(rows.float() * scale + offset)
    elif sources.numel():
        values = rows.float()
        if scale is not None:
            values = values * scale[experts[sources] - first if scale.size(0) > 1 else [0]]
        expanded[: sources.numel()], scales[: sources.numel()] = quantise_rows(values)
    kind = expert_tokens_num_type
    return expanded, indices, _expert_counts(counts, kind, expert_tokens_num_flag, first, expert_num), scales


def npu_moe_re_routing(
    tokens: torch.Tensor,
    expert_token_num_per_rank: torch.Tensor,
    *,
    per_token_scales: torch.Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
    tokens_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reorders tokens from rank by rank to expert by expert.

    Args:
        tokens: rank by rank, within one expert by expert. Shape: [A, H]; float16, bfloat16 or int8.
        expert_token_num_per_rank: Shape: [ranks, experts]; int32 or int64.
        per_token_scales: None, or reordered with the tokens. Shape: [A]; float32.
        expert_token_num_type: 1.
        idx_type: 0.
        tokens_dtype: None.

    Returns:
        Tokens [A, H], scales [A] float32 (poison without scales), where each came from [A] int32, and counts of the
        experts.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_moe_re_routing.md.
    """
    if tokens_dtype is not None:
        raise KernelNotCovered(OP_RE, "tokens_dtype", tokens_dtype)
    counts = expert_token_num_per_rank
    fits = tokens.dim() == 2 and 0 < tokens.size(1) < 16384
    if tokens.dtype not in (torch.float16, torch.bfloat16, torch.int8) or not fits:
        refuse(OP_RE, "rerouting-tokens", "tokens", f"{tokens.dtype}, shape {tuple(tokens.shape)}")
    if counts.dtype not in (torch.int32, torch.int64) or counts.dim() != 2:
        refuse(OP_RE, "rerouting-counts", "expert_token_num_per_rank", f"{counts.dtype}, {tuple(counts.shape)}")
    if per_token_scales is not None and (
        per_token_scales.dtype != torch.float32 or tuple(per_token_scales.shape) != (tokens.size(0),)
    ):
        given = f"{per_token_scales.dtype}, shape {tuple(per_token_scales.shape)}"
        refuse(OP_RE, "rerouting-scales", "per_token_scales", given)
    if expert_token_num_type != 1 or idx_type != 0:
        refuse(OP_RE, "rerouting-type", "expert_token_num_type", f"{expert_token_num_type}, idx_type {idx_type}")
    total = int(counts.sum())
    if total > tokens.size(0) or (counts.numel() and int(counts.min()) < 0):
        raise DeviceFault(OP_RE, f"the counts ask for {total} of {tokens.size(0)} tokens")
    experts = torch.arange(counts.size(1)).repeat(counts.size(0)).repeat_interleave(counts.flatten().long())
    order = experts.argsort(stable=True)
    out = fill_poison_(torch.empty_like(tokens))
    out[:total] = tokens[order]
    scales = fill_poison_(torch.empty(tokens.size(0), dtype=torch.float32))
    if per_token_scales is not None:
        scales[:total] = per_token_scales[order]
    origin = fill_poison_(torch.empty(tokens.size(0), dtype=torch.int32))
    origin[:total] = order.to(torch.int32)
    return out, scales, origin, counts.sum(0).to(counts.dtype)


def npu_moe_token_permute(
    tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts tokens by index, each as often as it has indices.

    Args:
        tokens: Shape: [tokens, H]; bfloat16, float16 or float32.
        indices: Shape: [tokens] or [tokens, K]; int32 or int64.
        num_out_tokens: how many of the sorted tokens are wanted; None and 0 for all, negative for all but so many.
        padded_mode: False.

    Returns:
        Sorted tokens, and the place of each (token, k) among them (int32).

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        Document of torch_npu.npu_moe_token_permute in the torch_npu 2.12.0 wheel.
    """
    if padded_mode:
        refuse(OP_PERMUTE, "permute-padded", "padded_mode", padded_mode)
    if tokens.dtype not in _FLOATS or tokens.dim() != 2:
        refuse(OP_PERMUTE, "permute-tokens", "tokens", f"{tokens.dtype}, shape {tuple(tokens.shape)}")
    fits = (
        indices.dim() in (1, 2) and indices.size(0) == tokens.size(0) and (indices.dim() == 1 or indices.size(1) <= 512)
    )
    if indices.dtype not in (torch.int32, torch.int64) or not fits:
        refuse(OP_PERMUTE, "permute-indices", "indices", f"{indices.dtype}, shape {tuple(indices.shape)}")
    order = indices.flatten().argsort(stable=True)
    places = order.argsort().to(torch.int32)
    wanted = num_out_tokens or 0
    kept = min(wanted, order.numel()) if wanted > 0 else order.numel() + wanted
    each = indices.size(1) if indices.dim() == 2 else 1
    return tokens[order[:kept] // each], places


KERNELS = {
    OP: npu_moe_init_routing,
    OP_V2: npu_moe_init_routing_v2,
    OP_RE: npu_moe_re_routing,
    OP_PERMUTE: npu_moe_token_permute,
}
