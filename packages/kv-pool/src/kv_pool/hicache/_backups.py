"""Owns backups, from the device to the host: their queue, their merging, their end. It does not choose what to copy.

One submission is under way at a time. What comes meanwhile waits, each with the mark of the compute that fills its
pages, and goes together with the others in the next one; each is acknowledged on its own.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from kv_planner import TierConflict, TierOrder

from kv_pool.hicache._inflight import Backup, BackupBatch, SharedLock, take_together
from kv_pool.hicache.streams import issue

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from kv_planner import PrefixIndex, PrefixLock

    from kv_pool.hicache._inflight import CopyLimits
    from kv_pool.hicache.canary import Canary
    from kv_pool.hicache.host_pool import HostPool
    from kv_pool.hicache.movers import Mover
    from kv_pool.hicache.streams import Streams
    from kv_pool.tables import IntArray

__all__ = ["Backups"]


class Backups:
    """Backups of one cache; they end in the order in which they were asked for."""

    def __init__(
        self,
        host: HostPool,
        index: PrefixIndex,
        mover: Mover,
        streams: Streams,
        limits: CopyLimits,
        *,
        backed_up: Callable[[IntArray], None] | None,
        canary: Canary | None,
    ) -> None:
        self._host = host
        self._index = index
        self._mover = mover
        self._streams = streams
        self._limit = limits.batch_pages
        self._on_backed_up = backed_up
        self._canary = canary
        self._queue: deque[Backup] = deque()
        self._submitted: deque[BackupBatch] = deque()
        self.counts = dict.fromkeys(
            ("backed_up_pages", "backup_batches", "cancelled_backup_pages", "unbacked_pages"), 0
        )

    @property
    def pages(self) -> tuple[int, int]:
        """Pages that wait, and pages that are under way."""
        submitted = [part for batch in self._submitted for part in batch.parts]
        return sum(part.nodes.size for part in self._queue), sum(part.nodes.size for part in submitted)

    def nodes(self) -> IntArray:
        """Nodes whose backup has not been acknowledged."""
        parts = [*(part for batch in self._submitted for part in batch.parts), *self._queue]
        return np.concatenate([np.zeros(0, dtype=np.int64), *(part.nodes for part in parts)])

    def start(self, nodes: IntArray, device_pages: IntArray, host_pages: IntArray, lock: PrefixLock) -> None:
        """Copy pages to the host behind the compute issued so far; takes the lock and the host pages over.

        Raises:
            Exception: What the mover or the device raised; of what it was asked to copy, the locks are dropped, the
                host pages are free, and no node counts as backed up.
        """
        try:
            after = self._streams.mark("compute")
        except BaseException:
            self._host.allocator.release(host_pages)
            self._index.unlock(lock)
            raise
        self._queue.append(Backup(nodes, device_pages, host_pages, SharedLock(lock), after))
        self.submit()

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
                    ends.callback(self._acknowledge if arrived else self._drop, part)

    def _acknowledge(self, part: Backup) -> None:
        kept = np.zeros(part.nodes.size, dtype=np.bool_)
        try:
            if self._canary is not None:
                self._canary.record(part.host_pages)
            kept = self._record(part)
            self.counts["backed_up_pages"] += int(kept.sum())
            if self._on_backed_up is not None:
                self._on_backed_up(part.nodes[kept])
        finally:
            self._host.allocator.release(part.host_pages[~kept])
            self._unlock(part)

    def _record(self, part: Backup) -> npt.NDArray[np.bool_]:
        """Tell the index of a backup; returns which nodes took their page.

        A node does not where a prefetch has brought its page meanwhile, or where its parent has no host copy any more.
        """
        try:
            self._index.backed_up(part.nodes, part.host_pages)
        except (TierConflict, TierOrder):
            return np.array([self._record_one(*pair) for pair in zip(part.nodes, part.host_pages, strict=True)])
        return np.ones(part.nodes.size, dtype=np.bool_)

    def _record_one(self, node: np.int64, host_page: np.int64) -> bool:
        try:
            self._index.backed_up([int(node)], [int(host_page)])
        except TierConflict:
            return False
        except TierOrder:
            self.counts["unbacked_pages"] += 1
            return False
        return True

    def _drop(self, part: Backup) -> None:
        """End without a host copy."""
        self._host.allocator.release(part.host_pages)
        self._unlock(part)

    def _unlock(self, part: Backup) -> None:
        part.lock.holders -= 1
        if not part.lock.holders:
            self._index.unlock(part.lock.lock)
