"""vLLM-Ascend's products of grouped experts with their activation, and its swiglu.

This module owns the ops' definitions (torch_npu has none) and the refusals that torch_npu's own operators of the same
names do not have. Products of int8 are exact, everything after them is float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import gated
from .definitions import define
from .errors import DeviceFault, KernelNotCovered
from .faults import fill_poison_
from .quantising import quantise_rows
from .rules import declare, note, refuse
from .same_operator import called_as

OP_PLAIN = "_C_ascend::grouped_matmul_swiglu_quant"
OP_NZ = "_C_ascend::grouped_matmul_swiglu_quant_weight_nz"
OP_LIST = "_C_ascend::grouped_matmul_swiglu_quant_weight_nz_tensor_list"
OP_V2 = "_C_ascend::grouped_matmul_swiglu_quant_v2"
OP_SWIGLU = "_C_ascend::npu_dequant_swiglu_quant"
_PRODUCT = (
    "Tensor x_scale, Tensor group_list, *, Tensor? bias=None, Tensor? offset=None, float swiglu_limit=0.0) -> "
    "(Tensor output, Tensor output_scale, Tensor output_offset)"
)
SCHEMAS = (
    "grouped_matmul_swiglu_quant(Tensor x, Tensor weight, Tensor weight_scale, " + _PRODUCT,
    "grouped_matmul_swiglu_quant_weight_nz(Tensor x, Tensor weight, Tensor weight_scale, " + _PRODUCT,
    "grouped_matmul_swiglu_quant_weight_nz_tensor_list(Tensor x, Tensor[] weight, Tensor[] weight_scale, " + _PRODUCT,
    "grouped_matmul_swiglu_quant_v2(Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor x_scale, "
    "Tensor group_list, Tensor? smooth_scale=None, Tensor[]? weight_assist_matrix=None, Tensor? bias=None, "
    "int? dequant_mode=0, int? dequant_dtype=0, int? quant_mode=0, int? quant_dtype=0, bool transpose_weight=False, "
    "int group_list_type=0, int[2] tuning_config=[], float swiglu_limit=0.0) -> (Tensor output, Tensor output_scale)",
    "npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, "
    "Tensor? bias=None, Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, "
    "bool activate_left=True, int quant_mode=0, int swiglu_mode=0, float clamp_limit=0.0, float glu_alpha=1.0, "
    "float glu_bias=0.0) -> (Tensor y, Tensor scale)",
)
_PRODUCTS = "_C_ascend::grouped_matmul_swiglu_quant[_weight_nz, _weight_nz_tensor_list, _v2]"
_SOURCE = "vllm-ascend v0.23.0, csrc/"
_TEST = "test_kernels_vllm_experts.py"

declare(
    _PRODUCTS,
    _SOURCE + "gmm (README.md, op_host)",
    _TEST,
    {
        "vgsq-x": ("x (M, K) of int8, int8 weights (K, N) of each expert, N even", "quantise and reshape them"),
        "vgsq-scale": (
            "one weight_scale (N,) of each expert, of float32, float16 or bfloat16, and x_scale (M,) of float32",
            "cast and reshape the scales",
        ),
        "vgsq-group": (
            "an int64 group_list, one number an expert; _v2: group_list_type 0 (ends) or 1 (counts)",
            "cast it, or pass its type",
        ),
        "vgsq-none": ("no bias, no offset", "leave them None"),
        "vgsq-limit": ("a swiglu_limit of 0 or more", "pass 0 for none"),
        "vgsq-mode": ("_v2: modes and dtypes 0, transpose_weight False", "leave them alone"),
    },
)
declare(
    OP_SWIGLU,
    _SOURCE + "torch_binding.cpp",
    _TEST,
    {
        "vdsq-mode": ("quant_mode 0 or 1, swiglu_mode 0 or 1", "pass one of them"),
        "vdsq-clamp": ("a finite clamp_limit of 0 or more, a finite glu_alpha and glu_bias", "pass 0 for no limit"),
        "vdsq-x": ("an x of 2 axes or more", "reshape it"),
    },
)
note(
    _PRODUCTS,
    "int4 weights (int32), smooth_scale, weight_assist_matrix",
    _SOURCE + "gmm",
    "not computed: `KernelNotCovered`: " + _TEST,
)
note(
    _PRODUCTS,
    "a group_list that never falls, nor goes past the rows",
    _SOURCE + "gmm/grouped_matmul_swiglu_quant/README.md",
    "another one is a `DeviceFault` (507015); rows past it are poison: " + _TEST,
)
note(
    OP_SWIGLU,
    "clamp_limit of swiglu_mode 0",
    _SOURCE + "moe/dequant_swiglu_quant",
    "cuts the gate above and the other half on both sides; 0 is none: " + _TEST,
)
note(
    OP_SWIGLU,
    "dtypes, shapes and ranges",
    _SOURCE + "moe/dequant_swiglu_quant (the same operator as torch_npu's)",
    "as the rows of npu_dequant_swiglu_quant say, under this op's name: " + _TEST,
)


def _check_products(
    op: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    limit: float,
) -> None:
    if any(weight.dtype == torch.int32 for weight in weights):
        raise KernelNotCovered(op, "weight", "a tensor of dtype int32 (int4 packed)")
    if x.dtype != torch.int8 or x.dim() != 2 or not weights:
        refuse(op, "vgsq-x", "x", f"{x.dtype}, shape {tuple(x.shape)}")
    columns = weights[0].size(-1) if weights[0].dim() else 0
    for weight in weights:
        if weight.dtype != torch.int8 or tuple(weight.shape) != (x.size(1), columns) or columns % 2:
            refuse(op, "vgsq-x", "weight", f"{weight.dtype}, shape {tuple(weight.shape)} for x of {tuple(x.shape)}")
    if len(scales) != len(weights):
        refuse(op, "vgsq-scale", "weight_scale", f"{len(scales)} for {len(weights)} experts")
    for scale in scales:
        if scale.dtype not in (torch.float32, torch.float16, torch.bfloat16) or tuple(scale.shape) != (columns,):
            refuse(op, "vgsq-scale", "weight_scale", f"{scale.dtype}, shape {tuple(scale.shape)}")
    if x_scale.dtype != torch.float32 or tuple(x_scale.shape) != (x.size(0),):
        refuse(op, "vgsq-scale", "x_scale", f"{x_scale.dtype}, shape {tuple(x_scale.shape)}")
    if group_list.dtype != torch.int64 or tuple(group_list.shape) != (len(weights),):
        refuse(op, "vgsq-group", "group_list", f"{group_list.dtype}, shape {tuple(group_list.shape)}")
    if limit < 0:
        refuse(op, "vgsq-limit", "swiglu_limit", limit)


def _products(
    op: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_products(op, x, weights, scales, x_scale, group_list, limit)
    ends: list[int] = group_list.tolist()
    if sorted(ends) != ends or ends[0] < 0 or ends[-1] > x.size(0):
        raise DeviceFault(op, f"group_list ends at rows {ends} of {x.size(0)}")
    out = fill_poison_(torch.empty(x.size(0), weights[0].size(1) // 2, dtype=torch.int8))
    factors = fill_poison_(torch.empty(x.size(0), dtype=torch.float32))
    for start, end, weight, scale in zip([0, *ends], ends, weights, scales, strict=False):
        if start < end:
            sums = (x[start:end].double() @ weight.double()).float() * scale.float() * x_scale[start:end].unsqueeze(1)
            gate, linear = sums.chunk(2, -1)
            if limit > 0:
                gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
            out[start:end], factors[start:end] = quantise_rows(torch.nn.functional.silu(gate) * linear)
    return out, factors


def _no_more(op: str, bias: torch.Tensor | None, offset: torch.Tensor | None) -> None:
    for name, tensor in (("bias", bias), ("offset", offset)):
        if tensor is not None:
            refuse(op, "vgsq-none", name, f"shape {tuple(tensor.shape)}")


def _one_weight(op: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    def grouped_matmul_swiglu_quant(
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        x_scale: torch.Tensor,
        group_list: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        offset: torch.Tensor | None = None,
        swiglu_limit: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Multiplies each expert's rows, scales them back, activates and quantises them.

        Args:
            x: Shape: [M, K]; int8.
            weight: Shape: [E, K, N]; int8. The first half of N is the gate.
            weight_scale: Shape: [E, N].
            x_scale: Shape: [M]; float32.
            group_list: ends of the experts' rows. Shape: [E]; int64.
            bias, offset: None.
            swiglu_limit: cuts the gate above, the other half on both sides; 0 for none.

        Returns:
            int8 [M, N / 2], scales float32 [M], and an undefined number. Rows past the last group are poison.

        Raises:
            OpRefused, KernelNotCovered, DeviceFault: see ``errors``.

        Source:
            vllm-ascend v0.23.0, csrc/gmm/grouped_matmul_swiglu_quant/README.md.
        """
        _no_more(op, bias, offset)
        if weight.dim() != 3 or weight_scale.dim() != 2:
            name, given = ("weight_scale", weight_scale) if weight.dim() == 3 else ("weight", weight)
            refuse(op, "vgsq-scale" if weight.dim() == 3 else "vgsq-x", name, f"shape {tuple(given.shape)}")
        parts = weight.unbind(0), weight_scale.unbind(0)
        out, scales = _products(op, x, *parts, x_scale, group_list, swiglu_limit)
        return out, scales, fill_poison_(torch.empty((), dtype=torch.float32))

    return grouped_matmul_swiglu_quant


