"""Owns what travels between the host pages of companions and a store: writes behind backups, reads behind a prefetch.

A companion's page has a key of its own, which names the companion, everything that decides what its bytes mean, the
pool that it belongs to, and the tokens. So a page of the cache's own pool is never taken for one with a companion: what
a companion lacks in the store shortens the hit. Threads read and write bytes; index and maps are touched by the owner's
calls alone. It does not read or write the pages of the cache's own pool (see `tier`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import torch
from kv_planner import StaleNode

from kv_pool._arguments import check_word
from kv_pool.errors import CacheError, HostPoolError, StorageError
from kv_pool.hicache._inflight import UnderWay
from kv_pool.hicache.ranks import owner_rank
from kv_pool.hicache.storage._calls import Read, ask, read_batches, stored_pages
from kv_pool.hicache.storage._outbound import Write
from kv_pool.hicache.storage._work import Books, StorageCounters
from kv_pool.hicache.storage.identity import StorageIdentity, page_keys
from kv_pool.hicache.storage.protocols import RegistersMemory

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy.typing as npt
    from kv_planner import PrefixLock

    from kv_pool.hicache._member import Member
    from kv_pool.hicache.acquired import Namespace
    from kv_pool.hicache.companion import Companion
    from kv_pool.hicache.storage._work import Prefetch, PrefetchState
    from kv_pool.hicache.storage.protocols import Pieces
    from kv_pool.hicache.storage.tier import StorageTier
    from kv_pool.tables import IntArray

__all__ = ["CompanionPrefetch", "CompanionStorage", "companion_digest"]


def companion_digest(tier: StorageTier, companion: Companion) -> bytes:
    """Return the identity of a companion's stored pages: its name, its pools, and the pool that it accompanies."""
    text = hashlib.sha256(b"kv-pool companion\0" + tier.digest)  # with a canary or without
    for host in companion.hosts:
        text.update(StorageIdentity.of(host).digest)
    text.update(companion.name.encode())
    return text.digest()


class CompanionPrefetch:
    """A prefetch of a cache with companions: the pages of its own pool first, then what companions have of them.

    Attributes:
        own: The prefetch of the cache's own pool.
        companion_pages: Pages and rows of companions that it has brought to the host.
    """

    def __init__(self, own: Prefetch) -> None:
        self.own = own
        self.companion_pages = 0
        self._ended = False
        self._lock: PrefixLock | None = None
        self._homes: IntArray = np.zeros(0, dtype=np.int64)  # host pages of the prefix, of the cache's own pool
        self._wanted: dict[str, _Wanted] = {}
        self._work: Future[dict[str, _Found]] | None = None

    @property
    def state(self) -> PrefetchState:
        """`reading` until the end of the last read was seen by `poll`."""
        return self.own.state if self._ended else "reading"

    @property
    def pages(self) -> int:
        """Pages of the cache's own pool that it has brought into the index."""
        return self.own.pages

    def cancel(self) -> None:
        """Stop after the batch that is under way; what was read whole until then is kept."""
        self.own.cancel()


@dataclass(frozen=True)
class _Wanted:
    """What a prefetch may read of one companion.

    Attributes:
        pages: Own host pages that were taken for it.
        missing: Whether each page of the prefix has no own page on the host.
        keys: Key of each page of the prefix.
        ignored: Whether each is not asked for any more.
    """

    pages: IntArray
    missing: list[bool]
    keys: list[str]
    ignored: list[bool]

    def lacking(self, places: range) -> list[int]:
        """Places that have nothing on the host."""
        return [place for place in places if self.missing[place]]

    def asked(self, lacking: list[int]) -> list[str]:
        """Keys of places, up to the first that is not asked for any more."""
        return [self.keys[place] for place in takewhile(lambda place: not self.ignored[place], lacking)]


@dataclass(frozen=True)
class _Found:
    """Places in the prefix that were asked for, and how reading them has ended."""

    places: list[int]
    read: Read


