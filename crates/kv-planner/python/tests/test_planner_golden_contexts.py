"""Decode context parallelism: SGLang 0.5.23's plans by token and by page, and its lengths, beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kv_planner as kp
import pytest

GOLDEN = json.loads((Path(__file__).parent / "golden/contexts.json").read_text(encoding="utf-8"))
PAGE: int = GOLDEN["page_size"]


def cases(name: str) -> list[Any]:
    return [pytest.param(case, id=str(index)) for index, case in enumerate(GOLDEN[name])]


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    """SGLang counts the tokens of a chunk, ours those of the request up to the chunk's end."""
    pages = -(-case["tokens"] // PAGE)
    return {
        "source_pages": GOLDEN["source_pages"][:pages],
        "destination_pages": GOLDEN["destination_pages"],
        "page_size": PAGE,
        "dcp_rank": case["dcp_rank"],
        "dcp_size": case["dcp_size"],
        "tokens": case["tokens"] + case["page_offset"] * PAGE,
        "prefix_tokens": case["prefix"],
        "page_offset": case["page_offset"],
    }


def items(runs: kp.Runs) -> list[list[int]]:
    """Source and destination items, one by one."""
    columns = zip(*(column.tolist() for column in runs.arrays()), strict=True)
    pairs = [(source + i, destination + i) for source, destination, count in columns for i in range(count)]
    return [[source for source, _ in pairs], [destination for _, destination in pairs]]


def tokens(pages: list[list[int]], count: int) -> list[list[int]]:
    """The first tokens of pages, one by one."""
    return [[page * PAGE + offset for page in side for offset in range(PAGE)][:count] for side in pages]


@pytest.mark.parametrize("case", cases("by_token"))
def test_by_token(case: dict[str, Any]) -> None:
    """A rank's own tokens; draft tokens go whole into the virtual page."""
    call = arguments(case)
    if case["error"] is not None:
        with pytest.raises(kp.PlanError):
            kp.token_interleaved(**call)
        return
    own, to, draft, draft_to = case["plan"]
    assert items(kp.token_interleaved(**call)) == [own, to]
    pages = items(kp.page_interleaved(**call, slots="global"))
    assert tokens(pages, case["tokens"]) == [draft, draft_to]


@pytest.mark.parametrize("case", cases("by_page"))
def test_by_page(case: dict[str, Any]) -> None:
    call = arguments(case)
    if case["error"] is not None:
        with pytest.raises(kp.PlanError):
            kp.page_interleaved(**call)
        return
    own, to, every, every_to = case["plan"]
    assert items(kp.page_interleaved(**call)) == [own, to]
    assert items(kp.page_interleaved(**call, slots="global")) == [every, every_to]


@pytest.mark.parametrize("case", cases("lengths"))
def test_lengths_are_what_arrives(case: dict[str, Any]) -> None:
    """The length that SGLang gives a rank is the number of tokens that our plan sends there."""
    for length, local in zip(GOLDEN["lens"], case["local"], strict=True):
        pages = list(range(1, -(-length // PAGE) + 1))
        call: dict[str, Any] = {
            "source_pages": pages, "destination_pages": pages, "page_size": PAGE, "dcp_rank": case["dcp_rank"],
            "dcp_size": case["dcp_size"], "tokens": length,
        }  # fmt: skip
        if case["interleave"] == 1:
            assert len(items(kp.token_interleaved(**call))[0]) == local
        else:
            own = items(kp.page_interleaved(**call))[0]
            assert sum(min(PAGE, length - (page - 1) * PAGE) for page in own) == local
