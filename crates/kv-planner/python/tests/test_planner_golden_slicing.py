"""Pairs of bare pointer lists: SGLang 0.5.23's answers beside ours, which come from names.

Where SGLang pairs other buffers, the case is one of the known faults, by their rows in the contract.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kv_planner as kp
import pytest

GOLDEN = json.loads((Path(__file__).parent / "golden/slicing.json").read_text(encoding="utf-8"))
GROUPS: dict[tuple[str, int], tuple[Any, ...]] = {
    ("mha", 2): ("key", "value"), ("mla", 2): ("latent", "rope"), ("mla", 3): ("latent", "rope", "index_key"),
}  # fmt: skip


def layout(components: tuple[Any, ...], total: int, draft: int) -> kp.ModelLayout:
    ids = {"target": range(total), "draft": range(kp.first_draft_id(total), kp.first_draft_id(total) + draft)}
    specs = [
        kp.ComponentSpec(component, part, layer_ids=list(ids[part]), dtype="int8", total_heads=1, dims=1)
        for part in (("target", "draft") if draft else ("target",))
        for component in components
    ]
    return kp.ModelLayout(specs, page_size=2, fingerprint="golden")


def rank(
    shared: kp.ModelLayout, components: tuple[Any, ...], layers: range, *, draft: bool, **place: int
) -> kp.RankManifest:
    """Entries in the order of SGLang's lists: each group's target layers, then each group's draft layers."""
    entries: list[kp.BufferEntry] = []
    for part in ("target", "draft") if draft else ("target",):
        for component in components:
            for layer in layers if part == "target" else shared.spec(component, "draft").layer_ids:
                address = 4096 * (len(entries) + 1)
                entries.append(
                    kp.BufferEntry(
                        component,
                        part,
                        layer,
                        device="cpu",
                        address=address,
                        nbytes=16,
                        item_stride=2,
                        item_bytes=2,
                        head_range=(0, 1),
                    )
                )
    return kp.RankManifest(shared, kp.Placement(**place), entries)


def ours(kind: str, case: dict[str, Any]) -> list[list[int]]:
    components = GROUPS[kind, case["groups"]]
    total, start, stop = case["total"], case["start"], case["start"] + case["layers"]
    draft = case["source_draft"] > 0
    source_layout = layout(components, total, case["source_draft"])
    stages = [part for part in (range(0, start), range(start, stop), range(stop, total)) if part]
    sources = [
        rank(source_layout, components, part, draft=draft and part.stop == total, pp_rank=index, pp_size=len(stages))
        for index, part in enumerate(stages)
    ]
    destination = rank(
        layout(components, total, case["destination_draft"]), components, range(total),
        draft=case["destination_draft"] > 0,
    )  # fmt: skip
    parts: tuple[Any, ...] = ("target", "draft") if draft and case["destination_draft"] else ("target",)
    agreement = kp.agree(kp.Deployment(sources), kp.Deployment([destination]), parts=parts)
    pairs = agreement.route(stages.index(range(start, stop)), 0).pairs
    return sorted([pair.source_entry, pair.destination_entry] for pair in pairs)


def theirs(case: dict[str, Any]) -> list[list[int]] | None:
    if case["pairs"] is None:
        return None
    return sorted([source + i, destination + i] for source, destination, count in case["pairs"] for i in range(count))


# SGLang's rule for MHA guesses from counts whether decode has a draft; it is right in these cases, and else A-01.
RIGHT_MHA = {
    "one stage, stage 0": {(0, 0), (0, 1), (1, 1), (0, 2), (2, 2), (3, 3)},
    "two even, stage 0": {(0, 0), (0, 1), (1, 1), (1, 0)},
    "two even, stage 1": {(0, 0), (0, 1)},
    "target layers equal a stage with draft, stage 0": {(0, 0), (1, 0)},
    "target layers equal a stage with draft, stage 1": {(0, 0)},
}


def row_of(kind: str, case: dict[str, Any]) -> str | None:
    """The contract's row that says why SGLang's pairs are wrong, or None where they are right."""
    drafts = (case["configured_draft"], case["destination_draft"])
    if kind == "mha":
        return None if drafts in RIGHT_MHA.get(case["name"].rpartition(", drafts")[0], set()) else "A-01"
    return "A-25" if case["last"] and drafts == (1, 0) else None


CASES = [
    pytest.param(kind, case, id=f"{kind} of {case['groups']}: {case['name']}")
    for kind in ("mha", "mla")
    for case in GOLDEN[kind]
]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_pairs(kind: str, case: dict[str, Any]) -> None:
    row, found = row_of(kind, case), ours(kind, case)
    layers = case["layers"] + (case["source_draft"] if case["destination_draft"] else 0)
    assert len(found) == case["groups"] * layers  # every buffer that both sides have, once
    assert (found == theirs(case)) == (row is None), row


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_positions_alone(kind: str, case: dict[str, Any]) -> None:
    """The bare lists, given the stage's layers and each side's own layout, have the pairs that names have."""
    components, total = GROUPS[kind, case["groups"]], case["total"]
    source_layout = layout(components, total, case["source_draft"])
    drafts = range(kp.first_draft_id(total), kp.first_draft_id(total) + case["source_draft"])
    layers = [*range(case["start"], case["start"] + case["layers"]), *drafts]
    source = kp.name_pointers(source_layout, case["source_entries"], layers=layers)
    destination = kp.name_pointers(layout(components, total, case["destination_draft"]), case["destination_entries"])
    if case["source_draft"] and not case["destination_draft"]:
        with pytest.raises(kp.PlanError):  # the draft's buffers have no place; agreeing on parts leaves them out
            kp.pair_names(source, destination)
        source = tuple(name for name in source if name[1] == "target")
    own, to = kp.pair_names(source, destination)
    assert sorted(zip(own.tolist(), to.tolist(), strict=True)) == [tuple(pair) for pair in ours(kind, case)]


def test_the_known_faults_occur() -> None:
    rows = [row_of(kind, case) for kind in ("mha", "mla") for case in GOLDEN[kind]]
    assert rows.count("A-01") >= 60 and rows.count("A-25") >= 14 and rows.count(None) >= 150
