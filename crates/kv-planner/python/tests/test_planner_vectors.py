"""The golden vectors that the Rust tests read too."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import kv_planner as kp
import pytest
from kv_planner.testing import build_rank

VECTORS = Path(__file__).parents[2] / "vectors"


def read(name: str) -> Any:
    return json.loads((VECTORS / name).read_text(encoding="utf-8"))


def cases(name: str, key: str = "cases") -> list[Any]:
    found = read(name)[key]
    assert found
    return [pytest.param(case, id=str(case.get("name", index))) for index, case in enumerate(found)]


def deployment(layout: dict[str, Any], ranks: list[Any]) -> kp.Deployment:
    shared = kp.ModelLayout.from_json(json.dumps(layout))
    manifests = []
    for rank in ranks:
        entries = [
            kp.BufferEntry(
                component,
                part,
                layer,
                device="cpu",
                address=address,
                nbytes=nbytes,
                item_stride=stride,
                item_bytes=item,
                head_range=(start, stop),
                occurrence=occurrence,
            )
            for component, part, layer, occurrence, address, nbytes, stride, item, start, stop in rank["entries"]
        ]
        manifests.append(kp.RankManifest(shared, kp.Placement(**rank["placement"]), entries))
    return kp.Deployment(manifests)


@pytest.mark.parametrize("case", cases("routes.json"))
def test_routes(case: Any) -> None:
    local = deployment(case["layout"], case["source"])
    remote = deployment(case["destination_layout"], case["destination"])
    agreement = kp.agree(local, remote, parts=case["parts"])
    runs = kp.Runs(case["source_pages"], case["destination_pages"])
    found = []
    for source in range(len(local)):
        for destination in range(len(remote)):
            route = agreement.route(source, destination)
            batches = kp.lower(kp.Plan(route, runs)).batches
            blocks = [
                list(block)
                for batch in batches
                for block in zip(batch.source.tolist(), batch.destination.tolist(), batch.nbytes.tolist(), strict=True)
            ]
            if route:
                pairs = sorted([pair.source_entry, pair.destination_entry] for pair in route.pairs)
                found.append({"source": source, "destination": destination, "pairs": pairs, "blocks": sorted(blocks)})
            else:
                assert not blocks
    assert found == case["routes"]


def test_the_generator_still_writes_the_file() -> None:
    spec = importlib.util.spec_from_file_location("generate", VECTORS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads(json.dumps(module.cases())) == read("routes.json")["cases"]


@pytest.mark.parametrize("case", cases("runs.json"))
def test_runs(case: Any) -> None:
    if "error" in case:
        with pytest.raises(getattr(kp, case["error"])):
            kp.Runs(case["source"], case["destination"])
        return
    runs = kp.Runs(case["source"], case["destination"])
    assert [list(run) for run in zip(*(column.tolist() for column in runs.arrays()), strict=True)] == case["runs"]
    assert runs.run_count == len(case["runs"])


@pytest.mark.parametrize("case", cases("heads.json"))
def test_heads(case: Any) -> None:
    def ranges() -> list[list[int]]:
        size = case["size"]
        return [list(kp.split_heads(case["total"], tp_rank=rank, tp_size=size)) for rank in range(size)]

    if "error" in case:
        with pytest.raises(getattr(kp, case["error"])):
            ranges()
    else:
        assert ranges() == case["ranges"]


@pytest.mark.parametrize("case", cases("steps.json", "select_index"))
def test_select_index(case: Any) -> None:
    shape = {key: case[key] for key in ("rows", "width", "front")}
    if "error" in case:
        with pytest.raises(getattr(kp, case["error"])):
            kp.select_index(case["drafts"], **shape)
    else:
        assert kp.select_index(case["drafts"], **shape).tolist() == case["index"]


@pytest.mark.parametrize("case", cases("steps.json", "page_count"))
def test_page_count(case: Any) -> None:
    if "error" in case:
        with pytest.raises(getattr(kp, case["error"])):
            kp.page_count(case["tokens"], case["page_size"])
    else:
        assert kp.page_count(case["tokens"], case["page_size"]) == case["pages"]


@pytest.mark.parametrize("case", cases("steps.json", "kv_lengths"))
def test_kv_lengths(case: Any) -> None:
    if "error" in case:
        with pytest.raises(getattr(kp, case["error"])):
            kp.kv_lengths(case["kind"], case["prefix"], window=case["window"])
    else:
        assert kp.kv_lengths(case["kind"], case["prefix"], window=case["window"]).tolist() == case["lengths"]


@pytest.mark.parametrize("case", cases("steps.json", "row_layout"))
def test_row_layout(case: Any) -> None:
    fields = [kp.RowField(name, dtype, rows=rows, width=width) for name, dtype, rows, width in case["fields"]]
    layout = kp.RowLayout(fields, alignment=case["alignment"])
    assert [field.offset for field in layout.fields] == case["offsets"]
    assert [field.nbytes for field in layout.fields] == case["sizes"]
    assert layout.nbytes == case["nbytes"]


@pytest.mark.parametrize("case", cases("offsets.json"))
def test_offsets(case: Any) -> None:
    spec = kp.ComponentSpec("latent", layer_ids=[0], dtype="uint8", total_heads=1, dims=case["dims"])
    layout = kp.ModelLayout([spec], page_size=case["page_size"], fingerprint="model")
    ranks = [build_rank(layout, [0], items=case["items"], base=base) for base in (case["base"], case["base"] + 2**50)]
    runs = kp.Runs([case["page"]], [case["page"]])
    (batch,) = kp.lower(kp.Plan(kp.agree(*ranks).route(), runs)).batches
    assert batch.source.tolist() == [case["base"] + case["offset"]]
    assert batch.destination.tolist() == [case["base"] + 2**50 + case["offset"]]


@pytest.mark.parametrize("case", cases("refusals.json"))
def test_refusals(case: Any) -> None:
    base = read("refusals.json")["base"]
    changed = copy.deepcopy(base)
    for path, value in case["changes"]:
        *parents, last = path.split(".")
        at = changed
        for key in parents:
            at = at[int(key)] if isinstance(at, list) else at[key]
        at[last] = value
    place = kp.Placement(tp_size=4)
    ranks = [build_rank(kp.ModelLayout.from_json(json.dumps(layout)), [0, 1, 2], place) for layout in (base, changed)]
    if not case["fields"]:
        assert kp.agree(*ranks).route().pairs
        return
    with pytest.raises(kp.LayoutMismatch) as caught:
        kp.agree(*ranks)
    found = [[difference.field, difference.local, difference.remote] for difference in caught.value.differences]
    assert found == case["fields"]
    assert (caught.value.local, caught.value.remote) == tuple(case["fields"][0][1:])
    assert all(difference.consequence and difference.remedy for difference in caught.value.differences)
    assert all(field in str(caught.value) for field, _, _ in case["fields"])
