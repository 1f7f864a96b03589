"""Owns the proof of block tables and write locations by group: loops, history, steps of their own, and attention."""

from __future__ import annotations

from typing import Any

import pytest
import spec_kernels as sk
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

cases = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def pages_of(
    table: list[list[int]], request: int, length: int, page: int, columns: int, slot_map: list[int] | None
) -> list[int]:
    found = []
    for column in range(columns):
        place, slot = column * page, 0
        if place < length and 0 <= request < len(table) and place < len(table[request]):
            slot = max(table[request][place], 0)
            if slot_map is not None:
                slot = max(slot_map[slot], 0) if 0 < slot < len(slot_map) else 0
        found.append(slot // page)
    return found


@cases
@given(seed=st.integers(0, 2**32))
def test_tables_equal_the_loop(place: Any, seed: int) -> None:
    numbers = place.case(seed)
    page, height, width = numbers.choice((1, 3, 4)), numbers.randrange(1, 4), numbers.randrange(1, 40)
    rows, bs = (6, 0) if numbers.random() < 0.2 else (numbers.randrange(3, 6), numbers.randrange(1, 4))
    table = place.ints(numbers, height * width, -1, 90).view(height, width)
    requests, lens = place.ints(numbers, bs, -1, height + 1), place.ints(numbers, bs, 0, width + 5)
    slot_map = place.ints(numbers, numbers.choice((1, 60, 90)), -1, 50) if numbers.random() < 0.5 else None
    wanted = [
        pages_of(table.tolist(), request, length, page, 9, None if slot_map is None else slot_map.tolist())
        for request, length in zip(requests.tolist(), lens.tolist(), strict=True)
    ] + [[0] * 9] * (rows - bs)
    placed_lens, placed_table, placed_requests = place.put(lens, table, requests)
    given_map = None if slot_map is None else slot_map.to(place.device)
    out = place.poison(rows, 9, dtype=torch.int32)
    sk.fill_block_table(
        out, placed_table, placed_requests, placed_lens, page_size=page, slot_map=given_map, backend=place.backend
    )
    assert out.tolist() == wanted


def storage(place: Any, **changes: Any) -> sk.AttentionStorage:
    # Slot s of the full pool is slot 12 - s of the window's; slots 8 and up were freed there.
    swa = torch.tensor([0, *(12 - s for s in range(1, 8)), -1, -1, -1, -1], device=place.device)
    sizes: dict[str, Any] = {"rows": 3, "tokens": 4, "columns": 4, "page_size": 2, "device": place.device}
    return sk.AttentionStorage({"full": None, "window": swa}, **{**sizes, **changes})


def test_no_row_remembers_an_earlier_batch(place: Any) -> None:
    table = torch.tensor([[2, 3, 4, 5, 8, 9], [6, 7, 10, 11, 0, 0]], dtype=torch.int32, device=place.device)
    held = storage(place)
    full = torch.tensor([0, 1], device=place.device)
    locs = torch.tensor([9, 7], device=place.device)
    first = held.fill(table, full, locs, q_lens=[1, 1], kv_lens=[6, 2], pad_q_len=1, backend=place.backend)
    assert first["full"].block_table.tolist() == [[1, 2, 4, 0], [3, 0, 0, 0], [0, 0, 0, 0]]
    assert first["window"].block_table.tolist() == [[5, 4, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0]]
    assert held.write_locs["full"].tolist() == [9, 7, 0, 0] and held.write_locs["window"].tolist() == [0, 5, 0, 0]
    addresses = [part.data_ptr() for part in (*held.block_tables.values(), *held.write_locs.values(), held.kv_lens)]
    none = torch.tensor([], dtype=torch.int64, device=place.device)
    second = held.fill(table, none, none, q_lens=[], kv_lens=[], pad_q_len=1, backend=place.backend)
    for group in ("full", "window"):
        assert not held.block_tables[group].any() and not held.write_locs[group].any()
        assert second[group].kv_lens == [0, 0, 0] and second[group].q_lens == [1, 1, 1]
    assert first["full"].kv_lens == [6, 2, 0] and not held.kv_lens.any()
    after = [part.data_ptr() for part in (*held.block_tables.values(), *held.write_locs.values(), held.kv_lens)]
    assert addresses == after


def test_every_draft_step_has_lengths_of_its_own(place: Any) -> None:
    """Committed [8, 5] and three steps give [9, 6], [10, 7], [11, 8] (contracts.md A-08), in device memory too."""
    table = torch.arange(24, device=place.device).view(2, 12)
    requests, committed = torch.tensor([0, 1], device=place.device), [8, 5]
    steps = [storage(place, columns=6) for _ in range(3)]
    locs = torch.tensor([1, 2], device=place.device)
    described = [
        held.fill(
            table, requests, locs, q_lens=[1, 1], kv_lens=[n + step + 1 for n in committed], pad_q_len=1,
            backend=place.backend,
        )
        for step, held in enumerate(steps)
    ]  # fmt: skip
    assert [held.kv_lens.tolist() for held in steps] == [[9, 6, 0], [10, 7, 0], [11, 8, 0]]
    assert [one["full"].kv_lens[:2] for one in described] == [[9, 6], [10, 7], [11, 8]] and committed == [8, 5]


def test_refusals(place: Any) -> None:
    table = torch.ones(2, 6, dtype=torch.int32, device=place.device)
    requests = torch.tensor([0, 1], device=place.device)
    held, on = storage(place), {"pad_q_len": 1, "backend": place.backend}
    with pytest.raises(sk.MetadataError, match="three equal numbers"):
        held.fill(table, requests, requests, q_lens=[1], kv_lens=[1, 1], **on)
    with pytest.raises(sk.TokenCountError, match="5 tokens"):
        held.fill(table, requests, torch.ones(5, device=place.device).long(), q_lens=[1, 1], kv_lens=[1, 1], **on)
    with pytest.raises(sk.TableCapacityError, match="4 pages"):
        held.fill(table, requests, requests, q_lens=[1, 1], kv_lens=[9, 1], **on)
    with pytest.raises(sk.LengthError, match="at least the 2"):
        held.fill(table, requests, requests, q_lens=[2, 1], kv_lens=[1, 1], **on)
    with pytest.raises(sk.BucketError, match="rows"):
        many = torch.zeros(4, dtype=torch.int64, device=place.device)
        held.fill(table, many, many, q_lens=[1] * 4, kv_lens=[1] * 4, **on)
    with pytest.raises(sk.BucketError, match="2 requests"):
        out = torch.zeros(1, 4, dtype=torch.int32, device=place.device)
        sk.fill_block_table(out, table, requests, requests, page_size=2, backend=place.backend)
    with pytest.raises(sk.MetadataError, match="no group"):
        sk.AttentionStorage({}, rows=1, tokens=1, columns=1, page_size=1, device=place.device)


def test_the_custom_op_is_sound(opcheck: Any) -> None:
    table, index = torch.ones(2, 6, dtype=torch.int32), torch.tensor([0, 1])
    arguments = (torch.zeros(3, 4, dtype=torch.int32), table, index, index + 3, torch.tensor([0, 4]), 2)
    opcheck(torch.ops.spec_kernels.fill_block_table, arguments)
