"""Owns the proof of expert-parallel MoE: one rank equals a loop, two ranks over gloo equal one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import spec_kernels as sk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def make(seed: int, tokens: int, experts: int, choices: int, hidden: int = 6, inner: int = 5) -> dict[str, Any]:
    noise, numbers = torch.Generator().manual_seed(seed), random.Random(seed)
    ids = [[numbers.randrange(-1, experts) for _ in range(choices)] for _ in range(tokens)]
    return {
        "hidden": torch.randn(tokens, hidden, generator=noise),
        "ids": torch.tensor(ids, dtype=torch.int64).view(tokens, choices),
        "weights": torch.rand(tokens, choices, generator=noise),
        "w13": torch.randn(experts, 2 * inner, hidden, generator=noise),
        "w2": torch.randn(experts, hidden, inner, generator=noise),
    }


def loop(case: dict[str, Any]) -> tuple[torch.Tensor, list[int]]:
    out = torch.zeros_like(case["hidden"], dtype=torch.float64)
    counts = [0] * case["w13"].shape[0]
    for token, ids in enumerate(case["ids"].tolist()):
        for choice, expert in enumerate(ids):
            if expert >= 0:
                counts[expert] += 1
                gate, up = (case["w13"][expert].double() @ case["hidden"][token].double()).chunk(2)
                value = case["w2"][expert].double() @ (gate * torch.sigmoid(gate) * up)
                out[token] += float(case["weights"][token, choice]) * value
    return out, counts


def run(case: dict[str, Any], layout: sk.ExpertLayout, **options: Any) -> sk.MoeResult:
    hidden, ids, weights, w13, w2 = (case[name] for name in ("hidden", "ids", "weights", "w13", "w2"))
    return sk.expert_parallel_moe(hidden, ids, weights, w13, w2, layout, **options)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), tokens=st.integers(0, 9), experts=st.integers(1, 6), choices=st.integers(1, 4))
def test_one_rank(seed: int, tokens: int, experts: int, choices: int) -> None:
    case = make(seed, tokens, experts, choices)
    found = run(case, sk.ExpertLayout(experts))
    out, counts = loop(case)
    torch.testing.assert_close(found.hidden_states.double(), out, atol=1e-4, rtol=1e-4)
    assert found.expert_counts.tolist() == counts


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bounds", [[0, 5, 9], [0, 0, 9]])
def test_two_ranks_equal_one(tmp_path: Path, bounds: list[int]) -> None:
    """The second case has a rank without tokens, which must take part."""
    case = {**make(3, 9, 4, 3), "bounds": bounds}
    torch.save(case, tmp_path / "case")
    script = str(Path(__file__).with_name("moe_rank.py"))
    names = [str(tmp_path / name) for name in ("store", "case")]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), "2", *names, str(tmp_path / str(rank))], env=env)
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    parts = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    alone = run(case, sk.ExpertLayout(4))
    torch.testing.assert_close(torch.cat([part["out"] for part in parts]), alone.hidden_states, atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.cat([part["counts"] for part in parts]), alone.expert_counts)


def test_refusals() -> None:
    case = make(1, 3, 4, 2)
    with pytest.raises(sk.ShapeError, match="multiple of the ranks"):
        sk.ExpertLayout(5, 2)
    with pytest.raises(sk.ShapeError, match="group"):
        half = {**case, "w13": case["w13"][:2], "w2": case["w2"][:2]}
        run(half, sk.ExpertLayout(4, 2, 0))
    with pytest.raises(sk.LengthError, match="at most 2 a rank"):
        run(case, sk.ExpertLayout(4, max_tokens=2))
    with pytest.raises(sk.LengthError, match="below 4"):
        run({**case, "ids": torch.full((3, 2), 4)}, sk.ExpertLayout(4))
    with pytest.raises(sk.ShapeError, match="w13"):
        run({**case, "w13": case["w13"][:, :8]}, sk.ExpertLayout(4))


def test_the_fused_operator_is_a_choice_with_conditions() -> None:
    layout = sk.ExpertLayout(8, 2, 0, max_tokens=128, comm_name="ep")
    good: dict[str, Any] = {
        "device": "npu:3", "dtype": torch.bfloat16, "hidden": 2048, "choices": 8,
        "capabilities": sk.Capabilities(torch_npu="2.12.0"),
    }  # fmt: skip
    assert sk.fused_moe_reason(layout, **good) is None
    for change, reason in (
        ({"device": "cuda:0"}, "npu only"), ({"dtype": torch.float32}, "bfloat16"), ({"hidden": 512}, "1024"),
        ({"hidden": 7200}, "7168"), ({"choices": 17}, "16 experts"), ({"capabilities": sk.Capabilities()}, "installed"),
    ):  # fmt: skip
        found = sk.fused_moe_reason(layout, **{**good, **change})
        assert found is not None and reason in found
    for layout_change, reason in (
        ({"comm_name": None}, "not asked for"), ({"max_tokens": None}, "limit"), ({"max_tokens": 300}, "256 tokens"),
        ({"ranks": 1, "num_experts": 8}, "ranks"), ({"num_experts": 2048}, "1024 experts"),
    ):  # fmt: skip
        found = sk.fused_moe_reason(replace(layout, **layout_change), **good)
        assert found is not None and reason in found
    a3 = sk.Capabilities(torch_npu="2.12.0", chip="910C")
    assert sk.fused_moe_reason(replace(layout, max_tokens=300), **{**good, "hidden": 8192, "capabilities": a3}) is None
