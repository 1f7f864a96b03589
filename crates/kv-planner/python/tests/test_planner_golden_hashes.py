"""Page hashes and namespace seeds of SGLang 0.5.23's compiled code beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kv_planner as kp
import numpy as np
import pytest

GOLDEN = json.loads((Path(__file__).parent / "golden/hashes.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", [pytest.param(case, id=str(index)) for index, case in enumerate(GOLDEN["chains"])])
def test_chains(case: dict[str, Any]) -> None:
    tokens = np.array(case["tokens"], dtype=np.int64)
    whole = kp.page_hashes(tokens, case["page_size"], prior=case["prior"])
    assert kp.page_hashes(tokens, case["page_size"], prior=case["prior"], partial=True) == tuple(case["hashes"])
    assert whole == tuple(case["hashes"][: len(tokens) // case["page_size"]])


@pytest.mark.parametrize("case", [pytest.param(case, id=str(index)) for index, case in enumerate(GOLDEN["seeds"])])
def test_seeds(case: dict[str, Any]) -> None:
    """A namespace is the digest that a chain starts from."""
    tokens = [5, 6, 7, 8]
    seeded = kp.page_hashes(tokens, 4, prior=case["seed"])
    assert kp.page_hashes(tokens, 4, namespace=(case["extra_key"], case["cache_salt"])) == seeded
