"""Owns the proof that companions come back from the third level, each under a key of its own, or shorten the hit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kv_pool import CanaryMismatch, HostPoolError, PageAllocator, PageMap, StorageError
from kv_pool.hicache import Companion, FileStorage, HostPool, StorageTier, WritePolicy, page_keys
from kv_pool.hicache.storage.companions import companion_digest

sys.path.insert(0, str(Path(__file__).parent))

from pool_group import GroupBench, window_pool
from pool_group_store import over

Text = Callable[[int, int], list[int]]
Make = Callable[..., GroupBench]
ALL = ["window", "draft", "states"]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Caches over one folder."""

    def build(kinds: Sequence[str] = ALL, **options: Any) -> GroupBench:
        return over(FileStorage(tmp_path / "pages", capacity_bytes=10**8), kinds, **options)

    return build


def counters(bench: GroupBench) -> Any:
    assert bench.cache.companion_storage is not None
    return bench.cache.companion_storage.counters


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("kinds", [["window"], ["draft"], ["states"], ALL])
def test_a_restarted_cache_finds_what_all_pools_had(
    make: Make, text: Text, kinds: list[str], policy: WritePolicy
) -> None:
    bench = make(kinds, policy=policy)
    for _ in range(2):
        bench.serve(text(1, 26))
    bench.cache.evict(8)
    bench.cache.drain()
    assert counters(bench).written_pages == 6 * len(kinds) and not bench.cache.pending
    again = make(kinds)
    prefetch = again.cache.prefetch(text(1, 26))
    assert prefetch.state == "reading"
    again.cache.drain()
    assert (prefetch.state, prefetch.pages) == ("done", 6)
    least = sum({"window": 2, "draft": 6, "states": 1}[kind] for kind in kinds)
    assert counters(again).read_pages == least, "no more than the deepest hit needs"
    again.check_books()
    assert again.serve(text(1, 26)) == (0, 24)
    assert again.cache.prefetch(text(1, 26)).state in ("reading", "below_threshold")
    again.cache.drain()
    assert counters(again).read_pages == least, "nothing is read twice"
    again.check_books()


def test_without_its_companion_a_page_is_not_found(make: Make, text: Text) -> None:
    plain = make([])
    plain.serve(text(1, 26))
    plain.cache.drain()
    for kind in ALL:
        bench = make([kind])
        prefetch = bench.cache.prefetch(text(1, 26))
        bench.cache.drain()
        assert prefetch.pages == 6 and counters(bench).read_pages == 0
        assert bench.serve(text(1, 26)) == (0, 0)
        assert bench.serve(text(1, 26)) == (24, 0)
    plain = make([])
    plain.cache.prefetch(text(1, 26))
    plain.cache.drain()
    assert plain.serve(text(1, 26)) == (0, 24), "its own pages are the same bytes, whatever lies beside them"


def test_the_deepest_hit_that_the_store_can_serve(make: Make, text: Text) -> None:
    bench = make(["states", "window"])
    acquired = bench.cache.acquire(text(1, 30))
    bench.cache.load(acquired)
    for layer in bench.layers:
        bench.compute(acquired, text(1, 30), layer, 0, 8)
    for place in (8, 12):
        bench.write_states(acquired, text(1, place))
        bench.cache.snapshot(acquired, place)
    bench.cache.finish(acquired, text(1, 30))
    bench.cache.drain()
    again = make(["states", "window"])
    again.cache.prefetch(text(1, 30))
    again.cache.drain()
    assert counters(again).read_pages == 1 + 2
    assert again.serve(text(1, 30)) == (0, 12)


def test_what_the_store_lacks_or_has_damaged_shortens_the_hit(make: Make, text: Text, tmp_path: Path) -> None:
    bench = make(["window"])
    bench.serve(text(1, 26))
    bench.cache.drain()
    digest = companion_digest(bench.cache._storage, bench.cache.companions[0])  # type: ignore[arg-type]
    keys = page_keys(digest, text(1, 26), 4)
    for missing, hit in (([5], 20), ([5, 3], 12)):
        for place in missing:
            [file] = [path for path in (tmp_path / "pages").rglob("*") if keys[place] in path.name]
            file.unlink()
        again = make(["window"])
        again.cache.prefetch(text(1, 26))
        again.cache.drain()
        assert again.serve(text(1, 26)) == (0, hit)
        again.cache.drain()  # what was computed again is written again
    [file] = [path for path in (tmp_path / "pages").rglob("*") if keys[2] in path.name]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    again = make(["window"])
    again.cache.prefetch(text(1, 12))
    again.cache.drain()
    assert counters(again).damaged_pages == 1
    again.check_books()
    assert again.serve(text(1, 12)) == (0, 0)


class Without:
    """A store that cannot remove pages."""

    name = "without"

    def __init__(self, inner: FileStorage) -> None:
        self.inner = inner
        self.exists, self.write = inner.exists, inner.write
        self.read_keys: list[str] = []

    def read(self, keys: Sequence[str], pages: Sequence[Any]) -> int:
        self.read_keys += keys
        return self.inner.read(keys, pages)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("removes", [True, False])
