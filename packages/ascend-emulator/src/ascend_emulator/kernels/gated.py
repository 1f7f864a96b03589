"""npu_dequant_swiglu_quant, npu_swiglu_quant and npu_clipped_swiglu: gated activations of expert networks.

This module owns the ops' refusals and their groups of rows, computed in float32. npu_swiglu is in ``activation.py``.
"""

from __future__ import annotations

import torch

from .errors import DeviceFault, KernelNotCovered
from .faults import fill_poison_
from .quantising import dtype_of, quantise_rows, to_integer
from .rules import declare, note, online, refuse

OP = "npu::npu_dequant_swiglu_quant"
OP_SWIGLU = "npu::npu_swiglu_quant"
OP_CLIPPED = "npu::npu_clipped_swiglu"
_NAME = "npu_dequant_swiglu_quant"
_DOC = online("torch_npu-npu_dequant_swiglu_quant")
_CLIPPED_DOC = online("torch_npu-npu_clipped_swiglu")
_TEST = "test_kernels_quant.py"
_HALVES = (torch.float16, torch.bfloat16)

declare(
    _NAME,
    _DOC,
    _TEST,
    {
        "dsq-x": ("x (tokens, 2H) of int32, float16 or bfloat16", "reshape or cast x"),
        "dsq-weight-scale": ("a float32 weight_scale (groups, 2H) or (2H,)", "cast and reshape it"),
        "dsq-activation-scale": (
            "a float32 activation_scale (tokens, 1) or (tokens,); needed by int32, None beside floats",
            "pass the scales of the quantised activation",
        ),
        "dsq-bias": ("an int32 bias beside int32 x and without group_index", "leave it None"),
        "dsq-quant-scale": (
            "quant_scale (groups, H), (H,) or (1,): float32, float16 or bfloat16; static: float32",
            "cast and reshape it",
        ),
        "dsq-quant-offset": ("no quant_offset with group_index or dynamic quantisation", "leave it None"),
        "dsq-group": ("an int64 group_index (groups,) of counts", "call .long() on the counts"),
        "dsq-hidden": ("with group_index: H a multiple of 64, at most 10496", "pad H"),
        "dsq-mode": ("quant_mode 0 or 1, swiglu_mode 0, 1 or 2", "pass a supported mode"),
    },
)
declare(
    "npu_clipped_swiglu",
    _CLIPPED_DOC,
    _TEST,
    {
        "clipped-dtype": ("float16, bfloat16, float32", "cast x"),
        "clipped-shape": ("2 axes or more, an existing axis of even length to split", "reshape x"),
        "clipped-contiguous": ("a contiguous x", "call .contiguous() on it"),
        "clipped-group": ("an int64 group_index (groups,)", "call .long() on the counts"),
    },
)
note(
    _NAME,
    "counts that add up to no more than the tokens",
    _DOC,
    "more is a `DeviceFault` (507015): " + _TEST,
)
note(
    f"{_NAME}, npu_clipped_swiglu",
    "rows past the groups are not cleared",
    _DOC,
    "they are poison in new outputs: " + _TEST,
)
note(
    _NAME,
    "other results than int8, other rounding, another axis than the last",
    _DOC,
    "not computed: `KernelNotCovered`",
)
declare(
    "npu_swiglu_quant",
    online("torch_npu-npu_swiglu_quant"),
    _TEST,
    {
        "sq-x": ("x (…, 2N) of 2 axes or more, float16, bfloat16 or float32, 2N at most 8192", "cast and reshape x"),
        "sq-scales": ("float32 smooth_scales (groups, N) or (groups,); without group_index: 1 group", "reshape them"),
        "sq-offsets": ("float32 offsets shaped as smooth_scales", "reshape them, or leave them None"),
        "sq-group": ("an int32 group_index (groups,)", "call .int() on it"),
        "sq-mode": ("quant_mode 0 or 1, group_list_type 0 or 1", "pass a supported mode"),
    },
)
note(
    "npu_swiglu_quant",
    "dynamic: scale = 127 / largest magnitude in one document, largest magnitude / 127 in the other",
    "ops-nn, aclnnSwiGluQuantV2.md; " + online("torch_npu-npu_swiglu_quant"),
    "the documents contradict each other: `KernelNotCovered`, as int4 and static calls without scales: " + _TEST,
)
note(
    "npu_swiglu_quant",
    "rising group_index that ends within the rows",
    online("torch_npu-npu_swiglu_quant"),
    "others are a `DeviceFault` (507015); rows past the groups, and static scales, are poison: " + _TEST,
)


