"""Owns the mover that any device and any host layout can use: plain torch and numpy copies, layer by layer.

On a CPU a page of a layer is one copy of wide integers between two rows: unlike fancy assignment, which gathers into a
temporary first, it touches every byte once. On a device every page of a layer is one non-blocking copy, so that the
copies are the stream's own work. It does not own checks (see `_checks`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
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

    def __init__(self, host: HostPool, capabilities: MoverCapabilities, *, threads: int = 1) -> None:
        self.capabilities = capabilities
        self._mirrors = host.mirrors
        self._limits = {"num_device": host.pool.num_pages, "num_host": host.num_pages}
        self._layers = frozenset(layer for mirror in host.mirrors for layer in mirror.layer_ids)
        on_host = host.pool.device.type == "cpu"
        self._rows = [_rows(mirror) for mirror in host.mirrors] if on_host else None
        self._threads = threads
        self._others = ThreadPoolExecutor(threads - 1, "kv-pool-mover") if threads > 1 else None

    def backup(self, device_pages: IndexLike, host_pages: IndexLike) -> None:
        """See `Mover.backup`."""
        device, host = check_pages(device_pages, host_pages, **self._limits)
        self._move(device, host, None, to_host=True)

    def load(self, device_pages: IndexLike, host_pages: IndexLike, layer_id: int | None = None) -> None:
        """See `Mover.load`."""
        device, host = check_pages(device_pages, host_pages, **self._limits)
        if layer_id is not None:
            check_layer(layer_id, self._layers)
        self._move(device, host, layer_id, to_host=False)

    def _move(self, device: IntArray, host: IntArray, layer_id: int | None, *, to_host: bool) -> None:
        chosen = [
            (number, position)
            for number, mirror in enumerate(self._mirrors)
            for position, held in enumerate(mirror.layer_ids)
            if layer_id is None or held == layer_id
        ]
        if self._rows is not None:
            order = np.argsort(host if to_host else device)  # written in the order of addresses
            device, host = device[order], host[order]
        if self._others is None:
            self._copy(chosen, device.tolist(), host.tolist(), to_host)
            return
        bounds = np.linspace(0, len(device), self._threads + 1).astype(int).tolist()
        shares = [(device[a:b].tolist(), host[a:b].tolist()) for a, b in pairwise(bounds)]
        others = [self._others.submit(self._copy, chosen, *share, to_host) for share in shares[1:]]
        try:
            self._copy(chosen, *shares[0], to_host)
        finally:
            wait(others)
        for other in others:
            other.result()

    def _copy(self, chosen: Sequence[tuple[int, int]], device: list[int], host: list[int], to_host: bool) -> None:
        for number, layer in chosen:
            if self._rows is not None:
                far, near = (rows[layer] for rows in self._rows[number])
                if to_host:
                    for device_page, host_page in zip(device, host, strict=True):
                        near[host_page] = far[device_page]
                else:
                    for device_page, host_page in zip(device, host, strict=True):
                        far[device_page] = near[host_page]
                continue
            mirror = self._mirrors[number]
            for device_page, host_page in zip(device, host, strict=True):
                if to_host:
                    mirror.host[host_page, layer].copy_(mirror.layers[layer][device_page], non_blocking=True)
                else:
                    mirror.layers[layer][device_page].copy_(mirror.host[host_page, layer], non_blocking=True)


def _rows(mirror: Mirror) -> tuple[list[Rows], list[Rows]]:
    """Both sides with one integer type for all bits, as wide as a token's row allows.

    Returns:
        Device and host rows, an array a layer. Shape of each: [pages, words], where a page is one piece on both sides;
        [pages, page_size, words] where the host keeps a token's layers together.
    """
    pages, page_size, heads, dims = mirror.layers[0].shape
    size = mirror.layers[0].element_size()
    wide = _WIDE[math.gcd(heads * dims * size, 8)]
    device = [layer.view(pages, page_size, heads * dims).view(wide).numpy() for layer in mirror.layers]
    host = list(mirror.host.flatten(3).view(wide).numpy().swapaxes(0, 1))
    if all(rows[0].flags.c_contiguous for rows in host):
        device = [rows.reshape(pages, -1) for rows in device]
        host = [rows.reshape(len(rows), -1) for rows in host]  # a view: a page is one piece
    return device, host
