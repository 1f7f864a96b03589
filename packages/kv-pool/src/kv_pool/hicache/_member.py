"""Owns one companion at work: its pages on the device and on the host, and its copies that are under way.

Whoever reads or writes a page is a holder of it beside the map that names it, so that it neither leaves nor goes to
somebody else before the device says that it is done. It does not choose what is read or kept (see `_group`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kv_pool.errors import PageError
from kv_pool.hicache._device import fill_poison, pages_second
from kv_pool.hicache._inflight import take_together
from kv_pool.hicache.accounting import Accounting
from kv_pool.hicache.canary import Canary
from kv_pool.hicache.streams import issue
from kv_pool.page_map import PageMap
from kv_pool.tables import whole_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kv_planner import PrefixIndex, PrefixLock

    from kv_pool.allocator import PageAllocator
    from kv_pool.hicache.companion import Companion
    from kv_pool.hicache.movers import Mover
    from kv_pool.hicache.streams import Mark, Streams
    from kv_pool.tables import IntArray

__all__ = ["Carry", "Member"]


@dataclass(eq=False)
class Carry:
    """Own pages between device and host; the carry is one of their holders.

    Attributes:
        pages: Device pages. Shape: [pages].
        host_pages: Host pages. Shape: [pages].
        lock: Keeps the nodes and the leading pages.
        layers: Mark of each layer's arrival, by global layer id; of a load.
        mark: End of the copies; of a backup that waits, of the compute that fills its pages.
        nodes: Nodes of a backup, parents first.
        lead_host: Leading host pages of a backup.
        failure: What the device has said later; its bytes did not come.
    """

    pages: IntArray
    host_pages: IntArray
    lock: PrefixLock
    layers: Mapping[int, Mark]
    mark: Mark
    nodes: IntArray
    lead_host: IntArray
    failure: BaseException | None = None


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
        batch_pages: Pages of one submission to the host; one is under way at a time, the rest waits and is merged.
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
        batch_pages: int,
        backed_up: Callable[[Member, IntArray, IntArray], None] | None,
    ) -> None:
        self.companion = companion
        self.device = companion.pages
        self.host = PageMap(lead_host, companion.host.allocator)
        self.layers = sorted(
            {layer for host in companion.hosts for mirror in host.mirrors for layer in mirror.layer_ids}
        )
        self.canaries = [Canary(host) for host in companion.hosts] if canary else []
        self.loaded = 0
        self.backed_up = 0
        self._movers = movers
        self._streams = streams
        self._index = index
        self._on_backed_up = backed_up
        self._storages = [
            storage for host in companion.hosts for mirror in host.mirrors for storage in pages_second(mirror)
        ]
        self._batch_pages = batch_pages
        self._queue: deque[Carry] = deque()
        self._backups: deque[Carry] = deque()
        self._loads: deque[Carry] = deque()
        if poison:
            self.device.own.watch(freed=lambda freed: fill_poison(self._storages, freed))

    @property
    def pending(self) -> bool:
        """Whether anything is under way."""
        return bool(self._queue or self._backups or self._loads)

    @property
    def pages(self) -> tuple[int, int, int]:
        """Own pages whose backup waits, whose backup is under way, and whose load is."""
        queued, backups, loads = (
            sum(carry.pages.size for carry in kind) for kind in (self._queue, self._backups, self._loads)
        )
        return queued, backups, loads

    @property
    def loads(self) -> Iterable[Carry]:
        """Loads that have not been acknowledged."""
        return self._loads

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
        count = whole_number("pages", count, error=PageError, consequence="no page has left")
        return self.device.evict(count - self.device.own.available)

    def take_host(self, count: int) -> IntArray:
        """Take up to `count` own host pages; the longest unused ones leave for them."""
        own = self.host.own
        self.host.evict(count - own.available)
        return own.alloc(min(count, own.available))

    def on_host(self, lead_host: IntArray) -> IntArray:
        """Own host pages whose bytes are there, 0 for others. Shape: that of `lead_host`."""
        found = self.host.find(lead_host)
        arriving = [carry.host_pages for carry in (*self._backups, *self._queue)]
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
        asked: list[Carry] = []
        try:
            after = self._streams.mark("compute")
            for start in range(0, chosen.size, self._batch_pages):
                part = slice(start, start + self._batch_pages)
                lock = self._index.lock(nodes[chosen[part]])
                self._hold(pages[part], taken[part])
                asked.append(Carry(pages[part], taken[part], lock, {}, after, nodes[chosen[part]], homes[part]))
                self._queue.append(asked[-1])
            self._submit()
        except BaseException:
            for carry in [carry for carry in self._queue if carry in asked]:
                self._queue.remove(carry)
                self._drop(carry)
            self.host.leave(homes[self.host.find(homes) == taken])
            raise

    def cancel_backups(self) -> int:
        """Give up the backups that wait; returns the number of pages. They may be asked for again."""
        count = self.pages[0]
        while self._queue:
            self._drop(self._queue.popleft())
        return count

    def load(self, pages: IntArray, host_pages: IntArray, nodes: IntArray) -> None:
        """Start to copy own host pages to own device pages, layer by layer where the movers can.

        Raises:
            Exception: What a mover or the device raised; nothing writes the pages any more.
        """
        layers: dict[int, Mark] = {}

        def move() -> None:
            if any(mover.capabilities.granularity == "page" for mover in self._movers):
                for mover in self._movers:
                    mover.load(pages, host_pages)
                return
            for layer in self.layers:
                for mover, host in zip(self._movers, self.companion.hosts, strict=True):
                    if any(layer in mirror.layer_ids for mirror in host.mirrors):
                        mover.load(pages, host_pages, layer)
                layers[layer] = self._streams.mark("load")

        lock = self._index.lock(nodes)
        try:
            mark = issue(self._streams, "load", [self._streams.mark("compute")], move)
        except BaseException:
            self._index.unlock(lock)
            raise
        self._hold(pages, host_pages)
        marks = layers or dict.fromkeys(self.layers, mark)
        self._loads.append(Carry(pages, host_pages, lock, marks, mark, nodes, nodes[:0]))

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
        self._end(lambda mark: mark.reached())
        self._submit()

    def drain(self) -> None:
        """Wait for all copies, and acknowledge them."""
        self._end(lambda mark: True)
        while self._queue:
            self._submit()
            self._end(lambda mark: True)

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
        outside = np.concatenate(
            [own[~idle], *private, *(carry.pages for carry in (*self._queue, *self._backups, *self._loads))]
        )
        return Accounting(
            available=self.device.own.available,
            evictable=int(idle.sum()),
            protected=protected.size,
            in_use=np.setdiff1d(outside, protected).size + self.device.own.lingering,
            total=self.device.own.total,
        )

    @contextmanager
    def _letting_go(self, carry: Carry) -> Iterator[None]:
        try:
            yield
        finally:
            self._index.unlock(carry.lock)
            self.device.own.release(carry.pages)
            self.host.own.release(carry.host_pages)

    def _submit(self) -> None:
        """Submit what waits for the host, as many together as the limit allows, as long as nothing is under way."""
        while self._queue and not (self._backups and not self._backups[-1].mark.reached()):
            parts = take_together(self._queue, self._batch_pages, lambda part: part.pages.size)
            pages, homes = (np.concatenate([getattr(part, name) for part in parts]) for name in ("pages", "host_pages"))
            try:
                mark = issue(self._streams, "backup", [part.mark for part in parts], partial(self._move, pages, homes))
            except BaseException:
                for part in parts:
                    self._drop(part)
                raise
            for part in parts:
                part.mark = mark
            self._backups.extend(parts)

    def _move(self, pages: IntArray, host_pages: IntArray) -> None:
        for mover in self._movers:
            mover.backup(pages, host_pages)

    def _drop(self, carry: Carry) -> None:
        """End a backup without a host copy."""
        with self._letting_go(carry):
            self._leave_host(carry)

    def _leave_host(self, carry: Carry) -> None:
        here = self.host.find(carry.lead_host) == carry.host_pages
        self.host.leave(carry.lead_host[here])

    def _hold(self, pages: IntArray, host_pages: IntArray) -> None:
        self.device.own.retain(pages)
        self.host.own.retain(host_pages)

    def _end(self, ended: Callable[[Mark], bool]) -> None:
        while self._loads and ended(self._loads[0].mark):
            carry = self._loads.popleft()
            with self._letting_go(carry):
                try:
                    carry.mark.wait_on_host()
                except BaseException as error:
                    carry.failure = error
                    named = self.device.named()
                    self.device.leave(named[np.isin(self.device.find(named), carry.pages)])
                    raise
                self.loaded += carry.pages.size
        while self._backups and ended(self._backups[0].mark):
            carry = self._backups.popleft()
            with self._letting_go(carry):
                try:
                    carry.mark.wait_on_host()
                    for canary in self.canaries:
                        canary.record(carry.host_pages)
                except BaseException:
                    self._leave_host(carry)
                    raise
                self.backed_up += carry.pages.size
                if self._on_backed_up is not None:
                    self._on_backed_up(self, carry.nodes, carry.host_pages)
