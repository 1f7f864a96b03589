"""Owns the proof of `MhaPool`: geometry, shared storage, manifest, parts, stages, heads, and what it refuses."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kv_pool
import pytest
import torch
from kv_planner import ComponentSpec, ModelLayout, Placement
from kv_pool import (
    HeadRangeError,
    KvPoolError,
    LayoutError,
    MhaPool,
    OutOfPages,
    PageAllocator,
    PoolSizeError,
    UnheldComponent,
    UnknownLayer,
    WidthMismatch,
    slots_for,
)

Layout = Callable[..., ModelLayout]


def test_geometry_and_shared_storage(make_layout: Layout) -> None:
    pool = MhaPool(make_layout(layers=(3, 7, 9)), size=16, device="cpu")
    assert pool.num_pages == 5 and pool.page_size == 4 and pool.writer == "index"
    assert pool.key_storage.shape == (3, 5, 4, 2, 8) and pool.value_storage.shape == (3, 5, 4, 2, 6)
    assert pool.key_storage.is_contiguous() and pool.value_storage.is_contiguous()
    for index, layer in enumerate((3, 7, 9)):
        for view, storage in ((pool.key(layer), pool.key_storage), (pool.value(layer), pool.value_storage)):
            assert view.data_ptr() == storage[index].data_ptr() and view.shape == storage.shape[1:]
            assert view.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
    assert pool.nbytes == pool.key_storage.nbytes + pool.value_storage.nbytes


def test_write_and_read_back_labelled_bytes(
    make_layout: Layout, make_labels: Callable[..., torch.Tensor], as_bits: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    pool = MhaPool(make_layout(layers=(4, 5), draft=(20,)), size=24, device="cpu")
    for seed, storage in enumerate([pool.key_storage, pool.value_storage, pool.storage("key", "draft")]):
        storage.copy_(make_labels(storage.shape, storage.dtype, 50 + seed))
    expected = [as_bits(pool.key_storage).clone(), as_bits(pool.value_storage).clone()]
    draft_before = as_bits(pool.storage("key", "draft")).clone()
    pages, tokens = [5, 2, 6], 10
    slots = slots_for(pages, 0, tokens, 4)
    for index, layer in enumerate((4, 5)):
        key = make_labels([tokens, 2, 8], torch.float16, layer)
        value = make_labels([tokens, 2, 6], torch.float16, layer + 10)
        pool.write(layer, torch.from_numpy(slots), key, value)
        for token in range(tokens):
            expected[0][index, pages[token // 4], token % 4] = as_bits(key)[token]
            expected[1][index, pages[token // 4], token % 4] = as_bits(value)[token]
    assert torch.equal(as_bits(pool.key_storage), expected[0])
    assert torch.equal(as_bits(pool.value_storage), expected[1])
    assert torch.equal(as_bits(pool.storage("key", "draft")), draft_before)


def test_draft_part_has_its_own_geometry(make_layout: Layout) -> None:
    pool = MhaPool(make_layout(draft=(20,)), size=8, device="cpu")
    assert pool.parts == ("target", "draft")
    assert pool.key(20, "draft").shape == (3, 4, 1, 4) and pool.value(20, "draft").shape == (3, 4, 1, 3)
    assert pool.key(20, "draft").dtype == torch.float32
    key, value = torch.ones(1, 1, 4), torch.full((1, 1, 3), 2.0)
    pool.write(20, torch.tensor([5]), key, value, "draft")
    assert torch.equal(pool.key(20, "draft")[1, 1], key[0]) and not pool.key(0).any()
    with pytest.raises(UnknownLayer):
        pool.key(1, "draft")


def test_pages_bytes_of_a_wide_model() -> None:
    layout = ModelLayout(
        [
            ComponentSpec("key", layer_ids=[0], dtype="bfloat16", total_heads=4, dims=192),
            ComponentSpec("value", layer_ids=[0], dtype="bfloat16", total_heads=4, dims=128),
        ],
        page_size=128,
        fingerprint="wide",
    )
    pool = MhaPool(layout, size=128, device="cpu")
    assert [entry.item_bytes for entry in pool.manifest().entries] == [196_608, 131_072]
    with pytest.raises(WidthMismatch):
        row = torch.zeros(1, 4, 192, dtype=torch.bfloat16)
        pool.write(0, torch.tensor([128]), row, row)


def test_manifest_names_every_buffer(make_layout: Layout) -> None:
    pool = MhaPool(
        make_layout(layers=(2, 3), draft=(20,)), size=8, device="cpu", layer_ids={"target": [3], "draft": [20]}
    )
    manifest = pool.manifest()
    assert [(e.component, e.part, e.layer_id) for e in manifest.entries] == [
        ("key", "target", 3),
        ("key", "draft", 20),
        ("value", "target", 3),
        ("value", "draft", 20),
    ]
    for entry in manifest.entries:
        view = (pool.key if entry.component == "key" else pool.value)(entry.layer_id, entry.part)
        assert entry.address == view.data_ptr() and entry.nbytes == view.nbytes and entry.device == "cpu"
        assert entry.item_stride == entry.item_bytes == view[0].nbytes
        assert entry.nbytes == pool.num_pages * entry.item_bytes
        for page in range(pool.num_pages):
            assert entry.address + page * entry.item_stride == view[page].data_ptr()


@pytest.mark.parametrize(
    ("heads", "size", "ranges"),
    [
        (4, 2, [(0, 2), (2, 4)]),
        (3, 3, [(0, 1), (1, 2), (2, 3)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 2, [(0, 1), (0, 1)]),
    ],
)
def test_heads_of_tensor_parallel_ranks(
    make_layout: Layout, heads: int, size: int, ranges: list[tuple[int, int]]
) -> None:
    for rank, expected in enumerate(ranges):
        placement = Placement(tp_rank=rank, tp_size=size)
        pool = MhaPool(make_layout(heads=heads), size=4, device="cpu", placement=placement)
        assert pool.head_range() == expected and pool.key(0).shape[2] == expected[1] - expected[0]
        assert {entry.head_range for entry in pool.manifest().entries} == {expected}


def test_heads_that_do_not_divide_and_explicit_ranges(make_layout: Layout) -> None:
    placement = Placement(tp_rank=0, tp_size=2)
    with pytest.raises(HeadRangeError, match="3 KV heads"):
        MhaPool(make_layout(heads=3), size=4, device="cpu", placement=placement)
    pool = MhaPool(make_layout(heads=3), size=4, device="cpu", placement=placement, head_range=(0, 2))
    assert pool.key(0).shape[2] == 2
    for bad in ((0, 4), (1, 1), (-1, 2)):
        with pytest.raises(HeadRangeError):
            MhaPool(make_layout(heads=3), size=4, device="cpu", head_range=bad)
    with pytest.raises(HeadRangeError, match="both parts"):
        MhaPool(make_layout(heads=3, draft=(20,)), size=4, device="cpu", head_range=(0, 1))


def test_a_component_without_storage_is_refused() -> None:
    def layout(*specs: ComponentSpec) -> ModelLayout:
        return ModelLayout(specs, page_size=4, fingerprint="x")

    def spec(component: Any, **changes: Any) -> ComponentSpec:
        return ComponentSpec(
            component, **{"layer_ids": [0], "dtype": "float16", "total_heads": 1, "dims": 4, **changes}
        )

    with pytest.raises(UnheldComponent, match="index_key"):
        MhaPool(layout(spec("key"), spec("value"), spec("index_key")), size=4, device="cpu")
    with pytest.raises(LayoutError, match="no value"):
        MhaPool(layout(spec("key")), size=4, device="cpu")
    with pytest.raises(LayoutError, match="heads"):
        MhaPool(layout(spec("key"), spec("value", layer_ids=[1])), size=4, device="cpu")
    with pytest.raises(LayoutError, match="swapped"):
        MhaPool(layout(spec("key", axes=("head", "token", "dim")), spec("value")), size=4, device="cpu")
    with pytest.raises(LayoutError, match="cannot store"):
        MhaPool(layout(spec("key", dtype="int64"), spec("value")), size=4, device="cpu")


def test_layers_of_a_stage(make_layout: Layout) -> None:
    pool = MhaPool(make_layout(layers=range(6)), size=4, device="cpu", layer_ids=[3, 4])
    assert pool.layer_ids() == (3, 4)
    with pytest.raises(UnknownLayer, match="another stage") as caught:
        pool.key(2)
    assert isinstance(caught.value, LookupError)
    with pytest.raises(UnknownLayer):
        pool.value(3, "draft")
    for bad in ([3, 3], [6], []):
        with pytest.raises(LayoutError):
            MhaPool(make_layout(layers=range(6)), size=4, device="cpu", layer_ids=bad)


def test_a_draft_part_is_never_left_out_silently(make_layout: Layout) -> None:
    layout = make_layout(layers=range(4), draft=(20,))
    with pytest.raises(UnheldComponent, match="draft"):
        MhaPool(layout, size=4, device="cpu", layer_ids=[0, 1])
    pool = MhaPool(layout, size=4, device="cpu", layer_ids={"target": [0, 1], "draft": []})
    assert {entry.part for entry in pool.manifest().entries} == {"target"}
    with pytest.raises(UnheldComponent):
        MhaPool(make_layout(), size=4, device="cpu", layer_ids={"target": [0], "draft": [0]})


@pytest.mark.parametrize("size", [0, -4, 3, 6])
def test_sizes_are_whole_pages(make_layout: Layout, size: int) -> None:
    with pytest.raises(PoolSizeError):
        MhaPool(make_layout(), size=size, device="cpu")


def test_allocation_happens_inside_the_region(make_layout: Layout) -> None:
    events: list[str] = []

    @contextmanager
    def region() -> Iterator[None]:
        events.append("enter")
        yield
        events.append("exit")

    pool = MhaPool(make_layout(), size=4, device="cpu", region=region)
    assert events == ["enter", "exit"] and not pool.key_storage.any()


def test_allocator_and_pool_agree_on_pages(make_layout: Layout) -> None:
    pool = MhaPool(make_layout(), size=12, device="cpu")
    pages = PageAllocator(pool.num_pages, pool.page_size).alloc(3)
    slots = torch.from_numpy(slots_for(pages, 0, 12, pool.page_size))
    pool.write(0, slots, torch.ones(12, 2, 8, dtype=torch.float16), torch.ones(12, 2, 6, dtype=torch.float16))
    assert not pool.key(0)[0].any() and pool.key(0)[1:].all()


def test_errors_survive_a_process_boundary() -> None:
    error = OutOfPages("count", given=3, expected="at most 2", consequence="none was taken", remedy="wait")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is OutOfPages and str(copy) == str(error) and isinstance(copy, KvPoolError)


def test_public_names_exist() -> None:
    assert all(hasattr(kv_pool, name) for name in kv_pool.__all__)


def test_an_id_that_is_owned_twice_is_refused(make_layout: Callable[..., ModelLayout]) -> None:
    with pytest.raises(LayoutError, match="distinct"):
        MhaPool(make_layout(layers=(0, 0, 1)), size=16, device="cpu")
