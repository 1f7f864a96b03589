"""Owns how this repository measures: alternating pairs in one run, medians, one JSON file and one table a bench.

It owns no bench: those lie in `benches/` folders, one file a name, and state their references and targets.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Work = Callable[[], object]

RESULTS = Path(__file__).resolve().parents[1] / "bench-results"
SHORTEST = 2e-3  # seconds; shorter work is repeated within one measurement
PARTS = 5  # of a measurement of repeated work, whose median counts: a time slice of another process falls into one
UNITS = {"s": 1.0, "ms": 1e3, "µs": 1e6}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, text = line.partition(":")
        if name.strip() in {"model name", "CPU part"}:
            model = text.strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _repeats(work: Work) -> int:
    """Calls that a measurement needs, judged by the second of two: the first one pays for memory and caches."""
    once = _calls(work, 1)
    if once < SHORTEST:
        once = min(once, _calls(work, 1))
    return max(1, round(SHORTEST / max(once, 1e-8)))


def _calls(work: Work, repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - began) / repeats


def _time(work: Work, repeats: int) -> float:
    """Seconds a call: the median over parts of the repeated calls."""
    parts = min(PARTS, repeats)
    return statistics.median(_calls(work, -(-repeats // parts)) for _ in range(parts))


def _spread(values: Sequence[float]) -> float | None:
    """Distance of the quartiles over the median: one slow round on a busy machine does not hide the rest."""
    if len(values) < 2:
        return None
    low, _, high = statistics.quantiles(values, method="inclusive")
    return (high - low) / statistics.median(values)


class Bench:
    """Rows of one bench.

    Attributes:
        name: file name below `bench-results/`.
        rounds: pairs a row; ours and the reference take turns, and the ratio is the median of the pairs' ratios, so a
            machine that slows down slows both.
        rows: what will be written.
    """

    def __init__(self, name: str, *, rounds: int = 9) -> None:
        self.name = name
        self.rounds = rounds
        self.rows: list[dict[str, Any]] = []
        self._machine = machine()

    def faster(
        self,
        metric: str,
        ours: Work,
        reference: Work,
        *,
        at_least: float,
        goal: float | None = None,
        unit: str = "ms",
    ) -> None:
        """Ours is at least so many times as fast as the field's way."""
        values, references = self._pairs(ours, reference, unit)
        self.record(
            metric, values, unit, references=references, kind="reference/value", op=">=", target=at_least, goal=goal
        )

    def near(
        self, metric: str, ours: Work, limit: Work, *, at_most: float, goal: float | None = None, unit: str = "ms"
    ) -> None:
        """Ours takes at most so many times what the physical limit takes."""
        values, references = self._pairs(ours, limit, unit)
        self.record(
            metric, values, unit, references=references, kind="value/reference", op="<=", target=at_most, goal=goal
        )

    def within(self, metric: str, ours: Work, *, at_most: float, unit: str) -> None:
        """Ours takes at most so long."""
        repeats = _repeats(ours)
        values = [_time(ours, repeats) * UNITS[unit] for _ in range(self.rounds)]
        self.record(metric, values, unit, op="<=", target=at_most)

    def record(
        self,
        metric: str,
        values: Sequence[float],
        unit: str,
        *,
        references: Sequence[float] = (),
        kind: Literal["reference/value", "value/reference"] = "value/reference",
        op: Literal["<=", ">="],
        target: float,
        goal: float | None = None,
    ) -> None:
        """Add a row of figures measured by the caller.

        Args:
            metric: what was measured.
            values: ours, one a round.
            unit: of values and references.
            references: the other side's, one a round, or none.
            kind: which way round the ratio is.
            op: how the ratio, or the value where there are no references, must compare with the target.
            target: what must hold; a miss is a failure.
            goal: what the design asks for where today's target is easier; shown, never judged.
        """
        ratio = None
        if references:
            pairs = list(zip(values, references, strict=True))
            ratio = statistics.median(r / v if kind == "reference/value" else v / r for v, r in pairs)
        judged = statistics.median(values) if ratio is None else ratio
        self.rows.append(
            {
                "metric": metric,
                "value": statistics.median(values),
                "unit": unit,
                "reference": statistics.median(references) if references else None,
                "ratio": ratio,
                "op": op,
                "target": target,
                "goal": goal,
                "pass": judged <= target if op == "<=" else judged >= target,
                "ratio_is": kind if references else None,
                "spread": _spread(values),
                "reference_spread": _spread(references) if references else None,
                "rounds": len(values),
                "machine": self._machine,
            }
        )

    def finish(self) -> NoReturn:
        """Write the file, print the table, leave with 1 if a row misses its target."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        path.write_text(json.dumps(self.rows, indent=2, ensure_ascii=False) + "\n")
        console = Console(width=None if sys.stdout.isatty() else 140)
        table = Table(
            title=f"{self.name}: medians of alternating pairs; spread is the distance of the quartiles over the median"
        )
        for title in ("metric", "value", "reference", "ratio", "target", "goal", "spread", ""):
            table.add_column(title, justify="left" if title == "metric" else "right", no_wrap=title != "metric")
        for row in self.rows:
            reference = "" if row["reference"] is None else f"{row['reference']:.4g} {row['unit']}"
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f} ×"
            table.add_row(
                row["metric"],
                f"{row['value']:.4g} {row['unit']}",
                reference,
                ratio,
                f"{row['op']} {row['target']:g}{' ×' if ratio else ' ' + row['unit']}",
                "" if row["goal"] is None else f"{row['goal']:g}",
                "" if row["spread"] is None else f"{row['spread']:.0%}",
                "[green]pass[/green]" if row["pass"] else "[red]MISS[/red]",
            )
        console.print(table)
        console.print("machine: " + ", ".join(f"{name} {value}" for name, value in self._machine.items()))
        console.print(f"written: {path.relative_to(RESULTS.parent)}")
        sys.exit(0 if self.rows and all(row["pass"] for row in self.rows) else 1)

    def _pairs(self, ours: Work, reference: Work, unit: str) -> tuple[list[float], list[float]]:
        values: list[float] = []
        references: list[float] = []
        counts = _repeats(ours), _repeats(reference)  # a first call of each, not counted
        for turn in range(self.rounds):
            for which in ((0, 1), (1, 0))[turn % 2]:
                taken = _time((ours, reference)[which], counts[which]) * UNITS[unit]
                (values, references)[which].append(taken)
        return values, references
