"""select_index of padded batches: SGLang 0.5.23's native function beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kv_planner as kp
import pytest

GOLDEN = json.loads((Path(__file__).parent / "golden/steps.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", [pytest.param(case, id=str(index)) for index, case in enumerate(GOLDEN["cases"])])
def test_select_index(case: dict[str, Any]) -> None:
    """Live rows agree; in padded rows SGLang counts the drafts of an earlier batch, ours none (A-03)."""
    found = kp.select_index(case["drafts"], rows=case["bucket"], width=case["width"], front=case["front"]).tolist()
    live = case["rows"]
    assert found[:live] == case["select_index"][:live]
    assert [index + case["stale"] for index in found[live:]] == case["select_index"][live:]
