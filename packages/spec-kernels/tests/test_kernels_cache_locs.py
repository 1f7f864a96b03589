"""Owns the proof of cache locations: every backend equals a plain loop, and no overrun reads a neighbour."""

from __future__ import annotations

from typing import Any

import pytest
import spec_kernels as sk
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

cases = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.integers(0, 2**32)


def entry(table: list[list[int]], row: int, column: int) -> int:
    inside = 0 <= row < len(table) and 0 <= column < len(table[row])
    return max(table[row][column], 0) if inside else 0


def batch(place: Any, numbers: Any) -> tuple[list[list[int]], list[torch.Tensor], list[int], list[int], int]:
    height, width = numbers.randrange(1, 5), numbers.randrange(1, 30)
    bs = 0 if numbers.random() < 0.15 else numbers.randrange(1, 7)
    table = place.ints(numbers, height * width, -1, 900).view(height, width)
    rows = place.ints(numbers, bs, -1, height + 1)
    starts = place.ints(numbers, bs, -2, width + 4)
    return table.tolist(), place.put(rows, table, starts), rows.tolist(), starts.tolist(), bs


@cases
@given(seed=seeds)
def test_consecutive_positions(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    table, (rows, placed, starts), row_list, start_list, bs = batch(place, numbers)
    width, topk = numbers.randrange(1, 20), numbers.randrange(1, 4)
    out = place.poison(bs * width)
    found = sk.uniform_cache_locs(placed, rows, starts, width=width, out=out, backend=place.backend)
    assert found.locs is out
    pairs = list(zip(row_list, start_list, strict=True))
    assert out.tolist() == [entry(table, row, start + j) for row, start in pairs for j in range(width)]
    assert found.positions.tolist() == [start + j for start in start_list for j in range(width)]
    drafted = sk.draft_cache_locs(placed, rows, starts, topk=topk, steps=3, backend=place.backend)
    assert drafted.locs.dtype == placed.dtype
    assert drafted.locs.tolist() == [entry(table, row, start + j) for row, start in pairs for j in range(topk * 3)]
    assert drafted.positions.tolist() == [start for start in start_list for _ in range(topk)]


@cases
@given(seed=seeds)
def test_ragged_positions(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    table, (rows, placed, starts), row_list, start_list, bs = batch(place, numbers)
    lengths = [numbers.choice((0, 0, -1, 1, 5, 17)) for _ in range(bs)]
    (ends,) = place.put(torch.tensor([s + n for s, n in zip(start_list, lengths, strict=True)], dtype=torch.int64))
    total = numbers.randrange(0, sum(max(n, 0) for n in lengths) + 5)
    out = place.poison(total)
    sk.extend_cache_locs(placed, rows, starts, ends, total=total, out=out, backend=place.backend)
    expected = [
        entry(table, row, start + j)
        for row, start, length in zip(row_list, start_list, lengths, strict=True)
        for j in range(max(length, 0))
    ]
    assert out.tolist() == (expected + [0] * total)[:total]


@cases
@given(seed=seeds)
def test_fronts_of_windows(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    bs, width = numbers.randrange(0, 5), numbers.randrange(1, 9)
    slots, counts = place.ints(numbers, bs * width, 1, 900), place.ints(numbers, bs, 0, width + 2)
    placed = place.put(slots, counts)
    found = sk.front_cache_locs(placed[0], placed[1], width=width, backend=place.backend).tolist()
    windows = slots.view(bs, width).tolist()
    expected = [entry(windows, row, j) for row in range(bs) for j in range(counts.tolist()[row])]
    assert found == (expected + [0] * (bs * width))[: bs * width]


@cases
@given(seed=seeds)
def test_translation(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    pages, page_size, tokens = numbers.randrange(1, 6), numbers.choice((1, 4, 128)), numbers.randrange(0, 40)
    page_map, locs = place.ints(numbers, pages, -1, 9), place.ints(numbers, tokens, -2, (pages + 1) * page_size)
    placed = place.put(locs, page_map)
    out = place.poison(tokens)
    sk.translate_locs(placed[0], placed[1], page_size=page_size, out=out, backend=place.backend)
    expected = []
    for loc in locs.tolist():
        page = page_map.tolist()[loc // page_size] if 0 < loc < pages * page_size else 0
        expected.append(page * page_size + loc % page_size if page > 0 else 0)
    assert out.tolist() == expected


def test_translation_past_two_to_the_31(place: Any) -> None:
    locs, page_map = place.put(
        torch.tensor([300], dtype=torch.int32), torch.tensor([0, 0, 2**24 + 3], dtype=torch.int32)
    )
    assert sk.translate_locs(locs, page_map, page_size=128, backend=place.backend).tolist() == [(2**24 + 3) * 128 + 44]


@cases
@given(seed=seeds)
def test_compact_windows(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    height, width, short = numbers.randrange(1, 6), numbers.randrange(1, 30), numbers.randrange(1, 20)
    bs, block = numbers.randrange(0, height + 1), numbers.randrange(1, 5)
    table = place.ints(numbers, height * width, -1, 900).view(height, width)
    rows = torch.tensor(numbers.sample(range(height), bs), dtype=torch.int64)
    if bs and numbers.random() < 0.3:
        rows[0] = numbers.choice((-1, height))
    starts, lengths = place.ints(numbers, bs, 0, width), place.ints(numbers, bs, -1, short + 2)
    verify = place.ints(numbers, bs * block, 1, 900).view(bs, block)
    draft = place.poison(height, short)
    placed = place.put(table, verify, rows, starts, lengths)
    sk.compact_window_rows(draft, placed[0], placed[2], placed[3], placed[4], placed[1], backend=place.backend)
    expected = [[-7777] * short for _ in range(height)]
    for i, row in enumerate(rows.tolist()):
        if 0 <= row < height:
            window = [entry(table.tolist(), row, int(starts[i]) + c) for c in range(int(lengths[i]))]
            expected[row] = (window + verify.tolist()[i] + [0] * short)[:short]
    assert draft.tolist() == expected


def test_three_requests_of_unequal_lengths(place: Any) -> None:
    """Tokens [4, 1, 4] stand at offsets 0, 4, 5 (field_faults C14)."""
    table, rows, starts, ends = place.put(
        torch.arange(100, 160).view(3, 20), torch.arange(3), torch.zeros(3, dtype=torch.int64), torch.tensor([4, 1, 4])
    )
    found = sk.extend_cache_locs(table, rows, starts, ends, total=9, backend=place.backend)
    assert found.tolist() == [100, 101, 102, 103, 120, 140, 141, 142, 143]


def test_refusals(place: Any) -> None:
    table, rows, starts = place.put(torch.ones(2, 4, dtype=torch.int64), torch.arange(2), torch.arange(2))
    options: dict[str, Any] = {"width": 2, "backend": place.backend}
    with pytest.raises(sk.ShapeError, match="starts"):
        sk.uniform_cache_locs(table, rows, starts[:1], **options)
    with pytest.raises(sk.DtypeError, match="req_pool_indices"):
        sk.uniform_cache_locs(table, rows.float(), starts, **options)
    with pytest.raises(sk.ShapeError, match="width"):
        sk.uniform_cache_locs(table, rows, starts, width=0, backend=place.backend)
    with pytest.raises(sk.IndexWidthError, match="int64"):
        sk.uniform_cache_locs(table, rows, starts, out=place.poison(4, dtype=torch.int32), **options)
    with pytest.raises(sk.AliasError, match="out, req_to_token"):
        flat = place.poison(8)
        sk.uniform_cache_locs(flat.view(2, 4), rows, starts, out=flat[:4], **options)
    with pytest.raises(sk.ShapeError, match="contiguous"):
        sk.uniform_cache_locs(table, rows, starts, out=place.poison(8)[::2], **options)
    with pytest.raises(sk.DeviceError, match="starts"):
        sk.uniform_cache_locs(table, rows, torch.zeros(2, dtype=torch.int64, device="meta"), **options)


def test_custom_ops_are_sound(opcheck: Any) -> None:
    ops = torch.ops.spec_kernels
    table, rows, starts = torch.arange(40).view(4, 10), torch.tensor([0, 2]), torch.tensor([1, 3])
    locs = torch.zeros(6, dtype=torch.int64)
    opcheck(ops.uniform_cache_locs, (table, rows, starts, locs, locs.clone(), 3, 3))
    opcheck(ops.extend_cache_locs, (table, rows, starts, starts + 2, locs))
    opcheck(ops.translate_locs, (starts, rows, locs[:2].clone(), 4))
    draft, verify = torch.zeros(4, 6, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64)
    opcheck(ops.compact_window_rows, (draft, table, rows, starts, rows, verify))
