"""Owns the proof that the ops give what SGLang 0.5.23's own kernels and sgl-kernel-npu's own Python gave.

`golden/record_sglang.py` and `golden/record_sgl_kernel_npu.py` recorded it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import spec_kernels as sk
import torch


@lru_cache(maxsize=2)
def recorded(name: str) -> dict[str, Any]:
    golden: dict[str, Any] = json.loads((Path(__file__).parent / f"golden/{name}.json").read_text())
    return golden


def restored(value: Any, device: str) -> Any:
    if isinstance(value, list):
        return [restored(part, device) for part in value]
    return torch.tensor(value["data"], dtype=getattr(torch, value["dtype"])).view(value["shape"]).to(device)


@pytest.fixture
def golden(place: Any) -> Any:
    """A family's tensors by name, on the place's device."""

    def family(name: str, engine: str = "sglang_0_5_23") -> dict[str, Any]:
        return {key: restored(part, place.device) for key, part in recorded(engine)[name].items()}

    return family


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal values; the integers' widths may differ."""
    return found.shape == expected.shape and torch.equal(found.cpu().double(), expected.cpu().double())


def test_multi_layer_drafting(place: Any, golden: Any) -> None:
    case, on = golden("multi_layer"), {"backend": place.backend}
    for select, name in ((None, "rotated"), (case["select"], "rotated_select")):
        ids = case["ids"].clone()
        sk.rotate_input_ids(ids, case["starts"], case["lens"], case["fresh"], select_index=select, **on)
        assert same(ids, case[name])
    stash, lengths, requests = sk.BoundaryStash(*case["stash"]), case["lengths"], case["requests"]
    window = sk.widened_inputs(stash, case["predict"], case["states"], lengths, requests, width=4, **on)
    assert all(same(one, two) for one, two in zip(window, case["window"], strict=True))
    locs = sk.widened_locs(
        case["table"], requests, lengths, stash.valid_lens, width=4, num_front_tokens=3, num_warmup_tokens=2, **on
    )
    assert all(same(one, two) for one, two in zip(locs, case["locs"], strict=True))
    for fresh in (True, False):
        held = sk.BoundaryStash(*(part.clone() for part in case["stash"]))
        inputs = case["predict"], case["states"], case["ends"], case["available"], requests
        sk.append_to_stash(held, *inputs, fresh=fresh, **on)
        assert all(same(one, two) for one, two in zip(held, case[f"appended_{fresh}"], strict=True))


def test_bookkeeping(place: Any, golden: Any) -> None:
    case, on = golden("bookkeeping"), {"backend": place.backend}
    found = sk.verify_commit_outputs(
        case["predict"], case["index"], case["lens"], case["lengths"], width=6, track_interval=8, **on
    )
    assert all(same(one, two) for one, two in zip(found, case["commit"], strict=True))
    layout = sk.draft_extend_layout(case["lengths"], width=6, num_front_tokens=2, **on)
    assert all(same(one, two) for one, two in zip(layout[:3], case["layout"], strict=True))
    assert same(sk.compact_accepted_locs(case["slots"], case["index"], **on), case["packed"])
    table, requests, starts = case["table"], case["requests"], case["starts"]
    total = case["ragged"].shape[0]
    assert same(sk.extend_cache_locs(table, requests, starts, case["ends"], total=total, **on), case["ragged"])
    assert same(sk.uniform_cache_locs(table, requests, starts, width=6, **on).locs, case["uniform"])
    block = sk.accept_block(case["candidates"], case["target"], case["lengths"], **on)
    assert all(same(one, two) for one, two in zip(block, case["block"], strict=True))


def test_trees_and_chain_sampling(place: Any, golden: Any) -> None:
    case, on = golden("trees"), {"backend": place.backend}
    tree = sk.build_tree(case["parents"], case["selected"], case["lens"], topk=2, **on)
    assert same(tree.next_token, case["next_token"]) and same(tree.next_sibling, case["next_sibling"])
    assert same(tree.positions.flatten(), case["positions"])
    mask = sk.full_tree_mask(tree.visible, case["lens"], total=case["mask"].shape[0], **on)
    assert same(mask, case["mask"])
    found = sk.verify_tree_greedy(case["candidates"], case["target"], tree.next_token, tree.next_sibling, depth=4, **on)
    assert same(found.accept_index, case["index"]) and same(found.num_correct_drafts, case["count"])
    assert same(found.predict, case["predict"])
    steps = case["drafts"].shape[1]
    sampled = sk.sample_chain(case["drafts"], case["q"], case["p"], case["coins"][:, :steps], case["last"], **on)
    assert same(sampled.num_correct_drafts, case["accepted"]) and same(sampled.bonus, case["bonus"])


def test_chain_sampling_of_the_npu_library(place: Any, golden: Any) -> None:
    case, on = golden("chains", "sgl_kernel_npu_f425bdf"), {"backend": place.backend}
    steps = case["drafts"].shape[1]
    sampled = sk.sample_chain(case["drafts"], case["q"], case["p"], case["coins"][:, :steps], case["last"], **on)
    assert same(sampled.num_correct_drafts, case["accepted"]) and same(sampled.bonus, case["bonus"])
    assert len(set(case["accepted"].tolist())) > 2


def test_trees_of_the_npu_library(place: Any, golden: Any) -> None:
    case, on = golden("trees", "sgl_kernel_npu_f425bdf"), {"backend": place.backend}
    tree = sk.build_tree(case["parents"], case["selected"], case["lens"], topk=2, **on)
    assert same(tree.next_token, case["next_token"]) and same(tree.next_sibling, case["next_sibling"])
    assert same(tree.positions.flatten(), case["positions"])
    links = tree.next_token, tree.next_sibling
    found = sk.verify_tree_greedy(case["candidates"], case["target"], *links, depth=4, **on)
    assert same(found.accept_index, case["index"]) and same(found.num_correct_drafts, case["count"])
    assert same(found.predict, case["predict"])
    sampled = sk.sample_tree(case["drafted"], case["p"], *links, case["coins"], case["last"], depth=4, **on)
    assert same(sampled.accept_index, case["sampled_index"]) and same(sampled.predict, case["sampled"])
    assert same(sampled.num_correct_drafts, case["sampled_count"])


def test_states_of_the_npu_library(place: Any, golden: Any) -> None:
    case = golden("states", "sgl_kernel_npu_f425bdf")
    held = case["states"].clone()
    sk.keep_states(held, case["step_states"], case["slots"], case["kept"], backend=place.backend)
    assert same(held, case["after"])
