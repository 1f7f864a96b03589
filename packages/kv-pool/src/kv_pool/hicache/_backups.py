"""Owns backups, from the device to the host: their queue, their merging, their end. It does not choose what to copy.

One submission is under way at a time. What comes meanwhile waits, each with the mark of the compute that fills its
pages, and goes together with the others in the next one; each is acknowledged on its own.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kv_pool.hicache._inflight import Backup, BackupBatch, SharedLock, take_together
from kv_pool.hicache.streams import issue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kv_planner import PrefixIndex, PrefixLock

    from kv_pool.hicache._inflight import CopyLimits
    from kv_pool.hicache.movers import Mover
    from kv_pool.hicache.streams import Streams
    from kv_pool.tables import IntArray

__all__ = ["Backups"]


class Backups:
    """Backups of one pool, a cache's own or a companion's; they end in the order in which they were asked for.

    Args:
        index: The index, for the locks.
        mover: What moves the bytes.
        streams: The lanes.
        limits: How much is submitted at a time.
        keep: Keeps the device pages of a backup from everybody else; returns what ends that. `None` where whoever
            starts it does so.
        arrived: Called once for each part whose bytes are on the host.
        dropped: Called with the device and the host pages of each part that ends without.
    """

    def __init__(
        self,
        index: PrefixIndex,
        mover: Mover,
        streams: Streams,
        limits: CopyLimits,
        *,
        arrived: Callable[[Backup], object],
        dropped: Callable[[IntArray, IntArray], object],
        keep: Callable[[IntArray], Callable[[], object]] | None = None,
    ) -> None:
        self._index = index
        self._mover = mover
        self._streams = streams
        self._limit = limits.batch_pages
        self._keep = keep
        self._arrived = arrived
        self._dropped = dropped
        self._queue: deque[Backup] = deque()
        self._submitted: deque[BackupBatch] = deque()
        self.counts = dict.fromkeys(("backup_batches", "cancelled_backup_pages"), 0)

    @property
    def pages(self) -> tuple[int, int]:
        """Pages that wait, and pages that are under way."""
        waiting = sum(part.nodes.size for part in self._queue)
        return waiting, sum(part.nodes.size for part in self.all()) - waiting

    def all(self) -> list[Backup]:
        """Backups that have not been acknowledged."""
        return [*(part for batch in self._submitted for part in batch.parts), *self._queue]

    def start(self, nodes: IntArray, device_pages: IntArray, host_pages: IntArray, lock: PrefixLock) -> None:
        """Copy pages to the host behind the compute issued so far; takes the lock and the host pages over.

        Raises:
            Exception: What the mover or the device raised; what of these pages is not under way is dropped.
        """
        shared = SharedLock(lock, None if self._keep is None else self._keep(device_pages))
        try:
            after = self._streams.mark("compute")
        except BaseException:
            with self._unlocking(shared):
                self._dropped(device_pages, host_pages)
            raise
        self._queue.append(Backup(nodes, device_pages, host_pages, shared, after))
        try:
            self.submit()
        except BaseException:
            for part in [part for part in self._queue if part.lock is shared]:
                self._queue.remove(part)
                self._drop(part)
            raise

    def submit(self) -> None:
        """Submit what waits, as long as nothing is under way."""
        while self._queue and not (self._submitted and not self._submitted[-1].mark.reached()):
            parts = self._next()
            device_pages, host_pages = (
                np.concatenate([getattr(part, name) for part in parts]) for name in ("device_pages", "host_pages")
            )
            try:
                work = partial(self._mover.backup, device_pages, host_pages)
                mark = issue(self._streams, "backup", [part.after for part in parts], work)
            except BaseException:
                for part in parts:
                    self._drop(part)
                raise
            self.counts["backup_batches"] += 1
            self._submitted.append(BackupBatch(parts, mark))

    def cancel(self) -> int:
        """Give up what waits; returns the number of pages. They may be asked for again."""
        count = self.pages[0]
        self.counts["cancelled_backup_pages"] += count
        while self._queue:
            self._drop(self._queue.popleft())
        return count

    def poll(self) -> None:
        """Acknowledge what has ended, and submit what waits for that."""
        while self._submitted and self._submitted[0].mark.reached():
            self._end(self._submitted.popleft())
        self.submit()

    def drain(self) -> None:
        """Wait for everything, and acknowledge it."""
        while self._submitted or self._queue:
            while self._submitted:
                self._end(self._submitted.popleft())
            self.submit()

    def _next(self) -> list[Backup]:
        """The parts of the next submission: as many as fit, the first one cut where it is too large by itself."""
        if self._queue[0].nodes.size > self._limit:
            self._queue.extendleft(reversed(self._queue.popleft().cut(self._limit)))
        return take_together(self._queue, self._limit, lambda part: part.nodes.size)

    def _end(self, batch: BackupBatch) -> None:
        arrived = False
        try:
            batch.mark.wait_on_host()
            arrived = True
        finally:
            with ExitStack() as ends:
                for part in reversed(batch.parts):  # the last callback is the first that is called
                    ends.callback(self._arrive if arrived else self._drop, part)

    def _arrive(self, part: Backup) -> None:
        with self._unlocking(part.lock):
            self._arrived(part)

    def _drop(self, part: Backup) -> None:
        """End without a host copy."""
        with self._unlocking(part.lock):
            self._dropped(part.device_pages, part.host_pages)

    @contextmanager
    def _unlocking(self, lock: SharedLock) -> Iterator[None]:
        try:
            yield
        finally:
            lock.holders -= 1
            if not lock.holders:
                self._index.unlock(lock.lock)
                if lock.let_go is not None:
                    lock.let_go()
