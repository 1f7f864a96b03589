"""npu_grouped_matmul: one product a group of rows, as expert networks need it.

This module owns the op's refusals and its groups. Integer products are exact, floats are multiplied in float32 and
rounded once. float8 weights are not computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import DeviceFault, KernelNotCovered
from .faults import fill_poison_
from .quant_matmul import product
from .quant_params import unpacked_int4
from .quantising import dtype_of
from .rules import META, declare, note, online, refuse

OP_GROUPED = "npu::npu_grouped_matmul"
OP_GROUPED_LIST = "npu::npu_grouped_matmul.List"
_TEST = "test_kernels_matmul.py"
_GROUPED_DOC = online("torch_npu-npu_grouped_matmul")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
Tensors = Sequence[torch.Tensor]

declare(
    "npu_grouped_matmul",
    _GROUPED_DOC,
    _TEST,
    {
        "gmm-lists": ("1 to 128 tensors in x and weight; as many bias, scale as weight", "split the lists"),
        "gmm-dtype": ("x and weight of one of float16, bfloat16, float32, int8", "cast x or weight"),
        "gmm-antiquant": (
            "a float16 or bfloat16 x, weights of int8, or of 4-bit integers in int32 (…, k, n / 8); antiquant_scale, "
            "antiquant_offset of x's dtype, alike: (n,) a weight, (groups, n) for one weight; 4-bit also (parts, n), "
            "(groups, parts, n), parts a divisor of k",
            "cast and reshape them",
        ),
        "gmm-shape": ("x of 2 axes, weight of 2, or one of 3, with inner sizes that match", "reshape them"),
        "gmm-type": (
            "group_type -1 (as many x as weight, no group_list) or 0 (group_list given); 2 for training",
            "pass group_type 0 and a group_list",
        ),
        "gmm-split": ("split_item 0 to 3", "pass 2 or 3 for one output"),
        "gmm-list": (
            "an int64 group_list, one entry a weight; group_list_type 0 (ends) or 1 (counts, more than one), or 2 "
            "(index and count, shape (groups, 2))",
            "cast the group_list, or pass its type",
        ),
        "gmm-reserved": ("no offset, no activation_input, no activation_quant_*", "leave them None"),
        "gmm-scale": (
            "int8: a float32 or bfloat16 scale (n,) a weight, (groups, n) for one weight; per_token_scale float32 (m,)",
            "cast and reshape the scales",
        ),
        "gmm-output": (
            "an output dtype that the inputs take: floats their own; int8 float16, bfloat16, int32",
            "pass it",
        ),
    },
)
note(
    "npu_grouped_matmul",
    "int8 x beside 4-bit weights, int64 scales, float8 and microscaling forms; act_type; group_type 2",
    _GROUPED_DOC,
    "not computed: `KernelNotCovered`: " + _TEST,
)
note(
    "npu_grouped_matmul",
    "a group_list that never falls, nor goes past the rows",
    _GROUPED_DOC,
    "another one is a `DeviceFault` (507015); rows past the last group are poison: " + _TEST,
)
note("npu_grouped_matmul", "split_item 1", META, "refused at capture only; computed as 0 for lists of tensors")


def _groups(
    group_list: torch.Tensor | Sequence[int] | None, kind: int | None, weights: int, rows: int
) -> list[tuple[int, int, int]]:
    """(weight, first row, end) of each group."""
    if isinstance(group_list, torch.Tensor):
        fits = group_list.dtype == torch.int64 and kind in (0, 1, 2)
        fits = fits and (tuple(group_list.shape) == (weights,) if kind != 2 else group_list.shape[1:] == (2,))
        if not fits or (kind == 1 and weights == 1):
            refuse(OP_GROUPED, "gmm-list", "group_list", f"{group_list.dtype}, {tuple(group_list.shape)}, type {kind}")
        entries = group_list.tolist()
    else:
        entries = list(group_list or [])
        if len(entries) != weights:
            refuse(OP_GROUPED, "gmm-list", "group_list", f"{len(entries)} entries for {weights} weights")
        kind = 0
    if kind == 0:
        spans = [(i, start, end) for i, (start, end) in enumerate(zip([0, *entries], entries, strict=False))]
    else:
        pairs = entries if kind == 2 else list(enumerate(entries))
        spans, at = [], 0
        for index, count in pairs:
            spans.append((index, at, at + count))
            at += count
    for index, start, end in spans:
        if not 0 <= start <= end <= rows or not 0 <= index < weights:
            raise DeviceFault(OP_GROUPED, f"group {index} covers rows {start} to {end} of {rows}, {weights} weights")
    return spans


def _at(tensors: Tensors | None, group: int, per_group: int) -> torch.Tensor | None:
    """The group's own row of a list with one tensor a weight, or of one tensor with one row a group."""
    if not tensors:
        return None
    if len(tensors) > 1:
        return tensors[group]
    return tensors[0][group] if tensors[0].dim() == per_group + 1 else tensors[0]


