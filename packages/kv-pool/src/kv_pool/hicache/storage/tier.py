"""Owns what travels between the host pool and a store: backups of host pages, and prefetches before a prompt is served.

Threads read and write bytes; index and allocators are touched by the owner's calls alone (`back_up`, `prefetch`,
`poll`). A page is locked in the index while it is written, and nobody's while it is read. It does not decide which
pages get a host copy (see `controller`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kv_pool.errors import HostPoolError, StorageDamaged, StorageError
from kv_pool.hicache.ranks import owner_rank
from kv_pool.hicache.storage._work import Inline, Prefetch, Read, StorageCounters, Write, Writing
from kv_pool.hicache.storage.identity import StorageIdentity, page_keys
from kv_pool.hicache.storage.protocols import PageStorage, RegistersMemory, Removes, leading_pages
from kv_pool.tables import IndexLike, IntArray, as_index_array, whole_number

if TYPE_CHECKING:
    from kv_planner import PrefixIndex

    from kv_pool.hicache.acquired import Namespace
    from kv_pool.hicache.canary import Canary
    from kv_pool.hicache.host_pool import HostPool
    from kv_pool.hicache.storage.protocols import Pieces

__all__ = ["StorageTier", "take_host_pages"]

_MOST_FORGOTTEN = 65536  # keys; the oldest is asked for again when there are more


class StorageTier:
    """The third level of one cache.

    Args:
        host: The host pool; its layout must be `page_first_direct`, where a page is one piece a component.
        index: The index of the cache.
        storage: The store.
        threshold: Fewer missing tokens than this are not asked for.
        batch: Pages of one call to the store; what waits to be written is merged up to this number.
        write_limit: Pages that the store writes at a time, at least `batch`. The rest waits, under its locks.
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
        numbers = (("threshold", threshold, 1), ("batch", batch, 1), ("write_limit", write_limit, batch))
        for name, value, least in (*numbers, ("threads", threads, 0)):
            consequence = "nothing would be read or written"
            whole_number(name, value, least=least, error=HostPoolError, consequence=consequence)
        rules: list[tuple[str, object, object]] = [
            ("host.layout", host.layout, "page_first_direct"),
            ("share", share[0] in range(share[1]) or share, True),
        ]
        for argument, given, expected in rules:
            if given != expected:
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
        self._write_limit = write_limit
        self._rank, self._ranks = share
        self._digest = StorageIdentity.of(host, salt=salt, canary=canary is not None).digest
        self._threads: Executor = ThreadPoolExecutor(threads, "kv-pool-storage") if threads else Inline()
        self._bytes = [mirror.host.flatten(1).view(torch.uint8).numpy() for mirror in host.mirrors]
        self._canary = canary
        if canary is not None:
            self._bytes.append(canary.rows)
        if isinstance(storage, RegistersMemory):
            storage.register([rows.reshape(-1) for rows in self._bytes])
        self._queue: deque[Write] = deque()
        self._writes: deque[Writing] = deque()
        self._reads: list[Prefetch] = []
        self._removals: deque[tuple[str, Future[None]]] = deque()
        self._forgotten: OrderedDict[str, None] = OrderedDict()
        self._counters = StorageCounters()

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
        return self._counters

    @property
    def pending(self) -> bool:
        """Whether anything waits or is under way."""
        return bool(self._queue or self._writes or self._reads or self._removals)

    @property
    def under_way(self) -> dict[str, int]:
        """Host pages that wait or travel at this moment, by the names of `UnderWay`."""
        return {
            "queued_writes": sum(len(write.keys) for write in self._queue),
            "writes": sum(write.pages for write in self._writes),
            "reads": self.held_host_pages,
        }

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
                lock = self._index.lock(found.nodes[chosen])
                self._queue.append(Write([keys[place] for place in chosen], found.host_pages[chosen], lock))
            left = left[~np.isin(left, [*found.nodes[here].tolist(), int(left[-1])])]
        self._submit_writes()

    def forget(self, tokens: IndexLike, namespace: Namespace = None) -> None:
        """Remove the last page of a text from the store, because it is not what was written; does not wait.

        Where the store cannot remove it, it is not asked for any more, as long as this process lives.

        Args:
            tokens: The text up to the end of that page. Shape: [tokens].
            namespace: As for `HiCacheController.acquire`.
        """
        self._counters = replace(self._counters, damaged_pages=self._counters.damaged_pages + 1)
        self._remove(page_keys(self._digest, tokens, self._host.page_size, namespace)[-1])

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
        keys = page_keys(self._digest, text, self._host.page_size, namespace)
        try:
            pages = take_host_pages(self._host, self._index, wanted.size)[0]
        except BaseException:
            self._index.unlock(lock)
            raise
        prefetch._wanted, prefetch._host_pages, prefetch._lock = wanted[: pages.size], pages, lock
        asked = [keys[place] for place in prefetch._wanted.tolist()]
        prefetch._work = self._threads.submit(self._read, prefetch, asked, pages)
        self._reads.append(prefetch)
        return prefetch

    def _askable(self, text: IntArray, namespace: Namespace) -> int:
        """Whole pages of a text, up to the first one that the store is not asked for any more."""
        whole = text.size // self._host.page_size
        if not self._forgotten:
            return whole
        keys = page_keys(self._digest, text, self._host.page_size, namespace)
        return next((place for place, key in enumerate(keys) if key in self._forgotten), whole)

    def poll(self) -> None:
        """Take over what has ended, and submit what waits for that; never blocks."""
        while self._removals and self._removals[0][1].done():
            self._count_removal(*self._removals.popleft())
        while self._writes and self._writes[0].work.done():
            write = self._writes.popleft()
            for lock in write.locks:
                self._index.unlock(lock)
            self._count_write(write)
        self._submit_writes()
        for prefetch in [prefetch for prefetch in self._reads if prefetch._work is not None and prefetch._work.done()]:
            self._reads.remove(prefetch)
            self._take_over(prefetch)

    def drain(self, *, reads: bool = True) -> None:
        """Wait for everything that waits or is under way (for writes alone without `reads`), and take it over."""
        if reads:
            wait_for([prefetch._work for prefetch in self._reads if prefetch._work is not None])
            self.poll()
        while self._queue or self._writes or self._removals:
            wait_for([write.work for write in self._writes])
            wait_for([work for _, work in self._removals])
            self.poll()

    def _pieces(self, page: int) -> Pieces:
        return [rows[page] for rows in self._bytes]

    def _submit_writes(self) -> None:
        """Give the store as much of what waits as the limit allows, whole batches of several texts."""
        room = self._write_limit - sum(write.pages for write in self._writes)
        leaving = {key for key, _ in self._removals}  # what is written again must not be removed after that
        while self._queue and len(self._queue[0].keys) <= room and leaving.isdisjoint(self._queue[0].keys):
            merged = [self._queue.popleft()]
            count = len(merged[0].keys)
            while self._queue and count + len(self._queue[0].keys) <= min(room, self._batch):
                if not leaving.isdisjoint(self._queue[0].keys):
                    break
                merged.append(self._queue.popleft())
                count += len(merged[-1].keys)
            keys = [key for write in merged for key in write.keys]
            pages = [self._pieces(page) for write in merged for page in write.host_pages.tolist()]
            work = self._threads.submit(self._storage.write, keys, pages)
            self._writes.append(Writing([write.lock for write in merged], count, work))
            room -= count

    def _remove(self, key: str) -> None:
        """A page that was refused is not found again."""
        if isinstance(self._storage, Removes):
            self._removals.append((key, self._threads.submit(self._storage.remove, [key])))
        else:
            self._ignore(key)

    def _ignore(self, key: str) -> None:
        self._forgotten[key] = None
        self._counters = replace(self._counters, forgotten_pages=self._counters.forgotten_pages + 1)
        if len(self._forgotten) > _MOST_FORGOTTEN:
            self._forgotten.popitem(last=False)

    def _count_removal(self, key: str, work: Future[None]) -> None:
        try:
            work.result()
        except StorageError:
            self._counters = replace(self._counters, failures=self._counters.failures + 1)
            self._ignore(key)

    def _read(self, prefetch: Prefetch, keys: Sequence[str], host_pages: IntArray) -> Read:
        done = 0
        while done < len(keys) and not prefetch._stop.is_set():
            batch = slice(done, done + self._batch)
            pages = [self._pieces(page) for page in host_pages[batch].tolist()]
            try:
                got = leading_pages("read", self._storage.read(keys[batch], pages), len(pages))
            except StorageDamaged as error:
                return Read(done + error.pages_read, damaged=keys[done + error.pages_read])
            except StorageError:
                return Read(done, failed=1)
            done += got
            if got < len(pages):
                break
        return Read(done)

    def _count_write(self, write: Writing) -> None:
        try:
            kept = leading_pages("write", write.work.result(), write.pages)
            failed = 0
        except StorageError:
            kept, failed = 0, 1
        counters = self._counters
        self._counters = replace(
            counters,
            written_pages=counters.written_pages + kept,
            unwritten_pages=counters.unwritten_pages + write.pages - kept,
            failures=counters.failures + failed,
        )

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
            if read.damaged is not None:
                self._remove(read.damaged)
            prefetch.state = "cancelled" if prefetch._stop.is_set() else "done"
            counters = self._counters
            self._counters = replace(
                counters,
                read_pages=counters.read_pages + read.pages,
                wasted_pages=counters.wasted_pages + read.pages - int(taken.size),
                damaged_pages=counters.damaged_pages + int(read.damaged is not None),
                failures=counters.failures + read.failed,
            )


def take_host_pages(host: HostPool, index: PrefixIndex, count: int) -> tuple[IntArray, int]:
    """Take up to `count` host pages, letting the least recently used ones leave; returns them and how many left."""
    room = host.allocator
    gone = 0
    if count > room.available:
        left = index.evict_host(count - room.available).pages
        room.release(left)
        gone = int(left.size)
    return room.alloc(min(count, room.available)), gone
