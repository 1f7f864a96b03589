"""Microscaling quantisation against plain loops over exact numbers, and its refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, KernelNotCovered
from hypothesis import given, settings
from hypothesis import strategies as st

MX = "npu::npu_dynamic_mx_quant"
NORM = "npu::npu_rms_norm_dynamic_mx_quant"
ADD = "npu::npu_add_rms_norm_dynamic_mx_quant"
DUAL = "npu::npu_dynamic_dual_level_mx_quant"
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
E5M2, E4M3, E2M1 = 23, 24, 296
EMAX = {E5M2: 15, E4M3: 8, E2M1: 2}
MOST = {E5M2: 57344.0, E4M3: 448.0, E2M1: 6.0}
SMALL = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
GRID = sorted({sign * value for value in SMALL for sign in (1, -1)})


def draw(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def decoded(y: torch.Tensor, target: int) -> torch.Tensor:
    """Numbers of a result, byte by byte for 4-bit ones."""
    if target != E2M1:
        return y.double()
    rows = y.reshape(-1, y.size(-1)).tolist()
    codes = [[code for byte in row for code in (byte % 16, byte // 16)] for row in rows]
    values = [[SMALL[code % 8] * (-1 if code > 7 else 1) for code in row] for row in codes]
    return torch.tensor(values, dtype=torch.float64).view(*y.shape[:-1], -1)


def exponent_of(largest: float, target: int, algorithm: int) -> int:
    """Exponent of a block's scale."""
    if largest == 0:
        return -127
    if algorithm == 0:
        return max(-127, math.frexp(largest)[1] - 1 - EMAX[target])
    need = Fraction(torch.tensor(largest / MOST[target], dtype=FLOAT).item())
    power = -127
    while Fraction(2) ** power < need:
        power += 1
    return power


def right(got: float, exact: float, target: int, mode: str) -> bool:
    """Whether a number is what an exact one rounds to."""
    exact = max(-MOST[target], min(MOST[target], exact))
    if target != E2M1:
        want = torch.tensor(exact, dtype=FLOAT).to(torch.float8_e5m2 if target == E5M2 else torch.float8_e4m3fn)
        return got == float(want)
    if mode == "floor":
        return got == max(v for v in GRID if v <= exact)
    distance = min(abs(v - exact) for v in GRID)
    near = [v for v in GRID if abs(v - exact) == distance]
    if mode == "round":
        return got == max(near, key=abs)
    return got in near and (len(near) == 1 or SMALL.index(abs(got)) % 2 == 0)