def _unpacked(
    x: Tensors, weight: Tensors, scales: Tensors, offsets: Tensors | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """int8 weights beside a float x, and float32 factors of their columns."""
    packed = weight[0].dtype == torch.int32
    wide = [unpacked_int4(part) if packed else part for part in weight]
    outs = []
    for number, part in enumerate(wide):
        outer, (k, n) = part.shape[:-2], part.shape[-2:]
        scale = scales[min(number, len(scales) - 1)]
        parts = scale.size(-2) if scale.dim() == part.dim() else 0
        fits = tuple(scale.shape) == (*outer, n) or (packed and parts > 0 and k % parts == 0)
        fits = fits and scale.shape[: len(outer)] == outer and scale.size(-1) == n and part.dtype == torch.int8
        if not fits or scale.dtype != x[0].dtype or scale.dtype not in (torch.float16, torch.bfloat16):
            refuse(
                OP_GROUPED, "gmm-antiquant", "antiquant_scale", f"{scale.dtype}, {tuple(scale.shape)}, x {x[0].dtype}"
            )
        offset = offsets[number] if offsets else None
        if offset is not None and (offset.shape != scale.shape or offset.dtype != scale.dtype):
            refuse(OP_GROUPED, "gmm-antiquant", "antiquant_offset", f"{offset.dtype}, {tuple(offset.shape)}")

        def full(tensor: torch.Tensor, parts: int = parts, k: int = k) -> torch.Tensor:
            return tensor.float().repeat_interleave(k // parts, -2) if parts else tensor.float().unsqueeze(-2)

        outs.append((part.float() + (0 if offset is None else full(offset))) * full(scale))
    return wide, outs


def _check_grouped(x: Tensors, weight: Tensors, lists: dict[str, Tensors | None], group_type: int | None) -> int:
    """Checks lists, dtypes and shapes; the number of weights."""
    if not 1 <= len(x) <= 128 or not 1 <= len(weight) <= 128:
        refuse(OP_GROUPED, "gmm-lists", "x", f"{len(x)} beside {len(weight)} of weight")
    stacked = len(weight) == 1 and weight[0].dim() == 3
    count = weight[0].size(0) if stacked else len(weight)
    for name, tensors in lists.items():
        if tensors and len(tensors) != len(weight):
            refuse(OP_GROUPED, "gmm-lists", name, f"{len(tensors)} beside {len(weight)} of weight")
    for name, tensors in (("x", x), ("weight", weight)):
        for tensor in tensors:
            beside = torch.int8 if name == "weight" and lists["antiquant_scale"] else x[0].dtype
            if tensor.dtype not in (*_FLOATS, torch.int8) or tensor.dtype != beside:
                refuse(OP_GROUPED, "gmm-dtype", name, f"{tensor.dtype} beside x of {x[0].dtype}")
    inner = {tensor.size(-1) for tensor in x} if group_type != -1 else set()
    for number, tensor in enumerate(weight):
        fits = tensor.dim() == (3 if stacked else 2) and x[min(number, len(x) - 1)].dim() == 2
        if group_type == -1:
            fits = fits and len(x) == len(weight) and x[number].size(1) == tensor.size(-2)
        else:
            fits = fits and inner == {tensor.size(-2)}
        if not fits:
            shapes = [tuple(t.shape) for t in x], [tuple(t.shape) for t in weight]
            refuse(OP_GROUPED, "gmm-shape" if group_type != -1 else "gmm-type", "weight", shapes)
    return count


def npu_grouped_matmul(
    x: Tensors,
    weight: Tensors,
    *,
    bias: Tensors | None = None,
    scale: Tensors | None = None,
    offset: Tensors | None = None,
    antiquant_scale: Tensors | None = None,
    antiquant_offset: Tensors | None = None,
    per_token_scale: Tensors | None = None,
    group_list: torch.Tensor | Sequence[int] | None = None,
    activation_input: Tensors | None = None,
    activation_quant_scale: Tensors | None = None,
    activation_quant_offset: Tensors | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[torch.Tensor]:
    """One product a group of rows, or a pair of tensors.

    Args:
        x: Shape: [m, k] each; one tensor when rows are grouped.
        weight: Shape: [k, n] each, or one of [groups, k, n].
        bias: None, or Shape: [n] each, or one of [groups, n].
        scale: int8: Shape: [n] each, or one of [groups, n]; float32 or bfloat16.
        offset: None.
        antiquant_scale: scales of int8 or 4-bit weights beside a float x. Shape: [n] each, or one of [groups, n]; 4-bit
            also [parts, n] or [groups, parts, n] for parts of the rows; dtype of ``x``.
        antiquant_offset: None, or added before scaling; shaped as the scales.
        per_token_scale: int8: None, or Shape: [m] each; float32.
        group_list: rows of the groups, as ``group_list_type`` says.
        activation_input: None.
        activation_quant_scale: None.
        activation_quant_offset: None.
        split_item: 0, 1: one output a weight; 2, 3: one output.
        group_type: -1 not grouped, 0 rows grouped (None with a list of numbers).
        group_list_type: 0 ends, 1 counts, 2 pairs of weight index and count.
        act_type: 0.
        tuning_config: no effect.
        output_dtype: None, or the number of the outputs' dtype.
        x_dtype: None.
        weight_dtype: None.
        scale_dtype: None.
        per_token_scale_dtype: None.

    Returns:
        The products; rows of no group are poison.

    Raises:
        OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_grouped_matmul.md.
    """
    _refuse_forms(locals())
    grouped = -1 if group_type is None and group_list is None else 0 if group_type is None else group_type
    if grouped == 2 or act_type:
        raise KernelNotCovered(OP_GROUPED, "group_type", f"{group_type}, act_type {act_type}")
    if grouped not in (-1, 0) or (grouped == -1) != (group_list is None):
        given = "a group_list" if group_list is not None else "none"
        refuse(OP_GROUPED, "gmm-type", "group_type", f"{group_type} with {given}")
    if split_item not in (0, 1, 2, 3):
        refuse(OP_GROUPED, "gmm-split", "split_item", split_item)
    factors: Tensors = weight
    if antiquant_scale:
        if not x or not weight or not 1 <= len(antiquant_scale) <= len(weight):
            refuse(OP_GROUPED, "gmm-lists", "antiquant_scale", f"{len(antiquant_scale)} beside {len(weight)} of weight")
        weight, factors = _unpacked(x, weight, antiquant_scale, antiquant_offset)
    lists = {"bias": bias, "scale": scale, "antiquant_scale": antiquant_scale, "antiquant_offset": antiquant_offset}
    weights = _check_grouped(x, weight, lists, grouped)
    dtype = _output_dtype(x, weight, weights, scale, per_token_scale, output_dtype)
    n = weight[0].size(-1)
    if grouped == -1:
        spans = [(i, i, 0, part.size(0)) for i, part in enumerate(x)]
    elif len(x) == 1:
        spans = [(i, 0, a, b) for i, a, b in _groups(group_list, group_list_type, weights, x[0].size(0))]
    else:
        spans = [(i, i, 0, part.size(0)) for i, part in enumerate(x)]
    outs = [fill_poison_(torch.empty(part.size(0), n, dtype=dtype)) for part in x]
    for index, source, start, end in spans:
        w = factors[0][index] if factors[0].dim() == 3 else factors[index]
        total = product(x[source][start:end], w)
        shift = _at(bias, index, 1)
        if shift is not None and shift.dtype == torch.int32:
            total = total + shift
        if x[0].dtype == torch.int8 and dtype != torch.int32:
            total = total.float()
            factor = _at(scale, index, 1)
            if factor is not None:
                total = total * factor.float()
            if per_token_scale:
                total = total * per_token_scale[source][start:end].view(-1, 1)
        if shift is not None and shift.dtype != torch.int32:
            total = total + shift.float()
        if w.size(-1) != n:
            outs[source] = torch.empty(x[source].size(0), w.size(-1), dtype=dtype)
        outs[source][start:end] = total.to(dtype)
    if split_item in (2, 3):
        return [torch.cat(outs)] if len(outs) > 1 else outs
    if grouped == 0 and len(x) == 1:
        return [outs[0][a:b].clone() for _, _, a, b in spans]
    return outs


def npu_grouped_matmul_list(
    x: Tensors,
    weight: Tensors,
    *,
    bias: Tensors | None = None,
    scale: Tensors | None = None,
    offset: Tensors | None = None,
    antiquant_scale: Tensors | None = None,
    antiquant_offset: Tensors | None = None,
    per_token_scale: Tensors | None = None,
    group_list: Sequence[int] | None = None,
    activation_input: Tensors | None = None,
    activation_quant_scale: Tensors | None = None,
    activation_quant_offset: Tensors | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: int | None = None,
) -> list[torch.Tensor]:
    """The same with a list of numbers, the ends of the groups, as ``group_list``; see ``npu_grouped_matmul``."""
    return npu_grouped_matmul(**locals())


def _refuse_forms(given: dict[str, object]) -> None:
    for name in ("offset", "activation_input", "activation_quant_scale", "activation_quant_offset"):
        if given[name]:
            refuse(OP_GROUPED, "gmm-reserved", name, "tensors")
    forms = ("x_dtype", "weight_dtype", "scale_dtype", "per_token_scale_dtype")
    for name in forms:
        if given[name]:
            raise KernelNotCovered(OP_GROUPED, name, "a value")


def _output_dtype(
    x: Tensors, weight: Tensors, weights: int, scale: Tensors | None, per_token: Tensors | None, number: int | None
) -> torch.dtype:
    own = x[0].dtype
    dtype = dtype_of(OP_GROUPED, "output_dtype", number, own)
    if own != torch.int8:
        if scale or per_token:
            refuse(OP_GROUPED, "gmm-scale", "scale", f"tensors beside x of {own}")
        if dtype != own:
            refuse(OP_GROUPED, "gmm-output", "output_dtype", f"{dtype} for x of {own}")
        return dtype
    if dtype not in (torch.float16, torch.bfloat16, torch.int32):
        refuse(OP_GROUPED, "gmm-output", "output_dtype", f"{dtype} for int8")
    n = weight[0].size(-1)
    stacked = weight[0].dim() == 3
    for part in scale or []:
        if part.dtype == torch.int64:
            raise KernelNotCovered(OP_GROUPED, "scale", "tensors of dtype int64")
        fits = tuple(part.shape) in (((weights, n), (weights, 1)) if stacked else ((n,), (1,), part.shape))
        if part.dtype not in (torch.float32, torch.bfloat16) or not fits:
            refuse(OP_GROUPED, "gmm-scale", "scale", f"{part.dtype}, shape {tuple(part.shape)}")
    if not scale and dtype != torch.int32:
        refuse(OP_GROUPED, "gmm-scale", "scale", None)
    for rows, part in zip(x, per_token or [], strict=False):
        if part.dtype != torch.float32 or tuple(part.shape) != (rows.size(0),):
            refuse(OP_GROUPED, "gmm-scale", "per_token_scale", f"{part.dtype}, shape {tuple(part.shape)}")
    return dtype


KERNELS = {OP_GROUPED: npu_grouped_matmul, OP_GROUPED_LIST: npu_grouped_matmul_list}
