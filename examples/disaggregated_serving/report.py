"""What a run looks like to a person (tables) and to a program (`demo-report.json`): the same figures.

It neither serves nor judges.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from .config import ServeConfig
    from .front import Served, ServeResult
    from .reference import Verdict


@dataclass(frozen=True)
class Judgement:
    """Verdicts by room; empty when the check was switched off.

    Attributes:
        margin_share: largest share of tokens that may be within the margin rather than exact.
    """

    verdicts: dict[int, Verdict]
    margin_share: float = 0.01

    @property
    def checked(self) -> int:
        """Tokens compared."""
        return sum(v.exact + v.in_margin + len(v.wrong) for v in self.verdicts.values())

    @property
    def in_margin(self) -> int:
        """Tokens that are not the argmax but within the margin."""
        return sum(v.in_margin for v in self.verdicts.values())

    @property
    def wrong(self) -> int:
        """Tokens that are neither."""
        return sum(len(v.wrong) for v in self.verdicts.values())

    @property
    def ok(self) -> bool:
        """Whether every token stands, and few enough needed the margin."""
        return self.wrong == 0 and self.in_margin <= self.margin_share * self.checked


def _request_row(served: Served) -> dict[str, Any]:
    return {
        "room": served.room,
        "prompt_tokens": len(served.prompt),
        "new_tokens": len(served.output),
        "time_to_first_token_s": round(served.first_token_seconds, 4),
        "tokens_per_second": round(served.tokens_per_second, 3),
        "median_inter_token_s": round(served.median_gap, 4),
        "max_inter_token_s": round(max(served.gaps, default=0.0), 4),
        "kv_bytes": served.nbytes,
        "kv_blocks": served.blocks,
        "kv_pages": served.pages,
    }


def as_json(config: ServeConfig, result: ServeResult, judgement: Judgement | None) -> dict[str, Any]:
    """All figures of a run."""
    counters = result.counters
    return {
        "ok": judgement is None or judgement.ok,
        "engine": config.engine,
        "device": result.device,
        "model": "SmolLM2-135M-Instruct" if config.model is None else f"random-{config.model.seed}",
        "tokens_emitted": sum(len(served.output) for served in result.requests),
        "tokens_checked": 0 if judgement is None else judgement.checked,
        "tokens_in_margin": 0 if judgement is None else judgement.in_margin,
        "tokens_wrong": 0 if judgement is None else judgement.wrong,
        "graph_replays": counters.graph_replays,
        "eager_steps": sum(counters.eager_steps.values()),
        "eager_reasons": counters.eager_steps,
        "steps_by_bucket": {str(bucket): count for bucket, count in sorted(counters.steps_by_bucket.items())},
        "most_in_flight": counters.most_in_flight,
        "serving_seconds": round(result.seconds, 3),
        "requests": [_request_row(served) for served in result.requests],
    }


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Write the report in one piece."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(figures, indent=2) + "\n")
    draft.replace(path)


def show(console: Console, figures: dict[str, Any]) -> None:
    """Print the table of requests and the summary under it."""
    table = Table(title="Requests", title_justify="left")
    for title in (
        "request",
        "prompt",
        "new",
        "first token",
        "tokens/s",
        "gap median",
        "gap max",
        "KV MB",
        "blocks",
        "pages",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for row in figures["requests"]:
        table.add_row(
            str(row["room"]),
            str(row["prompt_tokens"]),
            str(row["new_tokens"]),
            f"{row['time_to_first_token_s']:.2f} s",
            f"{row['tokens_per_second']:.1f}",
            f"{row['median_inter_token_s'] * 1e3:.0f} ms",
            f"{row['max_inter_token_s'] * 1e3:.0f} ms",
            f"{row['kv_bytes'] / 1e6:.1f}",
            str(row["kv_blocks"]),
            str(row["kv_pages"]),
        )
    console.print(table)
    buckets = ", ".join(f"{count} at bucket {bucket}" for bucket, count in figures["steps_by_bucket"].items())
    reasons = ", ".join(f"{count}: {reason}" for reason, count in figures["eager_reasons"].items()) or "none"
    console.print(f"device          {figures['device']}")
    console.print(f"engine          {figures['engine']}")
    console.print(f"decode steps    {figures['graph_replays']} graph replays ({buckets})")
    console.print(f"eager fallbacks {reasons}")
    console.print(f"in flight       at most {figures['most_in_flight']} requests decoding at once")
    if figures["tokens_checked"]:
        console.print(
            f"check           {figures['tokens_checked']} tokens against a plain forward: "
            f"{figures['tokens_wrong']} wrong, {figures['tokens_in_margin']} within the margin"
        )
    else:
        console.print("check           not done (--no-check)")
