"""Owns the records of copies that are under way. It does not start or end them (see `_copies`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kv_planner import PrefixLock

    from kv_pool.hicache.streams import Mark
    from kv_pool.tables import IntArray

__all__ = ["Backup", "Load"]


@dataclass(frozen=True)
class Backup:
    """Device pages on their way to the host.

    Attributes:
        nodes: Index nodes, parents first.
        host_pages: Where they go; nobody else's until they are acknowledged.
        lock: Keeps the device pages.
        mark: End of the copies.
    """

    nodes: IntArray
    host_pages: IntArray
    lock: PrefixLock
    mark: Mark


@dataclass(frozen=True)
class Load:
    """Host pages on their way to the device.

    Attributes:
        device_pages: Where they go; the load is one of their holders.
        lock: Keeps the host pages.
        layers: Mark of each layer's arrival, by global layer id.
        mark: End of the copies.
    """

    device_pages: IntArray
    lock: PrefixLock
    layers: Mapping[int, Mark]
    mark: Mark
