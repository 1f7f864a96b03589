"""Quantising and gated ops against plain float64 loops, and their refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, KernelNotCovered
from ascend_emulator.poison import is_poisoned
from hypothesis import given, settings
from hypothesis import strategies as st

DYNAMIC = "npu::npu_dynamic_quant"
QUANTIZE = "npu::npu_quantize"
DSQ = "npu::npu_dequant_swiglu_quant"
SWIGLU = "npu::npu_swiglu_quant"
CLIPPED = "npu::npu_clipped_swiglu"
LOOSE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}
HALVES = [torch.float16, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def numbers(tensor: torch.Tensor) -> list[float]:
    out: list[float] = tensor.double().flatten().tolist()
    return out


def nearly(got: torch.Tensor, want: list[float], low: int = -128, high: int = 127) -> None:
    """Integers may differ by one where the exact value lies near a half."""
    for one, exact in zip(numbers(got), want, strict=True):
        cut = max(low, min(high, exact))
        assert abs(one - cut) <= 0.5 + 1e-3 + 1e-4 * abs(cut), (one, exact)


def quantised(values: list[float]) -> tuple[list[float], float]:
    top = max(abs(v) for v in values) / 127
    return [v / top if top else 0.0 for v in values], top


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from([(3, 4), (2, 3, 8), (1, 2, 2, 4)]),
    dtype=st.sampled_from(HALVES),
    mode=st.sampled_from(["pertoken", "perchannel", "pertensor"]),
    smooth=st.sampled_from(["", "row", "groups"]),
)
def test_dynamic_quant(shape: tuple[int, ...], dtype: torch.dtype, mode: str, smooth: str) -> None:
    x = draw(*shape, dtype=dtype)
    rows, width = x.numel() // shape[-1], shape[-1]
    ends = [1, 1, rows]
    options: dict[str, Any] = {"quant_mode": mode}
    factors = torch.ones(rows, width, dtype=torch.float64)
    if smooth:
        scales = draw(*([3] if smooth == "groups" else []), width, dtype=dtype, seed=4)
        options["smooth_scales"] = scales
        for row in range(rows):
            group = next(i for i, end in enumerate(ends) if row < end)
            factors[row] = (scales[group] if smooth == "groups" else scales).double()
        if smooth == "groups":
            options["group_index"] = torch.tensor(ends, dtype=torch.int32)
    out, scale = REGISTRY[DYNAMIC](x, **options)
    assert out.dtype == torch.int8 and out.shape == x.shape and scale.dtype == torch.float32
    exact = (x.double().view(rows, width) * factors).view(shape)
    if mode == "pertensor":
        pieces = [(out, exact)]
        assert scale.shape == (1,)
    elif mode == "perchannel":
        pieces = [
            (a, b) for one, other in zip(out.reshape(-1, *shape[-2:]), exact.reshape(-1, *shape[-2:]), strict=True)
            for a, b in zip(one.T, other.T, strict=True)
        ]  # fmt: skip
        assert scale.shape == (*shape[:-2], width)
    else:
        pieces = list(zip(out.view(rows, width), exact.view(rows, width), strict=True))
        assert scale.shape == shape[:-1]
    for (got, values), factor in zip(pieces, scale.flatten(), strict=True):
        want, top = quantised(numbers(values))
        nearly(got, want)
        np.testing.assert_allclose(float(factor), top, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, *HALVES]),
    div=st.booleans(),
    axis=st.sampled_from([-1, -2, 0, 1]),
    form=st.sampled_from(["one", "row", "many"]),
    zero=st.booleans(),
    target=st.sampled_from([(12, torch.int8), (1, torch.int8), (13, torch.uint8), (3, torch.int32), (14, torch.int32)]),
)
def test_quantize(
    dtype: torch.dtype, div: bool, axis: int, form: str, zero: bool, target: tuple[int, torch.dtype]
) -> None:
    number, result = target if div else (12, torch.int8)
    x = draw(2, 3, 4, dtype=dtype) * 40
    chosen = axis % 3 if div else 1 if axis == -2 else 2
    size = 1 if form == "one" else x.size(chosen)
    shape = [1] * chosen + [size] + [1] * (2 - chosen) if form == "many" else [size]
    scales = draw(*shape, dtype=torch.float32 if div else dtype, seed=1).abs() + 0.5
    points = (draw(*shape, seed=2) * 9).round().to(torch.int32 if div else dtype) if zero else None
    out = REGISTRY[QUANTIZE](x, scales, points, number, axis, div)
    assert out.dtype == result and out.shape == x.shape
    limits = torch.iinfo(result)
    for at in np.ndindex(2, 3, 4):
        index = at[chosen] if size > 1 else 0
        s = numbers(scales)[index]
        exact = numbers(x[at])[0] / s if div else numbers(x[at])[0] * s
        exact += numbers(points)[index] if points is not None else 0.0
        nearly(out[at], [exact], limits.min, limits.max)


def silu(v: float, alpha: float = 1.0) -> float:
    return v / (1 + math.exp(-alpha * v)) if alpha * v > -700 else 0.0


def clip(gate: float, linear: float, alpha: float, limit: float, bias: float) -> float:
    return silu(min(gate, limit), alpha) * (max(-limit, min(limit, linear)) + bias)


@settings(max_examples=60, deadline=None)
@given(
    integer=st.booleans(),
    groups=st.sampled_from([(), (2, 0, 1), (3,), (1, 3)]),
    mode=st.sampled_from([0, 1]),
    swiglu=st.sampled_from([0, 1, 2]),
    left=st.booleans(),
    smooth=st.booleans(),
    extras=st.booleans(),
)
def test_dequant_swiglu_quant(
    integer: bool, groups: tuple[int, ...], mode: int, swiglu: int, left: bool, smooth: bool, extras: bool
) -> None:
    tokens, hidden = 5, 64 if groups else 3
    count = len(groups) or 1
    x = torch.randint(-2000, 2000, (tokens, 2 * hidden)) if integer else (draw(tokens, 2 * hidden) * 4)
    x = x.to(torch.int32 if integer else torch.float16)
    options: dict[str, Any] = {"quant_mode": mode, "swiglu_mode": swiglu, "activate_left": left}
    if integer:
        options["weight_scale"] = draw(count, 2 * hidden, seed=1).abs() * 2e-3
        options["activation_scale"] = draw(tokens, 1, seed=2).abs() + 0.5
    bias = torch.randint(-300, 300, (2 * hidden,)).int() if integer and extras and not groups else None
    scale = draw(count, hidden, seed=3).abs() * (9 if not mode else 1) if smooth or not mode else None
    offset = draw(hidden, seed=4) if extras and not groups and not mode else None
    options |= {"bias": bias, "quant_scale": scale, "quant_offset": offset}
    if groups:
        options["group_index"] = torch.tensor(groups)
    out, scales = REGISTRY[DSQ](x, **options)
    assert out.dtype == torch.int8 and out.shape == (tokens, hidden) and scales.shape == (tokens,)
    starts = [sum(groups[:i]) for i in range(count)]
    for token in range(sum(groups) if groups else tokens):
        group = max(i for i in range(count) if starts[i] <= token and (not groups or groups[i]))
        row = [v + (numbers(bias)[j] if bias is not None else 0) for j, v in enumerate(numbers(x[token]))]
        if integer:
            factor = float(options["activation_scale"][token])
            row = [v * w * factor for v, w in zip(row, numbers(options["weight_scale"][group]), strict=True)]
        halves = (row[::2], row[1::2]) if swiglu == 1 else (row[:hidden], row[hidden:])
        gate, linear = halves if left or swiglu == 1 else halves[::-1]
        pairs = zip(gate, linear, strict=True)
        y = [clip(g, n, 1.702, 7.0, 1.0) if swiglu else silu(g) * n for g, n in pairs]
        y = [v * s for v, s in zip(y, numbers(scale[group]), strict=True)] if scale is not None else y
        if mode:
            y, top = quantised(y)
            np.testing.assert_allclose(float(scales[token]), top, rtol=1e-4)
        elif offset is not None:
            y = [v + o for v, o in zip(y, numbers(offset), strict=True)]
        nearly(out[token], y)
    rest = out[sum(groups) if groups else tokens :]
    assert bool(is_poisoned(rest).all())


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(list(LOOSE)),
    dim=st.sampled_from([-1, 1, 2]),
    interleaved=st.booleans(),
    groups=st.sampled_from([None, (1,), (1, 1), ()]),
)
def test_clipped_swiglu(dtype: torch.dtype, dim: int, interleaved: bool, groups: tuple[int, ...] | None) -> None:
    x = draw(2, 4, 6, dtype=dtype) * 6
    options: dict[str, Any] = {"dim": dim, "interleaved": interleaved, "alpha": 1.3, "limit": 5.0, "bias": 0.5}
    if groups is not None:
        options["group_index"] = torch.tensor(groups, dtype=torch.int64)
    out = REGISTRY[CLIPPED](x, **options)
    at = dim % 3
    shape = [2, 4, 6]
    shape[at] //= 2
    assert list(out.shape) == shape and out.dtype == dtype
    before = 2 if at == 1 else 8
    kept = before if groups is None else sum(groups)
    flat, got = x.view(before, -1), out.view(before, -1)
    half = flat.size(1) // 2
    for row in range(kept):
        values = numbers(flat[row])
        gate, linear = (values[::2], values[1::2]) if interleaved else (values[:half], values[half:])
        want = [clip(g, n, 1.3, 5.0, 0.5) for g, n in zip(gate, linear, strict=True)]
        np.testing.assert_allclose(numbers(got[row]), want, rtol=LOOSE[dtype], atol=LOOSE[dtype])
    assert bool(got[kept:].isnan().all())


Call = tuple[str, dict[str, Any]]
H = torch.float16


def dynamic(**over: Any) -> Call:
    return DYNAMIC, {"input": torch.zeros(3, 8, dtype=H)} | over


def quantize(**over: Any) -> Call:
    options = {"input": torch.zeros(3, 8), "scales": torch.ones(8), "zero_points": None, "dtype": 12, "axis": -1}
    return QUANTIZE, options | over


def dsq(**over: Any) -> Call:
    return DSQ, {"x": torch.zeros(3, 8, dtype=H), "quant_mode": 1} | over


def integer(**over: Any) -> Call:
    options = {"x": torch.zeros(3, 8).int(), "activation_scale": torch.ones(3), "quant_mode": 1}
    return DSQ, options | over


def clipped(**over: Any) -> Call:
    return CLIPPED, {"x": torch.zeros(3, 8)} | over


def swiglu(**over: Any) -> Call:
    return SWIGLU, {"x": torch.zeros(3, 8), "smooth_scales": torch.ones(1)} | over


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [None, [1, 3], [2, 2]])
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_swiglu_quant(dtype: torch.dtype, groups: list[int] | None, kind: int, wide: bool, left: bool) -> None:
    random = torch.Generator().manual_seed(3)
    x = (torch.randn(2, 2, 8, generator=random) * 3).to(dtype)
    shape = (1 if groups is None else 2, *([4] if wide else []))
    scales, offsets = (torch.randn(shape, generator=random) * factor for factor in (20, 5))
    index = None if groups is None else torch.tensor(groups, dtype=torch.int32)
    options: dict[str, Any] = {"group_index": index, "group_list_type": kind, "activate_left": left}
    for shifts in (None, offsets):
        out, unused = REGISTRY[SWIGLU](x, smooth_scales=scales, offsets=shifts, **options)
        assert out.dtype == torch.int8 and out.shape == (2, 2, 4) and unused.shape == (2, 2)
        ends = [4] if groups is None else groups if kind == 0 else [groups[0], sum(groups)]
        assert bool(is_poisoned(out.view(4, 4)[ends[-1] :]).all()) and bool(is_poisoned(unused).all())
        for row, values in enumerate(x.double().view(4, 8).tolist()):
            group = next((g for g, end in enumerate(ends) if row < end), None)
            for d in range(4 if group is not None else 0):
                gate, other = (values[d], values[d + 4]) if left else (values[d + 4], values[d])
                at = (group, d) if wide else (group,)
                exact = gate / (1 + math.exp(-gate)) * other * float(scales[at])
                exact += 0 if shifts is None else float(shifts[at])
                assert abs(int(out.view(4, 4)[row, d]) - min(127.0, max(-128.0, exact))) < 0.501


REFUSED: list[tuple[str, Callable[[], Call]]] = [
    ("sq-x", lambda: swiglu(x=torch.zeros(8))),
    ("sq-x", lambda: swiglu(x=torch.zeros(3, 7))),
    ("sq-x", lambda: swiglu(x=torch.zeros(3, 8194))),
    ("sq-x", lambda: swiglu(x=torch.zeros(3, 8).int())),
    ("sq-scales", lambda: swiglu(smooth_scales=torch.ones(2))),
    ("sq-scales", lambda: swiglu(smooth_scales=torch.ones(1, dtype=H))),
    ("sq-offsets", lambda: swiglu(offsets=torch.ones(1, 4))),
    ("sq-group", lambda: swiglu(group_index=torch.tensor([3]))),
    ("sq-mode", lambda: swiglu(quant_mode=2)),
    ("sq-mode", lambda: swiglu(group_list_type=2)),
    ("dynamic-dtype", lambda: dynamic(input=torch.zeros(3, 8))),
    ("dynamic-dtype", lambda: dynamic(smooth_scales=torch.zeros(8))),
    ("dynamic-int4", lambda: dynamic(input=torch.zeros(3, 12, dtype=H), dst_type=16)),
    ("dynamic-int4", lambda: dynamic(dst_type=16, quant_mode="pertensor")),
    ("dynamic-integer", lambda: dynamic(dst_type=24)),
    ("dynamic-rank", lambda: dynamic(input=torch.zeros(8, dtype=H))),
    ("dynamic-smooth", lambda: dynamic(smooth_scales=torch.zeros(1, 8, dtype=H))),
    ("dynamic-group", lambda: dynamic(group_index=torch.tensor([3]).int())),
    ("dynamic-group", lambda: dynamic(smooth_scales=torch.zeros(1, 8, dtype=H), group_index=torch.tensor([3]))),
    ("dynamic-mode", lambda: dynamic(quant_mode="perblock")),
    ("quantize-dtype", lambda: quantize(input=torch.zeros(3, 8).int())),
    ("quantize-scales", lambda: quantize(scales=torch.ones(8, dtype=H))),
    ("quantize-scales", lambda: quantize(zero_points=torch.ones(8))),
    ("quantize-scales", lambda: quantize(scales=torch.ones(8, dtype=H), div_mode=False)),
    ("quantize-shape", lambda: quantize(scales=torch.ones(4))),
    ("quantize-shape", lambda: quantize(zero_points=torch.ones(1).int())),
    ("quantize-axis", lambda: quantize(axis=2)),
    ("quantize-target", lambda: quantize(dtype=5)),
    ("quantize-target", lambda: quantize(dtype=13, div_mode=False)),
    ("dsq-x", lambda: dsq(x=torch.zeros(3, 8))),
    ("dsq-x", lambda: dsq(x=torch.zeros(3, 7, dtype=H))),
    ("dsq-weight-scale", lambda: integer(weight_scale=torch.ones(2, 8))),
    ("dsq-activation-scale", lambda: integer(activation_scale=None)),
    ("dsq-activation-scale", lambda: integer(activation_scale=torch.ones(4))),
    ("dsq-activation-scale", lambda: dsq(activation_scale=torch.ones(3))),
    ("dsq-bias", lambda: dsq(bias=torch.ones(8).int())),
    ("dsq-bias", lambda: integer(bias=torch.ones(8))),
    ("dsq-quant-scale", lambda: dsq(quant_scale=torch.ones(2, 4))),
    ("dsq-quant-scale", lambda: dsq(quant_mode=0, quant_scale=torch.ones(4, dtype=H))),
    ("dsq-quant-scale", lambda: dsq(quant_mode=0)),
    ("dsq-quant-offset", lambda: dsq(quant_offset=torch.ones(4))),
    ("dsq-group", lambda: dsq(group_index=torch.tensor([3]).int())),
    ("dsq-hidden", lambda: dsq(group_index=torch.tensor([3]))),
    ("dsq-mode", lambda: dsq(quant_mode=2)),
    ("dsq-mode", lambda: dsq(swiglu_mode=3)),
    ("clipped-dtype", lambda: clipped(x=torch.zeros(3, 8).double())),
    ("clipped-shape", lambda: clipped(x=torch.zeros(8))),
    ("clipped-shape", lambda: clipped(dim=0)),
    ("clipped-contiguous", lambda: clipped(x=torch.zeros(8, 8).T)),
    ("clipped-group", lambda: clipped(group_index=torch.tensor([1]).int())),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, build = REFUSED[number]
    op, options = build()
    refuses(rule, op, **options)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


@pytest.mark.parametrize("call", [dynamic(), quantize(), dsq(), integer(), clipped()])
def test_calls_within_the_documents_are_taken(call: Call) -> None:
    REGISTRY[call[0]](**call[1])


@pytest.mark.parametrize(
    "call",
    [dynamic(dst_type=290), dynamic(dst_type=3), dynamic(dst_type_max=1.0), quantize(dtype=16), dsq(dst_type=290),
     dsq(round_mode=1), dsq(activate_dim=0), swiglu(quant_mode=1), swiglu(dst_type=16), swiglu(smooth_scales=None)],
)  # fmt: skip
def test_forms_that_are_not_computed_say_so(call: Call) -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[call[0]](**call[1])


SMOOTH = torch.zeros(1, 8, dtype=H)


@pytest.mark.parametrize(
    "call",
    [
        dynamic(smooth_scales=SMOOTH, group_index=torch.tensor([2]).int()),
        dsq(x=torch.zeros(3, 128, dtype=H), group_index=torch.tensor([4])),
        dsq(x=torch.zeros(3, 128, dtype=H), group_index=torch.tensor([-1, 2])),
        clipped(group_index=torch.tensor([2, 2])),
        swiglu(group_index=torch.tensor([4]).int()),
        swiglu(group_index=torch.tensor([2, 1]).int(), smooth_scales=torch.ones(2)),
    ],
)
def test_groups_outside_the_rows_fault(call: Call) -> None:
    with pytest.raises(DeviceFault):
        REGISTRY[call[0]](**call[1])


def test_swiglu_quant_of_no_rows() -> None:
    rows, scales = REGISTRY[SWIGLU](torch.zeros(0, 8, dtype=torch.float16), smooth_scales=torch.ones(1, 4))
    assert (rows.shape, rows.dtype, scales.shape) == ((0, 4), torch.int8, (0,))
