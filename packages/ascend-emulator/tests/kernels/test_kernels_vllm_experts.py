"""vLLM-Ascend's ops around experts against plain loops, their schemas, shapes, refusals and faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, KernelNotCovered, vllm_experts, vllm_routing
from hypothesis import given, settings
from hypothesis import strategies as st

GATING, ROUTING = vllm_routing.KERNELS
PLAIN, NZ, LIST, V2, SWIGLU = vllm_experts.KERNELS
H, B, F = torch.float16, torch.bfloat16, torch.float32
NUMBERS = (torch.int8, torch.int32)


def draw(*shape: int, dtype: torch.dtype = F, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype in NUMBERS:
        return torch.randint(-20, 21, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def quantised(got: torch.Tensor, scale: float, wanted: list[float]) -> bool:
    """Whether int8 times its scale is what a loop says, and the largest number is 127 steps."""
    step = max(map(abs, wanted)) / 127
    near = all(abs(q * scale - w) <= step * 0.51 + 1e-6 for q, w in zip(got.tolist(), wanted, strict=True))
    return near and math.isclose(scale, step, rel_tol=1e-3, abs_tol=1e-9)


def test_the_schemas_are_those_of_the_library() -> None:
    for text in (*vllm_routing.SCHEMAS, *vllm_experts.SCHEMAS):
        registered = getattr(torch.ops._C_ascend, text.partition("(")[0]).default._schema
        assert registered == torch._C.parse_schema(f"_C_ascend::{text}")


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(), op=st.sampled_from([PLAIN, NZ, LIST, V2]), limit=st.sampled_from([0.0, 1.5]), counts=st.booleans()
)
def test_each_experts_rows(data: st.DataObject, op: str, limit: float, counts: bool) -> None:
    inner, columns = 6, 8
    lens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    rows, experts = sum(lens) + data.draw(st.integers(0, 2)), len(lens)
    x, x_scale = draw(rows, inner, dtype=torch.int8), draw(rows, seed=1).abs() * 0.1
    weight, scale = draw(experts, inner, columns, dtype=torch.int8, seed=2), draw(experts, columns, seed=3) * 0.1
    ends = torch.tensor(lens).cumsum(0)
    if op == LIST:
        call: list[Any] = [x, list(weight), list(scale), x_scale, ends]
    elif op == V2:
        call = [x, [weight], [scale], x_scale, torch.tensor(lens) if counts else ends]
    else:
        call = [x, weight, scale, x_scale, ends]
    options: dict[str, Any] = {"group_list_type": int(counts)} if op == V2 else {}
    out, factors, *rest = REGISTRY[op](*call, swiglu_limit=limit, **options)
    assert [tuple(t.shape) for t in rest] == {PLAIN: [()], NZ: [()], LIST: [(rows,)], V2: []}[op]
    owner = [e for e, n in enumerate(lens) for _ in range(n)]
    for row, expert in enumerate(owner):
        dots = [sum(int(x[row, k]) * int(weight[expert, k, n]) for k in range(inner)) for n in range(columns)]
        sums = [dot * float(scale[expert, n]) * float(x_scale[row]) for n, dot in enumerate(dots)]
        wanted = []
        for gate, linear in zip(sums[: columns // 2], sums[columns // 2 :], strict=True):
            cut = min(gate, limit) if limit else gate
            wanted.append(silu(cut) * (max(-limit, min(limit, linear)) if limit else linear))
        assert quantised(out[row], float(factors[row]), wanted)


@settings(max_examples=40, deadline=None)
@given(
    lead=st.lists(st.integers(1, 3), min_size=1, max_size=2), integers=st.booleans(), left=st.booleans(),
    limit=st.sampled_from([0.0, 0.7]), interleaved=st.booleans(),
)  # fmt: skip
def test_swiglu(lead: list[int], integers: bool, left: bool, limit: float, interleaved: bool) -> None:
    wide = 8
    x = draw(*lead, wide, dtype=torch.int32 if integers else B)
    rows = math.prod(lead)
    weight, scale = (draw(wide, seed=1) * 0.1, draw(rows, seed=2).abs()) if integers else (None, None)
    limit = limit or (0.7 if interleaved else 0.0)
    options = {"swiglu_mode": int(interleaved), "glu_alpha": 1.3, "glu_bias": 0.2, "clamp_limit": limit}
    out, factors = REGISTRY[SWIGLU](
        x, weight_scale=weight, activation_scale=scale, activate_left=left, quant_mode=1, **options
    )
    assert tuple(out.shape) == (*lead, wide // 2) and tuple(factors.shape) == tuple(lead)
    for row in range(rows):
        values = x.view(rows, wide)[row].float().tolist()
        if weight is not None and scale is not None:
            values = [v * w * float(scale[row]) for v, w in zip(values, weight.tolist(), strict=True)]
        wanted = []
        for i in range(wide // 2):
            gate, linear = values[i], values[i + wide // 2]
            if interleaved:
                gate, linear = values[2 * i], values[2 * i + 1]
            elif not left:
                gate, linear = linear, gate
            if limit:
                gate, linear = min(gate, limit), max(-limit, min(limit, linear))
            if interleaved:
                wanted.append(gate / (1 + math.exp(-1.3 * gate)) * (linear + 0.2))
            else:
                wanted.append(silu(gate) * linear)
        assert quantised(out.view(rows, -1)[row], float(factors.view(-1)[row]), wanted)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), norm=st.integers(0, 1), biased=st.booleans(), dtype=st.sampled_from([F, H, B]))
def test_gating(seed: int, norm: int, biased: bool, dtype: torch.dtype) -> None:
    x, bias = draw(3, 8, dtype=dtype, seed=seed), draw(8, dtype=dtype, seed=seed + 1)
    weights, chosen, scores = REGISTRY[GATING](x, 2, 1, 1, 0, 0, norm, True, 2.0, 1e-20, bias if biased else None)
    for row in range(3):
        raw = x[row].float().tolist()
        total = sum(math.exp(v) for v in raw)
        score = [1 / (1 + math.exp(-v)) if norm else math.exp(v) / total for v in raw]
        assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(scores[row].tolist(), score, strict=True))
        ranked = [s + (float(bias[i]) if biased else 0) for i, s in enumerate(score)]
        best = sorted(range(8), key=lambda i: -ranked[i])[:2]
        assert chosen[row].tolist() == best
        divisor = sum(score[i] for i in best) if norm else 1
        for got, i in zip(weights[row].tolist(), best, strict=True):
            assert math.isclose(got, 2 * score[i] / divisor, rel_tol=1e-2)


ROUTED = torch.tensor([[0, 3], [1, 0], [3, 2]], dtype=torch.int32)
FORMS: list[dict[str, Any]] = [
    {"quant_mode": -1, "expert_tokens_num_type": 1},
    {"quant_mode": -1, "expert_tokens_num_type": 0, "row_idx_type": 1},
    {"quant_mode": 1, "expert_tokens_num_type": 1, "active_num": 6},
    {"quant_mode": -1, "expert_tokens_num_type": 2},
    {"quant_mode": -1, "expert_tokens_num_type": 1, "active_expert_range": [1, 3]},
    {"quant_mode": -1, "expert_tokens_num_flag": False},
    {"quant_mode": 0, "scale": torch.full((1,), 20.0), "offset": torch.zeros(1)},
]


@pytest.mark.parametrize("form", FORMS)
def test_routing_sorts_rows_by_expert(form: dict[str, Any]) -> None:
    x = draw(3, 8, dtype=B)
    options = {"expert_num": 4, "expert_tokens_num_flag": True} | form
    got = REGISTRY[ROUTING](x, ROUTED, **options)
    on_meta = {name: v.to("meta") if isinstance(v, torch.Tensor) else v for name, v in options.items()}
    meta = torch.ops._C_ascend.npu_moe_init_routing_custom(x.to("meta"), ROUTED.to("meta"), **on_meta)
    assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in meta]
    first, last = options.get("active_expert_range") or (0, 4)
    pairs = sorted((int(e), i) for i, e in enumerate(ROUTED.view(-1)) if first <= e < last)
    for place, (_, choice) in enumerate(pairs):
        step = {-1: 1.0, 0: 1 / 20, 1: float(got[3][place])}[form["quant_mode"]]
        assert torch.allclose(got[0][place].float() * step, x[choice // 2].float(), atol=0.03)
        assert int(got[1][place]) == choice if form.get("row_idx_type") else int(got[1][choice]) == place
    counts = [sum(e == expert for e, _ in pairs) for expert in range(first, last)]
    if options.get("expert_tokens_num_type") == 1:
        assert got[2].tolist() == counts
    if options.get("expert_tokens_num_type", 0) == 0 and options["expert_tokens_num_flag"]:
        assert got[2].tolist() == [sum(counts[: i + 1]) for i in range(len(counts))]


def grouped(op: str = NZ, **over: Any) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {
        "x": draw(4, 6, dtype=torch.int8), "weight": draw(2, 6, 8, dtype=torch.int8), "weight_scale": draw(2, 8),
        "x_scale": draw(4), "group_list": torch.tensor([1, 4]),
    }  # fmt: skip
    if op == LIST:
        options |= {name: list(options[name]) for name in ("weight", "weight_scale")}
    if op == V2:
        options |= {name: [options[name]] for name in ("weight", "weight_scale")}
    return op, options | over


def swiglu(**over: Any) -> tuple[str, dict[str, Any]]:
    return SWIGLU, {"x": draw(2, 8, dtype=B), "quant_mode": 1} | over


REFUSED: list[tuple[str, tuple[str, dict[str, Any]]]] = [
    ("vgsq-x", grouped(x=draw(4, 6))),
    ("vgsq-x", grouped(weight=draw(2, 6, 7, dtype=torch.int8), weight_scale=draw(2, 7))),
    ("vgsq-x", grouped(weight=draw(6, 8, dtype=torch.int8))),
    ("vgsq-x", grouped(LIST, weight=[draw(6, 8, dtype=torch.int8), draw(5, 8, dtype=torch.int8)])),
    ("vgsq-x", grouped(V2, weight=[])),
    ("vgsq-scale", grouped(weight_scale=draw(8))),
    ("vgsq-scale", grouped(LIST, weight_scale=[draw(8)])),
    ("vgsq-scale", grouped(LIST, weight_scale=[draw(8), draw(7)])),
    ("vgsq-scale", grouped(x_scale=draw(4, dtype=H))),
    ("vgsq-group", grouped(group_list=torch.tensor([1, 4], dtype=torch.int32))),
    ("vgsq-group", grouped(V2, group_list_type=2)),
    ("vgsq-none", grouped(bias=draw(2, 8))),
    ("vgsq-none", grouped(LIST, offset=draw(2, 8))),
    ("vgsq-limit", grouped(swiglu_limit=-1.0)),
    ("vgsq-mode", grouped(V2, quant_mode=1)),
    ("vdsq-mode", swiglu(swiglu_mode=2)),
    ("vdsq-clamp", swiglu(clamp_limit=-1.0)),
    ("vdsq-clamp", swiglu(glu_alpha=math.inf)),
    ("vdsq-x", swiglu(x=draw(8, dtype=B))),
]
SHARED: list[tuple[str, tuple[str, dict[str, Any]]]] = [
    ("dsq-activation-scale", swiglu(x=draw(2, 8, dtype=torch.int32))),
    ("dsq-quant-scale", swiglu(quant_mode=0)),
]


@pytest.mark.parametrize(("rule", "call"), [*REFUSED, *SHARED])
def test_it_refuses(refuses: Callable[..., None], rule: str, call: tuple[str, dict[str, Any]]) -> None:
    refuses(rule, call[0], **call[1])


def test_gating_refuses_under_its_own_name(refuses: Callable[..., None]) -> None:
    refuses("gating-groups-k", GATING, draw(3, 8), 9, 1, 1, 0, 0, 1, False, 1.0, 1e-20)
    refuses("gating-groups-bias", GATING, draw(3, 8), 2, 1, 1, 0, 0, 1, False, 1.0, 1e-20, draw(7))


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {r.id for r in RULES.values() if r.test == Path(__file__).name}


@pytest.mark.parametrize("ends", [[4, 1], [1, 5], [-1, 3]])
def test_groups_outside_the_rows_fault(ends: list[int]) -> None:
    op, call = grouped(group_list=torch.tensor(ends))
    with pytest.raises(DeviceFault, match="group_list"):
        REGISTRY[op](**call)


@pytest.mark.parametrize(
    "call",
    [
        grouped(weight=draw(2, 6, 1, dtype=torch.int32)),
        grouped(V2, smooth_scale=draw(2, 4)),
        grouped(V2, weight_assist_matrix=[draw(2, 8)]),
        (ROUTING, {"x": draw(3, 8), "expert_idx": ROUTED, "expert_num": 4, "drop_pad_mode": 1, "quant_mode": -1}),
    ],
)
def test_what_is_not_computed_says_so(call: tuple[str, dict[str, Any]]) -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[call[0]](**call[1])
