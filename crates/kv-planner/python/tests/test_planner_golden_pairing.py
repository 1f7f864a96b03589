"""Entries paired by layer ids that repeat: SGLang 0.5.23's answers beside our routes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import kv_planner as kp
import pytest

GOLDEN = json.loads((Path(__file__).parent / "golden/pairing.json").read_text(encoding="utf-8"))


def ranks(layers: list[int], *stages: list[int]) -> kp.Deployment:
    """One key buffer an id, a stage a list, in the lists' order; the k-th of an id is its occurrence k."""
    spec = kp.ComponentSpec("key", layer_ids=sorted(layers), dtype="int8", total_heads=1, dims=1)
    layout = kp.ModelLayout([spec], page_size=2, fingerprint="golden")
    seen: Counter[int] = Counter()
    manifests = []
    for stage, ids in enumerate(stages):
        entries: list[kp.BufferEntry] = []
        for index, layer in enumerate(ids):
            entries.append(
                kp.BufferEntry(
                    "key",
                    "target",
                    layer,
                    device="cpu",
                    address=4096 * (index + 1),
                    nbytes=16,
                    item_stride=2,
                    item_bytes=2,
                    head_range=(0, 1),
                    occurrence=seen[layer],
                )
            )
            seen[layer] += 1
        manifests.append(kp.RankManifest(layout, kp.Placement(pp_rank=stage, pp_size=len(stages)), entries))
    return kp.Deployment(manifests)


@pytest.mark.parametrize("case", [pytest.param(case, id=str(index)) for index, case in enumerate(GOLDEN["cases"])])
def test_pairs(case: dict[str, Any]) -> None:
    """The source list is one stage of two; what it leaves of the destination's ids is the other."""
    source, destination = case["source"], case["destination"]
    others = list((Counter(destination) - Counter(source)).elements())
    stages = [source, others] if others else [source]
    if case["error"] is not None:
        with pytest.raises(kp.LayoutMismatch, match="layer_ids"):
            kp.agree(ranks(source + others, *stages), ranks(destination, destination))
        return
    agreement = kp.agree(ranks(source + others, *stages), ranks(destination, destination))
    pairs = [[pair.source_entry, pair.destination_entry] for pair in agreement.route(0, 0).pairs]
    assert sorted(pairs) == sorted(case["pairs"])
