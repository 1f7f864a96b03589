"""Owns the plan for pages between one prefill rank and one decode rank: from named, paired buffers to batches.

Each pair of buffers goes through kv-planner: geometry and heads are compared when the peer registers, page ids when
pages are sent. It knows bytes, heads and pages; what the buffers hold is in their names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import kv_planner
import numpy as np
import numpy.typing as npt

from kv_transfer.integrations.sglang.names import Name, refusal

if TYPE_CHECKING:
    from kv_planner import Component, Part

__all__ = ["Buffers", "PagePlan", "Ranks"]

Pages: TypeAlias = "npt.NDArray[np.int32] | npt.NDArray[np.int64]"


@dataclasses.dataclass(frozen=True)
class Buffers:
    """One side's list.

    Attributes:
        addresses: First byte of each buffer.
        item_bytes: Bytes of a page, in each buffer.
        nbytes: Bytes of each buffer; None: the peer did not say. Then its buffers end behind the farthest page that is
            sent, and a page that would reach into another buffer is refused.
        slots: Pages of the buffer for each page id; None: one.
    """

    addresses: tuple[int, ...]
    item_bytes: tuple[int, ...]
    nbytes: tuple[int, ...] | None = None
    slots: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Checks the lists against each other.

        Raises:
            UnsupportedLayout: Lists of unequal length, or an item length that is None or negative.
        """
        for name, values in (("item_bytes", self.item_bytes), ("nbytes", self.nbytes)):
            if values is not None and len(values) != len(self.addresses):
                raise refusal(
                    f"kv_{'item_lens' if name == 'item_bytes' else 'data_lens'}", len(values), len(self.addresses),
                    "the lists are parallel to the pointers", "publish a length for every buffer",
                )  # fmt: skip
        for entry, length in enumerate(self.item_bytes):
            if not isinstance(length, int) or length < 0:
                raise refusal(
                    f"item length of entry {entry}", length, "bytes of a page", "it is no number of bytes",
                    "publish the item length of every buffer",
                )  # fmt: skip

    def room(self, entry: int, reach: int) -> int:
        """Bytes of a buffer, or of its pages with ids below `reach` where its owner did not say."""
        if self.nbytes is not None:
            return self.nbytes[entry]
        return reach * (self.slots[entry] if self.slots is not None else 1) * self.item_bytes[entry]


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Tensor-parallel places of both sides, and the heads that they share.

    Attributes:
        source: Rank and size of the sender.
        destination: Rank and size of the receiver.
        heads: Heads over all ranks; None: every rank holds the same bytes, so pages are copied whole.
        share: Rank and size of the receiver among those that share its contexts.
    """

    source: tuple[int, int] = (0, 1)
    destination: tuple[int, int] = (0, 1)
    heads: int | None = None
    share: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        """Refuses sizes that are no numbers.

        Raises:
            UnsupportedLayout: A size is None or not positive, or a rank is no number.
        """
        for side, (rank, size) in (("", self.source), ("dst_", self.destination)):
            if type(size) is not int or size < 1:
                raise refusal(
                    f"{side}attn_tp_size", size, "at least 1",
                    "without the TP size nobody knows which heads a rank holds", "publish the TP size of both sides",
                )  # fmt: skip
            if type(rank) is not int or rank < 0:
                raise refusal(
                    f"{side}tp_rank", rank, "0 or more", "without the TP rank nobody knows which heads it holds",
                    "publish the TP rank of both sides",
                )  # fmt: skip

    def places(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rank and size of both sides among those that hold different heads: replicas are taken for one rank."""
        if self.heads is None:
            return (0, 1), (0, 1)
        own, other = (self._distinct(rank % size, size) for rank, size in (self.source, self.destination))
        return own, other

    def is_surplus(self) -> bool:
        """Whether a rank before the sender's brings the same heads to the same receiver."""
        (rank, size), (_, other) = self.source, self.destination
        if self.heads is None or size <= other or size <= self.heads:
            return False
        rank, readers, replicas = rank % size, size // other, size // self.heads
        return rank % readers != 0 and rank % replicas != 0

    def _distinct(self, rank: int, size: int) -> tuple[int, int]:
        assert self.heads is not None
        kv_planner.split_heads(self.heads, tp_rank=rank, tp_size=size)
        return (rank, size) if size <= self.heads else (rank // (size // self.heads), self.heads)


class PagePlan:
    """What one rank sends to another, page by page.

    Args:
        names: Of the source's buffers.
        pairs: Positions (source, destination) of buffers that hold the same.
        source: This rank's buffers.
        destination: The peer's.
        page_size: Tokens of a page.
        ranks: Tensor-parallel places.

    Raises:
        UnsupportedLayout: A buffer's pages do not split into heads.
        PlanError: The sides' pages have unlike geometry, or the heads do not split over the ranks.
    """

    def __init__(
        self,
        names: Sequence[Name],
        pairs: Sequence[tuple[int, int]],
        source: Buffers,
        destination: Buffers,
        *,
        page_size: int,
        ranks: Ranks,
    ) -> None:
        """Compares the geometry; the peer's sizes count as endless until pages are sent when it did not say them."""
        self._names, self._source, self._destination = tuple(names), source, destination
        self._page_size, self._ranks = page_size, ranks
        self._groups = self._by_geometry(pairs)
        self._routes: list[kv_planner.Route] = []
        self._reach = 0
        if destination.nbytes is not None or self._groups:
            self._build(1)

    @property
    def entries(self) -> int:
        """Buffers that this rank sends."""
        return sum(len(group) for group in self._groups)

    @property
    def page_bytes(self) -> int:
        """Bytes that one page sends."""
        return sum(route.item_bytes for route in self._routes)

    def batches(
        self,
        source_pages: Pages,
        destination_pages: Pages,
        capabilities: kv_planner.Capabilities | None = None,
    ) -> Iterator[kv_planner.Batch]:
        """Every block of some pages.

        Args:
            source_pages: Shape: [pages].
            destination_pages: Shape: [pages].
            capabilities: Of the engine.

        Raises:
            PlanError: Unequal lists, pages outside a buffer, a destination twice.
        """
        yield from self.lowered(kv_planner.Runs(source_pages, destination_pages), destination_pages, capabilities)

    def lowered(
        self,
        runs: kv_planner.Runs,
        destination_pages: Pages,
        capabilities: kv_planner.Capabilities | None = None,
        kinds: Iterable[tuple[Component, Part]] | None = None,
    ) -> Iterator[kv_planner.Batch]:
        """As `batches`, for runs that were planned before, and for buffers of some kinds alone."""
        if not len(runs):
            return
        if self._destination.nbytes is None:
            self._build(int(np.max(destination_pages)) + 1)
        for route in self._routes:
            held = {(pair.component, pair.part) for pair in route.pairs}
            wanted = held if kinds is None else held & set(kinds)
            parts = [route] if wanted == held else [route.slice(components=[c], parts=[p]) for c, p in sorted(wanted)]
            for part in parts:
                yield from kv_planner.lower(kv_planner.Plan(part, runs), capabilities).batches

    def _by_geometry(self, pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Pairs of one size of page for each component and part together; a layout has one."""
        seen: dict[tuple[Component, Part], list[tuple[int, int]]] = {}
        groups: list[list[tuple[int, int]]] = []
        for own, other in pairs:
            component, part = self._names[own][:2]
            sizes = (self._source.item_bytes[own], self._destination.item_bytes[other])
            known = seen.setdefault((component, part), [])
            if sizes not in known:
                known.append(sizes)
            number = known.index(sizes)
            if number == len(groups):
                groups.append([])
            groups[number].append((own, other))
        return groups

    def _build(self, reach: int) -> None:
        if reach <= self._reach:
            return
        self._routes = [self._route(group, reach) for group in self._groups]
        self._reach = reach if self._destination.nbytes is None else 1 << 62

    def _route(self, pairs: list[tuple[int, int]], reach: int) -> kv_planner.Route:
        places = self._ranks.places()
        heads = self._ranks.heads or 1
        ranges = [kv_planner.split_heads(heads, tp_rank=rank, tp_size=size) for rank, size in places]
        layers: dict[tuple[Component, Part], list[int]] = {}
        numbered: list[tuple[Component, Part, int, int]] = []
        for own, _ in pairs:
            component, part, layer, _ = self._names[own]
            held = layers.setdefault((component, part), [])
            numbered.append((component, part, layer, held.count(layer)))
            held.append(layer)
        manifests = []
        for side, buffers, (first, stop), (rank, size) in zip(
            (0, 1), (self._source, self._destination), ranges, places, strict=True
        ):
            dims = {name: self._dims(pairs, name, side, stop - first) for name in layers}
            layout = kv_planner.ModelLayout(
                [
                    kv_planner.ComponentSpec(*name, layer_ids=ids, dtype="uint8", total_heads=heads, dims=dims[name])
                    for name, ids in layers.items()
                ],
                page_size=self._page_size,
                fingerprint="pair",
            )
            entries = []
            for name, pair in zip(numbered, pairs, strict=True):
                item = buffers.item_bytes[pair[side]]
                entries.append(
                    kv_planner.BufferEntry(
                        *name[:3],
                        occurrence=name[3],
                        device="npu:0",
                        address=buffers.addresses[pair[side]],
                        nbytes=buffers.room(pair[side], reach),
                        item_stride=item,
                        item_bytes=item,
                        head_range=(first, stop),
                    )
                )
            dcp_rank, dcp_size = self._ranks.share if side else (0, 1)
            place = kv_planner.Placement(tp_rank=rank, tp_size=size, dcp_rank=dcp_rank, dcp_size=dcp_size)
            manifests.append(kv_planner.RankManifest(layout, place, entries))
        return kv_planner.agree(*manifests).route()

    def _dims(self, pairs: list[tuple[int, int]], name: tuple[Component, Part], side: int, heads: int) -> int:
        buffers = (self._source, self._destination)[side]
        entry = next(pair[side] for pair in pairs if self._names[pair[0]][:2] == name)
        item = buffers.item_bytes[entry]
        dims, odd = divmod(item, self._page_size * heads)
        if odd or not dims:
            raise refusal(
                f"{('local', 'peer')[side]} item length of {'/'.join(name)}", item, self._page_size * heads,
                f"{item} bytes are no page of {self._page_size} tokens with {heads} heads",
                "publish page size, heads and item lengths as the pool has them",
            )  # fmt: skip
        return dims
