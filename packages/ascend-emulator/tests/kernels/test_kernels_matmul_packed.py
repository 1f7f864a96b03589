"""Products of 4-bit integers, packed scales and antiquantised weights, 4-bit and float8 rows, against plain loops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ascend_emulator.kernels import REGISTRY, pose
from hypothesis import given, settings
from hypothesis import strategies as st

QMM = "npu::npu_quant_matmul"
GMM = "npu::npu_grouped_matmul"
WQM = "npu::npu_weight_quant_batchmatmul"
DYNAMIC = "npu::npu_dynamic_quant"
PARAM = "npu::npu_trans_quant_param"
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
NUMBER = {torch.int8: 1, HALF: 5, BF16: 15}
LOOSE = {HALF: 3e-3, BF16: 2e-2, torch.int8: 0.51}


@pytest.fixture(autouse=True)
def strictest() -> Iterator[None]:
    yield
    pose.set_pose()


def draw(*shape: int, dtype: torch.dtype = FLOAT, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def digits(*shape: int, low: int = -8, high: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


def pack(values: torch.Tensor) -> torch.Tensor:
    """Eight 4-bit integers in each int32, digit by digit, along the last axis."""
    rows = values.reshape(-1, values.size(-1) // 8, 8).tolist()
    words = [[sum((d % 16) << 4 * i for i, d in enumerate(eight)) for eight in row] for row in rows]
    signed = [[word - 2**32 if word >= 2**31 else word for word in row] for row in words]
    return torch.tensor(signed, dtype=torch.int32).view(*values.shape[:-1], -1)


def close(got: torch.Tensor, want: float, scale: float = 1.0) -> None:
    np.testing.assert_allclose(float(got), want, rtol=LOOSE[got.dtype], atol=LOOSE[got.dtype] * scale)


def dot(row: list[float], column: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(row, column, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from([(HALF, "int64"), (HALF, "float32"), (HALF, "rows"), (BF16, "rows")]), turned=st.booleans(),
    one=st.booleans(), shifted=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_products_of_4_bit_integers(
    form: tuple[torch.dtype, str], turned: bool, one: bool, shifted: bool, seed: int
) -> None:
    dtype, kind = form
    m, k, n = 3, 16, 8
    x1, x2 = digits(m, k, seed=seed), digits(k, n, seed=seed + 1)
    scale = draw(1 if one else n, seed=2) * 1e-2
    tokens = draw(m, seed=3).abs() if kind == "rows" else None
    bias = None if tokens is not None or not shifted else torch.arange(n, dtype=torch.int32) * 9 - 30
    given_scale = REGISTRY[PARAM](scale) if kind == "int64" else scale
    out = REGISTRY[QMM](
        pack(x1), pack(x2.T.contiguous()).T if turned else pack(x2), given_scale, pertoken_scale=tokens, bias=bias,
        output_dtype=NUMBER[dtype],
    )  # fmt: skip
    exact = (scale.view(torch.int32) & ~0x1FFF).view(FLOAT) if kind == "int64" else scale
    assert out.dtype == dtype and out.shape == (m, n)
    for i in range(m):
        for j in range(n):
            want = dot(x1[i].tolist(), x2[:, j].tolist()) + (int(bias[j]) if bias is not None else 0)
            want *= float(exact[0 if one else j]) * (float(tokens[i]) if tokens is not None else 1.0)
            close(out[i, j], want)


@pytest.mark.parametrize("dtype", [HALF, torch.int8])
@pytest.mark.parametrize("shifted", [False, True])
def test_products_with_packed_scales(dtype: torch.dtype, shifted: bool) -> None:
    x1, x2, scale = digits(3, 5, low=-128, high=128), digits(5, 4, low=-128, high=128, seed=1), draw(4, seed=2) * 1e-3
    bias = torch.tensor([50, -7, 0, 900], dtype=torch.int32) if shifted else None
    out = REGISTRY[QMM](x1, x2, REGISTRY[PARAM](scale), bias=bias, output_dtype=NUMBER[dtype])
    cut = (scale.view(torch.int32) & ~0x1FFF).view(FLOAT)
    for i in range(3):
        for j in range(4):
            want = dot(x1[i].tolist(), x2[:, j].tolist()) + (int(bias[j]) if bias is not None else 0)
            close(out[i, j], want * float(cut[j]))


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from([HALF, BF16]), packed=st.booleans(), turned=st.booleans(), group=st.sampled_from([0, 32]),
    shifted=st.booleans(),
)  # fmt: skip
def test_weights_of_4_bits(dtype: torch.dtype, packed: bool, turned: bool, group: int, shifted: bool) -> None:
    m, k, n = 2, 64, 8
    x, weight = draw(m, k, dtype=dtype), digits(k, n, seed=1)
    shape = (k // group, n) if group else (n,)
    scale = (draw(*shape, seed=2) / 8).to(dtype)
    offset = draw(*shape, dtype=dtype, seed=3) if shifted else None
    given_weight = (pack(weight.T.contiguous()).T if turned else pack(weight)) if packed else weight
    out = REGISTRY[WQM](x, given_weight, scale, offset, antiquant_group_size=group)
    for i in range(m):
        for j in range(n):
            column = []
            for a in range(k):
                at = (a // group, j) if group else (j,)
                shift = float(offset[at]) if offset is not None else 0.0
                column.append((int(weight[a, j]) + shift) * float(scale[at]))
            close(out[i, j], dot(x[i].tolist(), column), 4)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([HALF, BF16]), packed=st.booleans(), parts=st.sampled_from([0, 1, 2]), stacked=st.booleans(),
    shifted=st.booleans(), biased=st.booleans(),
)  # fmt: skip
def test_grouped_products_with_antiquantised_weights(
    dtype: torch.dtype, packed: bool, parts: int, stacked: bool, shifted: bool, biased: bool
) -> None:
    parts = parts if packed else 0
    m, k, n, counts = 5, 8, 16, [2, 0, 3]
    x = draw(m, k, dtype=dtype)
    weights = [digits(k, n, seed=i) for i in range(3)]
    shape = (parts, n) if parts else (n,)
    scales = [(draw(*shape, seed=10 + i) / 4).to(dtype) for i in range(3)]
    offsets = [draw(*shape, dtype=dtype, seed=20 + i) for i in range(3)] if shifted else None
    bias = [draw(n, dtype=HALF if dtype == HALF else FLOAT, seed=30 + i) for i in range(3)] if biased else None

    def lists(tensors: list[torch.Tensor] | None) -> list[torch.Tensor] | None:
        return None if tensors is None else [torch.stack(tensors)] if stacked else tensors

    (out,) = REGISTRY[GMM](
        [x], lists([pack(w) for w in weights] if packed else weights), antiquant_scale=lists(scales),
        antiquant_offset=lists(offsets), bias=lists(bias), group_list=torch.tensor(counts), group_list_type=1,
        group_type=0, split_item=2,
    )  # fmt: skip
    assert out.dtype == dtype and out.shape == (m, n)
    row = 0
    for group, count in enumerate(counts):
        for i in range(row, row + count):
            for j in range(n):
                column = []
                for a in range(k):
                    at = (a * parts // k, j) if parts else (j,)
                    shift = float(offsets[group][at]) if offsets else 0.0
                    column.append((int(weights[group][a, j]) + shift) * float(scales[group][at]))
                want = dot(x[i].tolist(), column) + (float(bias[group][j]) if bias else 0.0)
                close(out[i, j], want, 4)
        row += count


@pytest.mark.parametrize("shape", [(1, 8), (3, 16), (2, 2, 8)])
@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("target", [torch.quint4x2, torch.float8_e4m3fn, torch.float8_e5m2])
def test_rows_of_4_bits_and_float8(shape: tuple[int, ...], dtype: torch.dtype, target: torch.dtype) -> None:
    pose.set_pose(chip="950")
    x = draw(*shape, dtype=dtype)
    x.view(-1, shape[-1])[0] = 0
    numbers: dict[Any, int] = {torch.quint4x2: 16, torch.float8_e5m2: 23, torch.float8_e4m3fn: 24}
    out, scales = REGISTRY[DYNAMIC](x, dst_type=numbers[target])
    most = {torch.quint4x2: 7.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}[target]
    assert scales.shape == shape[:-1] and scales.dtype == FLOAT
    for row, values in enumerate(x.view(-1, shape[-1]).double()):
        want = float(values.abs().max()) / most
        scale = float(scales.flatten()[row])
        assert math.isclose(scale, want, rel_tol=1e-6, abs_tol=1e-12)
        for place, value in enumerate(values.tolist()):
            exact = value / scale if scale else 0.0
            if target == torch.quint4x2:
                word = int(out.view(-1, shape[-1] // 8)[row, place // 8]) % 2**32
                digit = word >> 4 * (place % 8) & 15
                assert abs((digit - 16 if digit > 7 else digit) - exact) <= 0.5 + 1e-4
            else:
                got = float(out.view(-1, shape[-1])[row, place].float())
                step = 0.25 if target == torch.float8_e5m2 else 0.125
                assert abs(got - exact) <= abs(exact) * step / 2 + 2**-9
