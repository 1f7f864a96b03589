"""NPUPagedTokenToKVPoolAllocator against PageAllocator: the same pages where both are fresh, the same laws always."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from engines_pools import NPU
from kv_pool import DoubleFree, OutOfPages, PageAllocator, slots_for
from sglang.srt.hardware_backend.npu.allocator_npu import NPUPagedTokenToKVPoolAllocator


class Both:
    """Both allocators over pages of one size, with a table of requests each."""

    def __init__(self, pages: int, page_size: int, *, sort: bool = True) -> None:
        self.page_size = page_size
        self.theirs: Any = NPUPagedTokenToKVPoolAllocator(
            pages * page_size, page_size, torch.float16, "npu", kvcache=None, need_sort=sort
        )
        self.ours = PageAllocator(pages + 1, page_size)
        self.slots: dict[int, list[int]] = {}
        self.pages: dict[int, list[int]] = {}

    def extend(self, requests: dict[int, int]) -> tuple[bool, bool]:
        """Grow each request by so many tokens, all or none; whether each side could."""
        before = {name: self.slots.get(name, []) for name in requests}
        prefix = torch.tensor([len(slots) for slots in before.values()])
        total = prefix + torch.tensor(list(requests.values()))
        last = torch.tensor([slots[-1] if slots else -1 for slots in before.values()], device=NPU)
        count = sum(requests.values())
        out = self.theirs.alloc_extend(prefix.to(NPU), prefix, total.to(NPU), total, last, count)
        needed = [
            -(-int(end) // self.page_size) - -(-int(start) // self.page_size)
            for start, end in zip(prefix, total, strict=True)
        ]
        try:
            fresh = list(self.ours.alloc(sum(needed)))
        except OutOfPages:
            return out is not None, False
        if out is not None:
            assert out.dtype == torch.int32 and out.shape == (count,)
            pieces = out.cpu().split(list(requests.values()))
            for name, piece in zip(requests, pieces, strict=True):
                self.slots[name] = before[name] + piece.tolist()
        for name, pages in zip(requests, needed, strict=True):
            self.pages[name] = self.pages.get(name, []) + [int(page) for page in fresh[:pages]]
            fresh = fresh[pages:]
        return out is not None, True

    def decode(self, names: list[int]) -> tuple[bool, bool]:
        """One token more for each request."""
        total = torch.tensor([len(self.slots[name]) + 1 for name in names])
        last = torch.tensor([self.slots[name][-1] for name in names], dtype=torch.int32, device=NPU)
        out = self.theirs.alloc_decode(total.to(NPU), total, last)
        crossing = [name for name in names if len(self.slots[name]) % self.page_size == 0]
        try:
            fresh = self.ours.alloc(len(crossing))
        except OutOfPages:
            return out is not None, False
        if out is not None:
            for name, slot in zip(names, out.tolist(), strict=True):
                self.slots[name].append(slot)
        for name, page in zip(crossing, fresh, strict=True):
            self.pages[name].append(int(page))
        return out is not None, True

    def free(self, name: int) -> None:
        self.theirs.free(torch.tensor(self.slots.pop(name), dtype=torch.int32, device=NPU))
        self.ours.release(self.pages.pop(name))

    def check(self, *, same_ids: bool) -> None:
        """Whole requests lie on whole pages in order, no two share a page, and both sides count alike."""
        assert self.theirs.available_size() == self.ours.available * self.page_size
        used: list[int] = []
        for name, slots in self.slots.items():
            pages = [slot // self.page_size for slot in slots[:: self.page_size]]
            assert slots == slots_for(pages, 0, len(slots), self.page_size).tolist()
            assert len(pages) == len(self.pages[name])
            assert not same_ids or pages == self.pages[name]
            used += pages
        assert 0 not in used and len(set(used)) == len(used)


@pytest.mark.parametrize("page_size", [1, 4, 16, 128])
def test_fresh_pages_are_handed_out_alike(page_size: int) -> None:
    both = Both(pages=40, page_size=page_size)
    draw = random.Random(page_size)
    both.extend({name: draw.randint(1, 3 * page_size) for name in range(5)})
    both.check(same_ids=True)
    both.extend({name: draw.randint(1, 2 * page_size) for name in (1, 3)})
    both.check(same_ids=True)
    if page_size > 1:  # with pages of one token SGLang's decode takes no page at all (below)
        for _ in range(page_size + 1):
            assert both.decode([0, 2, 4]) == (True, True)
        both.check(same_ids=True)


def test_more_pages_than_the_kernel_takes_go_the_plain_way() -> None:
    """From 200 pages on SGLang runs its own torch code instead of the library's kernel."""
    both = Both(pages=300, page_size=4)
    assert both.extend({0: 3, 1: 410, 2: 500}) == (True, True)
    both.check(same_ids=True)


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(seed: int) -> None:
    both, draw = Both(pages=24, page_size=4, sort=bool(seed % 2)), random.Random(seed)
    refused = 0
    for step in range(60):
        names = list(both.slots)
        if names and draw.random() < 0.3:
            both.free(draw.choice(names))
        elif names and draw.random() < 0.5:
            theirs, ours = both.decode(draw.sample(names, k=draw.randint(1, len(names))))
            assert theirs == ours
            refused += not ours
        else:
            theirs, ours = both.extend({step: draw.randint(1, 30), step + 1000: draw.randint(1, 9)})
            assert theirs == ours
            refused += not ours
        both.check(same_ids=False)
    assert refused


def test_a_count_behind_the_device_gives_one_slot_twice() -> None:
    """A-06: the page count comes from the host's lengths, the places from the device's."""
    both = Both(pages=8, page_size=4)
    both.extend({0: 4, 1: 8})
    last = torch.tensor([both.slots[0][-1], both.slots[1][-1]], device=NPU)
    out = both.theirs.alloc_decode(torch.tensor([5, 9], device=NPU), torch.tensor([4, 9]), last)
    assert out.tolist()[0] == out.tolist()[1]
    fresh = both.ours.alloc(2)  # ours takes one count, so that two requests never get one page
    assert len(set(fresh.tolist())) == 2


def test_decode_with_pages_of_one_token_takes_the_neighbour() -> None:
    """Contract 4.4: with page size 1 the next slot number is handed out, though another request may own it."""
    both = Both(pages=8, page_size=1)
    both.extend({0: 2, 1: 2})
    last = torch.tensor([both.slots[0][-1]], device=NPU)
    out = both.theirs.alloc_decode(torch.tensor([3], device=NPU), torch.tensor([3]), last)
    assert out.tolist() == [both.slots[1][0]]


def test_a_page_freed_twice() -> None:
    both = Both(pages=8, page_size=4)
    both.extend({0: 8})
    slots, pages = torch.tensor(both.slots[0], device=NPU), both.pages[0]
    both.free(0)
    both.theirs.free(slots)
    assert both.theirs.available_size() == 10 * 4  # of 8 pages
    with pytest.raises(DoubleFree):
        both.ours.release(np.array(pages))
