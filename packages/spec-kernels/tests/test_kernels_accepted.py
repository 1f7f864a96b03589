"""Owns the proof that accepted slots are listed and moved token by token, as if every read came first."""

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
def test_slots_of_accepted_tokens(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    bs, width = numbers.randrange(0, 5), numbers.randrange(1, 9)
    depth = numbers.randrange(0, width + 1)
    slots = place.ints(numbers, bs * width, 0, 900)
    index = place.ints(numbers, bs * depth, -1, bs * width + 1).view(bs, depth)
    placed = place.put(slots, index)
    out = place.poison(bs * depth)
    sk.compact_accepted_locs(placed[0], placed[1], out=out, backend=place.backend)
    live = [entry for row in index.tolist() for entry in row if 0 <= entry < bs * width]
    kept = [int(slots[entry]) for entry in live]
    assert out.tolist() == kept + [0] * (bs * depth - len(kept))
    moves = sk.accepted_moves(placed[0], placed[1], width=width, backend=place.backend)
    expected = [
        (int(slots[entry]), int(slots[row * width + column])) if 0 <= entry < bs * width else (0, 0)
        for row in range(bs)
        for column, entry in enumerate(index.tolist()[row])
    ]
    assert list(zip(moves.sources.tolist(), moves.targets.tolist(), strict=True)) == expected


@cases
@given(seed=seeds)
def test_moves_in_and_across_pages(place: Any, seed: int) -> None:
    """Every byte tells its slot; chains such as 5 to 3 and 3 to 2 read before they write."""
    numbers = place.case(seed)
    pages, page_size, count = numbers.randrange(1, 4), numbers.choice((1, 4, 8)), numbers.randrange(0, 9)
    slots = pages * page_size
    targets = numbers.sample(range(1, slots), min(count, slots - 1))
    sources = [numbers.randrange(-1, slots + 1) for _ in targets]
    targets = [numbers.choice((target, target, target, -1)) for target in targets]
    dtype = numbers.choice((torch.float16, torch.float32, torch.int8, torch.bfloat16))
    caches = [
        torch.arange(slots * width).view(pages, page_size, width).remainder(251).sub(125).to(dtype).to(place.device)
        for width in (numbers.randrange(1, 7), 1)
    ]
    before = [cache.cpu().clone().view(slots, -1) for cache in caches]
    pairs = place.put(torch.tensor(sources, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64))
    sk.move_kv(caches, sk.SlotMoves(*pairs), backend=place.backend)
    for cache, old in zip(caches, before, strict=True):
        expected = old.clone()
        for source, target in zip(sources, targets, strict=True):
            if 0 < source < slots and 0 < target < slots:
                expected[target] = old[source]
        assert torch.equal(cache.cpu().view(slots, -1), expected)


def test_draft_blocks_that_are_wider_than_the_chain(place: Any) -> None:
    """Two requests, three steps, eight draft tokens: 2 * 4 entries are read, not 16 (field_faults F03)."""
    slots, index = place.put(torch.arange(100, 116), torch.tensor([[0, 2, -1, -1], [8, 9, 13, 15]]))
    found = sk.compact_accepted_locs(slots, index, backend=place.backend)
    assert found.tolist() == [100, 102, 108, 109, 113, 115, 0, 0]
    moves = sk.accepted_moves(slots, index, width=8, backend=place.backend)
    assert moves.sources.tolist() == [100, 102, 0, 0, 108, 109, 113, 115]
    assert moves.targets.tolist() == [100, 101, 0, 0, 108, 109, 110, 111]


def test_refusals(place: Any) -> None:
    slots, index = place.put(torch.arange(8), torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(sk.ShapeError, match="out_cache_loc"):
        sk.accepted_moves(slots, index, width=3, backend=place.backend)
    with pytest.raises(sk.ShapeError, match="at most 2"):
        sk.accepted_moves(slots[:4], index, width=2, backend=place.backend)
    moves = sk.accepted_moves(slots, index, width=4, backend=place.backend)
    cache = torch.zeros(4, 4, 6, device=place.device)
    with pytest.raises(sk.ShapeError, match=r"caches\[0\]"):
        sk.move_kv([cache.transpose(0, 1)], moves, backend=place.backend)
    with pytest.raises(sk.ShapeError, match=r"caches\[1\]"):
        sk.move_kv([cache, cache[:2].clone()], moves, backend=place.backend)
    with pytest.raises(sk.AliasError, match="caches"):
        sk.move_kv([cache, cache], moves, backend=place.backend)


def test_custom_ops_are_sound(opcheck: Any) -> None:
    ops = torch.ops.spec_kernels
    slots, index = torch.arange(8), torch.tensor([[0, 2, -1], [4, -1, -1]])
    rows = torch.zeros(2, 6, dtype=torch.int64)
    opcheck(ops.compact_accepted_locs, (slots, index.view(-1), rows[0]))
    opcheck(ops.accepted_moves, (slots, index, rows[0].clone(), rows[1].clone(), 4))
    caches = [torch.zeros(8, 4, dtype=torch.uint8), torch.ones(8, 2, dtype=torch.uint8)]
    opcheck(ops.move_kv, (caches, torch.tensor([5, 3]), torch.tensor([3, 2])))
