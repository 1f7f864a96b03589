"""Owns the command line: ``python -m kv_planner explain`` and ``schema``. It does not own the report.

Exit codes of `explain`: 0 the sides agree, 1 they are refused, 2 the input is not usable.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from pydantic.json_schema import models_json_schema

import kv_planner as kp
from kv_planner.explain.geometry import Deployment
from kv_planner.explain.report import Report, explain

__all__ = ["run", "schema"]


def schema() -> str:
    """The JSON schema of deployments and reports, as published beside this module."""
    _, definitions = models_json_schema(
        [(Deployment, "validation"), (Report, "serialization")], title="kv_planner explain"
    )
    return json.dumps(definitions, indent=2, ensure_ascii=False) + "\n"


def _pages(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 1 << 16:
        raise argparse.ArgumentTypeError(f"{number} is not in 1..=65536")
    return number


def _read(path: Path) -> Deployment:
    """A described deployment.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not the JSON of a deployment.
    """
    return Deployment.model_validate_json(path.read_text(encoding="utf-8"))


def _why(error: Exception) -> list[str]:
    if isinstance(error, ValidationError):
        places = [(".".join(str(part) for part in own["loc"]) or "the file", own["msg"]) for own in error.errors()]
        return [f"{place}: {message}" for place, message in places]
    return [str(error)]


def run(arguments: Sequence[str]) -> int:
    """Runs one command.

    Args:
        arguments: Words after ``python -m kv_planner``.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m kv_planner", description="Explains transfers between deployments.")
    commands = parser.add_subparsers(dest="command", required=True)
    asks = commands.add_parser("explain", help="who sends what to whom, or all reasons why not")
    asks.add_argument("prefill", type=Path, help="description of the sending side, JSON")
    asks.add_argument("decode", type=Path, help="description of the receiving side, JSON")
    asks.add_argument("--pages", type=_pages, default=1, help="pages of the request that is counted (%(default)s)")
    asks.add_argument("--json", action="store_true", help="print the report as JSON")
    commands.add_parser("schema", help="the JSON schema of descriptions and reports")
    try:
        options = parser.parse_args(arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 2
    if options.command == "schema":
        print(schema(), end="")
        return 0
    sides, bad = [], []
    for path in (options.prefill, options.decode):
        try:
            side = _read(path)
            side.stages()
            side.layout()
            sides.append(side)
        except (OSError, ValueError) as error:
            bad += [f"{path}: {why}" for why in _why(error)]
    try:
        if not bad:
            report = explain(*sides, pages=options.pages)
            print(report.model_dump_json(indent=2) if options.json else report.text())
            return 0 if report.agrees else 1
    except kp.PlanError as error:
        bad.append(str(error))
    print("\n".join(bad), file=sys.stderr)
    return 2
