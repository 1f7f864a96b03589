"""Memory of one rank whose bytes say where they belong, with sentinels around, for all tests of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import kv_planner as kp
import numpy as np
import numpy.typing as npt

UNTOUCHED = 0xEE
GUARD = 0xA5
_GUARD_BYTES = 64

Bytes = npt.NDArray[np.uint8]
Owned = Mapping[tuple[kp.Component, kp.Part], Sequence[int]]
Allocate = Callable[[int], Bytes]


def _own(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


def make_layout(
    *,
    page_size: int = 4,
    layers: int = 4,
    draft: int = 0,
    heads: int = 2,
    key_dims: int = 8,
    value_dims: int = 5,
    fingerprint: str = "model-a",
) -> kp.ModelLayout:
    components = [
        kp.ComponentSpec("key", layer_ids=list(range(layers)), dtype="float16", total_heads=heads, dims=key_dims),
        kp.ComponentSpec("value", layer_ids=list(range(layers)), dtype="float16", total_heads=heads, dims=value_dims),
    ]
    if draft:
        ids = list(range(layers, layers + draft))
        components += [
            kp.ComponentSpec("key", "draft", layer_ids=ids, dtype="float16", total_heads=heads, dims=key_dims),
            kp.ComponentSpec("value", "draft", layer_ids=ids, dtype="float16", total_heads=heads, dims=value_dims),
        ]
    return kp.ModelLayout(components, page_size=page_size, fingerprint=fingerprint)


def labels(component: str, part: str, layer: int, page: int, shape: tuple[int, int, int], first_head: int) -> Bytes:
    """The bytes of one page. Shape: [token, head, bytes of a head]; each depends on everything that names it."""
    token, head, byte = np.meshgrid(*(np.arange(n, dtype=np.uint64) for n in shape), indexing="ij")
    name = sum(ord(letter) << (i % 3) for i, letter in enumerate(component + part))
    x = (token << np.uint64(16)) + ((head + np.uint64(first_head)) << np.uint64(32)) + byte
    x += np.uint64((name << 52) % 2**64) + np.uint64(layer << 44) + np.uint64(page << 36)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    mixed: Bytes = ((x ^ (x >> np.uint64(31))) & np.uint64(0xFF)).astype(np.uint8)
    return mixed


class RankMemory:
    """Buffers of one rank in one arena, guard bytes around each.

    Args:
        layout: Of the model.
        owned: Layers of each component and part on this rank.
        placement: Of this rank.
        head_range: Heads on this rank.
        pages: Pages of each buffer, page 0 included.
        allocate: Makes the memory; of this process by default.
    """

    def __init__(
        self,
        layout: kp.ModelLayout,
        owned: Owned,
        *,
        placement: kp.Placement | None = None,
        head_range: tuple[int, int] | None = None,
        pages: int = 16,
        allocate: Allocate = _own,
    ) -> None:
        heads = head_range or (0, layout.components[0].total_heads)
        self.layout = layout
        self.pages = pages
        self._heads = heads
        self._offsets: dict[tuple[str, str, int], tuple[int, int]] = {}
        cursor = _GUARD_BYTES
        for (component, part), layer_ids in owned.items():
            item = layout.item_bytes(component, part, heads=heads[1] - heads[0])
            for layer in layer_ids:
                self._offsets[component, part, layer] = (cursor, item)
                cursor += item * pages + _GUARD_BYTES
        self.arena = allocate(cursor)
        self.arena[:] = GUARD
        entries = []
        for (component, part), layer_ids in owned.items():
            for layer in layer_ids:
                start, item = self._offsets[component, part, layer]
                self.arena[start : start + item * pages] = UNTOUCHED
                entries.append(
                    kp.BufferEntry(
                        component,
                        part,
                        layer,
                        device="cpu",
                        address=int(self.arena.ctypes.data) + start,
                        nbytes=item * pages,
                        item_stride=item,
                        item_bytes=item,
                        head_range=heads,
                    )
                )
        self.manifest = kp.RankManifest(layout, placement or kp.Placement(), entries)

    @property
    def names(self) -> tuple[tuple[str, str, int], ...]:
        return tuple(self._offsets)

    def buffer(self, name: tuple[str, str, int]) -> Bytes:
        """Shape: [pages, bytes of a page]."""
        start, item = self._offsets[name]
        return self.arena[start : start + item * self.pages].reshape(self.pages, item)

    def page_labels(self, name: tuple[str, str, int], page: int) -> Bytes:
        """What page `page` of buffer `name` holds in a filled source. Shape: [bytes of a page]."""
        component, part, layer = name
        _, item = self._offsets[name]
        width = self._heads[1] - self._heads[0]
        shape = (self.layout.page_size, width, item // self.layout.page_size // width)
        return labels(component, part, layer, page, shape, self._heads[0]).ravel()

    def fill(self) -> RankMemory:
        for name in self.names:
            buffer = self.buffer(name)
            for page in range(self.pages):
                buffer[page] = self.page_labels(name, page)
        return self

    def wipe(self, pages: Sequence[int]) -> None:
        """Makes pages untouched again."""
        for name in self.names:
            self.buffer(name)[list(pages)] = UNTOUCHED

    def faults(self, moved: Mapping[int, int], *, names: Sequence[tuple[str, str, int]] | None = None) -> list[str]:
        """What is wrong if destination page d should hold source page moved[d] and nothing else be touched."""
        found = []
        for name in self.names:
            buffer = self.buffer(name)
            for page in range(self.pages):
                source = moved.get(page) if names is None or name in names else None
                if source is not None:
                    if not np.array_equal(buffer[page], self.page_labels(name, source)):
                        found.append(f"{name} page {page}: not the bytes of source page {source}")
                elif not (buffer[page] == UNTOUCHED).all():
                    found.append(f"{name} page {page}: touched")
        outside = np.ones(len(self.arena), np.bool_)
        for name in self.names:
            start, item = self._offsets[name]
            outside[start : start + item * self.pages] = False
        if not (self.arena[outside] == GUARD).all():
            found.append("bytes outside all buffers were touched")
        return found


def whole(layout: kp.ModelLayout, *, pages: int = 16, allocate: Allocate = _own) -> RankMemory:
    """One rank that owns everything."""
    owned: Owned = {(spec.component, spec.part): list(spec.layer_ids) for spec in layout.components}
    return RankMemory(layout, owned, pages=pages, allocate=allocate)


def stages(
    layout: kp.ModelLayout,
    count: int,
    *,
    pages: int = 16,
    only: Sequence[int] | None = None,
    allocate: Allocate = _own,
) -> list[RankMemory]:
    """Pipeline stages with filled memory, all or `only` some; draft layers on the last."""
    ranks = []
    for stage in range(count) if only is None else only:
        owned: dict[tuple[kp.Component, kp.Part], Sequence[int]] = {}
        for spec in layout.components:
            ids = list(spec.layer_ids)
            mine = ids[len(ids) * stage // count : len(ids) * (stage + 1) // count]
            if spec.part == "draft":
                mine = ids if stage == count - 1 else []
            if mine:
                owned[spec.component, spec.part] = mine
        ranks.append(
            RankMemory(
                layout, owned, placement=kp.Placement(pp_rank=stage, pp_size=count), pages=pages, allocate=allocate
            ).fill()
        )
    return ranks
