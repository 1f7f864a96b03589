"""The microscaling form of npu_quant_matmul against plain loops, and its refusals."""

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

OP = "npu::npu_quant_matmul"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NUMBER = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}
LOOSE = {torch.float16: 3e-3, torch.float32: 1e-5, torch.bfloat16: 2e-2}
SMALL = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def draw(*shape: int, dtype: torch.dtype = E4M3, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def numbers(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


@settings(max_examples=30, deadline=None)
@given(
    m=st.integers(1, 3), k=st.sampled_from([4, 64, 100]), n=st.integers(2, 4), four=st.booleans(), turned=st.booleans(),
    biased=st.booleans(), dtype=st.sampled_from(list(NUMBER)), kind=st.sampled_from([293, 44]),
    mixed=st.sampled_from([(E4M3, E4M3), (E5M2, E4M3)]),
)  # fmt: skip
def test_product(
    m: int, k: int, n: int, four: bool, turned: bool, biased: bool, dtype: torch.dtype, kind: int,
    mixed: tuple[torch.dtype, torch.dtype],
) -> None:  # fmt: skip
    pairs = -(-k // 64)
    first, second = numbers(125, 130, m, pairs, 2, seed=1), numbers(125, 130, n, pairs, 2, seed=2)
    bias = draw(n, dtype=torch.float32, seed=3) if biased else None
    options: dict[str, Any] = {
        "scale_dtype": kind,
        "pertoken_scale_dtype": kind,
        "group_sizes": [1, 1, 32],
        "bias": bias,
    }
    if four:
        codes = numbers(0, 16, m, k, seed=4), numbers(0, 16, n, k, seed=5)
        left, right = ((part[:, ::2] | part[:, 1::2] << 4) for part in codes)
        values = [[[SMALL[c % 8] * (-1 if c > 7 else 1) for c in row] for row in part.tolist()] for part in codes]
        options |= {"x1_dtype": 296, "x2_dtype": 296}
        turned = True
    else:
        left, right = draw(m, k, dtype=mixed[0], seed=4), draw(n, k, dtype=mixed[1], seed=5)
        values = [left.double().tolist(), right.double().tolist()]
    weight, scale = right.T, second.transpose(0, 1)
    if not turned:
        weight, scale = weight.contiguous(), scale.contiguous()
    out = REGISTRY[OP](left, weight, scale, pertoken_scale=first, output_dtype=NUMBER[dtype], **options)
    assert out.shape == (m, n) and out.dtype == dtype
    powers = [(2.0 ** (part.flatten(1).double() - 127)).tolist() for part in (first, second)]
    for i in range(m):
        for j in range(n):
            terms = [
                values[0][i][a] * powers[0][i][a // 32] * values[1][j][a] * powers[1][j][a // 32] for a in range(k)
            ]
            want = math.fsum(terms) + (float(bias[j]) if bias is not None else 0.0)
            np.testing.assert_allclose(float(out[i, j]), want, rtol=LOOSE[dtype], atol=LOOSE[dtype] * 40)


def call(**over: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "x1": draw(3, 64), "x2": draw(5, 64).T, "scale": numbers(125, 130, 5, 2, 2)[:, :1].contiguous().transpose(0, 1),
        "pertoken_scale": numbers(125, 130, 3, 1, 2), "scale_dtype": 293, "pertoken_scale_dtype": 293,
        "group_sizes": [1, 1, 32], "output_dtype": 15,
    }  # fmt: skip
    return options | over


WIDE = {"x1": draw(3, 128), "x2": draw(5, 128).T, "pertoken_scale": numbers(125, 130, 3, 2, 2)}
FOUR = {"x1": numbers(0, 255, 3, 32), "x2": numbers(0, 255, 5, 32).T, "x1_dtype": 296, "x2_dtype": 296}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("qmm-mx-dtype", call(x1=draw(3, 64, dtype=torch.float16))),
    ("qmm-mx-dtype", call(pertoken_scale=None)),
    ("qmm-mx-dtype", call(pertoken_scale_dtype=None)),
    ("qmm-mx-dtype", call(scale=torch.ones(1, 5, 2))),
    ("qmm-mx-shape", call(x1=draw(3, 32))),
    ("qmm-mx-shape", call(pertoken_scale=numbers(0, 9, 3, 2, 1))),
    ("qmm-mx-shape", call(**FOUR, scale=numbers(0, 9, 2, 5, 2))),
    ("qmm-mx-shape", call(**FOUR | {"x2": numbers(0, 255, 32, 5)})),
    ("qmm-mx-turned", call(**WIDE, scale=numbers(125, 130, 2, 5, 2))),
    ("qmm-mx-bias", call(bias=torch.ones(5).half())),
    ("qmm-mx-output", call(output_dtype=None)),
    ("qmm-mx-output", call(offset=torch.ones(1))),
    ("qmm-mx-group", call(group_sizes=None)),
    ("qmm-mx-group", call(group_sizes=[1, 1, 64])),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_document_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, options = REFUSED[number]
    refuses(rule, OP, **options)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


def test_calls_within_the_document_are_taken() -> None:
    for options in (call(), call(**FOUR), call(**WIDE, scale=numbers(125, 130, 5, 2, 2).transpose(0, 1))):
        REGISTRY[OP](**options)


@pytest.mark.parametrize("options", [call(x2_dtype=296), call(x1=draw(2, 3, 64))])
def test_forms_that_are_not_computed_say_so(options: dict[str, Any]) -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[OP](**options)
