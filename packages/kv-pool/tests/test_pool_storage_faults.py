"""Owns the proof that whatever a store raises is named, costs hits alone, and leaves no page, pin or lock behind.

The store is a real one over files that raises in one of its calls, on some thread, what a library below it might.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kv_pool import CanaryMismatch, StorageDamaged, StorageError
from kv_pool.hicache import Closes, FileStorage, PageStorage, RegistersMemory, Removes, create_storage
from kv_pool.hicache.storage._calls import ask

sys.path.insert(0, str(Path(__file__).parent))

from pool_group import GroupBench
from pool_group_store import over
from test_pool_storage_companions import ALL

Text = Callable[[int, int], list[int]]
ERRORS = [KeyError("bucket"), OSError(5, "gone"), RuntimeError("closed")]
each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
each_kinds = pytest.mark.parametrize("kinds", [[], ALL], ids=["alone", "companions"])
each_threads = pytest.mark.parametrize("threads", [0, 1])


class Faulty:
    """A store over files that raises in one of its calls, after so many that went well."""

    name = "faulty"

    def __init__(self, inner: FileStorage, call: str, error: BaseException, after: int = 0) -> None:
        self.inner, self.call, self.error, self.left = inner, call, error, after
        self.raised = 0

    def _meet(self, call: str) -> None:
        if call == self.call:
            self.left -= 1
            if self.left < 0:
                self.raised += 1
                raise self.error

    def exists(self, keys: Sequence[str]) -> int:
        self._meet("exists")
        return self.inner.exists(keys)

    def read(self, keys: Sequence[str], pages: Sequence[Any]) -> int:
        read = self.inner.read(keys, pages)
        self._meet("read")  # the bytes came, and nobody may believe it
        return read

    def write(self, keys: Sequence[str], pages: Sequence[Any]) -> int:
        written = self.inner.write(keys[:1], pages[:1])
        self._meet("write")  # a part was written
        return written + self.inner.write(keys[1:], pages[1:])

    def remove(self, keys: Sequence[str]) -> None:
        self._meet("remove")
        self.inner.remove(keys)

    def register(self, memory: Sequence[Any]) -> None:
        self._meet("register")

    def close(self) -> None:
        self._meet("close")


def made(folder: Path, call: str, error: BaseException, *, after: int = 0) -> Faulty:
    store = Faulty(FileStorage(folder / "pages", capacity_bytes=10**8), call, error, after)
    assert all(isinstance(store, protocol) for protocol in (PageStorage, RegistersMemory, Removes, Closes))
    return store


def told(bench: GroupBench) -> tuple[Any, list[StorageError]]:
    """What the third level has counted over all pools, and the errors that it kept."""
    own, companions = bench.cache._storage, bench.cache.companion_storage
    assert own is not None
    found = [own.failure, companions.failure if companions is not None else None]
    counters = own.counters + companions.counters if companions is not None else own.counters
    return counters, [one for one in found if one is not None]


def whole(bench: GroupBench) -> None:
    """Nothing is under way, held or locked any more; available + evictable + protected + in use = total, everywhere."""
    bench.check_books()
    assert not bench.cache.pending and bench.index.counts().locks == 0
    assert bench.host.allocator.held == bench.index.counts().host.held
    for name in (None, *(companion.name for companion in bench.cache.companions)):
        books = bench.cache.accounting(name)
        assert (books.protected, books.in_use) == (0, 0)
    for member in bench.cache._group:
        assert (member.host.own.holders(member.host.find(member.host.named())) == 1).all()


def filled(folder: Path, kinds: Sequence[str], text: Text, **options: Any) -> None:
    """A store that has prompt 1."""
    bench = over(FileStorage(folder / "pages", capacity_bytes=10**8), kinds, **options)
    bench.serve(text(1, 26))
    bench.cache.drain()


@each_error
@each_kinds
@each_threads
def test_a_write_that_fails_is_counted_and_named(
    text: Text, tmp_path: Path, error: Exception, kinds: list[str], threads: int
) -> None:
    store = made(tmp_path, "write", error, after=1)
    bench = over(store, kinds, {"threads": threads})
    bench.serve(text(1, 26))
    bench.cache.drain()
    counters, failures = told(bench)
    pages, calls = 6 * (1 + len(kinds)), 3 * (1 + len(kinds))
    assert (counters.written_pages, counters.unwritten_pages, counters.failures) == (2, pages - 2, calls - 1)
    assert all(one.__cause__ is error and "write of the store 'faulty'" in str(one) for one in failures)
    assert len(failures) == 1 + bool(kinds) and repr(type(error).__name__).strip("'") in str(failures[0])
    whole(bench)
    assert bench.serve(text(1, 26)) == (24, 0)
    bench.cache.drain()
    whole(bench)


@each_error
@each_kinds
@each_threads
def test_a_read_that_fails_ends_the_hit_there(
    text: Text, tmp_path: Path, error: Exception, kinds: list[str], threads: int
) -> None:
    filled(tmp_path, kinds, text)
    store = made(tmp_path, "read", error, after=2)  # two calls of two pages
    bench = over(store, kinds, {"threads": threads})
    prefetch = bench.cache.prefetch(text(1, 26))
    bench.cache.drain()
    counters, failures = told(bench)
    assert (prefetch.state, prefetch.pages, counters.read_pages) == ("done", 4, 4)
    assert counters.failures == store.raised > 0
    assert all(one.__cause__ is error and "read of the store 'faulty'" in str(one) for one in failures)
    whole(bench)
    assert bench.serve(text(1, 26)) == (0, 0 if kinds else 16)  # checks every byte of the hit
    bench.cache.drain()
    whole(bench)


@each_error
@each_threads
def test_a_store_that_does_not_say_what_it_has_serves_nothing_of_companions(
    text: Text, tmp_path: Path, error: Exception, threads: int
) -> None:
    filled(tmp_path, ALL, text)
    bench = over(made(tmp_path, "exists", error), ALL, {"threads": threads})
    prefetch = bench.cache.prefetch(text(1, 26))
    bench.cache.drain()
    counters, [failure] = told(bench)
    assert (prefetch.state, prefetch.pages, counters.read_pages, counters.failures) == ("done", 6, 6, 1)
    assert failure.__cause__ is error and "exists of the store 'faulty'" in str(failure)
    whole(bench)
    assert bench.serve(text(1, 26)) == (0, 0)


@each_error
@pytest.mark.parametrize("kind", ["own", *ALL])
@each_threads
def test_a_page_that_cannot_be_removed_is_not_asked_for_again(
    text: Text, tmp_path: Path, error: Exception, kind: str, threads: int
) -> None:
    kinds = [] if kind == "own" else [kind]
    store = made(tmp_path, "remove", error)
    bench = over(store, kinds, {"threads": threads}, canary=True)
    bench.serve(text(1, 17))
    bench.cache.drain()
    bench.cache.evict(8)
    acquired = bench.cache.acquire(text(1, 17))
    host: Any = bench.host
    page = int(acquired._host_pages[3])
    if kinds:
        [member] = bench.cache._group
        host, page = member.companion.hosts[0], int(member.host.find(acquired._host_pages[3:4])[0])
    host.mirrors[0].host[page].flatten()[0] += 1
    with pytest.raises(CanaryMismatch):
        bench.cache.load(acquired)
    bench.cache.abort(acquired)
    bench.cache.drain()
    counters, [failure] = told(bench)
    assert (counters.damaged_pages, counters.forgotten_pages, counters.failures) == (1, 1, 1)
    assert failure.__cause__ is error and "remove of the store 'faulty'" in str(failure)
    whole(bench)
    bench.serve(text(1, 17))
    bench.cache.drain()
    whole(bench)


@each_error
def test_memory_that_cannot_be_registered_is_refused_at_construction(tmp_path: Path, error: Exception) -> None:
    for after, kinds in ((0, []), (1, ["draft"])):
        with pytest.raises(StorageError, match="register of the store 'faulty'") as caught:
            over(made(tmp_path, "register", error, after=after), kinds)
        assert caught.value.__cause__ is error and caught.value.remedy


@each_error
def test_a_store_that_does_not_close_or_open_is_named(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageError, match="close of the store 'faulty'") as caught:
        ask(made(tmp_path, "close", error), "close")
    assert caught.value.__cause__ is error

    def fails(self: FileStorage, root: Path) -> None:
        raise error

    monkeypatch.setattr(FileStorage, "__init__", fails)
    with pytest.raises(StorageError, match="the store 'files'") as caught:
        create_storage("files", root=tmp_path)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("write", KeyboardInterrupt()),
        ("read", SystemExit(3)),
        ("exists", SystemExit(3)),
        ("remove", KeyboardInterrupt()),
    ],
    ids=["write", "read", "exists", "remove"],
)
@each_kinds
@each_threads
def test_an_interrupt_passes_through_and_leaves_the_books_whole(
    text: Text, tmp_path: Path, error: BaseException, call: str, kinds: list[str], threads: int
) -> None:
    filled(tmp_path, kinds, text, canary=True)
    store = made(tmp_path, call, error, after=1 if call in ("write", "read") else 0)
    bench = over(store, kinds, {"threads": threads}, canary=True)
    if call == "exists" and not kinds:
        with pytest.raises(type(error)):  # the cache's own pages are read without being asked for first
            ask(store, "exists", [])
        return

    interrupted = 0

    def attempt(step: Callable[[], Any]) -> None:
        nonlocal interrupted
        try:
            step()
        except type(error) as caught:
            assert caught is error
            interrupted += 1

    steps: list[Callable[[], Any]] = [
        lambda: bench.cache.prefetch(text(1, 26)),
        bench.cache.drain,
        lambda: bench.serve(text(2, 26)),
        bench.cache.drain,
        lambda: bench.cache.evict(8),
        lambda: spoil(bench, text(2, 26)),
        bench.cache.drain,
    ]
    for step in steps:
        attempt(step)
        for handle in list(bench.cache._open.values()):
            attempt(partial(bench.cache.abort, handle))
        bench.check_books()
    store.call = "none"
    while bench.cache.pending:
        attempt(bench.cache.drain)
    assert interrupted == store.raised >= 1, "each is heard of, once"
    whole(bench)
    for name in (1, 2, 3):
        bench.serve(text(name, 26))
        bench.cache.drain()
        whole(bench)


def spoil(bench: GroupBench, tokens: list[int]) -> None:
    """A load meets a page that is not what was backed up, in the first pool that has one on the host."""
    acquired = bench.cache.acquire(tokens)
    members = list(bench.cache._group)
    if members:
        found = members[0].host.find(acquired._host_pages)
        pages, host = found[found > 0], members[0].companion.hosts[0]
    else:
        pages, host = acquired._host_pages, bench.host
    if pages.size and acquired.host_hit_tokens:
        host.mirrors[0].host[int(pages[-1])].flatten()[0] += 1
        with pytest.raises(CanaryMismatch):
            bench.cache.load(acquired)
    bench.cache.abort(acquired)


@pytest.mark.parametrize("told_of", [-1, 2, 100, None, True])
def test_a_damaged_page_that_was_not_asked_for_is_a_failure(text: Text, tmp_path: Path, told_of: Any) -> None:
    """A store that says more, or other, than that the first so many pages of the call are whole."""
    filled(tmp_path, [], text)
    error = StorageDamaged("page", given="bytes", expected="others", consequence="none", remedy="none")
    error.pages_read = told_of
    bench = over(made(tmp_path, "read", error), [])
    prefetch = bench.cache.prefetch(text(1, 26))
    bench.cache.drain()
    counters, [failure] = told(bench)
    assert failure is error and prefetch.pages == 0
    assert (counters.read_pages, counters.damaged_pages, counters.failures) == (0, 0, 1)
    whole(bench)


@each_threads
@each_kinds
def test_keys_that_cannot_be_made_leave_nothing_locked(
    text: Text, tmp_path: Path, kinds: list[str], threads: int
) -> None:
    bench = over(FileStorage(tmp_path / "pages", capacity_bytes=10**8), kinds, {"threads": threads})
    namespace: Any = ("", 7)
    with pytest.raises(Exception, match=r"namespace|str"):
        bench.cache.prefetch(text(1, 26), namespace)
    bench.cache.drain()
    whole(bench)
