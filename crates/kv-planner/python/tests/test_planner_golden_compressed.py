"""Compressed latents over pipeline stages: SGLang 0.5.23's slices beside our pairs of names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kv_planner as kp
import pytest

GOLDEN = json.loads((Path(__file__).parent / "golden/compressed.json").read_text(encoding="utf-8"))
# The ratio of the layers in each of SGLang's lists, and its groups; latents hold one token for `ratio` tokens.
LISTS: dict[str, tuple[int, tuple[kp.Component, ...]]] = {
    "main": (4, ("latent", "index_key", "index_scale")), "c128": (128, ("latent",)), "c4_state": (4, ("state", "rope")),
}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(case, id=str(index)) for index, case in enumerate(GOLDEN["cases"])])
def test_positions(case: dict[str, Any]) -> None:
    """The components are named as in the pools, but for the second group of the state list, which has no name there."""
    ratio, components = LISTS[case["list"]]
    owners = [layer for layer, found in enumerate(case["ratios"]) if found == ratio]
    specs = [
        kp.ComponentSpec(name, layer_ids=owners, dtype="int8", total_heads=1, dims=4, compression=ratio)
        for name in components
    ]
    model = kp.ModelLayout(specs, page_size=128, fingerprint="golden")
    own = [layer for layer in owners if case["start"] <= layer < case["stop"]]
    stage = kp.name_pointers(model, len(components) * len(own), layers=own)
    decode = kp.name_pointers(model, len(components) * len(owners))
    source, destination = kp.pair_names(stage, decode)
    assert source.tolist() == list(range(len(stage))) and destination.tolist() == case["positions"]
