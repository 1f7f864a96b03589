"""Whether two sides fit: ranks, manifests from the wire, pairwise and whole agreement, refusals in both directions.

Compares through kv_planner; it knows no sockets and keeps no peers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

import kv_planner

from kv_transfer.coverage import Layer
from kv_transfer.errors import PeerRefused, ProtocolError, ProtocolVersionError, UnsupportedLayout
from kv_transfer.faults import is_fault
from kv_transfer.messages import DifferenceRecord, Refusal, RefusalCode

__all__ = [
    "Rank",
    "RouteSummary",
    "agree_pair",
    "agree_whole",
    "as_refusal",
    "check_expected",
    "check_movable",
    "check_side",
    "has_states",
    "kept_by_all",
    "parse_manifest",
    "refusal_error",
    "refusal_message",
]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Rank:
    """Who a process is among those of its side."""

    pp: int = 0
    tp: int = 0
    dcp: int = 0
    dp: int = 0

    @classmethod
    def of(cls, manifest: kv_planner.RankManifest) -> Rank:
        """The rank in a manifest's placement."""
        place = manifest.placement
        return cls(place.pp_rank, place.tp_rank, place.dcp_rank, place.dp_rank)

    @property
    def in_group(self) -> Rank:
        """The same rank, counted within its data-parallel group."""
        return Rank(self.pp, self.tp, self.dcp)

    def __str__(self) -> str:
        """As in "pp1 tp0"; context and data ranks only where they are not 0."""
        text = f"pp{self.pp} tp{self.tp}"
        text += f" dcp{self.dcp}" if self.dcp else ""
        return text + (f" dp{self.dp}" if self.dp else "")


def kept_by_all(component: kv_planner.Component, part: kv_planner.Part) -> bool:
    """Whether every context-parallel rank keeps all pages of a component, under the group's page numbers."""
    return part == "draft" or component in ("index_key", "index_scale")


@dataclasses.dataclass(frozen=True, slots=True)
class RouteSummary:
    """What one rank has to deliver for one page, and for one request.

    Attributes:
        layers: Layers with pages, in the order of the route, each once.
        bytes_per_page: Over all layers and components.
        states: Layers with a row a request.
        bytes_per_request: Bytes of those rows.
        bytes_kept_by_all: The part of `bytes_per_page` that each of several context-parallel ranks gets of every page.
    """

    layers: tuple[Layer, ...]
    bytes_per_page: int
    states: tuple[Layer, ...] = ()
    bytes_per_request: int = 0
    bytes_kept_by_all: int = 0

    @classmethod
    def of(cls, route: kv_planner.Route) -> RouteSummary:
        """Adds up the pairs of a route."""
        found = []
        for kind in ("page", "request_row"):
            pairs = [pair for pair in route.pairs if pair.item_kind == kind]
            layers = tuple(dict.fromkeys((pair.part, pair.layer_id) for pair in pairs))
            found.append((layers, sum(pair.rows * pair.row_bytes for pair in pairs)))
        shared = route.destination.placement.dcp_size > 1
        pages = [pair for pair in route.pairs if pair.item_kind == "page"]
        whole = sum(pair.rows * pair.row_bytes for pair in pages if shared and kept_by_all(pair.component, pair.part))
        return cls(*found[0], *found[1], whole)

    def nbytes(self, pages: int, own: int) -> int:
        """Bytes of a request of `pages` pages, of which `own` are this decode rank's share."""
        shared = self.bytes_per_page - self.bytes_kept_by_all
        return shared * own + self.bytes_kept_by_all * pages + self.bytes_per_request

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self.layers or self.states)


def has_states(manifest: kv_planner.RankManifest, parts: Iterable[kv_planner.Part]) -> bool:
    """Whether a rank keeps a row a request in a component of `parts`."""
    wanted, layout = set(parts), manifest.layout
    return any(
        entry.part in wanted and layout.spec(entry.component, entry.part).item_kind == "request_row"
        for entry in manifest.entries
    )


