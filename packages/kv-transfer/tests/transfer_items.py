"""Pages and rows of one rank with several groups: who holds them, and stamps of the room that they are computed for."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

import kv_planner as kp
import numpy as np
import numpy.typing as npt
from transfer_image import Image

from kv_transfer.engines.loopback import LoopbackEngine
from kv_transfer.groups import Groups

ITEMS = 9
WINDOW = 2
GARBAGE = 0x11  # of source pages that are not computed, or free again
FULL = kp.ModelLayout(
    [
        kp.ComponentSpec("key", layer_ids=[0, 2], dtype="uint8", total_heads=1, dims=2),
        kp.ComponentSpec("value", layer_ids=[0, 2], dtype="uint8", total_heads=1, dims=1),
        kp.ComponentSpec(
            "state", layer_ids=[1, 3], dtype="uint8", total_heads=2, dims=2, item_kind="request_row", rows=2
        ),
    ],
    page_size=1,
    fingerprint="full",
)
SLIDING = kp.ModelLayout(
    [kp.ComponentSpec(kind, layer_ids=[4, 5], dtype="uint8", total_heads=1, dims=1) for kind in ("key", "value")],
    page_size=1,
    fingerprint="sliding",
)
LAYOUTS = {"full": FULL, "sliding": SLIDING}
LAYERS: tuple[tuple[int, ...], ...] = ((0, 1, 4), (2, 3, 5))
Name = tuple[str, str, int]  # group, component, layer
Kind = tuple[str, kp.ItemKind]
KINDS: tuple[Kind, ...] = (("full", "page"), ("sliding", "page"), ("full", "request_row"))


def stamp(life: int, generation: int, name: Name, index: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """What item `index` of a request holds in one buffer; never `EMPTY` or `GARBAGE`."""
    seed = zlib.crc32(repr((life, generation, name, index)).encode())
    return ((seed + np.arange(nbytes) * 7) % 0x0F + 0x20 + (seed >> 8) % 0xA0).astype(np.uint8)


class Memory:
    """All groups of one rank, and which pages and rows nobody uses."""

    def __init__(self, layers: tuple[int, ...], place: kp.Placement | None, content: int) -> None:
        self.content = content
        self._images: dict[str, Image] = {}
        self._buffers: dict[Name, npt.NDArray[np.uint8]] = {}
        for group, layout in LAYOUTS.items():
            held = {layer for spec in layout.components for layer in spec.layer_ids}
            image = Image(layout, [layer for layer in layers if layer in held], place, items=ITEMS)
            self._images[group] = image
            for entry in image.manifest.entries:
                start = entry.address - int(image.arena.ctypes.data)
                view = image.arena[start : start + entry.item_stride * ITEMS].reshape(ITEMS, entry.item_stride)
                self._buffers[group, entry.component, entry.layer_id] = view[:, : entry.item_bytes]
        self.groups = Groups.of({group: own.manifest for group, own in self._images.items()}, {"sliding": WINDOW})
        self.free: dict[Kind, list[int]] = {}
        self.reset()

    def reset(self) -> None:
        for buffer in self._buffers.values():
            buffer[:] = self.content
        self.free = {kind: list(range(1, ITEMS)) for kind in KINDS}

    def register(self, engine: LoopbackEngine) -> None:
        for group in self.groups:
            for entry in group.manifest.entries:
                engine.register(entry.address, entry.nbytes)

    def names(self, kind: Kind, layer: int | None = None) -> Iterator[Name]:
        group, item_kind = kind
        for name in self._buffers:
            spec = LAYOUTS[group].spec(name[1]) if name[0] == group else None  # type: ignore[arg-type]
            if spec is not None and spec.item_kind == item_kind and layer in (None, name[2]):
                yield name

    def item(self, name: Name, number: int) -> npt.NDArray[np.uint8]:
        found: npt.NDArray[np.uint8] = self._buffers[name][number]
        return found

    def take(self, kind: Kind, count: int, dice: random.Random) -> list[int]:
        return [self.free[kind].pop(dice.randrange(len(self.free[kind]))) for _ in range(count)]

    def give(self, kind: Kind, numbers: list[int]) -> None:
        """Wiped, so that whoever still reads or writes them is seen."""
        for name in self.names(kind):
            for number in numbers:
                self.item(name, number)[:] = self.content
        self.free[kind].extend(numbers)

    def dirty(self) -> list[tuple[Name, int]]:
        """Free items that do not hold what free items hold."""
        return [
            (name, number)
            for kind in KINDS
            for name in self.names(kind)
            for number in self.free[kind]
            if (self.item(name, number) != self.content).any()
        ]
