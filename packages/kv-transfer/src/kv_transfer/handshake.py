"""Whether two sides fit: ranks, manifests from the wire, pairwise and whole agreement, refusals in both directions.

Compares through kv_planner; it knows no sockets and keeps no peers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

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

    def __str__(self) -> str:
        """As in "pp1 tp0"; context and data ranks only where they are not 0."""
        text = f"pp{self.pp} tp{self.tp}"
        text += f" dcp{self.dcp}" if self.dcp else ""
        return text + (f" dp{self.dp}" if self.dp else "")


@dataclasses.dataclass(frozen=True, slots=True)
class RouteSummary:
    """What one rank has to deliver for one page.

    Attributes:
        layers: In the order of the route, each once.
        bytes_per_page: Over all layers and components.
    """

    layers: tuple[Layer, ...]
    bytes_per_page: int

    @classmethod
    def of(cls, route: kv_planner.Route) -> RouteSummary:
        """Adds up the pairs of a route."""
        layers = dict.fromkeys((pair.part, pair.layer_id) for pair in route.pairs)
        return cls(tuple(layers), sum(pair.rows * pair.row_bytes for pair in route.pairs))


def check_movable(manifest: kv_planner.RankManifest, parts: Iterable[kv_planner.Part]) -> None:
    """Raises `UnsupportedLayout` when a component of `parts` is not organised in pages."""
    wanted = set(parts)
    for spec in manifest.layout.components:
        if spec.part in wanted and spec.item_kind != "page":
            raise UnsupportedLayout(
                f"{spec.part} {spec.component}: its items are {spec.item_kind!r}, only pages are moved",
                local=spec.item_kind,
                consequence="it would be missing at the peer",
                remedy="leave the component out of the layout, or move it by other means",
            )


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
    local: kv_planner.RankManifest, remote: kv_planner.RankManifest, parts: Sequence[kv_planner.Part]
) -> kv_planner.Agreement:
    """Agreement of two ranks on `parts`, source = local.

    Raises:
        PeerRefused: With every difference, seen from here; a rank that lacks what its placement says is one. Or a side
            spreads a request's pages over context-parallel ranks, which sessions do not follow.
    """
    for manifest in (local, remote):
        if manifest.placement.dcp_size > 1:
            raise PeerRefused(
                f"dcp_size: rank {Rank.of(manifest)} holds one of {manifest.placement.dcp_size} shares of every "
                f"request; sessions number a request's pages as if one rank had them all",
                code=RefusalCode.UNSUPPORTED.value,
                remedy="use a side without context parallelism; kv_planner.page_interleaved plans such a transfer",
            )
    return _agree(local, remote, parts)


def agree_whole(
    local: kv_planner.RankManifest,
    prefill: Sequence[kv_planner.RankManifest],
    parts: Sequence[kv_planner.Part],
) -> kv_planner.Agreement:
    """Agreement of a receiver with its whole prefill side, source = prefill.

    Raises:
        PeerRefused: A rank is missing or double, or the layouts differ.
    """
    try:
        deployment = kv_planner.Deployment(list(prefill))
    except kv_planner.LayoutMismatch as error:
        raise _mismatch(error) from error
    except kv_planner.PlanError as error:
        ranks = ", ".join(str(Rank.of(manifest)) for manifest in prefill)
        raise PeerRefused(
            f"the prefill side of ranks {ranks} is not whole: {error}", code=RefusalCode.DEPLOYMENT.value
        ) from error
    return _agree(local, deployment, parts).reversed()


def check_side(manifest: kv_planner.RankManifest, prefill_ranks: int) -> None:
    """Compares the size of a rank's side with what the receiver waits for.

    Raises:
        PeerRefused: Another number of ranks, or more than one data-parallel group.
    """
    rank, place = Rank.of(manifest), manifest.placement
    if place.dp_size > 1:
        raise PeerRefused(
            f"dp_size: rank {rank} says that its side has {place.dp_size} data-parallel groups, a receiver serves one; "
            f"which group has a request would be unknown",
            code=RefusalCode.DEPLOYMENT.value,
            remedy="take each group for a prefill side of its own, with its Receivers: Placement(dp_rank=0, dp_size=1)",
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
    ]
    if expected.layers and any(local != remote for _, local, remote in pairs):
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


def _agree(
    local: kv_planner.RankManifest,
    remote: kv_planner.RankManifest | kv_planner.Deployment,
    parts: Sequence[kv_planner.Part],
) -> kv_planner.Agreement:
    try:
        return kv_planner.agree(local, remote, parts=parts)
    except kv_planner.LayoutMismatch as error:
        raise _mismatch(error) from error
    except kv_planner.PlanError as error:
        raise PeerRefused(f"the two sides cannot be paired: {error}", code=RefusalCode.LAYOUT.value) from error


def _mismatch(error: kv_planner.LayoutMismatch) -> PeerRefused:
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
        differences=records,
    )


def _names(layers: Iterable[Layer]) -> str:
    return ", ".join(f"{part} {layer}" for part, layer in sorted(layers)) or "none"


def _clip(text: str) -> str:
    return text if len(text) <= 16_384 else text[:16_380] + " …"
