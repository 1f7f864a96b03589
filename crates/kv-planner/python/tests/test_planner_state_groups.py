"""Recurrent states as components of a layout: groups that are sharded one by one, windows, request rows."""

from __future__ import annotations

import json
from pathlib import Path

import kv_planner as kp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_planner.testing import build_deployment, expected_image, received_images

GOLDEN = json.loads((Path(__file__).parent / "golden/states.json").read_text(encoding="utf-8"))
AXES: list[tuple[kp.Axis, kp.Axis, kp.Axis]] = [
    ("token", "head", "dim"),
    ("head", "token", "dim"),
    ("head", "dim", "token"),
]


def state(
    groups: list[int],
    heads: int,
    *,
    rows: int = 1,
    axes: tuple[kp.Axis, kp.Axis, kp.Axis] = AXES[0],
    dims: int | None = None,
    layer_ids: tuple[int, ...] = (0,),
) -> kp.ModelLayout:
    spec = kp.ComponentSpec(
        "state", layer_ids=layer_ids, dtype="uint8", total_heads=heads, dims=sum(groups) if dims is None else dims,
        axes=axes, item_kind="request_row", rows=rows, groups=groups,
    )  # fmt: skip
    return kp.ModelLayout([spec], page_size=4, fingerprint="m")


def agreed(model: kp.ModelLayout, source: int, destination: int, stages: list[list[int]] | None = None) -> kp.Agreement:
    local = build_deployment(model, stages or [[0]], source, base=2**12)
    return kp.agree(local, build_deployment(model, [[0, 1]], destination, base=2**44, padding=3))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 3), max_size=3),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.sampled_from(AXES),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
)
def test_every_byte_of_every_state_arrives_once(
    groups: list[int],
    heads: int,
    rows: int,
    axes: tuple[kp.Axis, kp.Axis, kp.Axis],
    source: int,
    destination: int,
    staged: bool,
) -> None:
    model = state(groups, heads, rows=rows, axes=axes, dims=None if groups else 2, layer_ids=(0, 1))
    agreement = agreed(model, source, destination, [[1], [0]] if staged else [[0, 1]])
    from_, to = [3, 1, 2], [1, 4, 5]
    requests = kp.Runs(from_, to, item_kind="request_row")
    for limits in (None, kp.Capabilities(max_block_bytes=2, max_entries_per_batch=3)):
        images = received_images(agreement, requests, limits)
        assert images == [expected_image(remote, from_, to) for remote in agreement.remote]


@pytest.mark.parametrize("case", [case for case in GOLDEN["cases"] if case["apart"]], ids=str)
def test_blocks_are_the_engines_wherever_one_head_is_a_share_of_every_group(case: dict[str, object]) -> None:
    """SGLang's channels in groups, all divided by 8, are 8 heads of a group's eighth each."""
    widths, prefill, decode, ranks = (case[name] for name in ("groups", "prefill", "decode", "ranks"))
    assert isinstance(widths, list) and isinstance(ranks, list) and isinstance(prefill, int) and isinstance(decode, int)
    agreement = agreed(state([width // 8 for width in widths], 8), prefill, decode)
    for rank, wanted in enumerate(ranks):
        blocks = []
        for sender in range(prefill):
            route = agreement.route(sender, rank)
            blocks += [[sender, p.source_offset, p.destination_offset, p.row_bytes] for p in route.pairs]
        whole = [block[3] for block in wanted]
        if prefill == decode:  # the same share on both sides: our one block is the engine's blocks together
            assert blocks == [[rank, 0, 0, sum(whole)]]
        else:
            assert blocks == wanted


def test_blocks_are_those_of_a_state_route() -> None:
    agreement = agreed(state([1, 1, 2], 8, rows=3), 1, 2)
    route = kp.StateRoute([(8, 1), (8, 1), (8, 2)], rows=3, source=(0, 1), destination=(1, 2))
    requests = kp.Runs([2], [3], item_kind="request_row")
    entries = (agreement.local[0].entries[0], agreement.remote[1].entries[0])
    places = [(entry.address, entry.item_stride, entry.items) for entry in entries]
    lone = route.lower(requests, source=places[0], destination=places[1])
    plan = kp.Plan(agreement.route(0, 1), requests)
    (batch,) = kp.lower(plan).batches
    blocks = [sorted(zip(*(own.source.tolist(), own.destination.tolist(), own.nbytes.tolist()), strict=True))
              for own in (lone, batch)]  # fmt: skip
    assert blocks[0] == blocks[1] and plan.block_count == len(lone) == route.blocks_per_request
    assert plan.nbytes == route.destination_bytes


def test_another_window_or_grouping_is_a_difference_a05() -> None:
    def sides(one: kp.ModelLayout, other: kp.ModelLayout) -> list[tuple[str, object, object]]:
        with pytest.raises(kp.LayoutMismatch) as caught:
            kp.agree(build_deployment(one, [[0]]), build_deployment(other, [[0]], base=2**40))
        return [(found.field, found.local, found.remote) for found in caught.value.differences]

    found = sides(state([1, 3], 2, rows=3), state([2, 2], 2, rows=10))
    assert found == [("state/target.rows", 3, 10), ("state/target.groups", "1 + 3", "2 + 2")]
    order = sides(state([1, 1], 1, rows=2), state([1, 1], 1, rows=2, axes=("head", "token", "dim")))
    assert order == [("state/target.axes", "token,head,dim", "head,token,dim")]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"groups": [1, 2]}, r"state/target.groups: 1 \+ 2 against 4"),
        ({"groups": [4, 0]}, r"groups: 4 \+ 0 against 4"),
        ({"groups": [2**64 - 1, 5]}, "groups"),
        ({"groups": [4], "item_kind": "page"}, "item_kind: page against request_row"),
        ({"rows": 2, "item_kind": "token"}, "item_kind: token against request_row"),
        ({"rows": 0}, "rows: got 0"),
        ({"groups": [4], "axes": ("dim", "head", "token")}, "head before dim"),
    ],
)
def test_impossible_groups_are_refused(changes: dict[str, object], text: str) -> None:
    given_ = {"layer_ids": [0], "dtype": "uint8", "total_heads": 2, "dims": 4, "item_kind": "request_row", **changes}
    with pytest.raises(kp.LayoutError, match=text):
        kp.ComponentSpec("state", **given_)  # type: ignore[arg-type]
    with pytest.raises(kp.ArgumentError, match="groups"):
        kp.ComponentSpec("state", layer_ids=[0], dtype="uint8", total_heads=1, dims=1, groups=3)  # type: ignore[arg-type]


def test_groups_travel_in_manifests_and_are_told() -> None:
    model = state([1, 1, 2], 8, rows=3)
    (spec,) = model.components
    assert (spec.rows, spec.groups, model.item_bytes("state")) == (3, (1, 1, 2), 3 * 8 * 4)
    (manifest,) = build_deployment(model, [[0]]).manifests
    again = kp.RankManifest.from_json(manifest.to_json())
    assert again == manifest and again.layout.components[0].groups == (1, 1, 2)
    assert spec != state([1, 3], 8, rows=3).components[0]
    assert "3 rows" in spec.describe() and "in groups of 1 + 1 + 2 elements" in spec.describe()
    assert "rows=3, groups=[1, 1, 2]" in repr(spec)
    plain = kp.ComponentSpec("key", layer_ids=[0], dtype="uint8", total_heads=1, dims=1)
    assert (plain.rows, plain.groups) == (1, ()) and "groups" not in plain.describe()
    assert '"rows"' not in kp.ModelLayout([plain], page_size=1, fingerprint="m").to_json()
