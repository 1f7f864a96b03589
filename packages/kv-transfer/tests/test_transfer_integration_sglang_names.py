"""Names of SGLang's bare lists: what is given, what contradicts itself, and SGLang's own answers beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kv_planner as kp
import numpy as np
import pytest
from transfer_sglang import MHA, MLA, Kind, Manager, Side, manifest

from kv_transfer import UnsupportedLayout
from kv_transfer.integrations.sglang import fill_kv_args
from kv_transfer.integrations.sglang.names import own_names, pair_with_peer

PLANNER = Path(__file__).resolve().parents[3] / "crates/kv-planner/python/tests/golden"
SLICING = json.loads((PLANNER / "slicing.json").read_text(encoding="utf-8"))
COMPRESSED = json.loads((PLANNER / "compressed.json").read_text(encoding="utf-8"))["cases"]


def kv_args(entries: int, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"kv_data_ptrs": list(range(entries)), "prefill_start_layer": 0, **fields})


def of_case(case: dict[str, Any], field: str) -> SimpleNamespace:
    """The case with the total under today's name, or under the one before."""
    newer = {"draft_kv_layers": case["configured_draft"]} if field == "hidden_kv_layers" else {}
    return kv_args(
        case["source_entries"], kv_buf_groups=case["groups"], prefill_start_layer=case["start"],
        **{field: case["total"], **newer},
    )  # fmt: skip


def truth(case: dict[str, Any]) -> list[tuple[int, int]]:
    """By (group, layer): a plain loop over both lists, written down."""
    groups, own = case["groups"], case["layers"] + case["source_draft"]
    pairs = []
    for entry in range(groups * own):
        if entry < groups * case["layers"]:
            group, layer = divmod(entry, case["layers"])
            pairs.append((entry, group * case["total"] + case["start"] + layer))
        else:
            group, layer = divmod(entry - groups * case["layers"], case["source_draft"])
            pairs.append((entry, groups * case["total"] + group * case["destination_draft"] + layer))
    return pairs


CASES = [
    pytest.param(kind, case, id=f"{kind} of {case['groups']}: {case['name']}")
    for kind in ("mha", "mla")
    for case in SLICING[kind]
]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_stages_against_sglangs_answers(kind: str, case: dict[str, Any]) -> None:
    """Both field sets pair by name; where SGLang answers otherwise it is A-01 or A-25, and no list is short."""
    theirs = None if case["pairs"] is None else sorted(
        (source + i, destination + i) for source, destination, count in case["pairs"] for i in range(count)
    )  # fmt: skip
    for field in ("hidden_kv_layers", "total_kv_layers"):
        args = of_case(case, field)
        more: dict[str, Any] = {"mla": kind == "mla", "pp_size": None, "last": case["last"]}
        if case["source_draft"] and not case["destination_draft"]:
            with pytest.raises((kp.PlanError, UnsupportedLayout)):
                pair_with_peer(args, case["destination_entries"], **more)
            continue  # SGLang's list is short, or pairs with other buffers
        ours = pair_with_peer(args, case["destination_entries"], **more)
        assert list(ours) == truth(case)
        if theirs != sorted(ours):
            assert kind == "mha", "A-25 concerns drafts that decode has not"


def test_sglangs_rule_for_k_and_v_is_wrong_often_enough_to_be_compared() -> None:
    wrong = 0
    for case in SLICING["mha"]:
        theirs = sorted((a + i, b + i) for a, b, count in case["pairs"] or [] for i in range(count))
        wrong += theirs != sorted(truth(case)) and not (case["source_draft"] and not case["destination_draft"])
    assert wrong >= 60


class Pointers(Manager):
    """A manager whose lists are given without memory."""

    def __init__(self, args: Any, *, mla: bool, pp_size: int) -> None:
        self.kv_args, self.is_mla_backend, self.pp_size, self.attn_tp_size = args, mla, pp_size, 1


@pytest.mark.parametrize("field", ["hidden_kv_layers", "total_kv_layers"])
def test_the_draft_on_the_last_stage_a02(field: str) -> None:
    """61 layers, 3 groups, 1 draft, stages of 31 and 30: all 93 pairs; one total for both gets 63 of them wrong."""
    names = [f"{group}{layer}" for group in "KVI" for layer in range(61)] + ["Kd", "Vd", "Id"]
    target = [f"{group}{layer}" for group in "KVI" for layer in range(31, 61)]
    for draft in (0, 1):
        own = target + ["Kd", "Vd", "Id"] * draft
        args = kv_args(
            len(own), kv_buf_groups=3, prefill_start_layer=31, draft_kv_layers=draft, num_draft_entries=3 * draft,
            pp_rank=1, **{field: 61},
        )  # fmt: skip
        pointers: Any = Pointers(args, mla=True, pp_size=2)
        assert pointers.get_mla_kv_ptrs_with_pp(own, names) == (own, own, len(own))


