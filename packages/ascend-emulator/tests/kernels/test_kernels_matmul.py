"""Quantised, grouped and transposed products against plain loops, and their refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, KernelNotCovered, pose
from ascend_emulator.poison import is_poisoned
from hypothesis import given, settings
from hypothesis import strategies as st

QMM = "npu::npu_quant_matmul"
GMM = "npu::npu_grouped_matmul"
TBM = "npu::npu_transpose_batchmatmul"
WQM = "npu::npu_weight_quant_batchmatmul"
GSQ = "npu::npu_grouped_matmul_swiglu_quant"
LOOSE = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}
NUMBER = {torch.int8: 1, torch.int32: 3, torch.float16: 5, torch.bfloat16: 15}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bytes_(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


def dot(row: torch.Tensor, column: torch.Tensor) -> float:
    return math.fsum(float(a) * float(b) for a, b in zip(row, column, strict=True))


def close(got: torch.Tensor, want: float) -> None:
    if got.dtype == torch.int8:
        assert abs(float(got) - max(-128.0, min(127.0, want))) <= 0.5 + 1e-3 + 1e-5 * abs(want)
    elif got.dtype == torch.int32:
        assert int(got) == want
    else:
        np.testing.assert_allclose(float(got), want, rtol=LOOSE[got.dtype], atol=LOOSE[got.dtype] * 3)


FORMS = [
    (torch.int8, torch.float32, False, None), (torch.int8, torch.float32, False, torch.int32),
    (torch.int32, torch.bfloat16, False, torch.int32), (torch.bfloat16, torch.bfloat16, True, torch.bfloat16),
    (torch.bfloat16, torch.float32, False, torch.float32), (torch.float16, torch.float32, True, torch.int32),
    (torch.float16, torch.float32, False, None), (torch.float16, torch.float32, True, torch.float32),
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    batch=st.sampled_from([((), ()), ((2,), (2,)), ((2,), ()), ((), (2,)), ((2, 1), (1, 3))]),
    one=st.booleans(),
    offset=st.booleans(),
)
def test_quant_matmul(
    form: tuple[torch.dtype, torch.dtype, bool, torch.dtype | None],
    batch: tuple[tuple[int, ...], tuple[int, ...]],
    one: bool,
    offset: bool,
) -> None:
    dtype, scale_dtype, rows, bias_dtype = form
    m, k, n = 3, 5, 4
    x1, x2 = bytes_(*batch[0], m, k), bytes_(*batch[1], k, n, seed=1)
    scale = (draw(1 if one else n, seed=2) * 1e-3).to(scale_dtype)
    pertoken = draw(m, seed=3).abs() if rows else None
    bias = None if bias_dtype is None else (draw(n, seed=4) * 50).to(bias_dtype)
    shift = draw(n, seed=5) if offset and dtype == torch.int8 else None
    out = REGISTRY[QMM](
        x1, x2, scale, offset=shift, pertoken_scale=pertoken, bias=bias,
        output_dtype=None if dtype == torch.int8 else NUMBER[dtype],
    )  # fmt: skip
    shape = np.broadcast_shapes(batch[0], batch[1])
    assert out.dtype == dtype and out.shape == (*shape, m, n)
    left, right = x1.expand(*shape, m, k), x2.expand(*shape, k, n)
    for at in np.ndindex(*out.shape):
        i, j = at[-2:]
        value = dot(left[at[:-1]], right[at[:-2]][:, j])
        if bias is not None and bias_dtype == torch.int32:
            value += int(bias[j])
        if dtype != torch.int32:
            value *= float(scale[0 if one else j])
            value *= 1.0 if pertoken is None else float(pertoken[i])
            value += float(bias[j]) if bias is not None and bias_dtype != torch.int32 else 0.0
            value += 0.0 if shift is None else float(shift[j])
        close(out[at], value)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.int8]),
    kind=st.sampled_from([0, 1, 2]),
    stacked=st.booleans(),
    rows=st.booleans(),
    bias=st.booleans(),
    split=st.sampled_from([0, 2, 3]),
    listed=st.booleans(),
)
def test_grouped_matmul(
    dtype: torch.dtype, kind: int, stacked: bool, rows: bool, bias: bool, split: int, listed: bool
) -> None:
    counts, m, k, n = [2, 0, 3], 6, 4, 5
    integer = dtype == torch.int8
    x = bytes_(m, k) if integer else draw(m, k, dtype=dtype)
    weights = [bytes_(k, n, seed=i) if integer else draw(k, n, dtype=dtype, seed=i) for i in (1, 2, 3)]
    options: dict[str, Any] = {"split_item": split}
    shift_dtype = torch.int32 if integer else torch.float32
    shifts = [(draw(n, seed=9 + i) * 30).to(shift_dtype) for i in range(3)] if bias else None
    scales = [draw(n, seed=4 + i) * 1e-2 for i in range(3)] if integer else None
    factors = draw(m, seed=8).abs() if integer and rows else None

    def lists(parts: list[torch.Tensor] | None) -> list[torch.Tensor] | None:
        return None if parts is None else [torch.stack(parts)] if stacked else parts

    options |= {"bias": lists(shifts), "scale": lists(scales)}
    options["per_token_scale"] = None if factors is None else [factors]
    if integer:
        options["output_dtype"] = NUMBER[torch.bfloat16]
    ends = [2, 2, 5]
    if listed:
        outs = REGISTRY[f"{GMM}.List"]([x], lists(weights), group_list=ends, **options)
    else:
        groups = {0: ends, 1: counts, 2: [[0, 2], [1, 0], [2, 3]]}[kind]
        options |= {"group_type": 0, "group_list_type": kind}
        outs = REGISTRY[GMM]([x], lists(weights), group_list=torch.tensor(groups), **options)
    assert len(outs) == (3 if split == 0 else 1)
    whole = torch.cat(outs) if split == 0 else outs[0]
    assert whole.size(0) == (5 if split == 0 else 6)
    for row in range(5):
        group = 0 if row < 2 else 2
        for j in range(n):
            value = dot(x[row], weights[group][:, j])
            shift = 0.0 if shifts is None else float(shifts[group][j])
            value += shift if integer else 0.0
            value *= float(scales[group][j]) if scales else 1.0
            value *= 1.0 if factors is None else float(factors[row])
            close(whole[row, j], value + (0.0 if integer else shift))
    assert split == 0 or bool(whole[5:].isnan().all())


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    form=st.sampled_from(["one", "columns", "row", "groups"]),
    shifted=st.booleans(),
    bias=st.booleans(),
)
def test_weight_quant_batchmatmul(dtype: torch.dtype, form: str, shifted: bool, bias: bool) -> None:
    k, n = 40, 3
    x, weight = draw(2, k, dtype=dtype), bytes_(k, n)
    shape = {"one": (1,), "columns": (n,), "row": (1, n), "groups": (2, n)}[form]
    scale, shift = (draw(*shape, seed=1) * 1e-2).to(dtype), draw(*shape, dtype=dtype, seed=2)
    add = draw(n, dtype=torch.float16 if dtype == torch.float16 else torch.float32, seed=3)
    out = REGISTRY[WQM](
        x, weight, scale, shift if shifted else None, None, None, add if bias else None, 32 if form == "groups" else 0
    )
    assert out.shape == (2, n) and out.dtype == dtype

    def at(tensor: torch.Tensor, i: int, j: int) -> float:
        row = tensor.view(-1, tensor.size(-1))[i // 32 if form == "groups" else 0]
        return float(row[j if row.numel() > 1 else 0])

    for m in range(2):
        for j in range(n):
            column = [(float(weight[i, j]) + (at(shift, i, j) if shifted else 0.0)) * at(scale, i, j) for i in range(k)]
            value = math.fsum(float(a) * b for a, b in zip(x[m], column, strict=True))
            close(out[m, j], value + (float(add[j]) if bias else 0.0))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 0], [6, 0, 0]])
def test_grouped_matmul_swiglu_quant(version: int, counts: list[int]) -> None:
    m, k, n = 6, 5, 4
    x, weight = bytes_(m, k), bytes_(3, k, 2 * n, seed=1)
    scale, rows = draw(3, 2 * n, seed=2) * 1e-3, draw(m, seed=3).abs()
    if version == 1:
        groups = torch.tensor(counts).cumsum(0)
        out, scales, _ = REGISTRY[GSQ](x, weight, groups, scale, rows)
    else:
        out, scales = REGISTRY[f"{GSQ}_v2"](x, [weight], [scale], rows, torch.tensor(counts), group_list_type=1)
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    for row, expert in enumerate(owners):
        values = [dot(x[row], weight[expert][:, j]) * float(scale[expert, j] * rows[row]) for j in range(2 * n)]
        gated = [g / (1 + math.exp(-g)) * v for g, v in zip(values[:n], values[n:], strict=True)]
        top = max(abs(v) for v in gated) / 127
        np.testing.assert_allclose(float(scales[row]), top, rtol=1e-4)
        for j in range(n):
            close(out[row, j], gated[j] / top)
    assert bool(is_poisoned(out[len(owners) :]).all()) and bool(scales[len(owners) :].isnan().all())


@pytest.mark.parametrize("split", [0, 3])
def test_grouped_matmul_of_pairs(split: int) -> None:
    xs = [draw(2, 3, seed=1), draw(1, 4, seed=2)]
    weights = [draw(3, 5, seed=3), draw(4, 5, seed=4)]
    outs = REGISTRY[GMM](xs, weights, group_type=-1, split_item=split)
    whole = torch.cat(outs)
    assert len(outs) == (2 if split == 0 else 1)
    for at, (pair, row) in enumerate([(0, 0), (0, 1), (1, 0)]):
        for j in range(5):
            close(whole[at, j], dot(xs[pair][row], weights[pair][:, j]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("flipped", [False, True])
def test_transpose_batchmatmul(dtype: torch.dtype, turned: bool, factor: int, flipped: bool) -> None:
    b, m, k, n = 4, 2, 16, 16
    x, weight = draw(b, m, k, dtype=dtype), draw(b, k, n, dtype=dtype, seed=1)
    options: dict[str, Any] = {"perm_x1": [1, 0, 2] if turned else None, "batch_split_factor": factor}
    if flipped:
        options["perm_x2"] = [0, 2, 1]
        pose.set_pose(cann="8.5")
    given_x = x.transpose(0, 1).contiguous() if turned else x
    given_w = weight.transpose(1, 2).contiguous() if flipped else weight
    try:
        out = REGISTRY[TBM](given_x, given_w, perm_y=[1, 0, 2], **options)
    finally:
        pose.set_pose()
    assert out.shape == ((m, b, n) if factor == 1 else (factor, m, b * n // factor)) and out.dtype == dtype
    for i, row, j in np.ndindex(b, m, n):
        at = (row, i, j) if factor == 1 else (i // (b // factor), row, i % (b // factor) * n + j)
        close(out[at], dot(x[i, row], weight[i][:, j]))


Call = tuple[str, dict[str, Any]]
F = torch.float32


def qmm(**over: Any) -> Call:
    return QMM, {"x1": bytes_(3, 4), "x2": bytes_(4, 5), "scale": torch.ones(5)} | over


def gmm(**over: Any) -> Call:
    options = {"x": [draw(4, 3)], "weight": [draw(2, 3, 5)], "group_list": torch.tensor([1, 4]), "group_type": 0}
    return GMM, options | over


def gmm8(**over: Any) -> Call:
    options = {"x": [bytes_(4, 3)], "weight": [bytes_(2, 3, 5)], "scale": [torch.ones(2, 5)], "output_dtype": 15}
    return GMM, gmm()[1] | options | over


def gmm4(**over: Any) -> Call:
    options = {"x": [draw(4, 8).half()], "weight": [bytes_(2, 8, 2).int()]}
    return GMM, gmm()[1] | options | {"antiquant_scale": [draw(2, 16).half()]} | over


def tbm(**over: Any) -> Call:
    return TBM, {"input": draw(2, 3, 16), "weight": draw(2, 16, 16)} | over


def wqm(**over: Any) -> Call:
    options = {"x": draw(2, 64).half(), "weight": bytes_(64, 5), "antiquant_scale": torch.ones(5).half()}
    return WQM, options | over


def gsq(**over: Any) -> Call:
    options = {"x": bytes_(4, 3), "weight": bytes_(2, 3, 6), "group_list": torch.tensor([1, 4])}
    return GSQ, options | {"weight_scale": torch.ones(2, 6), "x_scale": torch.ones(4)} | over


def gsq2(**over: Any) -> Call:
    _, options = gsq()
    options |= {"weight": [options["weight"]], "weight_scale": [options["weight_scale"]]}
    return f"{GSQ}_v2", options | over


REFUSED: list[tuple[str, Callable[[], Call]]] = [
    ("qmm-dtype", lambda: qmm(x1=draw(3, 4))),
    ("qmm-dtype", lambda: qmm(x2=bytes_(4, 5).int())),
    ("qmm-packed", lambda: qmm(x1=bytes_(3, 4).int(), x2=bytes_(4, 5).int())),
    ("qmm-packed", lambda: qmm(x1=bytes_(8, 2).int().T, x2=bytes_(64, 1).int())),
    ("qmm-rank", lambda: qmm(x2=bytes_(5, 4))),
    ("qmm-rank", lambda: qmm(x1=bytes_(4))),
    ("qmm-rank", lambda: qmm(x2=bytes_(4))),
    ("qmm-last", lambda: qmm(x1=bytes_(1, 65536), x2=bytes_(65536, 1), scale=torch.ones(1))),
    ("qmm-scale", lambda: qmm(scale=torch.ones(3))),
    ("qmm-scale", lambda: qmm(scale=torch.ones(5).half())),
    ("qmm-pertoken", lambda: qmm(pertoken_scale=torch.ones(5), output_dtype=15)),
    ("qmm-offset", lambda: qmm(offset=torch.ones(5), output_dtype=5)),
    ("qmm-bias", lambda: qmm(bias=torch.ones(3).int())),
    ("qmm-combination", lambda: qmm(pertoken_scale=torch.ones(3))),
    ("qmm-combination", lambda: qmm(scale=torch.ones(5).bfloat16(), output_dtype=5)),
    ("qmm-combination", lambda: qmm(bias=torch.ones(5), output_dtype=5)),
    ("qmm-combination", lambda: qmm(scale=torch.ones(5).long(), output_dtype=15)),
    ("qmm-combination", lambda: qmm(scale=torch.ones(5).long(), output_dtype=5, pertoken_scale=torch.ones(3))),
    ("gmm-antiquant", lambda: gmm(antiquant_scale=[draw(2, 5)])),
    ("gmm-antiquant", lambda: gmm4(antiquant_scale=[draw(2, 3, 16).half()])),
    ("gmm-antiquant", lambda: gmm4(antiquant_scale=[draw(2, 8).half()])),
    ("gmm-antiquant", lambda: gmm4(antiquant_offset=[draw(2, 8).half()])),
    ("gmm-lists", lambda: gmm4(antiquant_scale=[draw(2, 16).half()] * 2)),
    ("gmm-lists", lambda: gmm(x=[])),
    ("gmm-lists", lambda: gmm(bias=[draw(5)] * 2)),
    ("gmm-dtype", lambda: gmm(weight=[draw(2, 3, 5).half()])),
    ("gmm-dtype", lambda: gmm(x=[draw(4, 3).double()])),
    ("gmm-shape", lambda: gmm(weight=[draw(2, 4, 5)])),
    ("gmm-shape", lambda: gmm(x=[draw(2, 2, 3)])),
    ("gmm-type", lambda: gmm(group_type=-1)),
    ("gmm-type", lambda: gmm(group_list=None)),
    ("gmm-type", lambda: gmm(group_type=-1, group_list=None, weight=[draw(4, 5)])),
    ("gmm-split", lambda: gmm(split_item=4)),
    ("gmm-list", lambda: gmm(group_list=torch.tensor([1, 4]).int())),
    ("gmm-list", lambda: gmm(group_list=torch.tensor([1, 2, 4]))),
    ("gmm-list", lambda: gmm(group_list_type=3)),
    ("gmm-list", lambda: gmm(weight=[draw(1, 3, 5)], group_list=torch.tensor([4]), group_list_type=1)),
    ("gmm-reserved", lambda: gmm(offset=[draw(5)])),
    ("gmm-scale", lambda: gmm(scale=[draw(2, 5)])),
    ("gmm-scale", lambda: gmm8(scale=None)),
    ("gmm-scale", lambda: gmm8(scale=[draw(2, 4)])),
    ("gmm-scale", lambda: gmm8(per_token_scale=[torch.ones(3)])),
    ("gmm-output", lambda: gmm(output_dtype=5)),
    ("gmm-output", lambda: gmm8(output_dtype=None)),
    ("wqm-x", lambda: wqm(x=draw(2, 64))),
    ("wqm-weight", lambda: wqm(weight=bytes_(32, 5))),
    ("wqm-weight", lambda: wqm(weight=bytes_(64, 2).int()[:, :1])),
    ("wqm-scale", lambda: wqm(antiquant_scale=torch.ones(5))),
    ("wqm-scale", lambda: wqm(antiquant_offset=torch.ones(1).half())),
    ("wqm-scale", lambda: wqm(antiquant_group_size=32)),
    ("wqm-group", lambda: wqm(antiquant_group_size=48)),
    ("wqm-bias", lambda: wqm(bias=torch.ones(5))),
    ("gsq-x", lambda: gsq(x=draw(4, 3))),
    ("gsq-x", lambda: gsq(weight=bytes_(2, 3, 5))),
    ("gsq-x", lambda: gsq2(weight=[])),
    ("gsq-scale", lambda: gsq(weight_scale=torch.ones(6))),
    ("gsq-scale", lambda: gsq(x_scale=torch.ones(4).half())),
    ("gsq-group", lambda: gsq(group_list=torch.tensor([1, 4]).int())),
    ("gsq-group", lambda: gsq2(group_list_type=2)),
    ("gsq-none", lambda: gsq(bias=torch.ones(2, 6))),
    ("gsq-mode", lambda: gsq2(quant_mode=1)),
    ("tbm-dtype", lambda: tbm(weight=draw(2, 16, 16).half())),
    ("tbm-rank", lambda: tbm(weight=draw(3, 16, 16))),
    ("tbm-rank", lambda: tbm(input=draw(3, 16))),
    ("tbm-align", lambda: tbm(weight=draw(2, 16, 8))),
    ("tbm-limit", lambda: tbm(input=torch.zeros(1, 1, 65536), weight=torch.zeros(1, 65536, 16))),
    ("tbm-perm", lambda: tbm(perm_x1=[2, 1, 0])),
    ("tbm-perm", lambda: tbm(perm_y=[0, 1, 2])),
    ("tbm-perm-x2", lambda: tbm(perm_x2=[0, 2, 1])),
    ("tbm-split", lambda: tbm(batch_split_factor=3)),
    ("tbm-bias", lambda: tbm(bias=draw(16))),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, build = REFUSED[number]
    op, options = build()
    refuses(rule, op, **options)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


@pytest.mark.parametrize("call", [qmm(), gmm(), gmm4(), gmm8(), tbm(), wqm(), gsq(), gsq2()])
def test_calls_within_the_documents_are_taken(call: Call) -> None:
    REGISTRY[call[0]](**call[1])


@pytest.mark.parametrize(
    "call",
    [
        qmm(group_sizes=[1, 1, 32]), qmm(output_dtype=290),
        gmm(group_type=2), gmm(act_type=1), gmm8(scale=[torch.ones(2, 5).long()]),
        tbm(scale=torch.ones(32).long()), wqm(antiquant_scale=torch.ones(5).long()), wqm(quant_scale=torch.ones(5)),
        gsq(weight=bytes_(2, 3, 6).int()), gsq2(smooth_scale=torch.ones(2)),
    ],
)  # fmt: skip
def test_forms_that_are_not_computed_say_so(call: Call) -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[call[0]](**call[1])


@pytest.mark.parametrize("groups", [[1, 5], [3, 1], [-1, 4]])
def test_groups_outside_the_rows_fault(groups: list[int]) -> None:
    for op, options in (gmm(group_list=torch.tensor(groups)), gsq(group_list=torch.tensor(groups))):
        with pytest.raises(DeviceFault):
            REGISTRY[op](**options)
