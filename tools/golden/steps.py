"""SGLang's select_index of a padded draft-extend batch, by its native function."""

from __future__ import annotations

import random
from typing import Any

import torch
from sglang.kernels.ops.speculative.multi_layer_eagle import fill_draft_extend_prepare_buffers_native as fill

__all__ = ["record"]


def _select(rows: int, bucket: int, width: int, front: int, drafts: list[int], stale: int) -> list[int]:
    tokens = bucket * width
    ids = [torch.zeros(tokens, dtype=torch.int64) for _ in range(3)]
    sources = [torch.zeros(rows * width, dtype=torch.int64) for _ in range(3)]
    lens, pool, select = (torch.zeros(bucket, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.int64))
    correct, accepted = torch.full((bucket,), stale, dtype=torch.int32), torch.ones(bucket, dtype=torch.int32)
    given = torch.tensor(drafts, dtype=torch.int32)
    fill(
        *ids, *sources, lens, pool, correct, accepted, select, None,
        torch.ones(rows, dtype=torch.int32), torch.arange(rows), given, given + 1, None,
        torch.zeros(tokens, 8), torch.zeros(rows * width, 8), None, None, rows, bucket, width, front, 0,
    )  # fmt: skip
    return [int(index) for index in select]


def record() -> dict[str, Any]:
    """Live rows, bucket, row width, front tokens, accepted drafts, what the rows beyond held before, and the index."""
    draw = random.Random(3)
    cases = []
    for _ in range(40):
        bucket = draw.randint(1, 8)
        rows, width, front = draw.randint(1, bucket), draw.randint(2, 6), draw.choice([0, 0, 1])
        drafts = [draw.randrange(width - front) for _ in range(rows)]
        stale = draw.choice([0, 0, 1])
        cases.append(
            {
                "rows": rows, "bucket": bucket, "width": width, "front": front, "drafts": drafts, "stale": stale,
                "select_index": _select(rows, bucket, width, front, drafts, stale),
            }
        )  # fmt: skip
    return {"cases": cases}
