"""Owns the copies between device and host that are under way: their order, their fences, and their end.

A backup begins after all compute that was issued before it; so does a load, because what it overwrites may still be
read. Each holds a lock of the index, and pages of its own, until the device has said that it is done. It does not
choose what to copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from kv_planner import TierConflict

from kv_pool.errors import UnknownLayer
from kv_pool.hicache._inflight import Backup, Load

if TYPE_CHECKING:
    from kv_planner import PrefixIndex, PrefixLock

    from kv_pool.hicache._device import DevicePages
    from kv_pool.hicache.canary import Canary
    from kv_pool.hicache.host_pool import HostPool
    from kv_pool.hicache.movers import Mover
    from kv_pool.hicache.streams import Lane, Mark, Streams
    from kv_pool.tables import IntArray

__all__ = ["Copies"]


class Copies:
    """Backups and loads of one cache; each kind ends in the order in which it began."""

    def __init__(
        self,
        device: DevicePages,
        host: HostPool,
        index: PrefixIndex,
        mover: Mover,
        streams: Streams,
        *,
        backed_up: Callable[[IntArray], None] | None = None,
        canary: Canary | None = None,
    ) -> None:
        self._canary = canary
        self._on_backed_up = backed_up
        self._device = device
        self._host = host
        self._index = index
        self._mover = mover
        self._streams = streams
        self._layers = sorted({layer for mirror in host.mirrors for layer in mirror.layer_ids})
        self._backups: deque[Backup] = deque()
        self._loads: deque[Load] = deque()
        self.backed_up = 0
        self.loaded = 0

    @property
    def pending(self) -> bool:
        """Whether anything has not been acknowledged."""
        return bool(self._backups or self._loads)

    def being_backed_up(self) -> IntArray:
        """Nodes whose backup has not been acknowledged."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(backup.nodes for backup in self._backups)])

    def loading(self) -> list[Load]:
        """Loads that have not been acknowledged."""
        return list(self._loads)

    def start_backup(self, nodes: IntArray, device_pages: IntArray, host_pages: IntArray, lock: PrefixLock) -> None:
        """Copy pages to the host behind the compute issued so far; takes the lock and the host pages over.

        Raises:
            Exception: What the mover or the device raised; the lock is dropped, the host pages are free, and no node
                counts as backed up.
        """
        try:
            mark = self._issue("backup", lambda: self._mover.backup(device_pages, host_pages))
        except BaseException:
            self._host.allocator.release(host_pages)
            self._index.unlock(lock)
            raise
        self._backups.append(Backup(nodes, host_pages, lock, mark))

    def start_load(self, host_pages: IntArray, device_pages: IntArray, lock: PrefixLock) -> Load:
        """Copy pages to the device behind the compute issued so far; takes the lock over.

        Raises:
            CanaryMismatch: A host page is not what was backed up; the lock is dropped.
            Exception: What the mover or the device raised; the lock is dropped, and nothing writes the pages any more.
        """
        layers: dict[int, Mark] = {}

        def move() -> None:
            if self._mover.capabilities.granularity == "page":
                self._mover.load(device_pages, host_pages)
                return
            for layer in self._layers:
                self._mover.load(device_pages, host_pages, layer)
                layers[layer] = self._streams.mark("load")

        try:
            if self._canary is not None:
                self._canary.check(host_pages)
            mark = self._issue("load", move)
        except BaseException:
            self._index.unlock(lock)
            raise
        self._device.retain(device_pages)
        load = Load(device_pages, lock, MappingProxyType(layers or dict.fromkeys(self._layers, mark)), mark)
        self._loads.append(load)
        return load

    def wait_layer(self, load: Load, layer_id: int) -> None:
        """Let compute that is issued from now on begin after a layer of a load.

        Raises:
            UnknownLayer: The layer is not held here.
        """
        if layer_id not in load.layers:
            raise UnknownLayer(
                "layer_id",
                given=layer_id,
                expected=f"one of {self._layers}",
                consequence="the wait would be for nothing",
                remedy="pass the global layer id of a layer held here",
            )
        self._streams.wait("compute", load.layers[layer_id])

    def poll(self) -> None:
        """Acknowledge everything that has ended."""
        self._end(lambda mark: mark.reached())

    def drain(self) -> None:
        """Wait for everything that is under way, and acknowledge it."""
        self._end(lambda mark: True)

    def _issue(self, lane: Lane, move: Callable[[], None]) -> Mark:
        self._streams.wait(lane, self._streams.mark("compute"))
        with self._streams.on(lane):
            try:
                move()
            except BaseException:
                self._streams.mark(lane).wait_on_host()
                raise
        return self._streams.mark(lane)

    def _end(self, ended: Callable[[Mark], bool]) -> None:
        while self._loads and ended(self._loads[0].mark):
            load = self._loads.popleft()
            try:
                load.mark.wait_on_host()
                self.loaded += load.device_pages.size
            finally:
                self._index.unlock(load.lock)
                self._device.release(load.device_pages)
        while self._backups and ended(self._backups[0].mark):
            backup = self._backups.popleft()
            kept = False
            try:
                backup.mark.wait_on_host()
                if self._canary is not None:
                    self._canary.record(backup.host_pages)
                self._record(backup)
                kept = True
                self.backed_up += backup.nodes.size
                if self._on_backed_up is not None:
                    self._on_backed_up(backup.nodes)
            finally:
                if not kept:
                    self._host.allocator.release(backup.host_pages)
                self._index.unlock(backup.lock)

    def _record(self, backup: Backup) -> None:
        """Tell the index of a backup; a second copy, where a prefetch has brought the page meanwhile, is released."""
        try:
            self._index.backed_up(backup.nodes, backup.host_pages)
        except TierConflict:
            for node, page in zip(backup.nodes.tolist(), backup.host_pages.tolist(), strict=True):
                try:
                    self._index.backed_up([node], [page])
                except TierConflict:
                    self._host.allocator.release([page])