def test_item_lengths_are_sliced_as_pointers_are() -> None:
    args = kv_args(4, kv_buf_groups=2, prefill_start_layer=2, hidden_kv_layers=4, pp_rank=1)
    manager = Pointers(args, mla=True, pp_size=2)
    assert manager.get_mla_kv_ptrs_with_pp([1, 1, 2, 2], [10, 11, 12, 13, 20, 21, 22, 23])[1] == [12, 13, 22, 23]


def test_k_and_v_of_a_stage_with_a_draft() -> None:
    """Order of the lists: K and V of the target, then K and V of the draft."""
    args = kv_args(6, prefill_start_layer=2, hidden_kv_layers=4, num_draft_entries=2, pp_rank=1)
    own = [12, 13, 22, 23, 31, 41]
    peer = [10, 11, 12, 13, 20, 21, 22, 23, 31, 41]
    keys, values, to_keys, to_values, count = Pointers(args, mla=False, pp_size=2).get_mha_kv_ptrs_with_pp(own, peer)
    assert keys == to_keys == [12, 13, 31] and values == to_values == [22, 23, 41] and count == 3


@pytest.mark.parametrize("case", COMPRESSED, ids=lambda case: f"{case['list']} {case['start']}-{case['stop']}")
def test_compressed_lists_are_sglangs(case: dict[str, Any]) -> None:
    kinds = {"main": None, "c128": "dsv4_c128", "c4_state": "dsv4_c4_state"}
    groups = {"main": 3, "c128": 1, "c4_state": 2}[case["list"]]
    ratio = 128 if case["list"] == "c128" else 4
    args = kv_args(
        0, mla_compression_ratios=case["ratios"], prefill_start_layer=case["start"], prefill_end_layer=case["stop"]
    )
    own = groups * sum(found == ratio for found in case["ratios"][case["start"] : case["stop"]])
    whole = list(range(groups * case["ratios"].count(ratio)))
    found = Pointers(args, mla=True, pp_size=2).get_mla_kv_ptrs_with_pp(list(range(own)), whole, kinds[case["list"]])
    assert found[1] == case["positions"]


def test_a_compressed_list_of_another_length_is_refused() -> None:
    args = kv_args(0, mla_compression_ratios=[4, 128, 4], prefill_start_layer=0, prefill_end_layer=2)
    manager = Pointers(args, mla=True, pp_size=2)
    for own, whole in ((3, 5), (2, 6), (3, 4)):
        with pytest.raises(UnsupportedLayout, match="kv_ptrs"):
            manager.get_mla_kv_ptrs_with_pp(list(range(own)), list(range(whole)))
    with pytest.raises(UnsupportedLayout, match="state_type"):
        manager.get_mla_kv_ptrs_with_pp([0], [0], "mamba")


@pytest.mark.parametrize(
    ("entries", "fields", "field"),
    [
        (9, {"hidden_kv_layers": 3}, "kv_buf_groups"),  # never measured: 9 // 3
        (9, {"hidden_kv_layers": 3, "kv_buf_groups": 7}, "kv_buf_groups"),
        (8, {"hidden_kv_layers": 4, "kv_buf_groups": 3}, "kv_data_ptrs"),  # index keys on some layers only
        (6, {"kv_buf_groups": 2, "prefill_start_layer": 3}, "hidden_kv_layers"),
        (6, {"kv_buf_groups": 2, "hidden_kv_layers": 3, "total_kv_layers": 4}, "hidden_kv_layers"),
        (6, {"kv_buf_groups": 2, "hidden_kv_layers": 3, "num_draft_entries": 1}, "num_draft_entries"),
        (6, {"kv_buf_groups": 2, "hidden_kv_layers": 9, "prefill_start_layer": 2}, "kv_data_ptrs"),  # last, too short
        (6, {"kv_buf_groups": 2, "hidden_kv_layers": 2, "draft_kv_layers": 3}, "draft_kv_layers"),  # A09: one forgotten
        (6, {"kv_buf_groups": 2, "hidden_kv_layers": 3, "draft_kv_layers": 1}, "draft_kv_layers"),  # A13: all of them
        (48, {"kv_buf_groups": 1, "hidden_kv_layers": 47, "draft_kv_layers": 0}, "draft_kv_layers"),  # A09, its numbers
        (48, {"kv_buf_groups": 1, "hidden_kv_layers": 47, "num_draft_entries": 0}, "kv_data_ptrs"),
        (6, {"kv_layer_ids": [0, 1, 2]}, "kv_layer_ids"),
        (6, {"kv_entry_names": [("latent", "target", 0, 0)]}, "kv_entry_names"),
    ],
)
def test_a_list_that_contradicts_itself_is_refused(entries: int, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedLayout, match=field):
        own_names(kv_args(entries, **fields), mla=True, pp_size=2, last=True)


