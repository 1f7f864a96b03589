"""vLLM-Ascend's norms against plain loops, their schemas and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, vllm_norms
from hypothesis import given, settings
from hypothesis import strategies as st

BIAS, GEMMA, QUANT = vllm_norms.KERNELS
H, B, F = torch.float16, torch.bfloat16, torch.float32


def draw(*shape: int, dtype: torch.dtype = H, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def root(row: list[float], epsilon: float) -> float:
    return 1 / math.sqrt(sum(x * x for x in row) / len(row) + epsilon)


def test_the_schemas_are_those_of_the_library() -> None:
    for text in vllm_norms.SCHEMAS:
        registered = getattr(torch.ops._C_ascend, text.partition("(")[0]).default._schema
        assert registered == torch._C.parse_schema(f"_C_ascend::{text}")


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 4), width=st.integers(1, 9), dtype=st.sampled_from([H, B, F]), biased=st.booleans())
def test_sum_norm_and_bias(rows: int, width: int, dtype: torch.dtype, biased: bool) -> None:
    one, two, gamma, beta = (
        draw(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(rows, width)] * 2 + [(width,)] * 2)
    )
    y, rstd, total = REGISTRY[BIAS](one, two, gamma, beta if biased else None, 1e-5)
    assert torch.equal(total, one + two) and rstd.shape == (rows, 1) and rstd.dtype == F
    for row in range(rows):
        numbers = total[row].float().tolist()
        factor = root(numbers, 1e-5)
        assert math.isclose(float(rstd[row, 0]), factor, rel_tol=1e-4)
        for column in range(width):
            want = numbers[column] * factor * float(gamma[column]) + (float(beta[column]) if biased else 0)
            assert abs(float(y[row, column]) - want) <= 1e-2 * max(1, abs(want))
    plain, _ = REGISTRY[GEMMA](total, gamma, 1e-5)
    for row in range(rows):
        for column in range(width):
            want = float(total[row, column]) * float(rstd[row, 0]) * (1 + float(gamma[column]))
            assert abs(float(plain[row, column]) - want) <= 1e-2 * max(1, abs(want))


@settings(max_examples=40, deadline=None)
@given(
    lead=st.lists(st.integers(1, 3), min_size=0, max_size=2), width=st.integers(1, 9), dtype=st.sampled_from([H, B]),
    smooth=st.booleans(), biased=st.booleans(),
)  # fmt: skip
def test_norm_and_quantisation(lead: list[int], width: int, dtype: torch.dtype, smooth: bool, biased: bool) -> None:
    x, gamma, factor, beta = draw(*lead, width, dtype=dtype), *(draw(width, dtype=dtype, seed=i) for i in (1, 2, 3))
    y, scale = REGISTRY[QUANT](x, gamma, factor if smooth else None, beta if biased else None, 1e-5)
    assert y.shape == x.shape and y.dtype == torch.int8 and tuple(scale.shape) == tuple(lead) and scale.dtype == F
    for row, quantised, one in zip(x.view(-1, width), y.view(-1, width), scale.view(-1), strict=True):
        numbers = row.float().tolist()
        wanted = []
        for column in range(width):
            value = numbers[column] * root(numbers, 1e-5) * float(gamma[column])
            value += float(beta[column]) if biased else 0
            wanted.append(value * (float(factor[column]) if smooth else 1))
        assert math.isclose(float(one), max(map(abs, wanted)) / 127, rel_tol=1e-4, abs_tol=1e-9)
        for got, want in zip(quantised.tolist(), wanted, strict=True):
            assert abs(got * float(one) - want) <= float(one) * 0.51


def add(**over: Any) -> dict[str, Any]:
    return {"x1": draw(2, 8), "x2": draw(2, 8), "gamma": draw(8)} | over


def quant(**over: Any) -> dict[str, Any]:
    return {"x": draw(2, 8), "gamma": draw(8)} | over


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("bias-norm-beta", BIAS, add(beta=draw(7))),
    ("bias-norm-beta", BIAS, add(beta=draw(8, dtype=F))),
    ("bias-norm-epsilon", BIAS, add(epsilon=-1.0)),
    ("quant-norm-x", QUANT, quant(x=draw(2, 8, dtype=F))),
    ("quant-norm-x", QUANT, quant(x=draw(0, 8))),
    ("quant-norm-x", QUANT, quant(x=draw(1)[0])),
    ("quant-norm-gamma", QUANT, quant(gamma=draw(2, 8))),
    ("quant-norm-gamma", QUANT, quant(smooth_scale=draw(8, dtype=F))),
    ("quant-norm-epsilon", QUANT, quant(epsilon=0.0)),
]
SHARED: list[tuple[str, str, dict[str, Any]]] = [
    ("norm-dtype", BIAS, {name: torch.ones(2, 8).double() for name in ("x1", "x2", "gamma")}),
    ("norm-summands", BIAS, add(x2=draw(3, 8))),
    ("norm-gamma", BIAS, add(gamma=draw(7))),
    ("norm-empty", BIAS, add(x1=draw(0, 8), x2=draw(0, 8))),
    ("norm-gamma", GEMMA, {"x": draw(2, 8), "gamma": draw(7)}),
    ("gemma-contiguous", GEMMA, {"x": draw(8, 2).T, "gamma": draw(8)}),
]


@pytest.mark.parametrize(("rule", "op", "call"), [*REFUSED, *SHARED])
def test_it_refuses(refuses: Callable[..., None], rule: str, op: str, call: dict[str, Any]) -> None:
    refuses(rule, op, **call)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _, _ in REFUSED} == {r.id for r in RULES.values() if r.test == Path(__file__).name}
