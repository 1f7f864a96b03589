"""SGLang's groups of pools described as ours: every buffer by its address, every byte there and back, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from engines_groups import compressed, hybrid_linear, number, sided, sparse, states, windowed, windowed_latents
from engines_pools import NPU, PAGE
from kv_planner import Placement, PlanError
from kv_planner.testing.odd_values import OPTIONAL, Case, wrongs
from kv_pool import KvPoolError, LayoutError, Pool, StateKind, UnsupportedMover
from kv_pool.hicache import HOST_LAYOUTS, HostLayout, HostPool, create_mover
from kv_pool.hicache.movers import MoverName
from kv_pool.integrations.sglang import adopt_groups, adopt_pool
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

MAKERS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "windowed": lambda patch: windowed(),
    "windowed latents": lambda patch: windowed_latents(),
    "windowed bytes": lambda patch: windowed(dtype=torch.int8),
    "sparse": lambda patch: sparse(),
    "sparse values": lambda patch: sparse(values=True),
    "states": lambda patch: states(),
    "speculative states": lambda patch: states(speculative_num_draft_tokens=3),
    "sided states": lambda patch: sided(),
    "hybrid linear": lambda patch: hybrid_linear(states()),
    "compressed": compressed,
}
GROUPS = {
    "windowed": ["kv", "swa"], "windowed latents": ["kv", "swa"], "windowed bytes": ["kv", "swa"], "sparse": ["kv"],
    "sparse values": ["kv", "index_kv"], "states": ["temporal", "conv0"], "speculative states": ["temporal", "conv0"],
    "sided states": ["temporal", "conv0", "ple_short_conv", "ple_ngram"], "hybrid linear": ["kv", "temporal", "conv0"],
    "compressed": ["swa", "c4", "c4_indexer", "c4_state", "c4_indexer_state", "c128", "c128_state"],
}  # fmt: skip
EACH = [pytest.param(kind, group, id=f"{kind}: {group}") for kind, groups in GROUPS.items() for group in groups]
MOVES: list[tuple[MoverName, HostLayout]] = [
    ("dim_exchange", "page_first_direct"),
    *(("indexed", x) for x in HOST_LAYOUTS),
]


def entries(pool: Pool, *components: str) -> tuple[list[int], list[int], list[int]]:
    """Addresses, lengths and items of components in order, layer by layer: as SGLang lists them."""
    held = [entry for name in components for entry in pool.manifest().entries if entry.component == name]
    return [e.address for e in held], [e.nbytes for e in held], [e.item_bytes for e in held]


@pytest.mark.parametrize("kind", MAKERS)
def test_every_group_has_its_name(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    groups = adopt_groups(MAKERS[kind](monkeypatch), fingerprint="m")
    assert list(groups) == GROUPS[kind]
    for name, pool in groups.items():
        rows = name in GROUPS["sided states"] or name.endswith("state")
        assert isinstance(pool, StateKind) == rows and (pool.page_size == 1) == rows


def test_windows_are_what_sglang_publishes() -> None:
    """Global layer ids for places that SGLang counts from 0 in each pool."""
    theirs = windowed()
    groups = adopt_groups(theirs, fingerprint="m")
    assert entries(groups["kv"], "key", "value") == theirs.get_contiguous_buf_infos()
    assert entries(groups["swa"], "key", "value") == theirs.get_state_buf_infos()
    assert groups["kv"].layer_ids() == (1, 3) and groups["swa"].layer_ids() == (0, 2, 4)
    for layer in range(5):
        group = groups["swa" if theirs.layers_mapping[layer][1] else "kv"]
        assert group.view("key", layer).data_ptr() == theirs.get_key_buffer(layer).data_ptr()
        assert group.view("value", layer).data_ptr() == theirs.get_value_buffer(layer).data_ptr()
    latents = windowed_latents()
    groups = adopt_groups(latents, fingerprint="m")
    assert entries(groups["kv"], "latent", "rope") == latents.get_contiguous_buf_infos()


def test_drafts_stand_behind_the_model_in_each_group() -> None:
    drafts = [windowed(full=[], sliding=[0]), windowed(full=[0], sliding=[1])]
    groups = adopt_groups(windowed(), fingerprint="m", drafts=drafts)
    assert groups["swa"].layer_ids("draft") == (5, 7) and groups["kv"].layer_ids("draft") == (6,)
    where = [draft.swa_kv_pool.get_contiguous_buf_infos()[0][0] for draft in drafts]
    assert [groups["swa"].view("key", layer, "draft").data_ptr() for layer in (5, 7)] == where


def test_stages_and_ranks_agree_on_one_layout() -> None:
    model = {"kv": [1, 3, 6], "swa": [0, 2, 4, 5]}
    heads = {"kv": 4, "swa": 6}
    ranks = [
        adopt_groups(
            windowed(full=full, sliding=sliding), fingerprint="m", model_layers=model, total_heads=heads,
            placement=Placement(pp_rank=stage, pp_size=2, tp_rank=1, tp_size=2),
        )
        for stage, (full, sliding) in enumerate([([1, 3], [0, 2]), ([6], [4, 5])])
    ]  # fmt: skip
    for group in ("kv", "swa"):
        assert ranks[0][group].layout == ranks[1][group].layout
    assert {entry.head_range for entry in ranks[0]["swa"].manifest().entries} == {(3, 6)}
    split = adopt_groups(states(), fingerprint="m", placement=Placement(tp_rank=1, tp_size=2))
    assert {entry.head_range for entry in split["temporal"].manifest().entries} == {(4, 8)}
    assert {entry.head_range for entry in split["conv0"].manifest().entries} == {(1, 2)}


def test_sparse_index_keys_have_the_ids_of_their_layers() -> None:
    """A-34: SGLang's index pool counts from 0 whatever the stage; here its layers have their global ids."""
    theirs = sparse()
    (group,) = adopt_groups(theirs, fingerprint="m", model_layers={"kv": range(7), "index_key": [3, 4, 5]}).values()
    assert entries(group, "key", "value") == theirs.main_pool.get_contiguous_buf_infos()
    assert entries(group, "index_key") == theirs.get_index_k_state_buf_infos()
    assert group.layer_ids("target", "index_key") == (3, 4, 5) and group.view("index_key", 4).dtype == torch.int8
    assert group.view("index_key", 4).data_ptr() == theirs.index_k_pool.get_key_buffer(1).data_ptr()
    both = sparse(values=True)
    index = adopt_groups(both, fingerprint="m")["index_kv"]
    assert index.layer_ids() == (5,) and entries(index, "key", "value") == both.index_kv_pool.get_contiguous_buf_infos()


