"""vLLM-Ascend's ops over ranks, here threads with gloo, against plain loops; their schemas, refusals and faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, KernelNotCovered, OpRefused, vllm_expert_parallel
from rank_threads import on_ranks

FUSED, DECODE, REDUCE = vllm_expert_parallel.KERNELS
PACK = "npu::npu_trans_quant_param"
H, B, F = torch.float16, torch.bfloat16, torch.float32


def draw(*shape: int, dtype: torch.dtype = B, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def test_the_schemas_are_those_of_the_library() -> None:
    for text in vllm_expert_parallel.SCHEMAS:
        registered = getattr(torch.ops._C_ascend, text.partition("(")[0]).default._schema
        assert registered == torch._C.parse_schema(f"_C_ascend::{text}")


class Model:
    """Experts of all ranks, and what a loop says about one row."""

    def __init__(self, ranks: int, own: int, hidden: int, inner: int, kind: str, dtype: torch.dtype = B) -> None:
        self.ranks, self.own, self.kind, self.dtype = ranks, own, kind, dtype
        experts, wide = ranks * own, 2 * inner
        self.first, self.second = (
            draw(experts, hidden, wide, seed=1, scale=0.1),
            draw(experts, inner, hidden, seed=2, scale=0.1),
        )
        self.scales = (
            draw(experts, wide, dtype=F, seed=3).abs() * 2e-3,
            draw(experts, hidden, dtype=F, seed=4).abs() * 2e-3,
        )
        if kind != "plain":
            self.first, self.second = (
                (w.float() * 300).round().clamp(-127, 127).to(torch.int8) for w in (self.first, self.second)
            )
        else:
            self.first, self.second = self.first.to(dtype), self.second.to(dtype)

    def of(self, rank: int, part: torch.Tensor, one: bool) -> list[torch.Tensor]:
        mine = part[rank * self.own : (rank + 1) * self.own]
        return [mine] if one else list(mine)

    def packed(self, number: int) -> torch.Tensor:
        if self.kind == "int64":
            return torch.stack([REGISTRY[PACK](scale) for scale in self.scales[number]])
        return self.scales[number]

    def product(self, row: list[float], weight: torch.Tensor, scale: torch.Tensor) -> list[float]:
        columns = weight.double().T.tolist()
        if self.kind == "plain":
            values = torch.tensor(row).to(self.dtype).tolist()
            return [math.fsum(a * b for a, b in zip(values, column, strict=True)) for column in columns]
        step = max(map(abs, row)) / 127
        values = [float(round(v / step)) for v in row]
        sums = [math.fsum(a * b for a, b in zip(values, column, strict=True)) for column in columns]
        return [s * float(f) * step for s, f in zip(sums, scale.tolist(), strict=True)]

    def row(self, x: torch.Tensor, expert: int, limit: float) -> list[float]:
        high = self.product(x.float().tolist(), self.first[expert], self.scales[0][expert])
        half = len(high) // 2
        inner = []
        for gate, linear in zip(high[:half], high[half:], strict=True):
            if limit > 0:
                gate, linear = min(gate, limit), max(-limit, min(limit, linear))
            inner.append(gate / (1 + math.exp(-gate)) * linear)
        return self.product(inner, self.second[expert], self.scales[1][expert])


def inputs(
    rank: int, tokens: int, hidden: int, each: int, experts: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(70 + rank)
    ids = torch.stack([torch.randperm(experts, generator=g)[:each] for _ in range(tokens)]).int()
    return draw(tokens, hidden, dtype=dtype, seed=50 + rank), ids, torch.rand(tokens, each, generator=g)


def check(model: Model, given: list[tuple[torch.Tensor, ...]], outs: list[Any], masks: list[Any], limit: float) -> None:
    counts = [0] * (model.ranks * model.own)
    for rank, (x, ids, probs) in enumerate(given):
        for token in range(x.size(0)):
            wanted = [0.0] * x.size(1)
            for k in range(ids.size(1) if masks[rank] is None or masks[rank][token] else 0):
                counts[int(ids[token, k])] += 1
                row = model.row(x[token], int(ids[token, k]), limit)
                wanted = [w + float(probs[token, k]) * r for w, r in zip(wanted, row, strict=True)]
            scale = max(1.0, max(map(abs, wanted)))
            assert torch.allclose(outs[rank][0][token].float(), torch.tensor(wanted), rtol=3e-2, atol=2e-2 * scale)
    assert [n for out in outs for n in out[1].flatten().tolist()] == counts


@pytest.mark.parametrize("kind", ["plain", "int64"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_experts_with_dispatch_and_combine(kind: str, ranks: int, limit: float) -> None:
    model = Model(ranks, 2, 16, 8, kind, H)
    given = [inputs(r, 3, 16, 2, 2 * ranks, H) for r in range(ranks)]
    masks = [torch.tensor([True, False, True]) if r == 0 else None for r in range(ranks)]
    one = limit == 0.0
    scales = [model.packed(i) for i in range(2)]

    def body(rank: int, name: str) -> Any:
        x, ids, probs = given[rank]
        out, counts = torch.full_like(x, 9), torch.full((1, 2), 9, dtype=torch.int32)
        got = REGISTRY[FUSED](
            x, model.of(rank, model.first, one), model.of(rank, model.second, one), ids,
            *(model.of(rank, scale, one) for scale in scales), [], [], probs, name, 64, out, counts, masks[rank], limit,
        )  # fmt: skip
        assert got[0] is out and got[1] is counts
        return got

    check(model, given, on_ranks(ranks, body), masks, limit)


@pytest.mark.parametrize("kind", ["plain", "float"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_for_decoding(kind: str, ranks: int) -> None:
    model = Model(ranks, 2, 512, 512, kind)
    given = [inputs(r, 1, 512, 2, 2 * ranks, B) for r in range(ranks)]

    def body(rank: int, name: str) -> Any:
        x, ids, probs = given[rank]
        parts = [model.of(rank, part, True) for part in (model.first, model.scales[0], model.second, model.scales[1])]
        options = {"group_ep": name, "ep_rank_size": ranks, "ep_rank_id": rank, "moe_expert_num": 2 * ranks}
        got = REGISTRY[DECODE](x, ids, *parts, probs, **options)
        on_meta = [[t.to("meta") for t in part] for part in parts]
        op = torch.ops._C_ascend.dispatch_gmm_combine_decode
        meta = op(x.to("meta"), ids.to("meta"), *on_meta, probs.to("meta"), **options)
        assert [(t.shape, t.dtype) for t in got] == [(t.shape, t.dtype) for t in meta]
        return got

    check(model, given, on_ranks(ranks, body), [None] * ranks, 0.0)


@pytest.mark.parametrize("dtype", [H, B])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_product_all_reduce_residual_norm(dtype: torch.dtype, turned: bool, whole: bool) -> None:
    shape = (2, 3, 4) if turned else (6, 4)
    x, weight = (
        [draw(*shape, dtype=dtype, seed=r) for r in range(2)],
        [draw(4, 5, dtype=dtype, seed=9 + r) for r in range(2)],
    )
    residual, gamma = draw(*shape[:-1], 5, dtype=dtype, seed=20), draw(5, dtype=dtype, seed=21)

    def body(rank: int, name: str) -> Any:
        given = weight[rank].T.contiguous() if turned else weight[rank]
        return REGISTRY[REDUCE](x[rank], given, residual, gamma, name, 2, rank, 1e-5, turned, whole)

    for out, total in on_ranks(2, body):
        for place in range(6):
            sums = [float(v) for v in residual.view(6, 5)[place]]
            for rank in range(2):
                for n in range(5):
                    sums[n] += sum(float(x[rank].view(6, 4)[place, k]) * float(weight[rank][k, n]) for k in range(4))
            root = 1 / math.sqrt(sum(s * s for s in sums) / 5 + 1e-5)
            wanted = torch.tensor([s * root * float(g) for s, g in zip(sums, gamma, strict=True)])
            assert torch.allclose(out.view(6, 5)[place].float(), wanted, rtol=3e-2, atol=3e-2)
            if whole:
                assert torch.allclose(total.view(6, 5)[place].float(), torch.tensor(sums), rtol=3e-2, atol=3e-2)
        assert whole or bool(total.view(torch.int16).eq(-1).all())


def fused(name: str = "nobody", **over: Any) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {
        "x": draw(2, 16), "weight1": [draw(2, 16, 8)], "weight2": [draw(2, 4, 16)],
        "expert_idx": torch.zeros(2, 1, dtype=torch.int32), "scale1": [], "scale2": [], "bias1": [], "bias2": [],
        "probs": torch.ones(2, 1), "group": name, "max_output_size": 8, "out": draw(2, 16),
        "expert_token_nums": torch.zeros(2, dtype=torch.int32),
    }  # fmt: skip
    return FUSED, options | over


def decode(name: str = "nobody", **over: Any) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {
        "x": draw(2, 512), "expert_ids": torch.zeros(2, 1, dtype=torch.int32),
        "gmm1_permuted_weight": [draw(2, 512, 1024)], "gmm1_permuted_weight_scale": [],
        "gmm2_weight": [draw(2, 512, 512)], "gmm2_weight_scale": [], "expert_scales": torch.ones(2, 1),
        "group_ep": name, "ep_rank_size": 1, "ep_rank_id": 0, "moe_expert_num": 2,
    }  # fmt: skip
    return DECODE, options | over


def reduce(name: str = "nobody", **over: Any) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {
        "x1": draw(2, 4), "x2": draw(4, 5), "residual": draw(2, 5), "gamma": draw(5), "groupTp": name, "tpRankSize": 1,
        "tpRankId": 0, "epsilon": 1e-6, "isTransB": False, "isGatherAddOut": True,
    }  # fmt: skip
    return REDUCE, options | over


INT8: dict[str, Any] = {"weight1": [draw(2, 16, 8).to(torch.int8)], "weight2": [draw(2, 4, 16).to(torch.int8)]}
LONG: dict[str, Any] = {"scale1": [torch.ones(2, 8).long()], "scale2": [torch.ones(2, 16).long()]}
REFUSED: list[tuple[str, tuple[str, dict[str, Any]]]] = [
    ("fused-group", fused()),
    ("fused-group", decode()),
    ("fused-group", reduce()),
    ("fused-x", fused(x=draw(2, 16, dtype=F))),
    ("fused-x", decode(x=draw(2, 512, dtype=H))),
    ("fused-choice", fused(expert_idx=torch.zeros(2, 1).long())),
    ("fused-choice", fused(probs=torch.ones(2, 2))),
    ("fused-weight", fused(weight1=[draw(2, 15, 8)])),
    ("fused-weight", fused(weight2=[draw(1, 4, 16)])),
    ("fused-weight", fused(weight1=[draw(2, 16, 8, dtype=H)])),
    ("fused-scale", fused(**INT8)),
    ("fused-scale", fused(**INT8, **(LONG | {"scale1": [torch.ones(2, 8)]}))),
    ("fused-mask", fused(x_active_mask=torch.ones(2))),
    ("fused-out", fused(out=draw(2, 15))),
    ("fused-out", fused(expert_token_nums=torch.zeros(2).long())),
    ("decode-sizes", decode(expert_ids=torch.zeros(2, 13, dtype=torch.int32), expert_scales=torch.ones(2, 13))),
    ("decode-sizes", decode(gmm1_permuted_weight=[draw(2, 512, 512)], gmm2_weight=[draw(2, 256, 512)])),
    ("reduce-norm-dtype", reduce(gamma=draw(5, dtype=F))),
    ("reduce-norm-shape", reduce(isTransB=True)),
    ("reduce-norm-shape", reduce(residual=draw(2, 4))),
]
WITHIN_A_GROUP: list[tuple[str, Callable[[str], tuple[str, dict[str, Any]]]]] = [
    ("decode-layout", lambda name: decode(name, ep_rank_size=2)),
    ("decode-layout", lambda name: decode(name, moe_expert_num=3)),
    ("decode-layout", lambda name: decode(name, shared_expert_num=0)),
    ("reduce-norm-ranks", lambda name: reduce(name, tpRankSize=2)),
]


@pytest.mark.parametrize(("rule", "call"), REFUSED)
def test_it_refuses(refuses: Callable[..., None], rule: str, call: tuple[str, dict[str, Any]]) -> None:
    refuses(rule, call[0], **call[1])


@pytest.mark.parametrize(("rule", "build"), WITHIN_A_GROUP)
def test_it_refuses_what_the_group_is_not(rule: str, build: Callable[[str], tuple[str, dict[str, Any]]]) -> None:
    def body(rank: int, name: str) -> str:
        op, call = build(name)
        with pytest.raises(OpRefused) as caught:
            REGISTRY[op](**call)
        return caught.value.rule.id

    assert on_ranks(1, body) == [rule]


def test_every_rule_has_a_call_that_breaks_it() -> None:
    broken = {rule for rule, _ in REFUSED} | {rule for rule, _ in WITHIN_A_GROUP}
    assert broken == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


@pytest.mark.parametrize("over", [{"expert_idx": torch.full((2, 1), 2, dtype=torch.int32)}, {"max_output_size": 1}])
def test_rows_that_no_rank_takes_fault(over: dict[str, Any]) -> None:
    def body(rank: int, name: str) -> str:
        op, call = fused(name, **over)
        REGISTRY[op](**fused(name)[1])
        with pytest.raises(DeviceFault) as caught:
            REGISTRY[op](**call)
        return caught.value.op

    assert on_ranks(1, body) == [FUSED]


@pytest.mark.parametrize(
    "call",
    [fused(weight1=[torch.zeros(2, 16, 1, dtype=torch.int32)]), decode(quant_mode=1), decode(shared_expert_rank_num=1)],
)
def test_what_is_not_computed_says_so(call: tuple[str, dict[str, Any]]) -> None:
    with pytest.raises(KernelNotCovered):
        REGISTRY[call[0]](**call[1])
