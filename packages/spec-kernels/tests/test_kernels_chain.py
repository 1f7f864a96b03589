"""Greedy chain acceptance against a plain loop, and its refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
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


@settings(deadline=None)
@given(st.data())
def test_it_equals_the_loop(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 5))
    width = data.draw(st.integers(1, 17))
    token = st.integers(-1, 2)  # few tokens, so that long prefixes happen
    table = st.lists(st.lists(token, min_size=width, max_size=width), min_size=rows, max_size=rows)
    candidates, predict = data.draw(table), data.draw(table)
    drafts = data.draw(st.lists(st.integers(-1, width + 1), min_size=rows, max_size=rows))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    first = torch.tensor(candidates, dtype=dtype).reshape(rows, width)
    second = torch.tensor(predict, dtype=dtype).reshape(rows, width)
    before = first.clone(), second.clone()
    check(
        accept_chain(first, second, num_drafts=torch.tensor(drafts, dtype=dtype)),
        reference(candidates, predict, drafts),
    )
    check(accept_chain(first, second), reference(candidates, predict, [width] * rows))
    assert torch.equal(first, before[0]) and torch.equal(second, before[1])


def test_a_transposed_input_is_read_by_its_strides() -> None:
    candidates = torch.tensor([[1, 5], [2, 6], [3, 7]]).T
    predict = torch.tensor([[2, 9], [3, 9], [8, 9]]).T
    check(accept_chain(candidates, predict), ([2, 0], [8, 9]))


def test_padding_accepts_nothing() -> None:
    same = torch.zeros(3, 5, dtype=torch.int64)
    check(accept_chain(same, same, num_drafts=torch.tensor([0, 2, 4])), ([0, 2, 4], [0, 0, 0]))


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


def test_opcheck() -> None:
    tokens = torch.randint(0, 3, (4, 5))
    arguments = (tokens, torch.randint(0, 3, (4, 5)), torch.tensor([0, 1, 4, 4]))
    torch.library.opcheck(torch.ops.spec_kernels.accept_chain.default, arguments)
