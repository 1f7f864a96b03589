"""Plans of one room over all groups: what a caller gives, as one list or one a group, becomes chunks.

Pure; what a chunk of one group is, is in `chunks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias, TypeVar

import kv_planner
import numpy as np
import numpy.typing as npt

from kv_transfer.arguments import check_items, check_whole, is_whole, told
from kv_transfer.chunks import Chunk, ChunkPlanner
from kv_transfer.config import Limits
from kv_transfer.coverage import Layer
from kv_transfer.engine import EngineCapabilities
from kv_transfer.errors import ArgumentError, ProtocolError
from kv_transfer.groups import Groups
from kv_transfer.messages import Offer
from kv_transfer.ready import Ready
from kv_transfer.spans import Interleave, Span, request_span

__all__ = ["PageLists", "RoomPlanner", "by_group", "check_offer", "page_array"]

_Key = TypeVar("_Key", str, int, kv_planner.Part)

PageLists: TypeAlias = npt.ArrayLike | Mapping[str, npt.ArrayLike]
"""Page ids of the only group that has pages, or of each group by name. Shape: [n]; dtype int32 or int64."""


def page_array(name: str, pages: npt.ArrayLike) -> npt.NDArray[np.int32] | npt.NDArray[np.int64]:
    """Pages as an array.

    Raises:
        ArgumentError: They are no 1-D array of whole numbers.
    """
    try:
        array = np.asarray(pages)
        found = f"{array.dtype} of shape {array.shape}"
    except (TypeError, ValueError, RuntimeError) as error:  # lists of unequal length, tensors of a device
        array, found = np.zeros((), np.int64), str(error)
    if array.ndim != 1 or (array.size and array.dtype not in (np.int32, np.int64)):
        raise ArgumentError(
            f"{name}: expected a 1-D int32 or int64 array, got {found}",
            consequence="nothing was done",
            remedy="give page ids of the allocator as a list or an array",
        )
    return array if array.size else array.astype(np.int64)


def by_group(name: str, given: PageLists, groups: Groups) -> dict[str, npt.ArrayLike]:
    """What was given, by group.

    Args:
        name: Of the argument.
        given: One list, or one a group.
        groups: All that there are.

    Raises:
        ArgumentError: An unknown group, or one list where several groups have pages.
    """
    if isinstance(given, Mapping):
        groups.check_names(name, given)
        return dict(given)
    if len(groups.paged) > 1:
        raise ArgumentError(
            f"{name}: the groups {list(groups.paged)} have page ids of their own, got one list",
            consequence="pages of one group would be read as those of another",
            remedy="give a list for each group, by name",
        )
    return dict.fromkeys(groups.paged or groups.names[:1], given)


def check_offer(groups: Groups, place: kv_planner.Placement, offer: Offer) -> None:
    """Refuses an offer of other groups, or of other pages than its tokens need.

    Args:
        groups: Of the sender.
        place: Of the receiver.
        offer: From the wire.

    Raises:
        ProtocolError: It is one.
    """
    if offer.groups.keys() != set(groups.names):
        raise ProtocolError(f"offer of groups {sorted(offer.groups)}, agreed were {sorted(groups.names)}")
    for name in groups.paged:
        own, size = offer.groups[name], groups[name].manifest.layout.page_size
        span = request_span(offer.tokens, own.first_page, size, groups[name].window, place)
        if (span.first, span.places) != (own.first_page, len(own.pages)):
            raise ProtocolError(
                f"offer of {len(own.pages)} pages of group {name!r} from page {own.first_page} on, "
                f"{offer.tokens} tokens need {span.places} from page {span.first} on"
            )


class RoomPlanner:
    """Plans the chunks of one room.

    Args:
        groups: Of this rank.
        routes: From this rank to the receiver, by group.
        offer: The receiver's; None on a rank that sends nothing.
        interleave: How context-parallel ranks of the receiver's side share the request.
        capabilities: Of the engine.
        limits: Bytes of a step.
    """

    def __init__(
        self,
        groups: Groups,
        routes: Mapping[str, kv_planner.Route],
        offer: Offer | None,
        interleave: Interleave,
        capabilities: EngineCapabilities,
        limits: Limits,
    ) -> None:
        """One planner a group."""
        self.offer = offer
        self._groups = groups
        self._planners: dict[str, ChunkPlanner] = {}
        for group in groups:
            own = offer.groups[group.name] if offer is not None else None
            tokens = offer.tokens if offer is not None else 0
            self._planners[group.name] = ChunkPlanner(
                group.name, routes[group.name], own, tokens, group.window, interleave, capabilities, limits
            )

    @property
    def planners(self) -> Mapping[str, ChunkPlanner]:
        """The planner of each group."""
        return self._planners

    @property
    def spans(self) -> dict[str, Span]:
        """Pages of the request that each group with pages sends."""
        return {name: self._planners[name].span for name in self._groups.paged}

    @property
    def longest(self) -> Span:
        """The span of the group that begins first: all pages behind the prefix, where a group has no window."""
        spans = self.spans.values()
        return min(spans, key=lambda own: (own.first, -own.pages), default=Span(0, 0, 0, 0, 0, 0))

    @property
    def pages(self) -> int:
        """Pages of the longest span; 0 on a rank that sends nothing."""
        return self.longest.pages

    @property
    def first_page(self) -> int:
        """First page of the longest span."""
        return self.longest.first

    def chunk(
        self,
        source_pages: PageLists,
        start: int | Mapping[str, int],
        layer_ids: Iterable[int] | None = None,
        parts: Iterable[kv_planner.Part] | None = None,
        ready: Ready | None = None,
    ) -> tuple[Chunk, ...]:
        """A chunk of pages of each group that is given.

        Raises:
            ArgumentError: No such group, one list for several, no start that is a whole number, a layer or part that
                this rank's route does not hold, or pages that are no 1-D array.
            CoverageError: It reaches past the offered pages.
            kv_planner.PlanError: Pages that cannot be paired.
        """
        given = by_group("source_pages", source_pages, self._groups)
        if isinstance(start, Mapping) and not given.keys() <= start.keys():
            raise ArgumentError(
                f"start: nothing for groups {sorted(given.keys() - start.keys())}",
                consequence="it would be unknown which pages of the request these are",
                remedy="give the first page of each list, or one number for all",
            )
        layers = self._select({name: self._planners[name].summary.layers for name in given}, layer_ids, parts)
        found = []
        for name, pages in given.items():
            begin = check_whole("start", start[name] if isinstance(start, Mapping) else start, 2**63 - 1)
            found.append(self._planners[name].chunk(page_array("source_pages", pages), begin, layers[name], ready))
        return tuple(chunk for chunk in found if chunk is not None)

    def row(
        self,
        source_row: int | Mapping[str, int],
        layer_ids: Iterable[int] | None = None,
        parts: Iterable[kv_planner.Part] | None = None,
        ready: Ready | None = None,
    ) -> tuple[Chunk, ...]:
        """The request's row of states, of each group that has states.

        Raises:
            ArgumentError: No such group, no number of a row, or a layer or part without states on this rank's route.
            kv_planner.PlanError: A row that cannot be paired.
        """
        states = {name: own.summary.states for name, own in self._planners.items()}
        if isinstance(source_row, Mapping):
            self._groups.check_names("source_row", source_row)
            states = {name: states[name] for name in source_row}
        layers = self._select(states, layer_ids, parts)
        rows = source_row if isinstance(source_row, Mapping) else dict.fromkeys(states, source_row)
        numbers = {name: check_whole("source_row", row, 2**31 - 1) for name, row in rows.items()}
        found = (self._planners[name].row(row, layers[name], ready) for name, row in numbers.items())
        return tuple(chunk for chunk in found if chunk is not None)

    def _select(
        self,
        layers: Mapping[str, tuple[Layer, ...]],
        layer_ids: Iterable[int] | None,
        parts: Iterable[kv_planner.Part] | None,
    ) -> dict[str, tuple[Layer, ...]]:
        """Of each group, the layers that are asked for; what none of them has is refused."""
        chosen = dict(layers)
        if parts is not None:
            wanted_parts = self._known("parts", parts, {part for own in layers.values() for part, _ in own})
            chosen = {name: tuple(own for own in held if own[0] in wanted_parts) for name, held in chosen.items()}
        if layer_ids is not None:
            wanted = self._known("layer_ids", layer_ids, {layer for own in chosen.values() for _, layer in own})
            chosen = {name: tuple(own for own in held if own[1] in wanted) for name, held in chosen.items()}
        return chosen

    def _known(self, name: str, given: Iterable[_Key], known: set[_Key]) -> set[_Key]:
        """What was given, as a set; a rank that sends nothing knows nothing and takes all."""
        items = check_items(name, given)
        strange = [
            item
            for item in items
            if not (isinstance(item, str) or is_whole(item)) or (self.offer is not None and item not in known)
        ]
        if strange:
            raise ArgumentError(
                f"{name}: {told(strange[:16])} are not on this rank's route, which has {sorted(known)}",
                local=told(strange),
                consequence="nothing was sent",
                remedy=f"leave {name} out for all of them",
            )
        return set(items)
