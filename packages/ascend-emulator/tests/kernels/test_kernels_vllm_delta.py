"""vLLM-Ascend's ops of linear attention against plain loops, their schemas, refusals and faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, KernelNotCovered, vllm_delta
from hypothesis import given, settings
from hypothesis import strategies as st

CONV, DELTA, GATES = vllm_delta.KERNELS
H, B, F = torch.float16, torch.bfloat16, torch.float32


def draw(*shape: int, dtype: torch.dtype = B, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def i32(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_the_schemas_are_those_of_the_library() -> None:
    for text in vllm_delta.SCHEMAS:
        registered = getattr(torch.ops._C_ascend, text.partition("(")[0]).default._schema
        assert registered == torch._C.parse_schema(f"_C_ascend::{text}")


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(), width=st.integers(2, 4), decode=st.booleans(), biased=st.booleans(), silu=st.booleans(),
    strided=st.booleans(),
)  # fmt: skip
def test_convolution(data: st.DataObject, width: int, decode: bool, biased: bool, silu: bool, strided: bool) -> None:
    dim, rows = 16, 5
    lens = [1] * 3 if decode else data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    slots = [s if data.draw(st.booleans()) else -1 for s in data.draw(st.permutations(range(4)))[: len(lens)]]
    read = [data.draw(st.booleans()) for _ in lens]
    starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
    x, weight, bias = draw(starts[-1], dim), draw(dim, width, seed=1).T, draw(dim, seed=2) if biased else None
    whole = draw(4, rows, dim, 2, seed=3)
    state = whole[..., 0] if strided else whole[..., 0].contiguous()
    before = state.clone()
    output = draw(starts[-1], dim, seed=4)
    wanted = output.float().tolist()
    wanted_state = before.clone()
    for i, slot in enumerate(slots):
        if slot < 0 or not lens[i]:
            continue
        old = before[slot, : width - 1] if decode or read[i] else torch.zeros(width - 1, dim, dtype=B)
        joined = torch.cat([old, x[starts[i] : starts[i + 1]]])
        for t in range(lens[i]):
            for c in range(dim):
                total = sum(float(joined[t + k, c]) * float(weight[k, c]) for k in range(width))
                total += float(bias[c]) if bias is not None else 0.0
                wanted[starts[i] + t][c] = total / (1 + math.exp(-total)) if silu else total
        wanted_state[slot, : width - 1] = joined[1 - width :]
    modes = None if decode else torch.tensor(read)
    location = None if decode else i32(*starts)
    indices = i32(*([s, 9] for s in slots)) if data.draw(st.booleans()) else i32(*slots)
    got = REGISTRY[CONV](output, x, weight, state, bias, location, indices, modes, None, int(silu), -1, int(decode))
    assert got is output and torch.equal(state, wanted_state)
    assert torch.allclose(output.float(), torch.tensor(wanted).view(output.shape), rtol=2e-2, atol=2e-2)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), wide=st.booleans(), gated=st.booleans(), per_key=st.booleans(), drafts=st.booleans())
def test_delta_rule(data: st.DataObject, wide: bool, gated: bool, per_key: bool, drafts: bool) -> None:
    nk, nv, dk, dv, blocks = 1, 2, 4, 3, 12
    lens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    skip = data.draw(st.integers(0, 2))
    tokens = skip + sum(lens) + 1
    query, key, value = draw(tokens, nk, dk), draw(tokens, nk, dk, seed=1), draw(tokens, nv, dv, seed=2)
    state = draw(blocks, nv, dv, dk, dtype=F if wide else B, seed=3)
    beta = draw(tokens, nv, seed=4).float().sigmoid().to(B)
    g = -draw(tokens, nv, dtype=F, seed=5).abs() if gated else None
    gk = -draw(tokens, nv, dk, dtype=F, seed=6).abs() if per_key else None
    places = data.draw(st.permutations(range(blocks)))[:tokens]
    accepted = [data.draw(st.integers(1, max(n, 1))) for n in lens]
    wanted_state, out = state.clone(), {}
    first = skip
    for n, taken in zip(lens, accepted, strict=True):
        for head in range(nv if n else 0):
            current = state[places[first + (taken if drafts else 1) - 1], head].double()
            for token in range(first, first + n):
                for j in range(dk):
                    factor = (float(g[token, head]) if g is not None else 0) + (
                        float(gk[token, head, j]) if gk is not None else 0
                    )
                    current[:, j] *= math.exp(factor)
                k = key[token, 0].double()
                delta = (value[token, head].double() - current @ k) * float(beta[token, head])
                current = current + delta[:, None] * k[None, :]
                out[token, head] = current @ query[token, 0].double() * 0.5
                wanted_state[places[token], head] = current.to(state.dtype)
        first += n
    options = {"num_accepted_tokens": i32(*accepted)} if drafts else {}
    got = REGISTRY[DELTA](
        query, key, value, state, beta=beta, scale=0.5, actual_seq_lengths=i32(skip, *lens),
        ssm_state_indices=i32(*places), g=g, gk=gk, **options,
    )  # fmt: skip
    assert got.dtype == B and got.shape == value.shape
    for (token, head), row in out.items():
        assert torch.allclose(got[token, head].double(), row, rtol=2e-2, atol=2e-2)
    assert torch.allclose(state.float(), wanted_state.float(), rtol=2e-2, atol=2e-2)
    if not wide:
        covered = {token for token, _ in out}
        poison = got.view(torch.int16).eq(-1).flatten(1).all(1).tolist()
        assert poison == [token not in covered for token in range(tokens)]


@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from([H, B]), kept=st.sampled_from([F, H, B]), beta=st.sampled_from([1.0, 0.5]), low=st.booleans()
)
def test_gates(dtype: torch.dtype, kept: torch.dtype, beta: float, low: bool) -> None:
    log, bias = draw(3, dtype=kept), draw(3, dtype=kept, seed=1)
    a, b = draw(2, 3, dtype=dtype, seed=2) * 5, draw(2, 3, dtype=dtype, seed=3)
    g, sigma = REGISTRY[GATES](log, a, b, bias, beta, 1.0 if low else 20.0)
    assert g.shape == sigma.shape == (1, 2, 3) and g.dtype == F and sigma.dtype == dtype
    for row in range(2):
        for head in range(3):
            x = float(a[row, head]) + float(bias[head])
            soft = x if beta * x > (1.0 if low else 20.0) else math.log(1 + math.exp(beta * x)) / beta
            assert math.isclose(float(g[0, row, head]), -math.exp(float(log[head])) * soft, rel_tol=1e-3, abs_tol=1e-5)
            assert math.isclose(float(sigma[0, row, head]), 1 / (1 + math.exp(-float(b[row, head]))), rel_tol=1e-2)


def conv(**over: Any) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {
        "output": draw(3, 16), "x": draw(3, 16), "weight": draw(4, 16), "conv_state": draw(2, 6, 16), "bias_opt": None,
        "query_start_loc_opt": i32(0, 2, 3), "cache_indices_opt": i32(1, 0), "initial_state_mode_opt": None,
        "num_accepted_tokens_opt": None, "activation_mode": 1, "pad_slot_id": -1, "run_mode": 0,
    }  # fmt: skip
    return CONV, options | over


def delta(**over: Any) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {
        "query": draw(3, 1, 4), "key": draw(3, 1, 4), "value": draw(3, 2, 4), "state": draw(4, 2, 4, 4),
        "beta": draw(3, 2), "scale": 0.5, "actual_seq_lengths": i32(0, 2, 1), "ssm_state_indices": i32(0, 1, 2),
    }  # fmt: skip
    return DELTA, options | over


def gates(**over: Any) -> tuple[str, dict[str, Any]]:
    return GATES, {"A_log": draw(3), "a": draw(2, 3), "b": draw(2, 3), "dt_bias": draw(3)} | over


REFUSED: list[tuple[str, tuple[str, dict[str, Any]]]] = [
    ("vconv-output", conv(output=draw(2, 16))),
    ("vconv-dim", conv(x=draw(3, 8), output=draw(3, 8))),
    ("vconv-modes", conv(num_accepted_tokens_opt=i32(1, 1))),
    ("vconv-modes", conv(run_mode=1, initial_state_mode_opt=i32(1, 1))),
    ("vconv-modes", conv(activation_mode=2)),
    ("vconv-batch", conv(cache_indices_opt=i32(1))),
    ("vconv-batch", conv(initial_state_mode_opt=i32(1, 1, 1))),
    ("vconv-batch", conv(cache_indices_opt=None, conv_state=draw(1, 6, 16))),
    ("vdelta-dtype", delta(query=draw(3, 1, 4, dtype=H))),
    ("vdelta-dtype", delta(state=draw(4, 2, 4, 4, dtype=H))),
    ("vdelta-dtype", delta(g=draw(3, 2))),
    ("vdelta-dtype", delta(ssm_state_indices=torch.tensor([0, 1, 2]))),
    ("vdelta-shape", delta(query=draw(3, 2, 4))),
    ("vdelta-shape", delta(state=draw(4, 2, 4))),
    ("vdelta-shape", delta(actual_seq_lengths=i32(3)[0])),
    ("vdelta-shape", delta(ssm_state_indices=i32(0, 1))),
    ("vdelta-heads", delta(query=draw(3, 2, 4), key=draw(3, 2, 4), value=draw(3, 3, 4))),
    ("vdelta-scale", delta(scale=None)),
    ("gates-dtype", gates(b=draw(2, 3, dtype=H))),
    ("gates-dtype", gates(dt_bias=draw(3, dtype=F))),
    ("gates-shape", gates(A_log=draw(2), dt_bias=draw(2))),
    ("gates-shape", gates(a=draw(0, 3), b=draw(0, 3))),
]
SHARED: list[tuple[str, tuple[str, dict[str, Any]]]] = [
    ("conv-width", conv(weight=draw(5, 16))),
    ("conv-rank", conv(weight=draw(4, 32))),
    ("conv-mode", conv(run_mode=2)),
]


@pytest.mark.parametrize(("rule", "call"), [*REFUSED, *SHARED])
def test_it_refuses(refuses: Callable[..., None], rule: str, call: tuple[str, dict[str, Any]]) -> None:
    refuses(rule, call[0], **call[1])


def test_every_rule_has_a_call_that_breaks_it() -> None:
    assert {rule for rule, _ in REFUSED} == {r.id for r in RULES.values() if r.test == Path(__file__).name}


@pytest.mark.parametrize(
    "call",
    [
        conv(cache_indices_opt=i32(1, 2)),
        delta(actual_seq_lengths=i32(0, 2, 2)),
        delta(actual_seq_lengths=i32(-1, 2, 1)),
        delta(ssm_state_indices=i32(0, 1, 4)),
        delta(num_accepted_tokens=i32(3, 1)),
    ],
)
def test_what_lies_outside_faults(call: tuple[str, dict[str, Any]]) -> None:
    REGISTRY[CONV](**conv()[1])
    REGISTRY[DELTA](**delta()[1])
    with pytest.raises(DeviceFault, match="507015") as caught:
        REGISTRY[call[0]](**call[1])
    assert caught.value.op == call[0]


@pytest.mark.parametrize("name", ["beta", "actual_seq_lengths", "ssm_state_indices"])
def test_numbers_that_the_tiling_needs(name: str) -> None:
    with pytest.raises(KernelNotCovered, match=name):
        REGISTRY[DELTA](**delta(**{name: None})[1])
