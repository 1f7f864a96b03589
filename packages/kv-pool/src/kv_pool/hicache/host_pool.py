"""Owns the host memory that mirrors a device pool, and the pages of it.

Every component of the device pool gets storage of its own with its own width, target and draft parts alike; a
component that cannot be mirrored is an error at construction. It does not move bytes (see `movers`) and does not know
which tokens lie in which page (see `controller`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

import torch

from kv_pool._arguments import check_kind, check_word
from kv_pool.allocator import PageAllocator
from kv_pool.errors import HostPoolError, KvPoolError, UnmirroredComponent
from kv_pool.host_memory import zeroed_host_bytes
from kv_pool.tables import INT32_MAX, shown, whole_number

if TYPE_CHECKING:
    from kv_planner import Component, RankManifest
    from kv_planner import Part as PartName

__all__ = ["ALIGNMENT", "HOST_LAYOUTS", "HostLayout", "HostPool", "Mirror", "MirroredPool"]

HostLayout: TypeAlias = Literal["layer_first", "page_first", "page_first_direct"]
HOST_LAYOUTS: tuple[HostLayout, ...] = ("layer_first", "page_first", "page_first_direct")
ALIGNMENT = 65536
"""Bytes: transfer engines register host memory in pieces of this size."""


@runtime_checkable
class MirroredPool(Protocol):
    """What a host pool needs to know of a device pool; every `kv_pool.Pool` is one."""

    @property
    def page_size(self) -> int:
        """Tokens in a page."""

    @property
    def num_pages(self) -> int:
        """Pages, the reserved page 0 included."""

    @property
    def device(self) -> torch.device:
        """Where the memory lies."""

    def manifest(self) -> RankManifest:
        """Every buffer by name."""

    @property
    def components(self) -> Sequence[tuple[Component, PartName]]:
        """Every component of every part that has storage."""

    def layers(self, component: Component, part: PartName = "target") -> Sequence[torch.Tensor]:
        """A component layer by layer. Shape of each: [num_pages, page_size, heads, dims]; contiguous."""

    def layer_ids(self, part: PartName = "target", component: Component | None = None) -> tuple[int, ...]:
        """Global layer ids of a part, or of one component of it, in storage order."""


@dataclass(frozen=True)
class Mirror:
    """One component of one part, on both sides.

    Attributes:
        component: Which component.
        part: Which part.
        layer_ids: Global layer ids, in the order of the layer axes.
        layers: Device memory, a tensor a layer. Shape of each: [device pages, page_size, heads, dims]; contiguous.
        parent: The same memory in one tensor, where it lies so; see `device`.
        storage: The host memory as its layout spells it; contiguous.
        host: The same memory as [host pages, layers, page_size, heads, dims], whatever the layout.
    """

    component: Component
    part: PartName
    layer_ids: tuple[int, ...]
    layers: tuple[torch.Tensor, ...]
    parent: torch.Tensor | None
    storage: torch.Tensor
    host: torch.Tensor

    @property
    def device(self) -> torch.Tensor:
        """Device memory over all layers. Shape: [layers, device pages, page_size, heads, dims]; contiguous.

        Raises:
            UnmirroredComponent: The layers do not lie in one tensor (adopted storage); take `layers`.
        """
        if self.parent is None:
            what = "layers in tensors of their own"
            raise _unmirrored(self.component, self.part, self.layer_ids, what)
        return self.parent

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.host[0].numel() * self.host.element_size()


class HostPool:
    """Host pages that hold every byte that a device page holds.

    Invariants:

    1. Each component, part and layer of the device pool's manifest has exactly one mirror; nothing else has.
    2. Each mirror starts at a multiple of 64 KiB and owns a whole number of 64 KiB pieces.
    3. Page 0 is reserved here too; `pages` come on top.

    Args:
        pool: The device pool.
        pages: Host pages that can be used.
        layout: `layer_first` is [layers, slots, heads, dims]; `page_first` is [slots, layers, heads, dims];
            `page_first_direct` is [pages, layers, page_size, heads, dims]: a page is one contiguous piece.
        pin: Whether the memory is page-locked, so that copies run beside the host; `"auto"`: when the device is no CPU.

    Raises:
        HostPoolError: Fewer than one page, an unknown layout, or pinned memory for a CPU.
        UnmirroredComponent: A buffer of the manifest is not where `pool.layers` says, or storage that no manifest entry
            names.
    """

    def __init__(
        self,
        pool: MirroredPool,
        *,
        pages: int,
        layout: HostLayout = "page_first_direct",
        pin: bool | Literal["auto"] = "auto",
    ) -> None:
        check_kind("pool", pool, MirroredPool, HostPoolError)  # type: ignore[type-abstract]
        consequence = "nothing could be kept on the host"
        most = INT32_MAX - 1
        pages = whole_number("pages", pages, least=1, most=most, error=HostPoolError, consequence=consequence)
        check_word("layout", layout, HOST_LAYOUTS, HostPoolError)
        if not (isinstance(pin, bool) or (isinstance(pin, str) and pin == "auto")) or (
            pin is True and pool.device.type == "cpu"
        ):
            raise HostPoolError(
                "pin",
                given=shown(pin),
                expected="auto, True or False; not True for a pool on the CPU",
                consequence="page-locked memory serves the copies of an accelerator only",
                remedy="leave it at auto",
            )
        self._pool = pool
        self._layout: HostLayout = layout
        self._pinned = pool.device.type != "cpu" if pin == "auto" else pin
        self._allocator = PageAllocator(pages + 1, pool.page_size)
        self._mirrors = tuple(
            _mirror(pool, component, part, layer_ids, pages + 1, layout, self._pinned)
            for (component, part), layer_ids in _declared(pool).items()
        )

    @property
    def pool(self) -> MirroredPool:
        """The device pool that this one mirrors."""
        return self._pool

    @property
    def layout(self) -> HostLayout:
        """Order of the axes."""
        return self._layout

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked."""
        return self._pinned

    @property
    def allocator(self) -> PageAllocator:
        """Which host pages are free; page 0 never is."""
        return self._allocator

    @property
    def page_size(self) -> int:
        """Tokens in a page: that of the device pool."""
        return self._pool.page_size

    @property
    def num_pages(self) -> int:
        """Host pages, the reserved page 0 included."""
        return self._allocator.num_pages

    @property
    def mirrors(self) -> tuple[Mirror, ...]:
        """Every component of every part, in the manifest's order."""
        return self._mirrors

    @property
    def page_bytes(self) -> int:
        """Bytes that a page has over all components and layers."""
        return sum(mirror.page_bytes for mirror in self._mirrors)

    @property
    def nbytes(self) -> int:
        """Bytes of all host memory, each piece rounded up to 64 KiB."""
        return sum(_round_up(mirror.storage.nbytes) for mirror in self._mirrors)

    def mirror(self, component: Component, part: PartName = "target") -> Mirror:
        """Return one component.

        Raises:
            UnmirroredComponent: The pool has no such component.
        """
        for mirror in self._mirrors:
            if (
                isinstance(component, str)
                and isinstance(part, str)
                and (mirror.component, mirror.part) == (component, part)
            ):
                return mirror
        raise UnmirroredComponent(
            "component, part",
            given=(component, part),
            expected=f"one of {[(mirror.component, mirror.part) for mirror in self._mirrors]}",
            consequence="the host holds no such bytes",
            remedy="ask for a component of the device pool",
        )