def grouped_matmul_swiglu_quant_weight_nz_tensor_list(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_scale: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with one weight [K, N] and one scale [N] an expert, and an undefined number a row."""
    _no_more(OP_LIST, bias, offset)
    out, scales = _products(OP_LIST, x, weight, weight_scale, x_scale, group_list, swiglu_limit)
    return out, scales, fill_poison_(torch.empty_like(scales))


def grouped_matmul_swiglu_quant_v2(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_scale: Sequence[torch.Tensor],
    x_scale: torch.Tensor,
    group_list: torch.Tensor,
    smooth_scale: torch.Tensor | None = None,
    weight_assist_matrix: Sequence[torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    dequant_mode: int | None = 0,
    dequant_dtype: int | None = 0,
    quant_mode: int | None = 0,
    quant_dtype: int | None = 0,
    transpose_weight: bool = False,
    group_list_type: int = 0,
    tuning_config: Sequence[int] = (),
    swiglu_limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with lists of one weight [E, K, N] and one scale [E, N], and counts as ``group_list_type`` 1.

    ``tuning_config`` has no effect; other arguments that are not there must keep their defaults.
    """
    for name, form in (("smooth_scale", smooth_scale), ("weight_assist_matrix", weight_assist_matrix)):
        if form is not None:
            raise KernelNotCovered(OP_V2, name, "a value")
    _no_more(OP_V2, bias, None)
    if dequant_mode or dequant_dtype or quant_mode or quant_dtype or transpose_weight:
        given = f"{dequant_mode}, {dequant_dtype}, {quant_mode}, {quant_dtype}, transpose_weight {transpose_weight}"
        refuse(OP_V2, "vgsq-mode", "dequant_mode", given)
    if group_list_type not in (0, 1):
        refuse(OP_V2, "vgsq-group", "group_list_type", group_list_type)
    if len(weight) != 1 or len(weight_scale) != 1 or weight[0].dim() != 3 or weight_scale[0].dim() != 2:
        refuse(OP_V2, "vgsq-x", "weight", f"{len(weight)} weights, {len(weight_scale)} scales")
    ends = group_list.cumsum(0) if group_list_type else group_list
    return _products(OP_V2, x, weight[0].unbind(0), weight_scale[0].unbind(0), x_scale, ends, swiglu_limit)


def npu_dequant_swiglu_quant(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = True,
    quant_mode: int = 0,
    swiglu_mode: int = 0,
    clamp_limit: float = 0.0,
    glu_alpha: float = 1.0,
    glu_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``npu::npu_dequant_swiglu_quant``, for any leading axes, with other defaults and a limit in every mode.

    Args:
        x: Shape: [..., 2H].
        swiglu_mode: 0: halves; 1: even and odd elements, clipped.
        clamp_limit: mode 0: 0 for none.

    The other arguments: see there.

    Returns:
        int8 [..., H], and scales float32 [...] (undefined when static).
    """
    if quant_mode not in (0, 1) or swiglu_mode not in (0, 1):
        refuse(OP_SWIGLU, "vdsq-mode", "quant_mode", f"{quant_mode}, swiglu_mode {swiglu_mode}")
    if not all(map(math.isfinite, (clamp_limit, glu_alpha, glu_bias))) or clamp_limit < 0:
        refuse(OP_SWIGLU, "vdsq-clamp", "clamp_limit", f"{clamp_limit}, glu_alpha {glu_alpha}, glu_bias {glu_bias}")
    if x.dim() < 2:
        refuse(OP_SWIGLU, "vdsq-x", "x", f"shape {tuple(x.shape)}")
    mode, alpha, added = swiglu_mode, glu_alpha, glu_bias
    if mode == 0 and clamp_limit > 0:
        mode, alpha, added = 2, 1.0, 0.0
    out, scales = called_as(
        OP_SWIGLU, gated.npu_dequant_swiglu_quant, x.flatten(0, -2), weight_scale=weight_scale,
        activation_scale=activation_scale, bias=bias, quant_scale=quant_scale, quant_offset=quant_offset,
        group_index=group_index, activate_left=activate_left, quant_mode=quant_mode, swiglu_mode=mode,
        clamp_limit=clamp_limit, glu_alpha=alpha, glu_bias=added,
    )  # fmt: skip
    return out.view(*x.shape[:-1], out.size(-1)), scales.view(x.shape[:-1])


def _products_meta(columns: Callable[[Any, Any], int], offset: str) -> Callable[..., Any]:
    def meta(x: torch.Tensor, weight: Any, weight_scale: Any, *rest: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        out = x.new_empty((x.size(0), columns(weight, weight_scale) // 2), dtype=torch.int8)
        scale = x.new_empty(x.size(0), dtype=torch.float32)
        return (out, scale) + {"none": (), "one": (scale.new_empty(()),), "rows": (torch.empty_like(scale),)}[offset]

    return meta


def _swiglu_meta(x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lead = x.shape[:-1]
    return x.new_empty((*lead, x.size(-1) // 2), dtype=torch.int8), x.new_empty(lead, dtype=torch.float32)


_METAS: tuple[Callable[..., Any], ...] = (
    _products_meta(lambda weight, scale: weight.size(2) * (8 if weight.dtype == torch.int32 else 1), "one"),
    _products_meta(lambda weight, scale: weight.size(2) * (8 if weight.dtype == torch.int32 else 1), "one"),
    _products_meta(lambda weight, scale: weight[0].size(1), "rows"),
    _products_meta(lambda weight, scale: scale[0].size(-1), "none"),
    _swiglu_meta,
)
for _schema, _meta in zip(SCHEMAS, _METAS, strict=True):
    define(_schema, "_C_ascend", _meta)
KERNELS: dict[str, Callable[..., Any]] = {
    OP_PLAIN: _one_weight(OP_PLAIN),
    OP_NZ: _one_weight(OP_NZ),
    OP_LIST: grouped_matmul_swiglu_quant_weight_nz_tensor_list,
    OP_V2: grouped_matmul_swiglu_quant_v2,
    OP_SWIGLU: npu_dequant_swiglu_quant,
}