def clipped(gate: torch.Tensor, linear: torch.Tensor, alpha: float, limit: float, bias: float) -> torch.Tensor:
    """``g * sigmoid(alpha * g) * (l + bias)`` with g cut at ``limit`` and l at both sides. float32, any shape."""
    gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + bias)


def _activate(x: torch.Tensor, left: bool, mode: int, limit: float, alpha: float, bias: float) -> torch.Tensor:
    if mode == 1:
        return clipped(x[:, ::2], x[:, 1::2], alpha, limit, bias)
    first, second = x.chunk(2, -1)
    gate, linear = (first, second) if left else (second, first)
    return clipped(gate, linear, alpha, limit, bias) if mode == 2 else torch.nn.functional.silu(gate) * linear


def _check(
    x: torch.Tensor,
    weight_scale: torch.Tensor | None,
    activation_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    quant_scale: torch.Tensor | None,
    quant_offset: torch.Tensor | None,
    group_index: torch.Tensor | None,
    quant_mode: int,
    swiglu_mode: int,
) -> None:
    if quant_mode not in (0, 1) or swiglu_mode not in (0, 1, 2):
        refuse(OP, "dsq-mode", "quant_mode", f"{quant_mode}, swiglu_mode {swiglu_mode}")
    if x.dtype not in (torch.int32, *_HALVES) or x.dim() != 2 or x.size(1) % 2:
        refuse(OP, "dsq-x", "x", f"{x.dtype}, shape {tuple(x.shape)}")
    tokens, wide, hidden = x.size(0), x.size(1), x.size(1) // 2
    groups = 1
    if group_index is not None:
        if group_index.dtype != torch.int64 or group_index.dim() != 1:
            refuse(OP, "dsq-group", "group_index", f"{group_index.dtype}, shape {tuple(group_index.shape)}")
        groups = group_index.size(0)
        if hidden % 64 or hidden > 10496:
            refuse(OP, "dsq-hidden", "x", f"H = {hidden}")
    if weight_scale is not None:
        fits = tuple(weight_scale.shape) in ((groups, wide), *([(wide,)] if groups == 1 else []))
        if weight_scale.dtype != torch.float32 or not fits:
            refuse(OP, "dsq-weight-scale", "weight_scale", f"{weight_scale.dtype}, {tuple(weight_scale.shape)}")
    given = activation_scale is not None
    if given != (x.dtype == torch.int32):
        refuse(OP, "dsq-activation-scale", "activation_scale", f"{'a tensor' if given else None} beside {x.dtype}")
    if activation_scale is not None and (
        activation_scale.dtype != torch.float32 or tuple(activation_scale.shape) not in ((tokens, 1), (tokens,))
    ):
        given_scale = f"{activation_scale.dtype}, {tuple(activation_scale.shape)}"
        refuse(OP, "dsq-activation-scale", "activation_scale", given_scale)
    if bias is not None and (
        x.dtype != torch.int32 or bias.dtype != torch.int32 or group_index is not None or tuple(bias.shape) != (wide,)
    ):
        refuse(OP, "dsq-bias", "bias", f"{bias.dtype}, shape {tuple(bias.shape)}")
    if quant_scale is not None:
        fits = tuple(quant_scale.shape) in ((groups, hidden), *([(hidden,), (1,)] if groups == 1 else [(groups, 1)]))
        dtypes = (torch.float32, *(_HALVES if quant_mode else ()))
        if quant_scale.dtype not in dtypes or not fits:
            refuse(OP, "dsq-quant-scale", "quant_scale", f"{quant_scale.dtype}, {tuple(quant_scale.shape)}")
    if quant_offset is not None and (group_index is not None or quant_mode):
        refuse(OP, "dsq-quant-offset", "quant_offset", "a tensor")
    if quant_scale is None and not quant_mode:
        refuse(OP, "dsq-quant-scale", "quant_scale", None)


def _counts(op: str, group_index: torch.Tensor | None, rows: int) -> list[int]:
    if group_index is None:
        return [rows]
    counts: list[int] = group_index.tolist()
    if min(counts, default=0) < 0 or sum(counts) > rows:
        raise DeviceFault(op, f"group_index {counts} asks for {sum(counts)} of {rows} rows")
    return counts


