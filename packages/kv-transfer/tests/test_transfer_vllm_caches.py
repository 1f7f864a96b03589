"""vLLM's tensors become manifests that name each component's bytes; what is not moved is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kv_planner as kp
import pytest
import torch
from vllm_pieces import (
    ChunkedLocalAttentionSpec,
    configuration,
    first_axis,
    full,
    groups,
    names,
    states,
    window,
)

import kv_transfer as kt
from kv_transfer.integrations.vllm.caches import Caches, read_caches
from kv_transfer.integrations.vllm.settings import Settings
from kv_transfer.integrations.vllm.tensors import layer_of

BLOCKS, TOKENS, HEADS, DIMS = 5, 4, 2, 3
MLA = {"kv_lora_rank": 6, "qk_rope_head_dim": 2}


def _read(caches: dict[str, Any], block_size: int = TOKENS, **options: Any) -> Caches:
    config = configuration(**options)
    return read_caches(config, groups(full(block_size)), caches, Settings.of(config))


def _alone(found: Caches) -> kp.RankManifest:
    """The manifest of the only group."""
    assert list(found.manifests) == ["main"] and not found.windows
    return found.manifests["main"]


def _fill(caches: dict[str, Any]) -> None:
    """Every number of every tensor is another one."""
    start = 1
    for tensors in caches.values():
        for tensor in tensors if isinstance(tensors, tuple) else (tensors,):
            tensor.copy_(torch.arange(start, start + tensor.numel()).reshape(tensor.shape))
            start += tensor.numel()


def _item(entry: kp.BufferEntry, block: int, caches: dict[str, Any], dtype: torch.dtype) -> list[float]:
    """The numbers at an entry's item, found by address in the memory of the caches."""
    for tensors in caches.values():
        for tensor in tensors if isinstance(tensors, tuple) else (tensors,):
            storage = tensor.untyped_storage()
            offset = entry.address + block * entry.item_stride - storage.data_ptr()
            if offset >= 0 and offset + entry.item_bytes <= storage.nbytes():
                raw = torch.frombuffer(bytearray(bytes(storage)[offset : offset + entry.item_bytes]), dtype=dtype)
                return [float(number) for number in raw]
    raise AssertionError(f"{entry.describe()} is outside all tensors")


def _both(kind: str) -> dict[str, Any]:
    shape = {"first": (2, BLOCKS, TOKENS, HEADS, DIMS), "second": (BLOCKS, 2, TOKENS, HEADS, DIMS)}.get(kind)
    if shape is not None:
        return {name: torch.zeros(shape, dtype=torch.float32) for name in names(0, 1)}
    if kind == "heads first":  # the bytes of heads lie together: the same shape over permuted memory
        memory = [torch.zeros((BLOCKS, 2, HEADS, TOKENS, DIMS), dtype=torch.float32) for _ in range(2)]
        return dict(zip(names(0, 1), (own.permute(0, 1, 3, 2, 4) for own in memory), strict=True))
    sizes = ((BLOCKS, TOKENS, HEADS, DIMS), (BLOCKS, TOKENS, HEADS, DIMS - 1))
    return {name: tuple(torch.zeros(size, dtype=torch.float32) for size in sizes) for name in names(0, 1)}


@pytest.mark.parametrize("kind", ["first", "second", "heads first", "tuple"])
def test_keys_and_values_are_found_in_every_arrangement(kind: str) -> None:
    caches = _both(kind)
    _fill(caches)
    found = _read(caches)
    layout = _alone(found).layout
    assert [(spec.component, spec.layer_ids, spec.total_heads) for spec in layout.components] == [
        ("key", (0, 1), HEADS),
        ("value", (0, 1), HEADS),
    ]
    assert layout.page_size == TOKENS and found.groups[0].kernel_blocks == 1 and layout.fingerprint == "a-model"
    order = ("head", "token", "dim") if kind == "heads first" else ("token", "head", "dim")
    assert all(spec.axes == order for spec in layout.components)
    assert found.layers == {name: ("target", layer) for layer, name in enumerate(names(0, 1))}
    for entry in _alone(found).entries:
        own = caches[names(entry.layer_id)[0]]
        which = int(entry.component == "value")
        tensor = own[which] if kind in ("first", "tuple") else own[:, which]
        for block in range(BLOCKS):
            wanted = tensor[block].permute(1, 0, 2) if kind == "heads first" else tensor[block]
            assert _item(entry, block, caches, torch.float32) == wanted.reshape(-1).tolist()
        assert entry.items == BLOCKS and entry.device == "cpu" and entry.head_range == (0, HEADS)


