"""SGLang's plans under decode context parallelism: by token, by page, and the lengths of each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.disaggregation.ascend.conn import _build_page_interleaved_dcp_plan
from sglang.srt.disaggregation.common.utils import build_dcp_token_transfer_plan
from sglang.srt.layers.dcp.layout import get_dcp_lens

__all__ = ["record"]

PAGE = 4
SOURCE = [7, 3, 12, 5, 9, 1]
DESTINATION = [20, 31, 22, 40, 11, 18]
LENS = [0, 1, 3, 4, 5, 16, 17, 31, 100]


def _shapes() -> list[dict[str, int]]:
    cases = []
    for size in (1, 2, 3, 4):
        for rank in range(size):
            for tokens in (0, 1, 2 * PAGE + 1, 6 * PAGE):
                for prefix in (0, 2 * PAGE * size, PAGE + 1):
                    for offset in (0, 3):
                        cases.append(
                            {
                                "dcp_size": size,
                                "dcp_rank": rank,
                                "tokens": tokens,
                                "prefix": prefix,
                                "page_offset": offset,
                            }
                        )
    return cases


def _by_token(case: dict[str, int]) -> list[list[int]]:
    plan = build_dcp_token_transfer_plan(
        np.array(SOURCE, dtype=np.int32), np.array(DESTINATION, dtype=np.int32), physical_page_size=PAGE,
        dcp_size=case["dcp_size"], dcp_rank=case["dcp_rank"], src_page_offset=case["page_offset"],
        decode_prefix_len=case["prefix"], num_kv_tokens=case["tokens"],
    )  # fmt: skip
    parts = (
        plan.target_src_token_indices, plan.target_dst_token_indices,
        plan.draft_src_token_indices, plan.draft_dst_token_indices,
    )  # fmt: skip
    return [part.tolist() for part in parts]


def _by_page(case: dict[str, int]) -> list[list[int]]:
    pages = -(-case["tokens"] // PAGE)
    plan = _build_page_interleaved_dcp_plan(
        np.array(SOURCE[:pages], dtype=np.int32), np.array(DESTINATION, dtype=np.int32), page_size=PAGE,
        dcp_size=case["dcp_size"], dcp_rank=case["dcp_rank"], src_page_offset=case["page_offset"],
        decode_prefix_len=case["prefix"], num_kv_tokens=case["tokens"],
    )  # fmt: skip
    return [part.tolist() for part in plan]


def _answer(case: dict[str, int], call: Any) -> dict[str, Any]:
    try:
        return {**case, "plan": call(case), "error": None}
    except (ValueError, IndexError) as error:
        return {**case, "plan": None, "error": type(error).__name__}


def _lengths() -> list[dict[str, Any]]:
    lens = torch.tensor(LENS)
    return [
        {
            "dcp_size": size, "dcp_rank": rank, "interleave": interleave,
            "local": get_dcp_lens(lens, size, rank, interleave_size=interleave).tolist(),
        }
        for size in (1, 2, 3, 8)
        for rank in range(size)
        for interleave in (1, PAGE)
    ]  # fmt: skip


def record() -> dict[str, Any]:
    """Plans by token: target source, destination, draft source, destination; by page: local ones, then global ones."""
    return {
        "page_size": PAGE, "source_pages": SOURCE, "destination_pages": DESTINATION,
        "by_token": [_answer(case, _by_token) for case in _shapes()],
        "by_page": [_answer(case, _by_page) for case in _shapes()],
        "lens": LENS, "lengths": _lengths(),
    }  # fmt: skip