def test_states_are_the_checkpoints_alone() -> None:
    """Work space of speculation is no state; a wider conv window, which verify needs, is."""
    theirs = states(speculative_num_draft_tokens=3)
    groups = adopt_groups(theirs, fingerprint="m")
    cache = theirs.mamba_cache
    assert groups["conv0"].layers("state")[0].numel() == cache.conv[0][0].numel()
    assert cache.conv[0].shape[2] == 3 + 2 and set(groups) == {"temporal", "conv0"}
    for name, tensor in (("temporal", cache.temporal), ("conv0", cache.conv[0])):
        assert [layer.data_ptr() for layer in groups[name].layers("state")] == [row.data_ptr() for row in tensor]
        assert groups[name].layer_ids() == (1, 2, 4) and groups[name].num_pages == theirs.size + 1


def test_side_states_are_rows_of_bytes_that_all_ranks_have() -> None:
    """Of a short convolution on some layers, and of the last tokens, which belong to no layer."""
    theirs = sided()
    for rank in range(2):
        groups = adopt_groups(theirs, fingerprint="m", placement=Placement(tp_rank=rank, tp_size=2))
        assert list(groups) == ["temporal", "conv0", "ple_short_conv", "ple_ngram"]
        order = ("conv0", "temporal", "ple_short_conv", "ple_ngram")
        lists = zip(*(entries(groups[name], "state") for name in order), strict=True)
        found = tuple([value for part in parts for value in part] for parts in lists)
        assert found == theirs.get_contiguous_buf_infos()
        layers = [layer for name in order for layer in groups[name].layer_ids()]
        assert layers == theirs.get_state_layer_ids()
        assert {entry.head_range for name in order[2:] for entry in groups[name].manifest().entries} == {(0, 1)}


def test_compressed_groups_are_what_sglang_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = compressed(monkeypatch)
    groups = adopt_groups(theirs, fingerprint="m")
    main = [entries(groups["c4"], "latent"), entries(groups["c4_indexer"], "index_key", "index_scale")]
    assert tuple(a + b for a, b in zip(*main, strict=True)) == theirs.get_contiguous_buf_infos()
    parts = [entries(groups["swa"], "latent"), *(entries(groups[n], "state") for n in ("c4_state", "c4_indexer_state"))]
    assert tuple(a + b + c for a, b, c in zip(*parts, strict=True)) == theirs.get_state_buf_infos()
    assert entries(groups["c128"], "latent") == theirs.get_c128_kv_buf_infos()
    assert groups["c4"].layer_ids() == (1, 3) and groups["c128"].layer_ids() == (2,)
    ring = theirs.compress_state_pools[2]
    row = ring.translate_from_req_position_to_state_loc(torch.tensor([3]), torch.tensor([0]))
    state = groups["c128_state"].view("state", 2)
    assert state[3].data_ptr() == ring.kv_score_buffer.kv_score[int(row)].data_ptr()