def test_latent_rows_alone_and_with_rope_and_index() -> None:
    alone = {name: torch.zeros((BLOCKS, TOKENS, 8), dtype=torch.float32) for name in names(0, 1)}
    index = {f"model.layers.{layer}.self_attn.indexer.k_cache": torch.zeros((BLOCKS, TOKENS, 5), dtype=torch.uint8)
             for layer in range(2)}  # fmt: skip
    found = _read({**alone, **index}, text=MLA, heads=1)
    assert [(spec.component, spec.dims, spec.dtype) for spec in _alone(found).layout.components] == [
        ("latent", 8, "float32"), ("index_key", 5, "uint8"),
    ]  # fmt: skip
    assert sorted(found.layers) == names(0, 1), "only attention says that its layer is computed"
    parts = [(6, torch.float32), (2, torch.float32), (4, torch.int8), (1, torch.float16)]
    for count in (2, 3, 4):
        caches = {
            name: tuple(torch.zeros((BLOCKS, TOKENS, 1, dims), dtype=dtype) for dims, dtype in parts[:count])
            for name in names(0, 1)
        }
        kinds = [spec.component for spec in _alone(_read(caches, text=MLA, heads=1)).layout.components]
        assert kinds == ["latent", "rope", "index_key", "index_scale"][:count]
    with pytest.raises(kt.UnsupportedLayout, match=r"expected latent rows of 6 and rope rows of 2 numbers first"):
        _read({names(0)[0]: tuple(torch.zeros((BLOCKS, TOKENS, 1, dims)) for dims in (8, 4))}, text=MLA)


def test_a_block_may_be_several_kernel_blocks() -> None:
    found = _read(first_axis(0, 1, tokens=2), block_size=8)
    assert found.groups[0].kernel_blocks == 4 and _alone(found).layout.page_size == 2
    with pytest.raises(kt.UnsupportedLayout, match="kernel blocks of 4 tokens do not divide blocks, got 6"):
        _read(first_axis(0, 1), block_size=6)


def test_ranks_of_a_side_are_a_whole_deployment() -> None:
    """Two stages of two ranks each agree with one rank that has all, with drafts on the last stage."""
    ranks = []
    for rank in range(4):
        stage = rank // 2
        layers = [2 * stage, 2 * stage + 1] + ([4] if stage else [])
        caches = first_axis(*layers, heads=1)
        options: dict[str, Any] = {"layers": 4, "tp": 2, "pp": 2, "rank": rank, "draft_heads": 2, "draft_layers": 1}
        ranks.append(_alone(_read(caches, **options)))
    alone = _alone(_read(first_axis(0, 1, 2, 3, 4), layers=4, draft_heads=2))
    agreement = kp.agree(kp.Deployment(ranks), alone)
    assert {entry.part for entry in alone.entries} == {"target", "draft"}
    assert len(agreement.local) == 4
    assert [entry.head_range for entry in ranks[1].entries][:1] == [(1, 2)]
    with pytest.raises(kt.UnsupportedLayout, match="should have it on all of layers 2 to 3"):
        _read(first_axis(2, heads=1), layers=4, tp=2, pp=2, rank=2)


def test_a_layer_that_shares_anothers_cache_has_none_of_its_own() -> None:
    caches = first_axis(0, 1)
    caches[names(2)[0]] = caches[names(0)[0]]
    found = _read(caches, layers=3)
    assert {entry.layer_id for entry in _alone(found).entries} == {0, 1} and len(_alone(found).entries) == 4


