"""Owns the proof that pages come back from the third level as they were, and that keys carry their whole identity.

Long because the caches here are restarted over one folder by one fixture, and the stores that wait, fail or keep what
they should not are built on one another.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_planner import ComponentSpec, ModelLayout, Placement
from kv_pool import CacheError, HostPoolError, MhaPool, MlaPool, StorageError
from kv_pool.hicache import (
    FileStorage,
    HostPool,
    ImmediateStreams,
    Lane,
    Mark,
    StorageIdentity,
    StorageTier,
    owner_rank,
    page_keys,
)
from kv_pool.hicache.storage.identity import ComponentIdentity

Text = Callable[[int, int], list[int]]


@pytest.fixture
def make(make_cache: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """A cache over a folder that outlives it; each call is a restart."""

    def build(storage: Any = None, tier: Any = None, **options: Any) -> Any:
        bench = make_cache(**options)
        store = storage or FileStorage(tmp_path / "pages", capacity_bytes=10**8)
        bench.tier = StorageTier(bench.host, bench.index, store, **{"threshold": 4, "batch": 2, **(tier or {})})
        bench.attach(bench.tier)
        return bench

    return build


def test_a_restarted_cache_finds_its_pages_in_the_store(make: Callable[..., Any], text: Text) -> None:
    bench = make()
    bench.serve(text(1, 26))
    bench.serve(text(2, 18), "other")
    bench.cache.drain()
    assert bench.tier.counters.written_pages == 6 + 4 and not bench.tier.pending
    again = make()
    for name, length, namespace, pages in ((1, 26, None, 6), (2, 18, "other", 4), (2, 18, None, 0), (3, 9, None, 0)):
        prefetch = again.cache.prefetch(text(name, length), namespace)
        assert prefetch.state == "reading" and again.tier.held_host_pages > 0
        again.cache.drain()
        assert (prefetch.state, prefetch.pages) == ("done", pages)
        assert again.tier.held_host_pages == 0
        again.check_books()
        assert again.serve(text(name, length), namespace) == (0, 4 * pages)  # checks every byte of the hit
    assert again.tier.counters.read_pages == 10 and again.tier.counters.wasted_pages == 0


def test_what_is_known_already_is_not_read_again(make: Callable[..., Any], text: Text) -> None:
    bench = make()
    bench.serve(text(1, 26))
    bench.cache.drain()
    again = make()
    again.serve(text(1, 9))
    again.cache.drain()
    assert again.tier.counters.written_pages == 2
    prefetch = again.cache.prefetch(text(1, 26))
    again.cache.drain()
    assert prefetch.pages == 4 and again.tier.counters.read_pages == 4
    assert again.serve(text(1, 26)) == (8, 16)
    assert again.cache.prefetch(text(1, 27)).state == "below_threshold"


def test_device_pages_without_a_host_copy_are_no_hole(make: Callable[..., Any], text: Text) -> None:
    bench = make()
    bench.serve(text(1, 26))
    bench.cache.drain()
    again = make(policy="write_back")
    again.serve(text(1, 9))
    prefetch = again.cache.prefetch(text(1, 26))
    again.cache.drain()
    assert prefetch.pages == 6
    again.check_books()
    assert again.serve(text(1, 26)) == (8, 16)


class Slow:
    """A store whose calls wait until they are let go, and that fails when asked to."""

    name = "slow"

    def __init__(self, inner: FileStorage) -> None:
        self.inner = inner
        self.go = threading.Event()
        self.calls: list[int] = []
        self.broken = False

    def exists(self, keys: Sequence[str]) -> int:
        return self.inner.exists(keys)

    def read(self, keys: Sequence[str], pages: Sequence[Any]) -> int:
        self.calls.append(len(keys))
        self.go.wait(60)
        self._check()
        return self.inner.read(keys, pages)

    def write(self, keys: Sequence[str], pages: Sequence[Any]) -> int:
        self.go.wait(60)
        self._check()
        return self.inner.write(keys, pages)

    def _check(self) -> None:
        if self.broken:
            raise StorageError("disk", given="gone", expected="there", consequence="no page", remedy="mount it")


def test_pages_stay_while_they_are_written_and_a_cancelled_read_gives_its_pages_back(
    make: Callable[..., Any], text: Text, tmp_path: Path
) -> None:
    slow = Slow(FileStorage(tmp_path / "pages", capacity_bytes=10**8))
    bench = make(slow, tier={"threads": 1}, pages=8, host_pages=8)
    bench.serve(text(1, 25))
    bench.cache._copies.drain()
    assert bench.tier.pending and bench.index.counts().host.protected == 6
    assert (
        bench.index.evict_device(8).pages.size == 0 == bench.index.evict_host(8).pages.size
    )  # locked until the store has them
    slow.go.set()
    bench.cache.drain()
    assert bench.index.counts().host.protected == 0 and bench.tier.counters.written_pages == 6

    slow.go.clear()
    again = make(slow, tier={"threads": 1})
    prefetch = again.cache.prefetch(text(1, 25))
    again.cache.poll()
    assert prefetch.state == "reading" and again.host.allocator.held == 6
    prefetch.cancel()
    slow.go.set()
    again.cache.drain()
    assert prefetch.state == "cancelled" and prefetch.pages == again.host.allocator.held <= 2
    again.check_books()
    assert again.serve(text(1, 25)) == (0, 4 * prefetch.pages)


def test_a_store_that_fails_costs_hits_and_nothing_else(make: Callable[..., Any], text: Text, tmp_path: Path) -> None:
    slow = Slow(FileStorage(tmp_path / "pages", capacity_bytes=10**8))
    slow.go.set()
    bench = make(slow)
    bench.serve(text(1, 25))
    bench.cache.drain()
    slow.broken = True
    bench.serve(text(2, 25))
    bench.cache.drain()
    assert (bench.tier.counters.unwritten_pages, bench.index.counts().locks) == (6, 0)
    again = make(slow)
    prefetch = again.cache.prefetch(text(1, 25))
    again.cache.drain()
    assert (prefetch.state, prefetch.pages, again.host.allocator.held) == ("done", 0, 0)
    assert again.tier.counters.failures == 1 and again.serve(text(1, 25)) == (0, 0)


def test_a_damaged_page_ends_the_hit(make: Callable[..., Any], text: Text, tmp_path: Path) -> None:
    bench = make()
    bench.serve(text(1, 26))
    bench.cache.drain()
    key = page_keys(StorageIdentity.of(bench.host).digest, text(1, 26), 4)[3]
    path = tmp_path / "pages" / key[:2] / key
    path.write_bytes(path.read_bytes()[:-1] + b"\x00\x01")
    again = make()
    prefetch = again.cache.prefetch(text(1, 26))
    again.cache.drain()
    assert prefetch.pages == 3 and again.tier.counters.damaged_pages == 1 and not path.exists()
    assert again.serve(text(1, 26)) == (0, 12)


def test_a_page_with_a_draft_is_never_read_as_one_without(make_layout: Callable[..., ModelLayout]) -> None:
    plain, packed = (HostPool(MhaPool(make_layout(draft=d), size=8, device="cpu"), pages=2) for d in ((), (9,)))
    apart = HostPool(
        MhaPool(make_layout(draft=(9,)), size=8, device="cpu", layer_ids={"target": [0, 1], "draft": []}), pages=2
    )
    keys = [page_keys(StorageIdentity.of(host).digest, [0, 1, 2, 3], 4)[0] for host in (plain, packed, apart)]
    assert keys[0] != keys[1] and keys[1] != keys[2]
    assert keys[0] == keys[2]  # target pages alone: the same bytes, whether a draft lies elsewhere or not


def test_each_field_changes_every_key() -> None:
    part = ComponentIdentity("key", "target", (0, 1), "float16", 4, 2, 8, (0, 2), 4)
    base = StorageIdentity(1, 1, "model", 4, "page_first_direct", (part,), (0, 2), 2, (0, 1), "")
    other: dict[str, Any] = {
        "component": "value", "part": "draft", "layer_ids": (0, 2), "dtype": "bfloat16", "tokens": 8, "heads": 1,
        "dims": 4, "head_range": (2, 4), "total_heads": 2, "schema_version": 2, "format_version": 2,
        "fingerprint": "other", "page_size": 8, "host_layout": "page_first", "components": (part, part), "pp": (1, 2),
        "tp_size": None, "dcp": (1, 2), "salt": "x", "canary": True,
    }  # fmt: skip
    changed = [replace(base, **{field.name: other[field.name]}) for field in fields(base)]
    inner = [replace(base, components=(replace(part, **{field.name: other[field.name]}),)) for field in fields(part)]
    digests = {identity.digest for identity in (base, *changed, *inner)}
    assert len(digests) == 1 + len(fields(base)) + len(fields(part))
    texts: list[tuple[list[int], Any]] = [
        ([1, 2, 3, 4], None), ([1, 2, 3, 5], None), ([1, 2, 3, 4], ""), ([1, 2, 3, 4], "a"),
        ([1, 2, 3, 4], (None, "a")), ([1, 2, 3, 4], ("", None)), ([1, 2, 3, 4], ("", "")),
    ]  # fmt: skip
    keys = {page_keys(digest, tokens, 4, namespace)[0] for digest in digests for tokens, namespace in texts}
    assert len(keys) >= len(digests) * (len(texts) - 1)  # a plain "" and ("", None) may name one namespace
    chain = page_keys(base.digest, [9, 9, 9, 9, 1, 2, 3, 4], 4)
    assert chain[1] != page_keys(base.digest, [1, 2, 3, 4], 4)[0]


PROGRAM = """
from kv_pool.hicache import page_keys
print(page_keys(bytes(range(32)), [5, 6, 7, 8], 2, ("adapter", None)))
"""


def test_ranks_that_hold_other_bytes_have_keys_of_their_own(make_layout: Callable[..., ModelLayout]) -> None:
    places: list[dict[str, Any]] = [{}, {"tp_size": 4}]
    places += [{f"{kind}_rank": rank, f"{kind}_size": 2} for kind in ("tp", "pp", "dcp") for rank in (0, 1)]
    pools = [MhaPool(make_layout(), size=16, device="cpu", placement=Placement(**place)) for place in places]
    hosts = [HostPool(pool, pages=1) for pool in pools]
    digests = {StorageIdentity.of(host).digest for host in hosts}
    digests |= {StorageIdentity.of(hosts[0], **more).digest for more in ({"canary": True}, {"salt": "x"})}
    assert len(digests) == len(places) + 2


def test_keys_are_equal_in_every_process() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(page_keys(bytes(range(32)), [5, 6, 7, 8], 2, ("adapter", None)))


def test_replicated_pages_have_one_key_and_one_writer() -> None:
    def host(rank: int, heads: int) -> HostPool:
        names: Any = ("latent", "rope") if heads == 1 else ("key", "value")
        specs = [ComponentSpec(name, layer_ids=[0], dtype="float16", total_heads=heads, dims=16) for name in names]
        kind = MlaPool if heads == 1 else MhaPool
        layout = ModelLayout(specs, page_size=4, fingerprint="m")
        return HostPool(kind(layout, size=8, device="cpu", placement=Placement(tp_rank=rank, tp_size=8)), pages=2)

    latent = {StorageIdentity.of(host(rank, 1)).digest for rank in range(8)}
    split = {StorageIdentity.of(host(rank, 8)).digest for rank in range(8)}
    shared = {StorageIdentity.of(host(rank, 4)).digest for rank in range(8)}
    assert (len(latent), len(split), len(shared)) == (1, 8, 4)
    keys = page_keys(latent.pop(), np.arange(4000), 4)
    owners = [owner_rank(key, 8) for key in keys]
    assert set(owners) == set(range(8)) and max(owners.count(rank) for rank in range(8)) < 200


def test_ranks_that_share_pages_write_each_once(make: Callable[..., Any], text: Text, tmp_path: Path) -> None:
    for rank in range(3):
        bench = make(tier={"share": (rank, 3)})
        bench.serve(text(1, 30))
        bench.cache.drain()
        keys = page_keys(StorageIdentity.of(bench.host).digest, text(1, 30), 4)
        assert bench.tier.counters.written_pages == [owner_rank(key, 3) for key in keys].count(rank)
    assert len(list((tmp_path / "pages").glob("??/*"))) == 7


def test_parts_that_do_not_belong_together(make: Callable[..., Any], make_cache: Callable[..., Any]) -> None:
    with pytest.raises(HostPoolError, match="page_first_direct"):
        make(host_layout="page_first")
    for wrong in ({"threshold": 0}, {"batch": 0}, {"threads": -1}, {"share": (1, 1)}):
        with pytest.raises(HostPoolError):
            make(tier=wrong)
    bench, other = make(), make_cache()
    with pytest.raises(HostPoolError, match=r"storage\.host"):
        other.attach(bench.tier)
    with pytest.raises(CacheError, match="two levels"):
        other.cache.prefetch([1, 2, 3])


class Unended(ImmediateStreams):
    """Lanes whose copies end when they are waited for, not before."""

    def mark(self, lane: Lane) -> Mark:
        return Waiting()


class Waiting:
    def reached(self) -> bool:
        return False

    def wait_on_host(self) -> None:
        return


def test_a_prefetch_that_overtakes_a_backup_leaves_one_copy(make: Callable[..., Any], text: Text) -> None:
    bench = make()
    bench.serve(text(1, 9))
    bench.cache.drain()
    again = make(streams=Unended())
    again.serve(text(1, 9))  # its backup is under way
    prefetch = again.cache.prefetch(text(1, 26))
    again.tier.drain()
    assert prefetch.pages == 2 and again.host.allocator.held == 4
    again.cache.drain()
    assert again.host.allocator.held == again.index.counts().host.held == 2
    again.check_books()
    again.cache.evict(8)
    assert again.serve(text(1, 9)) == (0, 8)


class Counting(Slow):
    """A store that notes the size of each write, and cannot remove."""

    def __init__(self, inner: FileStorage) -> None:
        super().__init__(inner)
        self.written: list[int] = []

    def write(self, keys: Sequence[str], pages: Sequence[Any]) -> int:
        self.written.append(len(keys))
        return super().write(keys, pages)


def test_writes_wait_within_a_limit_and_go_together(make: Callable[..., Any], text: Text, tmp_path: Path) -> None:
    store = Counting(FileStorage(tmp_path / "pages", capacity_bytes=10**8))
    bench = make(store, tier={"threads": 2, "batch": 4, "write_limit": 6}, pages=20, host_pages=40)
    lengths = {1: 9, 2: 9, 3: 9, 4: 9, 5: 29}
    for name, length in lengths.items():
        bench.serve(text(name, length))
        bench.cache._copies.drain()
        under_way = bench.cache.under_way
        assert under_way.writes <= 6 and under_way.writes + under_way.queued_writes == bench.index.counts().host.held
    assert bench.cache.under_way.writes == 6 and bench.cache.under_way.queued_writes == 9
    assert bench.index.counts().host.protected == 15  # what waits is nobody's to evict
    store.go.set()
    bench.cache.drain()
    assert sum(store.written) == 15
    assert max(store.written) <= 4 and len(store.written) < 7  # 2, 2, 2 at once; then merged where two fit in a batch
    counters = bench.tier.counters
    assert (counters.written_pages, counters.unwritten_pages) == (15, 0) and not bench.cache.pending
    again = make(pages=20, host_pages=40)
    for name, length in lengths.items():
        again.cache.prefetch(text(name, length))
        again.cache.drain()
        assert again.serve(text(name, length)) == (0, length - 1)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_slow_store_never_stops_the_cache(make: Callable[..., Any], text: Text, tmp_path: Path, policy: Any) -> None:
    """One page at a time, and pools that are far too small: everything is written or counted, and it ends."""
    store = Counting(FileStorage(tmp_path / "pages", capacity_bytes=10**8))
    store.go.set()
    bench = make(store, tier={"threads": 1, "batch": 1, "write_limit": 1}, pages=6, host_pages=5, policy=policy)
    for name in (*range(5), *range(5), *range(5)):
        bench.serve(text(name, 21))
        bench.check_books()
    bench.cache.evict(6)
    bench.cache.drain()
    counters, stored = bench.cache.counters, bench.tier.counters
    assert stored.unwritten_pages == stored.failures == 0 < stored.written_pages
    assert stored.written_pages == sum(store.written) == counters.backed_up_pages
    assert bench.index.counts().locks == 0 and not any(store.written.count(size) for size in range(2, 9))


def spoiled(bench: Any, name: int, place: int, text: Text, folder: Path) -> Path:
    """The file of a page, of which a byte was changed."""
    key = page_keys(StorageIdentity.of(bench.host).digest, text(name, 26), 4)[place]
    path = folder / "pages" / key[:2] / key
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return path


class Keeping(Counting):
    """A store that cannot remove, not even by itself."""

    def read(self, keys: Sequence[str], pages: Sequence[Any]) -> int:
        names = [self.inner.root / key[:2] / key for key in keys]
        content = {path: path.read_bytes() for path in names if path.exists()}
        try:
            return super().read(keys, pages)
        finally:
            for path, held in content.items():
                path.write_bytes(held)


def test_a_damaged_page_is_not_asked_for_again_and_again(make: Callable[..., Any], text: Text, tmp_path: Path) -> None:
    bench = make()
    bench.serve(text(1, 26))
    bench.cache.drain()
    path = spoiled(bench, 1, 3, text, tmp_path)
    store = Keeping(FileStorage(tmp_path / "pages", capacity_bytes=10**8))
    store.go.set()
    again = make(store)
    prefetch = again.cache.prefetch(text(1, 26))
    again.cache.drain()
    counters = again.tier.counters
    assert (prefetch.pages, counters.damaged_pages, counters.forgotten_pages) == (3, 1, 1) and path.exists()
    calls = len(store.calls)
    assert again.cache.prefetch(text(1, 26)).state == "below_threshold"  # nothing before the page is missing
    assert again.serve(text(1, 26)) == (0, 12) and len(store.calls) == calls
    other = make()  # a store that can remove
    other.cache.prefetch(text(1, 26))
    other.cache.drain()
    assert (other.tier.counters.damaged_pages, other.tier.counters.forgotten_pages) == (1, 0) and not path.exists()
    other.serve(text(1, 26))
    other.cache.drain()
    assert path.exists()  # computed again, and kept again
    last = make()
    assert last.cache.prefetch(text(1, 26)).state == "reading"
    last.cache.drain()
    assert last.serve(text(1, 26)) == (0, 24)


def test_a_page_that_cannot_be_removed_is_forgotten(
    make: Callable[..., Any], text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    bench.serve(text(1, 26))
    bench.cache.drain()
    path = spoiled(bench, 1, 0, text, tmp_path)

    def denied(path: Path) -> None:
        raise PermissionError(13, "denied")

    monkeypatch.setattr(Path, "unlink", denied)
    again = make()
    again.cache.prefetch(text(1, 26))
    again.cache.drain()
    counters = again.tier.counters
    assert (counters.damaged_pages, counters.forgotten_pages, counters.failures) == (1, 1, 1) and path.exists()
    assert again.cache.prefetch(text(1, 26)).state == "below_threshold"