def _declared(pool: MirroredPool) -> Mapping[tuple[Component, PartName], tuple[int, ...]]:
    """What the manifest declares, each buffer proved to be the layer of the storage that it should be."""
    declared: dict[tuple[Component, PartName], tuple[int, ...]] = {}
    for entry in pool.manifest().entries:
        layers = declared.get((entry.component, entry.part), ())
        try:
            ids = pool.layer_ids(entry.part, entry.component)
            layer = pool.layers(entry.component, entry.part)[ids.index(entry.layer_id)]
        except (KvPoolError, LookupError, ValueError) as error:
            raise _unmirrored(entry.component, entry.part, entry.layer_id, "no storage") from error
        if layer.data_ptr() != entry.address or entry.layer_id in layers or not layer.is_contiguous():
            raise _unmirrored(entry.component, entry.part, entry.layer_id, "storage elsewhere")
        declared[entry.component, entry.part] = (*layers, entry.layer_id)
    for component, part in pool.components:
        held = pool.layer_ids(part, component)
        if set(declared.get((component, part), ())) != set(held):
            raise _unmirrored(component, part, held, "storage without a manifest entry")
    return {(component, part): pool.layer_ids(part, component) for component, part in declared}


def _unmirrored(component: str, part: str, layer: object, what: str) -> UnmirroredComponent:
    return UnmirroredComponent(
        "pool",
        given=f"{component} of part {part}, layer {layer}: {what}",
        expected="every buffer of the manifest in pool.layers(component, part), and all layers in the manifest",
        consequence="a page that comes back from the host would lack it",
        remedy="let the pool publish and hand out the storage of all its components",
    )


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _aligned(nbytes: int, pinned: bool) -> torch.Tensor:
    """Zeroed bytes at a multiple of 64 KiB, with room up to the next one. Shape: [nbytes]; dtype uint8."""
    return zeroed_host_bytes(_round_up(nbytes), ALIGNMENT, pinned=pinned)[:nbytes]


def _mirror(
    pool: MirroredPool,
    component: Component,
    part: PartName,
    layer_ids: tuple[int, ...],
    pages: int,
    layout: HostLayout,
    pinned: bool,
) -> Mirror:
    tensors = tuple(pool.layers(component, part))
    layers, (_, page_size, heads, dims), dtype = len(tensors), tensors[0].shape, tensors[0].dtype
    shape, order = {
        "layer_first": ((layers, pages, page_size, heads, dims), (1, 0, 2, 3, 4)),
        "page_first": ((pages, page_size, layers, heads, dims), (0, 2, 1, 3, 4)),
        "page_first_direct": ((pages, layers, page_size, heads, dims), (0, 1, 2, 3, 4)),
    }[layout]
    count = layers * pages * page_size * heads * dims
    memory = _aligned(count * dtype.itemsize, pinned).view(dtype).view(shape)
    flat = {
        "layer_first": (layers, pages * page_size, heads, dims),
        "page_first": (pages * page_size, layers, heads, dims),
        "page_first_direct": shape,
    }[layout]
    return Mirror(component, part, layer_ids, tensors, _joined(tensors), memory.view(flat), memory.permute(order))


def _joined(layers: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    """The layers as one tensor without a copy, if they follow one another in one storage."""
    first, step = layers[0], layers[0].numel()
    for number, layer in enumerate(layers):
        alike = layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not alike or layer.storage_offset() != first.storage_offset() + number * step:
            return None
    strides = (step, *first.stride())
    return first.as_strided((len(layers), *first.shape), strides, first.storage_offset())
