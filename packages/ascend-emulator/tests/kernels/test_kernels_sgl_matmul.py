"""sgl_kernel_npu's product of heads against a plain loop, and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES

OP = "npu::batch_matmul_transpose"
H = torch.float16
Refuses = Callable[..., None]


def draw(*shape: int, dtype: torch.dtype = H, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def call(rows: int = 3, **over: Any) -> dict[str, Any]:
    out = torch.zeros(rows, 2, 32, dtype=H)
    return {"tensor_a": draw(rows, 2, 8), "tensor_b": draw(2, 8, 32, seed=1), "tensor_c": out} | over


@pytest.mark.parametrize("dtype", [H, torch.bfloat16])
@pytest.mark.parametrize("form", [None, "ND", "NZ"])
def test_every_head_has_its_product(dtype: torch.dtype, form: str | None) -> None:
    a, b, c = draw(3, 2, 8, dtype=dtype), draw(2, 8, 32, dtype=dtype, seed=1), torch.zeros(3, 2, 32, dtype=dtype)
    given = torch.stack(torch.split(b, 16, -1), 1) if form == "NZ" else b
    REGISTRY[OP](a, given, c, form)
    for row in range(3):
        for head in range(2):
            for column in range(32):
                want = sum(float(a[row, head, k]) * float(b[head, k, column]) for k in range(8))
                assert abs(float(c[row, head, column]) - want) <= 0.02 * max(1, abs(want))


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("bmt-dtype", {"tensor_b": draw(2, 8, 32, dtype=torch.float32)}),
    ("bmt-dtype", {"tensor_c": torch.zeros(3, 2, 32)}),
    ("bmt-shape", {"tensor_b": draw(2, 32, 8)}),
    ("bmt-shape", {"tensor_c": torch.zeros(2, 3, 32, dtype=H)}),
    ("bmt-shape", {"format_mode": "NZ"}),
    ("bmt-contiguous", {"tensor_b": draw(2, 32, 8).transpose(1, 2)}),
    ("bmt-rows", {"rows": 1025}),
    ("bmt-format", {"format_mode": "nz"}),
    ("bmt-quant", {"quant_mode": "none"}),
]


@pytest.mark.parametrize(("rule", "change"), REFUSED)
def test_it_refuses(refuses: Refuses, rule: str, change: dict[str, Any]) -> None:
    refuses(rule, OP, **call(**change))


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}
