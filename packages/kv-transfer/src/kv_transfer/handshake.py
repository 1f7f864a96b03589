"""Whether two sides fit: ranks, groups from the wire, pairwise and whole agreement, refusals in both directions.

Compares through kv_planner, group by group; it knows no sockets and keeps no peers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import kv_planner

from kv_transfer.arguments import check_kind
from kv_transfer.config import Limits
from kv_transfer.coverage import Layer
from kv_transfer.errors import (
    ArgumentError,
    MessageTooLarge,
    PeerRefused,
    ProtocolError,
    ProtocolVersionError,
    UnsupportedLayout,
)
from kv_transfer.faults import is_fault
from kv_transfer.groups import Group, Groups
from kv_transfer.messages import DifferenceRecord, GroupManifest, Refusal, RefusalCode, encode
from kv_transfer.spans import Interleave
from kv_transfer.summaries import Summaries, is_empty, kept_by_all

__all__ = [
    "Rank",
    "agree_pair",
    "agree_whole",
    "as_refusal",
    "check_expected",
    "check_interleave",
    "check_movable",
    "check_side",
    "parse_groups",
    "refusal_error",
    "refusal_message",
]

_Here = Literal["prefill", "decode"]


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
        return cls.at(manifest.placement)

    @classmethod
    def at(cls, place: kv_planner.Placement) -> Rank:
        """The rank of a placement."""
        check_kind("place", place, kv_planner.Placement)
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


def check_movable(groups: Groups, parts: Iterable[kv_planner.Part]) -> None:
    """Refuses what is not moved.

    Raises:
        UnsupportedLayout: A component of `parts` has items that are neither pages nor request rows, or heads that do
            not split over the ranks.
    """
    wanted, place = set(parts), groups.placement
    for group in groups:
        for spec in group.manifest.layout.components:
            name = f"{groups.label(group.name)}{spec.part} {spec.component}"
            if spec.part not in wanted:
                continue
            if spec.item_kind not in ("page", "request_row"):
                raise UnsupportedLayout(
                    f"{name}: its items are {spec.item_kind!r}, only pages and rows are moved",
                    local=spec.item_kind,
                    consequence="it would be missing at the peer",
                    remedy="leave the component out of the layout, or move it by other means",
                )
            try:
                kv_planner.split_heads(spec.total_heads, tp_rank=place.tp_rank, tp_size=place.tp_size)
            except kv_planner.PlanError as error:
                raise UnsupportedLayout(
                    f"{name}: {error}", local=f"{spec.total_heads} heads, tp {place.tp_size}"
                ) from error


def check_interleave(routes: Mapping[str, kv_planner.Route], interleave: Interleave) -> None:
    """Refuses routes whose tokens are to be dealt out and cannot be.

    Raises:
        PeerRefused: A component that is shared by token lies in pages that do not hold their tokens evenly.
    """
    for name, route in routes.items():
        if interleave == "page" or route.destination.placement.dcp_size == 1:
            continue
        try:
            for component, part in dict.fromkeys((pair.component, pair.part) for pair in route.pairs):
                if not kept_by_all(component, part):
                    route.slice(components=[component], parts=[part], item_kinds=["page"]).by_token()
        except kv_planner.PlanError as error:
            raise PeerRefused(
                f"group {name!r}: tokens cannot be dealt out to context-parallel ranks: {error}",
                code=RefusalCode.UNSUPPORTED.value,
                remedy="use Receiver(interleave='page')",
            ) from error


def parse_groups(words: Mapping[str, GroupManifest], parts: Iterable[kv_planner.Part]) -> Groups:
    """Groups from the wire, of which `parts` are to be moved.

    Raises:
        PeerRefused: They are malformed, or of a kind that is not moved.
    """
    try:
        groups = Groups(
            Group(name, kv_planner.RankManifest.from_json(own.manifest), own.window) for name, own in words.items()
        )
    except ArgumentError as error:
        raise PeerRefused(f"the groups are malformed: {error}", code=RefusalCode.MALFORMED.value) from error
    except ValueError as error:
        raise PeerRefused(f"the manifest is malformed: {error}", code=RefusalCode.MALFORMED.value) from error
    try:
        check_movable(groups, parts)
    except UnsupportedLayout as error:
        raise PeerRefused(str(error), code=RefusalCode.UNSUPPORTED.value) from error
    return groups


def agree_pair(
    prefill: Groups, decode: Groups, parts: Sequence[kv_planner.Part], *, here: _Here
) -> dict[str, kv_planner.Agreement]:
    """Agreements of two ranks on `parts`, by group; `here` is this side.

    Raises:
        PeerRefused: With every difference, seen from here; a rank that lacks what its placement says is one.
    """
    return _agree({group.name: (group, group.manifest) for group in prefill}, decode, parts, here)


def agree_whole(
    decode: Groups, prefill: Sequence[Groups], parts: Sequence[kv_planner.Part]
) -> dict[str, kv_planner.Agreement]:
    """Agreements of a receiver with its whole prefill side, source = prefill.

    Every rank has agreed by itself before, so that all have the receiver's groups.

    Raises:
        PeerRefused: A rank is missing or double, or the layouts differ.
    """
    sides: dict[str, tuple[Group, kv_planner.Deployment]] = {}
    for group in decode:
        try:
            own = kv_planner.Deployment([_alone(rank[group.name].manifest) for rank in prefill])
        except kv_planner.LayoutMismatch as error:
            raise _refusal(_records(error, group.name, len(decode)), "prefill") from error
        except kv_planner.PlanError as error:
            ranks = ", ".join(str(Rank.at(rank.placement)) for rank in prefill)
            raise PeerRefused(
                f"the prefill side of ranks {ranks} is not whole: {decode.label(group.name)}{error}",
                code=RefusalCode.DEPLOYMENT.value,
            ) from error
        sides[group.name] = (group, own)
    return _agree(sides, decode, parts, "decode")


def check_side(place: kv_planner.Placement, prefill_ranks: int, dp_rank: int) -> None:
    """Compares the size of a rank's side with what the receiver waits for.

    Raises:
        PeerRefused: Another number of ranks, another data-parallel group, or shares of requests.
    """
    rank = Rank.at(place)
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


def check_expected(rank: Rank, own: Summaries, expected: Summaries) -> None:
    """Compares what `rank` would send, seen from itself, with what the receiver of the whole side waits for.

    A rank of which nothing is awaited fits: it is offered no pages.

    Raises:
        PeerRefused: They differ; both values are named.
    """
    if own.keys() != expected.keys():
        raise ProtocolError(f"ready for groups {sorted(expected)}, agreed were {sorted(own)}")
    records = []
    for name, mine in own.items() if not is_empty(expected) else ():
        theirs = expected[name]
        pairs = [
            ("layers", _names(mine.layers), _names(theirs.layers)),
            ("bytes per page", str(mine.bytes_per_page), str(theirs.bytes_per_page)),
            ("layers with states", _names(mine.states), _names(theirs.states)),
            ("bytes of states per request", str(mine.bytes_per_request), str(theirs.bytes_per_request)),
        ]
        records += [
            DifferenceRecord(
                field=f"{_prefix(name, len(own))}{what} that rank {rank} sends",
                local=_clip(local),
                remote=_clip(remote),
                consequence="every room would end as a failure",
                remedy="give each rank the heads of kv_planner.split_heads, replicas of a head side by side",
            )
            for what, local, remote in pairs
            if local != remote
        ]
    if records:
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


def refusal_message(error: PeerRefused, limits: Limits) -> Refusal:
    """The message that tells the other side, without the differences where they are too many for a message."""
    code = RefusalCode(error.code)
    message = Refusal(code=code, reason=_clip(str(error)), differences=error.differences)
    try:
        encode(message, limits)
    except MessageTooLarge:
        return Refusal(code=code, reason="too many differences to list")
    return message


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
    prefill: Mapping[str, tuple[Group, kv_planner.RankManifest | kv_planner.Deployment]],
    decode: Groups,
    parts: Sequence[kv_planner.Part],
    here: _Here,
) -> dict[str, kv_planner.Agreement]:
    # Always from prefill to decode: one prefill rank can send to several that share a request, and not the other way.
    found: dict[str, kv_planner.Agreement] = {}
    records: list[DifferenceRecord] = []
    for name in sorted({*prefill, *decode.names}):
        there = decode.get(name)
        if name not in prefill or there is None:
            mine, theirs = ("absent", "present") if there is not None else ("present", "absent")
            records.append(_record(f"group {name!r}", mine, theirs, _MISSING, _ADD))
            continue
        own, side = prefill[name]
        if own.window != there.window:
            records.append(_record(f"group {name!r}.window", _tokens(own), _tokens(there), _WINDOW, _SAME))
        if isinstance(side, kv_planner.RankManifest):
            side = _alone(side)
        try:
            found[name] = kv_planner.agree(side, _alone(there.manifest), parts=parts)
        except kv_planner.LayoutMismatch as error:
            records += _records(error, name, max(len(decode), len(prefill)))
        except kv_planner.PlanError as error:
            raise PeerRefused(
                f"the two sides cannot be paired: {decode.label(name)}{error}", code=RefusalCode.LAYOUT.value
            ) from error
    if records:
        raise _refusal(records, here)
    return found


_MISSING = "one side has pages that the other neither sends nor fills"
_ADD = "give Sender and Receiver manifests of the same groups"
_WINDOW = "pages would be sent that are not expected, or expected and never filled"
_SAME = "give Sender and Receiver the same windows"


def _tokens(group: Group) -> str:
    return f"{group.window} tokens" if group.window is not None else "none"


def _record(field: str, local: str, remote: str, consequence: str, remedy: str) -> DifferenceRecord:
    return DifferenceRecord(field=field, local=local, remote=remote, consequence=consequence, remedy=remedy)


def _records(error: kv_planner.LayoutMismatch, name: str, groups: int) -> list[DifferenceRecord]:
    """The planner's differences of one group, local = prefill."""
    return [
        _record(
            _clip(_prefix(name, groups) + str(difference.field)),
            _clip(str(difference.local)),
            _clip(str(difference.remote)),
            _clip(str(difference.consequence)),
            _clip(str(difference.remedy)),
        )
        for difference in error.differences
    ]


def _refusal(records: Sequence[DifferenceRecord], here: _Here) -> PeerRefused:
    return PeerRefused(
        f"the layouts or buffers of the two sides do not fit ({len(records)} difference{'s' * (len(records) > 1)})",
        code=RefusalCode.LAYOUT.value,
        differences=tuple(record.swapped() for record in records) if here == "decode" else tuple(records),
    )


def _prefix(name: str, groups: int) -> str:
    return f"group {name!r}: " if groups > 1 else ""


def _names(layers: Iterable[Layer]) -> str:
    return ", ".join(f"{part} {layer}" for part, layer in sorted(layers)) or "none"


def _clip(text: str) -> str:
    return text if len(text) <= 16_384 else text[:16_380] + " …"