@pytest.mark.parametrize(
    ("peer", "match"),
    [
        (7, "dst_kv_ptrs"),
        (2, "neither"),  # fewer than the model
        (4, "draft layer 2"),
        (8, "another depth"),  # one draft here, two there
    ],
)
def test_a_peer_whose_list_fits_nothing_is_refused(peer: int, match: str) -> None:
    args = kv_args(6, kv_buf_groups=2, hidden_kv_layers=2, num_draft_entries=2)
    with pytest.raises((UnsupportedLayout, kp.PlanError), match=match):
        pair_with_peer(args, peer, mla=True, pp_size=1, last=True)


def test_a_list_that_can_be_read_twice_is_refused() -> None:
    """A-25, the coincidence: 2 layers over 2 stages, one draft; decode's 2 layers, or this stage's 1 and its draft."""
    args = kv_args(6, kv_buf_groups=3, hidden_kv_layers=2, prefill_start_layer=1, num_draft_entries=3)
    with pytest.raises(UnsupportedLayout, match="can be read"):
        pair_with_peer(args, 6, mla=True, pp_size=2, last=True)
    peer: list[Any] = [(kind, "target", layer, 0) for kind in ("latent", "rope", "index_key") for layer in (0, 1)]
    with pytest.raises(kp.PlanError, match="draft"):  # named, it is known to lack the draft
        pair_with_peer(args, 6, mla=True, pp_size=2, last=True, names=peer)


def test_ids_pair_by_occurrence_a04() -> None:
    args = kv_args(4, kv_layer_ids=[7, 11, 7, 11])
    pairs = pair_with_peer(args, 6, mla=True, pp_size=2, layer_ids=[3, 7, 11, 3, 7, 11])
    assert pairs == ((0, 1), (1, 2), (2, 4), (3, 5))
    with pytest.raises(kp.PlanError, match="11"):
        pair_with_peer(args, 4, mla=True, pp_size=2, layer_ids=[3, 7, 3, 7])
    with pytest.raises(UnsupportedLayout, match="layer 11 has unequally many"):
        pair_with_peer(args, 5, mla=True, pp_size=2, layer_ids=[3, 7, 11, 3, 7])


def test_index_keys_on_some_layers_pair_by_id_a02() -> None:
    """78 latents, 78 ropes, 21 index keys: 177 entries are no 59 layers of 3."""
    held = list(range(0, 78, 4))[:21]
    ids = [*range(78), *range(78), *held]
    args = kv_args(len(ids), kv_layer_ids=ids)
    assert pair_with_peer(args, len(ids), mla=True, pp_size=1, layer_ids=ids) == tuple((i, i) for i in range(len(ids)))
    with pytest.raises(UnsupportedLayout, match="3 groups"):
        own_names(kv_args(157, kv_buf_groups=3, hidden_kv_layers=78), mla=True, pp_size=1)


def test_names_tell_kinds_where_numbers_do_not_a08() -> None:
    """Layer 61 as a draft, and index keys of layer 5: nothing is read off the number."""
    own: list[Any] = [("latent", "target", 60, 0), ("index_key", "target", 60, 0), ("latent", "draft", 61, 0)]
    peer: list[Any] = [
        ("latent", "draft", 61, 0), ("index_key", "target", 5, 0), ("index_key", "target", 60, 0),
        ("latent", "target", 60, 0), ("latent", "target", 61, 0),
    ]  # fmt: skip
    args = kv_args(3, kv_entry_names=own)
    assert pair_with_peer(args, 5, mla=True, pp_size=2, names=peer) == ((0, 3), (1, 2), (2, 0))