@pytest.mark.parametrize(
    ("caches", "words"),
    [
        ({"model.layers.0.sub.1": torch.zeros(2, 5, 4, 2, 3)}, "its name should hold one number"),
        ({"model.norm": torch.zeros(2, 5, 4, 2, 3)}, "its name should hold one number"),
        ({"layers.0": torch.zeros(2, 2, 4, 2, 3)}, "K and V at the first or the second axis"),
        ({"layers.0": torch.zeros(5, 3, 4, 2, 3)}, "K and V at the first or the second axis"),
        ({"layers.0": torch.zeros(5, 4, 2, 6)}, r"an arrangement that is not moved, got \(5, 4, 2, 6\)"),
        ({"layers.0": [torch.zeros(5, 4, 3)] * 5}, "an arrangement that is not moved"),
        ({"layers.0": torch.zeros(2, 5, 4, 2, 6)[..., ::2]}, "key: a block's bytes do not lie together"),
        ({"layers.0": torch.zeros(2, 5, 4, 2, 3, dtype=torch.complex64)}, "a dtype that is not moved, got complex64"),
        (
            {"layers.0": torch.zeros(2, 5, 4, 2, 3), "layers.1": torch.zeros(2, 5, 2, 2, 3)},
            "tokens of a kernel block: expected one value for all layers",
        ),
        (
            {"layers.0": torch.zeros(2, 5, 4, 2, 3), "layers.1": torch.zeros(2, 5, 4, 2, 3, dtype=torch.int8)},
            "dtype of target key: expected one value",
        ),
    ],
)
def test_what_is_not_moved_is_named(caches: dict[str, Any], words: str) -> None:
    with pytest.raises(kt.UnsupportedLayout, match=words):
        _read(caches)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (groups(full(compress_ratio=4)), "kv_cache_groups: compressed blocks are not moved, got ratio 4"),
        (groups(full(), full(kv_cache_specs={"a": full(compress_ratio=4)})), r"groups\[1\]: .* ratio 4"),
        (groups(full(), ChunkedLocalAttentionSpec(block_size=4)), r"groups\[1\]: .*manager.* got ChunkedLocalAtt"),
        (groups(ChunkedLocalAttentionSpec(block_size=4)), "kv_cache_groups: .*manager.* got ChunkedLocalAttentionSpec"),
        (groups(window(1)), "kv_cache_groups: expected a sliding window of 2 tokens or more, got 1"),
        (groups(full(), states(mode="align", speculative=2)), r"groups\[1\]: .* got 2 speculative blocks"),
        (groups(full(kv_cache_specs={"a": full(), "b": window(8)})), r"layers of one kind, got \['full', 'window'\]"),
        (groups(full(kv_cache_specs={"a": window(4), "b": window(8)})), r"of one window, got \['4', '8'\]"),
        (groups(full(), window(8, block_size=0)), "block_size: expected tokens, 1 or more, got 0"),
        (SimpleNamespace(kv_cache_groups=[]), "expected layers with a cache, got none"),
    ],
)
def test_groups_that_are_not_moved_are_named(wrong: Any, words: str) -> None:
    config = configuration()
    with pytest.raises(kt.UnsupportedLayout, match=words):
        read_caches(config, wrong, first_axis(0, 1), Settings.of(config))
    assert layer_of("model.layers.61.mtp_block.self_attn.attn") == 61


def _shared(tensors: int, nbytes: int) -> list[torch.Tensor]:
    return [torch.zeros(nbytes, dtype=torch.int8) for _ in range(tensors)]


