"""Dispatch and combine over the ranks of a group, here threads with gloo, against plain loops; and their refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, KernelNotCovered, OpRefused, pose
from ascend_emulator.poison import poison_byte
from rank_threads import on_ranks

DISPATCH = "npu::npu_moe_distribute_dispatch"
COMBINE = "npu::npu_moe_distribute_combine"
NORM = "npu::npu_moe_distribute_combine_add_rms_norm"
BF16, FP16 = torch.bfloat16, torch.float16
H = 1024


@pytest.fixture(autouse=True)
def strictest() -> Iterator[None]:
    yield
    pose.set_pose()


def inputs(
    ranks: int, experts: int, tokens: list[int], each: int, *, hidden: int = H, dtype: torch.dtype = BF16, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tokens, experts and weights of every rank."""
    g = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(tokens[rank], hidden, generator=g).to(dtype),
            torch.stack([torch.randperm(experts, generator=g)[:each] for _ in range(tokens[rank])]).int(),
            torch.rand(tokens[rank], each, generator=g),
        )
        for rank in range(ranks)
    ]


def travelling(
    given: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], masks: list[torch.Tensor], expert: int
) -> Iterator[tuple[int, int, int]]:
    """(rank, token, k) of every choice of an expert, in the documents' order."""
    for rank, (x, ids, _) in enumerate(given):
        for token in range(x.size(0)):
            for k in range(ids.size(1)):
                if int(ids[token, k]) == expert and bool(masks[rank][token, k]):
                    yield rank, token, k


CASES = [
    ("_v2", 2, 4, [3, 3], 2, 0, "none", 1),
    ("_v2", 4, 8, [2, 5, 1, 3], 3, 20, "none", 0),
    ("_v2", 3, 6, [4, 4, 4], 4, 0, "tokens", 1),
    ("_v2", 2, 6, [4, 4], 3, 8, "choices", 0),
    ("", 8, 16, [2] * 8, 3, 16, "tokens", 1),
]


@pytest.mark.parametrize(("version", "ranks", "experts", "tokens", "each", "global_bs", "masked", "kind"), CASES)
@pytest.mark.parametrize("quant", [0, 2])
def test_rows_go_to_their_experts_and_come_back(
    version: str, ranks: int, experts: int, tokens: list[int], each: int, global_bs: int, masked: str, kind: int,
    quant: int,
) -> None:  # fmt: skip
    pose.set_pose(chip="A3")
    hidden = H if version else 7168
    given = inputs(ranks, experts, tokens, each, hidden=hidden)
    local, g = experts // ranks, torch.Generator().manual_seed(5)
    masks = [torch.ones(n, each, dtype=torch.bool) for n in tokens]
    arguments: list[torch.Tensor | None] = [None] * ranks
    if masked == "tokens":
        arguments = [torch.arange(n) < n - 1 for n in tokens]
        masks = [m[:, None].expand(-1, each) for m in arguments if m is not None]
    elif masked == "choices":
        masks = [torch.rand(n, each, generator=g) < 0.6 for n in tokens]
        arguments = list(masks)
    scales = torch.rand(experts, hidden, generator=g) + 0.5 if quant and version else None
    weighted = experts == 8

    def body(rank: int, name: str) -> Any:
        x, ids, weights = given[rank]
        place = (name, ranks, rank, experts)
        out = REGISTRY[DISPATCH + version](
            x, ids, *place, scales=scales, x_active_mask=arguments[rank], quant_mode=quant, global_bs=global_bs,
            expert_token_nums_type=kind, expert_scales=weights if weighted else None,
        )  # fmt: skip
        counts = out[3] if kind else out[3].diff(prepend=torch.zeros(1).long())
        rows = out[0].to(BF16) if quant else out[0].clone()
        factors = torch.arange(rank * local, (rank + 1) * local).repeat_interleave(counts) + 1.0
        rows[: factors.numel()] = (rows[: factors.numel()].float() * factors[:, None]).to(BF16)
        back = REGISTRY[COMBINE + version](
            rows, ids, out[2], out[4], weights, *place, x_active_mask=arguments[rank], global_bs=global_bs
        )
        return out, back

    results = on_ranks(ranks, body)
    sent = [torch.zeros(n, each, hidden) for n in tokens]
    for rank, (out, _) in enumerate(results):
        rows, row_scales, index, totals, sums, _, carried = out
        size = (global_bs or max(tokens) * ranks) * min(local, each)
        assert rows.shape == (size, hidden) and rows.dtype == (torch.int8 if quant else BF16)
        place = 0
        ends: list[int] = []
        each_total: list[int] = []
        for expert in range(rank * local, (rank + 1) * local):
            before = place
            by_rank = [0] * ranks
            for source, token, k in travelling(given, masks, expert):
                row = given[source][0][token]
                if quant:
                    wide = row.float() * (1 if scales is None else scales[expert])
                    top = wide.abs().max()
                    row = (wide * (127 / top)).round().clamp(-128, 127).to(torch.int8)
                    assert torch.isclose(row_scales[place], top / 127)
                assert torch.equal(rows[place], row)
                sent[source][token, k] = (row.float() * (expert + 1)).to(BF16).float()
                if version:
                    assert index[3 * place : 3 * place + 3].tolist() == [source, token, k]
                else:
                    assert int(results[source][0][2][token * each + k]) == by_rank[source]
                if weighted:
                    assert carried[place] == given[source][2][token, k]
                by_rank[source] += 1
                place += 1
            ends.extend(before + n for n in itertools.accumulate(by_rank))
            each_total.append(place - before)
        assert totals.tolist() == (each_total if kind else list(itertools.accumulate(each_total)))
        assert sums[:experts].tolist() == ends and not sums[experts:].any()
        rest = rows[place:].reshape(-1).view(torch.uint8)
        assert bool((rest == poison_byte(rows.dtype)).all())
    for rank, (_, back) in enumerate(results):
        wanted = (sent[rank] * given[rank][2][..., None]).sum(1)
        assert torch.allclose(back.float(), wanted, rtol=0.02, atol=0.05 if not quant else 5)