def check_movable(manifest: kv_planner.RankManifest, parts: Iterable[kv_planner.Part]) -> None:
    """Refuses what is not moved.

    Raises:
        UnsupportedLayout: A component of `parts` has items that are neither pages nor request rows, or heads that do
            not split over the ranks.
    """
    wanted = set(parts)
    for spec in manifest.layout.components:
        if spec.part in wanted and spec.item_kind not in ("page", "request_row"):
            raise UnsupportedLayout(
                f"{spec.part} {spec.component}: its items are {spec.item_kind!r}, only pages and rows are moved",
                local=spec.item_kind,
                consequence="it would be missing at the peer",
                remedy="leave the component out of the layout, or move it by other means",
            )
        if spec.part in wanted:
            place = manifest.placement
            try:
                kv_planner.split_heads(spec.total_heads, tp_rank=place.tp_rank, tp_size=place.tp_size)
            except kv_planner.PlanError as error:
                raise UnsupportedLayout(
                    f"{spec.part} {spec.component}: {error}", local=f"{spec.total_heads} heads, tp {place.tp_size}"
                ) from error


def parse_manifest(text: str, parts: Iterable[kv_planner.Part]) -> kv_planner.RankManifest:
    """A manifest from the wire, of which `parts` are to be moved.

    Raises:
        PeerRefused: It is malformed, or of a kind that is not moved.
    """
    try:
        manifest = kv_planner.RankManifest.from_json(text)
    except ValueError as error:
        raise PeerRefused(f"the manifest is malformed: {error}", code=RefusalCode.MALFORMED.value) from error
    try:
        check_movable(manifest, parts)
    except UnsupportedLayout as error:
        raise PeerRefused(str(error), code=RefusalCode.UNSUPPORTED.value) from error
    return manifest


def agree_pair(
    prefill: kv_planner.RankManifest,
    decode: kv_planner.RankManifest,
    parts: Sequence[kv_planner.Part],
    *,
    here: Literal["prefill", "decode"],
) -> kv_planner.Agreement:
    """Agreement of two ranks on `parts`; `here` is this side.

    Raises:
        PeerRefused: With every difference, seen from here; a rank that lacks what its placement says is one.
    """
    return _agree(prefill, decode, parts, here)


def agree_whole(
    decode: kv_planner.RankManifest,
    prefill: Sequence[kv_planner.RankManifest],
    parts: Sequence[kv_planner.Part],
) -> kv_planner.Agreement:
    """Agreement of a receiver with its whole prefill side, source = prefill.

    Raises:
        PeerRefused: A rank is missing or double, or the layouts differ.
    """
    try:
        deployment = kv_planner.Deployment([_alone(manifest) for manifest in prefill])
    except kv_planner.LayoutMismatch as error:
        raise _mismatch(error) from error
    except kv_planner.PlanError as error:
        ranks = ", ".join(str(Rank.of(manifest)) for manifest in prefill)
        raise PeerRefused(
            f"the prefill side of ranks {ranks} is not whole: {error}", code=RefusalCode.DEPLOYMENT.value
        ) from error
    return _agree(deployment, decode, parts, "decode")


def check_side(manifest: kv_planner.RankManifest, prefill_ranks: int, dp_rank: int) -> None:
    """Compares the size of a rank's side with what the receiver waits for.

    Raises:
        PeerRefused: Another number of ranks, another data-parallel group, or shares of requests.
    """
    rank, place = Rank.of(manifest), manifest.placement
    if place.dp_rank != dp_rank:
        raise PeerRefused(
            f"dp_rank: rank {rank} is of data-parallel group {place.dp_rank} of {place.dp_size}, this receiver serves "
            f"group {dp_rank}; a request would be looked for in the wrong group",
            code=RefusalCode.DEPLOYMENT.value,
            remedy="connect each group to its own Receivers: Receiver(prefill_dp_rank=...)",
        )
    if place.dcp_size > 1:
        raise PeerRefused(
            f"dcp_size: prefill rank {rank} holds one of {place.dcp_size} shares of every request; pages go from whole "
            f"requests to shares, never from shares",
            code=RefusalCode.UNSUPPORTED.value,
            remedy="use a prefill side without context parallelism of the KV",
        )
    world = place.pp_size * place.tp_size * place.dcp_size
    if world != prefill_ranks:
        raise PeerRefused(
            f"prefill_ranks: this receiver waits for {prefill_ranks} ranks, rank {rank} says its side has "
            f"{world} (pp {place.pp_size} x tp {place.tp_size} x dcp {place.dcp_size})",
            code=RefusalCode.DEPLOYMENT.value,
            remedy="give Receiver the number of ranks of the prefill side",
        )


