"""Runs of pages: SGLang 0.5.23's grouping beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kv_planner as kp
import pytest

GOLDEN = json.loads((Path(__file__).parent / "golden/runs.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", [pytest.param(case, id=str(index)) for index, case in enumerate(GOLDEN["cases"])])
def test_runs(case: dict[str, Any]) -> None:
    runs = kp.Runs(case["source"], case["destination"])
    assert [list(run) for run in zip(*(part.tolist() for part in runs.arrays()), strict=True)] == case["runs"]


def test_an_empty_side_is_not_an_empty_transfer() -> None:
    """A-35: SGLang sends nothing and reports success when one list is empty; ours refuses lists of unequal length."""
    with pytest.raises(kp.UnequalPages):
        kp.Runs([3, 4], [])
