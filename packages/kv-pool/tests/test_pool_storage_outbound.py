"""Owns the proof that a page that is written again is not lost to the removal of what was there before."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from kv_pool.hicache import FileStorage
from kv_pool.hicache.storage._outbound import Outbound, Write
from kv_pool.hicache.storage._work import Books

KEYS = ["a" * 64, "b" * 64]


class SlowToRemove(FileStorage):
    """A store that removes when it is told to."""

    go: threading.Event

    def remove(self, keys: Sequence[str]) -> None:
        assert self.go.wait(60)
        super().remove(keys)


def test_a_page_is_written_behind_the_removal_of_its_key(tmp_path: Path) -> None:
    store = SlowToRemove(tmp_path / "pages", capacity_bytes=10**6)
    store.go, books, ended = threading.Event(), Books(), []
    old, new = [np.full(8, value, np.uint8) for value in (1, 2)]
    assert store.write(KEYS[:1], [[old]]) == 1
    with ThreadPoolExecutor(4) as threads:
        outbound = Outbound(store, threads, batch=8, limit=8)
        outbound.remove(KEYS[0], books)
        outbound.write(Write(KEYS, [[new], [new]], lambda: ended.append("again"), books))
        outbound.submit()
        outbound.poll()
        assert outbound.pages(books) == (2, 0) and ended == []
        store.go.set()
        outbound.drain()
    got = np.zeros(8, np.uint8)
    assert store.exists(KEYS) == 2 and store.read(KEYS[:1], [[got]]) == 1 and (got == new).all()
    assert ended == ["again"] and (books.counters.written_pages, books.counters.failures) == (2, 0)
