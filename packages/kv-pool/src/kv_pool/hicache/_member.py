"""Owns one companion at work: its pages on the device and on the host, and its copies that are under way.

Whoever reads or writes a page is a holder of it beside the map that names it, so that it neither leaves nor goes to
somebody else before the device says that it is done. It does not choose what is read or kept (see `_group`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kv_pool.errors import PageError
from kv_pool.hicache._backups import Backups
from kv_pool.hicache._device import fill_poison, pages_second
from kv_pool.hicache._inflight import UnderWay
from kv_pool.hicache._loads import Loads
from kv_pool.hicache.accounting import Accounting
from kv_pool.hicache.canary import Canary
from kv_pool.hicache.movers._together import Together
from kv_pool.page_map import PageMap
from kv_pool.tables import whole_number

if TYPE_CHECKING:
    from kv_planner import PrefixIndex

    from kv_pool.allocator import PageAllocator
    from kv_pool.hicache._inflight import Backup, CopyLimits, Load
    from kv_pool.hicache.companion import Companion
    from kv_pool.hicache.movers import Mover
    from kv_pool.hicache.streams import Streams
    from kv_pool.tables import IntArray

__all__ = ["Member"]


class Member:
    """The pages of a companion, on both sides.

    Args:
        companion: What it is.
        lead_host: Allocator of the cache's own host pages.
        movers: One a host pool.
        streams: The lanes of the cache.
        index: The index of the cache.
        poison: Whether freed device pages are overwritten.
        canary: Whether checksums are taken after backup and asked at load.
        limits: How much is submitted at a time.
        failed: Called with each load of which the movers or the device have said later that it failed.
        backed_up: Called with nodes and own host pages when host copies are complete.
    """

    def __init__(
        self,
        companion: Companion,
        lead_host: PageAllocator,
        movers: Sequence[Mover],
        streams: Streams,
        index: PrefixIndex,
        *,
        poison: bool,
        canary: bool,
        limits: CopyLimits,
        failed: Callable[[Load], object],
        backed_up: Callable[[Member, IntArray, IntArray], None] | None,
    ) -> None:
        self.companion = companion
        self.device = companion.pages
        self.host = PageMap(lead_host, companion.host.allocator)
        self.layers = sorted(
            {layer for host in companion.hosts for mirror in host.mirrors for layer in mirror.layer_ids}
        )
        self.canaries = [Canary(host) for host in companion.hosts] if canary else []
        self.mover = Together(movers, companion.hosts)
        self._index = index
        self._on_failed = failed
        self._on_backed_up = backed_up
        self._count = dict.fromkeys(("backed_up_pages", "device_hit_pages", "host_hit_pages", "refused_host_pages"), 0)
        self._storages = [
            storage for host in companion.hosts for mirror in host.mirrors for storage in pages_second(mirror)
        ]
        self._backups = Backups(index, self.mover, streams, limits, arrived=self._arrived, dropped=self._dropped)
        self._loads = Loads(index, self.mover, streams, limits, self.layers, keep=self._keep, failed=self._failed)
        if poison:
            self.device.own.watch(freed=lambda freed: fill_poison(self._storages, freed))

    @property
    def pending(self) -> bool:
        """Whether anything is under way."""
        return any((*self._backups.pages, *self._loads.pages))

    @property
    def counts(self) -> dict[str, int]:
        """What was done so far."""
        return self._count | self._backups.counts | self._loads.counts

    @property
    def under_way(self) -> UnderWay:
        """Own pages between device and host."""
        (queued_backups, backups), (queued_loads, loads) = self._backups.pages, self._loads.pages
        return UnderWay(queued_backups, backups, queued_loads, loads)

    @property
    def loads(self) -> list[Load]:
        """Loads that still hold their pages."""
        return self._loads.all()

    def take(self, count: int) -> IntArray:
        """Take own device pages; the longest unused ones leave for them.

        Raises:
            OutOfPages: Not enough, even when nothing is under way. None is taken; none leaves for more than there are.
        """
        if count > self.device.own.total:
            return self.device.own.alloc(count)
        self.evict(count)
        if count > self.device.own.available and self.pending:
            self.drain()
            self.evict(count)
        return self.device.own.alloc(count)

    def evict(self, count: int) -> int:
        """Let the longest unused pages leave the device until `count` are free; returns how many left.

        Raises:
            PageError: Negative, or no whole number.
        """
        count = whole_number("pages", count, most=None, error=PageError, consequence="no page has left")
        return self.device.evict(count - self.device.own.available)

    def take_host(self, count: int) -> IntArray:
        """Take up to `count` own host pages; the longest unused ones leave for them."""
        own = self.host.own
        self.host.evict(count - own.available)
        return own.alloc(min(count, own.available))

    def on_host(self, lead_host: IntArray) -> IntArray:
        """Own host pages whose bytes are there, 0 for others. Shape: that of `lead_host`."""
        found = self.host.find(lead_host)
        arriving = [part.host_pages for part in self._backups.all()]
        return np.where(np.isin(found, np.concatenate(arriving)), 0, found) if arriving else found

    def back_up(self, nodes: IntArray, lead: IntArray, lead_host: IntArray) -> None:
        """Start to copy what these pages have on the device and not on the host, as far as there is room.

        Args:
            nodes: Index nodes, parents first. Shape: [pages].
            lead: The cache's device page of each.
            lead_host: The cache's host page of each, held.

        Raises:
            Exception: What a mover or the device raised; nothing counts as copied then.
        """
        chosen = np.flatnonzero((self.device.find(lead) > 0) & (self.host.find(lead_host) == 0))
        taken = self.take_host(chosen.size)
        chosen = chosen[: taken.size] if self.companion.trailing is None else chosen[chosen.size - taken.size :]
        if not chosen.size:
            return
        pages, homes = self.device.find(lead[chosen]), lead_host[chosen]
        self.host.give(homes, taken)
        self.host.touch(homes[::-1] if self.companion.trailing is None else homes)
        try:
            lock = self._index.lock(nodes[chosen])
            self._hold(pages, taken)
            self._backups.start(nodes[chosen], pages, taken, lock)
        except BaseException:
            self.host.leave(homes[self.host.find(homes) == taken])
            raise

    def cancel_backups(self) -> int:
        """Give up the backups that wait; returns the number of pages. They may be asked for again."""
        return self._backups.cancel()

    def load(self, pages: IntArray, host_pages: IntArray, nodes: IntArray) -> None:
        """Start to copy own host pages to own device pages, layer by layer where the movers can.

        Raises:
            Exception: What a mover or the device raised; nothing writes the pages any more.
        """
        self._loads.start(nodes, host_pages, pages, self._index.lock(nodes))

    def wait_layer(self, load: Load, layer_id: int) -> None:
        """See `Loads.wait_layer`."""
        self._loads.wait_layer(load, layer_id)

    def stop(self, load: Load) -> None:
        """Submit no more of a load that nobody needs; its pages are named no more. One that is submitted ends."""
        if self._loads.cancellable(load):
            self._forget(load)
            self._loads.cancel(load)

    def refuse(self, lead_host: int) -> int:
        """The own page of a host page is not what was backed up: it leaves the host; returns how many have left."""
        left = self.host.leave([lead_host])
        self._count["refused_host_pages"] += left
        return left

    def copy_row(self, source: int, target: int) -> None:
        """Copy a row on the compute lane."""
        for storage in self._storages:
            storage[:, target].copy_(storage[:, source])

    def clear_row(self, row: int) -> None:
        """Zero a row on the compute lane."""
        for storage in self._storages:
            storage[:, row].zero_()

    def poll(self) -> None:
        """Acknowledge copies that have ended, and submit what waits for that."""
        self._loads.poll()
        self._backups.poll()

    def drain(self) -> None:
        """Wait for all copies, and acknowledge them."""
        self._loads.drain()
        self._backups.drain()

    def accounting(self, of_index: IntArray, private: Sequence[IntArray]) -> Accounting:
        """Count who holds the own device pages.

        Args:
            of_index: The cache's device pages that are the index's.
            private: Own pages that requests hold without a name: kept ready, running rows.
        """
        named = self.device.named()
        own = self.device.find(named)
        idle = self.device.own.holders(own) == 1
        protected = own[~idle & np.isin(named, of_index)]
        under_way = [*(part.device_pages for part in self._backups.all()), *(load.device_pages for load in self.loads)]
        outside = np.concatenate([own[~idle], *private, *under_way])
        return Accounting(
            available=self.device.own.available,
            evictable=int(idle.sum()),
            protected=protected.size,
            in_use=np.setdiff1d(outside, protected).size + self.device.own.lingering,
            total=self.device.own.total,
        )

    def count_hit(self, on_device: int, on_host: int) -> None:
        """Count what a finished request has read of a hit: pages that were there, and pages that were loaded."""
        self._count["device_hit_pages"] += on_device
        self._count["host_hit_pages"] += on_host

    def _arrived(self, part: Backup) -> None:
        try:
            try:
                for canary in self.canaries:
                    canary.record(part.host_pages)
            except BaseException:
                _unname(self.host, part.host_pages)
                raise
            self._count["backed_up_pages"] += part.nodes.size
            if self._on_backed_up is not None:
                self._on_backed_up(self, part.nodes, part.host_pages)
        finally:
            self._let_go(part.device_pages, part.host_pages)

    def _dropped(self, pages: IntArray, host_pages: IntArray) -> None:
        """End a backup without a host copy."""
        _unname(self.host, host_pages)
        self._let_go(pages, host_pages)

    def _failed(self, load: Load) -> None:
        self._forget(load)
        self._on_failed(load)

    def _forget(self, load: Load) -> None:
        """Nobody finds what a load was to bring."""
        _unname(self.device, load.device_pages)

    def _keep(self, pages: IntArray, host_pages: IntArray) -> Callable[[], None]:
        self._hold(pages, host_pages)
        return partial(self._let_go, pages, host_pages)

    def _hold(self, pages: IntArray, host_pages: IntArray) -> None:
        self.device.own.retain(pages)
        self.host.own.retain(host_pages)

    def _let_go(self, pages: IntArray, host_pages: IntArray) -> None:
        self.device.own.release(pages)
        self.host.own.release(host_pages)


def _unname(names: PageMap, own_pages: IntArray) -> None:
    """Own pages are found no more, whatever names them."""
    named = names.named()
    names.leave(named[np.isin(names.find(named), own_pages)])
