"""Owns the mover that any device and any host layout can use: plain torch and numpy copies, layer by layer.

On a CPU a layer is one fancy assignment over rows of wide integers. On a device every page of a layer is one
non-blocking copy, so that the copies are the stream's own work. It does not own checks (see `_checks`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kv_pool.hicache.movers._checks import check_layer, check_pages

if TYPE_CHECKING:
    from kv_pool.hicache.host_pool import HostPool, Mirror
    from kv_pool.hicache.movers import MoverCapabilities
    from kv_pool.tables import IndexLike, IntArray

__all__ = ["IndexedMover"]

_WIDE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Rows = npt.NDArray[np.signedinteger[Any]]


class IndexedMover:
    """Moves page by page of one layer; can load a single layer."""

    name = "indexed"

    def __init__(self, host: HostPool, capabilities: MoverCapabilities) -> None:
        self.capabilities = capabilities
        self._mirrors = host.mirrors
        self._limits = {"num_device": host.pool.num_pages, "num_host": host.num_pages}
        self._layers = frozenset(layer for mirror in host.mirrors for layer in mirror.layer_ids)
        on_host = host.pool.device.type == "cpu"
        self._rows = [_rows(mirror) for mirror in host.mirrors] if on_host else None

    def backup(self, device_pages: IndexLike, host_pages: IndexLike) -> None:
        """See `Mover.backup`."""
        device, host = check_pages(device_pages, host_pages, **self._limits)
        for number, mirror in enumerate(self._mirrors):
            for layer in range(len(mirror.layer_ids)):
                self._copy(number, layer, device, host, to_host=True)

    def load(self, device_pages: IndexLike, host_pages: IndexLike, layer_id: int | None = None) -> None:
        """See `Mover.load`."""
        device, host = check_pages(device_pages, host_pages, **self._limits)
        if layer_id is not None:
            check_layer(layer_id, self._layers)
        for number, mirror in enumerate(self._mirrors):
            for layer, held in enumerate(mirror.layer_ids):
                if layer_id is None or held == layer_id:
                    self._copy(number, layer, device, host, to_host=False)

    def _copy(self, number: int, layer: int, device: IntArray, host: IntArray, *, to_host: bool) -> None:
        if self._rows is not None:
            device_rows, host_rows = self._rows[number]
            if to_host:
                host_rows[host, layer] = device_rows[layer, device]
            else:
                device_rows[layer, device] = host_rows[host, layer]
            return
        mirror = self._mirrors[number]
        for device_page, host_page in zip(device.tolist(), host.tolist(), strict=True):
            near, far = mirror.host[host_page, layer], mirror.device[layer, device_page]
            if to_host:
                near.copy_(far, non_blocking=True)
            else:
                far.copy_(near, non_blocking=True)


def _rows(mirror: Mirror) -> tuple[Rows, Rows]:
    """Both sides with one integer type for all bits, as wide as a token's row allows.

    Returns:
        Device rows of shape [layers, pages, page_size, words], host rows of shape [pages, layers, page_size, words].
    """
    layers, pages, page_size, heads, dims = mirror.device.shape
    wide = _WIDE[math.gcd(heads * dims * mirror.device.element_size(), 8)]
    device = mirror.device.view(layers, pages, page_size, heads * dims).view(wide).numpy()
    host = mirror.host.flatten(3).view(wide).numpy()
    return device, host
