"""Owns the proof of token rotation, the boundary stash and widened windows."""

from __future__ import annotations

from typing import Any

import pytest
import spec_kernels as sk
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

cases = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.integers(0, 2**32)


@cases
@given(seed=seeds)
def test_rotation(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    lens = [numbers.choice((0, 1, 2, 7, 20)) for _ in range(numbers.randrange(0, 6))]
    gaps = [numbers.randrange(0, 3) for _ in lens]
    starts = [sum(lens[:i]) + sum(gaps[: i + 1]) for i in range(len(lens))]
    ids = place.ints(numbers, sum(lens) + sum(gaps) + 2, 0, 900)
    topk = numbers.choice((None, 1, 3))
    fresh = torch.tensor([1000 + i for i in range(len(lens) * (topk or 1))], dtype=ids.dtype)
    fresh = fresh if topk is None else fresh.view(len(lens), topk)
    picked = [start + numbers.randrange(-1, n + 1) for start, n in zip(starts, lens, strict=True)]
    select = torch.tensor(picked, dtype=torch.int64) if numbers.random() < 0.5 else None
    expected = ids.tolist()
    for i, (start, n) in enumerate(zip(starts, lens, strict=True)):
        if n:
            expected[start : start + n - 1] = ids.tolist()[start + 1 : start + n]
            cell = start + n - 1 if select is None else picked[i]
            if start <= cell < start + n:
                expected[cell] = int(fresh[i] if topk is None else fresh[i, 0])
    tokens = ids.to(place.device, copy=True)
    (first, extents, second) = place.put(torch.tensor(starts, dtype=torch.int64), fresh, torch.tensor(lens).long())
    chosen = None if select is None else select.to(place.device)
    sk.rotate_input_ids(tokens, first, second, extents, select_index=chosen, backend=place.backend)
    assert tokens.tolist() == expected


def make_stash(place: Any, numbers: Any, rows: int, front: int, hidden: int) -> sk.BoundaryStash:
    def on(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(place.device)

    return sk.BoundaryStash(
        on(place.ints(numbers, rows * front, 0, 900).long().view(rows, front)),
        on(torch.arange(rows * front * hidden).view(rows, front, hidden).half()),
        on(place.ints(numbers, rows, 0, front + 1).int()),
    )


@cases
@given(seed=seeds)
def test_stash_and_windows(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    rows, front, hidden = numbers.randrange(1, 6), numbers.randrange(1, 5), numbers.randrange(1, 20)
    width, warmup = numbers.randrange(1, 5), numbers.randrange(0, 3)
    bs = numbers.randrange(0, rows + 1)
    requests = numbers.sample(range(rows), bs)
    if bs and numbers.random() < 0.4:
        requests[numbers.randrange(bs)] = numbers.choice((-1, rows))
    stash = make_stash(place, numbers, rows, front, hidden)
    old = [part.cpu().clone() for part in stash]
    lens, tokens = place.ints(numbers, bs, 0, 9), place.ints(numbers, bs * width, 0, 900)
    states = torch.randn(bs * width, hidden, generator=torch.Generator().manual_seed(seed % 1000)).half()
    table = place.ints(numbers, rows * 12, -1, 900).view(rows, 12)
    placed = place.put(torch.tensor(requests, dtype=torch.int64), states, lens, tokens, table)
    window = sk.widened_inputs(stash, placed[3], placed[1], placed[2], placed[0], width=width, backend=place.backend)
    locs = sk.widened_locs(
        placed[4], placed[0], placed[2], stash.valid_lens, width=width, num_front_tokens=front,
        num_warmup_tokens=warmup, backend=place.backend,
    )  # fmt: skip
    ids, kept, slots, places = [], [], [], []
    for i, request in enumerate(requests):
        inside = 0 <= request < rows
        valid = int(old[2][request]) if inside else 0
        first = max(front - valid, front - int(lens[i]), 0)
        for j in range(front + width):
            position = int(lens[i]) - front + j
            stashed = inside and j >= first
            if j >= front:
                ids.append(int(tokens[i * width + j - front]))
                kept.append(states[i * width + j - front])
            else:
                ids.append(int(old[0][request, j]) if stashed else 0)
                kept.append(old[1][request, j] if stashed else torch.zeros(hidden).half())
            writes = inside and j >= min(first + warmup, front) and 0 <= position < 12
            slots.append(max(int(table[request, position]), 0) if writes else 0)
            places.append(position if j >= first else 0)
    assert window.input_ids.tolist() == ids
    assert torch.equal(window.hidden_states.cpu(), torch.stack(kept) if kept else states)
    assert locs.locs.tolist() == slots and locs.positions.tolist() == places

    available = [numbers.choice((0, 1, width, front + 3)) for _ in range(bs)]
    ends = [min((i + 1) * width, bs * width) for i in range(bs)]
    fresh = numbers.random() < 0.5
    end, number = place.put(torch.tensor(ends, dtype=torch.int64), torch.tensor(available, dtype=torch.int32))
    sk.append_to_stash(stash, placed[3], placed[1], end, number, placed[0], fresh=fresh, backend=place.backend)
    for i, request in enumerate(requests):
        if not 0 <= request < rows:
            continue
        taken = min(available[i], front, ends[i])
        source = list(range(ends[i] - taken, ends[i]))
        old[0][request] = torch.cat((old[0][request, taken:], tokens[source].long()))
        old[1][request] = torch.cat((old[1][request, taken:], states[source]))
        old[2][request] = taken if fresh else min(int(old[2][request]) + taken, front)
    for found, expected in zip(stash, old, strict=True):
        assert torch.equal(found.cpu(), expected)


def test_refusals(place: Any) -> None:
    ids, starts, lens, fresh = place.put(torch.arange(6), torch.arange(2), torch.arange(2), torch.arange(2))
    with pytest.raises(sk.ShapeError, match="next_tokens"):
        sk.rotate_input_ids(ids, starts, lens, fresh[:1], backend=place.backend)
    with pytest.raises(sk.AliasError, match="input_ids, start_locs"):
        sk.rotate_input_ids(ids, ids[:2], lens, fresh, backend=place.backend)
    with pytest.raises(sk.IndexWidthError, match="input_ids"):
        sk.rotate_input_ids(ids.int(), starts, lens, fresh, backend=place.backend)
    stash = sk.BoundaryStash(place.poison(3, 2), torch.zeros(3, 2, 4, device=place.device), place.poison(3))
    states = torch.zeros(6, 4, device=place.device)
    with pytest.raises(sk.DtypeError, match="hidden_states"):
        sk.append_to_stash(stash, ids, states.half(), starts, lens, fresh, fresh=True, backend=place.backend)
    with pytest.raises(sk.ShapeError, match="predict"):
        sk.widened_inputs(stash, ids, states, lens, fresh, width=2, backend=place.backend)
    with pytest.raises(sk.ShapeError, match=r"stash\.valid_lens"):
        broken = stash._replace(valid_lens=stash.valid_lens[:2])
        sk.widened_inputs(broken, ids, states, lens, fresh, width=3, backend=place.backend)


def test_custom_ops_are_sound(opcheck: Any) -> None:
    ops = torch.ops.spec_kernels
    two = torch.tensor([0, 1])
    opcheck(ops.rotate_input_ids, (torch.arange(6), two * 3, two + 2, two + 7, None))
    stash = (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2, 4), torch.ones(3, dtype=torch.int64))
    tokens, states = torch.arange(6), torch.randn(6, 4)
    opcheck(ops.append_to_stash, (*stash, tokens, states, two * 3 + 3, two + 1, two, False))
    outputs = (torch.zeros(10, dtype=torch.int64), torch.zeros(10, 4))
    opcheck(ops.widened_inputs, (*stash, tokens, states, two + 4, two, *outputs, 3))
    locs = torch.zeros(10, dtype=torch.int64)
    table = torch.arange(30).view(3, 10)
    opcheck(ops.widened_locs, (table, two, two + 4, stash[2], locs, locs.clone(), 2, 1))
