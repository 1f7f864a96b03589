"""Owns what travels between the host pool and a store: backups of host pages, and prefetches before a prompt is served.

Threads read and write bytes; index and allocators are touched by the owner's calls alone (`back_up`, `prefetch`,
`poll`). A page is locked in the index while it is written, and nobody's while it is read. It does not decide which
pages get a host copy (see `controller`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from kv_planner import PrefixIndex

from kv_pool._arguments import check_kind, check_numbers, check_optional
from kv_pool.errors import HostPoolError, StorageError, TableError
from kv_pool.hicache._inflight import UnderWay
from kv_pool.hicache.canary import Canary
from kv_pool.hicache.host_pool import HostPool
from kv_pool.hicache.ranks import owner_rank
from kv_pool.hicache.storage._calls import Read, ask, read_batches
from kv_pool.hicache.storage._outbound import Outbound, Write
from kv_pool.hicache.storage._work import Books, Inline, Prefetch, StorageCounters
from kv_pool.hicache.storage.identity import StorageIdentity, page_keys
from kv_pool.hicache.storage.protocols import PageStorage, RegistersMemory
from kv_pool.tables import INT64_MAX, IndexLike, IntArray, as_index_array, whole_number

if TYPE_CHECKING:
    from kv_pool.hicache.acquired import Namespace
    from kv_pool.hicache.storage.protocols import Pieces

__all__ = ["StorageTier", "take_host_pages"]

_MOST_THREADS = 1024


class StorageTier:
    """The third level of one cache.

    Args:
        host: The host pool; its layout must be `page_first_direct`, where a page is one piece a component.
        index: The index of the cache.
        storage: The store.
        threshold: Fewer missing tokens than this are not asked for.
        batch: Pages of one call to the store; what waits to be written is merged up to this number.
        write_limit: Pages that the store writes at a time, at least `batch`, companions' among them. The rest waits,
            under its locks.
        threads: Threads that read and write; 0 for none, then `back_up` and `prefetch` do the work themselves.
        share: This rank and the number of ranks that hold the same pages (replicated heads): each page is written by
            one of them, see `owner_rank`. (0, 1) for pages that no other rank holds.
        salt: Kept apart from other tiers with the same layout.
        canary: Checksums that travel with the pages: those of the cache, if it has any.

    Raises:
        HostPoolError: Another layout of the host, no rank of `share`, or numbers that are too low or no whole ones.
        StorageError: The store cannot use the host's memory.
    """

    def __init__(
        self,
        host: HostPool,
        index: PrefixIndex,
        storage: PageStorage,
        *,
        threshold: int = 256,
        batch: int = 128,
        write_limit: int = 1024,
        threads: int = 2,
        share: tuple[int, int] = (0, 1),
        salt: str = "",
        canary: Canary | None = None,
    ) -> None:
        check_kind("host", host, HostPool, HostPoolError)
        check_kind("index", index, PrefixIndex, HostPoolError)
        check_kind("storage", storage, PageStorage, HostPoolError)  # type: ignore[type-abstract]
        check_optional("canary", canary, Canary, HostPoolError)
        limits = {"threshold": (threshold, 1, INT64_MAX), "batch": (batch, 1, INT64_MAX)}
        for name, (value, least, most) in {**limits, "threads": (threads, 0, _MOST_THREADS)}.items():
            _number(name, value, least, most)
        _number("write_limit", write_limit, batch, INT64_MAX)
        pair = check_numbers("share", share, HostPoolError)
        rules: list[tuple[str, object, object, bool]] = [
            ("host.layout", host.layout, "page_first_direct", host.layout == "page_first_direct"),
            ("share", pair, "a rank and the number of ranks", len(pair) == 2 and pair[0] < pair[1]),
        ]
        for argument, given, expected, kept in rules:
            if not kept:
                raise HostPoolError(
                    argument,
                    given=given,
                    expected=expected,
                    consequence="pages could not be read into their place",
                    remedy="build the host pool with page_first_direct; share is this rank, from 0, of so many ranks",
                )
        self._host = host
        self._index = index
        self._storage = storage
        self._threshold = threshold
        self._batch = batch
        self._rank, self._ranks = pair
        self._digest = StorageIdentity.of(host, salt=salt, canary=canary is not None).digest
        self._threads: Executor = ThreadPoolExecutor(threads, "kv-pool-storage") if threads else Inline()
        self._bytes = [mirror.host.flatten(1).view(torch.uint8).numpy() for mirror in host.mirrors]
        self._canary = canary
        if canary is not None:
            self._bytes.append(canary.rows)
        if isinstance(storage, RegistersMemory):
            ask(storage, "register", [rows.reshape(-1) for rows in self._bytes])
        self._outbound = Outbound(storage, self._threads, batch, write_limit)
        self._reads: list[Prefetch] = []
        self._books = Books()

    @property
    def host(self) -> HostPool:
        """The host pool."""
        return self._host

    @property
    def index(self) -> PrefixIndex:
        """The index of the cache."""
        return self._index

    @property
    def store(self) -> PageStorage:
        """Where pages are kept."""
        return self._storage

    @property
    def digest(self) -> bytes:
        """Identity of its pages: see `StorageIdentity.digest`."""
        return self._digest

    @property
    def share(self) -> tuple[int, int]:
        """This rank and the number of ranks that hold the same pages."""
        return self._rank, self._ranks

    @property
    def batch(self) -> int:
        """Pages of one call to the store."""
        return self._batch

    @property
    def outbound(self) -> Outbound:
        """What goes to the store: its own pages and those of companions."""
        return self._outbound

    def submit(self, work: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Let the threads of the tier do some work with the store."""
        return self._threads.submit(work, *arguments)

    @property
    def canary(self) -> Canary | None:
        """Checksums that travel with the pages."""
        return self._canary

    @property
    def counters(self) -> StorageCounters:
        """What the tier has done so far."""
        return self._books.counters

    @property
    def failure(self) -> StorageError | None:
        """The last error with which the store has ended a call; the cache has gone on without what it asked for."""
        return self._books.failure

    @property
    def pending(self) -> bool:
        """Whether anything waits or is under way, companions' writes among it."""
        return bool(self._reads) or self._outbound.pending

    @property
    def under_way(self) -> UnderWay:
        """Host pages of the cache's own pool that wait or travel at this moment."""
        queued, writes = self._outbound.pages(self._books)
        return UnderWay(queued_writes=queued, writes=writes, reads=self.held_host_pages)

    @property
    def held_host_pages(self) -> int:
        """Host pages that prefetches hold outside the index."""
        return sum(prefetch._host_pages.size for prefetch in self._reads)

    def back_up(self, nodes: IndexLike) -> None:
        """Start to write nodes whose host copies are complete; does not wait.

        Args:
            nodes: Ids of the index. Shape: [nodes]; each has a host page.
        """
        left = as_index_array("nodes", nodes)
        while left.size:
            tokens, namespace = self._index.path(int(left[-1]))
            found = self._index.match(tokens, namespace=namespace)
            here = np.isin(found.nodes, left) & (found.host_pages > 0)
            keys = page_keys(self._digest, tokens, self._host.page_size, namespace)
            mine = [owner_rank(key, self._ranks) == self._rank for key in keys]
            places = np.flatnonzero(here & mine[: here.size])
            for start in range(0, len(places), self._batch):
                chosen = places[start : start + self._batch]
                pages = [self._pieces(page) for page in found.host_pages[chosen].tolist()]
                let_go = partial(self._index.unlock, self._index.lock(found.nodes[chosen]))
                self._outbound.write(Write([keys[place] for place in chosen], pages, let_go, self._books))
            left = left[~np.isin(left, [*found.nodes[here].tolist(), int(left[-1])])]
        self._outbound.submit()

    def forget(self, tokens: IndexLike, namespace: Namespace = None) -> None:
        """Remove the last page of a text from the store, because it is not what was written; does not wait.

        Where the store cannot remove it, it is not asked for any more, as long as this process lives.

        Args:
            tokens: The text up to the end of that page. Shape: [tokens].
            namespace: As for `HiCacheController.acquire`.
        """
        keys = page_keys(self._digest, tokens, self._host.page_size, namespace)
        if not keys:
            raise TableError(
                "tokens",
                given=f"{len(tokens)} tokens",
                expected=f"a page of {self._host.page_size} tokens at least",
                consequence="there is no last page",
                remedy="pass the text up to the end of the page",
            )
        self._books.add(damaged_pages=1)
        self._outbound.remove(keys[-1], self._books)

    def prefetch(self, tokens: IndexLike, namespace: Namespace = None) -> Prefetch:
        """Start to bring what the store has of a text into the host; does not wait.

        Args:
            tokens: The prompt. Shape: [tokens].
            namespace: As for `HiCacheController.acquire`.

        Returns:
            The handle; after its end was seen by `poll`, `acquire` finds the pages on the host.
        """
        text = as_index_array("tokens", tokens).copy()
        whole = self._askable(text, namespace)
        found, lock = self._index.match_locked(text, namespace=namespace)
        on_host = np.zeros(whole, dtype=np.bool_)
        on_host[: len(found.host_pages)] = found.host_pages[:whole] > 0
        known = int(found.tokens) // self._host.page_size
        prefetch = Prefetch(text, namespace, "reading")
        wanted = np.flatnonzero(~on_host)
        if (whole - known) * self._host.page_size < self._threshold:
            self._index.unlock(lock)
            prefetch.state = "below_threshold"
            return prefetch
        pages = wanted[:0]
        try:
            keys = page_keys(self._digest, text, self._host.page_size, namespace)
            pages = take_host_pages(self._host, self._index, wanted.size)[0]
            prefetch._wanted, prefetch._host_pages, prefetch._lock = wanted[: pages.size], pages, lock
            asked = [keys[place] for place in prefetch._wanted.tolist()]
            prefetch._work = self._threads.submit(self._read, prefetch, asked, pages)
        except BaseException:
            self._host.allocator.release(pages)
            self._index.unlock(lock)
            raise
        self._reads.append(prefetch)
        return prefetch

    def _askable(self, text: IntArray, namespace: Namespace) -> int:
        """Whole pages of a text, up to the first one that the store is not asked for any more."""
        whole = text.size // self._host.page_size
        if not self._outbound.ignores_any:
            return whole
        keys = page_keys(self._digest, text, self._host.page_size, namespace)
        return next((place for place, key in enumerate(keys) if self._outbound.ignores(key)), whole)

    def poll(self) -> None:
        """Take over what has ended, and submit what waits for that; never blocks."""
        self._outbound.poll()
        for prefetch in [prefetch for prefetch in self._reads if prefetch._work is not None and prefetch._work.done()]:
            self._reads.remove(prefetch)
            self._take_over(prefetch)

    def drain(self, *, reads: bool = True) -> None:
        """Wait for everything that waits or is under way (for writes alone without `reads`), and take it over."""
        if check_kind("reads", reads, bool, TableError):
            wait_for([prefetch._work for prefetch in self._reads if prefetch._work is not None])
            self.poll()
        self._outbound.drain()

    def _pieces(self, page: int) -> Pieces:
        return [rows[page] for rows in self._bytes]

    def _read(self, prefetch: Prefetch, keys: Sequence[str], host_pages: IntArray) -> Read:
        pages = [self._pieces(page) for page in host_pages.tolist()]
        return read_batches(self._storage, keys, pages, self._batch, prefetch._stop.is_set)

    def _take_over(self, prefetch: Prefetch) -> None:
        """Put what was read into the index, as far as its prefix is on the host; free the rest."""
        assert prefetch._work is not None and prefetch._lock is not None
        mine = prefetch._host_pages
        prefetch._host_pages = mine[:0]
        taken = mine[:0]
        read = Read(0)
        try:
            read = prefetch._work.result()
            pages = np.full(prefetch._tokens.size // self._host.page_size, -1, dtype=np.int64)
            found = self._index.match(prefetch._tokens, namespace=prefetch._namespace)
            pages[prefetch._wanted[: read.pages]] = mine[: read.pages]
            there = np.flatnonzero(found.host_pages > 0)
            pages[there] = found.host_pages[there]
            length = int(np.argmin(np.append(pages, -1) > 0))
            if length:
                text = prefetch._tokens[: length * self._host.page_size]
                inserted = self._index.insert_host(text, pages[:length], namespace=prefetch._namespace)
                taken = pages[:length][inserted.taken]
        finally:
            self._index.unlock(prefetch._lock)
            self._host.allocator.release(np.setdiff1d(mine, taken))
            prefetch.pages = int(taken.size)
            prefetch.state = "cancelled" if prefetch._stop.is_set() else "done"
            self._books.add(
                read_pages=read.pages,
                wasted_pages=read.pages - prefetch.pages,
                damaged_pages=int(read.damaged is not None),
            )
            self._books.fail(read.failure)
            if read.damaged is not None:
                self._outbound.remove(read.damaged, self._books)


def _number(name: str, value: int, least: int, most: int) -> None:
    consequence = "nothing would be read or written"
    whole_number(name, value, least=least, most=most, error=HostPoolError, consequence=consequence)


def take_host_pages(host: HostPool, index: PrefixIndex, count: int) -> tuple[IntArray, int]:
    """Take up to `count` host pages, letting the least recently used ones leave; returns them and how many left."""
    room = host.allocator
    gone = 0
    if count > room.available:
        left = index.evict_host(count - room.available).pages
        room.release(left)
        gone = int(left.size)
    return room.alloc(min(count, room.available)), gone
