"""vLLM's tensors become manifests that name each component's bytes; what is not moved is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kv_planner as kp
import pytest
import torch
from vllm_pieces import configuration, first_axis, groups, names

import kv_transfer as kt
from kv_transfer.integrations.vllm.caches import Caches, layer_of, read_caches
from kv_transfer.integrations.vllm.settings import Settings

BLOCKS, TOKENS, HEADS, DIMS = 5, 4, 2, 3
MLA = {"kv_lora_rank": 6, "qk_rope_head_dim": 2}


def _read(caches: dict[str, Any], block_size: int = TOKENS, **options: Any) -> Caches:
    config = configuration(**options)
    return read_caches(config, groups(block_size), caches, Settings.of(config))


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
    layout = found.manifest.layout
    assert [(spec.component, spec.layer_ids, spec.total_heads) for spec in layout.components] == [
        ("key", (0, 1), HEADS),
        ("value", (0, 1), HEADS),
    ]
    assert layout.page_size == TOKENS and found.kernel_blocks == 1 and layout.fingerprint == "a-model"
    order = ("head", "token", "dim") if kind == "heads first" else ("token", "head", "dim")
    assert all(spec.axes == order for spec in layout.components)
    assert found.layers == {name: ("target", layer) for layer, name in enumerate(names(0, 1))}
    for entry in found.manifest.entries:
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
    assert [(spec.component, spec.dims, spec.dtype) for spec in found.manifest.layout.components] == [
        ("latent", 8, "float32"), ("index_key", 5, "uint8"),
    ]  # fmt: skip
    assert sorted(found.layers) == names(0, 1), "only attention says that its layer is computed"
    parts = [(6, torch.float32), (2, torch.float32), (4, torch.int8), (1, torch.float16)]
    for count in (2, 3, 4):
        caches = {
            name: tuple(torch.zeros((BLOCKS, TOKENS, 1, dims), dtype=dtype) for dims, dtype in parts[:count])
            for name in names(0, 1)
        }
        kinds = [spec.component for spec in _read(caches, text=MLA, heads=1).manifest.layout.components]
        assert kinds == ["latent", "rope", "index_key", "index_scale"][:count]
    with pytest.raises(kt.UnsupportedLayout, match=r"expected latent rows of 6 and rope rows of 2 numbers first"):
        _read({names(0)[0]: tuple(torch.zeros((BLOCKS, TOKENS, 1, dims)) for dims in (8, 4))}, text=MLA)


def test_a_block_may_be_several_kernel_blocks() -> None:
    found = _read(first_axis(0, 1, tokens=2), block_size=8)
    assert found.kernel_blocks == 4 and found.manifest.layout.page_size == 2
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
        ranks.append(_read(caches, **options).manifest)
    alone = _read(first_axis(0, 1, 2, 3, 4), layers=4, draft_heads=2).manifest
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
    assert {entry.layer_id for entry in found.manifest.entries} == {0, 1} and len(found.manifest.entries) == 4


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


def test_groups_and_compression_are_refused() -> None:
    config = configuration()
    for wrong, words in ((groups(count=2), "2 groups; start vLLM with"), (groups(compress_ratio=4), "ratio 4")):
        with pytest.raises(kt.UnsupportedLayout, match=words):
            read_caches(config, wrong, first_axis(0, 1), Settings.of(config))
    assert layer_of("model.layers.61.mtp_block.self_attn.attn") == 61


@pytest.mark.parametrize(
    "value", [None, "x", (None, None), [1, 2], torch.zeros(2, 5, 0, 2, 3), torch.zeros(2, 0, 4, 2, 3)]
)
def test_what_holds_no_cache_is_named(value: Any) -> None:
    with pytest.raises(kt.UnsupportedLayout, match=r"model\.layers\.0\."):
        read_caches(configuration(), groups(), {names(0)[0]: value}, Settings(directory="tcp://127.0.0.1:7701"))


@pytest.mark.parametrize("size", [0, -4, None, "4"])
def test_a_block_holds_tokens(size: Any) -> None:
    with pytest.raises(kt.UnsupportedLayout, match="block_size: expected tokens, 1 or more"):
        read_caches(configuration(), groups(size), first_axis(0, 1), Settings(directory="tcp://127.0.0.1:7701"))


def test_a_secret_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("absent", "bytes", "."):
        with pytest.raises(kt.ArgumentError, match="secret_file: "):
            Settings(directory="tcp://127.0.0.1:7701", secret_file=tmp_path / name).secret()