def check_expected(rank: Rank, own: RouteSummary, expected: RouteSummary) -> None:
    """Compares what `rank` would send, seen from itself, with what the receiver of the whole side waits for.

    A rank of which nothing is awaited fits: it is offered no pages.

    Raises:
        PeerRefused: They differ; both values are named.
    """
    pairs = [
        ("layers", _names(own.layers), _names(expected.layers)),
        ("bytes per page", str(own.bytes_per_page), str(expected.bytes_per_page)),
        ("layers with states", _names(own.states), _names(expected.states)),
        ("bytes of states per request", str(own.bytes_per_request), str(expected.bytes_per_request)),
    ]
    if not expected.is_empty and any(local != remote for _, local, remote in pairs):
        records = [
            DifferenceRecord(
                field=f"{what} that rank {rank} sends",
                local=_clip(local),
                remote=_clip(remote),
                consequence="every room would end as a failure",
                remedy="give each rank the heads of kv_planner.split_heads, replicas of a head side by side",
            )
            for what, local, remote in pairs
            if local != remote
        ]
        raise PeerRefused(
            f"rank {rank} and the receiver of the whole prefill side disagree about what the rank sends",
            code=RefusalCode.LAYOUT.value,
            differences=records,
        )


def as_refusal(error: BaseException) -> PeerRefused:
    """What an error in a peer's words means for the peer: it is refused, whatever the words broke here.

    Raises:
        BaseException: `error`, when it asks this process to end.
    """
    if isinstance(error, PeerRefused):
        return error
    if not isinstance(error, ProtocolError):
        if not is_fault(error):
            raise error
        return PeerRefused(
            _clip(f"a message broke its reader: {error!r}"),
            code=RefusalCode.MALFORMED.value,
            remedy="install the same versions of kv-transfer and kv-planner on both sides",
        )
    code = RefusalCode.VERSION if isinstance(error, ProtocolVersionError) else RefusalCode.MALFORMED
    return PeerRefused(str(error), code=code.value)


def refusal_message(error: PeerRefused) -> Refusal:
    """The message that tells the other side."""
    return Refusal(code=RefusalCode(error.code), reason=_clip(str(error)), differences=error.differences)


def refusal_error(message: Refusal, by: str) -> PeerRefused:
    """The error that a refusal of the other side becomes here, differences turned around."""
    reason = message.reason.split("\n", 1)[0]
    return PeerRefused(
        f"refused by the {by}: {reason}",
        code=message.code.value,
        differences=tuple(difference.swapped() for difference in message.differences),
    )


def _alone(manifest: kv_planner.RankManifest) -> kv_planner.RankManifest:
    """A rank as one of its data-parallel group: each group is a whole copy of the model."""
    place = manifest.placement
    if place.dp_size == 1:
        return manifest
    group = kv_planner.Placement(
        pp_rank=place.pp_rank,
        pp_size=place.pp_size,
        tp_rank=place.tp_rank,
        tp_size=place.tp_size,
        dcp_rank=place.dcp_rank,
        dcp_size=place.dcp_size,
    )
    return kv_planner.RankManifest(manifest.layout, group, manifest.entries)


def _agree(
    prefill: kv_planner.RankManifest | kv_planner.Deployment,
    decode: kv_planner.RankManifest,
    parts: Sequence[kv_planner.Part],
    here: Literal["prefill", "decode"],
) -> kv_planner.Agreement:
    # Always from prefill to decode: one prefill rank can send to several that share a request, and not the other way.
    try:
        if isinstance(prefill, kv_planner.RankManifest):
            prefill = _alone(prefill)
        return kv_planner.agree(prefill, _alone(decode), parts=parts)
    except kv_planner.LayoutMismatch as error:
        raise _mismatch(error, turned=here == "decode") from error
    except kv_planner.PlanError as error:
        raise PeerRefused(f"the two sides cannot be paired: {error}", code=RefusalCode.LAYOUT.value) from error


def _mismatch(error: kv_planner.LayoutMismatch, *, turned: bool = False) -> PeerRefused:
    records = tuple(
        DifferenceRecord(
            field=_clip(str(difference.field)),
            local=_clip(str(difference.local)),
            remote=_clip(str(difference.remote)),
            consequence=_clip(str(difference.consequence)),
            remedy=_clip(str(difference.remedy)),
        )
        for difference in error.differences
    )
    return PeerRefused(
        f"the layouts or buffers of the two sides do not fit ({len(records)} difference{'s' * (len(records) > 1)})",
        code=RefusalCode.LAYOUT.value,
        differences=tuple(record.swapped() for record in records) if turned else records,
    )


def _names(layers: Iterable[Layer]) -> str:
    return ", ".join(f"{part} {layer}" for part, layer in sorted(layers)) or "none"


def _clip(text: str) -> str:
    return text if len(text) <= 16_384 else text[:16_380] + " …"
