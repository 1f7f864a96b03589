"""Quantisation of blocks and rotated matrices, signs from bits, and a product added, against plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, KernelNotCovered, pose
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK = "npu::npu_dynamic_block_quant"
KRONECKER = "npu::npu_kronecker_quant"
SIGNS = "npu::npu_sign_bits_unpack"
ACCUMULATE = "atb::_npu_matmul_add_fp32"
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@pytest.fixture(autouse=True)
def strictest() -> Iterator[None]:
    yield
    pose.set_pose()


def draw(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from([(1, 1), (3, 128), (2, 130), (2, 3, 256), (65, 200)]), dtype=st.sampled_from([HALF, BF16]),
    target=st.sampled_from([torch.int8, *FP8]), sizes=st.sampled_from([(1, 128), (64, 64), (128, 192)]),
    limit=st.sampled_from([0.0, 200.0]), seed=st.integers(0, 9),
)  # fmt: skip
def test_blocks(
    shape: tuple[int, ...], dtype: torch.dtype, target: torch.dtype, sizes: tuple[int, int], limit: float, seed: int
) -> None:
    pose.set_pose(chip="950")
    x = draw(*shape, dtype=dtype, seed=seed)
    x[..., 0, :] = 0
    out, scales = REGISTRY[BLOCK](x, min_scale=limit, dst_type=target, row_block_size=sizes[0], col_block_size=sizes[1])
    assert out.shape == x.shape and out.dtype == target and scales.dtype == FLOAT
    assert scales.shape == (*shape[:-2], -(-shape[-2] // sizes[0]), -(-shape[-1] // sizes[1]))
    most = FP8.get(target, 127.0)
    flat = x.reshape(-1, *shape[-2:]).double()
    for number, matrix in enumerate(flat):
        for i in range(scales.size(-2)):
            for j in range(scales.size(-1)):
                rows, columns = slice(i * sizes[0], (i + 1) * sizes[0]), slice(j * sizes[1], (j + 1) * sizes[1])
                block = matrix[rows, columns]
                want = max(abs(v) for v in block.flatten().tolist()) / most
                want = min(want, 1 / limit) if limit else want
                scale = float(scales.view(-1, *scales.shape[-2:])[number, i, j])
                assert math.isclose(scale, want, rel_tol=1e-6, abs_tol=1e-12)
                got = out.view(-1, *shape[-2:])[number][rows, columns].double()
                least = -128.0 if target == torch.int8 else -most
                exact = torch.zeros_like(block) if scale == 0 else (block / scale).clamp(least, most)
                if target == torch.int8:
                    assert bool(((got - exact).abs() <= 0.5 + 1e-4).all())
                else:
                    step = 0.25 if target == torch.float8_e5m2 else 0.125
                    assert bool(((got - exact).abs() <= exact.abs() * step / 2 + 2**-10).all())


@settings(max_examples=30, deadline=None)
@given(
    k=st.integers(1, 3), m=st.integers(1, 4), n=st.sampled_from([8, 16]), dtype=st.sampled_from([HALF, BF16]),
    clip=st.sampled_from([None, 1.0, 0.7]), seed=st.integers(0, 9),
)  # fmt: skip
def test_rotated_matrices(k: int, m: int, n: int, dtype: torch.dtype, clip: float | None, seed: int) -> None:
    x, left, right = (draw(*s, dtype=dtype, seed=seed + i) for i, s in enumerate([(k, m, n), (m, m), (n, n)]))
    x[0] = 0
    packed, scales = REGISTRY[KRONECKER](x, left, right, clip, torch.int32)
    assert packed.shape == (k, m, n // 8) and packed.dtype == torch.int32
    assert scales.shape == (k,) and scales.dtype == FLOAT
    for number in range(k):
        wide = np.zeros((m, n))
        for i in range(m):
            for j in range(n):
                terms = [
                    float(left[i, a]) * float(x[number, a, b]) * float(right[b, j]) for a in range(m) for b in range(n)
                ]
                wide[i, j] = math.fsum(terms)
        want = np.abs(wide).max() * (1.0 if clip is None else clip) / 7
        assert math.isclose(float(scales[number]), want, rel_tol=1e-4, abs_tol=1e-12)
        for i in range(m):
            for j in range(n):
                digit = int(packed[number, i, j // 8]) % 2**32 // 16 ** (j % 8) % 16
                digit = digit - 16 if digit > 7 else digit
                exact = 0.0 if want == 0 else min(7.0, max(-8.0, wide[i, j] / want))
                assert abs(digit - exact) <= 0.5 + 1e-2


@settings(max_examples=20, deadline=None)
@given(values=st.lists(st.integers(0, 255), max_size=6), dtype=st.sampled_from([HALF, FLOAT]), size=st.integers(1, 4))
def test_signs(values: list[int], dtype: torch.dtype, size: int) -> None:
    values = values * size
    out = REGISTRY[SIGNS](torch.tensor(values, dtype=torch.uint8), size, dtype)
    want = [1.0 if value >> place & 1 else -1.0 for value in values for place in range(8)]
    assert out.dtype == dtype and out.shape == (size, len(want) // size) and out.flatten().tolist() == want


@settings(max_examples=20, deadline=None)
@given(k=st.integers(0, 4), m=st.integers(1, 4), n=st.integers(1, 4), dtype=st.sampled_from([HALF, BF16]))
def test_a_product_added(k: int, m: int, n: int, dtype: torch.dtype) -> None:
    x, weight, base = draw(k, m, dtype=dtype), draw(k, n, dtype=dtype, seed=1), draw(m, n, dtype=FLOAT, seed=2)
    target = base.clone()
    assert REGISTRY[ACCUMULATE](x, weight, target) is None
    for i in range(m):
        for j in range(n):
            want = float(base[i, j]) + math.fsum(float(x[a, i]) * float(weight[a, j]) for a in range(k))
            assert math.isclose(float(target[i, j]), want, rel_tol=1e-5, abs_tol=1e-5)


X = draw(2, 128)
K3 = [draw(2, 3, 16), draw(3, 3), draw(16, 16)]
BYTES = torch.zeros(4, dtype=torch.uint8)
TALL = torch.zeros(1, 1, 1).half()


def kronecker(k: int, m: int = 1, n: int = 8) -> list[Any]:
    return [TALL.expand(k, m, n), TALL[0].expand(m, m), TALL[0].expand(n, n)]


REFUSED: list[tuple[str, str, list[Any], dict[str, Any]]] = [
    ("block-input", BLOCK, [X[0]], {}),
    ("block-input", BLOCK, [X[:0]], {}),
    ("block-input", BLOCK, [X.double()], {}),
    ("block-min", BLOCK, [X], {"min_scale": -1.0}),
    ("block-round", BLOCK, [X], {"round_mode": "round"}),
    ("block-int8", BLOCK, [X], {"dst_type": torch.float8_e4m3fn}),
    ("block-int8", BLOCK, [X.float()], {}),
    ("block-sizes", BLOCK, [X], {"row_block_size": 2}),
    ("block-sizes", BLOCK, [X], {"col_block_size": 32}),
    ("block-row", BLOCK, [X], {"row_block_size": 128}),
    ("kronecker-dtype", KRONECKER, [x.float() for x in K3], {}),
    ("kronecker-dtype", KRONECKER, [K3[0], K3[1], K3[2].bfloat16()], {}),
    ("kronecker-shape", KRONECKER, [K3[0], K3[2], K3[1]], {}),
    ("kronecker-shape", KRONECKER, [draw(2, 3, 4), draw(3, 3), draw(4, 4)], {}),
    ("kronecker-clip", KRONECKER, K3, {"clip_ratio": 0.0}),
    ("kronecker-clip", KRONECKER, K3, {"clip_ratio": 1.5}),
    ("kronecker-max", KRONECKER, K3, {"dst_type_max": 5.0}),
    ("kronecker-rows-82", KRONECKER, kronecker(8193), {}),
    ("kronecker-size-83", KRONECKER, kronecker(1, n=136), {}),
    ("signs-input", SIGNS, [BYTES.to(torch.int8), 1, FLOAT], {}),
    ("signs-input", SIGNS, [BYTES.view(2, 2), 1, FLOAT], {}),
    ("signs-dtype", SIGNS, [BYTES, 1, BF16], {}),
    ("signs-size", SIGNS, [BYTES, 3, FLOAT], {}),
    ("signs-size", SIGNS, [BYTES, 0, FLOAT], {}),
    ("accumulate-dtype", ACCUMULATE, [X, X.bfloat16(), torch.zeros(128, 128)], {}),
    ("accumulate-dtype", ACCUMULATE, [X, X, torch.zeros(128, 128).half()], {}),
    ("accumulate-shape", ACCUMULATE, [X, X.T.contiguous(), torch.zeros(128, 2)], {}),
    ("accumulate-shape", ACCUMULATE, [X, X[:, :2], torch.zeros(2, 128).T], {}),
]
LATER = [
    ("8.3", "kronecker-rows-83", kronecker(32769)),
    ("8.5", "kronecker-rows", kronecker(262145)),
    ("8.5", "kronecker-size", kronecker(1, m=257)),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, op, arguments, options = REFUSED[number]
    refuses(rule, op, *arguments, **options)


@pytest.mark.parametrize(("cann", "rule", "arguments"), LATER)
def test_later_releases_take_more(cann: str, rule: str, arguments: list[Any], refuses: Callable[..., None]) -> None:
    pose.set_pose(cann=cann)
    refuses(rule, KRONECKER, *arguments)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    broken = {rule for rule, *_ in REFUSED} | {rule for _, rule, _ in LATER}
    assert broken == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


@pytest.mark.parametrize(
    ("op", "arguments", "options"),
    [
        (BLOCK, [X], {"dst_type": 290}),
        (BLOCK, [X], {"dst_type_max": 100.0}),
        (KRONECKER, K3, {"dst_dtype": 296}),
        (KRONECKER, K3, {"dst_type_max": 6.0}),
    ],
)
def test_forms_that_are_not_computed_say_so(op: str, arguments: list[Any], options: dict[str, Any]) -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[op](*arguments, **options)