def npu_dequant_swiglu_quant(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    dst_type: int | None = None,
    round_mode: int | None = None,
    activate_dim: int | None = None,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales an integer product back, activates it, and quantises the result.

    Args:
        x: Shape: [tokens, 2H]; int32, float16 or bfloat16.
        weight_scale: None, or Shape: [groups, 2H] or [2H]; float32.
        activation_scale: beside int32. Shape: [tokens, 1] or [tokens]; float32.
        bias: None, or added to int32 x first. Shape: [2H]; int32.
        quant_scale: factor of the result before rounding (static), or before the scale is taken (dynamic). Shape:
            [groups, H], [H] or [1].
        quant_offset: None, or added before rounding (static).
        group_index: None, or rows of each group. Shape: [groups]; int64.
        activate_left: which half is the gate.
        quant_mode: 0 static, 1 dynamic.
        dst_type: None or int8.
        round_mode: None or 0 (to nearest).
        activate_dim: None or the last axis.
        swiglu_mode: 0; 1: clipped, even and odd elements; 2: clipped, halves.
        clamp_limit: limit of the clipped modes.
        glu_alpha: factor within their sigmoid.
        glu_bias: added to their linear part.

    Returns:
        int8 [tokens, H], and scales float32 [tokens] (undefined when static). Rows past the groups are poison.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_dequant_swiglu_quant.md.
    """
    if dtype_of(OP, "dst_type", dst_type, torch.int8) != torch.int8:
        raise KernelNotCovered(OP, "dst_type", dst_type)
    if round_mode:
        raise KernelNotCovered(OP, "round_mode", round_mode)
    if activate_dim not in (None, -1, 1):
        raise KernelNotCovered(OP, "activate_dim", activate_dim)
    _check(
        *(x, weight_scale, activation_scale, bias, quant_scale, quant_offset, group_index),
        quant_mode=quant_mode,
        swiglu_mode=swiglu_mode,
    )
    out = fill_poison_(torch.empty(x.size(0), x.size(1) // 2, dtype=torch.int8))
    scales = fill_poison_(torch.empty(x.size(0), dtype=torch.float32))
    start = 0
    for group, count in enumerate(_counts(OP, group_index, x.size(0))):
        span = slice(start, start + count)
        start += count
        if not count:
            continue

        def row(tensor: torch.Tensor, number: int = group) -> torch.Tensor:
            return (tensor[number] if tensor.dim() == 2 else tensor).float()

        part = x[span].float() if bias is None else (x[span] + bias).float()
        if weight_scale is not None:
            part = part * row(weight_scale)
        if activation_scale is not None:
            part = part * activation_scale[span].view(-1, 1)
        part = _activate(part, activate_left, swiglu_mode, clamp_limit, glu_alpha, glu_bias)
        if quant_scale is not None:
            part = part * row(quant_scale)
        if quant_mode:
            out[span], scales[span] = quantise_rows(part)
        else:
            out[span] = to_integer(part if quant_offset is None else part + quant_offset.float())
    return out, scales


def npu_swiglu_quant(
    x: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    group_list_type: int = 0,
    dst_type: int | torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Activates and quantises with given scales.

    Args:
        x: Shape: [..., 2N]; float16, bfloat16 or float32.
        smooth_scales: factors of the activation. Shape: [groups, N] or [groups]; float32.
        offsets: None, or added before rounding. Shape: as the scales; float32.
        group_index: None for one group, or as ``group_list_type`` says (rows: all axes but the last). Shape: [groups];
            int32.
        activate_left: which half is the gate.
        quant_mode: 0; 1 (dynamic) is not computed.
        group_list_type: 0 ends of the groups, 1 rows of each.
        dst_type: None or int8.

    Returns:
        int8 [..., N]; rows past the groups are poison. And float32 [...] without meaning.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_swiglu_quant.md; ops-nn, aclnnSwiGluQuantV2.md.
    """
    if quant_mode not in (0, 1) or group_list_type not in (0, 1):
        refuse(OP_SWIGLU, "sq-mode", "quant_mode", f"{quant_mode}, group_list_type {group_list_type}")
    if dtype_of(OP_SWIGLU, "dst_type", dst_type, torch.int8) != torch.int8:
        raise KernelNotCovered(OP_SWIGLU, "dst_type", dst_type)
    if x.dtype not in (*_HALVES, torch.float32) or x.dim() < 2 or x.size(-1) % 2 or not 0 < x.size(-1) <= 8192:
        refuse(OP_SWIGLU, "sq-x", "x", f"{x.dtype}, shape {tuple(x.shape)}")
    if group_index is not None and (group_index.dtype != torch.int32 or group_index.dim() != 1):
        refuse(OP_SWIGLU, "sq-group", "group_index", f"{group_index.dtype}, shape {tuple(group_index.shape)}")
    if quant_mode:
        raise KernelNotCovered(OP_SWIGLU, "quant_mode", quant_mode)
    if smooth_scales is None:
        raise KernelNotCovered(OP_SWIGLU, "smooth_scales", None)
    groups, hidden = 1 if group_index is None else group_index.size(0), x.size(-1) // 2
    if smooth_scales.dtype != torch.float32 or tuple(smooth_scales.shape) not in ((groups, hidden), (groups,)):
        refuse(OP_SWIGLU, "sq-scales", "smooth_scales", f"{smooth_scales.dtype}, shape {tuple(smooth_scales.shape)}")
    if offsets is not None and (offsets.dtype != torch.float32 or offsets.shape != smooth_scales.shape):
        refuse(OP_SWIGLU, "sq-offsets", "offsets", f"{offsets.dtype}, shape {tuple(offsets.shape)}")
    flat = _activate(x.float().reshape(-1, 2 * hidden), activate_left, 0, 0.0, 0.0, 0.0)
    rising = group_index is not None and group_list_type == 0
    lengths = group_index.diff(prepend=group_index.new_zeros(1)) if group_index is not None and rising else group_index
    rows = torch.tensor(_counts(OP_SWIGLU, lengths, flat.size(0)))
    each = torch.arange(groups).repeat_interleave(rows)
    wide = hidden if smooth_scales.dim() == 2 else 1
    values = flat[: each.numel()] * smooth_scales[each].view(each.numel(), wide)
    if offsets is not None:
        values = values + offsets[each].view(each.numel(), wide)
    out = fill_poison_(torch.empty(flat.shape, dtype=torch.int8))
    out[: each.numel()] = to_integer(values)
    return out.view(*x.shape[:-1], hidden), fill_poison_(torch.empty(x.shape[:-1], dtype=torch.float32))


def npu_clipped_swiglu(
    x: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> torch.Tensor:
    """The clipped gated activation; see ``clipped``.

    Args:
        x: 2 axes or more; float16, bfloat16 or float32; contiguous.
        group_index: None, or rows of each group (rows: everything before ``dim``); int64.
        dim: axis to split; what follows it is split with it.
        alpha: factor within the sigmoid.
        limit: where gate and linear part are cut.
        bias: added to the linear part.
        interleaved: True takes even elements for the gate, False the first half.

    Returns:
        The input's shape with half of ``dim``; rows past the groups are poison.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_clipped_swiglu.md.
    """
    if x.dtype not in (*_HALVES, torch.float32):
        refuse(OP_CLIPPED, "clipped-dtype", "x", x.dtype)
    if x.dim() < 2 or not -x.dim() <= dim < x.dim() or x.size(dim) % 2:
        refuse(OP_CLIPPED, "clipped-shape", "x", f"shape {tuple(x.shape)}, dim {dim}")
    if not x.is_contiguous():
        refuse(OP_CLIPPED, "clipped-contiguous", "x", f"strides {x.stride()}")
    if group_index is not None and (group_index.dtype != torch.int64 or group_index.dim() != 1):
        refuse(OP_CLIPPED, "clipped-group", "group_index", f"{group_index.dtype}, shape {tuple(group_index.shape)}")
    at = dim % x.dim()
    shape = [*x.shape[:at], x.size(at) // 2, *x.shape[at + 1 :]]
    before = 1
    for size in x.shape[:at]:
        before *= size
    flat = x.float().view(before, -1)
    rows = sum(_counts(OP_CLIPPED, group_index, before))
    gate, linear = (flat[:rows, ::2], flat[:rows, 1::2]) if interleaved else flat[:rows].chunk(2, -1)
    out = fill_poison_(torch.empty(shape, dtype=x.dtype))
    out.view(before, -1)[:rows] = clipped(gate, linear, alpha, limit, bias).to(x.dtype)
    return out


KERNELS = {OP: npu_dequant_swiglu_quant, OP_SWIGLU: npu_swiglu_quant, OP_CLIPPED: npu_clipped_swiglu}