def pair(rank: int, name: str, dispatch: dict[str, Any], combine: dict[str, Any], op: str = COMBINE) -> Any:
    """Dispatch and combine, second versions, on two ranks with 4 experts; positional arguments by name."""
    x, ids, weights = inputs(2, 4, [3, 3], 2)[rank]
    call = {
        "x": x, "expert_ids": ids, "group_ep": name, "ep_world_size": 2, "ep_rank_id": rank, "moe_expert_num": 4,
    } | dispatch  # fmt: skip
    sent = REGISTRY[DISPATCH + "_v2"](**call)
    index = "expand_idx" if op == NORM else "assist_info_for_combine"
    back = {
        "expand_x": sent[0], "expert_ids": ids, index: sent[2], "ep_send_counts": sent[4], "expert_scales": weights,
        "group_ep": name, "ep_world_size": 2, "ep_rank_id": rank, "moe_expert_num": 4,
    }  # fmt: skip
    if op == NORM:
        back |= {"residual_x": torch.ones(3, 1, H, dtype=BF16), "gamma": torch.ones(H, dtype=BF16)}
    return REGISTRY[op if op == NORM else op + "_v2"](**(back | combine))


def test_experts_without_a_rank_and_shared_experts() -> None:
    x = torch.randn(2, H, generator=torch.Generator().manual_seed(1)).to(BF16)
    ids = torch.tensor([[0, 4, 5], [6, 3, 5]], dtype=torch.int32)  # 4: zero, 5: copy, 6: constant
    weights = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    alpha, beta, bias, shared = (torch.full((1, H), n, dtype=BF16) for n in (0.5, 2.0, 3.0, 7.0))
    kinds = {"zero_expert_num": 1, "copy_expert_num": 1, "const_expert_num": 1}

    def body(rank: int, name: str) -> Any:
        place = (name, 2, rank, 4)
        sent = REGISTRY[DISPATCH + "_v2"](x, ids, *place, **kinds)
        return REGISTRY[COMBINE + "_v2"](
            sent[0], ids, sent[2], sent[4], weights, *place, **kinds, ori_x=x, const_expert_alpha_1=alpha,
            const_expert_alpha_2=beta, const_expert_v=bias, shared_expert_x=shared.expand(2, H),
        )  # fmt: skip

    wanted = torch.stack([(1 + 3) * x[0].float() + 7, 4 * (0.5 * x[1].float() + 6) + (5 + 6) * x[1].float() + 7])
    for out in on_ranks(2, body):
        assert torch.allclose(out.float(), wanted, rtol=0.01, atol=0.1)


def test_the_form_with_a_norm() -> None:
    plain = on_ranks(2, lambda rank, name: pair(rank, name, {}, {}))
    normed = on_ranks(2, lambda rank, name: pair(rank, name, {}, {}, NORM))
    for sums, (out, reciprocal, total) in zip(plain, normed, strict=True):
        assert out.shape == total.shape == (3, 1, H) and reciprocal.shape == (3, 1, 1)
        assert torch.equal(total, sums[:, None] + 1)
        rms = total.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        assert torch.allclose(out.float(), total.float() * rms, rtol=0.01)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


