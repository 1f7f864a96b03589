"""Owns the mover over `torch.ops.npu.transfer_kv_dim_exchange`: one two-dimensional copy a page and component.

The operator belongs to the library sgl_kernel_npu, which is loaded here when nobody has registered the operator before.
It does not check page ids or alignment in all of its versions, so everything is checked before the call.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch_npu  # noqa: F401

from kv_pool.errors import MoveRefused, UnsupportedMover
from kv_pool.hicache.movers._checks import check_pages

if TYPE_CHECKING:
    from kv_planner import Component

    from kv_pool.hicache.host_pool import HostPool, Mirror
    from kv_pool.hicache.movers import MoverCapabilities
    from kv_pool.tables import IndexLike, IntArray

__all__ = ["DimExchangeMover"]

_HOST_TO_DEVICE, _DEVICE_TO_HOST, _TWO_DIMENSIONAL = 1, 2, 2
_PARTNERS: dict[Component, Component] = {"key": "value", "latent": "rope"}
_ARGUMENTS = (
    "device_k", "host_k", "device_v", "host_v", "device_indices", "host_indices", "page_size", "direct", "flags",
)  # fmt: skip


class DimExchangeMover:
    """Moves pages of all layers at once; a single layer is refused.

    One call moves two components of one part that belong together (key and value, latent and rope), each with its own
    width. The operator takes heads and item size from its first tensor alone, so components that differ in either go
    in calls of their own, and so does every other component.

    Raises:
        UnsupportedMover: The operator is not there, or has other arguments.

    Source: op of that name in sgl-kernel-npu.
    """

    name = "dim_exchange"

    def __init__(self, host: HostPool, capabilities: MoverCapabilities) -> None:
        self.capabilities = capabilities
        self._call = _operator()
        self._page_size = host.page_size
        self._limits = {"num_device": host.pool.num_pages, "num_host": host.num_pages}
        self._calls = _pairs(host.mirrors)

    def backup(self, device_pages: IndexLike, host_pages: IndexLike) -> None:
        """See `Mover.backup`."""
        self._move(*check_pages(device_pages, host_pages, **self._limits), _DEVICE_TO_HOST)

    def load(self, device_pages: IndexLike, host_pages: IndexLike, layer_id: int | None = None) -> None:
        """See `Mover.load`."""
        device, host = check_pages(device_pages, host_pages, **self._limits)
        if layer_id is not None:
            raise MoveRefused(
                "layer_id",
                given=layer_id,
                expected="None",
                consequence="the operator moves all layers of a page, so each layer would move all of them again",
                remedy="load all layers at once, or use the indexed mover",
            )
        self._move(device, host, _HOST_TO_DEVICE)

    def _move(self, device: IntArray, host: IntArray, direct: int) -> None:
        if not device.size:
            return
        device_slots, host_slots = self._slots(device), self._slots(host)
        for tensors in self._calls:
            self._call(*tensors, device_slots, host_slots, self._page_size, direct, _TWO_DIMENSIONAL)

    def _slots(self, pages: IntArray) -> torch.Tensor:
        return torch.from_numpy((pages[:, None] * self._page_size + np.arange(self._page_size)).reshape(-1))


def _pairs(mirrors: tuple[Mirror, ...]) -> list[tuple[torch.Tensor, ...]]:
    """The tensors of each call: two components of a part where they agree in heads and item size, others alone."""
    calls: list[tuple[torch.Tensor, ...]] = []
    waiting = {(mirror.component, mirror.part): mirror for mirror in mirrors}
    for mirror in mirrors:
        if waiting.pop((mirror.component, mirror.part), None) is None:
            continue
        partner = _PARTNERS.get(mirror.component)
        second = waiting.get((partner, mirror.part)) if partner is not None else None
        if second is not None and _alike(mirror, second):
            del waiting[second.component, second.part]
            calls.append((mirror.device, mirror.host, second.device, second.host))
        else:
            calls.append((mirror.device, mirror.host, *_nothing(mirror)))
    return calls


def _alike(key: Mirror, value: Mirror) -> bool:
    return key.device.shape[:4] == value.device.shape[:4] and key.device.element_size() == value.device.element_size()


def _nothing(mirror: Mirror) -> tuple[torch.Tensor, torch.Tensor]:
    """An absent V: empty, yet of five axes, because the operator reads the last one."""
    return mirror.device[:, :0], mirror.host[:0]


def _find() -> Any:
    try:
        return torch.ops.npu.transfer_kv_dim_exchange.default
    except AttributeError:
        return None


def _operator() -> Any:
    overload = _find()
    if overload is None:
        try:
            import_module("sgl_kernel_npu")
        except ImportError as error:
            raise _missing("no such operator, and sgl_kernel_npu is not installed") from error
        overload = _find()
    if overload is None:
        raise _missing("no such operator in this version of sgl_kernel_npu")
    arguments = overload._schema.arguments
    names = tuple(argument.name for argument in arguments)
    if names[: len(_ARGUMENTS)] != _ARGUMENTS or not all(
        argument.has_default_value() for argument in arguments[len(_ARGUMENTS) :]
    ):
        raise _missing(f"an operator with the arguments {names}")
    return overload


def _missing(given: str) -> UnsupportedMover:
    return UnsupportedMover(
        "mover",
        given=given,
        expected=f"torch.ops.npu.transfer_kv_dim_exchange{_ARGUMENTS}",
        consequence="pages could not be moved",
        remedy="install a version of sgl_kernel_npu that has it, or use the indexed mover",
    )
