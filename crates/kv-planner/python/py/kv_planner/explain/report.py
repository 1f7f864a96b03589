"""Owns the report on two described deployments, as data and as text. It does not own how deployments are described."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic import BaseModel, ConfigDict

import kv_planner as kp
from kv_planner.explain.geometry import Deployment

__all__ = ["Difference", "Rank", "Report", "Transfer", "explain"]

_EVERYWHERE: tuple[kp.Component, ...] = ("index_key", "index_scale")


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rank(_Data):
    """A rank of one side.

    Attributes:
        index: position among its side's ranks.
        place: where it stands, in words.
        idle: it sends, or receives, nothing: a surplus replica of heads.
    """

    index: int
    place: str
    idle: bool


class Transfer(_Data):
    """What one rank sends to another.

    Attributes:
        source: index of the sending rank.
        destination: index of the receiving rank.
        layers: global layer ids by part.
        heads: global heads, half open, by component and part.
        bytes_per_page: bytes of one page of a request, over all its layers and components. Where ranks share a
            request's tokens, of one page that this rank receives.
        bytes_per_request: bytes of states, once a request.
        bytes: bytes of the pages asked for, and of one request's states.
        blocks_joined: blocks where all pages lie one behind the other on both sides.
        blocks_scattered: blocks where none do.
    """

    source: int
    destination: int
    layers: dict[str, str]
    heads: dict[str, list[str]]
    bytes_per_page: int
    bytes_per_request: int
    bytes: int
    blocks_joined: int
    blocks_scattered: int


class Difference(_Data):
    """A reason why two sides cannot transfer."""

    field: str
    local: int | str | None
    remote: int | str | None
    consequence: str
    remedy: str


class Report(_Data):
    """What the planner says about two deployments.

    Attributes:
        agrees: whether prefill can send to decode.
        pages: pages of the request that is counted.
        prefill: sending ranks.
        decode: receiving ranks.
        transfers: who sends what to whom.
        differences: all reasons why not, where they do not agree.
    """

    agrees: bool
    pages: int
    prefill: list[Rank] = []
    decode: list[Rank] = []
    transfers: list[Transfer] = []
    differences: list[Difference] = []

    def text(self) -> str:
        """The report for people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if not self.agrees:
            yield f"refused: {len(self.differences)} reason{'s' * (len(self.differences) != 1)}"
            for reason in self.differences:
                yield f"\n{reason.field}"
                yield from (f"  {name}: {value}" for name, value in reason.model_dump().items() if name != "field")
            return
        yield f"agrees: {len(self.prefill)} ranks send to {len(self.decode)} ranks"
        for own in self.transfers:
            yield f"\nprefill {own.source} ({self.prefill[own.source].place})"
            yield f"  -> decode {own.destination} ({self.decode[own.destination].place})"
            yield from (f"  {part} layers {layers}" for part, layers in own.layers.items())
            yield from (f"  {name}: heads {', '.join(ranges)}" for name, ranges in own.heads.items())
            yield f"  {own.bytes_per_page:,} bytes a page" + (
                f", {own.bytes_per_request:,} bytes of states a request" if own.bytes_per_request else ""
            )
            yield (
                f"  {self.pages:,} pages: {own.bytes:,} bytes in {own.blocks_joined:,} blocks (pages together) "
                f"to {own.blocks_scattered:,} (pages scattered)"
            )
        for side, ranks in (("prefill", self.prefill), ("decode", self.decode)):
            idle = [f"{rank.index} ({rank.place})" for rank in ranks if rank.idle]
            if idle:
                yield f"\n{side} ranks without a transfer: {', '.join(idle)}"


def _spans(numbers: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] + 1 == number:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in spans)


