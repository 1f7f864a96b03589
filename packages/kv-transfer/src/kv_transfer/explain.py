"""Explains a transfer between two described deployments: the planner's report, and the time that each engine takes.

Who sends what is the planner's, group by group; rates are the doctor's, measured on this machine.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pydantic
from kv_planner.explain import Deployment, Difference, Rank, Transfer
from kv_planner.explain import Report as Plan
from kv_planner.explain import explain as plan
from pydantic import BaseModel, ConfigDict, Field

from kv_transfer.arguments import check_items, check_kind, check_whole
from kv_transfer.doctor import EngineReport
from kv_transfer.groups import MAIN
from kv_transfer.spans import request_span

__all__ = ["Estimate", "Explanation", "Side", "explain", "read_side"]


_SMALL_BLOCK = 4096


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Side(_Data):
    """A described deployment whose pages are of several groups.

    Attributes:
        groups: What each group keeps, and how the ranks share it; with `stages` where pipeline stages share all layers
            evenly, and not those of the group.
        windows: Tokens of the window of each group that has one.
    """

    groups: Mapping[str, Deployment] = Field(min_length=1)
    windows: Mapping[str, int] = {}


class Estimate(_Data):
    """Time of one engine for the whole request, between ranks that share no link.

    Attributes:
        engine: As for `create_engine`.
        seconds_joined: When the request's pages lie one behind the other.
        seconds_scattered: When no two do.
        slowest: The rank that takes so long, as in "decode 0"; the others wait for it.
        megabytes_per_second: Rate that it is based on, in 10**6 bytes.
        microseconds_per_block: Cost of a block that it is based on.
    """

    engine: str
    seconds_joined: float
    seconds_scattered: float
    slowest: str
    megabytes_per_second: float
    microseconds_per_block: float


class Explanation(_Data):
    """The plan of a request, or the reasons why there is none, and what it costs.

    Attributes:
        plan: Over all groups: what each rank sends to each.
        groups: The plan of each group, where there are several.
        windows: Tokens of the window of each group that has one.
        estimates: Of each engine.
    """

    plan: Plan
    groups: Mapping[str, Plan] = {}
    windows: Mapping[str, int] = {}
    estimates: tuple[Estimate, ...] = ()

    def text(self) -> str:
        """For people."""
        lines = [self.plan.text()] if not self.groups or not self.plan.agrees else []
        for name, own in self.groups.items() if self.plan.agrees else ():
            window = f", those of the last {self.windows[name]:,} tokens" if name in self.windows else ""
            lines += [f"group {name}: {own.pages:,} pages{window}", own.text(), ""]
        if self.groups and self.plan.agrees:
            lines.append("all groups: " + ", ".join(_moved(move) for move in self.plan.transfers))
        if self.estimates:
            lines.append("\nestimated time until the slowest rank is done, from rates measured on this machine:")
        for own_time in self.estimates:
            joined, scattered = _time(own_time.seconds_joined), _time(own_time.seconds_scattered)
            rate, cost = own_time.megabytes_per_second, own_time.microseconds_per_block
            lines.append(
                f"  {own_time.engine}: {joined} (pages together) to {scattered} (pages scattered) "
                f"for {own_time.slowest}, at {rate:.0f} MB/s and {cost:.1f} µs a block"
            )
        blocks = sum(move.blocks_joined for move in self.plan.transfers)
        nbytes = sum(move.bytes for move in self.plan.transfers)
        if self.estimates and blocks and nbytes // blocks < _SMALL_BLOCK:
            lines.append(
                f"blocks hold {nbytes // blocks} bytes on average, so their number counts more than their bytes: with "
                f"equal tensor-parallel sizes, or heads before tokens in a page on both sides, there are far fewer"
            )
        return "\n".join(lines)


def explain(
    prefill: Deployment | Side,
    decode: Deployment | Side,
    *,
    pages: int = 1,
    engines: Iterable[EngineReport] = (),
) -> Explanation:
    """Says who sends what to whom and how long it takes, or all reasons why not.

    Args:
        prefill: The sending side.
        decode: The receiving side.
        pages: Pages of the request, all full, in the first group that has no window; other groups have what these
            tokens need.
        engines: Measured engines; those that do not work are left out.

    Raises:
        ArgumentError: A side, the pages or the engines are none.
        kv_planner.PlanError: A side is not possible by itself.
        ValueError: A side gives its stages twice, or more stages than layers.
    """
    for argument, given in (("prefill", prefill), ("decode", decode)):
        if not isinstance(given, Deployment):
            check_kind(argument, given, Side)
    pages = check_whole("pages", pages, 2**31 - 1, least=1)
    engines = [check_kind("engines", own, EngineReport) for own in check_items("engines", engines)]
    sides = [own if isinstance(own, Side) else Side(groups={MAIN: own}) for own in (prefill, decode)]
    differences = list(_differences(*sides))
    found = {}
    for name in sides[0].groups:
        if name in sides[1].groups:
            count = _pages(sides[0], sides[1], name, pages)
            found[name] = plan(sides[0].groups[name], sides[1].groups[name], pages=count)
    several = max(len(own.groups) for own in sides) > 1
    for name, own_plan in found.items():
        prefix = f"group {name!r}: " if several else ""
        differences += [own.model_copy(update={"field": prefix + own.field}) for own in own_plan.differences]
    whole = Plan(agrees=False, pages=pages, differences=differences) if differences else _whole(found, pages)
    if not several:
        found = {}
    windows = dict(sides[0].windows)
    if not whole.agrees:
        return Explanation(plan=whole, groups=found, windows=windows)
    working = [own for own in engines if own.works and own.megabytes_per_second]
    estimates = tuple(_estimate(whole, own) for own in working)
    return Explanation(plan=whole, groups=found, windows=windows, estimates=estimates)


def read_side(path: Path) -> Side:
    """A described deployment: that of kv-planner, or `{"groups": {name: deployment}, "windows": {name: tokens}}`.

    Raises:
        ArgumentError: No path.
        OSError: The file cannot be read.
        ValueError: It is not the JSON of a deployment, or its windows are of no group.
    """
    check_kind("path", path, Path)
    try:
        text = path.read_text(encoding="utf-8")
        known = json.loads(text)
        if isinstance(known, dict) and "groups" in known:
            side = Side.model_validate_json(text)
        else:
            side = Side(groups={MAIN: Deployment.model_validate_json(text)})
    except pydantic.ValidationError as error:
        wrong = [f"{'.'.join(map(str, item['loc'])) or 'the file'}: {item['msg']}" for item in error.errors()]
        raise ValueError(f"{path}: {'; '.join(wrong)} (python -m kv_planner schema says what it may hold)") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
    unknown = sorted(side.windows.keys() - side.groups.keys())
    if unknown or any(window < 1 for window in side.windows.values()):
        raise ValueError(f"windows: {dict(side.windows)}: expected tokens, 1 or more, of groups {sorted(side.groups)}")
    for own in side.groups.values():
        own.stages()
        own.layout()
    return side


def _pages(prefill: Side, decode: Side, name: str, pages: int) -> int:
    """Pages of a group for a request that fills `pages` pages of the first group without a window."""
    first = next((own for own in prefill.groups if own not in prefill.windows), next(iter(prefill.groups)))
    tokens = pages * prefill.groups[first].model.page_size
    size = prefill.groups[name].model.page_size
    place, _ = next(decode.groups[name].places())
    return request_span(tokens, 0, size, prefill.windows.get(name), place).pages


def _differences(prefill: Side, decode: Side) -> Iterable[Difference]:
    for name in sorted({*prefill.groups, *decode.groups}):
        there = [name in own.groups for own in (prefill, decode)]
        if not all(there):
            yield Difference(
                field=f"group {name!r}",
                local="present" if there[0] else "absent",
                remote="present" if there[1] else "absent",
                consequence="one side has pages that the other neither sends nor fills",
                remedy="describe the same groups on both sides",
            )
        windows = [own.windows.get(name) for own in (prefill, decode)]
        if windows[0] != windows[1]:
            yield Difference(
                field=f"group {name!r}.window",
                local=windows[0],
                remote=windows[1],
                consequence="pages would be sent that are not expected, or expected and never filled",
                remedy="give the same windows on both sides",
            )


def _whole(plans: Mapping[str, Plan], pages: int) -> Plan:
    """What each rank sends to each over all groups."""
    if len(plans) == 1:
        return next(iter(plans.values()))
    moves: dict[tuple[int, int], Transfer] = {}
    for name, own in plans.items():
        for move in own.transfers:
            layers = {f"{name} {part}": ids for part, ids in move.layers.items()}
            heads = {f"{name} {what}": ranges for what, ranges in move.heads.items()}
            known = moves.get((move.source, move.destination))
            sums = {
                field: getattr(move, field) + (getattr(known, field) if known is not None else 0)
                for field in ("bytes_per_page", "bytes_per_request", "bytes", "blocks_joined", "blocks_scattered")
            }
            if known is not None:
                layers, heads = {**known.layers, **layers}, {**known.heads, **heads}
            moves[move.source, move.destination] = Transfer(
                source=move.source, destination=move.destination, layers=layers, heads=heads, **sums
            )
    first = next(iter(plans.values()))
    busy = {index for pair in moves for index in (("from", pair[0]), ("to", pair[1]))}

    def ranks(side: list[Rank], way: str) -> list[Rank]:
        return [rank.model_copy(update={"idle": (way, rank.index) not in busy}) for rank in side]

    return Plan(
        agrees=True,
        pages=pages,
        prefill=ranks(first.prefill, "from"),
        decode=ranks(first.decode, "to"),
        transfers=[moves[pair] for pair in sorted(moves)],
    )


def _moved(move: Transfer) -> str:
    return f"prefill {move.source} -> decode {move.destination} {move.bytes:,} bytes"


def _estimate(found: Plan, own: EngineReport) -> Estimate:
    rate, cost = (own.megabytes_per_second or 0.0) * 1e6, (own.microseconds_per_block or 0.0) / 1e6
    (joined, slowest), (scattered, _) = (
        _slowest(
            (move.source, move.destination, move.bytes / rate + getattr(move, name) * cost) for move in found.transfers
        )
        for name in ("blocks_joined", "blocks_scattered")
    )
    return Estimate(
        engine=own.name,
        seconds_joined=joined,
        seconds_scattered=scattered,
        slowest=slowest,
        megabytes_per_second=rate / 1e6,
        microseconds_per_block=cost * 1e6,
    )


def _slowest(moves: Iterable[tuple[int, int, float]]) -> tuple[float, str]:
    """A rank sends, and is sent to, one transfer after the other; ranks work side by side."""
    busy: defaultdict[str, float] = defaultdict(float)
    for source, destination, seconds in moves:
        busy[f"prefill {source}"] += seconds
        busy[f"decode {destination}"] += seconds
    rank = max(busy, key=busy.__getitem__, default="nobody")
    return busy[rank], rank


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
