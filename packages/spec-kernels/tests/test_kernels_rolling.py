"""Owns the proof of rolling state: the whole state moves, and padding touches nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import spec_kernels as sk
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

cases = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def rows_of(numbers: Any, rows: int, bs: int) -> list[int]:
    chosen: list[int] = numbers.sample(range(rows), bs)
    return [numbers.choice((row, row, row, -1, rows)) for row in chosen]


@cases
@given(seed=st.integers(0, 2**32))
def test_convolution(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    random = torch.Generator().manual_seed(seed % 2**31)
    rows, channels, kernel = numbers.randrange(1, 5), numbers.randrange(1, 12), numbers.randrange(1, 5)
    bs, tokens, state_len = (
        numbers.randrange(0, rows + 1),
        numbers.randrange(0, 6),
        kernel - 1 + numbers.randrange(0, 3),
    )
    dtype = numbers.choice((torch.float32, torch.float16))
    x = torch.randn(bs, channels, tokens, generator=random).to(dtype)
    state = torch.randn(rows, channels, state_len, generator=random).to(dtype)
    weight = torch.randn(channels, kernel, generator=random).to(dtype)
    bias = torch.randn(channels, generator=random).to(dtype) if numbers.random() < 0.5 else None
    silu, chosen = numbers.random() < 0.5, rows_of(numbers, rows, bs)
    held = state.to(place.device, copy=True)
    index, given_x = place.put(torch.tensor(chosen, dtype=torch.int64), x)
    found = sk.causal_conv1d_update(
        given_x, held, weight.to(place.device), index, bias=None if bias is None else bias.to(place.device), silu=silu,
        backend=place.backend,
    )  # fmt: skip
    expected, after = torch.zeros(bs, channels, tokens, dtype=torch.float64), state.clone()
    for i, row in enumerate(chosen):
        if not 0 <= row < rows:
            continue
        for channel in range(channels):
            sequence = state[row, channel].tolist() + x[i, channel].tolist()
            for token in range(tokens):
                first = state_len + token - kernel + 1
                total = sum(float(weight[channel, k]) * sequence[first + k] for k in range(kernel))
                total += 0.0 if bias is None else float(bias[channel])
                expected[i, channel, token] = total / (1 + math.exp(-total)) if silu else total
            if tokens:
                after[row, channel] = torch.tensor(sequence[len(sequence) - state_len :], dtype=dtype)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.cpu().double(), expected, atol=limit, rtol=limit)
    assert torch.equal(held.cpu(), after)


def test_a_state_of_five_takes_two(place: Any) -> None:
    """The result is old[2:5] and new[0:2]; the padded row stays (field_faults F13)."""
    state = torch.arange(10.0).view(2, 1, 5).to(place.device)
    x = torch.tensor([[[100.0, 101.0]], [[7.0, 7.0]]], device=place.device)
    index = torch.tensor([1, -1], device=place.device)
    weight = torch.ones(1, 2, device=place.device)
    found = sk.causal_conv1d_update(x, state, weight, index, backend=place.backend)
    assert state.view(2, 5).tolist() == [[0, 1, 2, 3, 4], [7, 8, 9, 100, 101]]
    assert found.view(2, 2).tolist() == [[109, 201], [0, 0]]


@cases
@given(seed=st.integers(0, 2**32))
def test_kept_states(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    rows, width, size = numbers.randrange(1, 5), numbers.randrange(1, 5), numbers.randrange(1, 20)
    bs = numbers.randrange(0, rows + 1)
    states = torch.arange(rows * size * 2).view(rows, size, 2).half()
    given_states = -torch.arange(bs * width * size * 2).view(bs, width, size, 2).half() - 1
    chosen, steps = rows_of(numbers, rows, bs), place.ints(numbers, bs, -1, width + 1)
    held = states.to(place.device, copy=True)
    index, columns = torch.tensor(chosen, dtype=torch.int64).to(place.device), steps.to(place.device)
    sk.keep_states(held, given_states.to(place.device), index, columns, backend=place.backend)
    for i, (row, step) in enumerate(zip(chosen, steps.tolist(), strict=True)):
        if 0 <= row < rows and 0 <= step < width:
            states[row] = given_states[i, step]
    assert torch.equal(held.cpu(), states)


def test_refusals(place: Any) -> None:
    x, index = torch.zeros(2, 3, 1, device=place.device), torch.zeros(2, dtype=torch.int64, device=place.device)
    weight = torch.zeros(3, 4, device=place.device)
    with pytest.raises(sk.ShapeError, match=r"state\.shape"):
        sk.causal_conv1d_update(x, torch.zeros(2, 3, 2, device=place.device), weight, index, backend=place.backend)
    state = torch.zeros(2, 3, 3, device=place.device)
    with pytest.raises(sk.ShapeError, match="contiguous"):
        sk.causal_conv1d_update(x, state.transpose(1, 2), weight, index, backend=place.backend)
    with pytest.raises(sk.DtypeError, match="weight"):
        sk.causal_conv1d_update(x, state, weight.half(), index, backend=place.backend)
    with pytest.raises(sk.ShapeError, match="step_states"):
        sk.keep_states(state, state, index, index, backend=place.backend)


def test_custom_ops_are_sound(opcheck: Any) -> None:
    ops, two = torch.ops.spec_kernels, torch.tensor([0, 1])
    x, state, weight = torch.randn(2, 3, 2), torch.randn(2, 3, 4), torch.randn(3, 3)
    opcheck(ops.causal_conv1d_update, (x, state, weight, None, two, torch.zeros(2, 3, 2), True))
    rows = torch.zeros(2, 8, dtype=torch.uint8)
    opcheck(ops.keep_states, (rows, torch.ones(6, 8, dtype=torch.uint8), two, two, 3))
