"""npu_chunk_gated_delta_rule against the document's matrix formula, and its refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, pose

OP = "npu::npu_chunk_gated_delta_rule"
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
Refuses = Callable[..., None]


@pytest.fixture(autouse=True)
def strictest() -> Iterator[None]:
    yield
    pose.set_pose()


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def call(dk: int = 128, dv: int = 128, **over: Any) -> dict[str, Any]:
    """Requests of 5, 0 and 2 tokens; 2 heads of key, 4 of value."""
    given: dict[str, Any] = {
        "query": torch.nn.functional.normalize(draw(7, 2, dk), dim=-1),
        "key": torch.nn.functional.normalize(draw(7, 2, dk, seed=1), dim=-1),
        "value": draw(7, 4, dv, seed=2),
        "beta": draw(7, 4, seed=3).sigmoid(),
        "initial_state": draw(3, 4, dv, dk, seed=4),
        "actual_seq_lengths": torch.tensor([5, 0, 2], dtype=I32),
        "scale": 0.5,
        "g": -draw(7, 4, dtype=F32, seed=5).abs(),
    }
    return given | over


@pytest.mark.parametrize("form", [{}, {"g": None}, {"scale": None}])
@pytest.mark.parametrize("posed", [{}, {"cann": "9.1"}, {"cann": "9.1", "chip": "A5"}])
def test_it_is_the_documents_formula(form: dict[str, Any], posed: dict[str, str]) -> None:
    pose.set_pose(**posed)
    given = call(*(16, 8) if posed else (128, 128), **form)
    if "chip" in posed:
        given["initial_state"] = given["initial_state"].float()
    out, after = REGISTRY[OP](**given)
    assert out.dtype == BF16 and after.dtype == given["initial_state"].dtype
    first = 0
    for request, length in enumerate((5, 0, 2)):
        for head in range(4):
            state = given["initial_state"][request, head].double()
            for token in range(first, first + length):
                q, k = (given[name][token, head // 2].double() for name in ("query", "key"))
                a = 1.0 if given["g"] is None else given["g"][token, head].double().exp()
                b, v = given["beta"][token, head].double(), given["value"][token, head].double()
                state = state @ (a * (torch.eye(k.numel()).double() - b * torch.outer(k, k))) + b * torch.outer(v, k)
                want = state @ q * (1 if given["scale"] is None else given["scale"])
                assert torch.allclose(out[token, head].double(), want, rtol=0.01, atol=0.01)
            assert torch.allclose(after[request, head].double(), state, rtol=0.01, atol=0.01)
        first += length


REFUSED: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("chunk-given", {"beta": None}, {}),
    ("chunk-dtype", {"query": draw(7, 2, 128, dtype=F32)}, {}),
    ("chunk-dtype", {"g": draw(7, 4)}, {}),
    ("chunk-dtype", {"actual_seq_lengths": torch.tensor([5, 0, 2])}, {}),
    ("chunk-state", {"initial_state": draw(3, 4, 128, 128, dtype=torch.float16)}, {}),
    ("chunk-state-a5", {"initial_state": draw(3, 4, 128, 128, dtype=F32)}, {"chip": "A3"}),
    ("chunk-shape", {"query": draw(7, 256)}, {}),
    ("chunk-shape", {"beta": draw(7, 2)}, {}),
    ("chunk-shape", {"initial_state": draw(2, 4, 128, 128)}, {}),
    ("chunk-empty", {"query": draw(7, 2, 0), "key": draw(7, 2, 0), "initial_state": draw(3, 4, 128, 0)}, {}),
    ("chunk-heads", {"query": draw(7, 3, 128), "key": draw(7, 3, 128)}, {}),
    ("chunk-heads", {"dk": 144}, {"cann": "9.1"}),
    ("chunk-width", {"dk": 64}, {"cann": "9.0"}),
]


@pytest.mark.parametrize(("rule", "change", "posed"), REFUSED)
def test_it_refuses(refuses: Refuses, rule: str, change: dict[str, Any], posed: dict[str, str]) -> None:
    pose.set_pose(**posed)
    refuses(rule, OP, **call(**change))


def test_every_rule_has_a_call_that_breaks_it() -> None:
    mine = {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}
    assert {rule for rule, _, _ in REFUSED} == mine


@pytest.mark.parametrize("lengths", [[5, 0, 3], [8, -1, 0]])
def test_lengths_that_do_not_add_up_are_faults(lengths: list[int]) -> None:
    with pytest.raises(DeviceFault):
        REGISTRY[OP](**call(actual_seq_lengths=torch.tensor(lengths, dtype=I32)))
