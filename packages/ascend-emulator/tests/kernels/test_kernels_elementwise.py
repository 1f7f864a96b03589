"""Activation, rotary embedding, top-k and top-p, prefetch and casts against plain float64 loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, KernelNotCovered
from hypothesis import given, settings
from hypothesis import strategies as st

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
LOOSE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, want: object, dtype: torch.dtype) -> None:
    np.testing.assert_allclose(got.double().numpy(), np.asarray(want), rtol=LOOSE[dtype], atol=LOOSE[dtype])


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


def gelu(x: float, tanh: bool) -> float:
    if tanh:
        return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + math.erf(x / math.sqrt(2)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize("approximate", [0, 1])
@pytest.mark.parametrize("left", [False, True])
def test_geglu(dtype: torch.dtype, dim: int, approximate: int, left: bool) -> None:
    x = draw(4, 2, 6, dtype=dtype) * 2
    out, gate = REGISTRY["npu::npu_geglu"](x, dim, approximate, left)
    halves = [half.double().flatten().tolist() for half in x.chunk(2, dim)]
    gates = [gelu(a, approximate == 1) for a in halves[0 if left else 1]]
    assert out.dtype == gate.dtype == dtype and out.shape == gate.shape == x.chunk(2, dim)[0].shape
    close(gate.flatten(), gates, dtype)
    close(out.flatten(), [a * b for a, b in zip(gates, halves[1 if left else 0], strict=True)], dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fast_gelu(dtype: torch.dtype) -> None:
    x = draw(3, 5, dtype=dtype)
    out = REGISTRY["npu::npu_fast_gelu"](x)
    assert out.dtype == dtype and out.shape == x.shape
    close(out.flatten(), [a / (1 + math.exp(-1.702 * a)) for a in x.double().flatten().tolist()], dtype)


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


FORMATS: dict[str, list[Any]] = {
    "npu::npu_format_cast": [29],
    "npu::npu_format_cast.Tensor": [torch.ones(1)],
    "npu::_npu_format_cast": [29],
    "npu::_npu_format_cast.aclnn": [29, 1],
    "npu::_npu_format_cast.input_dtype": [29, 1, 1],
}


@pytest.mark.parametrize("op", FORMATS)
def test_format_casts_keep_values_and_copy(op: str) -> None:
    x = torch.arange(6.0).view(2, 3).T
    out = REGISTRY[op](x, *FORMATS[op])
    assert torch.equal(out, x) and out.is_contiguous() and out.data_ptr() != x.data_ptr()


def test_format_casts_in_place_change_nothing() -> None:
    x = torch.arange(6.0)
    assert REGISTRY["npu::npu_format_cast_"](x, torch.ones(1)) is x
    assert REGISTRY["npu::npu_format_cast_.acl_format"](x, 29) is x
    assert x.tolist() == [0, 1, 2, 3, 4, 5]


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.lists(st.integers(-20, 20), min_size=5, max_size=5), min_size=1, max_size=3),
    p=st.sampled_from([None, 0.0, 0.3, 0.9, 1.0]),
    k=st.sampled_from([None, 1, 3, 5]),
    dtype=st.sampled_from(FLOATS),
)
def test_top_k_top_p(values: list[list[int]], p: float | None, k: int | None, dtype: torch.dtype) -> None:
    logits = (torch.tensor(values) / 4).to(dtype)
    rows = len(values)
    given_p = None if p is None else torch.full((rows,), p, dtype=dtype)
    given_k = None if k is None else torch.full((rows,), k, dtype=torch.int32)
    out = REGISTRY["npu::npu_top_k_top_p"](logits, given_p, given_k)
    for row, got in zip(logits.double().tolist(), out.double().tolist(), strict=True):
        order = sorted(range(5), key=lambda i: (row[i], i))
        least = row[order[5 - k]] if k is not None else -math.inf
        kept = [i for i in order if row[i] >= least]
        total = math.fsum(math.exp(row[i]) for i in kept)
        hidden, mass, unsure = set(range(5)) - set(kept), 0.0, set()
        for i in kept if given_p is not None else []:
            mass += math.exp(row[i]) / total
            limit = 1 - float(given_p[0]) if given_p is not None else 0.0
            if abs(mass - limit) < 1e-5:
                unsure.add(i)
            if mass <= limit and i != order[-1]:
                hidden.add(i)
        for i in set(range(5)) - unsure:
            assert got[i] == (-math.inf if i in hidden else row[i])
    assert out.dtype == dtype


def test_prefetch_does_nothing() -> None:
    assert REGISTRY["npu::npu_prefetch"](torch.ones(4), None, 99, 3) is None


def test_a_k_outside_faults() -> None:
    for k in (0, 6):
        with pytest.raises(DeviceFault):
            REGISTRY["npu::npu_top_k_top_p"](torch.ones(1, 5), None, torch.tensor([k]).int())


LOGITS = torch.ones(2, 5)
REFUSED: list[tuple[str, str, list[Any]]] = [
    ("topkp-logits", "npu::npu_top_k_top_p", [LOGITS.double(), None, None]),
    ("topkp-p", "npu::npu_top_k_top_p", [LOGITS, torch.ones(2).half(), None]),
    ("topkp-k", "npu::npu_top_k_top_p", [LOGITS, None, torch.ones(2).long()]),
    ("geglu-dtype", "npu::npu_geglu", [LOGITS.double(), 0]),
    ("geglu-rank", "npu::npu_geglu", [torch.ones(2, *[1] * 8), 0]),
    ("geglu-even", "npu::npu_geglu", [LOGITS]),
    ("geglu-even", "npu::npu_geglu", [LOGITS, 2]),
    ("geglu-even", "npu::npu_geglu", [torch.ones(())]),
    ("geglu-approximate", "npu::npu_geglu", [LOGITS, 0, 2]),
    ("prefetch-size", "npu::npu_prefetch", [LOGITS, None, 0]),
    ("prefetch-offset", "npu::npu_prefetch", [LOGITS, None, 1, 41]),
    ("prefetch-offset", "npu::npu_prefetch", [LOGITS, None, 1, -1]),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, op, arguments = REFUSED[number]
    refuses(rule, op, *arguments)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}
