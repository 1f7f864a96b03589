"""Owns the proof of rejection sampling: exact on probabilities that floats hold exactly, lossless by counting."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import spec_kernels as sk
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

cases = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.integers(0, 2**32)
NAN = float("nan")


def law(numbers: Any, size: int) -> list[float]:
    """Multiples of 1/64 that sum to 1, many of them 0: sums are exact in any order."""
    weights = [0] * size
    for _ in range(64):
        weights[numbers.choice(range(min(size, 1 + numbers.randrange(size))))] += 1
    return [weight / 64 for weight in weights]


def draw(weights: list[float], spare: list[float], coin: float) -> int:
    weights = weights if any(weight > 0 for weight in weights) else spare
    heavy = [token for token, weight in enumerate(weights) if weight > 0]
    running, total = 0.0, sum(weights)
    for token in heavy:
        running += weights[token]
        if running > coin * total:
            return token
    return heavy[-1] if heavy else 0


def clean(row: list[float]) -> list[float]:
    return [value if value > 0 else 0.0 for value in row]


def chain(drafts: list[int], q: list[list[float]], p: list[list[float]], coins: list[float], last: float) -> list[int]:
    for step, token in enumerate(drafts):
        spare = clean(p[step])
        if not 0 <= token < len(spare):
            return [step, draw(spare, spare, last)]
        if not (0 < q[step][token] <= 1 and coins[step] * q[step][token] < p[step][token]):
            left = [max(one - two, 0.0) for one, two in zip(spare, clean(q[step]), strict=True)]
            return [step, draw(left, spare, last)]
    return [len(drafts), draw(clean(p[-1]), clean(p[-1]), last)]


@cases
@given(seed=seeds)
def test_chains(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    bs, steps, vocabulary = numbers.randrange(0, 4), numbers.randrange(0, 4), numbers.randrange(1, 40)
    q = [[law(numbers, vocabulary) for _ in range(steps)] for _ in range(bs)]
    p = [[law(numbers, vocabulary) for _ in range(steps + 1)] for _ in range(bs)]
    for rows in q + p:
        if numbers.random() < 0.3 and rows:
            rows[-1][numbers.randrange(vocabulary)] = numbers.choice((NAN, 0.0, -0.5))
    drafts = [[numbers.randrange(-1, vocabulary + 1) for _ in range(steps)] for _ in range(bs)]
    coins = [[numbers.choice((0.0, 0.25, 0.5, 1.0, NAN)) for _ in range(steps)] for _ in range(bs)]
    last = [numbers.choice((0.0, 0.25, 0.75, 1.0, NAN)) for _ in range(bs)]
    placed = place.put(
        torch.tensor(drafts, dtype=torch.int64).view(bs, steps),
        torch.tensor(q, dtype=torch.float32).view(bs, steps, vocabulary),
        torch.tensor(coins, dtype=torch.float32).view(bs, steps),
        torch.tensor(p, dtype=torch.float32).view(bs, steps + 1, vocabulary),
        torch.tensor(last, dtype=torch.float32),
    )
    found = sk.sample_chain(placed[0], placed[1], placed[3], placed[2], placed[4], backend=place.backend)
    expected = [chain(*row) for row in zip(drafts, q, p, coins, last, strict=True)]
    assert [list(row) for row in zip(*(part.tolist() for part in found), strict=True)] == expected


def test_what_others_leave_open(place: Any) -> None:
    """q of 0 and NaN are rejected; a final coin of 1 takes the last token that weighs (contracts.md A-31)."""
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]]]).repeat(3, 1, 1)
    q = torch.tensor([[[1.0, 0.0, 0.0]], [[NAN, 0.5, 0.5]], [[0.5, 0.5, 0.0]]])
    drafts = torch.tensor([[1], [0], [0]])
    inputs = place.put(drafts, q, torch.zeros(3, 1), p, torch.tensor([0.0, 0.0, 1.0]))
    found = sk.sample_chain(inputs[0], inputs[1], inputs[3], inputs[2], inputs[4], backend=place.backend)
    assert found.num_correct_drafts.tolist() == [0, 0, 1]
    assert found.bonus.tolist() == [1, 0, 1]


def tree_walk(
    candidates: list[int], p: list[list[float]], first: list[int], sibling: list[int], coins: list[float], last: float
) -> tuple[list[int], list[int], int]:
    """Path, tokens after its rows, and the bonus."""
    path, depth = [0], len(coins)
    tokens: list[int] = []
    while True:
        weights, mass, child = clean(p[path[-1]]), 0.0, first[path[-1]]
        hit = False
        while child > 0 and len(path) < depth and not hit:
            token = candidates[child]
            if 0 <= token < len(weights):
                mass += weights[token]
                hit = weights[token] > 0 and coins[len(path) - 1] < min(mass, 1.0)
                weights[token] = weights[token] if hit else 0.0
            if not hit:
                child = sibling[child]
        if not hit:
            bonus = draw(weights, clean(p[path[-1]]), last)
            return path, [*tokens, bonus], bonus
        path.append(child)
        tokens.append(candidates[child])


@cases
@given(seed=seeds)
def test_trees(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    bs, width, vocabulary = numbers.randrange(0, 4), numbers.randrange(1, 9), numbers.randrange(1, 20)
    depth = numbers.randrange(1, width + 1)
    first, sibling = [], []
    for _ in range(bs):
        parents = [-1] + [numbers.randrange(0, token) for token in range(1, width)]
        kids = [[u for u in range(width) if parents[u] == t] for t in range(width)]
        first.append([row[0] if row else -1 for row in kids])
        after = {one: two for row in kids for one, two in pairwise(row)}
        sibling.append([after.get(token, -1) for token in range(width)])
    candidates = [[numbers.randrange(-1, vocabulary + 1) for _ in range(width)] for _ in range(bs)]
    p = [[law(numbers, vocabulary) for _ in range(width)] for _ in range(bs)]
    coins = [[numbers.choice((0.0, 0.1, 0.5, 0.9, 1.0, NAN)) for _ in range(depth)] for _ in range(bs)]
    last = [numbers.choice((0.0, 0.25, 0.75, 1.0, NAN)) for _ in range(bs)]

    def ints(rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64).view(bs, width)

    placed = place.put(
        ints(candidates), ints(first), ints(sibling), torch.tensor(coins).view(bs, depth),
        torch.tensor(p).view(bs, width, vocabulary), torch.tensor(last).view(bs),
    )  # fmt: skip
    found = sk.sample_tree(
        placed[0], placed[4], placed[1], placed[2], placed[3], placed[5], depth=depth, backend=place.backend
    )
    for row in range(bs):
        path, tokens, bonus = tree_walk(candidates[row], p[row], first[row], sibling[row], coins[row], last[row])
        assert found.accept_index[row].tolist() == [row * width + t for t in path] + [-1] * (depth - len(path))
        assert int(found.num_correct_drafts[row]) == len(path) - 1 and int(found.bonus[row]) == bonus
        predict = [0] * width
        for token, column in zip(tokens, path, strict=True):
            predict[column] = token
        assert found.predict.view(bs, width)[row].tolist() == predict


@pytest.mark.parametrize("tree", [False, True])
def test_the_next_token_follows_the_target(tree: bool) -> None:
    """40,000 requests; each frequency within five standard errors of the target's probability."""
    count, vocabulary = 40_000, 5
    random = torch.Generator().manual_seed(11)
    p = torch.tensor([0.4, 0.1, 0.2, 0.0, 0.3])
    q = torch.tensor([0.1, 0.5, 0.2, 0.2, 0.0])
    coins = torch.rand(count, 2, generator=random)
    final = torch.rand(count, generator=random)
    if tree:
        candidates = torch.stack([torch.multinomial(q, 3, generator=random) for _ in range(64)]).repeat(count // 64, 1)
        candidates = torch.cat((torch.zeros(count, 1, dtype=torch.int64), candidates), 1)
        first = torch.tensor([1, -1, -1, -1]).expand(count, 4)
        sibling = torch.tensor([-1, 2, 3, -1]).expand(count, 4)
        laws = p.expand(count, 4, vocabulary)
        found = sk.sample_tree(candidates, laws, first, sibling, coins, final, depth=2)
        token = found.predict.view(count, 4)[:, 0]
        assert 0.3 < float(found.num_correct_drafts.float().mean()) < 1
    else:
        drafts = torch.multinomial(q, count, replacement=True, generator=random).unsqueeze(1)
        sampled = sk.sample_chain(
            drafts, q.expand(count, 1, vocabulary), p.expand(count, 2, vocabulary), coins[:, :1], final
        )
        accepted = sampled.num_correct_drafts == 1
        token = torch.where(accepted, drafts[:, 0], sampled.bonus)
        rate = float(torch.minimum(p, q).sum())
        assert abs(float(accepted.float().mean()) - rate) < 5 * math.sqrt(rate * (1 - rate) / count)
    found_law = torch.bincount(token, minlength=vocabulary) / count
    for seen, expected in zip(found_law.tolist(), p.tolist(), strict=True):
        assert abs(seen - expected) <= 5 * math.sqrt(expected * (1 - expected) / count)


def test_refusals(place: Any) -> None:
    drafts, q, p = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, 3), torch.ones(2, 2, 3)
    coins, last = torch.zeros(2, 1), torch.zeros(2)
    placed = [tensor.to(place.device) for tensor in (drafts, q, p, coins, last)]
    with pytest.raises(sk.ShapeError, match="target_probs"):
        sk.sample_chain(placed[0], placed[1], placed[2][:, :1], placed[3], placed[4], backend=place.backend)
    with pytest.raises(sk.DtypeError, match="draft_probs"):
        sk.sample_chain(placed[0], placed[1].half(), *placed[2:], backend=place.backend)
    with pytest.raises(sk.ShapeError, match="coins"):
        links = place.poison(2, 2)
        sk.sample_tree(links, placed[2], links, links, placed[3], placed[4], depth=2, backend=place.backend)


def test_custom_ops_are_sound(opcheck: Any) -> None:
    ops = torch.ops.spec_kernels
    rows = [torch.zeros(2, dtype=torch.int64) for _ in range(3)]
    tokens, links = torch.tensor([[0, 1], [2, 1]]), torch.tensor([[1, -1], [1, -1]])
    q, p, coins = torch.rand(2, 2, 3), torch.rand(2, 3, 3), torch.rand(2, 2)
    opcheck(ops.sample_chain, (tokens, q, p, coins, coins[:, 0].clone(), rows[0], rows[1]))
    outputs = (torch.zeros(2, 2, dtype=torch.int64), rows[0], torch.zeros(4, dtype=torch.int64), rows[1])
    opcheck(ops.sample_tree, (tokens, q, links, links - 1, coins, coins[:, 0].clone(), *outputs))
