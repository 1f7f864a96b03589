"""Owns the proof of draft trees: causal visibility, links, and greedy verification that follows siblings."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import spec_kernels as sk
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

cases = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.integers(0, 2**32)


def beam(numbers: Any, topk: int, depth: int, drafts: int) -> tuple[list[int], list[int], list[int]]:
    """A beam search's parents, a closed selection of its candidates, and each column's parent column."""
    parents, kept = [-1], list(range(topk))
    parents += kept
    owner = dict.fromkeys(kept, -1)
    for step in range(1, depth):
        base = topk + topk * topk * (step - 1)
        fresh = []
        for place, parent in enumerate(kept):
            for child in range(topk):
                owner[base + place * topk + child] = parent
                fresh.append(base + place * topk + child)
        kept = sorted(numbers.sample(fresh, topk))
        if step < depth - 1:
            parents += kept
    selected: list[int] = []
    while len(selected) < drafts:
        open_ones = [c for c, parent in owner.items() if c not in selected and (parent < 0 or parent in selected)]
        if not open_ones:
            break
        selected.append(numbers.choice(open_ones))
    selected.sort()
    columns = [0 if owner[c] < 0 else selected.index(owner[c]) + 1 for c in selected]
    return parents[: topk * (depth - 1) + 1], selected, [-1, *columns]


def links_of(parents: list[int]) -> tuple[list[int], list[int]]:
    width = len(parents)
    children = [[u for u in range(width) if parents[u] == t] for t in range(width)]
    first = [kids[0] if kids else -1 for kids in children]
    sibling = [-1] * width
    for kids in children:
        for one, two in pairwise(kids):
            sibling[one] = two
    return first, sibling


def ancestors(parents: list[int], token: int) -> set[int]:
    seen = {token}
    while parents[token] >= 0:
        token = parents[token]
        seen.add(token)
    return seen


def trees(place: Any, numbers: Any) -> tuple[int, list[list[int]], sk.TreeLayout, list[int]]:
    topk, depth, bs = numbers.randrange(1, 4), numbers.randrange(1, 4), numbers.randrange(1, 4)
    most = topk + topk * topk * (depth - 1)
    made = [beam(numbers, topk, depth, most) for _ in range(bs)]
    drafts = numbers.randrange(1, min(len(selected) for _, selected, _ in made) + 1)
    kept = [(parents, selected[:drafts], columns[: drafts + 1]) for parents, selected, columns in made]
    lens = [numbers.randrange(0, 50) for _ in range(bs)]
    placed = place.put(
        torch.tensor([row[0] for row in kept]), torch.tensor([row[1] for row in kept]), torch.tensor(lens)
    )
    layout = sk.build_tree(placed[0], placed[1], placed[2], topk=topk, backend=place.backend)
    return bs, [row[2] for row in kept], layout, lens


@cases
@given(seed=seeds)
def test_layout(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    bs, parents, layout, lens = trees(place, numbers)
    for row in range(bs):
        width = len(parents[row])
        seen = [ancestors(parents[row], token) for token in range(width)]
        assert layout.visible[row].tolist() == [[u in seen[t] for u in range(width)] for t in range(width)]
        assert layout.positions[row].tolist() == [lens[row] + len(seen[t]) - 1 for t in range(width)]
        first, sibling = links_of(parents[row])
        assert layout.next_token[row].tolist() == first and layout.next_sibling[row].tolist() == sibling
    width = len(parents[0])
    total = sum(width * (length + width) for length in lens)
    (context,) = place.put(torch.tensor(lens))
    out = place.poison(total + 3, dtype=torch.bool)
    sk.full_tree_mask(layout.visible, context, total=total + 3, out=out, backend=place.backend)
    expected = [
        column < lens[row] or bool(layout.visible[row, token, column - lens[row]])
        for row in range(bs)
        for token in range(width)
        for column in range(lens[row] + width)
    ]
    assert out.tolist() == [*expected, False, False, False]
    hidden = sk.tree_attention_mask(layout.visible, context + width, columns=20, page_size=4)
    for row in range(bs):
        sees = torch.zeros(width, 80, dtype=torch.bool)
        sees[:, : lens[row]] = True
        sees[:, lens[row] : lens[row] + width] = layout.visible[row].cpu()
        assert torch.equal(hidden[row].cpu(), ~sees)


@cases
@given(seed=seeds)
def test_chains(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    bs, width = numbers.randrange(0, 5), numbers.randrange(1, 34)
    lens = place.ints(numbers, bs, 0, 99)
    layout = sk.build_chain_tree(*place.put(lens), width=width, backend=place.backend)
    for row in range(bs):
        assert torch.equal(layout.visible[row].cpu(), torch.ones(width, width).tril().bool())
        assert layout.positions[row].tolist() == [int(lens[row]) + column for column in range(width)]
        assert layout.next_token[row].tolist() == [*range(1, width), -1]
        assert layout.next_sibling[row].tolist() == [-1] * width


def test_an_orphan_sees_itself_and_is_reached_by_nobody(place: Any) -> None:
    parents, selected, lens = place.put(torch.tensor([[-1, 0, 1]]), torch.tensor([[1, 2, -1]]), torch.tensor([7]))
    layout = sk.build_tree(parents, selected, lens, topk=2, backend=place.backend)
    assert layout.visible[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert layout.positions.tolist() == [[7, 8, 7, 7]]
    assert layout.next_token.tolist() == [[1, -1, -1, -1]] and layout.next_sibling.tolist() == [[-1] * 4]


def walk(candidates: list[int], target: list[int], parents: list[int], depth: int) -> list[int]:
    path = [0]
    while len(path) < depth:
        kids = [u for u in range(len(parents)) if parents[u] == path[-1]]
        hit = [u for u in kids if candidates[u] == target[path[-1]] >= 0]
        if not hit:
            break
        path.append(hit[0])
    return path


@cases
@given(seed=seeds)
def test_greedy_verification(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    bs, parents, layout, _ = trees(place, numbers)
    width = len(parents[0])
    depth = numbers.randrange(1, width + 1)
    candidates, target = (place.ints(numbers, bs * width, -1, 3).view(bs, width) for _ in range(2))
    placed = place.put(candidates, target)
    found = sk.verify_tree_greedy(
        placed[0], placed[1], layout.next_token, layout.next_sibling, depth=depth, backend=place.backend
    )
    for row in range(bs):
        wanted = target[row].tolist()
        path = walk(candidates[row].tolist(), wanted, parents[row], depth)
        assert found.accept_index[row].tolist() == [row * width + t for t in path] + [-1] * (depth - len(path))
        assert int(found.num_correct_drafts[row]) == len(path) - 1
        assert int(found.bonus[row]) == wanted[path[-1]]
        predict = found.predict.view(bs, width)[row].tolist()
        assert predict == [wanted[t] if t in path else 0 for t in range(width)]


def test_the_second_sibling_is_reached(place: Any) -> None:
    """Root with children 5 and 9; the target wants 9, then 4 (contracts.md A-11)."""
    parents, selected, lens = place.put(torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 4]]), torch.tensor([3]))
    layout = sk.build_tree(parents, selected, lens, topk=2, backend=place.backend)
    tokens, target = place.put(torch.tensor([[1, 5, 9, 4]]), torch.tensor([[9, 0, 4, 8]]))
    found = sk.verify_tree_greedy(
        tokens, target, layout.next_token, layout.next_sibling, depth=3, backend=place.backend
    )
    assert found.accept_index.tolist() == [[0, 2, 3]] and found.bonus.tolist() == [8]


def test_refusals(place: Any) -> None:
    tokens, links = place.put(torch.zeros(2, 3, dtype=torch.int64), torch.full((2, 3), -1))
    with pytest.raises(sk.ShapeError, match="at most 3"):
        sk.verify_tree_greedy(tokens, tokens, links, links, depth=4, backend=place.backend)
    with pytest.raises(sk.ShapeError, match="next_sibling"):
        sk.verify_tree_greedy(tokens, tokens, links, links[:, :2], depth=2, backend=place.backend)
    with pytest.raises(sk.ShapeError, match="parent_list"):
        sk.build_tree(tokens[:1], tokens, tokens[:, 0], topk=2, backend=place.backend)
    with pytest.raises(sk.DtypeError, match="visible"):
        sk.tree_attention_mask(tokens.view(2, 3, 1).expand(2, 3, 3), tokens[:, 0], columns=1, page_size=4)


def test_custom_ops_are_sound(opcheck: Any) -> None:
    ops = torch.ops.spec_kernels
    lens, visible = torch.tensor([3, 0]), torch.zeros(2, 4, 4, dtype=torch.bool)
    numbers = [torch.zeros(2, 4, dtype=torch.int64) for _ in range(3)]
    opcheck(ops.build_chain_tree, (lens, visible, *numbers))
    parents, selected = torch.tensor([[-1, 0, 1], [-1, 0, 1]]), torch.tensor([[0, 1, 4], [0, 1, 2]])
    opcheck(ops.build_tree, (parents, selected, lens, visible, *numbers, 2))
    opcheck(ops.full_tree_mask, (visible, lens, torch.zeros(50, dtype=torch.bool)))
    rows = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    outputs = (torch.zeros(2, 3, dtype=torch.int64), rows[0], torch.zeros(8, dtype=torch.int64), rows[1])
    opcheck(ops.verify_tree_greedy, (numbers[0], numbers[1], numbers[2] - 1, numbers[2] - 1, *outputs))
