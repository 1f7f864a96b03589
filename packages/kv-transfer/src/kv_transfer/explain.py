"""Explains a transfer between two described deployments: the planner's report, and the time that each engine takes.

Who sends what is the planner's; rates are the doctor's, measured on this machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from kv_planner.explain import Deployment
from kv_planner.explain import Report as Plan
from kv_planner.explain import explain as plan
from pydantic import BaseModel, ConfigDict

from kv_transfer.doctor import EngineReport

__all__ = ["Estimate", "Explanation", "explain", "read_side"]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Estimate(_Data):
    """Time of one engine for the whole request, between ranks that share no link.

    Attributes:
        engine: As for `create_engine`.
        seconds_joined: When the request's pages lie one behind the other.
        seconds_scattered: When no two do.
        megabytes_per_second: Rate that it is based on, in 10**6 bytes.
        microseconds_per_block: Cost of a block that it is based on.
    """

    engine: str
    seconds_joined: float
    seconds_scattered: float
    megabytes_per_second: float
    microseconds_per_block: float


class Explanation(_Data):
    """The plan of a request, or the reasons why there is none, and what it costs."""

    plan: Plan
    estimates: tuple[Estimate, ...] = ()

    def text(self) -> str:
        """For people."""
        lines = [self.plan.text()]
        if self.estimates:
            lines.append("\nestimated time of the slowest rank, from rates measured on this machine:")
        for own in self.estimates:
            times = f"{_time(own.seconds_joined)} (pages together) to {_time(own.seconds_scattered)} (pages scattered)"
            rates = f"{own.megabytes_per_second:.0f} MB/s and {own.microseconds_per_block:.1f} µs a block"
            lines.append(f"  {own.engine}: {times}, at {rates}")
        return "\n".join(lines)


def explain(
    prefill: Deployment, decode: Deployment, *, pages: int = 1, engines: Iterable[EngineReport] = ()
) -> Explanation:
    """Says who sends what to whom and how long it takes, or all reasons why not.

    Args:
        prefill: The sending side.
        decode: The receiving side.
        pages: Pages of the request.
        engines: Measured engines; those that do not work are left out.

    Raises:
        kv_planner.PlanError: A side is not possible by itself.
        ValueError: A side gives its stages twice, or more stages than layers.
    """
    found = plan(prefill, decode, pages=pages)
    if not found.agrees:
        return Explanation(plan=found)
    working = [own for own in engines if own.works and own.megabytes_per_second]
    return Explanation(plan=found, estimates=tuple(_estimate(found, own) for own in working))


def read_side(path: Path) -> Deployment:
    """A described deployment.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not the JSON of a deployment.
    """
    side = Deployment.model_validate_json(path.read_text(encoding="utf-8"))
    side.stages()
    side.layout()
    return side


def _estimate(found: Plan, own: EngineReport) -> Estimate:
    rate, cost = (own.megabytes_per_second or 0.0) * 1e6, (own.microseconds_per_block or 0.0) / 1e6
    joined, scattered = (
        _slowest(
            (move.source, move.destination, move.bytes / rate + getattr(move, name) * cost) for move in found.transfers
        )
        for name in ("blocks_joined", "blocks_scattered")
    )
    return Estimate(
        engine=own.name,
        seconds_joined=joined,
        seconds_scattered=scattered,
        megabytes_per_second=rate / 1e6,
        microseconds_per_block=cost * 1e6,
    )


def _slowest(moves: Iterable[tuple[int, int, float]]) -> float:
    """A rank sends, and is sent to, one transfer after the other; ranks work side by side."""
    busy: defaultdict[tuple[str, int], float] = defaultdict(float)
    for source, destination, seconds in moves:
        busy["from", source] += seconds
        busy["to", destination] += seconds
    return max(busy.values(), default=0.0)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
