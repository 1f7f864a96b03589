"""Whether two sides fit: ranks, manifests from the wire, pairwise and whole agreement, refusals in both directions.

Compares through kv_planner; it knows no sockets and keeps no peers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import kv_planner

from kv_transfer.coverage import Layer
from kv_transfer.errors import PeerRefused, ProtocolError, ProtocolVersionError, UnsupportedLayout
from kv_transfer.messages import DifferenceRecord, Refusal, RefusalCode

__all__ = [
    "Rank",
    "RouteSummary",
    "agree_pair",
    "agree_whole",
    "as_refusal",
    "check_engine",
    "check_movable",
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


def check_movable(manifest: kv_planner.RankManifest) -> None:
    """Raises `UnsupportedLayout` when a component is not organised in pages."""
    for spec in manifest.layout.components:
        if spec.item_kind != "page":
            raise UnsupportedLayout(
                f"{spec.part} {spec.component}: its items are {spec.item_kind!r}, only pages are moved",
                local=spec.item_kind,
                consequence="it would be missing at the peer",
                remedy="leave the component out of the layout, or move it by other means",
            )


def parse_manifest(text: str) -> kv_planner.RankManifest:
    """A manifest from the wire.

    Raises:
        PeerRefused: It is malformed, or of a kind that is not moved.
    """
    try:
        manifest = kv_planner.RankManifest.from_json(text)
    except ValueError as error:
        raise PeerRefused(f"the manifest is malformed: {error}", code=RefusalCode.MALFORMED.value) from error
    try:
        check_movable(manifest)
    except UnsupportedLayout as error:
        raise PeerRefused(str(error), code=RefusalCode.UNSUPPORTED.value) from error
    return manifest


def check_engine(local: str, remote: str) -> None:
    """Raises `PeerRefused` when the sides use different engines."""
    if local != remote:
        raise PeerRefused(
            f"transfer engines differ: local {local!r}, remote {remote!r}; no bytes could be moved",
            code=RefusalCode.ENGINE.value,
            remedy="create the same engine on both sides",
        )


def agree_pair(local: kv_planner.RankManifest, remote: kv_planner.RankManifest) -> kv_planner.Agreement:
    """Agreement of two ranks, source = local.

    Raises:
        PeerRefused: With every difference, seen from here.
    """
    return _agree(local, remote)


def agree_whole(local: kv_planner.RankManifest, prefill: Sequence[kv_planner.RankManifest]) -> kv_planner.Agreement:
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
    return _agree(local, deployment).reversed()


def as_refusal(error: PeerRefused | ProtocolError) -> PeerRefused:
    """What an error in a peer's words means for the peer: it is refused."""
    if isinstance(error, PeerRefused):
        return error
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
    local: kv_planner.RankManifest, remote: kv_planner.RankManifest | kv_planner.Deployment
) -> kv_planner.Agreement:
    try:
        return kv_planner.agree(local, remote)
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
        f"the layouts of the two sides differ in {len(records)} fields",
        code=RefusalCode.LAYOUT.value,
        differences=records,
    )


def _clip(text: str) -> str:
    return text if len(text) <= 16_384 else text[:16_380] + " …"
