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


@functools.lru_cache(maxsize=512)
def _template(
    layout: kp.ModelLayout, layer_ids: tuple[int, ...], place: kp.Placement, items: int, padding: int
) -> tuple[kp.RankManifest, dict[int, Label]]:
    """A rank at made-up addresses, and what its bytes are; both are alike wherever its memory is."""
    manifest = build_rank(layout, layer_ids, place, items=items, padding=padding)
    return manifest, label_bytes(manifest)


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
        template, self._labels = _template(layout, tuple(layer_ids), place or kp.Placement(), items, padding)
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
        for offset, label in self._labels.items():
            self.arena[offset] = byte_of(label)
        return self

    def faults(self, expected: Mapping[int, Label]) -> list[str]:
        """Bytes that are not as expected; what is not expected must be untouched."""
        base = int(self.arena.ctypes.data)
        wanted = np.full_like(self.arena, EMPTY)
        for address, label in expected.items():
            wanted[address - base] = byte_of(label)
        wrong = np.flatnonzero(wanted != self.arena)
        return [f"byte {int(at)}: {self.arena[at]}, expected {wanted[at]}" for at in wrong[:8]]

    def labels(self) -> dict[int, Label]:
        """What each byte is, by address."""
        base = int(self.arena.ctypes.data)
        return {base + offset: label for offset, label in self._labels.items()}

    def expected(self, pages: Mapping[int, int], rows: Mapping[int, int] | None = None) -> dict[int, Label]:
        """What it holds when destination page d has source page pages[d], and row r source row rows[r]."""
        found = {}
        for address, label in self.labels().items():
            kind = self.manifest.layout.spec(label.component, label.part).item_kind
            moved = pages if kind == "page" else rows or {}
            if label.item in moved:
                found[address] = label._replace(item=moved[label.item])
        return found

    def expected_share(
        self, source: Sequence[int], destination: Sequence[int], tokens: int | None = None
    ) -> dict[int, Label]:
        """What it holds as one of several context-parallel ranks.

        Page k of the request lies on rank k % size, in page destination[k // size], or on all in the group's page. With
        `tokens`, token t of them lies on rank t % size instead, as its token t // size.
        """
        layout, place = self.manifest.layout, self.manifest.placement
        size, rank, page_size = place.dcp_size, place.dcp_rank, layout.page_size
        pages = {destination[k // size]: page for k, page in enumerate(source) if k % size == rank}
        everywhere = {destination[k // size] * size + k % size: page for k, page in enumerate(source)}
        slots = {}
        for t in range(rank, tokens or 0, size):
            place_, slot = divmod(t // size, page_size)
            slots[destination[place_], slot] = (source[t // page_size], t % page_size)
        found = {}
        for address, label in self.labels().items():
            if layout.spec(label.component, label.part).item_kind != "page":
                continue
            if label.part == "draft" or label.component in ("index_key", "index_scale"):
                if label.item in everywhere:
                    found[address] = label._replace(item=everywhere[label.item])
            elif tokens is not None:
                if (label.item, label.token) in slots:
                    item, token = slots[label.item, label.token]
                    found[address] = label._replace(item=item, token=token)
            elif label.item in pages:
                found[address] = label._replace(item=pages[label.item])
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
