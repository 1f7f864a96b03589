"""moe_init_routing_quant against plain loops, its refusals and faults; and unpermuting as torch_npu 2.13 calls it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, KernelNotCovered, moe_finalize, pose
from hypothesis import given, settings
from hypothesis import strategies as st

OP = "npu::npu_moe_init_routing_quant"


@pytest.fixture(autouse=True)
def strictest() -> Iterator[None]:
    yield
    pose.set_pose()


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(7)).to(torch.int32)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 5), k=st.integers(1, 3), dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    mode=st.sampled_from([0, 1]), scaled=st.sampled_from(["", "one", "all"]), kind=st.sampled_from([0, 1, 2]),
    active=st.sampled_from([0, 3, 1024]),
)  # fmt: skip
def test_rows_are_sorted_and_quantised(
    rows: int, k: int, dtype: torch.dtype, mode: int, scaled: str, kind: int, active: int
) -> None:
    x, experts = draw(rows, 4, dtype=dtype), ids(6, rows, k)
    options: dict[str, Any] = {"expert_num": 6, "quant_mode": mode, "expert_tokens_num_mode": kind}
    scale = None
    if mode == 0:
        scale, options["offset"] = torch.tensor([20.0]), torch.tensor([-3.0])
    elif scaled:
        scale = draw(6 if scaled == "all" else 1, 4, seed=3)
    out, places, counts, before, scales = REGISTRY[OP](x, experts, scale=scale, active_num=active, **options)
    flat = experts.flatten().tolist()
    order = sorted(range(rows * k), key=lambda i: (flat[i], i))
    length = min(active, rows * k) if active else rows * k
    assert out.shape == (length, 4) and out.dtype == torch.int8 and before is None
    assert places.dtype == torch.int32 and places.tolist() == [order.index(i) for i in range(rows * k)]
    tally = [sum(e == number for e in flat) for number in range(6)]
    if kind == 0:
        assert counts is None
    else:
        assert counts.dtype == torch.int32
        assert counts.tolist() == (tally if kind == 2 else [sum(tally[: i + 1]) for i in range(6)])
    assert (scales is None) == (mode == 0)
    for at, source in enumerate(order[:length]):
        values = [float(v) for v in x[source // k]]
        if mode == 0:
            want = [min(127, max(-128, round(v * 20.0 - 3.0))) for v in values]
        else:
            if scale is not None:
                values = [v * float(f) for v, f in zip(values, scale[flat[source] % scale.size(0)], strict=True)]
            step = max(map(abs, values)) / 127
            assert math.isclose(float(scales[at]), step, rel_tol=1e-6)
            want = [round(v / step) for v in values]
        assert all(abs(a - b) <= 1 for a, b in zip(out[at].tolist(), want, strict=True))


X, IDS, ONE = draw(3, 4), ids(6, 3, 2), torch.ones(1)
REFUSED: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("routingq-x", [X.to(torch.int8), IDS], {}),
    ("routingq-x", [X[0], IDS], {}),
    ("routingq-experts", [X, IDS.long()], {}),
    ("routingq-experts", [X, IDS[:2]], {}),
    ("routingq-scale", [X, IDS], {"quant_mode": 0, "offset": ONE}),
    ("routingq-scale", [X, IDS], {"scale": draw(5, 4)}),
    ("routingq-scale", [X, IDS], {"scale": draw(1, 4).half()}),
    ("routingq-offset", [X, IDS], {"offset": ONE}),
    ("routingq-offset", [X, IDS], {"quant_mode": 0, "scale": ONE}),
    ("routingq-offset", [X, IDS], {"quant_mode": 0, "scale": ONE, "offset": ONE.half()}),
    ("routingq-num", [X, IDS], {"expert_num": 2**40}),
    ("routingq-active", [X, IDS], {"active_num": -1}),
    ("routingq-type", [X, IDS], {"quant_mode": 2}),
    ("routingq-type", [X, IDS], {"drop_pad_mode": 2}),
    ("routingq-type", [X, IDS], {"expert_tokens_num_mode": 3}),
]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda n: f"{n}-{REFUSED[n][0]}")
def test_calls_outside_the_documents_are_refused(number: int, refuses: Callable[..., None]) -> None:
    rule, arguments, options = REFUSED[number]
    refuses(rule, OP, *arguments, **({"expert_num": 6} | options))


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, *_ in REFUSED} == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


def test_places_for_each_expert_are_not_computed() -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[OP](X, IDS, expert_num=6, drop_pad_mode=1)


@pytest.mark.parametrize("wrong", [-1, 6])
def test_experts_outside_fault(wrong: int) -> None:
    with pytest.raises(DeviceFault):
        REGISTRY[OP](X, torch.full((3, 2), wrong, dtype=torch.int32), expert_num=6)


@pytest.mark.parametrize(
    ("cann", "chip", "weighted", "kept"),
    [
        (None, None, False, True),
        ("9.0", "910B", False, True),
        ("9.1", "910B", False, False),
        ("9.1", "950", False, True),
        ("9.1", "910B", True, True),
    ],
)
def test_what_a_backward_pass_keeps(cann: str | None, chip: str | None, weighted: bool, kept: bool) -> None:
    pose.set_pose(cann=cann, chip=chip)
    tokens, index = draw(4, 8), torch.tensor([2, 0, 3, 1])
    probs = torch.rand(2, 2) if weighted else None
    out, saved = moe_finalize.npu_moe_token_unpermute_inner(tokens, index, probs)
    assert torch.equal(out, REGISTRY[moe_finalize.OP_UNPERMUTE](tokens, index, probs))
    assert (saved is tokens) is kept and (saved is None) is not kept
