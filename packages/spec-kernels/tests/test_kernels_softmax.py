"""Owns the proof of the wide-row softmax: every backend equals a float64 loop, and infinities stay in their place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import spec_kernels as sk
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

cases = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
INF = float("inf")


def softmax(row: list[float], temperature: float) -> list[float]:
    scaled = [value / temperature for value in row]
    top = max(scaled)
    if top == -INF:
        return [0.0] * len(row)
    weights = [math.exp(value - top) for value in scaled]
    return [weight / math.fsum(weights) for weight in weights]


@cases
@given(seed=st.integers(0, 2**32))
def test_rows(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    rows, width = numbers.randrange(0, 4), numbers.randrange(1, 150)
    logits = torch.tensor([[numbers.gauss(0, 5) for _ in range(width)] for _ in range(rows)]).view(rows, width)
    for row in logits:
        start = numbers.randrange(width)
        row[start : start + numbers.choice((0, 1, width))] = -INF
    logits = logits.to(numbers.choice((torch.float32, torch.float16)))
    heat = [numbers.choice((0.5, 1.0, 2.0)) for _ in range(rows)]
    temperatures = torch.tensor(heat).view(rows, 1) if numbers.random() < 0.7 else None
    expected = [
        softmax(row, 1.0 if temperatures is None else heat[i]) for i, row in enumerate(logits.double().tolist())
    ]
    buffer = torch.full((rows, width + 3), 7.0, device=place.device)
    placed = place.put(torch.zeros(0), logits)[1]
    given_heat = None if temperatures is None else temperatures.to(place.device)
    sk.wide_row_softmax(placed, temperatures=given_heat, out=buffer[:, :width], backend=place.backend)
    torch.testing.assert_close(
        buffer[:, :width].cpu().double(), torch.tensor(expected, dtype=torch.float64).view(rows, width), atol=1e-6,
        rtol=1e-5,
    )  # fmt: skip
    assert (buffer[:, width:] == 7.0).all()


def test_a_block_of_minus_infinity_does_not_poison_its_row(place: Any) -> None:
    """10,000 logits of which the first 4,096 are minus infinity (contracts.md A-29)."""
    logits = torch.zeros(2, 10_000, device=place.device)
    logits[:, :4096] = -INF
    logits[1] = -INF
    found = sk.wide_row_softmax(logits, backend=place.backend).cpu()
    assert not found[0, :4096].any() and not found[1].any()
    torch.testing.assert_close(found[0, 4096:], torch.full((5904,), 1 / 5904))


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, in the interpreter
@pytest.mark.parametrize("value", [float("nan"), INF])
def test_a_poisoned_row_stays_alone(place: Any, value: float) -> None:
    logits = torch.zeros(2, 5000, device=place.device)
    logits[0, 4500] = value
    found = sk.wide_row_softmax(logits, backend=place.backend).cpu()
    assert found[0, 4500].isnan() and torch.allclose(found[1], torch.tensor(1 / 5000))


def test_refusals(place: Any) -> None:
    logits = torch.zeros(2, 6, device=place.device)
    with pytest.raises(sk.ShapeError, match="temperatures"):
        sk.wide_row_softmax(logits, temperatures=torch.ones(3, device=place.device), backend=place.backend)
    with pytest.raises(sk.DtypeError, match="logits"):
        sk.wide_row_softmax(logits.int(), backend=place.backend)
    with pytest.raises(sk.AliasError, match="out, logits"):
        sk.wide_row_softmax(logits, out=logits, backend=place.backend)
    with pytest.raises(sk.ShapeError, match="apart"):
        sk.wide_row_softmax(logits, out=torch.zeros(6, 2, device=place.device).t(), backend=place.backend)


def test_the_custom_op_is_sound(opcheck: Any) -> None:
    arguments = (torch.randn(2, 9), torch.ones(2), torch.zeros(2, 9))
    opcheck(torch.ops.spec_kernels.wide_row_softmax, arguments)