class CompanionStorage:
    """The third level of a cache's companions, in the store of its tier and with the threads of it.

    Args:
        tier: The tier of the cache.
        companions: The companions.

    Raises:
        HostPoolError: A host pool of another layout than `page_first_direct`.
    """

    def __init__(self, tier: StorageTier, companions: Sequence[Companion]) -> None:
        self._tier = tier
        self._index = tier.index
        self._digests = {companion.name: companion_digest(tier, companion) for companion in companions}
        self._bytes: dict[str, list[npt.NDArray[np.uint8]]] = {}
        for companion in companions:
            layouts = {host.layout for host in companion.hosts}
            if layouts != {"page_first_direct"}:
                raise HostPoolError(
                    f"host.layout of {companion.name}",
                    given=sorted(layouts),
                    expected="page_first_direct",
                    consequence="pages could not be read into their place",
                    remedy="build its host pools with page_first_direct",
                )
        self._members: Mapping[str, Member] = {}
        self._reads: list[CompanionPrefetch] = []
        self._books = {companion.name: Books() for companion in companions}

    def attach(self, members: Sequence[Member]) -> None:
        """Say which companions are at work.

        Raises:
            StorageError: The store cannot use their host memory.
        """
        for member in members:
            mirrors = [mirror for host in member.companion.hosts for mirror in host.mirrors]
            rows = [mirror.host.flatten(1).view(torch.uint8).numpy() for mirror in mirrors]
            self._bytes[member.companion.name] = [*rows, *(canary.rows for canary in member.canaries)]
            if isinstance(self._tier.store, RegistersMemory):
                pieces = [piece.reshape(-1) for piece in self._bytes[member.companion.name]]
                ask(self._tier.store, "register", pieces)
        self._members = {member.companion.name: member for member in members}

    @property
    def counters(self) -> StorageCounters:
        """What was done so far, for all companions."""
        return sum((books.counters for books in self._books.values()), StorageCounters())

    @property
    def failure(self) -> StorageError | None:
        """The last error of the store over pages of a companion, of the first that has met one."""
        return next((books.failure for books in self._books.values() if books.failure is not None), None)

    @property
    def pending(self) -> bool:
        """Whether anything is under way."""
        return bool(self._reads or any(any(self._tier.outbound.pages(books)) for books in self._books.values()))

    def counters_of(self, name: str) -> StorageCounters:
        """What was done so far, for one companion.

        Raises:
            CacheError: There is no such companion.
        """
        return self._of(name).counters

    def under_way(self, name: str) -> UnderWay:
        """Own host pages of a companion that wait or travel at this moment.

        Raises:
            CacheError: There is no such companion.
        """
        queued, writes = self._tier.outbound.pages(self._of(name))
        reads = [prefetch._wanted[name].pages.size for prefetch in self._reads if name in prefetch._wanted]
        return UnderWay(queued_writes=queued, writes=writes, reads=sum(reads))

    def back_up(self, member: Member, nodes: IntArray, host_pages: IntArray) -> None:
        """Start to write own host pages of nodes; does not wait.

        Args:
            member: The companion.
            nodes: Nodes of the index, parents first; those that have left are passed over. Shape: [pages].
            host_pages: Its host page of each, complete.
        """
        name, left = member.companion.name, np.arange(nodes.size)
        rank, ranks = self._tier.share
        while left.size:
            try:
                tokens, namespace = self._index.path(int(nodes[left[-1]]))
            except StaleNode:  # its host copy was refused meanwhile, and it had no other
                left = left[:-1]
                continue
            path = self._index.match(tokens, namespace=namespace).nodes
            depth = {node: place for place, node in enumerate(path.tolist())}
            keys = page_keys(self._digests[name], tokens, self._tier.host.page_size, namespace)
            here = [number for number in left.tolist() if int(nodes[number]) in depth]
            mine = [number for number in here if owner_rank(keys[depth[int(nodes[number])]], ranks) == rank]
            for start in range(0, len(mine), self._tier.batch):
                chosen = mine[start : start + self._tier.batch]
                pages = host_pages[chosen]
                pieces = [self._pieces(name, page) for page in pages.tolist()]
                member.host.own.retain(pages)
                let_go = partial(member.host.own.release, pages)
                chosen_keys = [keys[depth[int(nodes[number])]] for number in chosen]
                self._tier.outbound.write(Write(chosen_keys, pieces, let_go, self._books[name]))
            left = np.setdiff1d(left, here)
        self._tier.outbound.submit()

    def forget(self, name: str, tokens: IntArray, namespace: Namespace) -> None:
        """Remove a companion's page of the last page of a text from the store; see `StorageTier.forget`.

        Raises:
            CacheError: There is no such companion.
        """
        self._of(name).add(damaged_pages=1)
        key = page_keys(self._digests[name], tokens, self._tier.host.page_size, namespace)[-1]
        self._tier.outbound.remove(key, self._books[name])

    def prefetch(self, own: Prefetch) -> CompanionPrefetch:
        """Follow a prefetch of the cache's own pool: read what companions have of the pages that are there after it."""
        prefetch = CompanionPrefetch(own)
        self._reads.append(prefetch)
        if own.state != "reading":
            self._start(prefetch)
        return prefetch

    def poll(self) -> None:
        """Take over reads that have ended, and begin those that wait for the cache's own; never blocks."""
        for prefetch in list(self._reads):
            if prefetch.own.state != "reading" and prefetch._work is None:
                self._start(prefetch)
            if prefetch._work is not None and prefetch._work.done():
                self._reads.remove(prefetch)
                self._take_over(prefetch)

    def drain(self) -> None:
        """Wait for all reads, and take them over; the cache's own tier has been drained before."""
        self.poll()
        wait_for([prefetch._work for prefetch in self._reads if prefetch._work is not None])
        self.poll()

    def _start(self, prefetch: CompanionPrefetch) -> None:
        """Begin to read: the prefix on the host is known now, and stays while its lock is held."""
        own = prefetch.own
        found, prefetch._lock = self._index.match_locked(own.tokens, namespace=own.namespace)
        homes = prefetch._homes = found.host_pages[found.host_pages > 0]
        try:
            for name, member in self._members.items():
                text = own.tokens[: homes.size * self._tier.host.page_size]
                keys = page_keys(self._digests[name], text, self._tier.host.page_size, own.namespace)
                lacks = member.host.find(homes) == 0
                member.host.touch(homes[~lacks])  # what is there already is the last to leave for what is read
                trailing = member.companion.trailing
                most = int(lacks.sum()) if trailing is None else min(int(lacks.sum()), trailing)
                taken = member.take_host(most)
                ignored = [self._tier.outbound.ignores(key) for key in keys]
                prefetch._wanted[name] = _Wanted(taken, (member.host.find(homes) == 0).tolist(), keys, ignored)
            prefetch._work = self._tier.submit(self._read, prefetch)
        except BaseException:
            self._reads.remove(prefetch)
            self._end(prefetch)
            raise

    def _read(self, prefetch: CompanionPrefetch) -> dict[str, _Found]:
        found: dict[str, _Found] = {}
        depth = self._reachable(prefetch, found)
        for name, wanted in prefetch._wanted.items():
            lacking = wanted.lacking(self._range(name, depth))
            if lacking:
                keys = [wanted.keys[place] for place in lacking]
                pages = [self._pieces(name, page) for page in wanted.pages[: len(lacking)].tolist()]
                read = read_batches(self._tier.store, keys, pages, self._tier.batch, lambda: prefetch.own.cancelled)
                found[name] = _Found(lacking, read)
        return found

    def _reachable(self, prefetch: CompanionPrefetch, found: dict[str, _Found]) -> int:
        """The deepest hit for which every companion has what it needs on the host or in the store, and room for it.

        0 if the store does not say, which is told in `found`.
        """
        depth, known = prefetch._homes.size, -1
        while depth != known and depth:
            known = depth
            for name, wanted in prefetch._wanted.items():
                lacking = wanted.lacking(self._range(name, depth))
                asked = wanted.asked(lacking)
                try:
                    stored = stored_pages(self._tier.store, asked) if asked else 0
                except StorageError as error:
                    found[name] = _Found([], Read(0, failure=error))
                    return 0
                if stored < len(lacking):
                    depth = lacking[stored]
                elif len(lacking) > wanted.pages.size:
                    depth = lacking[wanted.pages.size]
        return depth

    def _range(self, name: str, depth: int) -> range:
        trailing = self._members[name].companion.trailing
        return range(0 if trailing is None else max(0, depth - trailing), depth)

    def _take_over(self, prefetch: CompanionPrefetch) -> None:
        """Name what was read by the host pages of the prefix; free the rest."""
        assert prefetch._work is not None
        damaged: list[tuple[str, str]] = []
        try:
            for name, found in prefetch._work.result().items():
                read = found.read
                host, pages = self._members[name].host, prefetch._wanted[name].pages[: read.pages]
                homes = prefetch._homes[found.places[: read.pages]]
                free = host.find(homes) == 0
                host.own.retain(pages[free])
                host.give(homes[free], pages[free])
                host.touch(homes[free])
                prefetch.companion_pages += int(free.sum())
                self._books[name].add(
                    read_pages=read.pages,
                    wasted_pages=read.pages - int(free.sum()),
                    damaged_pages=int(read.damaged is not None),
                )
                self._books[name].fail(read.failure)
                if read.damaged is not None:
                    damaged.append((name, read.damaged))
        finally:
            self._end(prefetch)
        for name, key in damaged:
            self._tier.outbound.remove(key, self._books[name])

    def _end(self, prefetch: CompanionPrefetch) -> None:
        """Let go of what a prefetch holds; pages that were named by it stay."""
        assert prefetch._lock is not None
        prefetch._ended = True
        self._index.unlock(prefetch._lock)
        for name, wanted in prefetch._wanted.items():
            self._members[name].host.own.release(wanted.pages)
        prefetch._wanted = {}

    def _of(self, name: str) -> Books:
        check_word("name", name, sorted(self._books), CacheError)
        return self._books[name]

    def _pieces(self, name: str, page: int) -> Pieces:
        return [rows[page] for rows in self._bytes[name]]
