"""Real memory for ranks of any layout: every byte is the label of where it belongs, with guards around buffers."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence

import kv_planner as kp
import numpy as np
import numpy.typing as npt
from kv_planner.testing import Label, build_rank, label_bytes

EMPTY = 0xEE


def byte_of(label: Label) -> int:
    return zlib.crc32(repr(tuple(label)).encode()) & 0xFF


def _own(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.empty(nbytes, np.uint8)


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
        template = build_rank(layout, layer_ids, place, items=items, padding=padding)
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
        base = int(self.arena.ctypes.data)
        for address, label in label_bytes(self.manifest).items():
            self.arena[address - base] = byte_of(label)
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
        found = {}
        for address, label in label_bytes(self.manifest).items():
            kind = self.manifest.layout.spec(label.component, label.part).item_kind
            moved = pages if kind == "page" else rows or {}
            if label.item in moved:
                found[address] = label._replace(item=moved[label.item])
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
    for stage, rank in itertools.product(range(pp), range(tp)):
        own = list(range(layers * stage // pp, layers * (stage + 1) // pp))
        own += list(draft) if stage == pp - 1 else []
        place = kp.Placement(pp_rank=stage, pp_size=pp, tp_rank=rank, tp_size=tp)
        ranks.append(Image(layout, own, place, items=items, padding=padding, allocate=allocate))
    return ranks
