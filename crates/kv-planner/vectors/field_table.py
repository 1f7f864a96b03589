"""Writes docs/field-cases.md from field_cases.json: every known fault of the field, its package, and its tests.

It does not own the cases' texts, which are reports of others; the words here are ours.

Usage: python field_table.py  (from anywhere; `nox -s tests` fails when the page is not what this writes)
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).resolve().parents[3]
CASES = Path(__file__).with_name("field_cases.json")
PAGE = ROOT / "docs/field-cases.md"
FOLDERS = {"kv-planner": "crates/kv-planner/"}
GROUPS = {
    "A": "Layers and pointers",
    "B": "Heads",
    "C": "Pages, blocks and slots",
    "D": "Integer width and memory regions",
    "E": "Replay metadata",
    "F": "Speculative decoding",
    "G": "Pools, caches and keys",
    "H": "Life cycle of a transfer",
}


class Case(TypedDict):
    """One row: the case's number in the project's list, our words, who holds it, and tests as path::name."""

    id: str
    words: str
    package: str
    tests: list[str]


def cases() -> list[Case]:
    """All rows, in order."""
    rows: list[Case] = json.loads(CASES.read_text(encoding="utf-8"))
    return rows


def state(case: Case) -> str:
    """Whether the package that holds the case has a test of it."""
    folder = FOLDERS.get(case["package"], f"packages/{case['package']}/")
    if any(test.startswith(folder) for test in case["tests"]):
        return "tested"
    return "partly tested" if case["tests"] else "to be tested"


def page() -> str:
    """The page."""
    rows = cases()
    counts = Counter(state(case) for case in rows)
    lines = [
        "# Known faults of the field, and their tests",
        "",
        "What went wrong in engines for this hardware, one row a kind of fault, with the package that answers for it",
        "and the tests that would notice. *Partly tested* means that another package's share has a test and the named",
        "package's own does not yet. Written by `crates/kv-planner/vectors/field_table.py`; a test fails when a named",
        "test does not exist.",
        "",
        f"{len(rows)} cases: "
        + ", ".join(f"{counts[name]} {name}" for name in ("tested", "partly tested", "to be tested"))
        + ".",
    ]
    for letter, title in GROUPS.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| case | what goes wrong | package | state | tests |",
            "| --- | --- | --- | --- | --- |",
        ]
        for case in rows:
            if case["id"].startswith(letter):
                tests = "<br>".join(
                    f"`{Path(test.split('::')[0]).name}::{test.split('::')[1]}`" for test in case["tests"]
                )
                lines.append(f"| {case['id']} | {case['words']} | {case['package']} | {state(case)} | {tests} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