class _Request:
    """A request whose pages lie one behind the other, or no two do; the same runs serve many routes."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._known: dict[tuple[int, int, bool, bool], kp.Runs] = {}

    def runs(self, place: kp.Placement, *, everywhere: bool, scattered: bool) -> kp.Runs:
        """The share of a receiving rank: of pages that lie on every rank, or on their owner."""
        key = (place.dcp_rank, place.dcp_size, everywhere, scattered)
        if key not in self._known:
            self._known[key] = self._make(*key)
        return self._known[key]

    def _make(self, dcp_rank: int, dcp_size: int, everywhere: bool, scattered: bool) -> kp.Runs:
        places = [1 + (2 if scattered else 1) * page for page in range(self.pages)]
        if dcp_size == 1:
            return kp.Runs(places, list(reversed(places)) if scattered else places)
        return kp.page_interleaved(
            places,
            places[: -(-self.pages // dcp_size)],
            page_size=1,
            dcp_rank=dcp_rank,
            dcp_size=dcp_size,
            tokens=self.pages,
            slots="global" if everywhere else "local",
        )


def _plans(route: kp.Route, request: _Request, *, scattered: bool) -> Iterator[kp.Plan]:
    by_page = route.slice(item_kinds=["page"])
    place = route.destination.placement
    if place.dcp_size == 1:
        yield kp.Plan(by_page, request.runs(place, everywhere=False, scattered=scattered))
    else:
        names = {(pair.component, pair.part) for pair in by_page.pairs}
        for component, part in sorted(names):
            everywhere = component in _EVERYWHERE or part == "draft"
            one = by_page.slice(components=[component], parts=[part])
            yield kp.Plan(one, request.runs(place, everywhere=everywhere, scattered=scattered))
    for kind in ("request_row", "token"):
        own = route.slice(item_kinds=[kind])
        if own:
            yield kp.Plan(own, kp.Runs([1], [1], item_kind=kind))


def _transfer(route: kp.Route, source: int, destination: int, request: _Request) -> Transfer:
    layers: dict[str, set[int]] = {}
    heads: dict[str, list[str]] = {}
    for pair in route.pairs:
        layers.setdefault(pair.part, set()).add(pair.layer_id)
        first = route.source.entries[pair.source_entry].head_range[0]
        span = f"{pair.source_heads[0] + first}..{pair.source_heads[1] + first}"
        known = heads.setdefault(f"{pair.component}/{pair.part}", [])
        if span not in known:
            known.append(span)
    joined = list(_plans(route, request, scattered=False))
    return Transfer(
        source=source,
        destination=destination,
        layers={part: _spans(ids) for part, ids in layers.items()},
        heads=heads,
        bytes_per_page=route.slice(item_kinds=["page"]).item_bytes,
        bytes_per_request=route.slice(item_kinds=["request_row", "token"]).item_bytes,
        bytes=sum(plan.nbytes for plan in joined),
        blocks_joined=sum(plan.block_count for plan in joined),
        blocks_scattered=sum(plan.block_count for plan in _plans(route, request, scattered=True)),
    )


def _refusal(error: kp.PlanError, pages: int) -> Report:
    if isinstance(error, kp.LayoutMismatch):
        found = [
            Difference(field=d.field, local=d.local, remote=d.remote, consequence=d.consequence, remedy=d.remedy)
            for d in error.differences
        ]
    else:
        field = f"{type(error).__name__}: {error}".split(": ")[1]
        found = [
            Difference(
                field=field,
                local=error.local,
                remote=error.remote,
                consequence=error.consequence,
                remedy=error.remedy,
            )
        ]
    return Report(agrees=False, pages=pages, differences=found)


def explain(prefill: Deployment, decode: Deployment, *, pages: int = 1) -> Report:
    """Says who sends what to whom, or all reasons why not.

    Args:
        prefill: The sending side.
        decode: The receiving side.
        pages: Pages of the request that is counted.

    Returns:
        The report. Heads that do not split over a side's ranks, and placements without a plan, are refusals too.

    Raises:
        PlanError: A side is not possible by itself in another way.
        ValueError: A side gives its stages twice, or more stages than layers.
    """
    items = 2 * pages * decode.parallelism.context + 2
    try:
        local = prefill.ranks(items, 2**21)
        remote = decode.ranks(items, 2**62)
        agreement = kp.agree(local, remote)
    except (kp.LayoutMismatch, kp.HeadsDoNotSplit, kp.UnsupportedPlacement) as error:
        return _refusal(error, pages)
    transfers, request = [], _Request(pages)
    for source in range(len(local)):
        for destination in range(len(remote)):
            route = agreement.route(source, destination)
            if route:
                transfers.append(_transfer(route, source, destination, request))

    def ranks(side: kp.Deployment, busy: set[int]) -> list[Rank]:
        places = enumerate(manifest.placement.describe() for manifest in side.manifests)
        return [Rank(index=index, place=place, idle=index not in busy) for index, place in places]

    return Report(
        agrees=True,
        pages=pages,
        prefill=ranks(local, {own.source for own in transfers}),
        decode=ranks(remote, {own.destination for own in transfers}),
        transfers=transfers,
    )