I32 = torch.int32
REFUSED_DISPATCH: list[tuple[str, dict[str, Any]]] = [
    ("ep-group", {"group_ep": "nobody"}),
    ("ep-group", {"group_ep": "x" * 128}),
    ("ep-experts", {"moe_expert_num": 5}),
    ("ep-experts", {"moe_expert_num": 1026}),
    ("ep-each", {"moe_expert_num": 2, "expert_ids": zeros(3, 3, dtype=I32)}),
    ("ep-each", {"moe_expert_num": 64, "expert_ids": zeros(3, 13, dtype=I32), "comm_alg": "fullmesh_v2"}),
    ("ep-x", {"x": zeros(3, H)}),
    ("ep-x", {"x": zeros(3, 1, H, dtype=BF16)}),
    ("ep-ids", {"expert_ids": zeros(3, 2).long()}),
    ("ep-ids", {"expert_ids": zeros(2, 2, dtype=I32)}),
    ("ep-ids-twice", {"expert_ids": zeros(3, 2, dtype=I32)}),
    ("ep-mask", {"x_active_mask": zeros(3)}),
    ("ep-mask", {"x_active_mask": zeros(4).bool()}),
    ("ep-mask-order", {"x_active_mask": torch.tensor([True, False, True])}),
    ("ep-quant", {"quant_mode": 1}),
    ("ep-quant", {"scales": zeros(4, H)}),
    ("ep-quant", {"quant_mode": 2, "scales": zeros(3, H)}),
    ("ep-expert-scales", {"expert_scales": zeros(3, 1)}),
    ("ep-tp", {"tp_world_size": 2}),
    ("ep-nums-type", {"expert_token_nums_type": 2}),
    ("ep-algorithm", {"comm_alg": "tree"}),
    ("ep-global-bs", {"global_bs": 5}),
    ("ep-hidden-a2", {"x": zeros(3, 1040, dtype=BF16)}),
    ("ep-hidden-a3", {"x": zeros(3, 512, dtype=BF16)}),
    ("ep-tokens-a2", {"x": zeros(257, H, dtype=BF16)}),
    ("ep-tokens-a3", {"x": zeros(257, H, dtype=BF16), "comm_alg": "fullmesh_v2"}),
]
REFUSED_COMBINE: list[tuple[str, dict[str, Any]]] = [
    ("ep-rows", {"expand_x": zeros(12, H)}),
    ("ep-counts", {"ep_send_counts": zeros(3, dtype=I32)}),
    ("ep-index", {"assist_info_for_combine": zeros(12, dtype=I32)}),
    ("ep-expert-scales", {"expert_scales": zeros(3, 2).half()}),
    ("ep-shared-x", {"shared_expert_x": zeros(3, H)}),
    ("ep-ori-x", {"copy_expert_num": 1}),
    ("ep-ori-x", {"const_expert_num": 1, "ori_x": zeros(3, H, dtype=BF16)}),
    ("ep-ori-x", {"ori_x": zeros(3, H)}),
]
REFUSED_NORM: list[tuple[str, dict[str, Any]]] = [
    ("ep-norm-dtype", {"expand_x": zeros(12, H).half()}),
    ("ep-norm-residual", {"residual_x": zeros(3, H, dtype=BF16)}),
    ("ep-norm-usual", {"group_list": zeros(2)}),
]
REFUSED_ALONE: list[tuple[str, str, str, int, dict[str, Any]]] = [
    ("ep-world-a2", "_v2", "A2", 9, {}),
    ("ep-world-a3", "_v2", "A3", 769, {}),
    ("ep-world-v1-a2", "", "A2", 8, {}),
    ("ep-world-v1-a3", "", "A3", 4, {}),
]
REFUSED_FIRST: list[tuple[str, int, int]] = [("ep-hidden-v1-a3", H, 2), ("ep-each-v1-a3", 7168, 9)]
REFUSED_TOGETHER = ["ep-agree", "ep-mask-uneven", "ep-global-bs"]


def refuses(rule: str, ranks: int, body: Callable[[int, str], Any]) -> None:
    with pytest.raises(OpRefused) as caught:
        on_ranks(ranks, body)
    assert caught.value.rule is RULES[rule], caught.value


@pytest.mark.parametrize(("rule", "change"), REFUSED_DISPATCH, ids=lambda v: v if isinstance(v, str) else "")
def test_dispatch_refuses(rule: str, change: dict[str, Any]) -> None:
    if rule.endswith("-a3"):
        pose.set_pose(chip="A3")
    if rule.startswith("ep-tokens"):
        change = change | {"expert_ids": torch.tensor([[0, 1]], dtype=I32).expand(257, 2)}
    refuses(rule, 2, lambda rank, name: pair(rank, name, change, {}))


