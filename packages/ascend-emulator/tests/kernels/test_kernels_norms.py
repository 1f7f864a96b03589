"""Root-mean-square norms in all their forms against plain float64 loops, and their refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, KernelNotCovered
from hypothesis import given, settings
from hypothesis import strategies as st

NORM = "npu::npu_rms_norm"
ADD = "npu::npu_add_rms_norm"
GEMMA = "npu::npu_gemma_rms_norm"
CAST = "npu::npu_add_rms_norm_cast"
V2 = "npu::npu_add_rms_norm_v2"
QUANT = "npu::npu_add_rms_norm_quant"
DYNAMIC = "npu::npu_add_rms_norm_dynamic_quant"
PLAIN = "npu::npu_rms_norm_quant"
FLOATS = [torch.float16, torch.bfloat16, torch.float32]
LOOSE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(row: torch.Tensor, gamma: list[float], epsilon: float, beta: list[float] | None = None) -> list[float]:
    values = row.double().flatten().tolist()
    factor = 1 / math.sqrt(math.fsum(v * v for v in values) / len(values) + epsilon)
    return [v * factor * g + b for v, g, b in zip(values, gamma, beta or [0.0] * len(values), strict=True)]


def floats(tensor: torch.Tensor) -> list[float]:
    numbers: list[float] = tensor.double().flatten().tolist()
    return numbers


def close(got: torch.Tensor, want: list[float], dtype: torch.dtype) -> None:
    np.testing.assert_allclose(floats(got), want, rtol=LOOSE[dtype], atol=LOOSE[dtype])


def nearly(got: torch.Tensor, want: list[float]) -> None:
    """int8 results may differ by one where the exact value lies near a half."""
    for one, exact in zip(floats(got), want, strict=True):
        assert abs(one - max(-128.0, min(127.0, exact))) <= 0.5 + 2e-3 * abs(exact) + 1e-3


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from([(2, 3, 6), (4, 6), (2, 1, 2, 6), (6,)]),
    axes=st.integers(1, 2),
    dtype=st.sampled_from(FLOATS),
    epsilon=st.sampled_from([1e-6, 1e-2]),
)
def test_norms_that_keep_the_dtype(shape: tuple[int, ...], axes: int, dtype: torch.dtype, epsilon: float) -> None:
    axes = min(axes, len(shape))
    x, other = draw(*shape, dtype=dtype, seed=1), draw(*shape, dtype=dtype, seed=2)
    gamma = draw(*shape[-axes:], dtype=dtype, seed=3)
    total = x + other
    cases: list[tuple[str, tuple[torch.Tensor, ...], torch.Tensor, int, int, float]] = [
        (GEMMA, (x, gamma), x, 0, 1, 1.0),
        (ADD, (x, other, gamma), total, 0, 1, 0.0),
        (f"{V2}_functional", (x, other, gamma), total, 1, 0, 0.0),
    ]
    if dtype != torch.float32:
        cases.append((CAST, (x, other, gamma), total, 1, 2, 0.0))
    for op, arguments, source, at, reciprocal_at, shift in cases:
        results = REGISTRY[op](*arguments, epsilon)
        out, reciprocal = results[at], results[reciprocal_at]
        assert out.dtype == dtype and out.shape == x.shape and reciprocal.dtype == torch.float32
        assert reciprocal.shape == (*shape[: len(shape) - axes], *[1] * axes)
        weights = [w + shift for w in floats(gamma)]
        rows = zip(source.view(-1, gamma.numel()), out.view(-1, gamma.numel()), reciprocal.flatten(), strict=True)
        for row, got, factor in rows:
            close(got, normed(row, weights, epsilon), dtype)
            close(factor, [1 / math.sqrt(math.fsum(v * v for v in floats(row)) / row.numel() + epsilon)], torch.float32)
        if op != GEMMA:
            assert torch.equal(results[-1], total)
        if op == CAST:
            assert torch.equal(results[0], out.float())
    first, second = x.clone(), other.clone()
    reciprocal = REGISTRY[V2](first, second, gamma, epsilon)
    wanted = REGISTRY[f"{V2}_functional"](x, other, gamma, epsilon)
    assert all(torch.equal(a, b) for a, b in zip((reciprocal, first, second), wanted, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    half=st.booleans(),
    axes=st.integers(1, 2),
    second=st.booleans(),
    zero=st.booleans(),
    beta=st.booleans(),
    div=st.booleans(),
)
def test_static_quantisation(half: bool, axes: int, second: bool, zero: bool, beta: bool, div: bool) -> None:
    dtype, wide = (torch.float16, torch.float32) if half else (torch.bfloat16, torch.bfloat16)
    x, other = draw(3, 2, 6, dtype=dtype, seed=1), draw(3, 2, 6, dtype=dtype, seed=2)
    shape = (6,) if axes == 1 else (2, 6)
    gamma, shift = draw(*shape, dtype=dtype, seed=3), draw(*shape, dtype=dtype, seed=4) if beta else None
    scales = [draw(*shape, dtype=wide, seed=5 + i).abs() + (0.1 if div else 20) for i in range(2)]
    points = [
        (draw(*shape, dtype=torch.float32, seed=8 + i) * 9).round().to(torch.int32 if half else dtype) for i in (0, 1)
    ]
    options: dict[str, Any] = {"scales1": scales[0], "zero_points1": points[0] if zero else None, "beta": shift}
    if second:
        options |= {"scales2": scales[1], "zero_points2": points[1] if zero else None}
    results = REGISTRY[QUANT](x, other, gamma, **options, div_mode=div)
    assert torch.equal(results[2], x + other)
    for number in range(2 if second else 1):
        out = results[number]
        assert out.dtype == torch.int8 and out.shape == x.shape
        for row, got in zip((x + other).view(-1, gamma.numel()), out.view(-1, gamma.numel()), strict=True):
            y = normed(row, floats(gamma), 1e-6, None if shift is None else floats(shift))
            s, z = floats(scales[number]), floats(points[number]) if zero else [0.0] * len(y)
            nearly(got, [(v / k if div else v * k) + p for v, k, p in zip(y, s, z, strict=True)])


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(FLOATS[:2]),
    smooths=st.sampled_from([(0, 0), (1, 0), (1, 1)]),
    mask=st.sampled_from([(), (True, False), (True, True)]),
    beta=st.booleans(),
)
def test_dynamic_quantisation(dtype: torch.dtype, smooths: tuple[int, int], mask: tuple[bool, ...], beta: bool) -> None:
    x, other = draw(3, 2, 8, dtype=dtype, seed=1), draw(3, 2, 8, dtype=dtype, seed=2)
    gamma, shift = draw(8, dtype=dtype, seed=3), draw(8, dtype=dtype, seed=4) if beta else None
    scales = [draw(8, dtype=dtype, seed=5 + i) if given_one else None for i, given_one in enumerate(smooths)]
    if mask and smooths[1] and not mask[1]:
        mask = (True, True)
    results = REGISTRY[DYNAMIC](
        x, other, gamma, smooth_scale1=scales[0], smooth_scale2=scales[1], beta=shift, output_mask=list(mask)
    )
    assert torch.equal(results[2], x + other)
    wanted = mask or (True, all(smooths))
    for number in (0, 1):
        out, scale = results[number], results[3 + number]
        assert (out.dtype, scale.dtype) == (torch.int8, torch.float32)
        if not wanted[number]:  # torch_npu from 2.13 on leaves out the scales too
            newer = int(torch.__version__.split(".")[1]) >= 13
            assert out.shape == ((0,) if mask or newer else x.shape)
            assert scale.shape == ((0,) if newer else (3, 2))
            continue
        assert scale.shape == (3, 2)
        for row, got, factor in zip((x + other).view(-1, 8), out.view(-1, 8), scale.flatten(), strict=True):
            y = normed(row, floats(gamma), 1e-6, None if shift is None else floats(shift))
            smooth = scales[number]
            y = y if smooth is None else [v * s for v, s in zip(y, floats(smooth), strict=True)]
            top = max(abs(v) for v in y) / 127
            close(factor, [top], torch.float32)
            nearly(got, [v / top for v in y])


@pytest.mark.parametrize("dtype", FLOATS[:2])
@pytest.mark.parametrize("two", [False, True])
def test_plain_norm_with_one_scale(dtype: torch.dtype, two: bool) -> None:
    x, gamma, beta = draw(3, 8, dtype=dtype), draw(8, dtype=dtype, seed=1), draw(8, dtype=dtype, seed=2)
    scale, offset = torch.tensor([30.0], dtype=dtype), torch.tensor([-7], dtype=torch.int8)
    rows = (gamma.view(1, 8), beta.view(1, 8)) if two else (gamma, beta)
    out = REGISTRY[PLAIN](x, *rows, scale, offset)
    assert out.dtype == torch.int8
    for row, got in zip(x, out, strict=True):
        nearly(got, [v * 30 - 7 for v in normed(row, floats(gamma), 1e-6, floats(beta))])


X, G = torch.zeros(2, 8), torch.zeros(8)
H, GH = X.half(), G.half()


def quant(**over: Any) -> tuple[str, list[Any], dict[str, Any]]:
    options = {"x1": H, "x2": H, "gamma": GH, "scales1": G + 1, "zero_points1": None} | over
    return QUANT, [], options


def dynamic(**over: Any) -> tuple[str, list[Any], dict[str, Any]]:
    return DYNAMIC, [], {"x1": H, "x2": H, "gamma": GH} | over


def plain(**over: Any) -> tuple[str, list[Any], dict[str, Any]]:
    one = torch.ones(1).half()
    return PLAIN, [], {"x": H, "gamma": GH, "beta": GH, "scale": one, "offset": torch.ones(1).char()} | over


REFUSED: list[tuple[str, Callable[[], tuple[str, list[Any], dict[str, Any]]]]] = [
    ("norm-dtype", lambda: (NORM, [X.double(), G], {})),
    ("norm-gamma-dtype", lambda: (NORM, [H, G], {})),
    ("norm-gamma-dtype", lambda: (ADD, [X, H, G], {})),
    ("norm-rank", lambda: (NORM, [G, G], {})),
    ("norm-rank", lambda: (GEMMA, [torch.zeros(()), G], {})),
    ("norm-gamma", lambda: (NORM, [X, torch.zeros(2)], {})),
    ("norm-summands", lambda: (ADD, [X, torch.zeros(1, 8), G], {})),
    ("norm-summands", lambda: (V2, [X.clone(), torch.zeros(1, 8), G], {})),
    ("norm-empty", lambda: (ADD, [X[:0], X[:0], G], {})),
    ("norm-empty", lambda: (GEMMA, [X[:0], G], {})),
    ("norm-half", lambda: (CAST, [X, X, G], {})),
    ("norm-half", lambda: quant(x1=X, x2=X, gamma=G)),
    ("norm-half", lambda: dynamic(x1=X, x2=X, gamma=G)),
    ("gemma-contiguous", lambda: (GEMMA, [torch.zeros(8, 8).T, G], {})),
    ("norm-quant-scales", lambda: quant(scales1=GH)),
    ("norm-quant-scales", lambda: quant(scales2=torch.ones(4))),
    ("norm-quant-zero-points", lambda: quant(zero_points1=G)),
    ("norm-quant-beta", lambda: quant(beta=G)),
    ("norm-quant-axis", lambda: quant(axis=0)),
    ("norm-dynamic-row", lambda: dynamic(smooth_scale1=G)),
    ("norm-dynamic-row", lambda: dynamic(gamma=torch.zeros(2, 8).half())),
    ("norm-dynamic-mask", lambda: dynamic(output_mask=[False, False])),
    ("norm-dynamic-mask", lambda: dynamic(smooth_scale1=GH, output_mask=[False, True])),
    ("norm-dynamic-mask", lambda: dynamic(output_mask=[True])),
    ("rms-quant-dtype", lambda: plain(x=X)),
    ("rms-quant-dtype", lambda: plain(offset=torch.ones(1).int())),
    ("rms-quant-shape", lambda: plain(gamma=torch.zeros(2, 8).half())),
    ("rms-quant-shape", lambda: plain(scale=GH)),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, build = REFUSED[number]
    op, arguments, options = build()
    refuses(rule, op, *arguments, **options)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


@pytest.mark.parametrize(
    "call", [quant(dst_type=16), dynamic(y_dtype=torch.quint4x2), plain(dst_dtype=290), quant(dst_type=3)]
)
def test_outputs_that_are_not_computed_say_so(call: tuple[str, list[Any], dict[str, Any]]) -> None:
    op, _, options = call
    with pytest.raises(KernelNotCovered):
        REGISTRY[op](**options)


def test_a_row_of_zeros_quantises_to_zeros() -> None:
    out, _, _, scale, _ = REGISTRY[DYNAMIC](H, H, GH + 1)
    assert not out.any() and not scale.any()
