"""Owns the second level of the cache: host memory that mirrors a device pool, and what moves pages between both.

Start at `HiCacheController`. A third level (`storage`) keeps pages beyond the host. It does not own the device
pool. Importing it imports torch and kv_planner alone.
"""

from __future__ import annotations

from kv_pool.hicache._inflight import CopyLimits, UnderWay
from kv_pool.hicache._parts import WritePolicy
from kv_pool.hicache.accounting import Accounting, CacheCounters, CompanionCounters
from kv_pool.hicache.acquired import Acquired, Namespace
from kv_pool.hicache.canary import Canary
from kv_pool.hicache.companion import Companion, Coverage
from kv_pool.hicache.controller import HiCacheController
from kv_pool.hicache.host_pool import ALIGNMENT, HOST_LAYOUTS, HostLayout, HostPool, Mirror, MirroredPool
from kv_pool.hicache.metrics import CacheMetrics
from kv_pool.hicache.movers import Mover, MoverCapabilities, MoverName, create_mover, mover_names, whole_pages
from kv_pool.hicache.ranks import HitAgreement, owner_rank
from kv_pool.hicache.storage import (
    Closes,
    FileStorage,
    PageStorage,
    Prefetch,
    RegistersMemory,
    Removes,
    StorageCounters,
    StorageIdentity,
    StorageTier,
    create_storage,
    page_keys,
)
from kv_pool.hicache.storage.companions import CompanionPrefetch, CompanionStorage
from kv_pool.hicache.streams import ImmediateStreams, Lane, Mark, Streams, create_streams

__all__ = [
    "ALIGNMENT",
    "HOST_LAYOUTS",
    "Accounting",
    "Acquired",
    "CacheCounters",
    "CacheMetrics",
    "Canary",
    "Closes",
    "Companion",
    "CompanionCounters",
    "CompanionPrefetch",
    "CompanionStorage",
    "CopyLimits",
    "Coverage",
    "FileStorage",
    "HiCacheController",
    "HitAgreement",
    "HostLayout",
    "HostPool",
    "ImmediateStreams",
    "Lane",
    "Mark",
    "Mirror",
    "MirroredPool",
    "Mover",
    "MoverCapabilities",
    "MoverName",
    "Namespace",
    "PageStorage",
    "Prefetch",
    "RegistersMemory",
    "Removes",
    "StorageCounters",
    "StorageIdentity",
    "StorageTier",
    "Streams",
    "UnderWay",
    "WritePolicy",
    "create_mover",
    "create_storage",
    "create_streams",
    "mover_names",
    "owner_rank",
    "page_keys",
    "whole_pages",
]
