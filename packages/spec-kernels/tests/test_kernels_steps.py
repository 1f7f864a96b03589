"""Owns the proof of the bookkeeping between verify and draft-extend."""

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
def test_commits(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    bs, width, interval = numbers.randrange(0, 40), numbers.randrange(1, 9), numbers.choice((0, 4, 7))
    depth = numbers.randrange(1, width + 1)
    predict = place.ints(numbers, bs * width, 0, 900)
    lens, lengths = place.ints(numbers, bs, 0, depth + 1), place.ints(numbers, bs, 0, 300)
    index = torch.full((bs, depth), -1, dtype=torch.int64)
    for row in range(bs):
        path = sorted(numbers.sample(range(1, width), max(int(lens[row]) - 1, 0)))
        for column, token in enumerate([0, *path][: int(lens[row])]):
            index[row, column] = row * width + token
    placed = place.put(predict, index, lens, lengths)
    found = sk.verify_commit_outputs(
        placed[0], placed[1], placed[2], placed[3], width=width, track_interval=interval, backend=place.backend
    )
    for row in range(bs):
        accepted, before = int(lens[row]), int(lengths[row])
        last = int(index[row, accepted - 1]) if accepted else row * width
        crossed = bool(interval) and (before + accepted) // interval > before // interval
        assert int(found.seq_lens[row]) == before + accepted
        assert int(found.bonus[row]) == (int(predict[last]) if accepted else 0)
        assert int(found.last_step[row]) == last - row * width
        assert int(found.track_step[row]) == (last - row * width if crossed else -1)
        assert int(found.num_correct_drafts[row]) == max(accepted - 1, 0)
        assert int(found.select_index[row]) == row * width + max(accepted - 1, 0)
    for original, tensor in zip((predict, index, lens, lengths), placed, strict=True):
        assert torch.equal(original, tensor.cpu())


@cases
@given(seed=seeds)
def test_inputs_of_a_draft_extend_step(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    bs, width, front = numbers.randrange(0, 40), numbers.randrange(1, 9), numbers.randrange(0, 4)
    predict, lens = place.ints(numbers, bs * width, -1, 900), place.ints(numbers, bs, 0, width + 1)
    placed = place.put(predict, lens)
    found = sk.draft_extend_inputs(placed[0], placed[1], width=width, backend=place.backend)
    drafts = [max(length - 1, 0) for length in lens.tolist()]
    assert found.num_correct_drafts.tolist() == drafts
    assert found.select_index.tolist() == [row * width + count for row, count in enumerate(drafts)]
    assert found.input_ids.tolist() == [max(token, 0) for token in predict.tolist()]
    bonus = sk.bonus_tokens(placed[0], placed[1], stride=width, backend=place.backend)
    expected = [int(predict[i * width + n - 1]) if n else 0 for i, n in enumerate(lens.tolist())]
    assert bonus.tolist() == expected and bonus.dtype == predict.dtype
    layout = sk.draft_extend_layout(placed[1], width=width, num_front_tokens=front, backend=place.backend)
    again = sk.draft_extend_layout(placed[1], width=width, num_front_tokens=front, backend=place.backend)
    for one, two in zip(layout, again, strict=True):
        assert torch.equal(one, two)
    bases = lens.tolist()
    assert layout.prefix_lens.tolist() == [max(base - front, 0) for base in bases]
    assert layout.extend_lens.tolist() == [width + front] * bs
    assert layout.seq_lens.tolist() == [base + width for base in bases]
    assert layout.start_locs.tolist() == [row * (width + front) for row in range(bs)]
    assert layout.positions.tolist() == [max(base - front + j, 0) for base in bases for j in range(width + front)]


def test_verify_lengths_count_the_block_once(place: Any) -> None:
    """Prefix [100, 7] and a block of 16 give [116, 23], twice, and the input stays (field_faults E12)."""
    (prefix,) = place.put(torch.tensor([100, 7], dtype=torch.int32))
    for _ in range(2):
        assert sk.draft_extend_layout(prefix, width=16, backend=place.backend).seq_lens.tolist() == [116, 23]
    assert prefix.tolist() == [100, 7]


def test_placeholders_never_reach_an_embedding(place: Any) -> None:
    tokens, lens = place.put(torch.tensor([5, -1, -1]), torch.tensor([1]))
    assert sk.draft_extend_inputs(tokens, lens, width=3, backend=place.backend).input_ids.tolist() == [5, 0, 0]
    assert tokens.tolist() == [5, -1, -1]


def test_refusals(place: Any) -> None:
    tokens, lens = place.put(torch.zeros(6, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
    with pytest.raises(sk.ShapeError, match="accept_tokens"):
        sk.bonus_tokens(tokens, lens, stride=4, backend=place.backend)
    with pytest.raises(sk.ShapeError, match="predict"):
        sk.draft_extend_inputs(tokens, lens, width=2, backend=place.backend)
    with pytest.raises(sk.DtypeError, match="seq_lens"):
        sk.draft_extend_layout(lens.float(), width=2, backend=place.backend)
    with pytest.raises(sk.ShapeError, match="seq_lens"):
        index = place.poison(2, 3)
        sk.verify_commit_outputs(tokens, index, lens, lens[:1], width=3, backend=place.backend)


def test_custom_ops_are_sound(opcheck: Any) -> None:
    ops = torch.ops.spec_kernels
    tokens, lens, index = torch.arange(6), torch.tensor([2, 0]), torch.tensor([[0, 2], [-1, -1]])
    opcheck(ops.bonus_tokens, (tokens, lens, torch.zeros(2, dtype=torch.int64), 3))
    results = torch.zeros(6, 2, dtype=torch.int64)
    opcheck(ops.verify_commit_outputs, (tokens, index, lens, lens + 7, results, 3, 4))
    opcheck(ops.draft_extend_inputs, (tokens, lens, results[:2].clone(), tokens.clone(), 3))
    opcheck(ops.draft_extend_layout, (lens, results[:4].clone(), torch.zeros(8, dtype=torch.int64), 3, 1))
