"""Greedy chain acceptance against a plain loop, and its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_kernels import ChainAccept, DtypeError, ShapeError, accept_chain


def reference(candidates: list[list[int]], predict: list[list[int]], drafts: list[int]) -> tuple[list[int], list[int]]:
    correct, bonus = [], []
    for row, target, count in zip(candidates, predict, drafts, strict=True):
        accepted = 0
        while accepted < min(count, len(row) - 1) and row[accepted + 1] == target[accepted] >= 0:
            accepted += 1
        correct.append(accepted)
        bonus.append(target[accepted])
    return correct, bonus


def check(result: ChainAccept, expected: tuple[list[int], list[int]]) -> None:
    assert result.correct_drafts.dtype == torch.int32
    assert (result.correct_drafts.tolist(), result.bonus.tolist()) == expected


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_it_equals_the_loop(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    rows, width = numbers.choice((0, 1, 2, 5)), numbers.choice((1, 2, 4, 17, 70))
    few = numbers.choice((1, 2, 3))  # few tokens, so that long prefixes happen
    candidates, predict = ([[numbers.randrange(-1, few) for _ in range(width)] for _ in range(rows)] for _ in range(2))
    drafts = [numbers.randrange(-1, width + 2) for _ in range(rows)]
    dtypes = [numbers.choice((torch.int32, torch.int64)) for _ in range(3)]
    first, second = (
        torch.tensor(values, dtype=dtype).reshape(rows, width)
        for values, dtype in zip((candidates, predict), dtypes, strict=False)
    )
    first, second, counts = place.put(second, first, torch.tensor(drafts, dtype=dtypes[2]))
    first, second = second, first
    before = first.clone(), second.clone()
    on = {"backend": place.backend}
    check(accept_chain(first, second, num_drafts=counts, **on), reference(candidates, predict, drafts))
    check(accept_chain(first, second, **on), reference(candidates, predict, [width] * rows))
    assert torch.equal(first, before[0]) and torch.equal(second, before[1])


def test_a_transposed_input_is_read_by_its_strides(place: Any) -> None:
    candidates = torch.tensor([[1, 5], [2, 6], [3, 7]], device=place.device).T
    predict = torch.tensor([[2, 9], [3, 9], [8, 9]], device=place.device).T
    check(accept_chain(candidates, predict, backend=place.backend), ([2, 0], [8, 9]))


def test_placeholders_are_rejected_and_the_recovered_token_is_emitted(place: Any) -> None:
    """Drafts [5, -1, -1] (field_faults F01): the target's own token follows, and the inputs stay as they were."""
    candidates = torch.tensor([[4, 5, -1, -1]], device=place.device)
    predict = torch.tensor([[5, 8, -1, -1]], device=place.device)
    check(accept_chain(candidates, predict, backend=place.backend), ([1], [8]))
    assert candidates.tolist() == [[4, 5, -1, -1]]


def test_padding_accepts_nothing(place: Any) -> None:
    same = torch.zeros(3, 5, dtype=torch.int64, device=place.device)
    drafts = torch.tensor([0, 2, 4], device=place.device)
    check(accept_chain(same, same, num_drafts=drafts, backend=place.backend), ([0, 2, 4], [0, 0, 0]))


def test_refusals_name_the_argument() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ShapeError, match="target_predict"):
        accept_chain(tokens, tokens[:, :2])
    with pytest.raises(ShapeError, match="num_drafts"):
        accept_chain(tokens, tokens, num_drafts=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match="candidates"):
        accept_chain(tokens[:, :0], tokens[:, :0])
    with pytest.raises(DtypeError, match="candidates"):
        accept_chain(tokens.float(), tokens)


def test_opcheck(opcheck: Any) -> None:
    tokens, out = torch.randint(0, 3, (4, 5)), torch.empty(4, dtype=torch.int32)
    arguments = (
        tokens,
        torch.randint(0, 3, (4, 5)),
        torch.tensor([0, 1, 4, 4]),
        out,
        torch.empty(4, dtype=torch.int64),
    )
    opcheck(torch.ops.spec_kernels.accept_chain.default, arguments)
