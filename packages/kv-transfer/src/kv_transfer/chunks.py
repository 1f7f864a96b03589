"""Plans of chunks: pages or one request's row, layer by layer, lowered for an engine.

Pure: it changes nothing and moves nothing. Which page of a request a context-parallel rank holds is the planner's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import kv_planner
import numpy as np
import numpy.typing as npt

from kv_transfer.config import Limits
from kv_transfer.coverage import Layer
from kv_transfer.engine import EngineCapabilities
from kv_transfer.errors import CoverageError
from kv_transfer.handshake import RouteSummary, kept_by_all
from kv_transfer.messages import Offer
from kv_transfer.ready import Ready

__all__ = ["Chunk", "ChunkPlanner", "Step", "pages_of"]

_Pages = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Layers that are handed to the engine together.

    Attributes:
        layers: Which (part, layer id).
        batches: For the engine.
    """

    layers: tuple[Layer, ...]
    batches: tuple[kv_planner.Batch, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Some pages of some layers, or the request's row of some layers, planned and lowered.

    Attributes:
        layers: Which (part, layer id).
        start: First page of the request.
        pages: How many pages.
        steps: In the order in which layers are computed; one where nothing is waited for.
        ready: Tells when a step may be read; None when all may be.
        rows: Whether it is the request's row and not pages.
    """

    layers: tuple[Layer, ...] = ()
    start: int = 0
    pages: int = 0
    steps: tuple[Step, ...] = ()
    ready: Ready | None = None
    rows: bool = False


def pages_of(offer: Offer, place: kv_planner.Placement, page_size: int) -> tuple[int, int]:
    """Pages of a request from `offer.first_page` on: over all ranks that share it, and those of the rank at `place`."""
    if place.dcp_size == 1:
        return len(offer.pages), len(offer.pages)
    every = kv_planner.page_count(offer.tokens, page_size) - offer.first_page
    return every, len(range(place.dcp_rank, every, place.dcp_size))


class ChunkPlanner:
    """Plans the chunks of one room.

    Args:
        route: From this rank to the receiver.
        offer: The receiver's pages and row; None on a rank that sends nothing.
        capabilities: Of the engine.
        limits: Bytes of a step.
    """

    def __init__(
        self, route: kv_planner.Route, offer: Offer | None, capabilities: EngineCapabilities, limits: Limits
    ) -> None:
        """Sorts the route by what it moves."""
        self.summary = RouteSummary.of(route)
        self.offer = offer
        self.first_page = offer.first_page if offer is not None else 0
        place, self._page_size = route.destination.placement, route.source.layout.page_size
        self._place = place
        self.pages = pages_of(offer, place, self._page_size)[0] if offer is not None else 0
        self._destination = np.array(offer.pages if offer is not None else (), np.int64)
        self._by_page = route.slice(item_kinds=["page"])
        self._by_row = route.slice(item_kinds=["request_row"])
        self._capabilities = capabilities.planner()
        self._step_bytes = limits.ready_step_bytes

    def chunk(
        self,
        source_pages: npt.ArrayLike,
        start: int,
        layer_ids: Iterable[int] | None = None,
        parts: Iterable[kv_planner.Part] | None = None,
        ready: Ready | None = None,
    ) -> Chunk:
        """A chunk of pages.

        Raises:
            CoverageError: It reaches past the offered pages.
            kv_planner.PlanError: Pages that cannot be paired.
            ValueError: A layer or part that this rank's route does not hold, or pages that are no 1-D array.
        """
        layers = self._select(self.summary.layers, layer_ids, parts)
        if self.offer is None or not layers:
            return Chunk()
        source: _Pages = np.asarray(source_pages)
        if source.ndim != 1:
            raise ValueError(f"source_pages: expected a 1-D int32 or int64 array, got shape {source.shape}")
        if source.size == 0:
            source = source.astype(np.int64)
        stop = start + len(source)
        first, last = self.first_page, self.first_page + self.pages
        if start < first or stop > last:
            raise CoverageError(
                f"pages [{start}, {stop}) of the request, but the receiver offers pages [{first}, {last})",
                remedy="send the pages that it offers only; `start` counts from the first page of the request",
            )
        plans = self._page_plans(source, start)
        return Chunk(layers, start, len(source), tuple(self._steps(plans, layers, ready)), ready)

    def row(
        self,
        source_row: int,
        layer_ids: Iterable[int] | None = None,
        parts: Iterable[kv_planner.Part] | None = None,
        ready: Ready | None = None,
    ) -> Chunk:
        """The request's row of states.

        Raises:
            kv_planner.PlanError: A row that cannot be paired.
            ValueError: A layer or part without states on this rank's route.
        """
        layers = self._select(self.summary.states, layer_ids, parts)
        if self.offer is None or self.offer.row is None or not layers:
            return Chunk(rows=True)
        runs = kv_planner.Runs([source_row], [self.offer.row], item_kind="request_row")
        steps = self._steps([kv_planner.Plan(self._by_row, runs)], layers, ready)
        return Chunk(layers, 0, 1, tuple(steps), ready, rows=True)

    def _page_plans(self, source: _Pages, start: int) -> list[kv_planner.Plan]:
        if self._place.dcp_size == 1:
            offset = start - self.first_page
            runs = kv_planner.Runs(source, self._destination[offset : offset + len(source)])
            return [kv_planner.Plan(self._by_page, runs)]
        plans = []
        for component, part in dict.fromkeys((pair.component, pair.part) for pair in self._by_page.pairs):
            runs = self._shared_runs(source, start, kept_by_all(component, part))
            plans.append(kv_planner.Plan(self._by_page.slice(components=[component], parts=[part]), runs))
        return plans

    def _shared_runs(self, source: _Pages, start: int, in_group: bool) -> kv_planner.Runs:
        assert self.offer is not None
        prefix = self.first_page * self._page_size
        return kv_planner.page_interleaved(
            source,
            self._destination,
            page_size=self._page_size,
            dcp_rank=self._place.dcp_rank,
            dcp_size=self._place.dcp_size,
            tokens=self.offer.tokens - prefix,
            prefix_tokens=prefix,
            page_offset=start - self.first_page,
            slots="global" if in_group else "local",
        )

    def _steps(self, plans: list[kv_planner.Plan], layers: tuple[Layer, ...], ready: Ready | None) -> Iterator[Step]:
        groups = [list(layers)] if ready is None else self._groups(plans, layers)
        for group in groups:
            batches: list[kv_planner.Batch] = []
            for plan in plans:
                own = _slice(plan, group)
                if own is not None:
                    batches.extend(kv_planner.lower(own, self._capabilities).batches)
            yield Step(tuple(group), tuple(batches))

    def _groups(self, plans: list[kv_planner.Plan], layers: tuple[Layer, ...]) -> list[list[Layer]]:
        """Layers in the order of computation, neighbours together until they hold the bytes of a step."""
        groups: list[list[Layer]] = []
        held = self._step_bytes
        for layer in sorted(layers, key=lambda own: (own[0] != "target", own[1])):
            size = sum(own.nbytes for plan in plans if (own := _slice(plan, [layer])) is not None)
            if held >= self._step_bytes or groups[-1][-1][0] != layer[0]:
                groups.append([])
                held = 0
            groups[-1].append(layer)
            held += size
        return groups

    def _select(
        self, layers: tuple[Layer, ...], layer_ids: Iterable[int] | None, parts: Iterable[kv_planner.Part] | None
    ) -> tuple[Layer, ...]:
        if parts is not None:
            wanted_parts, known_parts = set(parts), {part for part, _ in layers}
            if self.offer is not None and not wanted_parts <= known_parts:
                raise ValueError(
                    f"parts: {sorted(wanted_parts - known_parts)} are not on this rank's route, which has "
                    f"{sorted(known_parts)}"
                )
            layers = tuple(layer for layer in layers if layer[0] in wanted_parts)
        if layer_ids is not None:
            wanted, known = set(layer_ids), {layer for _, layer in layers}
            if self.offer is not None and not wanted <= known:
                raise ValueError(
                    f"layer_ids: {sorted(wanted - known)} are not on this rank's route, which has {sorted(known)}"
                )
            layers = tuple(layer for layer in layers if layer[1] in wanted)
        return layers


def _slice(plan: kv_planner.Plan, layers: list[Layer]) -> kv_planner.Plan | None:
    """The part of a plan that belongs to `layers`; None when it has none of them."""
    held = {(pair.part, pair.layer_id) for pair in plan.route.pairs}
    own = held & set(layers)
    if not own:
        return None
    if own == held:
        return plan
    return plan.slice(layer_ids=sorted({layer for _, layer in own}), parts=sorted({part for part, _ in own}))
