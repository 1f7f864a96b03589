"""Owns the choice of how pages travel between device and host: `create_mover`, once, at construction.

Each mover is one class in one module; those that need an operator of an NPU library live under `npu/`, imported only
when chosen. It does not own order: a mover issues its copies on the stream that is current when it is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Literal, Protocol, TypeAlias, cast, runtime_checkable

from kv_pool._arguments import check_kind, check_word
from kv_pool.errors import UnsupportedMover
from kv_pool.hicache.host_pool import HOST_LAYOUTS, HostLayout, HostPool
from kv_pool.hicache.movers._checks import whole_pages
from kv_pool.tables import IndexLike, whole_number

__all__ = ["Mover", "MoverCapabilities", "MoverName", "create_mover", "mover_names", "whole_pages"]

_MOST_THREADS = 1024
MoverName: TypeAlias = Literal["auto", "dim_exchange", "indexed"]


@dataclass(frozen=True)
class MoverCapabilities:
    """What a mover can do, declared before one is made.

    Attributes:
        layouts: Host layouts that it serves.
        devices: Device types that it serves; `None` is any.
        granularity: Smallest thing that it moves: a whole page of one layer, or a whole page of all layers.
        one_tensor: Whether it needs all layers of a component in one device tensor.
    """

    layouts: frozenset[HostLayout]
    devices: frozenset[str] | None
    granularity: Literal["layer_page", "page"]
    one_tensor: bool = False

    def supports(self, layout: HostLayout, device_type: str) -> bool:
        """Whether it serves a host layout on a device type."""
        return layout in self.layouts and (self.devices is None or device_type in self.devices)


@runtime_checkable
class Mover(Protocol):
    """Copies whole pages of every component between one device pool and its host pool.

    Attributes:
        name: Name under which it is chosen.
        capabilities: What it can do.
    """

    name: str
    capabilities: MoverCapabilities

    def backup(self, device_pages: IndexLike, host_pages: IndexLike) -> None:
        """Copy device pages to host pages, all components and layers.

        Args:
            device_pages: Page ids. Shape: [pages]; any integer dtype.
            host_pages: Where each goes. Shape: [pages].

        Raises:
            MoveRefused: Lists of unequal length, a page that is reserved, outside its pool or named twice. Nothing
                was moved.
        """

    def load(self, device_pages: IndexLike, host_pages: IndexLike, layer_id: int | None = None) -> None:
        """Copy host pages to device pages.

        Args:
            device_pages: Where each goes. Shape: [pages]; any integer dtype.
            host_pages: Page ids. Shape: [pages].
            layer_id: One global layer id, over all components and parts that have it; `None` is all layers.

        Raises:
            MoveRefused: As `backup`; or one layer was asked of a mover whose granularity is `page`, or a layer that no
                part has.
        """


_MOVERS: dict[str, tuple[MoverCapabilities, str]] = {
    "dim_exchange": (
        MoverCapabilities(frozenset({"page_first_direct"}), frozenset({"npu"}), "page", one_tensor=True),
        "kv_pool.hicache.movers.npu.dim_exchange:DimExchangeMover",
    ),
    "indexed": (
        MoverCapabilities(frozenset(HOST_LAYOUTS), None, "layer_page"),
        "kv_pool.hicache.movers.indexed:IndexedMover",
    ),
}


def mover_names(layout: HostLayout, device_type: str) -> tuple[str, ...]:
    """Return the movers that serve a host layout on a device type, the preferred one first.

    Raises:
        UnsupportedMover: No layout of host memory, or no text.
    """
    check_word("layout", layout, HOST_LAYOUTS, UnsupportedMover)
    check_kind("device_type", device_type, str, UnsupportedMover)
    return tuple(name for name, (can, _) in _MOVERS.items() if can.supports(layout, device_type))


def create_mover(name: MoverName, host: HostPool, *, threads: int = 1) -> Mover:
    """Create the mover `name` for a host pool and the device pool that it mirrors.

    Args:
        name: A mover, or `"auto"`: the first of `mover_names` that serves the pool's storage.
        host: The host pool.
        threads: Threads that copy in host memory, the caller's among them; a pool on a device needs no more than one.

    Raises:
        UnsupportedMover: No such mover, it does not serve the layout on the device, or its operator is missing.
    """
    check_kind("mover", name, str, UnsupportedMover)
    threads = whole_number(
        "threads", threads, least=1, most=_MOST_THREADS, error=UnsupportedMover, consequence="nothing would be copied"
    )
    device = check_kind("host", host, HostPool, UnsupportedMover).pool.device.type
    scattered = any(mirror.parent is None for mirror in host.mirrors)
    eligible = tuple(
        known for known in mover_names(host.layout, device) if not (scattered and _MOVERS[known][0].one_tensor)
    )
    chosen = eligible[0] if name == "auto" and eligible else name
    if chosen not in eligible:
        raise UnsupportedMover(
            "mover",
            given=f"{name} for layout {host.layout} on {device}{', a tensor a layer' if scattered else ''}",
            expected=f"auto or one of {list(eligible)}",
            consequence="the first copy would fail when the first request ends",
            remedy="choose another mover, or the host layout that it serves",
        )
    capabilities, place = _MOVERS[chosen]
    module, _, attribute = place.partition(":")
    if threads > 1 and device != "cpu":
        raise UnsupportedMover(
            "threads",
            given=f"{threads} on {device}",
            expected="1 on a device, whose copies are its streams' work",
            consequence="copies would be issued to another thread's stream",
            remedy="leave it at 1",
        )
    options = {"threads": threads} if threads > 1 else {}
    return cast(Mover, getattr(import_module(module), attribute)(host, capabilities, **options))
