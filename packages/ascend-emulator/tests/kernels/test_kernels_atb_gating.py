"""The gating ops of atb against plain loops, and their refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, KernelNotCovered
from hypothesis import given, settings
from hypothesis import strategies as st

GROUPS = "atb::_npu_group_topk"
FUSED = "atb::npu_fused_add_topk_div"
FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Multiples of 1/8 in an order of their own: sums of them are exact, and ties occur."""
    return (torch.randint(-24, 24, shape, generator=torch.Generator().manual_seed(seed)) / 8).to(dtype)


def best(scores: list[float], k: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def opened(row: list[float], groups: int, kept: int, n: int) -> list[float]:
    """The row with 0 in all but the best groups."""
    width = len(row) // groups
    sums = [math.fsum(sorted(row[g * width : (g + 1) * width], reverse=True)[:n]) for g in range(groups)]
    chosen = best(sums, kept)
    return [value if i // width in chosen else 0.0 for i, value in enumerate(row)]


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(FLOATS[:2]),
    tokens=st.integers(0, 4),
    groups=st.sampled_from([1, 2, 4, 8]),
    width=st.integers(1, 5),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_group_topk(dtype: torch.dtype, tokens: int, groups: int, width: int, seed: int, data: st.DataObject) -> None:
    k, n = data.draw(st.integers(1, groups)), data.draw(st.integers(1, width))
    x = draw(tokens, groups * width, dtype=dtype, seed=seed)
    want = [opened(row, groups, k, n) for row in x.double().tolist()]
    assert REGISTRY[GROUPS](x, k, groups, n) is None
    assert x.double().tolist() == want


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(FLOATS),
    groups=st.sampled_from([1, 2, 8]),
    width=st.integers(1, 4),
    seed=st.integers(0, 99),
    norm=st.booleans(),
    data=st.data(),
)
def test_fused_add_topk_div(
    dtype: torch.dtype, groups: int, width: int, seed: int, norm: bool, data: st.DataObject
) -> None:
    experts = groups * width
    kept, n, k = (data.draw(st.integers(1, limit)) for limit in (groups, width, experts))
    x = (torch.randperm(experts * 3, generator=torch.Generator().manual_seed(seed)) / 9 - 2).to(dtype).view(3, experts)
    bias = draw(experts, dtype=dtype, seed=seed)
    options: dict[str, Any] = {"group_num": groups, "group_topk": kept, "n": n, "k": k, "is_norm": norm, "scale": 2.5}
    y, indices = REGISTRY[FUSED](x, bias, **options)
    assert y.dtype == torch.float32 and indices.dtype == torch.int32 and y.shape == indices.shape == (3, k)
    for row, values in enumerate(x.double().tolist()):
        gates = [1 / (1 + math.exp(-v)) for v in values]
        scores = [g + b for g, b in zip(gates, bias.double().tolist(), strict=True)]
        chosen = best(opened(scores, groups, kept, n), k)
        assert indices[row].tolist() == chosen
        total = math.fsum(gates[i] for i in chosen) / 2.5 if norm else 1.0
        assert y[row].tolist() == pytest.approx([gates[i] / total for i in chosen], rel=1e-5)
    outputs = torch.full((3, k), -1.0), torch.full((3, k), -1, dtype=torch.int32)
    results = REGISTRY[f"{FUSED}.out"](x, bias, **options, y=outputs[0], indices=outputs[1])
    assert results[0] is outputs[0] and results[1] is outputs[1]
    assert torch.equal(outputs[0], y) and torch.equal(outputs[1], indices)


def test_a_closed_group_wins_over_negative_scores() -> None:
    bias = torch.full((4,), -3.0)
    chosen = REGISTRY[FUSED](torch.tensor([[2.0, 1.0, 0.0, 0.0]]), bias, group_num=2, k=2)[1]
    assert chosen.tolist() == [[2, 3]]


Call = tuple[str, dict[str, Any]]
X = torch.zeros(2, 16)


def groups(**over: Any) -> Call:
    return GROUPS, {"self": X.half(), "k": 1, "group_num": 4} | over


def fused(**over: Any) -> Call:
    return FUSED, {"x": X, "add_num": X[0], "group_num": 4} | over


def out(**over: Any) -> Call:
    return f"{FUSED}.out", fused()[1] | {"y": torch.zeros(2, 1), "indices": torch.zeros(2, 1).int()} | over


REFUSED: list[tuple[str, Call]] = [
    ("group-topk-x", groups(self=X)),
    ("group-topk-x", groups(self=X[0].half())),
    ("group-topk-x", groups(self=torch.zeros(1, 1028, dtype=torch.bfloat16))),
    ("group-topk-groups", groups(group_num=3)),
    ("group-topk-k", groups(k=0)),
    ("group-topk-k", groups(k=5)),
    ("group-topk-n", groups(n=5)),
    ("fused-topk-x", fused(x=X.double())),
    ("fused-topk-x", fused(add_num=X[0].half())),
    ("fused-topk-x", fused(add_num=X)),
    ("fused-topk-groups", fused(group_num=3)),
    ("fused-topk-groups", fused(x=torch.zeros(2, 64), add_num=torch.zeros(64))),
    ("fused-topk-groups", fused(x=torch.zeros(2, 512), add_num=torch.zeros(512), group_num=8)),
    ("fused-topk-k", fused(group_topk=5)),
    ("fused-topk-k", fused(n=5)),
    ("fused-topk-k", fused(k=17)),
    ("fused-topk-k", fused(k=0)),
    ("fused-topk-activation", fused(activation_type="activation_gelu")),
]
OUTPUTS = [out(y=torch.zeros(2, 1).half()), out(indices=torch.zeros(2, 1)), out(y=torch.zeros(2, 2))]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, (op, options) = REFUSED[number]
    refuses(rule, op, **options)


@pytest.mark.parametrize("number", range(len(OUTPUTS)))
def test_outputs_that_do_not_fit_are_refused(number: int) -> None:
    op, options = OUTPUTS[number]
    before = options["y"].clone(), options["indices"].clone()
    with pytest.raises(ValueError, match="fused-topk-out"):
        REGISTRY[op](**options)
    assert torch.equal(options["y"], before[0]) and torch.equal(options["indices"], before[1])


def test_every_rule_has_a_call_that_breaks_it() -> None:
    broken = {rule for rule, _ in REFUSED} | {"fused-topk-out"}
    assert broken == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


def test_mapped_experts_say_so() -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[FUSED](X, X[0], enable_expert_mapping=True)