@pytest.mark.parametrize(("rule", "change"), REFUSED_COMBINE, ids=lambda v: v if isinstance(v, str) else "")
def test_combine_refuses(rule: str, change: dict[str, Any]) -> None:
    refuses(rule, 2, lambda rank, name: pair(rank, name, {}, change))


@pytest.mark.parametrize(("rule", "change"), REFUSED_NORM, ids=lambda v: v if isinstance(v, str) else "")
def test_the_form_with_a_norm_refuses(rule: str, change: dict[str, Any]) -> None:
    refuses(rule, 2, lambda rank, name: pair(rank, name, {}, change, NORM))


@pytest.mark.parametrize(("rule", "version", "chip", "ranks", "change"), REFUSED_ALONE)
def test_sizes_of_groups(rule: str, version: str, chip: str, ranks: int, change: dict[str, Any]) -> None:
    pose.set_pose(chip=chip)
    with pytest.raises(OpRefused) as caught:
        REGISTRY[DISPATCH + version](zeros(1, H, dtype=BF16), zeros(1, 1, dtype=I32), "g", ranks, 0, ranks)
    assert caught.value.rule is RULES[rule]


@pytest.mark.parametrize(("rule", "hidden", "each"), REFUSED_FIRST)
def test_the_first_version_is_narrower(rule: str, hidden: int, each: int) -> None:
    pose.set_pose(chip="A3")
    x, ids = zeros(1, hidden, dtype=BF16), torch.arange(each, dtype=I32)[None]
    refuses(rule, 8, lambda rank, name: REGISTRY[DISPATCH](x, ids, name, 8, rank, 16))


@pytest.mark.parametrize("rule", REFUSED_TOGETHER)
def test_ranks_that_differ(rule: str) -> None:
    def body(rank: int, name: str) -> Any:
        count = 3 - rank if rule != "ep-agree" else 2
        x, ids = zeros(count, H, dtype=BF16), torch.tensor([[0, 1]], dtype=I32).expand(count, 2)
        mask = torch.arange(count) < 1 if rule == "ep-mask-uneven" else None
        experts = 4 + 2 * rank if rule == "ep-agree" else 4
        return REGISTRY[DISPATCH + "_v2"](x, ids, name, 2, rank, experts, x_active_mask=mask)

    refuses(rule, 2, body)


def test_every_rule_has_a_call_that_breaks_it() -> None:
    mine = {rule.id for rule in RULES.values() if rule.test == "test_kernels_expert_parallel.py"}
    rows = [*REFUSED_DISPATCH, *REFUSED_COMBINE, *REFUSED_NORM, *REFUSED_ALONE, *REFUSED_FIRST]
    assert {row[0] for row in rows} | set(REFUSED_TOGETHER) == mine


@pytest.mark.parametrize(
    ("dispatch", "combine"),
    [
        ({"expert_ids": torch.full((3, 2), 4, dtype=I32)}, {}),
        ({}, {"ep_send_counts": torch.tensor([1, 2, 3, 99], dtype=I32)}),
        ({}, {"ep_send_counts": torch.tensor([3, 2, 1, 0], dtype=I32)}),
        ({}, {"assist_info_for_combine": torch.full((1536,), 9, dtype=I32)}),
        ({}, {"expert_ids": torch.tensor([[0, 1]] * 3, dtype=I32)}),
    ],
)
def test_what_does_not_come_from_dispatch_is_a_fault(dispatch: dict[str, Any], combine: dict[str, Any]) -> None:
    with pytest.raises(DeviceFault):
        on_ranks(2, lambda rank, name: pair(rank, name, dispatch, combine))


def test_the_first_version_wants_its_index() -> None:
    pose.set_pose(chip="A3")

    def body(rank: int, name: str) -> Any:
        x, ids, weights = inputs(8, 8, [2] * 8, 2, hidden=7168)[rank]
        place = (name, 8, rank, 8)
        sent = REGISTRY[DISPATCH](x, ids, *place)
        return REGISTRY[COMBINE](sent[0], ids, sent[2] + 1, sent[4], weights, *place)

    with pytest.raises(DeviceFault, match="expand_idx"):
        on_ranks(8, body)


@pytest.mark.parametrize(
    ("dispatch", "combine"),
    [
        ({"x": zeros(3, H, dtype=I32)}, {}),
        ({"shared_expert_rank_num": 1}, {}),
        ({"elastic_info": zeros(4)}, {}),
        ({}, {"comm_quant_mode": 2}),
        ({}, {"performance_info": zeros(2)}),
    ],
)
def test_forms_that_are_not_computed_say_so(dispatch: dict[str, Any], combine: dict[str, Any]) -> None:
    with pytest.raises(KernelNotCovered):
        on_ranks(2, lambda rank, name: pair(rank, name, dispatch, combine))
