"""What a run looks like to a person (tables) and to a program (`demo-report.json`): the same figures.

It neither serves nor judges.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from .config import Mode, ServeConfig
    from .front import Served, ServeResult
    from .reference import Verdict


@dataclass
class Judgement:
    """Verdicts over all emitted tokens.

    Attributes:
        verdicts: (round, room) to verdict.
        margin_share: largest share of tokens that may be within the margin rather than exact.
    """

    verdicts: dict[tuple[str, int], Verdict] = field(default_factory=dict)
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


@dataclass(frozen=True)
class Round:
    """A round of requests, how it ran, and whether it is one of the modes that are compared."""

    name: str
    mode: Mode
    result: ServeResult
    compared: bool = False


def _request_row(name: str, served: Served) -> dict[str, Any]:
    return {
        "round": name,
        "room": served.room,
        "prompt_tokens": len(served.prompt),
        "computed_tokens": served.computed,
        "hit_tokens": served.hit,
        "new_tokens": len(served.output),
        "time_to_first_token_s": round(served.first_token_seconds, 4) if served.clocks else None,
        "tokens_per_second": round(served.tokens_per_second, 3),
        "median_inter_token_s": round(served.median_gap, 4),
        "max_inter_token_s": round(max(served.gaps, default=0.0), 4),
        "kv_bytes": served.nbytes,
        "kv_blocks": served.blocks,
        "kv_pages": served.pages,
        "ended": served.ended,
    }


def _mode_row(item: Round) -> dict[str, Any]:
    gaps = [gap for served in item.result.requests for gap in served.gaps]
    first = min(served.clocks[0] for served in item.result.requests)
    last = max(served.clocks[-1] for served in item.result.requests)
    counters = item.result.counters
    return {
        "name": item.name,
        "drafts": item.mode.drafts,
        "length_rule": item.mode.length_rule,
        "graphs": item.mode.graphs,
        "overlap": item.mode.overlap,
        "tokens_per_second": round(len(gaps) / (last - first), 3),
        "tokens_per_step": round(counters.row_tokens / counters.row_steps, 3),
        "median_inter_token_s": round(statistics.median(gaps), 4),
        "max_inter_token_s": round(max(gaps), 4),
        "graph_replays": counters.graph_replays,
        "eager_steps": sum(counters.eager_steps.values()),
    }


def as_json(config: ServeConfig, rounds: list[Round], judgement: Judgement | None) -> dict[str, Any]:
    """All figures of a run."""
    compared = [item for item in rounds if item.compared]
    served = [(item.name, request) for item in rounds if not item.compared for request in item.result.requests]
    outputs = [[request.output for request in item.result.requests] for item in compared]
    same = all(output == outputs[0] for output in outputs)
    counters = [item.result.counters for item in rounds]
    reasons: dict[str, int] = {}
    buckets: dict[int, int] = {}
    for item in counters:
        for reason, count in item.eager_steps.items():
            reasons[reason] = reasons.get(reason, 0) + count
        if item.graph_replays:
            for bucket, count in item.steps_by_bucket.items():
                buckets[bucket] = buckets.get(bucket, 0) + count
    whole = all(request.computed + request.hit == len(request.prompt) for _, request in served if not request.ended)
    return {
        "ok": whole and same and (judgement is None or judgement.ok),
        "engine": config.engine,
        "device": rounds[0].result.device,
        "checked": judgement is not None,
        "new_tokens": config.new_tokens,
        "model": "SmolLM2-135M-Instruct" if config.model is None else f"random-{config.model.seed}",
        "draft_layers": 0 if config.model is None else config.model.draft_layers,
        "draft_replays": sum(item.draft_replays for item in counters),
        "tokens_emitted": sum(len(request.output) for item in rounds for request in item.result.requests),
        "tokens_checked": 0 if judgement is None else judgement.checked,
        "tokens_in_margin": 0 if judgement is None else judgement.in_margin,
        "tokens_wrong": 0 if judgement is None else judgement.wrong,
        "graph_replays": sum(item.graph_replays for item in counters),
        "eager_steps": sum(reasons.values()),
        "eager_reasons": reasons,
        "steps_by_bucket": {str(bucket): count for bucket, count in sorted(buckets.items())},
        "most_in_flight": max(item.most_in_flight for item in counters),
        "hicache_hit_tokens": sum(request.hit for _, request in served),
        "tokens_per_step": round(sum(c.row_tokens for c in counters) / sum(c.row_steps for c in counters), 3),
        "serving_seconds": round(sum(item.result.seconds for item in rounds), 3),
        "prompts_complete": whole,
        "modes_agree": same,
        "modes": [_mode_row(item) for item in compared],
        "requests": [_request_row(name, request) for name, request in served],
    }


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Write the report in one piece."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(figures, indent=2) + "\n")
    draft.replace(path)


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", padding=(0, 0, 0, 1))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _or_dash(value: float, form: str) -> str:
    return format(value, form) if value else "–"


def _show_requests(console: Console, figures: dict[str, Any]) -> None:
    columns = ["#", "prompt", "hit", "new", "first\ntoken s", "tokens\n/s", "median\nms", "max\nms", "KV\nMB"]
    for name in dict.fromkeys(row["round"] for row in figures["requests"]):
        table = _table(f"Requests: {name}", [*columns, "blocks", "pages"])
        for row in figures["requests"]:
            if row["round"] == name:
                table.add_row(
                    str(row["room"]),
                    str(row["prompt_tokens"]),
                    str(row["hit_tokens"]),
                    str(row["new_tokens"]),
                    _or_dash(row["time_to_first_token_s"] or 0, ".2f"),
                    _or_dash(row["tokens_per_second"], ".1f"),
                    _or_dash(row["median_inter_token_s"] * 1e3, ".0f"),
                    _or_dash(row["max_inter_token_s"] * 1e3, ".0f"),
                    f"{row['kv_bytes'] / 1e6:.1f}",
                    str(row["kv_blocks"]),
                    str(row["kv_pages"]),
                )
        console.print(table)
        for row in figures["requests"]:
            if row["round"] == name and row["ended"]:
                console.print(f"request {row['room']} ended early: {row['ended']}", highlight=False)
    console.print(
        "hit: prompt tokens found in the prefill cache. median, max: time between two\n"
        "tokens of a request; tokens of one step come together, and a request waits\n"
        "while all rows of the largest bucket are taken. blocks: copies of the engine.\n",
        highlight=False,
    )


def show(console: Console, figures: dict[str, Any]) -> None:
    """Print the tables and the summary under them."""
    _show_requests(console, figures)
    if figures["modes"]:
        table = _table(
            "Ways to decode (the same four prompts)",
            ["drafts", "length\nrule", "steps", "overlap", "tokens\n/s", "tokens\n/step", "median\nms", "max\nms"],
        )
        for row in figures["modes"]:
            table.add_row(
                str(row["drafts"]),
                row["length_rule"],
                "graph" if row["graphs"] else "eager",
                "yes" if row["overlap"] else "no",
                f"{row['tokens_per_second']:.1f}",
                f"{row['tokens_per_step']:.2f}",
                _or_dash(row["median_inter_token_s"] * 1e3, ".0f"),
                _or_dash(row["max_inter_token_s"] * 1e3, ".0f"),
            )
        console.print(table)
    buckets = ", ".join(f"{count} at bucket {bucket}" for bucket, count in figures["steps_by_bucket"].items())
    reasons = ", ".join(f"{count} {reason}" for reason, count in figures["eager_reasons"].items()) or "none"
    console.print(f"device          {figures['device']}", highlight=False)
    console.print(f"engine          {figures['engine']}")
    console.print(f"decode steps    {figures['graph_replays']} graph replays ({buckets})")
    if figures["draft_layers"]:
        console.print(
            f"draft steps     {figures['draft_replays']} graph replays of {figures['draft_layers']} draft layers"
        )
    console.print(f"eager steps     {reasons}")
    console.print(f"in flight       at most {figures['most_in_flight']} requests decoding at once")
    console.print(f"cache           {figures['hicache_hit_tokens']} prompt tokens found instead of computed")
    console.print(f"speculation     {figures['tokens_per_step']} tokens a step and request")
    if figures["modes"]:
        console.print(
            f"ways to decode  {'all gave the same tokens' if figures['modes_agree'] else 'GAVE OTHER TOKENS'}"
        )
    if figures["tokens_checked"]:
        console.print(
            f"check           {figures['tokens_checked']} tokens against a plain forward: "
            f"{figures['tokens_wrong']} wrong, {figures['tokens_in_margin']} within the margin"
        )
    else:
        console.print("check           not done (--no-check)")
