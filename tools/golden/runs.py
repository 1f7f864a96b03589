"""How SGLang groups page lists into runs that are contiguous on both sides."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from sglang.srt.disaggregation.common.utils import group_concurrent_contiguous

__all__ = ["record"]


def _pages(draw: random.Random) -> tuple[list[int], list[int]]:
    source: list[int] = []
    destination: list[int] = []
    while len(source) < 12:
        length = draw.randint(1, 4)
        first, to = draw.randrange(1, 400), draw.randrange(1, 400)
        if {*range(to, to + length)} & {*destination}:
            continue
        source += range(first, first + length)
        destination += range(to, to + length)
    return source, destination


def record() -> dict[str, Any]:
    """Random lists of pages; runs as [source start, destination start, count]."""
    draw = random.Random(7)
    cases = [([], []), ([5], [9]), ([1, 2, 3], [7, 8, 9]), ([1, 2, 3], [7, 8, 10]), ([4, 5], [9, 8])]
    cases += [_pages(draw) for _ in range(30)]
    found = []
    for source, destination in cases:
        runs = group_concurrent_contiguous(np.array(source, dtype=np.int32), np.array(destination, dtype=np.int32))
        grouped = [[own[0], other[0], len(own)] for own, other in zip(*runs, strict=True)]
        found.append({"source": source, "destination": destination, "runs": [[int(n) for n in run] for run in grouped]})
    return {"cases": found}
