"""Real memory for ranks of any layout: every byte is the label of where it belongs, with guards around buffers."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence

import kv_planner as kp
import numpy as np
import numpy.typing as npt
from kv_planner.testing import Label, build_rank, label_bytes

EMPTY = 0xEE


@functools.lru_cache(maxsize=1 << 18)
def byte_of(label: Label) -> int:
    return zlib.crc32(repr(tuple(label)).encode()) & 0xFF


def _own(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.empty(nbytes, np.uint8)


_Labels = list[tuple[int, Label]]


class _Template:
    """A rank at made-up addresses, and what its bytes are; both are alike wherever its memory is."""

    def __init__(self, manifest: kp.RankManifest) -> None:
        self.manifest = manifest
        self.labels = label_bytes(manifest)
        self.kinds: dict[kp.ItemKind, dict[int, _Labels]] = {"page": {}, "request_row": {}}
        specs = {(own.component, own.part): own.item_kind for own in manifest.layout.components}
        for offset, label in self.labels.items():
            self.kinds[specs[label.component, label.part]].setdefault(label.item, []).append((offset, label))

    @functools.cached_property
    def bytes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Where the bytes of a filled rank are, and which."""
        count = len(self.labels)
        values = (byte_of(label) for label in self.labels.values())
        return np.fromiter(self.labels, np.int64, count), np.fromiter(values, np.uint8, count)


@functools.lru_cache(maxsize=256)
def _template(
    layout: kp.ModelLayout, layer_ids: tuple[int, ...], place: kp.Placement, items: int, padding: int
) -> _Template:
    return _Template(build_rank(layout, layer_ids, place, items=items, padding=padding))


class Image:
    """One rank: its manifest, with addresses of memory that is there.

    Args:
        layout: Of the model.
        layer_ids: Global ids of its stage.
        place: Where it stands.
        items: Items of every buffer.
        padding: Bytes between items.
        allocate: Makes the memory; of this process by default.
    """

    def __init__(
        self,
        layout: kp.ModelLayout,
        layer_ids: Sequence[int],
        place: kp.Placement | None = None,
        *,
        items: int = 12,
        padding: int = 0,
        allocate: Callable[[int], npt.NDArray[np.uint8]] = _own,
    ) -> None:
        self._template = _template(layout, tuple(layer_ids), place or kp.Placement(), items, padding)
        template = self._template.manifest
        end = max((entry.address + entry.nbytes for entry in template.entries), default=0)
        self.arena = allocate(end + 64)
        self.arena[:] = EMPTY
        base = int(self.arena.ctypes.data)
        self.manifest = kp.RankManifest(
            layout,
            template.placement,
            [
                kp.BufferEntry(
                    entry.component,
                    entry.part,
                    entry.layer_id,
                    device=entry.device,
                    address=base + entry.address,
                    nbytes=entry.nbytes,
                    item_stride=entry.item_stride,
                    item_bytes=entry.item_bytes,
                    head_range=entry.head_range,
                    occurrence=entry.occurrence,
                )
                for entry in template.entries
            ],
        )

    def fill(self) -> Image:
        offsets, values = self._template.bytes
        self.arena[offsets] = values
        return self

    def faults(self, expected: Mapping[int, Label]) -> list[str]:
        """Bytes that are not as expected; what is not expected must be untouched."""
        base = int(self.arena.ctypes.data)
        wanted = np.full_like(self.arena, EMPTY)
        for address, label in expected.items():
            wanted[address - base] = byte_of(label)
        wrong = np.flatnonzero(wanted != self.arena)
        return [f"byte {int(at)}: {self.arena[at]}, expected {wanted[at]}" for at in wrong[:8]]

    def expected(self, pages: Mapping[int, int], rows: Mapping[int, int] | None = None) -> dict[int, Label]:
        """What it holds when destination page d has source page pages[d], and row r source row rows[r]."""
        base, found = int(self.arena.ctypes.data), {}
        moved: dict[kp.ItemKind, Mapping[int, int]] = {"page": pages, "request_row": rows or {}}
        for kind, items in moved.items():
            for item, source in items.items():
                for offset, label in self._template.kinds[kind].get(item, ()):
                    found[base + offset] = label._replace(item=source)
        return found

    def expected_share(
        self, source: Sequence[int], destination: Sequence[int], tokens: int | None = None
    ) -> dict[int, Label]:
        """What it holds as one of several context-parallel ranks.

        Page k of the request lies on rank k % size, in page destination[k // size], or on all in the group's page. With
        `tokens`, token t of them lies on rank t % size instead, as its token t // size.
        """
        place, page_size = self.manifest.placement, self.manifest.layout.page_size
        size, rank = place.dcp_size, place.dcp_rank
        pages = {destination[k // size]: page for k, page in enumerate(source) if k % size == rank}
        everywhere = {destination[k // size] * size + k % size: page for k, page in enumerate(source)}
        slots = {}
        for t in range(rank, tokens or 0, size):
            page, slot = divmod(t // size, page_size)
            slots[destination[page], slot] = (source[t // page_size], t % page_size)
        base, found = int(self.arena.ctypes.data), {}
        for item in {*destination, *everywhere}:
            for offset, label in self._template.kinds["page"].get(item, ()):
                if label.part == "draft" or label.component in ("index_key", "index_scale"):
                    if item in everywhere:
                        found[base + offset] = label._replace(item=everywhere[item])
                elif tokens is not None:
                    if (item, label.token) in slots:
                        from_item, token = slots[item, label.token]
                        found[base + offset] = label._replace(item=from_item, token=token)
                elif item in pages:
                    found[base + offset] = label._replace(item=pages[item])
        return found


def side(
    layout: kp.ModelLayout,
    layers: int,
    pp: int,
    tp: int,
    *,
    items: int = 12,
    padding: int = 0,
    draft: Sequence[int] = (),
    allocate: Callable[[int], npt.NDArray[np.uint8]] = _own,
) -> list[Image]:
    """All ranks of a side: layers shared evenly over stages, draft layers on the last."""
    ranks = []
    for place in places(pp, tp):
        own = stage_layers(layers, place, draft)
        ranks.append(Image(layout, own, place, items=items, padding=padding, allocate=allocate))
    return ranks


def places(pp: int, tp: int, dcp: int = 1, dp: int = 1) -> list[kp.Placement]:
    """Every rank's placement, data-parallel groups outermost, tensor-parallel ranks innermost."""
    return [
        kp.Placement(
            pp_rank=stage, pp_size=pp, tp_rank=rank, tp_size=tp, dcp_rank=share, dcp_size=dcp, dp_rank=group, dp_size=dp
        )
        for group, share, stage, rank in itertools.product(range(dp), range(dcp), range(pp), range(tp))
    ]


def stage_layers(layers: int, place: kp.Placement, draft: Sequence[int] = ()) -> list[int]:
    """Layers of a rank's stage: an even share, and draft layers on the last."""
    stage, pp = place.pp_rank, place.pp_size
    return [*range(layers * stage // pp, layers * (stage + 1) // pp), *(draft if stage == pp - 1 else ())]
