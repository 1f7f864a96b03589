"""Gated delta rules and the convolution before them against plain loops, and their refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, KernelNotCovered
from ascend_emulator.poison import poison_byte

NPU = "npu::npu_recurrent_gated_delta_rule"
SGL = "npu::recurrent_gated_delta_rule"
CONV = "npu::causal_conv1d"
BF16, FP16, I32 = torch.bfloat16, torch.float16, torch.int32
Refuses = Callable[..., None]
Call = dict[str, Any]


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def i32(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=I32)


def delta(seed: int = 0, *, nk: int = 2, nv: int = 4, dk: int = 16, dv: int = 8, **over: Any) -> Call:
    """Requests of 3, 1 and 2 tokens on 9 blocks of state."""
    call: Call = {
        "query": torch.nn.functional.normalize(draw(6, nk, dk, seed=seed), dim=-1),
        "key": torch.nn.functional.normalize(draw(6, nk, dk, seed=seed + 1), dim=-1),
        "value": draw(6, nv, dv, seed=seed + 2),
        "state": draw(9, nv, dv, dk, seed=seed + 3),
        "beta": draw(6, nv, seed=seed + 4).sigmoid(),
        "scale": 0.25,
        "actual_seq_lengths": i32(3, 1, 2),
        "ssm_state_indices": i32(4, 1, 8, 0, 3, 2),
        "num_accepted_tokens": i32(2, 1, 1),
        "g": -draw(6, nv, dtype=torch.float32, seed=seed + 5).abs(),
        "gk": -draw(6, nv, dk, dtype=torch.float32, seed=seed + 6).abs(),
    }
    return call | over


def loop(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """One number at a time, in float64; the states rounded where they are written."""
    q, k, v = (call[name].double() for name in ("query", "key", "value"))
    before, after = call["state"], call["state"].clone()
    out = torch.zeros(call["value"].shape, dtype=torch.float64)
    each, first = v.size(1) // k.size(1), 0
    accepted = [1, 1, 1] if call["num_accepted_tokens"] is None else call["num_accepted_tokens"].tolist()
    for length, taken in zip(call["actual_seq_lengths"].tolist(), accepted, strict=True):
        for head in range(v.size(1)):
            state = before[int(call["ssm_state_indices"][first + taken - 1]), head].double()
            for t in range(first, first + length):
                a = 1.0 if call["g"] is None else call["g"][t, head].double().exp()
                if call["gk"] is not None:
                    a = a * call["gk"][t, head].double().exp()[None]
                b, key = call["beta"][t, head].double(), k[t, head // each]
                identity = torch.eye(key.numel(), dtype=torch.float64)
                # The document's first form: S (a (I - b k k')) + b v k', with the decay by columns.
                state = (state * a) @ (identity - b * torch.outer(key, key)) + b * torch.outer(v[t, head], key)
                out[t, head] = state @ q[t, head // each] * call["scale"]
                after[int(call["ssm_state_indices"][t]), head] = state.to(BF16)
        first += length
    return out, after


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("gone", [[], ["g"], ["gk"], ["g", "gk"], ["num_accepted_tokens"]])
@pytest.mark.parametrize("seed", range(3))
def test_the_delta_rule_is_the_documents_formula(gone: list[str], seed: int) -> None:
    call = delta(seed) | dict.fromkeys(gone)
    wanted, states = loop(call)
    given = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    out = REGISTRY[NPU](**given)
    assert out.dtype == BF16 and close(out, wanted) and close(given["state"], states)
    functional, after = REGISTRY[NPU + "_functional"](**call)
    assert torch.equal(functional, out) and torch.equal(after, given["state"])
    untouched = [block for block in range(9) if block not in call["ssm_state_indices"].tolist()]
    assert torch.equal(after[untouched], call["state"][untouched])


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("delta-dtype", {"query": draw(6, 2, 16, dtype=FP16)}),
        ("delta-dtype", {"g": draw(6, 4)}),
        ("delta-dtype", {"ssm_state_indices": torch.zeros(6).long()}),
        ("delta-shape", {"query": draw(6, 32)}),
        ("delta-shape", {"value": draw(5, 4, 8)}),
        ("delta-shape", {"num_accepted_tokens": i32(1, 1)}),
        ("delta-heads", {"query": draw(6, 3, 16), "key": draw(6, 3, 16)}),
        ("delta-heads", {"query": draw(6, 2, 513), "key": draw(6, 2, 513), "state": draw(9, 4, 8, 513), "gk": None}),
        ("delta-blocks", {"state": draw(5, 4, 8, 16)}),
    ],
)
def test_the_delta_rule_refuses(refuses: Refuses, rule: str, change: Call) -> None:
    refuses(rule, NPU, **delta(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"actual_seq_lengths": i32(3, 1, 3)},
        {"actual_seq_lengths": i32(6, 0, 0)},
        {"ssm_state_indices": i32(4, 1, 9, 0, 3, 2)},
        {"ssm_state_indices": i32(4, 1, 8, -1, 3, 2)},
        {"num_accepted_tokens": i32(4, 1, 1)},
        {"num_accepted_tokens": i32(0, 1, 1)},
    ],
)
def test_numbers_outside_are_faults(change: Call) -> None:
    with pytest.raises(DeviceFault):
        REGISTRY[NPU](**delta(**change))


def test_what_none_means_is_not_documented() -> None:
    for name in ("beta", "scale", "actual_seq_lengths", "ssm_state_indices"):
        with pytest.raises(KernelNotCovered):
            REGISTRY[NPU](**(delta() | {name: None}))


def mixed(drafts: bool = True, seed: int = 0, **over: Any) -> Call:
    """Three requests of 2 tokens on slots 4, 0 and 2 of 5; heads 2 and 4, widths 16 and 8."""
    call: Call = {
        "mix_qkv": draw(3, 2, 96, seed=seed),
        "recurrent_state": draw(5 if drafts else 10, 4, 8, 16, seed=seed + 1),
        "beta": draw(3, 2, 4, seed=seed + 2),
        "scale": 0.25,
        "actual_seq_lengths": i32(2, 2, 1),
        "ssm_state_indices": i32([8, 9], [0, 1], [4, 5]),
        "nk": 2,
        "nv": 4,
        "num_accepted_tokens": i32(1, 2, 1),
        "g": -draw(3, 2, 4, dtype=torch.float32, seed=seed + 3).abs(),
    }
    if drafts:
        call |= {"intermediate_state": draw(10, 4, 8, 16, seed=seed + 4), "cache_indices": i32(4, 0, 2)}
    return call | over


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("gone", [[], ["g"], ["num_accepted_tokens"]])
def test_sgls_delta_rule_is_the_same_on_one_tensor(drafts: bool, gone: list[str]) -> None:
    call = mixed(drafts) | dict.fromkeys(gone)
    given = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    out = REGISTRY[SGL](**given)
    q, k, v = call["mix_qkv"].float().split([32, 32, 32], -1)
    states = call["intermediate_state" if drafts else "recurrent_state"].clone()
    accepted = [1, 1, 1] if "num_accepted_tokens" in gone else [1, 2, 1]
    if drafts:  # a request that starts from the state of its first token starts from its slot
        for row, (slot, taken) in enumerate(zip((4, 0, 2), accepted, strict=True)):
            if taken == 1:
                states[2 * slot] = call["recurrent_state"][slot]
            assert call["ssm_state_indices"][row, 0] == 2 * slot
    tokens = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    rows = tuple(torch.tensor(tokens).T)
    norm = torch.nn.functional.normalize
    plain = {
        "query": norm(q[rows].view(5, 2, 16), dim=-1), "key": norm(k[rows].view(5, 2, 16), dim=-1),
        "value": v[rows].view(5, 4, 8), "state": states, "beta": call["beta"][rows].float().sigmoid(), "scale": 0.25,
        "actual_seq_lengths": i32(2, 2, 1), "ssm_state_indices": call["ssm_state_indices"][rows],
        "num_accepted_tokens": i32(*accepted), "g": None if call["g"] is None else call["g"][rows], "gk": None,
    }  # fmt: skip
    wanted, after = loop(plain)
    assert close(out[rows], wanted)
    assert bool((out[2, 1].reshape(-1).view(torch.uint8) == poison_byte(BF16)).all())
    written = call["ssm_state_indices"][rows].long()
    assert close(given["intermediate_state" if drafts else "recurrent_state"][written], after[written])
    if drafts:
        assert torch.equal(given["recurrent_state"], call["recurrent_state"])


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("delta-mixed", {"mix_qkv": draw(3, 2, 95)}),
        ("delta-mixed", {"nv": 2}),
        ("delta-mixed", {"beta": draw(3, 2, 2)}),
        ("delta-mixed", {"ssm_state_indices": i32(8, 9, 0)}),
        ("delta-mixed-dtype", {"beta": draw(3, 2, 4, dtype=torch.float32)}),
        ("delta-mixed-dtype", {"ssm_state_indices": torch.zeros(3, 2).long()}),
        (
            "delta-mixed-s",
            {"mix_qkv": draw(1, 9, 96), "beta": draw(1, 9, 4), "ssm_state_indices": torch.zeros(1, 9, dtype=I32)},
        ),
        ("delta-mixed-gk", {"gk": draw(3, 2, 4, 16)}),
        ("delta-mixed-cache", {"cache_indices": None}),
    ],
)
def test_sgls_delta_rule_refuses(refuses: Refuses, rule: str, change: Call) -> None:
    refuses(rule, SGL, **mixed(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"cache_indices": i32(5, 0, 2)},
        {"num_accepted_tokens": i32(3, 1, 1)},
        {"ssm_state_indices": i32([8, 10], [0, 1], [4, 5])},
    ],
)
def test_sgls_delta_rule_faults(change: Call) -> None:
    with pytest.raises(DeviceFault):
        REGISTRY[SGL](**mixed(**change))


def conv(width: int = 4, rows: int = 6, dtype: torch.dtype = BF16, **over: Any) -> Call:
    """Requests of 3, 1 and 2 tokens on slots 2, none and 0 of 4; 16 channels."""
    call: Call = {
        "x": draw(7, 16, dtype=dtype),
        "weight": draw(width, 16, dtype=dtype, seed=1),
        "conv_states": draw(4, rows, 16, dtype=dtype, seed=2),
        "bias": draw(16, dtype=dtype, seed=3),
        "query_start_loc": i32(0, 3, 4, 6),
        "cache_indices": i32(2, -1, 0),
        "activation_mode": 1,
        "run_mode": 1,
    }
    return call | over


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("form", ["prompt", "first", "decode", "drafts", "drafts in few rows"])
def test_the_convolution_is_a_loop(width: int, dtype: torch.dtype, form: str) -> None:
    call = conv(width, 4 if "few" in form else 6, dtype)
    if form == "prompt":
        call |= {"run_mode": 0, "has_initial_state": torch.tensor([False, True, True])}
    elif form == "first":
        call |= {"run_mode": 0, "bias": None, "activation_mode": 0}
    elif "drafts" in form:
        call["num_accepted_tokens"] = i32(3, 1, 9)
    wanted, states = torch.zeros(7, 16), call["conv_states"].clone()
    rows = states.size(1)
    for row, (slot, first, end) in enumerate(((2, 0, 3), (-1, 3, 4), (0, 4, 6))):
        if slot < 0:
            continue
        drafts = "drafts" in form and width == 4
        offset = min((3, 1, 9)[row] - 1, rows - 3) if drafts else 0
        history = call["conv_states"][slot, offset : offset + width - 1]
        if form == "first" or (form == "prompt" and row == 0):
            history = torch.zeros_like(history)
        line = torch.cat([history, call["x"][first:end]]).float()
        for token in range(end - first):
            for channel in range(16):
                total = sum(float(line[token + tap, channel] * call["weight"][tap, channel]) for tap in range(width))
                total += 0 if call["bias"] is None else float(call["bias"][channel])
                silu = total / (1 + torch.tensor(-total).exp())
                wanted[first + token, channel] = silu if call["activation_mode"] else total
        if drafts and 2 + end - first <= rows:
            states[slot, : 2 + end - first] = line[1:].to(dtype)
        else:
            states[slot, : width - 1] = line[-(width - 1) :].to(dtype)
    out = REGISTRY[CONV](**call)
    mine = [0, 1, 2, 4, 5]
    assert torch.allclose(out[mine].float(), wanted[mine], rtol=0.01, atol=0.02)
    assert bool((out[[3, 6]].view(torch.uint8) == poison_byte(dtype)).all())
    assert torch.equal(call["conv_states"], states)


def test_the_convolution_takes_requests_of_one_length() -> None:
    call = conv(x=draw(3, 2, 16), query_start_loc=None)
    flat = conv(x=draw(3, 2, 16).view(6, 16), query_start_loc=i32(0, 2, 4, 6))
    one, other = REGISTRY[CONV](**call), REGISTRY[CONV](**flat)
    assert torch.equal(one.view(6, 16)[[0, 1, 4, 5]], other[[0, 1, 4, 5]])
    assert torch.equal(call["conv_states"], flat["conv_states"])


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("conv-rank", {"x": draw(7)}),
        ("conv-rank", {"weight": draw(4, 8)}),
        ("conv-dtype", {"x": draw(7, 16, dtype=torch.float32)}),
        ("conv-dtype", {"weight": draw(4, 16, dtype=FP16)}),
        ("conv-contiguous", {"weight": draw(16, 4).T}),
        ("conv-width", {"weight": draw(5, 16)}),
        ("conv-starts", {"query_start_loc": i32(0)}),
        ("conv-flat", {"query_start_loc": None}),
        ("conv-rows", {"conv_states": draw(4, 2, 16)}),
        ("conv-mode", {"run_mode": 2}),
        ("conv-numbers", {"query_start_loc": torch.tensor([0.0, 2.0, 3.0])}),
        ("conv-numbers", {"cache_indices": i32([4, 1, 0])}),
    ],
)
def test_the_convolution_refuses(refuses: Refuses, rule: str, change: Call) -> None:
    refuses(rule, CONV, **conv(**change))


@pytest.mark.parametrize(
    "change",
    [{"cache_indices": i32(4, -1, 0)}, {"query_start_loc": i32(0, 3, 2, 6)}, {"query_start_loc": i32(0, 3, 4, 8)}],
)
def test_the_convolution_faults(change: Call) -> None:
    with pytest.raises(DeviceFault):
        REGISTRY[CONV](**conv(**change))


def test_every_rule_is_tested_here() -> None:
    with open(__file__, encoding="utf-8") as file:
        text = file.read()
    mine = [rule.id for rule in RULES.values() if rule.test == "test_kernels_gated_delta.py"]
    assert mine and all(f'"{rule}"' in text for rule in mine)
