"""Owns what a cache tells of itself: its parts, what it has done, what is under way, who holds the pages of each pool.

It changes nothing (see `controller`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kv_pool.hicache._inflight import UnderWay
from kv_pool.hicache.accounting import Accounting, CacheCounters, CompanionCounters

if TYPE_CHECKING:
    from kv_planner import PrefixIndex

    from kv_pool.hicache._copies import Copies
    from kv_pool.hicache._device import DevicePages
    from kv_pool.hicache._group import Group
    from kv_pool.hicache._levels import Levels
    from kv_pool.hicache._parts import WritePolicy
    from kv_pool.hicache.acquired import Acquired
    from kv_pool.hicache.companion import Companion
    from kv_pool.hicache.host_pool import HostPool
    from kv_pool.hicache.movers import Mover
    from kv_pool.hicache.storage import StorageTier
    from kv_pool.hicache.storage.companions import CompanionStorage

__all__ = ["CacheReports"]


class CacheReports:
    """What `HiCacheController` is made of, to look at."""

    _host: HostPool
    _policy: WritePolicy
    _mover: Mover
    _index: PrefixIndex
    _device: DevicePages
    _copies: Copies
    _group: Group
    _levels: Levels
    _storage: StorageTier | None
    _companion_storage: CompanionStorage | None
    _open: dict[int, Acquired]
    _count: dict[str, int]

    @property
    def policy(self) -> WritePolicy:
        """When pages get their host copy."""
        return self._policy

    @property
    def mover(self) -> Mover:
        """What moves the bytes."""
        return self._mover

    @property
    def host(self) -> HostPool:
        """The host pool."""
        return self._host

    @property
    def companions(self) -> tuple[Companion, ...]:
        """The companions, in the order of construction."""
        return tuple(member.companion for member in self._group)

    @property
    def companion_storage(self) -> CompanionStorage | None:
        """The third level of the companions; `None` without companions or without a third level."""
        return self._companion_storage

    @property
    def counters(self) -> CacheCounters:
        """What the cache has done so far."""
        companions = {
            "companion_loaded_pages": sum(member.counts["loaded_pages"] for member in self._group),
            "companion_backed_up_pages": sum(member.counts["backed_up_pages"] for member in self._group),
        }
        return CacheCounters(**self._count | self._levels.counts | companions)

    def companion_counters(self, companion: str) -> CompanionCounters:
        """What the cache has done with the pages of a companion so far.

        Raises:
            CacheError: There is no such companion.
        """
        return CompanionCounters(**self._group.member(companion).counts)

    @property
    def under_way(self) -> UnderWay:
        """Pages that wait or travel between the levels at this moment, companions' among them."""
        own = self._copies.under_way if self._storage is None else self._copies.under_way + self._storage.under_way
        return sum((self.companion_under_way(companion.name) for companion in self.companions), own)

    def companion_under_way(self, companion: str) -> UnderWay:
        """Pages of a companion that wait or travel between the levels at this moment.

        Raises:
            CacheError: There is no such companion.
        """
        between, storage = self._group.member(companion).under_way, self._companion_storage
        return between if storage is None else between + storage.under_way(companion)

    @property
    def pending(self) -> bool:
        """Whether anything is under way between the levels."""
        return self._levels.pending

    def accounting(self, companion: str | None = None) -> Accounting:
        """Count who holds the device pages of the cache's own pool, or those of a companion.

        Raises:
            IntegrityError: The numbers do not add up to the pool.
            CacheError: There is no such companion.
        """
        of_index = self._levels.of_index
        if companion is not None:
            member = self._group.member(companion)
            shares = [share for handle in self._open.values() for share in handle._shares]
            mine = [share for share in shares if share.member.companion.name == companion]
            held = [pages for share in mine for pages in (share.device, share.private)]
            return member.accounting(of_index, held)
        counts = self._index.counts().device
        held = [acquired.pages[acquired._owned] for acquired in self._open.values()]
        outside = np.setdiff1d(np.concatenate([np.zeros(0, np.int64), *held]), of_index)
        return Accounting(
            available=self._device.available,
            evictable=counts.evictable,
            protected=counts.protected,
            in_use=outside.size + self._device.lingering,
            total=self._device.total,
        )
