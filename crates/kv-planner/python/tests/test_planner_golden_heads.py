"""Heads between unequal TP: SGLang 0.5.23's ranks and slices beside our routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kv_planner as kp
import pytest

GOLDEN = json.loads((Path(__file__).parent / "golden/heads.json").read_text(encoding="utf-8"))


def side(heads: int, size: int) -> kp.Deployment:
    """One key layer on `size` ranks."""
    layout = kp.ModelLayout(
        [kp.ComponentSpec("key", layer_ids=[0], dtype="int8", total_heads=heads, dims=4)],
        page_size=2,
        fingerprint="golden",
    )
    manifests = []
    for rank in range(size):
        held = kp.split_heads(heads, tp_rank=rank, tp_size=size)
        item = layout.item_bytes("key", heads=held[1] - held[0])
        entry = kp.BufferEntry(
            "key", "target", 0, device="cpu", address=4096, nbytes=4 * item, item_stride=item, item_bytes=item,
            head_range=held,
        )  # fmt: skip
        manifests.append(kp.RankManifest(layout, kp.Placement(tp_rank=rank, tp_size=size), [entry]))
    return kp.Deployment(manifests)


Write = tuple[int, int]  # head of the destination rank, global head that arrives there


def ours(case: dict[str, Any]) -> list[list[Write]]:
    """What arrives at each decode rank by our routes."""
    heads, prefill = case["total_heads"], case["prefill"]
    agreement = kp.agree(side(heads, prefill), side(heads, case["decode"]))
    return [
        [
            (to, kp.split_heads(heads, tp_rank=source, tp_size=prefill)[0] + own)
            for source in range(prefill)
            for pair in agreement.route(source, rank).pairs
            for own, to in zip(range(*pair.source_heads), range(*pair.destination_heads), strict=True)
        ]
        for rank in range(case["decode"])
    ]


def theirs(case: dict[str, Any]) -> list[list[Write]]:
    """The same by SGLang's answers; a rank that does not exist sends nothing."""
    heads, prefill = case["total_heads"], case["prefill"]
    return [
        [
            (to + index, kp.split_heads(heads, tp_rank=source, tp_size=prefill)[0] + first + index)
            for source, first, count, to in sends
            if source < prefill
            for index in range(count)
        ]
        for sends in case["ranks"]
    ]


def splits(heads: int, size: int) -> bool:
    return heads % size == 0 or size % heads == 0


CASES = [
    pytest.param(case, id=f"{case['total_heads']} heads, {case['prefill']} to {case['decode']}")
    for case in GOLDEN["cases"]
]


@pytest.mark.parametrize("case", CASES)
def test_heads(case: dict[str, Any]) -> None:
    heads, prefill, decode = case["total_heads"], case["prefill"], case["decode"]
    if not (splits(heads, prefill) and splits(heads, decode)):  # SGLang answers all the same
        with pytest.raises(kp.HeadsDoNotSplit):
            ours(case)
        return
    found = ours(case)
    for rank, writes in enumerate(found):
        first, stop = kp.split_heads(heads, tp_rank=rank, tp_size=decode)
        assert sorted(writes) == [(index, first + index) for index in range(stop - first)]
    right = [set(writes) for writes in found] == [set(writes) for writes in theirs(case)]
    whole_ratio = prefill % decode == 0 or decode % prefill == 0
    assert right or not whole_ratio  # ratios are assumed to divide
    if whole_ratio:
        replicas = max(1, prefill // max(heads, decode))  # every replica of a head sends it, ours sends one
        assert [len(writes) for writes in theirs(case)] == [replicas * len(writes) for writes in found]


def test_a_ratio_that_does_not_divide() -> None:
    """A-48: 12 heads from 3 ranks to 2: those of rank 2 never arrive; from 4 to 3 some arrive where others belong."""
    cases = {(case["prefill"], case["decode"]): case for case in GOLDEN["cases"] if case["total_heads"] == 12}
    arrived = {head for writes in theirs(cases[3, 2]) for _, head in writes}
    assert arrived == set(range(8)) and {head for writes in ours(cases[3, 2]) for _, head in writes} == set(range(12))
    assert theirs(cases[4, 3])[2] != ours(cases[4, 3])[2]
