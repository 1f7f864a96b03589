"""How SGLang pairs entries by layer ids that may repeat, and where it refuses."""

from __future__ import annotations

import random
from typing import Any

from sglang.srt.disaggregation.utils import build_transfer_entry_pairs

__all__ = ["record"]

FIXED: tuple[tuple[list[int], list[int]], ...] = (
    ([], [1]),
    ([3], [3]),
    ([2, 3, 2, 3], [0, 1, 2, 3, 0, 1, 2, 3]),
    ([0, 0, 1], [1, 0, 0]),
    ([0, 0], [0]),
    ([4], [0, 1]),
)


def record() -> dict[str, Any]:
    """Fixed and random id lists, with their pairs or the error."""
    draw = random.Random(20)
    cases = list(FIXED)
    for _ in range(40):
        layers = draw.randint(1, 6)
        destination = [draw.randrange(layers) for _ in range(draw.randint(1, 12))]
        source = draw.sample(destination, k=draw.randint(1, len(destination)))
        if draw.random() < 0.2:
            source.append(draw.randrange(layers + 2))
        cases.append((source, destination))
    found: list[dict[str, Any]] = []
    for source, destination in cases:
        case: dict[str, Any] = {"source": source, "destination": destination}
        try:
            pairs = build_transfer_entry_pairs(source, destination, len(source), len(destination))
            found.append({**case, "pairs": [list(pair) for pair in pairs], "error": None})
        except RuntimeError as error:
            found.append({**case, "pairs": None, "error": type(error).__name__})
    return {"cases": found}