def test_other_grouping_of_equal_bytes_is_refused_a12() -> None:
    """Each side alone is whole, the bytes are equal, and the names are not."""
    own: list[Any] = [("latent", "target", layer, 0) for layer in range(4)]
    peer: list[Any] = [("latent", "target", layer, 0) for layer in (0, 1)] + [("rope", "target", i, 0) for i in (0, 1)]
    with pytest.raises(kp.LayoutMismatch, match=r"layer 2.*layer 3"):
        pair_with_peer(kv_args(4, kv_entry_names=own), 4, mla=True, pp_size=1, names=peer)


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("kinds", [MHA, MLA], ids=["mha", "mla"])
def test_kv_args_both_ways(kinds: Any, drafts: int) -> None:
    """A manifest of KVArgs, KVArgs of the manifest, and the manifest again."""
    mla = kinds is MLA
    side = Side(
        kinds, range(2, 4), hidden=4, drafts=drafts, heads=1 if mla else 4, tp=(0, 1) if mla else (1, 2), pp=(1, 2)
    )
    side.args.draft_kv_layers = drafts
    side.args.kv_cache_dtype_str = "bfloat16"
    first = manifest(side, mla=mla)
    assert {(e.component, e.part, e.layer_id) for e in first.entries} == set(side.names)
    assert [entry.address for entry in first.entries] == side.args.kv_data_ptrs
    assert first.layout.spec(kinds[0].component).layer_ids == tuple(range(4))
    back = fill_kv_args(SimpleNamespace(), first)
    fields = (
        "kv_data_ptrs", "kv_data_lens", "kv_item_lens", "page_size", "pp_rank", "prefill_start_layer",
        "prefill_end_layer", "num_draft_entries", "hidden_kv_layers", "draft_kv_layers", "kv_buf_groups",
    )  # fmt: skip
    assert {name: getattr(back, name) for name in fields} == {name: getattr(side.args, name) for name in fields}
    if not mla:
        assert (back.kv_head_num, back.total_kv_head_num) == (2, 4)
        assert first.layout.spec("key").dtype == "bfloat16" and first.entries[0].head_range == (2, 4)
    back.kv_cache_dtype_str = "bfloat16"
    side.args = back
    assert manifest(side, mla=mla).to_json() == first.to_json()


def test_stages_agree_with_decode_through_manifests() -> None:
    """The manifests of KVArgs are what kv-planner and this package's own endpoints take."""
    stages = [Side(MHA, range(3 * i, 3 * i + 3), hidden=6, drafts=i, pp=(i, 2)) for i in range(2)]
    for stage in stages:
        stage.args.draft_kv_layers = 1
    decode = Side(MHA, range(6), drafts=1)
    sources = [manifest(stage, mla=False, drafts=1) for stage in stages]
    agreement = kp.agree(kp.Deployment(sources), kp.Deployment([manifest(decode, mla=False)]))
    sent = [
        (pair.component, pair.part, pair.layer_id) for number in range(2) for pair in agreement.route(number, 0).pairs
    ]
    assert sorted(sent) == sorted(decode.names)


@pytest.mark.parametrize("item", [None, 0, 7])
def test_an_item_length_that_is_no_page_is_refused(item: Any) -> None:
    side = Side(MHA, range(2))
    side.args.kv_item_lens[0] = item
    with pytest.raises(UnsupportedLayout, match="kv_item_lens"):
        manifest(side, mla=False)


def test_heads_that_nobody_counted_are_refused() -> None:
    side = Side(MHA, range(2), heads=4, tp=(1, 2))
    side.args.total_kv_head_num = side.args.kv_head_num = 0
    with pytest.raises(UnsupportedLayout, match="total_kv_head_num"):
        manifest(side, mla=False)


def test_apart_items_have_no_place_in_kv_args() -> None:
    layout = kp.ModelLayout(
        [kp.ComponentSpec("key", layer_ids=[0], dtype="int8", total_heads=1, dims=4)], page_size=2, fingerprint="m"
    )
    entry = kp.BufferEntry(
        "key", "target", 0, device="cpu", address=4096, nbytes=160, item_stride=16, item_bytes=8, head_range=(0, 1)
    )
    with pytest.raises(UnsupportedLayout, match="item_stride"):
        fill_kv_args(SimpleNamespace(), kp.RankManifest(layout, kp.Placement(), [entry]))


def test_layers_of_several_widths_in_one_list() -> None:
    """A list whose layers have pages of their own lengths: each goes with its own."""
    own, peer = (Side([Kind("latent", 8)], range(3)) for _ in range(2))
    for side in (own, peer):
        wide = np.full((12, 4, 1, 16), 0xEE, np.uint8)
        side.memory[1] = wide
        side.args.kv_data_ptrs[1], side.args.kv_data_lens[1] = wide.ctypes.data, wide.nbytes
        side.args.kv_item_lens[1] = wide[0].nbytes
        side.args.kv_buf_groups = 1
    own.memory[1][5] = 7
    here, there = Manager(own, mla=True), Manager(peer, mla=True)
    session = there.engine.get_session_id()
    assert here.register(peer, session) is None
    assert here.send_kvcache(session, np.array([5]), list(peer.args.kv_data_ptrs), np.array([2]), None) == 0
    assert (peer.memory[1][2] == 7).all() and (peer.memory[1][[0, 1, 3]] == 0xEE).all()
    for manager in (here, there):
        manager.engine.close()