def check_rows(
    y: torch.Tensor, pairs: torch.Tensor, x: torch.Tensor, target: int, algorithm: int, mode: str, block: int
) -> None:
    """``y``, ``x`` [rows, n]; ``pairs`` [rows, ., 2]."""
    count = -(-x.size(1) // block)
    assert pairs.dtype == torch.uint8 and pairs.shape == (x.size(0), -(-count // 2), 2)
    for row, values in enumerate(x.double().tolist()):
        scales = pairs[row].flatten().tolist()
        assert scales[count:] == [0] * (count % 2)
        for number in range(count):
            part = values[number * block : (number + 1) * block]
            power = exponent_of(max(map(abs, part)), target, algorithm)
            assert scales[number] == power + 127
            for place, value in enumerate(part):
                got = float(y[row, number * block + place])
                assert right(got, value / 2.0**power, target, mode), (got, value, power)


@settings(max_examples=60, deadline=None)
@given(
    n=st.sampled_from([2, 32, 66, 130]), dtype=st.sampled_from([HALF, BF16]),
    form=st.sampled_from([
        (E5M2, 0, "rint"), (E5M2, 1, "rint"), (E4M3, 0, "rint"), (E4M3, 1, "rint"), (E2M1, 0, "rint"),
        (E2M1, 0, "floor"), (E2M1, 0, "round"),
    ]),
    block=st.sampled_from([32, 64]), seed=st.integers(0, 9),
)  # fmt: skip
def test_the_last_axis(n: int, dtype: torch.dtype, form: tuple[int, int, str], block: int, seed: int) -> None:
    target, algorithm, mode = form
    x = draw(3, n, dtype=dtype, seed=seed)
    x[0] = 0
    x[1] = (x[1] * 2).round() / 4  # halfway between 4-bit numbers
    y, pairs = REGISTRY[MX](x, dst_type=target, scale_alg=algorithm, round_mode=mode, block_size=block)
    check_rows(decoded(y, target), pairs, x, target, algorithm, mode, block)


@pytest.mark.parametrize("axis", [0, 1, -2])
@pytest.mark.parametrize("target", [E4M3, E2M1])
def test_another_axis(axis: int, target: int) -> None:
    x = draw(40, 70, 4)
    y, pairs = REGISTRY[MX](x, axis=axis, dst_type=target)
    count = -(-x.size(axis) // 32)
    shape = list(x.shape)
    shape[axis] = -(-count // 2)
    assert pairs.shape == (*shape, 2)
    values = decoded(y, target)
    assert values.shape == x.shape
    for other in range(x.size(1 if axis == 0 else 0)):
        for last in range(4):
            at = (slice(None), other, last) if axis == 0 else (other, slice(None), last)
            check_rows(values[at][None], pairs[at][None], x[at][None], target, 0, "rint", 32)


@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_behind_a_norm(dtype: torch.dtype, wide: bool, shifted: bool) -> None:
    x1, x2 = draw(2, 3, 40, dtype=dtype), draw(2, 3, 40, dtype=dtype, seed=1)
    gamma = draw(40, dtype=FLOAT if wide else dtype, seed=2)
    beta = draw(40, dtype=gamma.dtype, seed=3) if shifted else None
    y, total, pairs, root = REGISTRY[ADD](x1, x2, gamma, beta=beta, dst_type=E4M3, epsilon=1e-3)
    assert torch.equal(total, x1 + x2) and root.shape == (2, 3, 1) and root.dtype == FLOAT
    alone = REGISTRY[NORM](total, gamma, beta=beta, dst_type=E4M3, epsilon=1e-3)
    for one, other in zip(alone, (y, pairs, root), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    scales = pairs.flatten(-2)
    for i in range(2):
        for j in range(3):
            row = total[i, j].double().tolist()
            want = 1 / math.sqrt(math.fsum(v * v for v in row) / 40 + 1e-3)
            assert math.isclose(float(root[i, j]), want, rel_tol=1e-5)
            for place, value in enumerate(row):
                exact = value * want * float(gamma[place]) + (float(beta[place]) if beta is not None else 0.0)
                step = 2.0 ** (int(scales[i, j, place // 32]) - 127)
                got = float(y[i, j, place].float()) * step
                assert abs(got - exact) <= abs(exact) / 8 + step * 2**-9 + 1e-5


@settings(max_examples=20, deadline=None)
@given(
    n=st.sampled_from([2, 64, 520]), dtype=st.sampled_from([HALF, BF16]),
    mode=st.sampled_from(["rint", "round", "floor"]),
)  # fmt: skip
def test_two_levels(n: int, dtype: torch.dtype, mode: str) -> None:
    x = draw(2, n, dtype=dtype)
    x[0] = 0
    y, outer, pairs = REGISTRY[DUAL](x, round_mode=mode)
    assert outer.dtype == FLOAT and outer.shape == (2, -(-n // 512)) and y.dtype == torch.uint8
    inner = torch.zeros_like(x)
    for row in range(2):
        for number in range(outer.size(1)):
            part = x[row, 512 * number : 512 * number + 512]
            assert math.isclose(float(outer[row, number]), float(part.abs().max()) / 6, rel_tol=1e-6)
            if outer[row, number]:
                inner[row, 512 * number : 512 * number + 512] = (part.float() / outer[row, number]).to(dtype)
    check_rows(decoded(y, E2M1), pairs, inner, E2M1, 0, mode, 32)


X, GAMMA = draw(2, 64), draw(64)
REFUSED: list[tuple[str, str, list[Any], dict[str, Any]]] = [
    ("mx-input", MX, [X.double()], {}),
    ("mx-input", MX, [draw(*[1] * 7, 2)], {}),
    ("mx-input", MX, [X.float()[:, :16]], {}),
    ("mx-input", MX, [X.float()], {"block_size": 64}),
    ("mx-type", MX, [X], {"dst_type": 1}),
    ("mx-type", NORM, [X, GAMMA], {"dst_type": 1}),
    ("mx-even", MX, [X[:, :33]], {}),
    ("mx-round", MX, [X], {"dst_type": E4M3, "round_mode": "round"}),
    ("mx-round", MX, [X], {"round_mode": "ceil"}),
    ("mx-algorithm", MX, [X], {"scale_alg": 1}),
    ("mx-algorithm", ADD, [X, X, GAMMA], {"scale_alg": 2, "dst_type": E5M2}),
    ("mx-axis", MX, [X], {"axis": 2}),
    ("mx-block", MX, [X], {"block_size": 48}),
    ("mx-block", MX, [X], {"block_size": 2048}),
    ("mx-max", MX, [X], {"dst_type_max": 5.0}),
    ("mx-max", MX, [X], {"dst_type_max": 6.0, "dst_type": E4M3}),
    ("mx-norm-input", NORM, [X.float(), GAMMA], {}),
    ("mx-norm-input", ADD, [X, X.bfloat16(), GAMMA], {}),
    ("mx-norm-gamma", NORM, [X, GAMMA[:32]], {}),
    ("mx-norm-gamma", NORM, [X, GAMMA.bfloat16()], {}),
    ("mx-norm-gamma", NORM, [X, GAMMA], {"beta": GAMMA.float()}),
    ("mx-dual-input", DUAL, [X.float()], {}),
    ("mx-dual-input", DUAL, [X[:, :3]], {}),
    ("mx-dual-smooth", DUAL, [X], {"smooth_scale": GAMMA}),
    ("mx-dual-round", DUAL, [X], {"round_mode": "ceil"}),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, op, arguments, options = REFUSED[number]
    refuses(rule, op, *arguments, **options)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, *_ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


@pytest.mark.parametrize(
    "options", [{"dst_type": 297}, {"scale_alg": 2}, {"dst_type_max": 6.0}, {"max_low_bound": 1.0}]
)
def test_forms_that_are_not_computed_say_so(options: dict[str, Any]) -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[MX](X, **options)


def test_no_rows_have_no_scales() -> None:
    numbers, scales = REGISTRY["npu::npu_dynamic_mx_quant"](torch.zeros(0, 40, dtype=torch.float16), dst_type=24)
    assert (numbers.shape, scales.shape) == ((0, 40), (0, 1, 2))