def test_layers_of_several_groups_share_memory() -> None:
    """As vLLM lays out full attention beside two groups of windows: the n-th layers of all groups have one tensor."""
    raw = _shared(2, BLOCKS * 2 * TOKENS * HEADS * DIMS * 2)
    caches = {
        name: raw[index // 3].view(torch.bfloat16).view(2, BLOCKS, TOKENS, HEADS, DIMS)
        for index, name in enumerate(names(0, 1, 2, 3, 4, 5))
    }
    caches[names(6)[0]] = caches[names(3)[0]]  # it reuses layer 3's K/V, and is a layer of no group
    config = configuration(layers=7)
    sorted_ = [names(0, 3), names(1, 4), names(2, 5)]
    found = read_caches(config, groups(full(), window(9), window(9), layers=sorted_), caches, Settings.of(config))
    assert list(found.manifests) == ["full", "window", "window 2"] and found.windows == {"window": 8, "window 2": 8}
    assert [own.names for own in found.groups] == [("full",), ("window",), ("window 2",)]
    for own, layers in zip(found.manifests.values(), ((0, 3), (1, 4), (2, 5)), strict=True):
        assert {spec.layer_ids for spec in own.layout.components} == {layers}
        addresses = [entry.address for entry in own.entries if entry.component == "key"]
        assert addresses == [tensor.data_ptr() for tensor in raw]
    assert set(found.layers) == set(names(0, 1, 2, 3, 4, 5))
    caches[names(6)[0]] = torch.zeros(2, BLOCKS, TOKENS, HEADS, DIMS)
    with pytest.raises(kt.UnsupportedLayout, match=r"layers\.6\..* it is a layer of no group and shares no other"):
        read_caches(config, groups(full(), window(9), window(9), layers=sorted_), caches, Settings.of(config))


def _ascend_hybrid(conv: tuple[int, ...], ssm: tuple[int, ...], dims: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """One tensor as vllm-ascend shares it: [padding | conv], [K | ssm], [V | padding], each over all blocks."""
    conv_bytes, ssm_bytes = 2 * math.prod(conv), 4 * math.prod(ssm)
    assert ssm_bytes == TOKENS * HEADS * dims * 2
    raw = torch.zeros(BLOCKS * (conv_bytes + 2 * ssm_bytes), dtype=torch.int8)
    first, second = BLOCKS * conv_bytes, BLOCKS * (conv_bytes + ssm_bytes)
    shape = (BLOCKS, TOKENS, HEADS, dims)
    return raw, {
        names(0)[0]: (
            raw[first:second].view(torch.bfloat16).view(shape),
            raw[second:].view(torch.bfloat16).view(shape),
        ),
        "model.layers.1.linear_attn": [
            raw[:first].view(torch.bfloat16).view(BLOCKS, *conv),
            raw[first:second].view(torch.float32).view(BLOCKS, *ssm),
        ],
    }


def test_states_are_rows_of_their_tensors_beside_pages_of_the_same_memory() -> None:
    raw, caches = _ascend_hybrid((2, 6), (2, 2, 3), 3)
    config = configuration()
    wanted = groups(full(), states(), layers=[names(0), ["model.layers.1.linear_attn"]])
    found = read_caches(config, wanted, caches, Settings.of(config))
    assert list(found.manifests) == ["full", "states, tensor 1", "states, tensor 2"]
    assert [(own.names, own.kind) for own in found.groups] == [
        (("full",), "full"), (("states, tensor 1", "states, tensor 2"), "states"),
    ]  # fmt: skip
    conv, ssm = (found.manifests[f"states, tensor {number}"] for number in (1, 2))
    for own, offset, nbytes, dtype in ((conv, 0, 24, "bfloat16"), (ssm, BLOCKS * 24, 48, "float32")):
        (spec,), (entry,) = own.layout.components, own.entries
        assert (spec.component, spec.item_kind, spec.dtype, spec.layer_ids) == ("state", "request_row", dtype, (1,))
        assert (entry.address - raw.data_ptr(), entry.item_stride, entry.item_bytes) == (offset, nbytes, nbytes)
        assert entry.items == BLOCKS
    (key, value) = found.manifests["full"].entries
    assert (key.address - raw.data_ptr(), value.address - raw.data_ptr()) == (BLOCKS * 24, BLOCKS * 72)
    # vLLM's own way: the states of a block lie together, with padding behind them.
    page = torch.zeros(BLOCKS, 100, dtype=torch.int8)
    strided = [
        torch.as_strided(page.view(torch.bfloat16), (BLOCKS, 3, 5), (50, 5, 1)),
        torch.as_strided(page.view(torch.float32), (BLOCKS, 2, 3), (25, 3, 1), 8),
    ]
    alone = read_caches(config, groups(states()), {"model.layers.0.mamba": strided}, Settings.of(config))
    (one,), (two,) = (manifest.entries for manifest in alone.manifests.values())
    assert (one.item_stride, one.item_bytes, two.item_stride, two.item_bytes) == (100, 30, 100, 24)
    assert two.address - one.address == 32 and list(alone.manifests) == ["main, tensor 1", "main, tensor 2"]
    for wrong, words in (
        ([strided[0].transpose(1, 2)], "state 0: a block's bytes do not lie together"),
        ([torch.zeros(5)], "state 0: expected blocks that hold something"),
    ):
        with pytest.raises(kt.UnsupportedLayout, match=words):
            read_caches(config, groups(states()), {"model.layers.0.mamba": wrong}, Settings.of(config))


def test_unlike_groups_and_shares_of_states_are_named_differences() -> None:
    _, caches = _ascend_hybrid((2, 6), (2, 2, 3), 3)
    layers = [names(0), ["model.layers.1.linear_attn"]]

    def rank(tp: int, rank: int = 0, heads: int = HEADS) -> Mapping[str, kp.RankManifest]:
        config = configuration(tp=tp, rank=rank, heads=heads)
        return read_caches(config, groups(full(), states(), layers=layers), caches, Settings.of(config)).manifests

    both = [rank(2, number, 2 * HEADS) for number in range(2)]
    alone = rank(1)
    for name in ("states, tensor 1", "states, tensor 2"):
        with pytest.raises(kp.LayoutMismatch, match=r"state/target\.total_heads"):
            kp.agree(kp.Deployment([own[name] for own in both]), alone[name])


def test_groups_of_stages_are_a_whole_deployment() -> None:
    """Full, window, window, full, window, window over two stages: vLLM gives each stage its layers of all groups."""
    types = ["full_attention", "sliding_attention", "sliding_attention"] * 2
    whole = [[0, 3], [1, 4], [2, 5]]

    def read(stage: int, **options: Any) -> Mapping[str, kp.RankManifest]:
        given: dict[str, Any] = {"layers": 6, "pp": 2, "rank": stage, "text": {"layer_types": types}} | options
        layers = [[own for own in group if own // 3 == stage] for group in whole]
        caches = {name: cache for group in layers for name, cache in first_axis(*group).items()}
        config = configuration(**given)
        wanted = groups(full(), window(9), window(9), layers=[names(*group) for group in layers])
        return read_caches(config, wanted, caches, Settings.of(config)).manifests

    stages = [read(0), read(1)]
    config = configuration(layers=6)
    wanted = groups(full(), window(9), window(9), layers=[names(*group) for group in whole])
    alone = read_caches(config, wanted, first_axis(0, 1, 2, 3, 4, 5), Settings.of(config)).manifests
    for name, layers in zip(("full", "window", "window 2"), whole, strict=True):
        assert stages[0][name].layout.components[0].layer_ids == tuple(layers)
        assert len(kp.agree(kp.Deployment([own[name] for own in stages]), alone[name]).local) == 2
    for wrong in ([], types[:5], types[1:] + types[:1], ["full_attention"] * 6):
        with pytest.raises(kt.UnsupportedLayout, match="which layers other pipeline stages have in it cannot be told"):
            read(0, text={"layer_types": wrong})
    with pytest.raises(kt.UnsupportedLayout, match="and without draft layers"):
        read(0, draft_layers=1)
    whole[1] = [3, 4]
    with pytest.raises(kt.UnsupportedLayout, match="group 'window': expected layers of it on every pipeline stage"):
        read(0)


def test_heads_of_a_group_are_its_own() -> None:
    """Layers with a window may have other heads than those that the model's configuration counts."""
    caches = first_axis(0, heads=2) | first_axis(1, heads=3)
    sorted_ = [names(0), names(1)]

    def heads(tp: int, total: int) -> list[int]:
        config = configuration(tp=tp, heads=total)
        found = read_caches(config, groups(full(), window(8), layers=sorted_), caches, Settings.of(config))
        return [own.layout.components[0].total_heads for own in found.manifests.values()]

    assert heads(1, 2) == [2, 3] and heads(2, 4) == [4, 6]
    caches = first_axis(0, heads=2) | first_axis(1, heads=1)
    with pytest.raises(kt.UnsupportedLayout, match="group 'window': target key: whether ranks share its heads"):
        heads(2, 4)


@pytest.mark.parametrize(
    "value", [None, "x", (None, None), [1, 2], torch.zeros(2, 5, 0, 2, 3), torch.zeros(2, 0, 4, 2, 3)]
)
def test_what_holds_no_cache_is_named(value: Any) -> None:
    with pytest.raises(kt.UnsupportedLayout, match=r"model\.layers\.0\."):
        read_caches(configuration(), groups(), {names(0)[0]: value}, Settings(directory="tcp://127.0.0.1:7701"))


@pytest.mark.parametrize("size", [0, -4, None, "4"])
def test_a_block_holds_tokens(size: Any) -> None:
    with pytest.raises(kt.UnsupportedLayout, match="block_size: expected tokens, 1 or more"):
        read_caches(configuration(), groups(full(size)), first_axis(0, 1), Settings(directory="tcp://127.0.0.1:7701"))


def test_a_secret_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("absent", "bytes", "."):
        with pytest.raises(kt.ArgumentError, match="secret_file: "):
            Settings(directory="tcp://127.0.0.1:7701", secret_file=tmp_path / name).secret()
