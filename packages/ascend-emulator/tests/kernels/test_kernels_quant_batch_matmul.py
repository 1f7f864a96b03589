"""npu_transpose_quant_batchmatmul against plain loops, and its refusals."""

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

OP = "npu::npu_transpose_quant_batchmatmul"
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
NUMBER = {torch.float16: 5, torch.bfloat16: 15}
LOOSE = {torch.float16: 3e-3, torch.bfloat16: 2e-2}
PERMS: dict[str, Any] = {"perm_x1": [1, 0, 2], "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]}


def draw(*shape: int, dtype: torch.dtype = E4M3, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exponents(*shape: int, seed: int = 0) -> torch.Tensor:
    numbers = torch.randint(125, 130, shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(torch.uint8).view(E8M0)


@settings(max_examples=20, deadline=None)
@given(
    m=st.integers(1, 3), b=st.integers(1, 2), k=st.sampled_from([64, 128]), n=st.integers(1, 3), turned=st.booleans(),
    dtype=st.sampled_from(list(NUMBER)), seed=st.integers(0, 9),
)  # fmt: skip
def test_scales_of_blocks(m: int, b: int, k: int, n: int, turned: bool, dtype: torch.dtype, seed: int) -> None:
    x1, x2 = draw(m, b, k, seed=seed), draw(b, n, k, seed=seed + 1)
    first, second = exponents(m, b, k // 64, 2, seed=seed + 2), exponents(b, n, k // 64, 2, seed=seed + 3)
    options = PERMS | {"perm_x2": [0, 2, 1] if turned else [0, 1, 2]}
    out = REGISTRY[OP](
        x1, x2 if turned else x2.transpose(1, 2).contiguous(), NUMBER[dtype], group_sizes=[0, 0, 32], x1_scale=first,
        x2_scale=second if turned else second.transpose(1, 2).contiguous(), **options,
    )  # fmt: skip
    assert out.shape == (m, b, n) and out.dtype == dtype
    powers = [2.0 ** (part.view(torch.uint8).double().flatten(-2) - 127) for part in (first, second)]
    for row in range(m):
        for batch in range(b):
            for column in range(n):
                terms = [
                    float(x1[row, batch, i]) * float(powers[0][row, batch, i // 32])
                    * float(x2[batch, column, i]) * float(powers[1][batch, column, i // 32])
                    for i in range(k)
                ]  # fmt: skip
                want = math.fsum(terms)
                np.testing.assert_allclose(
                    float(out[row, batch, column]), want, rtol=LOOSE[dtype], atol=LOOSE[dtype] * 9
                )


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
@pytest.mark.parametrize("dtype", list(NUMBER))
def test_scales_of_rows_and_columns(dtypes: tuple[torch.dtype, torch.dtype], dtype: torch.dtype) -> None:
    x1, x2 = draw(2, 3, 512, dtype=dtypes[0]), draw(3, 512, 128, dtype=dtypes[1], seed=1)
    rows, columns = draw(2, dtype=torch.float32, seed=2), draw(128, dtype=torch.float32, seed=3)
    out = REGISTRY[OP](x1, x2, NUMBER[dtype], x1_scale=rows, x2_scale=columns, **PERMS)
    assert out.shape == (2, 3, 128) and out.dtype == dtype
    for row in range(2):
        for batch in range(3):
            for column in (0, 77, 127):
                left, right = x1[row, batch].double().tolist(), x2[batch, :, column].double().tolist()
                want = math.fsum(a * b for a, b in zip(left, right, strict=True))
                want *= float(rows[row]) * float(columns[column])
                np.testing.assert_allclose(
                    float(out[row, batch, column]), want, rtol=LOOSE[dtype], atol=LOOSE[dtype] * 9
                )


def blocks(**over: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "x1": draw(2, 3, 64), "x2": draw(3, 64, 5), "dtype": 15, "x1_scale": exponents(2, 3, 1, 2),
        "x2_scale": exponents(3, 1, 5, 2), "group_sizes": [0, 0, 32],
    }  # fmt: skip
    return PERMS | options | over


def channels(**over: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"x1": draw(2, 3, 512), "x2": draw(3, 512, 128), "dtype": 15}
    return PERMS | options | {"x1_scale": torch.ones(2), "x2_scale": torch.ones(128)} | over


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tqbm-dtype", blocks(x1=draw(2, 3, 64, dtype=torch.float16))),
    ("tqbm-dtype", blocks(x2=draw(3, 64, 5, dtype=E5M2))),
    ("tqbm-shape", blocks(x1=draw(6, 64))),
    ("tqbm-shape", blocks(x2=draw(2, 64, 5))),
    ("tqbm-shape", blocks(perm_x2=[0, 2, 1])),
    ("tqbm-perm", blocks(perm_x1=None)),
    ("tqbm-perm", blocks(perm_y=[0, 1, 2])),
    ("tqbm-output", blocks(dtype=6)),
    ("tqbm-bias", blocks(bias=torch.zeros(5))),
    ("tqbm-split", blocks(batch_split_factor=3)),
    ("tqbm-channel", channels(x1_scale=None)),
    ("tqbm-channel", channels(x2_scale=torch.ones(1))),
    ("tqbm-channel", channels(x1=draw(2, 3, 64), x2=draw(3, 64, 128))),
    ("tqbm-blocks", blocks(x1_scale=exponents(2, 3, 2, 1))),
    ("tqbm-blocks", blocks(x2_scale=torch.ones(3, 1, 5, 2))),
    ("tqbm-group", blocks(group_sizes=None)),
    ("tqbm-group", blocks(group_sizes=[0, 0, 64])),
    ("tqbm-group", channels(group_sizes=[0, 0, 32])),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_document_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, options = REFUSED[number]
    refuses(rule, OP, **options)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


def test_calls_within_the_document_are_taken() -> None:
    for options in (blocks(), channels(), blocks(x1_dtype=292, x2_dtype=24)):
        REGISTRY[OP](**options)


def test_hifloat8_is_not_computed() -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[OP](**blocks(x1_dtype=290))
