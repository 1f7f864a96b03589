"""Owns the proof that answers and numbers that make no sense end in a named error, not in a page that is served."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from kv_pool import HostPoolError
from kv_pool.hicache import FileStorage, StorageTier

sys.path.insert(0, str(Path(__file__).parent))

from pool_group import GroupBench
from pool_group_store import over

Text = Callable[[int, int], list[int]]
ALL = ["window", "draft", "states"]


class Answers:
    """A store that answers other numbers than pages that it filled."""

    name = "answers"

    def __init__(self, inner: FileStorage, call: str, answer: Any) -> None:
        self.inner, self.call, self.answer = inner, call, answer

    def exists(self, keys: Sequence[str]) -> int:
        found: int = self.answer if self.call == "exists" else self.inner.exists(keys)
        return found

    def read(self, keys: Sequence[str], pages: Sequence[Any]) -> int:
        read: int = self.answer if self.call == "read" else self.inner.read(keys, pages)
        return read

    def write(self, keys: Sequence[str], pages: Sequence[Any]) -> int:
        kept: int = self.answer if self.call == "write" else self.inner.write(keys, pages)
        return kept


@pytest.mark.parametrize("call", ["exists", "read", "write"])
@pytest.mark.parametrize("answer", [-1, 100, None])
@pytest.mark.parametrize("kinds", [[], ALL])
def test_a_store_that_answers_nonsense_serves_nothing(
    text: Text, tmp_path: Path, kinds: list[str], call: str, answer: Any
) -> None:
    bench = over(FileStorage(tmp_path / "pages", capacity_bytes=10**8), kinds)
    bench.serve(text(1, 26))
    bench.cache.drain()
    store = Answers(FileStorage(tmp_path / "pages", capacity_bytes=10**8), call, answer)
    again = over(store, kinds, {"threads": 0})
    again.cache.prefetch(text(1, 26))
    again.cache.drain()
    for name in (1, 2):
        again.serve(text(name, 26))
    again.cache.drain()
    own, companions = again.cache._storage.counters, again.cache.companion_storage  # type: ignore[union-attr]
    failures = own.failures + (companions.counters.failures if companions is not None else 0)
    assert failures > 0 or (call == "exists" and not kinds)
    assert own.written_pages >= 0 and own.unwritten_pages >= 0 and again.index.counts().locks == 0
    again.check_books()


@pytest.mark.parametrize("field", ["threshold", "batch", "write_limit", "threads"])
@pytest.mark.parametrize("value", [-1, 1.5, "4", True, float("nan")])
def test_numbers_of_a_tier_are_whole(tmp_path: Path, field: str, value: Any) -> None:
    bench = GroupBench([], host_layout="page_first_direct")
    store = FileStorage(tmp_path / "pages", capacity_bytes=10**8)
    with pytest.raises(HostPoolError, match=field):
        StorageTier(bench.host, bench.index, store, **{field: value})
    with pytest.raises(HostPoolError, match="share"):
        StorageTier(bench.host, bench.index, store, share=(2, 2))