@pytest.mark.parametrize(("kind", "name"), EACH)
@pytest.mark.parametrize(("mover_name", "layout"), MOVES)
def test_items_go_to_the_host_and_come_back_elsewhere(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str, mover_name: MoverName, layout: HostLayout
) -> None:
    """Permuted pages or rows over every component and layer; what was not moved stays, byte for byte."""
    pool = adopt_groups(MAKERS[kind](monkeypatch), fingerprint="m")[name]
    host = HostPool(pool, pages=4, layout=layout)
    if mover_name == "dim_exchange" and any(mirror.parent is None for mirror in host.mirrors):
        with pytest.raises(UnsupportedMover, match="a tensor a layer"):
            create_mover(mover_name, host)
        return
    mover = create_mover(mover_name, host)
    last = pool.num_pages - 1
    there, back = ([last, 1], [3, 1]), ([1, last], [3, 1])
    saved = {}
    for salt, mirror in enumerate(host.mirrors):
        for layer, tensor in enumerate(mirror.layers):
            number(tensor, 17 * salt + 5 * layer)
            saved[mirror.component, layer] = tensor.cpu()
        mirror.host.fill_(-7)
    mover.backup(*there)
    torch_npu.npu.synchronize()
    for mirror in host.mirrors:
        for layer in range(len(mirror.layers)):
            assert torch.equal(mirror.host[[3, 1], layer], saved[mirror.component, layer][[last, 1]])
        assert (mirror.host[[0, 2, 4]] == -7).all()
    mover.load(*back)
    torch_npu.npu.synchronize()
    for mirror in host.mirrors:
        for layer, tensor in enumerate(mirror.layers):
            expected = saved[mirror.component, layer].clone()
            expected[[1, last]] = saved[mirror.component, layer][[last, 1]]
            assert torch.equal(tensor.cpu(), expected), (mirror.component, layer)


def test_what_sglang_writes_is_what_the_host_keeps() -> None:
    """Rows written by SGLang's own pool, through its own map of slots, in both groups."""
    theirs = windowed(swa_head_num=2, swa_head_dim=24, swa_v_head_dim=16)
    mapping = torch.zeros(9 * PAGE, dtype=torch.int64, device=NPU)
    mapping[5 * PAGE : 6 * PAGE] = torch.arange(2 * PAGE, 3 * PAGE)
    theirs.register_mapping(mapping)
    groups = adopt_groups(theirs, fingerprint="m")
    slots = torch.arange(5 * PAGE, 6 * PAGE, device=NPU)
    for layer in range(5):
        key, value = torch.empty(PAGE, 2, 24, dtype=torch.bfloat16), torch.empty(PAGE, 2, 16, dtype=torch.bfloat16)
        number(key, layer)
        number(value, 50 + layer)
        location = KVWriteLoc(slots, theirs.translate_loc_from_full_to_swa(slots))
        theirs.set_kv_buffer(type("Layer", (), {"layer_id": layer}), location, key.to(NPU), value.to(NPU))
        group, page = (groups["swa"], 2) if theirs.layers_mapping[layer][1] else (groups["kv"], 5)
        host = HostPool(group, pages=1)
        create_mover("auto", host).backup([page], [1])
        torch_npu.npu.synchronize()
        place = group.layer_ids().index(layer)
        assert torch.equal(host.mirror("key").host[1, place], key)
        assert torch.equal(host.mirror("value").host[1, place], value)


def test_groups_of_other_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(type(windowed())):  # type: ignore[misc]
        pass

    pool = windowed()
    pool.__class__ = Other
    with pytest.raises(LayoutError, match="Other"):
        adopt_groups(pool, fingerprint="m")
    with pytest.raises(LayoutError, match="drafts of a MambaPool"):
        adopt_groups(states(), fingerprint="m", drafts=[states()])
    pool = sparse()
    pool.dense_pool = pool.main_pool
    with pytest.raises(LayoutError, match="HiSparse"):
        adopt_groups(pool, fingerprint="m")
    pool = compressed(monkeypatch)
    pool.swa_kv_pool = None
    with pytest.raises(LayoutError, match="paged window"):
        adopt_groups(pool, fingerprint="m")


def test_odd_arguments_are_refused_by_name() -> None:
    numbers = ("empty list", "None")
    shared = {"fingerprint": "m", "drafts": (), "placement": None, "total_heads": None, "model_layers": None}
    takes = {
        "fingerprint": ("text", "empty text"), "drafts": ("empty list",), "placement": OPTIONAL,
        "total_heads": OPTIONAL, "model_layers": numbers, "model_indexer_layers": numbers,
    }  # fmt: skip
    cases = {
        "adopt_pool": Case(
            adopt_pool, {"pool": windowed().full_kv_pool, **shared, "model_indexer_layers": None}, takes
        ),
        "adopt_groups": Case(adopt_groups, {"pool": windowed(), **shared}, {**takes, "model_layers": OPTIONAL}),
    }
    assert wrongs(cases, (KvPoolError, PlanError)) == []
