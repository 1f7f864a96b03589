"""Recurrent states between unequal TP: SGLang 0.5.23's blocks beside our state routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kv_planner as kp
import pytest

GOLDEN = json.loads((Path(__file__).parent / "golden/states.json").read_text(encoding="utf-8"))
CASES = [
    pytest.param(
        case,
        id=f"{case['groups']} {'apart' if case['apart'] else 'together'}, {case['prefill']} to {case['decode']}",
    )
    for case in GOLDEN["cases"]
]


def channels(blocks: list[list[int]]) -> list[tuple[int, int, int]]:
    """(destination channel, source rank, source channel), one by one."""
    return sorted((to + i, rank, source + i) for rank, source, to, count in blocks for i in range(count))


@pytest.mark.parametrize("case", CASES)
def test_blocks(case: dict[str, Any]) -> None:
    """Groups sharded apart are groups of the route; a state of one axis is one group of all channels."""
    groups = [(width, 1) for width in (case["groups"] if case["apart"] else [sum(case["groups"])])]
    for rank, theirs in enumerate(case["ranks"]):
        found: list[list[int]] = []
        for sender in range(case["prefill"]):
            route = kp.StateRoute(groups, source=(sender, case["prefill"]), destination=(rank, case["decode"]))
            columns = zip(*(column.tolist() for column in route.arrays()), strict=True)
            found += [[sender, *block] for block in columns]
        assert channels(found) == channels(theirs)
        assert [to for to, _, _ in channels(found)] == list(range(sum(case["groups"]) // case["decode"]))