def test_a_page_that_the_canary_refuses_leaves_the_store_too(
    text: Text, tmp_path: Path, kind: str, removes: bool
) -> None:
    files = FileStorage(tmp_path / "pages", capacity_bytes=10**8)
    store: Any = files if removes else Without(files)
    bench = over(store, [kind], canary=True, pages=16)
    bench.serve(text(1, 17))
    bench.cache.drain()
    bench.cache.evict(16)
    member = bench.cache._group.member(kind)
    digest = companion_digest(bench.cache._storage, member.companion)  # type: ignore[arg-type]
    key = page_keys(digest, text(1, 16), 4)[3]
    acquired = bench.cache.acquire(text(1, 18))
    other = bench.cache.acquire(text(1, 19))
    place = int(member.host.find(acquired._host_pages[3:4])[0])
    member.companion.hosts[-1].mirrors[-1].host[place].view(torch.uint8)[-1, -1, -1, -1] ^= 1
    for handle in (acquired, other):
        with pytest.raises(CanaryMismatch):
            bench.cache.load(handle)
    bench.cache.abort(other)
    bench.cache.drain()
    told = counters(bench)
    assert (told.damaged_pages, told.forgotten_pages, told.failures) == (1, int(not removes), 0)
    assert files.exists([key]) == int(not removes) and member.counts["refused_host_pages"] == 1
    bench.check_books()
    bench.cache.limit(acquired, 12)
    bench.cache.finish(acquired, bench.run(acquired))
    bench.cache.drain()
    assert files.exists([key]) == 1, "computed again, and kept again"
    again = over(store, [kind], canary=True)
    member.host.leave(member.host.named())
    bench.cache.evict(16)
    bench.host.allocator.release(bench.index.evict_host(16).pages)
    for one, hit in ((again, 16), (bench, 16 if removes else 12)):  # this process does not ask for it again
        one.cache.prefetch(text(1, 18))
        one.cache.drain()
        assert one.serve(text(1, 18)) == (0, hit)
        one.check_books()


class Slow:
    """A store whose reads wait until they are let go, and that fails when it is told to."""

    name = "slow"

    def __init__(self, inner: FileStorage) -> None:
        self.inner, self.go, self.broken = inner, threading.Event(), False

    def exists(self, keys: Sequence[str]) -> int:
        return self.inner.exists(keys)

    def read(self, keys: Sequence[str], pages: Sequence[Any]) -> int:
        self.go.wait(60)
        if self.broken:
            raise StorageError("store", given="broken", expected="a store", consequence="none", remedy="none")
        return self.inner.read(keys, pages)

    def write(self, keys: Sequence[str], pages: Sequence[Any]) -> int:
        if self.broken:
            raise StorageError("store", given="broken", expected="a store", consequence="none", remedy="none")
        return self.inner.write(keys, pages)


@pytest.mark.parametrize("end", ["cancelled", "broken"])
def test_a_prefetch_that_is_cancelled_or_fails_holds_nothing(make: Make, text: Text, tmp_path: Path, end: str) -> None:
    bench = make(ALL)
    bench.serve(text(1, 26))
    bench.cache.drain()
    slow = Slow(FileStorage(tmp_path / "pages", capacity_bytes=10**8))
    again = over(slow, ALL)
    prefetch = again.cache.prefetch(text(1, 26))
    if end == "cancelled":
        prefetch.cancel()
    slow.broken = end == "broken"
    slow.go.set()
    again.cache.drain()
    assert prefetch.state == ("cancelled" if end == "cancelled" else "done")
    for member in again.cache._group:
        assert member.host.own.held == member.host.named().size
    again.check_books()
    assert again.index.counts().locks == 0
    slow.broken = end == "broken"
    again.serve(text(1, 26))
    again.cache.drain()
    assert counters(again).failures == (9 if end == "broken" else 0), "three batches of each companion"
    again.check_books()


class Gated:
    """A store whose writes wait until they are let go, and that notes their sizes."""

    name = "gated"

    def __init__(self, inner: FileStorage) -> None:
        self.exists, self.read, self.inner = inner.exists, inner.read, inner
        self.go, self.sizes, self.lock = threading.Event(), list[int](), threading.Lock()

    def write(self, keys: Sequence[str], pages: Sequence[Any]) -> int:
        with self.lock:
            self.sizes.append(len(keys))
        self.go.wait(30)
        return self.inner.write(keys, pages)


