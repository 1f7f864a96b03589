"""Owns the copies of a cache's own pool that wait or are under way: both ways, their counts, what the index is told.

A backup begins after all compute that was issued before it; so does a load, because what it overwrites may still be
read. Each holds a lock of the index, and pages of its own, until the device has said that it is done. It does not
choose what to copy, nor copy what companions have (see `_member`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from kv_planner import StaleNode, TierConflict, TierOrder

from kv_pool.hicache._backups import Backups
from kv_pool.hicache._inflight import Backup, CopyLimits, Load, UnderWay
from kv_pool.hicache._loads import Loads

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from kv_planner import PrefixIndex, PrefixLock

    from kv_pool.hicache._device import DevicePages
    from kv_pool.hicache.canary import Canary
    from kv_pool.hicache.host_pool import HostPool
    from kv_pool.hicache.movers import Mover
    from kv_pool.hicache.streams import Streams
    from kv_pool.tables import IntArray

__all__ = ["Copies"]


class Copies:
    """Backups and loads of one cache; each kind ends in the order in which it was submitted."""

    def __init__(
        self,
        device: DevicePages,
        host: HostPool,
        index: PrefixIndex,
        mover: Mover,
        streams: Streams,
        *,
        failed: Callable[[Load], object],
        limits: CopyLimits,
        backed_up: Callable[[IntArray], None] | None = None,
        canary: Canary | None = None,
    ) -> None:
        layers = sorted({layer for mirror in host.mirrors for layer in mirror.layer_ids})
        self._host = host
        self._index = index
        self._canary = canary
        self._on_backed_up = backed_up
        self._count = dict.fromkeys(("backed_up_pages", "unbacked_pages"), 0)
        self._backups = Backups(
            index, mover, streams, limits,
            arrived=self._arrived,
            dropped=lambda _, pages: host.allocator.release(pages),
            keep=lambda pages: device.in_use(pages).end,
        )  # fmt: skip
        self._loads = Loads(
            index, mover, streams, limits, layers, keep=lambda pages, _: device.in_use(pages).end, failed=failed
        )

    @property
    def pending(self) -> bool:
        """Whether anything has not been acknowledged."""
        return any((*self._backups.pages, *self._loads.pages))

    @property
    def counts(self) -> dict[str, int]:
        """What was done so far, by the names of `CacheCounters`."""
        return self._count | self._backups.counts | self._loads.counts

    @property
    def under_way(self) -> UnderWay:
        """Pages between device and host."""
        (queued_backups, backups), (queued_loads, loads) = self._backups.pages, self._loads.pages
        return UnderWay(queued_backups, backups, queued_loads, loads)

    def being_backed_up(self) -> IntArray:
        """Nodes whose backup has not been acknowledged."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(part.nodes for part in self._backups.all())])

    def loading(self) -> list[Load]:
        """Loads that still hold their device pages."""
        return self._loads.all()

    def start_backup(self, nodes: IntArray, device_pages: IntArray, host_pages: IntArray, lock: PrefixLock) -> None:
        """See `Backups.start`."""
        self._backups.start(nodes, device_pages, host_pages, lock)

    def cancel_backups(self) -> int:
        """See `Backups.cancel`."""
        return self._backups.cancel()

    def start_load(
        self, nodes: IntArray, host_pages: IntArray, device_pages: IntArray, lock: Callable[[], PrefixLock]
    ) -> Load:
        """Copy pages to the device behind the compute issued so far.

        Args:
            nodes: Those that get their device page by it.
            host_pages: Where the bytes lie.
            device_pages: Where they go.
            lock: Takes the lock that keeps the host pages.

        Raises:
            CanaryMismatch: A host page is not what was backed up; no lock was taken.
            Exception: What the mover or the device raised; the lock is dropped, and nothing writes the pages any more.
        """
        if self._canary is not None:
            self._canary.check(host_pages)
        return self._loads.start(nodes, host_pages, device_pages, lock())

    def wait_layer(self, load: Load, layer_id: int) -> None:
        """See `Loads.wait_layer`."""
        self._loads.wait_layer(load, layer_id)

    def cancel(self, load: Load, unload: Callable[[], bool]) -> bool:
        """Stop a load whose layers are not all submitted, if `unload` takes it out of the index; says whether."""
        return self._loads.cancellable(load) and unload() and self._loads.cancel(load)

    def poll(self) -> None:
        """Acknowledge everything that has ended, and submit what waited for it."""
        self._loads.poll()
        self._backups.poll()

    def drain(self) -> None:
        """Wait for everything that waits or is under way, and acknowledge it."""
        self._loads.drain()
        self._backups.drain()

    def _arrived(self, part: Backup) -> None:
        """Tell the index of host copies that are complete; host pages that it does not take are free."""
        kept = np.zeros(part.nodes.size, dtype=np.bool_)
        try:
            if self._canary is not None:
                self._canary.record(part.host_pages)
            kept = self._record(part)
            self._count["backed_up_pages"] += int(kept.sum())
            if self._on_backed_up is not None:
                self._on_backed_up(part.nodes[kept])
        finally:
            self._host.allocator.release(part.host_pages[~kept])

    def _record(self, part: Backup) -> npt.NDArray[np.bool_]:
        """Tell the index of a backup; returns which nodes took their page.

        A node does not where a prefetch has brought its page meanwhile, where its parent has no host copy any more, or
        where it was built on a load that has failed.
        """
        try:
            self._index.backed_up(part.nodes, part.host_pages)
        except (TierConflict, TierOrder, StaleNode):
            return np.array([self._record_one(*pair) for pair in zip(part.nodes, part.host_pages, strict=True)])
        return np.ones(part.nodes.size, dtype=np.bool_)

    def _record_one(self, node: np.int64, host_page: np.int64) -> bool:
        try:
            self._index.backed_up([int(node)], [int(host_page)])
        except TierConflict:
            return False
        except (TierOrder, StaleNode):
            self._count["unbacked_pages"] += 1
            return False
        return True
