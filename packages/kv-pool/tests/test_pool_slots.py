"""Owns the proof that requests get the slots that a plain walk over their tokens gives, and never another's."""

from __future__ import annotations

from collections.abc import Callable

import kv_pool
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kv_pool import OutOfPages, PageAllocator, SlotAllocator


def allocator(pages: int = 8, page_size: int = 4) -> tuple[PageAllocator, SlotAllocator]:
    owner = PageAllocator(pages + 1, page_size)
    return owner, SlotAllocator(owner)


def test_an_extension_fills_the_last_page_then_whole_pages_then_a_tail() -> None:
    owner, slots = allocator()
    first = slots.extend([0, 0], [6, 3], [0, 0])
    assert first.tolist() == [4, 5, 6, 7, 8, 9, 12, 13, 14]
    second = slots.extend([6, 3], [13, 4], [int(first[5]), int(first[8])])
    assert second.tolist() == [10, 11, 16, 17, 18, 19, 20, 15]
    assert owner.held == 5


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_decode_takes_a_page_exactly_when_the_last_one_is_full(page_size: int) -> None:
    owner, slots = allocator(pages=12, page_size=page_size)
    last = slots.extend([0, 0], [1, 2], [0, 0])[[0, 2]]
    lengths = np.array([1, 2])
    for _ in range(4):
        before = owner.held
        lengths += 1
        last = slots.decode(lengths, last)
        assert owner.held - before == int(((lengths - 1) % page_size == 0).sum())
        assert (last % page_size == (lengths - 1) % page_size).all()
        assert len(set(last.tolist())) == 2


def test_refusals_change_nothing() -> None:
    owner, slots = allocator(pages=3)
    held = slots.extend([0], [5], [0])
    refusals: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: slots.extend([5], [14], [held[-1]]), kv_pool.OutOfPages, "free pages"),
        (lambda: slots.extend([5], [6], [held[1]]), kv_pool.TableError, "offset 0"),
        (lambda: slots.extend([5], [4], [held[-1]]), kv_pool.TableError, "prefix_lens"),
        (lambda: slots.extend([-1], [4], [0]), kv_pool.TableError, "prefix_lens"),
        (lambda: slots.extend([5, 1], [6], [held[-1]]), kv_pool.TableError, "equal numbers"),
        (lambda: slots.extend(np.array([1.5]), [4], [0]), kv_pool.TableError, "integer"),
        (lambda: slots.decode([0], [0]), kv_pool.TableError, "at least 1"),
        (lambda: slots.extend([1, 1], [2, 2], [4, 4]), kv_pool.SharedTail, "same slots"),
        (lambda: slots.extend([1], [2], [12]), kv_pool.SharedTail, "held once"),  # a page that nobody holds
    ]
    for call, error, text in refusals:
        with pytest.raises(error, match=text):
            call()
        assert owner.held == 2
    owner.retain([2])
    with pytest.raises(kv_pool.SharedTail, match="copy the partial page"):
        slots.decode([6], [held[-1]])
    assert slots.extend([4], [5], [held[3]]).tolist() == [12]  # a full shared page is no tail


def test_groups_free_once_at_their_end() -> None:
    owner, slots = allocator()
    held = slots.extend([0, 0], [5, 3], [0, 0])
    with slots.group():
        slots.free(held[:5])
        with pytest.raises(kv_pool.DoubleFree, match="not yet freed"):
            slots.free(held[4:])
        with pytest.raises(kv_pool.PageError, match="group inside"), slots.group():
            pass
        assert owner.held == 3
        slots.free(held[5:6])
    assert owner.held == 0
    with pytest.raises(kv_pool.DoubleFree):
        slots.free(held[:1])
    with pytest.raises(kv_pool.ForeignPage):
        slots.free([0])
    owner.verify()


@settings(deadline=None)
@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5))
def test_slots_are_those_of_a_plain_walk(page_size: int, rows: list[tuple[int, int]]) -> None:
    owner, slots = allocator(pages=96, page_size=page_size)  # five rows of 18 tokens, pages of one token at the least
    zeros = [0] * len(rows)
    first = slots.extend(zeros, [prefix for prefix, _ in rows], zeros)
    known: list[list[int]] = []
    at = 0
    for prefix, _ in rows:
        known.append(first[at : at + prefix].tolist())
        at += prefix
    last = [row[-1] if row else 0 for row in known]
    second = slots.extend([p for p, _ in rows], [p + more for p, more in rows], last).tolist()
    at = 0
    for row, (_, more) in zip(known, rows, strict=True):
        row += second[at : at + more]
        at += more
        for position, slot in enumerate(row):
            assert slot % page_size == position % page_size and slot >= page_size
            assert position % page_size == 0 or slot == row[position - 1] + 1
    everything = [slot for row in known for slot in row]
    assert len(set(everything)) == len(everything) == sum(p + more for p, more in rows)
    assert owner.held == sum(-(-(p + more) // page_size) for p, more in rows)


class Requests(RuleBasedStateMachine):
    """Requests that come, grow and go; every slot has one owner, and nothing leaks."""

    def __init__(self) -> None:
        super().__init__()
        self.owner, self.slots = allocator(pages=10, page_size=3)
        self.requests: list[list[int]] = []

    @rule(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=3))
    def come(self, lengths: list[int]) -> None:
        self._grow([[] for _ in lengths], lengths, new=True)

    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        chosen = [request for request in self.requests if data.draw(st.booleans())]
        self._grow(chosen, [data.draw(st.integers(0, 5)) for _ in chosen], new=False)

    @rule()
    def decode(self) -> None:
        try:
            slots = self.slots.decode([len(r) + 1 for r in self.requests], [r[-1] for r in self.requests])
        except kv_pool.OutOfPages:
            return
        for request, slot in zip(self.requests, slots.tolist(), strict=True):
            request.append(slot)

    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        leaving = [request for request in self.requests if data.draw(st.booleans())]
        with self.slots.group():
            for request in leaving:
                self.slots.free(request)
        self.requests = [request for request in self.requests if not any(request is gone for gone in leaving)]

    def _grow(self, requests: list[list[int]], more: list[int], *, new: bool) -> None:
        lengths = [len(request) for request in requests]
        last = [request[-1] if request else 0 for request in requests]
        after = [length + count for length, count in zip(lengths, more, strict=True)]
        before = self.owner.held
        try:
            slots = self.slots.extend(lengths, after, last).tolist()
        except kv_pool.OutOfPages:
            assert self.owner.held == before
            return
        for request, count in zip(requests, more, strict=True):
            request += slots[:count]
            slots = slots[count:]
            if new:
                self.requests.append(request)

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        everything = [slot for request in self.requests for slot in request]
        assert len(set(everything)) == len(everything)
        assert self.owner.held == len({slot // 3 for slot in everything})
        assert self.owner.available + self.owner.held == self.owner.total
        self.owner.verify()


TestRequests = Requests.TestCase


def test_ten_requests_of_one_token_take_ten_pages_c16() -> None:
    """C16: ten prompts of one token need 640 slots where pages have 64 tokens, not ten."""
    pages = PageAllocator(11, 64)
    slots = SlotAllocator(pages)
    nothing, one = np.zeros(10, np.int64), np.ones(10, np.int64)
    assert slots.available == 640
    taken = slots.extend(nothing, one, nothing)
    assert slots.available == 0 and taken.tolist() == [64 * page for page in range(1, 11)]
    with pytest.raises(OutOfPages):
        slots.extend([0], [1], [0])
