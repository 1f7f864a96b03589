"""npu_dual_level_quant_matmul against plain loops, and its refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES

OP = "npu::npu_dual_level_quant_matmul"
QUANT = "npu::npu_dynamic_dual_level_mx_quant"
SMALL = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
LOOSE = {torch.float16: 3e-3, torch.bfloat16: 2e-2}


def numbers(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(packed: torch.Tensor, outer: torch.Tensor, inner: torch.Tensor) -> list[list[float]]:
    """Values number by number. ``outer`` [rows, .], ``inner`` [rows, ., 2]."""
    out = []
    for row, data in enumerate(packed.view(torch.uint8).tolist()):
        codes = [code for byte in data for code in (byte % 16, byte // 16)]
        scales = inner[row].flatten().tolist()
        out.append(
            [
                SMALL[code % 8] * (-1 if code > 7 else 1) * 2.0 ** (scales[i // 32] - 127) * float(outer[row, i // 512])
                for i, code in enumerate(codes)
            ]
        )
    return out


@pytest.mark.parametrize("k", [2, 96, 1030])
@pytest.mark.parametrize("dtype", list(LOOSE))
@pytest.mark.parametrize("biased", [False, True])
def test_products(k: int, dtype: torch.dtype, biased: bool) -> None:
    m, n = 2, 3
    left, right = numbers(0, 256, m, k // 2, seed=1), numbers(0, 256, n, k // 2, seed=2).view(torch.int8)
    outer = draw(m, -(-k // 512), seed=3).abs(), draw(-(-k // 512), n, seed=4).abs()
    inner = numbers(124, 129, m, -(-k // 64), 2, seed=5), numbers(124, 129, n, -(-k // 64), 2, seed=6)
    bias = draw(n, seed=7) if biased else None
    number = 5 if dtype == torch.float16 else 15
    out = REGISTRY[OP](
        left, right, *outer, inner[0], inner[1].view(torch.float8_e8m0fnu), bias=bias, output_dtype=number
    )
    assert out.shape == (m, n) and out.dtype == dtype
    values = rows(left, outer[0], inner[0]), rows(right, outer[1].T, inner[1])
    for i in range(m):
        for j in range(n):
            want = math.fsum(a * b for a, b in zip(values[0][i], values[1][j], strict=True))
            want += float(bias[j]) if bias is not None else 0.0
            np.testing.assert_allclose(float(out[i, j]), want, rtol=LOOSE[dtype], atol=LOOSE[dtype] * 20)


def test_what_is_quantised_comes_back() -> None:
    x, weight = draw(3, 640).half(), draw(4, 640, seed=1).half()
    one, other = REGISTRY[QUANT](x), REGISTRY[QUANT](weight)
    out = REGISTRY[OP](one[0], other[0], one[1], other[1].T.contiguous(), one[2], other[2]).float()
    want = x.float() @ weight.float().T
    assert float((out - want).norm() / want.norm()) < 0.25


CALL: dict[str, Any] = {
    "x1": numbers(0, 9, 2, 32), "x2": numbers(0, 9, 3, 32), "x1_level0_scale": torch.ones(2, 1),
    "x2_level0_scale": torch.ones(1, 3), "x1_level1_scale": numbers(120, 130, 2, 1, 2),
    "x2_level1_scale": numbers(120, 130, 3, 1, 2),
}  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("dual-dtype", CALL | {"x1": torch.ones(2, 32)}),
    ("dual-dtype", CALL | {"x1_level0_scale": torch.ones(2, 1).half()}),
    ("dual-dtype", CALL | {"x2_level1_scale": torch.ones(3, 1, 2)}),
    ("dual-shape", CALL | {"x2": numbers(0, 9, 3, 16)}),
    ("dual-shape", CALL | {"x1": numbers(0, 9, 1)[0]}),
    ("dual-shape", CALL | {"x2_level0_scale": torch.ones(3, 1)}),
    ("dual-shape", CALL | {"x1": numbers(0, 9, 32, 2).T}),
    ("dual-bias", CALL | {"bias": torch.ones(3).half()}),
    ("dual-output", CALL | {"output_dtype": 6}),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_document_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, options = REFUSED[number]
    refuses(rule, OP, **options)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}
