"""Owns which slots the next tokens of requests get: `SlotAllocator`, over a `PageAllocator`.

All lengths come from one source, the host arrays of the call, so that the number of pages and the places where they go
cannot contradict each other. It does not keep requests: the caller knows the last slot of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kv_pool._arguments import check_kind
from kv_pool.allocator import PageAllocator
from kv_pool.errors import DoubleFree, PageError, SharedTail, TableError
from kv_pool.tables import IndexLike, IntArray, as_index_array

__all__ = ["SlotAllocator"]


class SlotAllocator:
    """Extends requests by tokens: first the rest of their last page, then whole pages, then the tail's page.

    Invariants, true before and after every call:

    1. no slot is handed out twice before its page was freed;
    2. a page that is shared, or that is another row's last page too, is never written into;
    3. a refused call changes nothing.

    Args:
        pages: Where pages come from; it may serve others too.
    """

    def __init__(self, pages: PageAllocator) -> None:
        self._pages = check_kind("pages", pages, PageAllocator, PageError)
        self._size = pages.page_size
        self._group: list[IntArray] | None = None

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._size

    @property
    def available(self) -> int:
        """Tokens for which whole pages are free."""
        return self._pages.available * self._size

    def extend(self, prefix_lens: IndexLike, seq_lens: IndexLike, last_slots: IndexLike) -> IntArray:
        """Give each request slots for its tokens from `prefix_lens` to `seq_lens`.

        Args:
            prefix_lens: Tokens that have slots already. Shape: [rows].
            seq_lens: Tokens afterwards; equal lengths ask for nothing. Shape: [rows].
            last_slots: Slot of each row's last token; ignored where the prefix is empty. Shape: [rows].

        Returns:
            The new slots, row after row. Shape: [sum(seq_lens - prefix_lens)]; dtype int64.

        Raises:
            TableError: Rows do not match, lengths shrink, or a last slot stands at another offset than its length says.
            SharedTail: A row would write into a page that has another holder, or that two rows call their last.
            OutOfPages: Not enough free pages.
        """
        prefix, total, last = _rows(prefix_lens, seq_lens, last_slots)
        size = self._size
        have, need = -(-prefix // size), -(-total // size)
        self._check_tails(prefix, last, total > prefix)
        fresh = self._pages.alloc(int((need - have).sum()))
        counts = total - prefix
        rows = np.repeat(np.arange(len(counts)), counts)
        ends = np.cumsum(counts)
        positions = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts) + prefix[rows]
        page_of = positions // size
        inside = page_of < have[rows]  # in the page that the row began before
        first_fresh = np.cumsum(need - have) - (need - have)
        slots = np.empty(len(positions), dtype=np.int64)
        slots[inside] = (last[rows] // size * size + positions % size)[inside]
        beyond = ~inside
        at = (first_fresh[rows] + page_of - have[rows])[beyond]
        slots[beyond] = fresh[at] * size + positions[beyond] % size
        return slots

    def decode(self, seq_lens: IndexLike, last_slots: IndexLike) -> IntArray:
        """Give each request a slot for one token.

        Args:
            seq_lens: Tokens with the new one. Shape: [rows]; at least 1.
            last_slots: Slot of each row's token before it. Shape: [rows].

        Returns:
            Shape: [rows]; dtype int64.

        Raises:
            TableError, SharedTail, OutOfPages: As for `extend`.
        """
        total = as_index_array("seq_lens", seq_lens)
        if total.size and int(total.min()) < 1:
            raise TableError(
                "seq_lens",
                given=int(total.min()),
                expected="at least 1: lengths count the new token",
                consequence="the row would get no slot",
                remedy="pass the length after this step",
            )
        return self.extend(total - 1, total, last_slots)

    def free(self, slots: IndexLike) -> None:
        """Release the pages of `slots`, each once; inside `group` at its end.

        Args:
            slots: All slots of the pages that end; any one of a page frees the page.

        Raises:
            ForeignPage: A slot outside the pool, or in page 0.
            DoubleFree: A page that is free already, or was freed in this group.
        """
        ids = as_index_array("slots", slots, PageError)
        pages = np.unique(ids // self._size)
        try:
            if self._group is None:
                self._pages.release(pages)
                return
            free = pages[self._pages.holders(pages) == 0]
        except PageError as error:
            raise error.named("pages of the slots") from None
        twice = np.intersect1d(pages, np.concatenate([np.zeros(0, np.int64), *self._group]))
        if twice.size or free.size:
            raise DoubleFree(
                "slots",
                given=np.union1d(twice, free).tolist(),
                expected="pages that are held and not yet freed in this group",
                consequence="a page freed twice would be handed to two owners; nothing was freed by this call",
                remedy="free each request once",
            )
        self._group.append(pages)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Collect what is freed inside and release it at the end, also when the block raises; groups do not nest."""
        if self._group is not None:
            raise PageError(
                "group",
                given="a group inside a group",
                expected="one group at a time",
                consequence="the inner end would free pages of the outer one",
                remedy="open one group around both",
            )
        self._group = []
        try:
            yield
        finally:
            pages, self._group = self._group, None
            if pages:
                self._pages.release(np.concatenate(pages))

    def _check_tails(self, prefix: IntArray, last: IntArray, grows: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """Refuse rows whose last page is not theirs alone to write into."""
        known = prefix > 0
        wrong = known & ((last < self._size) | (last % self._size != (prefix - 1) % self._size))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            tokens = int(prefix[row])
            raise TableError(
                f"last_slots[{row}]",
                given=int(last[row]),
                expected=f"a slot at offset {(tokens - 1) % self._size} of a page, for {tokens} tokens",
                consequence="new tokens would overwrite old ones, or leave a hole",
                remedy="pass the slot of the row's last token, and lengths from the same moment",
            )
        tails = last[known & grows & (prefix % self._size != 0)] // self._size
        if not tails.size:
            return
        unique, counts = np.unique(tails, return_counts=True)
        shared = unique[(counts > 1) | (self._pages.holders(unique) != 1)]
        if shared.size:
            raise SharedTail(
                "last_slots",
                given=f"pages {shared.tolist()}",
                expected="a last page that is held once, by its row",
                consequence="two requests would write into the same slots",
                remedy="share whole pages only: copy the partial page first",
            )


def _rows(*arrays: IndexLike) -> tuple[IntArray, IntArray, IntArray]:
    names = ("prefix_lens", "seq_lens", "last_slots")
    prefix, total, last = (as_index_array(name, array) for name, array in zip(names, arrays, strict=True))
    if not len(prefix) == len(total) == len(last):
        raise TableError(
            "prefix_lens, seq_lens, last_slots",
            given=(len(prefix), len(total), len(last)),
            expected="three equal numbers of rows",
            consequence="a request would get another's slots",
            remedy="pass one value a row in each",
        )
    if prefix.size and (int(prefix.min()) < 0 or bool((total < prefix).any())):
        row = int(np.flatnonzero((prefix < 0) | (total < prefix))[0])
        raise TableError(
            f"prefix_lens[{row}], seq_lens[{row}]",
            given=(int(prefix[row]), int(total[row])),
            expected="0 <= prefix_lens <= seq_lens",
            consequence="the number of new tokens would be negative",
            remedy="pass lengths before and after this step",
        )
    return prefix, total, last
