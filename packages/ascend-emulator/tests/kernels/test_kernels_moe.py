"""Gating, routing and finalising of expert networks against plain loops, and their refusals.

Long because the ops form one chain, and each stage's reference is the next stage's input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, KernelNotCovered
from ascend_emulator.poison import is_poisoned
from hypothesis import given, settings
from hypothesis import strategies as st

SOFTMAX = "npu::npu_moe_gating_top_k_softmax"
GROUPS = "npu::npu_moe_gating_top_k"
COUNT = "npu::npu_moe_compute_expert_tokens"
ROUTING = "npu::npu_moe_init_routing"
ROUTING2 = "npu::npu_moe_init_routing_v2"
REROUTING = "npu::npu_moe_re_routing"
PERMUTE = "npu::npu_moe_token_permute"
FINALIZE = "npu::npu_moe_finalize_routing"
UNPERMUTE = "npu::npu_moe_token_unpermute"
LOOSE = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}
FLOATS = list(LOOSE)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(high: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def numbers(tensor: torch.Tensor) -> list[float]:
    out: list[float] = tensor.double().flatten().tolist()
    return out


def softmax(row: list[float]) -> list[float]:
    total = math.fsum(math.exp(v) for v in row)
    return [math.exp(v) / total for v in row]


def best(scores: list[float], k: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def close(got: torch.Tensor, want: list[float], dtype: torch.dtype) -> None:
    np.testing.assert_allclose(numbers(got), want, rtol=LOOSE[dtype], atol=LOOSE[dtype])


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from([(3, 5), (2, 2, 6), (1, 1)]),
    dtype=st.sampled_from(FLOATS),
    k=st.integers(1, 5),
    renorm=st.sampled_from([0, 1]),
    whole=st.booleans(),
    some=st.booleans(),
)
def test_softmax_gating(
    shape: tuple[int, ...], dtype: torch.dtype, k: int, renorm: int, whole: bool, some: bool
) -> None:
    k, experts, rows = min(k, shape[-1]), shape[-1], math.prod(shape[:-1])
    x = draw(*shape, dtype=dtype)
    finished = (torch.arange(rows) % 2 == 1).view(shape[:-1]) if some else None
    weights, chosen, order = REGISTRY[SOFTMAX](x, finished, k)
    second = REGISTRY[f"{SOFTMAX}_v2"](x, k=k, finished=finished, renorm=renorm, output_softmax=whole)
    assert weights.dtype == dtype and chosen.dtype == order.dtype == torch.int32
    assert weights.shape == chosen.shape == order.shape == (*shape[:-1], k)
    assert second[2].shape == (shape if whole and not renorm else (0,))
    for row, values in enumerate(x.view(rows, experts)):
        scores = softmax(numbers(values))
        picks = best(numbers(values), k)
        done = finished is not None and bool(finished.flatten()[row])
        close(weights.view(rows, k)[row], [scores[i] for i in picks], dtype)
        assert chosen.view(rows, k)[row].tolist() == ([experts] * k if done else picks)
        assert order.view(rows, k)[row].tolist() == [i * rows + row for i in range(k)]
        again = softmax([numbers(values)[i] for i in picks]) if renorm else [scores[i] for i in picks]
        close(second[0].view(rows, k)[row], again, dtype)
        assert torch.equal(second[1], chosen)
        if whole and not renorm:
            close(second[2].view(rows, experts)[row], scores, torch.float32)


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(FLOATS),
    groups=st.sampled_from([(1, 1), (4, 1), (4, 2), (4, 4), (2, 1)]),
    mode=st.sampled_from([0, 1]),
    norm=st.sampled_from([0, 1]),
    bias=st.booleans(),
    k=st.integers(1, 4),
    wanted=st.booleans(),
)
def test_grouped_gating(
    dtype: torch.dtype, groups: tuple[int, int], mode: int, norm: int, bias: bool, k: int, wanted: bool
) -> None:
    count, kept = groups
    experts, width = 16, 16 // count
    x = draw(3, experts, dtype=dtype) + torch.arange(experts).to(dtype) / 16
    shift = draw(experts, dtype=dtype, seed=2) if bias else None
    options: dict[str, Any] = {"bias": shift, "k_group": kept, "group_count": count, "group_select_mode": mode}
    results = REGISTRY[GROUPS](x, k, norm_type=norm, out_flag=wanted, routed_scaling_factor=2.5, **options)
    weights, chosen, scores = results
    assert weights.dtype == dtype and chosen.dtype == torch.int32 and scores.dtype == torch.float32
    for row, values in enumerate(x):
        exact = [1 / (1 + math.exp(-v)) for v in numbers(values)] if norm else softmax(numbers(values))
        ranked = [s + b for s, b in zip(exact, numbers(shift) if shift is not None else [0.0] * 16, strict=True)]
        parts = [sorted(ranked[g * width : (g + 1) * width], reverse=True) for g in range(count)]
        open_groups = best([sum(p[: 2 if mode else 1]) for p in parts], kept)
        ranked = [v if i // width in open_groups else -math.inf for i, v in enumerate(ranked)]
        picks = best(ranked, k)
        assert chosen[row].tolist() == picks
        total = math.fsum(exact[i] for i in picks) if norm else 1.0
        close(weights[row], [exact[i] / total * 2.5 for i in picks], dtype)
        if wanted:
            close(scores[row], exact, torch.float32)
    assert wanted or bool(scores.isnan().all())


@pytest.mark.parametrize("rows", [[], [0], [0, 0, 2, 2, 2, 4]])
def test_expert_tokens(rows: list[int]) -> None:
    out = REGISTRY[COUNT](torch.tensor(rows, dtype=torch.int32), 6)
    assert out.dtype == torch.int32 and out.tolist() == [sum(r <= i for r in rows) for i in range(6)]


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 5), k=st.integers(1, 3), active=st.integers(1, 6), dtype=st.sampled_from(FLOATS))
def test_init_routing(rows: int, k: int, active: int, dtype: torch.dtype) -> None:
    x, experts = draw(rows, 4, dtype=dtype), integers(4, rows, k, seed=rows)
    order = torch.arange(rows * k, dtype=torch.int32).view(k, rows).T.contiguous()
    out, places, ranked = REGISTRY[ROUTING](x, order, experts, active)
    pairs = sorted(range(rows * k), key=lambda i: (int(experts.flatten()[i]), i))
    assert ranked.tolist() == [int(experts.flatten()[i]) for i in pairs]
    assert out.shape == (min(rows, active) * k, 4)
    for at, flat in enumerate(pairs):
        number = int(order.flatten()[flat])
        assert places[number] == at
        if at < out.size(0):
            assert torch.equal(out[at], x[number % rows])


QUANT: dict[int, torch.dtype] = {-1: torch.float32, 0: torch.int8, 1: torch.int8}


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(0, 5),
    k=st.integers(1, 3),
    span=st.sampled_from([(), (0, 6), (2, 4), (5, 6)]),
    kind=st.sampled_from([0, 1, 2]),
    flag=st.booleans(),
    mode=st.sampled_from([-1, 0, 1]),
    scaled=st.sampled_from(["", "one", "all"]),
    index=st.sampled_from([0, 1]),
    active=st.sampled_from([-1, 0, 3]),
)
def test_init_routing_v2(
    rows: int, k: int, span: tuple[int, ...], kind: int, flag: bool, mode: int, scaled: str, index: int, active: int
) -> None:
    x, experts = draw(rows, 4), integers(6, rows, k, seed=7)
    first, end = span or (0, 6)
    options: dict[str, Any] = {"expert_num": 6, "active_expert_range": list(span), "quant_mode": mode}
    options |= {"expert_tokens_num_type": kind, "expert_tokens_num_flag": flag, "row_idx_type": index}
    scale = None
    if mode == 0:
        scale, options["offset"] = torch.tensor([20.0]), torch.tensor([-3.0])
    elif scaled:
        scale = draw(rows, seed=3) if mode == -1 else draw(end - first if scaled == "all" else 1, 4, seed=3)
    out, indices, counts, scales = REGISTRY[ROUTING2](x, experts, scale=scale, active_num=active, **options)
    flat = experts.flatten().tolist()
    order = sorted((i for i, e in enumerate(flat) if first <= e < end), key=lambda i: (flat[i], i))
    length = rows * k if active <= 0 else min(active, rows * k)
    assert out.shape == (length, 4) and out.dtype == QUANT[mode] and indices.shape == (rows * k,)
    if index == 0:
        assert indices.tolist() == [order.index(i) if i in order else -1 for i in range(rows * k)]
    else:
        assert indices[: len(order)].tolist() == order and bool(is_poisoned(indices[len(order) :]).all())
    tally = [sum(e == number for e in flat) for number in range(first, end)]
    if not flag:
        assert counts.shape == ()
    elif kind == 2:
        pairs = [[first + i, n] for i, n in enumerate(tally) if n]
        assert counts.tolist() == pairs + [[0, 0]] * (6 - len(pairs))
    else:
        assert counts.tolist() == (tally if kind else np.cumsum(tally).tolist())
    assert scales.shape == (() if mode == 0 else (length,)) and scales.dtype == torch.float32
    kept = order[:length]
    for at, source in enumerate(kept):
        row, values = source // k, numbers(x[source // k])
        if mode == -1:
            assert torch.equal(out[at], x[row])
            assert scale is None or scales[at] == scale[row]
            continue
        if mode == 0:
            want = [v * 20 - 3 for v in values]
        else:
            if scale is not None:
                chosen = scale[flat[source] - first] if scaled == "all" and end - first > 1 else scale[0]
                values = [v * s for v, s in zip(values, numbers(chosen), strict=True)]
            top = max(abs(v) for v in values) / 127
            np.testing.assert_allclose(float(scales[at]), top, rtol=1e-5)
            want = [v / top for v in values]
        assert all(abs(a - b) <= 0.501 for a, b in zip(numbers(out[at]), want, strict=True))
    assert bool(is_poisoned(out[len(kept) :]).all())


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.int8]),
    spare=st.integers(0, 2),
    scaled=st.booleans(),
    count_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_re_routing(
    counts: list[list[int]], dtype: torch.dtype, spare: int, scaled: bool, count_dtype: torch.dtype
) -> None:
    total = sum(map(sum, counts))
    tokens = (draw(total + spare, 3) * 20).to(dtype)
    scales = draw(total + spare, seed=1) if scaled else None
    out = REGISTRY[REROUTING](tokens, torch.tensor(counts, dtype=count_dtype), per_token_scales=scales)
    owners = [(expert, rank) for rank, row in enumerate(counts) for expert, n in enumerate(row) for _ in range(n)]
    order = sorted(range(total), key=lambda i: (owners[i], i))
    assert torch.equal(out[0][:total], tokens[order]) and out[2][:total].tolist() == order
    assert out[3].tolist() == [sum(column) for column in zip(*counts, strict=True)] and out[3].dtype == count_dtype
    assert all(bool(is_poisoned(part[total:]).all()) for part in out[:3])
    assert torch.equal(out[1][:total], scales[order]) if scales is not None else bool(out[1].isnan().all())


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 5),
    k=st.sampled_from([0, 1, 3]),
    kept=st.sampled_from([None, 0, 2, 100, -1]),
    dtype=st.sampled_from(FLOATS),
    weighted=st.booleans(),
)
def test_permuting_and_back(tokens: int, k: int, kept: int | None, dtype: torch.dtype, weighted: bool) -> None:
    x = draw(tokens, 4, dtype=dtype)
    indices = integers(4, tokens, *([k] if k else []), seed=3, dtype=torch.int64)
    out, places = REGISTRY[PERMUTE](x, indices, kept)
    flat, each = indices.flatten().tolist(), k or 1
    order = sorted(range(len(flat)), key=lambda i: (flat[i], i))
    length = len(flat) if not kept else min(kept, len(flat)) if kept > 0 else len(flat) + kept
    assert torch.equal(out, x[[i // each for i in order[:length]]]) and places.dtype == torch.int32
    assert places.tolist() == [order.index(i) for i in range(len(flat))]
    probs = draw(tokens, each, dtype=dtype, seed=5) if weighted or each > 1 else None
    back = REGISTRY[UNPERMUTE](out, places, probs)
    assert back.shape == (tokens, 4) and back.dtype == dtype
    for token in range(tokens):
        want = [0.0] * 4
        for i in range(each):
            if order.index(token * each + i) < length:
                weight = 1.0 if probs is None else float(probs[token, i])
                want = [w + weight * v for w, v in zip(want, numbers(x[token]), strict=True)]
        close(back[token], want, dtype)


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from([0, 1, 2, 3]),
    k=st.sampled_from([0, 1, 3]),
    dtype=st.sampled_from(FLOATS),
    skips=st.integers(0, 2),
    bias=st.booleans(),
    holes=st.booleans(),
)
def test_finalize_routing(mode: int, k: int, dtype: torch.dtype, skips: int, bias: bool, holes: bool) -> None:
    n, h, experts, each = 4, 3, 5, k or 1
    rows = draw(experts, 4, h, dtype=dtype) if mode % 2 else draw(n * each, h, dtype=dtype)
    flat = rows.view(-1, h)
    places = torch.randperm(flat.size(0), generator=torch.Generator().manual_seed(k))[: n * each].int()
    if holes:
        places[0] = -1
    skip = [draw(n, h, dtype=dtype, seed=4 + i) for i in range(skips)] + [None, None]
    shift = draw(experts, h, dtype=dtype, seed=7) if bias else None
    scales = draw(n, k, dtype=dtype, seed=8) if k else None
    owners = integers(experts, n, each, seed=9)
    out = REGISTRY[FINALIZE](rows, skip[0], skip[1], shift, scales, places, owners, mode)
    assert out.shape == (n, h) and out.dtype == dtype
    for i in range(n):
        want = [0.0] * h
        for part in skip[:2]:
            want = want if part is None else [a + b for a, b in zip(want, numbers(part[i]), strict=True)]
        for j in range(each):
            place = int(places[i * each + j] if mode >= 2 else places[j * n + i])
            row = [0.0] * h if place < 0 else numbers(flat[place])
            if shift is not None:
                row = [a + b for a, b in zip(row, numbers(shift[int(owners[i, j])]), strict=True)]
            factor = 1.0 if scales is None else float(scales[i, j])
            want = [a + factor * b for a, b in zip(want, row, strict=True)]
        close(out[i], want, dtype)


Call = tuple[str, dict[str, Any]]
X = torch.zeros(3, 8)


def gating(op: str = SOFTMAX, **over: Any) -> Call:
    return op, {"x": X, "k": 2} | over


def groups(**over: Any) -> Call:
    return gating(GROUPS, **over)


def routing(**over: Any) -> Call:
    index = torch.zeros(3, 2).int()
    return ROUTING, {"x": X, "row_idx": index, "expert_idx": index, "active_num": 3} | over


def routing2(**over: Any) -> Call:
    return ROUTING2, {"x": X, "expert_idx": torch.zeros(3, 2).int(), "expert_num": 4} | over


def rerouting(**over: Any) -> Call:
    options = {"tokens": X.half(), "expert_token_num_per_rank": torch.ones(1, 3).int()}
    return REROUTING, options | over


def permute(**over: Any) -> Call:
    return PERMUTE, {"tokens": X, "indices": torch.zeros(3, 2).long()} | over


def unpermute(**over: Any) -> Call:
    return UNPERMUTE, {"permuted_tokens": X, "sorted_indices": torch.zeros(3).int()} | over


def finalize(**over: Any) -> Call:
    options: dict[str, Any] = dict.fromkeys(("skip1", "skip2", "bias", "scales", "export_for_source_row"))
    options |= {"expanded_permuted_rows": X, "expanded_src_to_dst_row": torch.arange(3).int()}
    return FINALIZE, options | over


REFUSED: list[tuple[str, Callable[[], Call]]] = [
    ("gating-dtype", lambda: gating(x=X.double())),
    ("gating-rank", lambda: gating(x=X.view(-1))),
    ("gating-k", lambda: gating(k=9)),
    ("gating-k", lambda: gating(f"{SOFTMAX}_v2", k=0)),
    ("gating-finished", lambda: gating(finished=torch.zeros(3))),
    ("gating-finished", lambda: gating(finished=torch.zeros(2).bool())),
    ("gating-renorm", lambda: gating(f"{SOFTMAX}_v2", renorm=2)),
    ("gating-groups-x", lambda: groups(x=X.view(1, 3, 8))),
    ("gating-groups-bias", lambda: groups(bias=torch.zeros(8).half())),
    ("gating-groups-count", lambda: groups(group_count=3)),
    ("gating-groups-count", lambda: groups(group_count=4)),
    ("gating-groups-k", lambda: groups(group_count=2, k=5)),
    ("gating-groups-k", lambda: groups(k_group=2)),
    ("gating-groups-mode", lambda: groups(renorm=1)),
    ("gating-groups-mode", lambda: groups(norm_type=2)),
    ("expert-tokens-rows", lambda: (COUNT, {"sorted_expert_for_source_row": torch.zeros(3).long(), "num_expert": 4})),
    ("expert-tokens-count", lambda: (COUNT, {"sorted_expert_for_source_row": torch.zeros(3).int(), "num_expert": 0})),
    ("routing-x", lambda: routing(x=X.int())),
    ("routing-index", lambda: routing(expert_idx=torch.zeros(3, 2).long())),
    ("routing-index", lambda: routing(row_idx=torch.zeros(3, 1).int())),
    ("routing2-x", lambda: routing2(x=X.to(torch.int8), quant_mode=1)),
    ("routing2-experts", lambda: routing2(expert_idx=torch.zeros(3, 2).long())),
    ("routing2-range", lambda: routing2(active_expert_range=[2, 5])),
    ("routing2-range", lambda: routing2(expert_num=-1)),
    ("routing2-range", lambda: routing2(active_expert_range=[0])),
    ("routing2-type", lambda: routing2(row_idx_type=2)),
    ("routing2-type", lambda: routing2(active_num=-2)),
    ("routing2-scale", lambda: routing2(scale=torch.ones(2))),
    ("routing2-scale", lambda: routing2(quant_mode=0)),
    ("routing2-scale", lambda: routing2(quant_mode=1, scale=torch.ones(3, 8))),
    ("routing2-offset", lambda: routing2(offset=torch.ones(1))),
    ("routing2-offset", lambda: routing2(quant_mode=0, scale=torch.ones(1))),
    ("routing2-quant", lambda: routing2(quant_mode=4)),
    ("rerouting-tokens", lambda: rerouting(tokens=X)),
    ("rerouting-counts", lambda: rerouting(expert_token_num_per_rank=torch.ones(3).int())),
    ("rerouting-scales", lambda: rerouting(per_token_scales=torch.ones(2))),
    ("rerouting-type", lambda: rerouting(idx_type=1)),
    ("permute-tokens", lambda: permute(tokens=X.int())),
    ("permute-indices", lambda: permute(indices=torch.zeros(3, 2))),
    ("permute-indices", lambda: permute(indices=torch.zeros(4, 2).long())),
    ("permute-padded", lambda: permute(padded_mode=True)),
    ("finalize-rows", lambda: finalize(expanded_permuted_rows=X.int())),
    ("finalize-rows", lambda: finalize(expanded_permuted_rows=X[:2])),
    ("finalize-rows", lambda: finalize(drop_pad_mode=1)),
    ("finalize-dtype", lambda: finalize(skip1=X.half())),
    ("finalize-shape", lambda: finalize(skip1=X[:2])),
    ("finalize-shape", lambda: finalize(bias=torch.zeros(4, 7), export_for_source_row=torch.zeros(3, 1).int())),
    ("finalize-skip", lambda: finalize(skip2=X)),
    ("finalize-index", lambda: finalize(expanded_src_to_dst_row=torch.arange(3))),
    ("finalize-index", lambda: finalize(bias=torch.zeros(4, 8))),
    ("finalize-mode", lambda: finalize(drop_pad_mode=4)),
    ("unpermute-tokens", lambda: unpermute(permuted_tokens=X.int())),
    ("unpermute-indices", lambda: unpermute(sorted_indices=torch.zeros(3, 1).int())),
    ("unpermute-probs", lambda: unpermute(probs=torch.ones(2, 2))),
    ("unpermute-padded", lambda: unpermute(padded_mode=True)),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, build = REFUSED[number]
    op, options = build()
    refuses(rule, op, **options)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


@pytest.mark.parametrize(
    "call", [gating(), groups(), routing(), routing2(), rerouting(), permute(), unpermute(), finalize()]
)
def test_calls_within_the_documents_are_taken(call: Call) -> None:
    REGISTRY[call[0]](**call[1])


@pytest.mark.parametrize(
    "call",
    [groups(input_ids=torch.zeros(3).int()), routing2(drop_pad_mode=1), routing2(quant_mode=2), routing2(x_dtype=290),
     rerouting(tokens_dtype=291)],
)  # fmt: skip
def test_forms_that_are_not_computed_say_so(call: Call) -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[call[0]](**call[1])


@pytest.mark.parametrize(
    "call",
    [
        (COUNT, {"sorted_expert_for_source_row": torch.tensor([1, 0]).int(), "num_expert": 4}),
        (COUNT, {"sorted_expert_for_source_row": torch.tensor([1, 4]).int(), "num_expert": 4}),
        routing2(expert_idx=torch.full((3, 2), 4).int()),
        rerouting(expert_token_num_per_rank=torch.full((1, 3), 2).int()),
        finalize(expanded_src_to_dst_row=torch.tensor([0, 1, 3]).int()),
        finalize(bias=torch.zeros(2, 8), export_for_source_row=torch.full((3, 1), 2).int()),
        unpermute(sorted_indices=torch.tensor([0, -1, 1])),
    ],
)
def test_indices_outside_fault(call: Call) -> None:
    with pytest.raises(DeviceFault):
        REGISTRY[call[0]](**call[1])
