"""Owns what travels between the host pages of companions and a store: writes behind backups, reads behind a prefetch.

A companion's page has a key of its own, which names the companion, everything that decides what its bytes mean, the
pool that it belongs to, and the tokens. So a page of the cache's own pool is never taken for one with a companion: what
a companion lacks in the store shortens the hit. Threads read and write bytes; index and maps are touched by the owner's
calls alone. It does not read or write the pages of the cache's own pool (see `tier`).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from kv_planner import StaleNode

from kv_pool.errors import HostPoolError, StorageDamaged, StorageError
from kv_pool.hicache.ranks import owner_rank
from kv_pool.hicache.storage._work import StorageCounters
from kv_pool.hicache.storage.identity import StorageIdentity, page_keys
from kv_pool.hicache.storage.protocols import RegistersMemory, leading_pages

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy.typing as npt
    from kv_planner import PrefixLock

    from kv_pool.hicache._member import Member
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
        self._taken: dict[str, IntArray] = {}
        self._work: Future[_Read] | None = None

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


@dataclass
class _Read:
    """Own pages that were read, by companion: the positions, and how many of the taken pages they fill."""

    places: dict[str, IntArray] = field(default_factory=dict)
    damaged: int = 0
    failed: int = 0


@dataclass(frozen=True)
class _Write:
    member: Member
    host_pages: IntArray
    work: Future[int]


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
        self._writes: deque[_Write] = deque()
        self._reads: list[CompanionPrefetch] = []
        self._counters = StorageCounters()

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
                self._tier.store.register([piece.reshape(-1) for piece in self._bytes[member.companion.name]])
        self._members = {member.companion.name: member for member in members}

    @property
    def counters(self) -> StorageCounters:
        """What was done so far, for all companions."""
        return self._counters

    @property
    def pending(self) -> bool:
        """Whether anything is under way."""
        return bool(self._writes or self._reads)

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
                self._write(member, [keys[depth[int(nodes[number])]] for number in chosen], host_pages[chosen])
            left = np.setdiff1d(left, here)

    def prefetch(self, own: Prefetch) -> CompanionPrefetch:
        """Follow a prefetch of the cache's own pool: read what companions have of the pages that are there after it."""
        prefetch = CompanionPrefetch(own)
        self._reads.append(prefetch)
        if own.state != "reading":
            self._start(prefetch)
        return prefetch

    def poll(self) -> None:
        """Take over what has ended; never blocks."""
        while self._writes and self._writes[0].work.done():
            self._end_write(self._writes.popleft())
        for prefetch in list(self._reads):
            if prefetch.own.state != "reading" and prefetch._work is None:
                self._start(prefetch)
            if prefetch._work is not None and prefetch._work.done():
                self._reads.remove(prefetch)
                self._take_over(prefetch)

    def drain(self) -> None:
        """Wait for everything, and take it over; the cache's own tier has been drained before."""
        wait_for([write.work for write in self._writes])
        self.poll()
        wait_for([prefetch._work for prefetch in self._reads if prefetch._work is not None])
        self.poll()

    def _write(self, member: Member, keys: list[str], host_pages: IntArray) -> None:
        member.host.own.retain(host_pages)
        try:
            pages = [self._pieces(member.companion.name, page) for page in host_pages.tolist()]
            work = self._tier.submit(self._tier.store.write, keys, pages)
        except BaseException:
            member.host.own.release(host_pages)
            raise
        self._writes.append(_Write(member, host_pages, work))

    def _end_write(self, write: _Write) -> None:
        kept = failed = 0
        try:
            kept = leading_pages("write", write.work.result(), write.host_pages.size)
        except StorageError:
            failed = 1
        finally:
            write.member.host.own.release(write.host_pages)
        self._count(written_pages=kept, unwritten_pages=write.host_pages.size - kept, failures=failed)

    def _start(self, prefetch: CompanionPrefetch) -> None:
        """Begin to read: the prefix on the host is known now, and stays while its lock is held."""
        own = prefetch.own
        found, lock = self._index.match_locked(own.tokens, namespace=own.namespace)
        homes = found.host_pages[found.host_pages > 0]
        prefetch._lock, prefetch._homes = lock, homes
        missing: dict[str, list[bool]] = {}
        keys: dict[str, list[str]] = {}
        for name, member in self._members.items():
            lacks = member.host.find(homes) == 0
            member.host.touch(homes[~lacks])  # what is there already is the last to leave for what is read
            trailing = member.companion.trailing
            most = int(lacks.sum()) if trailing is None else min(int(lacks.sum()), trailing)
            prefetch._taken[name] = member.take_host(most)
            missing[name] = (member.host.find(homes) == 0).tolist()
            text = own.tokens[: homes.size * self._tier.host.page_size]
            keys[name] = page_keys(self._digests[name], text, self._tier.host.page_size, own.namespace)
        prefetch._work = self._tier.submit(self._read, prefetch, missing, keys)

    def _read(
        self, prefetch: CompanionPrefetch, missing: Mapping[str, list[bool]], keys: Mapping[str, list[str]]
    ) -> _Read:
        read = _Read()
        try:
            depth = self._reachable(prefetch, missing, keys)
            for name, taken in prefetch._taken.items():
                lacking = [place for place in self._range(name, depth) if missing[name][place]]
                if not lacking or prefetch.own.cancelled:
                    continue
                pages = [self._pieces(name, page) for page in taken[: len(lacking)].tolist()]
                try:
                    answer = self._tier.store.read([keys[name][place] for place in lacking], pages)
                    got = leading_pages("read", answer, len(pages))
                except StorageDamaged as error:
                    got, read.damaged = error.pages_read, read.damaged + 1
                read.places[name] = np.array(lacking[:got], dtype=np.int64)
        except StorageError:
            read.failed += 1
        return read

    def _reachable(
        self, prefetch: CompanionPrefetch, missing: Mapping[str, list[bool]], keys: Mapping[str, list[str]]
    ) -> int:
        """The deepest hit for which every companion has what it needs on the host or in the store, and room for it."""
        depth, known = prefetch._homes.size, -1
        while depth != known and depth:
            known = depth
            for name, taken in prefetch._taken.items():
                lacking = [place for place in self._range(name, depth) if missing[name][place]]
                answer = self._tier.store.exists([keys[name][place] for place in lacking])
                stored = leading_pages("exists", answer, len(lacking))
                if stored < len(lacking):
                    depth = lacking[stored]
                elif len(lacking) > taken.size:
                    depth = lacking[taken.size]
        return depth

    def _range(self, name: str, depth: int) -> range:
        trailing = self._members[name].companion.trailing
        return range(0 if trailing is None else max(0, depth - trailing), depth)

    def _take_over(self, prefetch: CompanionPrefetch) -> None:
        """Name what was read by the host pages of the prefix; free the rest."""
        assert prefetch._work is not None and prefetch._lock is not None
        prefetch._ended = True
        read = _Read()
        try:
            read = prefetch._work.result()
            for name, places in read.places.items():
                member = self._members[name]
                homes, pages = prefetch._homes[places], prefetch._taken[name][: places.size]
                free = member.host.find(homes) == 0
                member.host.give(homes[free], pages[free])
                member.host.touch(homes[free])
                prefetch._taken[name] = np.setdiff1d(prefetch._taken[name], pages[free])
                prefetch.companion_pages += int(free.sum())
        finally:
            self._index.unlock(prefetch._lock)
            for name, left in prefetch._taken.items():
                self._members[name].host.own.release(left)
            prefetch._taken = {}
            count = sum(places.size for places in read.places.values())
            wasted = count - prefetch.companion_pages
            self._count(read_pages=count, wasted_pages=wasted, damaged_pages=read.damaged, failures=read.failed)

    def _pieces(self, name: str, page: int) -> Pieces:
        return [rows[page] for rows in self._bytes[name]]

    def _count(self, **more: int) -> None:
        self._counters = replace(
            self._counters, **{name: getattr(self._counters, name) + value for name, value in more.items()}
        )
