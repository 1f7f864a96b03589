"""Owns how the movers of one companion's host pools, one a kind of state, work as one. It moves nothing by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_pool.hicache.host_pool import HostPool
    from kv_pool.hicache.movers import Mover, MoverCapabilities
    from kv_pool.tables import IndexLike

__all__ = ["Together"]


class Together:
    """Movers of several host pools that have the same pages, as one mover.

    Args:
        movers: One a host pool.
        hosts: The host pools.
    """

    name = "together"

    def __init__(self, movers: Sequence[Mover], hosts: Sequence[HostPool]) -> None:
        self.movers = list(movers)
        # the coarsest decides how all of them move
        self.capabilities: MoverCapabilities = min(
            (mover.capabilities for mover in movers), key=lambda can: can.granularity == "layer_page"
        )
        self._layers = [{layer for mirror in host.mirrors for layer in mirror.layer_ids} for host in hosts]

    def backup(self, device_pages: IndexLike, host_pages: IndexLike) -> None:
        """See `Mover.backup`."""
        for mover in self.movers:
            mover.backup(device_pages, host_pages)

    def load(self, device_pages: IndexLike, host_pages: IndexLike, layer_id: int | None = None) -> None:
        """See `Mover.load`; those that do not have the layer have nothing to do."""
        for mover, layers in zip(self.movers, self._layers, strict=True):
            if layer_id is None or layer_id in layers:
                mover.load(device_pages, host_pages, layer_id)
