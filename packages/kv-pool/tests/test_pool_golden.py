"""Owns the comparison with SGLang 0.5.23's NPU pools and host pools, as recorded in `golden/pools.json`.

`python tools/record_golden.py pools` records it. Draft layers differ on purpose: SGLang packs them behind the target's
in one storage, ours have mirrors of their own, so that a page says which parts it holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_planner import ComponentSpec, ModelLayout
from kv_pool import MhaPool, MlaPool
from kv_pool.hicache import HostPool, Mirror

GOLDEN = json.loads((Path(__file__).parent / "golden/pools.json").read_text(encoding="utf-8"))
CASES = [pytest.param(case, id=f"{case['kind']} {number}") for number, case in enumerate(GOLDEN["cases"])]


def pool_of(case: dict[str, Any]) -> MhaPool | MlaPool:
    layers = list(range(case["start"], case["start"] + case["layers"]))
    shared: Any = {"dtype": case["dtype"], "total_heads": case.get("heads", 1)}
    if case["kind"] == "heads":
        widths: list[tuple[Any, int, Any]] = [("key", case["dims"], layers), ("value", case["value_dims"], layers)]
    else:
        widths = [("latent", case["latent"], layers), ("rope", case["rope"], layers)]
        if case["indexer"] is not None:
            widths.append(("index_key", 128, case["indexer"]))
    specs = [ComponentSpec(name, layer_ids=ids, dims=dims, **shared) for name, dims, ids in widths]
    if case.get("drafts"):
        behind = range(layers[-1] + 1, layers[-1] + 1 + case["drafts"])
        specs += [ComponentSpec(name, "draft", layer_ids=behind, dims=dims, **shared) for name, dims, _ in widths]
    layout = ModelLayout(specs, page_size=GOLDEN["page_size"], fingerprint="golden")
    kind = MhaPool if case["kind"] == "heads" else MlaPool
    return kind(layout, size=GOLDEN["size"], device="cpu")


@pytest.mark.parametrize("case", CASES)
def test_storage_and_entries_are_theirs(case: dict[str, Any]) -> None:
    """Components in their order, layers in theirs; every entry at the same offset, of the same length and item."""
    pool, device = pool_of(case), case["device"]
    shapes = {name: [len(pool.layers(name)), *pool.layers(name)[0].shape] for name in device["shapes"]}
    assert shapes == device["shapes"]
    begin = {name: pool.layers(name)[0].data_ptr() for name in device["shapes"]}
    entries = [entry for entry in pool.manifest().entries if entry.part == "target"]
    order = list(device["shapes"])
    entries.sort(key=lambda entry: (order.index(entry.component), entry.layer_id))
    assert [[entry.component, entry.address - begin[entry.component]] for entry in entries] == device["entries"]
    assert [entry.nbytes for entry in entries] == device["lengths"]
    assert [entry.item_bytes for entry in entries] == device["items"]


def pieces(mirrors: list[Mirror], layout: str) -> list[tuple[str, torch.Tensor]]:
    """The contiguous pieces of the pages that were asked for, in the order in which SGLang lists them."""
    found: list[tuple[str, torch.Tensor]] = []
    for page in GOLDEN["asked"]:
        if layout == "layer_first":
            layers = len(mirrors[0].layer_ids)
            found += [(mirror.component, mirror.host[page, layer]) for layer in range(layers) for mirror in mirrors]
        else:
            found += [(mirror.component, mirror.host[page]) for mirror in mirrors]
    return found


@pytest.mark.parametrize("case", CASES)
def test_host_layouts_and_places_are_theirs(case: dict[str, Any]) -> None:
    assert set(case["hosts"]) >= {"page_first_direct"}
    for layout, theirs in case["hosts"].items():
        pool = pool_of(case)
        host = HostPool(pool, pages=GOLDEN["host_pages"] - 1, layout=layout)
        mirrors = [mirror for mirror in host.mirrors if mirror.part == "target"]
        if case.get("drafts"):  # packed there, apart here: the same bytes a page
            axis = {"layer_first": 0, "page_first": 1, "page_first_direct": 1}[layout]
            for name, shape in theirs["shapes"].items():
                ours = [list(host.mirror(name, part).storage.shape) for part in ("target", "draft")]
                assert [*ours[0][:axis], ours[0][axis] + ours[1][axis], *ours[0][axis + 1 :]] == shape
            assert sum(theirs["sizes"]) == len(GOLDEN["asked"]) * host.page_bytes
            continue
        assert {mirror.component: list(mirror.storage.shape) for mirror in mirrors} == theirs["shapes"]
        listed = pieces(mirrors, layout)
        begin = {mirror.component: mirror.storage.data_ptr() for mirror in mirrors}
        assert [[name, piece.data_ptr() - begin[name]] for name, piece in listed] == theirs["places"]  # type: ignore[index]
        assert [piece.nbytes for _, piece in listed] == theirs["sizes"]