def test_writes_of_all_pools_wait_within_one_limit(make: Make, text: Text, tmp_path: Path) -> None:
    store = Gated(FileStorage(tmp_path / "pages", capacity_bytes=10**8))
    bench = over(store, ALL, {"batch": 4, "write_limit": 5, "threads": 2}, pages=20, host_pages=40)
    for name in (1, 2, 3, 4):
        bench.serve(text(name, 9))  # two pages of each of four pools
        bench.cache._copies.drain()
        under_way = bench.cache.under_way
        assert under_way.writes <= 5 and under_way.writes + under_way.queued_writes == 8 * name
    assert (under_way.writes, under_way.queued_writes) == (4, 28), "two pages each; a fifth alone there is not"
    storage: Any = bench.cache.companion_storage
    assert storage.pending
    told = [storage.under_way(name) for name in ALL]
    assert sum(one.writes for one in told) == 4 and sum(one.queued_writes for one in told) == 28 - 8
    for member in bench.cache._group:
        assert (member.host.own.holders(member.host.find(member.host.named())) == 2).all(), "nobody's to evict"
        assert member.host.evict(8) == 0
    store.go.set()
    outbound: Any = bench.cache._storage.outbound  # type: ignore[union-attr]
    wait_for([writing.work for writing in outbound._writing])
    bench.cache.poll()
    bench.cache.drain()
    assert sum(store.sizes) == 32 and store.sizes[:3] == [2, 2, 4], "two texts of one pool share a call"
    assert max(store.sizes) == 4
    assert counters(bench).written_pages == 24 and not storage.pending and not bench.cache.pending
    bench.check_books()
    assert all(member.host.evict(8) == 8 for member in bench.cache._group)
    again = make(ALL, pages=20, host_pages=40)
    for name in (1, 2, 3, 4):
        again.cache.prefetch(text(name, 9))
        again.cache.drain()
        assert again.serve(text(name, 9)) == (0, 8)


def test_a_node_that_has_left_is_not_written(make: Make, text: Text) -> None:
    bench = make(["draft"])
    bench.serve(text(1, 9))
    bench.cache.drain()
    gone = bench.index.match(text(1, 8)).nodes
    bench.cache.evict(8)
    bench.host.allocator.release(bench.index.evict_host(1).pages)
    member, storage = bench.cache._group.member("draft"), bench.cache.companion_storage
    assert storage is not None
    storage.back_up(member, gone, member.host.find(member.host.named())[[0, 0]])
    bench.cache.drain()
    assert counters(bench).written_pages == 2 + 1
    bench.check_books()


def test_pages_that_ranks_share_are_written_once(make: Make, text: Text) -> None:
    written = 0
    for rank in range(3):
        bench = make(["draft"], tier={"share": (rank, 3)})
        bench.serve(text(1, 26))
        bench.cache.drain()
        written += counters(bench).written_pages
    assert written == 6
    again = make(["draft"])
    again.cache.prefetch(text(1, 26))
    again.cache.drain()
    assert again.serve(text(1, 26)) == (0, 24)


def test_keys_name_the_companion_and_the_pool_that_it_accompanies(make: Make, tmp_path: Path) -> None:
    digests = set()
    store = FileStorage(tmp_path / "others", capacity_bytes=10**6)
    for salt in ("", "x"):
        for pages in (8, 9):
            bench = make(["window"], tier={"salt": salt}, pages=pages)
            lead, own = PageAllocator(9, 4), window_pool(8, "cpu")
            for name in ("window", "other"):
                companion = Companion.every_page(name, PageMap(lead, PageAllocator(9, 4)), HostPool(own, pages=4))
                digests.add(companion_digest(bench.cache._storage, companion))  # type: ignore[arg-type]
    assert len(digests) == 4, "the size of a pool is no part of its identity"
    bench = GroupBench(["window"], host_layout="page_first_direct")
    layered = HostPool(bench.hybrid.window, pages=4, layout="layer_first")
    bench.options["companions"] = []
    companion = Companion.last_pages("w", bench.hybrid.pages, layered, window=4)
    with pytest.raises(HostPoolError, match="page_first_direct"):
        type(bench.cache)(
            bench.pool, bench.allocator, bench.host, bench.index,
            storage=StorageTier(bench.host, bench.index, store), companions=[companion],
        )  # fmt: skip


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from kv_pool.hicache import FileStorage
from test_pool_storage_companions import ALL, over
bench = over(FileStorage(sys.argv[1], capacity_bytes=10**8), ALL)
for name in (1, 2):
    bench.serve([name * 1000 + number for number in range(26)])
bench.cache.drain()
print("written")
"""


def test_another_process_reads_what_one_has_written(tmp_path: Path) -> None:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path / "pages"), str(here)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.stdout == "written\n", done.stderr[-2000:]
    bench = over(FileStorage(tmp_path / "pages", capacity_bytes=10**8), ALL, pages=16)
    for name in (2, 1, 3):
        prompt = [name * 1000 + number for number in range(26)]
        bench.cache.prefetch(prompt)
        bench.cache.drain()
        assert bench.serve(prompt) == (0, 24 if name < 3 else 0)
    bench.check_books()
    assert np.sum(bench.cache.counters.companion_loaded_pages) == 2 * (2 + 6 + 1)
