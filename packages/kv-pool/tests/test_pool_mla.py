"""Owns the proof that a latent pool keeps every component on the layers that own it, in each form (on a CPU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kv_planner import ComponentSpec, ModelLayout, Placement, agree
from kv_pool import (
    KvPoolError,
    LayoutError,
    MlaPool,
    SlotOutOfRange,
    UnheldComponent,
    UnknownForm,
    UnknownLayer,
    WidthMismatch,
    packed_record_bytes,
)

Labels = Callable[..., torch.Tensor]
PAGE = 4


def spec(component: Any, part: Any = "target", **changes: Any) -> ComponentSpec:
    return ComponentSpec(
        component, part, **{"layer_ids": [0, 1, 2], "dtype": "float16", "total_heads": 1, "dims": 64, **changes}
    )


def sparse_layout(*, draft: bool = True) -> ModelLayout:
    """Latent and rope on all layers, index keys and scales on two of them, and a draft layer with all four."""
    specs = [
        spec("latent", dims=128, dtype="bfloat16"),
        spec("rope", dtype="bfloat16"),
        spec("index_key", layer_ids=[0, 2], dtype="float8_e4m3fn"),
        spec("index_scale", layer_ids=[0, 2], dtype="float32", dims=1),
    ]
    if draft:
        specs += [
            spec("latent", "draft", layer_ids=[9], dims=128, dtype="bfloat16"),
            spec("rope", "draft", layer_ids=[9], dtype="bfloat16"),
            spec("index_key", "draft", layer_ids=[9], dtype="float8_e4m3fn"),
            spec("index_scale", "draft", layer_ids=[9], dtype="float32", dims=1),
        ]
    return ModelLayout(specs, page_size=PAGE, fingerprint="sparse")


def test_every_component_lies_on_its_own_layers() -> None:
    pool = MlaPool(sparse_layout(), size=16, device="cpu")
    assert pool.layer_ids() == (0, 1, 2) and pool.layer_ids("target", "index_key") == (0, 2)
    assert pool.storage("latent").shape == (3, 5, PAGE, 1, 128) and pool.storage("index_scale").shape == (2, 5, 4, 1, 1)
    assert [(e.component, e.part, e.layer_id) for e in pool.manifest().entries] == [
        *(("latent", "target", layer) for layer in (0, 1, 2)),
        ("latent", "draft", 9),
        *(("rope", "target", layer) for layer in (0, 1, 2)),
        ("rope", "draft", 9),
        ("index_key", "target", 0),
        ("index_key", "target", 2),
        ("index_key", "draft", 9),
        ("index_scale", "target", 0),
        ("index_scale", "target", 2),
        ("index_scale", "draft", 9),
    ]
    for entry in pool.manifest().entries:
        view = pool.view(entry.component, entry.layer_id, entry.part)
        assert entry.address == view.data_ptr() and entry.item_bytes == view[0].nbytes
    with pytest.raises(UnknownLayer, match="does not own"):
        pool.view("index_key", 1)
    with pytest.raises(UnknownLayer):
        pool.view("key", 0)


def test_a_stage_holds_the_index_layers_that_fall_into_it() -> None:
    pool = MlaPool(sparse_layout(), size=8, device="cpu", layer_ids={"target": [1], "draft": [9]})
    held = {(e.component, e.part, e.layer_id) for e in pool.manifest().entries}
    assert held == {("latent", "target", 1), ("rope", "target", 1)} | {
        (component, "draft", 9) for component in ("latent", "rope", "index_key", "index_scale")
    }
    assert pool.layer_ids("target", "index_key") == ()


def test_every_tensor_parallel_rank_holds_the_latent() -> None:
    for rank in range(4):
        pool = MlaPool(sparse_layout(), size=8, device="cpu", placement=Placement(tp_rank=rank, tp_size=4))
        assert pool.head_range() == (0, 1) and pool.head_range("target", "index_key") == (0, 1)


@pytest.mark.parametrize("form", ["paged", "nz"])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_writes_go_where_the_formula_says(
    make_labels: Labels, as_bits: Callable[[torch.Tensor], torch.Tensor], form: Any, slot_dtype: torch.dtype
) -> None:
    layout = ModelLayout(
        [
            spec("latent", dims=128, dtype="bfloat16"),
            spec("rope", dtype="bfloat16"),
            spec("index_key", layer_ids=[0, 2], dtype="float8_e4m3fn"),
        ],
        page_size=PAGE,
        fingerprint="x",
    )
    pool = MlaPool(layout, size=20, device="cpu", form=form)
    assert pool.form == form and pool.writer == "index"
    expected = {}
    for seed, component in enumerate(("latent", "rope", "index_key")):
        storage = pool.storage(component)  # type: ignore[arg-type]
        storage.copy_(make_labels(storage.shape, storage.dtype, seed))
        expected[component] = as_bits(storage).clone()
    slots = [17, 4, 5, 19, 8, 11, 0]
    index = torch.tensor(slots, dtype=slot_dtype)
    rows = {
        "latent": make_labels([7, 1, 128], torch.bfloat16, 30),
        "rope": make_labels([7, 1, 64], torch.bfloat16, 31),
        "index_key": make_labels([7, 1, 64], torch.float8_e4m3fn, 32),
    }
    pool.write(2, index, rows["latent"], rows["rope"])
    pool.write_index(2, index, rows["index_key"])
    for component, row in rows.items():
        layer = expected[component][pool.layer_ids("target", component).index(2)].view(-1)  # type: ignore[arg-type]
        tile = 32 // row.element_size()
        width = row.shape[2]
        for token, slot in enumerate(slots):
            page, offset = divmod(slot, PAGE)
            for dim in range(width):
                place = (page * PAGE + offset) * width + dim
                if form == "nz":
                    place = ((page * (width // tile) + dim // tile) * PAGE + offset) * tile + dim % tile
                layer[place] = as_bits(row)[token, 0, dim]
        assert torch.equal(as_bits(pool.storage(component)), expected[component])  # type: ignore[arg-type]
    with pytest.raises(SlotOutOfRange):
        pool.write(2, torch.tensor([24]), rows["latent"][:1], rows["rope"][:1])
    with pytest.raises(WidthMismatch):
        pool.write(2, index, rows["rope"], rows["rope"])


def test_a_packed_record_is_one_component_of_bytes(make_labels: Labels) -> None:
    width = packed_record_bytes(512, 64)
    assert width == 512 + 4 * 4 + 64 * 2 == 656
    layout = ModelLayout([spec("latent", dims=width, dtype="uint8")], page_size=PAGE, fingerprint="x")
    pool = MlaPool(layout, size=8, device="cpu")
    assert [entry.item_bytes for entry in pool.manifest().entries] == [PAGE * width] * 3
    record = make_labels([2, 1, width], torch.int8, 3).view(torch.uint8)
    pool.write(1, torch.tensor([9, 4]), record)
    assert torch.equal(pool.latent(1)[2, 1], record[0]) and torch.equal(pool.latent(1)[1, 0], record[1])
    assert int((pool.storage("latent") != 0).sum()) == int((record != 0).sum())
    with pytest.raises(WidthMismatch, match="has no rope"):
        pool.write(1, torch.tensor([4]), record[:1], record[:1])
    for wrong in ((0, 64), (130, 64), (128, -1)):
        with pytest.raises(LayoutError):
            packed_record_bytes(*wrong)


def test_views_are_the_same_bytes_in_each_form() -> None:
    pool = MlaPool(sparse_layout(draft=False), size=8, device="cpu", zero=False)
    paged, flat, tiles = (pool.view("latent", 1, form=form) for form in ("paged", "flat", "nz"))
    assert (paged.shape, flat.shape, tiles.shape) == ((3, 4, 1, 128), (12, 1, 1, 128), (3, 8, 4, 16))
    assert paged.data_ptr() == flat.data_ptr() == tiles.data_ptr()
    assert pool.view("index_key", 0, form="nz").shape == (3, 2, 4, 32)
    with pytest.raises(UnknownForm, match="tile"):
        pool.view("index_scale", 0, form="nz")
    with pytest.raises(UnknownForm, match="flat"):
        MlaPool(sparse_layout(), size=8, device="cpu", form="flat")
    with pytest.raises(UnknownForm):
        MlaPool(sparse_layout(), size=8, device="cpu", form="nz")  # a scale is no whole tile


def test_peers_of_another_form_are_refused() -> None:
    layout = ModelLayout([spec("latent"), spec("rope")], page_size=PAGE, fingerprint="x")
    plain, tiled = (MlaPool(layout, size=8, device="cpu", form=form) for form in ("paged", "nz"))
    assert "target" in agree(tiled.manifest(), tiled.manifest()).parts
    with pytest.raises(Exception, match="fingerprint"):
        agree(plain.manifest(), tiled.manifest())


@pytest.mark.parametrize(
    ("specs", "error", "text"),
    [
        ([spec("latent"), spec("rope"), spec("key")], UnheldComponent, "key"),
        ([spec("latent")], LayoutError, "no rope"),
        ([spec("rope")], LayoutError, "no latent"),
        ([spec("latent"), spec("rope", layer_ids=[0])], LayoutError, "would have no rope"),
        ([spec("latent", dtype="uint8"), spec("rope")], LayoutError, "two ropes"),
        ([spec("latent"), spec("rope"), spec("index_scale")], LayoutError, "no index_key"),
        ([spec("latent"), spec("rope"), spec("index_key", layer_ids=[7])], LayoutError, "without a latent"),
        (
            [spec("latent"), spec("rope"), spec("index_key", layer_ids=[0, 1]), spec("index_scale", layer_ids=[0])],
            LayoutError,
            "would have no index_scale",
        ),
    ],
)
def test_layouts_with_a_hole_are_refused(specs: list[ComponentSpec], error: type[KvPoolError], text: str) -> None:
    with pytest.raises(error, match=text):
        MlaPool(ModelLayout(specs, page_size=PAGE, fingerprint="x"), size=8, device="cpu")
