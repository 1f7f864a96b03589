"""Plans of chunks: pages or one request's row of one group, layer by layer, lowered for an engine.

Pure: it changes nothing and moves nothing. Which pages of a request are sent is in `spans`; which page or token of it a
context-parallel rank holds is the planner's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, TypedDict

import kv_planner
import numpy as np
import numpy.typing as npt

from kv_transfer.config import Limits
from kv_transfer.coverage import Layer
from kv_transfer.engine import EngineCapabilities
from kv_transfer.errors import CoverageError
from kv_transfer.messages import GroupOffer
from kv_transfer.ready import Ready
from kv_transfer.spans import Interleave, Span, request_span
from kv_transfer.summaries import RouteSummary, kept_by_all

__all__ = ["Chunk", "ChunkPlanner", "Job", "Step", "Where"]

_Pages = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Where:
    """What a batch belongs to.

    Attributes:
        group: Name of the group.
        start: First page of the request.
        pages: How many pages.
        rows: Whether it is the request's row and not pages.
    """

    group: str
    start: int = 0
    pages: int = 0
    rows: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Layers that are handed to the engine together.

    Attributes:
        layers: Which (part, layer id).
        batches: For the engine.
        where: What they belong to.
    """

    layers: tuple[Layer, ...]
    batches: tuple[kv_planner.Batch, ...]
    where: Where


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Some pages of some layers, or the request's row of some layers, planned and lowered.

    Attributes:
        where: Which pages, or that it is the row.
        layers: Which (part, layer id).
        steps: In the order in which layers are computed; one where nothing is waited for.
        ready: Tells when a step may be read; None when all may be.
    """

    where: Where
    layers: tuple[Layer, ...]
    steps: tuple[Step, ...]
    ready: Ready | None = None


@dataclasses.dataclass(slots=True)
class Job:
    """A batch on its way to the engine.

    Attributes:
        batch: For the engine.
        where: The pages that it belongs to.
        failures: How often the engine failed with it.
        again_at: Not before this time, monotonic seconds.
    """

    batch: kv_planner.Batch
    where: Where
    failures: int = 0
    again_at: float = 0.0


class _Shares(TypedDict):
    page_size: int
    dcp_rank: int
    dcp_size: int
    tokens: int
    prefix_tokens: int
    page_offset: int


class ChunkPlanner:
    """Plans the chunks of one group of one room.

    Args:
        name: Of the group.
        route: From this rank to the receiver.
        offer: The receiver's pages and row; None on a rank that sends nothing.
        tokens: Of the whole prompt.
        window: Tokens before the end of the prompt that are sent; None: all.
        interleave: How context-parallel ranks of the receiver's side share the request.
        capabilities: Of the engine.
        limits: Bytes of a step.
    """

    def __init__(
        self,
        name: str,
        route: kv_planner.Route,
        offer: GroupOffer | None,
        tokens: int,
        window: int | None,
        interleave: Interleave,
        capabilities: EngineCapabilities,
        limits: Limits,
    ) -> None:
        """Sorts the route by what it moves."""
        self.name = name
        self.summary = RouteSummary.of(route)
        self.span = Span(0, 0, 0, 0, 0, 0)
        self._place, self._page_size = route.destination.placement, route.source.layout.page_size
        self._row = offer.row if offer is not None else None
        if offer is not None:
            self.span = request_span(tokens, offer.first_page, self._page_size, window, self._place)
        self._has_offer = offer is not None
        self._has_window = window is not None
        self._interleave = interleave
        self._destination = np.array(offer.pages if offer is not None else (), np.int64)
        self._by_page = route.slice(item_kinds=["page"])
        self._by_row = route.slice(item_kinds=["request_row"])
        self._capabilities = capabilities.planner()
        self._step_bytes = limits.ready_step_bytes

    def chunk(self, source: _Pages, start: int, layers: Sequence[Layer], ready: Ready | None = None) -> Chunk | None:
        """A chunk of pages; None where nothing of it is sent.

        Pages before a group's window are left out: they are computed, but decode does not read them.

        Args:
            source: Page ids. Shape: [n]; dtype int32 or int64.
            start: Index of the first of them within the request.
            layers: Some of the summary's layers.
            ready: Tells when a layer may be read.

        Raises:
            CoverageError: It reaches past the offered pages.
            kv_planner.PlanError: Pages that cannot be paired.
        """
        if not self._has_offer or not layers:
            return None
        first, last = self.span.first, self.span.first + self.span.pages
        if self._has_window and start < first:
            source, start = source[first - start :], min(first, start + len(source))
            if not len(source):
                return None
        stop = start + len(source)
        if start < first or stop > last:
            raise CoverageError(
                f"pages [{start}, {stop}) of the request, but the receiver offers pages [{first}, {last})",
                remedy="send the pages that it offers only; `start` counts from the first page of the request",
            )
        where = Where(self.name, start, len(source))
        steps = self._steps(self._page_plans(source, start), tuple(layers), ready, where)
        return Chunk(where, tuple(layers), tuple(steps), ready)

    def row(self, source_row: int, layers: Sequence[Layer], ready: Ready | None = None) -> Chunk | None:
        """The request's row of states; None where nothing of it is sent.

        Raises:
            kv_planner.PlanError: A row that cannot be paired.
        """
        if self._row is None or not layers:
            return None
        where = Where(self.name, 0, 1, rows=True)
        runs = kv_planner.Runs([source_row], [self._row], item_kind="request_row")
        steps = self._steps([kv_planner.Plan(self._by_row, runs)], tuple(layers), ready, where)
        return Chunk(where, tuple(layers), tuple(steps), ready)

    def _page_plans(self, source: _Pages, start: int) -> list[kv_planner.Plan]:
        if self._place.dcp_size == 1:
            offset = start - self.span.first
            runs = kv_planner.Runs(source, self._destination[offset : offset + len(source)])
            return [kv_planner.Plan(self._by_page, runs)]
        plans = []
        for component, part in dict.fromkeys((pair.component, pair.part) for pair in self._by_page.pairs):
            own, whole = self._by_page.slice(components=[component], parts=[part]), kept_by_all(component, part)
            if not whole and self._interleave == "token":
                runs = kv_planner.token_interleaved(source, self._destination, **self._shares(start))
                plans.append(kv_planner.Plan(own.by_token(), runs))
            else:
                slots: Literal["global", "local"] = "global" if whole else "local"
                runs = kv_planner.page_interleaved(source, self._destination, **self._shares(start), slots=slots)
                plans.append(kv_planner.Plan(own, runs))
        return plans

    def _shares(self, start: int) -> _Shares:
        return {
            "page_size": self._page_size,
            "dcp_rank": self._place.dcp_rank,
            "dcp_size": self._place.dcp_size,
            "tokens": self.span.tokens,
            "prefix_tokens": self.span.first * self._page_size,
            "page_offset": start - self.span.first,
        }

    def _steps(
        self, plans: list[kv_planner.Plan], layers: tuple[Layer, ...], ready: Ready | None, where: Where
    ) -> Iterator[Step]:
        groups = [list(layers)] if ready is None else self._groups(plans, layers)
        for group in groups:
            batches: list[kv_planner.Batch] = []
            for plan in plans:
                own = _slice(plan, group)
                if own is not None:
                    batches.extend(kv_planner.lower(own, self._capabilities).batches)
            yield Step(tuple(group), tuple(batches), where)

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


def _slice(plan: kv_planner.Plan, layers: list[Layer]) -> kv_planner.Plan | None:
    """The part of a plan that belongs to `layers`; None when it has none of them."""
    held = {(pair.part, pair.layer_id) for pair in plan.route.pairs}
    own = held & set(layers)
    if not own:
        return None
    if own == held:
        return plan
    return plan.slice(layer_ids=sorted({layer for _, layer in own}), parts=sorted({part for part, _ in own}))
