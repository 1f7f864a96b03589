"""Owns the pages of one cache over its levels: how room is made, when pages get their host copy, what is under way.

The index says which tokens lie in which pages and which were used last; this says in which order pages leave, and that
what a policy wants on the host is there before. It does not know requests (see `controller`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from kv_planner import StaleNode, TierConflict, TierOrder

from kv_pool.errors import PageError
from kv_pool.hicache._parts import WritePolicy
from kv_pool.hicache.storage.tier import take_host_pages
from kv_pool.tables import whole_number

if TYPE_CHECKING:
    from kv_planner import PrefixIndex

    from kv_pool.hicache._copies import Copies
    from kv_pool.hicache._device import DevicePages
    from kv_pool.hicache._group import Group
    from kv_pool.hicache._inflight import Load
    from kv_pool.hicache.acquired import Namespace
    from kv_pool.hicache.host_pool import HostPool
    from kv_pool.hicache.storage import StorageTier
    from kv_pool.hicache.storage.companions import CompanionStorage
    from kv_pool.tables import IntArray

__all__ = ["Failed", "Levels"]

Failed: TypeAlias = Literal["own", "companion"]
_USES: dict[WritePolicy, int | None] = {"write_through": 1, "write_through_selective": 2, "write_back": None}


class Levels:
    """Device, host and store of one cache.

    Attributes:
        page_of: The device page of each node that is on the device.
    """

    def __init__(
        self,
        index: PrefixIndex,
        device: DevicePages,
        host: HostPool,
        copies: Copies,
        group: Group,
        policy: WritePolicy,
        storage: StorageTier | None,
        companion_storage: CompanionStorage | None,
    ) -> None:
        self.page_of: dict[int, int] = {}
        self._count = dict.fromkeys(
            ("evicted_device_pages", "evicted_host_pages", "unbacked_pages", "refused_host_pages"), 0
        )
        self._index = index
        self._device = device
        self._host = host
        self._copies = copies
        self._group = group
        self._policy = policy
        self._storage = storage
        self._companion_storage = companion_storage

    @property
    def pending(self) -> bool:
        """Whether anything is under way between the levels."""
        stores = [store for store in (self._storage, self._companion_storage) if store is not None]
        return self._copies.pending or self._group.pending or any(store.pending for store in stores)

    @property
    def counts(self) -> dict[str, int]:
        """What was done so far, by the names of `CacheCounters`."""
        copied = self._copies.counts
        unbacked = self._count["unbacked_pages"] + copied["unbacked_pages"]
        return {**self._count, **copied, "unbacked_pages": unbacked}

    @property
    def of_index(self) -> IntArray:
        """Device pages of the index."""
        return np.fromiter(self.page_of.values(), dtype=np.int64)

    def poll(self) -> None:
        """Acknowledge what has ended; never blocks."""
        self._group.poll()  # first: what companions have of a node is there before the node counts as backed up
        self._copies.poll()
        if self._storage is not None:
            self._storage.poll()
        if self._companion_storage is not None:
            self._companion_storage.poll()

    def drain(self) -> None:
        """Wait for everything."""
        self._group.drain()
        self._copies.drain()
        if self._storage is not None:
            self._storage.drain()
        if self._companion_storage is not None:
            self._companion_storage.drain()

    def take(self, count: int) -> IntArray:
        """Take device pages; others leave for them.

        Raises:
            PageError: Negative, or no whole number.
            OutOfPages: Not enough, even after everything unprotected has left; more than there are at all, before that.
        """
        count = whole_number("count", count, most=None, error=PageError, consequence="no page was taken")
        if count <= self._device.total:
            self.make_room(count)
        return self._device.alloc(count)

    def make_room(self, count: int) -> None:
        """Evict until `count` pages are free, or nothing more can leave."""
        if count <= self._device.available:
            return
        self.poll()
        if self._policy == "write_back":
            left = self._evict(count - self._device.available, keep_unbacked=True)
            if left.size:
                self.back_up(left)
                self._group.drain()
                self._copies.drain()
        self._evict(count - self._device.available)
        if count > self._device.available:
            self._group.drain()
            self._copies.drain()
            if self._storage is not None:
                self._storage.drain(reads=False)  # pages are locked until the store has them
            self._evict(count - self._device.available)

    def evict(self, count: int) -> int:
        """Evict until `count` pages are free; returns how many left.

        Raises:
            PageError: Negative, or no whole number.
        """
        count = whole_number("pages", count, most=None, error=PageError, consequence="no page has left")
        before = self._count["evicted_device_pages"]
        self.make_room(min(count, self._device.total))
        return self._count["evicted_device_pages"] - before

    def record(self, nodes: IntArray, pages: IntArray) -> None:
        """Say where nodes lie on the device."""
        self.page_of.update(zip(nodes.tolist(), pages.tolist(), strict=True))

    def load(self, nodes: IntArray, host_pages: IntArray, pages: IntArray) -> tuple[Load, IntArray]:
        """Start to bring nodes to device pages; returns the load, and which of the pages the index has taken over."""
        absent = np.array([node not in self.page_of for node in nodes.tolist()])
        load = self._copies.start_load(nodes[absent], host_pages, pages, lambda: self._index.lock(nodes))
        self._index.loaded(nodes[absent], pages[absent])
        self.record(nodes[absent], pages[absent])
        return load, absent

    def unload(self, load: Load, failed: Failed | None = None) -> IntArray | None:
        """Take what a load was to bring off the device in the index; returns the pages.

        Args:
            load: A load that is stopped: `None` is returned where somebody has built on it. Or one that has failed.
            failed: Whose load it was. What was built on it leaves too then; of a companion's load that is all that
                leaves. What was computed from it leaves the host and the third level as well.
        """
        if failed == "companion":
            return self._withdraw(load, int(load.nodes[-1]), itself=False)
        try:
            pages = self._index.unloaded(load.nodes)
        except (TierOrder, TierConflict, StaleNode):
            return None if failed is None else self._withdraw(load, int(load.nodes[0]), itself=True)
        for node in load.nodes.tolist():
            del self.page_of[node]
        return pages

    def _withdraw(self, load: Load, top: int, *, itself: bool) -> IntArray:
        """Take all that was built on a node, and it `itself`, off the device; what was computed leaves everything."""
        if top not in self.page_of:  # it has left with what it was built on
            return np.zeros(0, dtype=np.int64)
        text, namespace = self._index.path(top)
        below = {}
        for node in self.page_of:
            tokens, where = self._index.path(node)
            if (itself or node != top) and where == namespace and np.array_equal(tokens[: text.size], text):
                below[node] = tokens
        nodes = np.array(list(below), dtype=np.int64)
        arriving = np.concatenate([load.nodes, *(other.nodes for other in self._copies.loading())])
        built = nodes[~np.isin(nodes, arriving)]  # the host copies of what arrives are sound
        self._host.allocator.release(self._index.drop_host(built).pages)
        pages = self._index.unloaded(nodes)
        for node in nodes.tolist():
            del self.page_of[node]
        for node in built.tolist():
            if self._storage is not None:
                self._storage.forget(below[node], namespace)
            for member in self._group:
                self.forget_companion(member.companion.name, below[node], namespace)
        return pages

    def forget(self, node: int, tokens: IntArray, namespace: Namespace) -> None:
        """A host page is not what was backed up: it and all behind it leave the host, it alone the third level.

        Args:
            node: Its node.
            tokens: The text up to its end. Shape: [tokens].
            namespace: Where the text was found.
        """
        with suppress(StaleNode):  # it has left already, and another request found it before
            gone = self._index.drop_host(np.array([node]))
            self._host.allocator.release(gone.pages)
            self._count["refused_host_pages"] += int(gone.pages.size) + gone.shortfall
        if self._storage is not None:
            self._storage.forget(tokens, namespace)

    def forget_companion(self, name: str, tokens: IntArray, namespace: Namespace) -> None:
        """A companion's host page is not what was backed up, and has left the host: it leaves the third level."""
        if self._companion_storage is not None:
            self._companion_storage.forget(name, tokens, namespace)

    def keep(self, nodes: IntArray, pages: IntArray) -> None:
        """Start the backups that the policy asks for when a prompt has ended with these nodes, in these pages."""
        least = _USES[self._policy]
        if least is not None:
            self.back_up(self._wanting(nodes, least))
        self._group.catch_up(nodes, pages)

    def back_up(self, nodes: IntArray) -> None:
        """Start the backup of as many nodes as the host has room for, from the first; companions before the node."""
        if not nodes.size:
            return
        lock = self._index.lock(nodes)
        host_pages = nodes[:0]
        try:
            host_pages, gone = take_host_pages(self._host, self._index, len(nodes))
            count = len(host_pages)
            self._count["evicted_host_pages"] += gone
            self._count["unbacked_pages"] += len(nodes) - count
            kept = nodes[:count]
            pages = np.array([self.page_of[node] for node in kept.tolist()], dtype=np.int64)
            self._group.back_up(kept, pages, host_pages)
        except BaseException:
            self._host.allocator.release(host_pages)
            self._index.unlock(lock)
            raise
        if not count:
            self._index.unlock(lock)
            return
        self._copies.start_backup(kept, pages, host_pages, lock)

    def _evict(self, count: int, *, keep_unbacked: bool = False) -> IntArray:
        """Evict from the device; returns the nodes that need a host copy first."""
        if count <= 0:
            return np.zeros(0, dtype=np.int64)
        gone = self._index.evict_device(count, keep_unbacked=keep_unbacked)
        for node in (*gone.removed.tolist(), *gone.kept.tolist()):
            del self.page_of[node]
        self._device.release(gone.pages)
        self._count["evicted_device_pages"] += gone.pages.size
        return gone.needs_backup

    def _wanting(self, nodes: IntArray, least: int) -> IntArray:
        """Those of a prefix's nodes that have no host copy, are used often enough, and are not under way."""
        under_way = self._copies.being_backed_up()
        pending = self._index.pending_backup(len(self.page_of), min_uses=least, in_flight=under_way)
        wanting: IntArray = nodes[np.isin(nodes, pending)]
        return wanting
