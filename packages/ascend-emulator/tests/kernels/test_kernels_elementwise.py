"""Norms, gated activation, rotary embedding and casts against plain float64 loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from ascend_emulator.kernels import REGISTRY, KernelNotCovered
from hypothesis import given, settings
from hypothesis import strategies as st

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
LOOSE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, want: object, dtype: torch.dtype) -> None:
    np.testing.assert_allclose(got.double().numpy(), np.asarray(want), rtol=LOOSE[dtype], atol=LOOSE[dtype])


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 4),
    gamma_shape=st.sampled_from([(6,), (3, 4)]),
    dtype=st.sampled_from(FLOATS),
    epsilon=st.sampled_from([1e-6, 1e-2]),
)
def test_rms_norm(rows: int, gamma_shape: tuple[int, ...], dtype: torch.dtype, epsilon: float) -> None:
    x, other = (draw(rows, 2, *gamma_shape, dtype=dtype, seed=seed) for seed in (1, 2))
    gamma = draw(*gamma_shape, dtype=dtype, seed=3)
    for added in (False, True):
        name, arguments = ("npu::npu_add_rms_norm", [x, other]) if added else ("npu::npu_rms_norm", [x])
        out, reciprocal, *rest = REGISTRY[name](*arguments, gamma, epsilon)
        total = (x + other) if added else x
        if added:
            assert torch.equal(rest[0], total)
        assert out.dtype == dtype and out.shape == x.shape and reciprocal.dtype == torch.float32
        assert reciprocal.shape == (rows, 2, *[1] * len(gamma_shape))
        weights = gamma.double().flatten().tolist()
        for i in range(rows):
            for j in range(2):
                values = total[i, j].double().flatten().tolist()
                factor = 1 / math.sqrt(sum(v * v for v in values) / len(values) + epsilon)
                close(reciprocal[i, j].flatten(), [factor], torch.float32)
                close(out[i, j].flatten(), [v * factor * w for v, w in zip(values, weights, strict=True)], dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_swiglu(dtype: torch.dtype, dim: int) -> None:
    x = draw(4, 2, 6, dtype=dtype)
    out = REGISTRY["npu::npu_swiglu"](x, dim)
    first, second = (half.double() for half in x.chunk(2, dim))
    want = [
        a / (1 + math.exp(-a)) * b for a, b in zip(first.flatten().tolist(), second.flatten().tolist(), strict=True)
    ]
    assert out.dtype == dtype and out.shape == first.shape
    close(out.flatten(), want, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("factor", [(1, 1, 5, 8), (1, 2, 1, 8), (3, 1, 1, 8)])
@pytest.mark.parametrize("rotate", [False, True])
def test_rotary_mul(dtype: torch.dtype, mode: str, factor: tuple[int, ...], rotate: bool) -> None:
    dim = 8
    x, r1, r2 = draw(3, 2, 5, dim, dtype=dtype), draw(*factor, dtype=dtype, seed=1), draw(*factor, dtype=dtype, seed=2)
    partner = [(d + dim // 2) % dim for d in range(dim)] if mode == "half" else [d ^ 1 for d in range(dim)]
    sign = [-1 if (d < dim // 2 if mode == "half" else d % 2 == 0) else 1 for d in range(dim)]
    matrix = None
    if rotate:
        matrix = torch.zeros(dim, dim, dtype=dtype)
        for d in range(dim):
            matrix[partner[d], d] = sign[d]
    out = REGISTRY["npu::npu_rotary_mul"](x, r1, r2, "half" if rotate else mode, matrix)
    cosine, sine = (r.double().expand(3, 2, 5, dim) for r in (r1, r2))
    want = torch.empty(3, 2, 5, dim, dtype=torch.float64)
    for at in np.ndindex(3, 2, 5):
        for d in range(dim):
            here, there = (*at, d), (*at, partner[d])
            want[here] = float(cosine[here]) * float(x[here]) + float(sine[here]) * sign[d] * float(x[there])
    assert out.dtype == dtype
    close(out, want, dtype)


@pytest.mark.parametrize("op", ["npu::npu_dtype_cast", "npu::_npu_dtype_cast"])
def test_casts(op: str) -> None:
    x = torch.tensor([0.0, 0.5, -1.75])
    assert REGISTRY[op](x, torch.int32).tolist() == [0, 0, -1]
    assert REGISTRY[op](x, torch.bfloat16).dtype == torch.bfloat16
    same = REGISTRY[op](x, torch.float32)
    assert torch.equal(same, x) and same.data_ptr() != x.data_ptr()


NUMBERS = {
    0: torch.uint8,
    1: torch.int8,
    3: torch.int32,
    4: torch.int64,
    5: torch.half,
    6: torch.float,
    15: torch.bfloat16,
}


@pytest.mark.parametrize("number", NUMBERS)
def test_cast_by_number(number: int) -> None:
    assert REGISTRY["npu::npu_dtype_cast"](torch.ones(2), number).dtype == NUMBERS[number]


def test_casts_that_only_a_device_has_say_so() -> None:
    for arguments in ((290,), (8,), (torch.int8, 290)):
        with pytest.raises(KernelNotCovered):
            REGISTRY["npu::npu_dtype_cast"](torch.ones(2), *arguments)


def test_format_cast_keeps_values_and_copies() -> None:
    x = torch.arange(6.0).view(2, 3).T
    out = REGISTRY["npu::npu_format_cast"](x, 29)
    assert torch.equal(out, x) and out.is_contiguous() and out.data_ptr() != x.data_ptr()
