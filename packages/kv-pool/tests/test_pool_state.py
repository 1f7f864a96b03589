"""Owns the proof that states of requests are kept row by row, each kind in its own shape and dtype (on a CPU)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kv_planner import ComponentSpec, ModelLayout, Placement
from kv_pool import (
    DeviceMismatch,
    DtypeMismatch,
    HeadRangeError,
    LayoutError,
    PoolSizeError,
    RowMismatch,
    SlotOutOfRange,
    StatePool,
    UnheldComponent,
    UnknownLayer,
    WidthMismatch,
)
from kv_pool.hicache import HostPool, create_mover

Labels = Callable[..., torch.Tensor]


def layout(
    dims: int, dtype: str, *, heads: int = 4, layers: Any = (1, 3), draft: Any = (8,), **changes: Any
) -> ModelLayout:
    shared: Any = {"dtype": dtype, "total_heads": heads, "dims": dims, "item_kind": "request_row", **changes}
    specs = [ComponentSpec("state", layer_ids=layers, **shared)]
    specs += [ComponentSpec("state", "draft", layer_ids=draft, **shared)] if draft else []
    return ModelLayout(specs, page_size=16, fingerprint="states")


def make(**options: Any) -> StatePool:
    layouts = {"conv": layout(6, "bfloat16"), "recurrent": layout(8, "float32")}
    shapes = {"recurrent": (2, 4)}
    return StatePool(**{"layouts": layouts, "requests": 5, "device": "cpu", "shapes": shapes, **options})


def test_kinds_have_shapes_and_dtypes_of_their_own() -> None:
    pool = make(placement=Placement(tp_rank=1, tp_size=2))
    assert pool.kinds == ("conv", "recurrent") and pool.rows == 6
    assert pool.state("conv", 3).shape == (6, 2, 6) and pool.state("conv", 3).dtype == torch.bfloat16
    assert pool.state("recurrent", 8, "draft").shape == (6, 2, 2, 4)
    assert pool.nbytes == 3 * 6 * 2 * (6 * 2 + 8 * 4)
    for kind in pool.kinds:
        held = pool.kind(kind)
        assert (held.page_size, held.num_pages) == (1, 6)
        entries = held.manifest().entries
        assert [(entry.part, entry.layer_id) for entry in entries] == [("target", 1), ("target", 3), ("draft", 8)]
        for entry in entries:
            state = pool.state(kind, entry.layer_id, entry.part)
            assert entry.address == state.data_ptr() and entry.item_bytes == state[0].nbytes
            assert entry.head_range == (2, 4) and entry.items == 6


def test_writes_touch_the_named_rows_only(make_labels: Labels, as_bits: Callable[[torch.Tensor], torch.Tensor]) -> None:
    pool = make()
    before = {}
    for seed, kind in enumerate(pool.kinds):
        for part in ("target", "draft"):
            storage = pool.kind(kind).storage("state", part)
            storage.copy_(make_labels(storage.shape, storage.dtype, seed))
            before[kind, part] = as_bits(storage).clone()
    rows = torch.tensor([4, 1, 0], dtype=torch.int32)
    conv, recurrent = make_labels([3, 4, 6], torch.bfloat16, 9), make_labels([3, 4, 2, 4], torch.float32, 10)
    pool.write("conv", 3, rows, conv)
    pool.write("recurrent", 8, rows, recurrent, "draft")
    for row, (number, state) in enumerate(zip(rows.tolist(), as_bits(recurrent), strict=True)):
        before["conv", "target"][1, number, 0] = as_bits(conv)[row]
        before["recurrent", "draft"][0, number, 0] = state.reshape(4, 8)
    for (kind, part), expected in before.items():
        assert torch.equal(as_bits(pool.kind(kind).storage("state", part)), expected)  # type: ignore[arg-type]
    pool.clear(torch.tensor([4]))
    for (kind, part), expected in before.items():
        expected[:, 4] = 0
        assert torch.equal(as_bits(pool.kind(kind).storage("state", part)), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "uint8"])
def test_copies_read_all_rows_before_they_write_one(
    make_labels: Labels, as_bits: Callable[[torch.Tensor], torch.Tensor], dtype: str, index: torch.dtype
) -> None:
    """Rows that change places, one row for two, a padded one: every kind, part and layer, and no other row."""
    pool = make(layouts={"conv": layout(6, dtype), "recurrent": layout(8, "float32")})
    sources, targets = [2, 1, 4, 4, 3], [1, 2, 3, 5, 0]
    before = {}
    for seed, kind in enumerate(pool.kinds):
        for part in ("target", "draft"):
            storage = pool.kind(kind).storage("state", part)
            storage.copy_(make_labels(storage.shape, storage.dtype, seed))
            before[kind, part] = as_bits(storage).clone()
    given = [torch.tensor(rows, dtype=index) for rows in (sources, targets)]
    pool.copy(*given)
    assert [rows.tolist() for rows in given] == [sources, targets]
    for (kind, part), held in before.items():
        expected = held.clone()
        for source, target in zip(sources, targets, strict=True):
            expected[:, target] = held[:, source]
        assert torch.equal(as_bits(pool.kind(kind).storage("state", part)), expected)  # type: ignore[arg-type]
    pool.copy(*(torch.empty(0, dtype=index) for _ in range(2)))


def test_copies_that_do_not_fit_write_nothing(
    make_labels: Labels, as_bits: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    pool = make()
    storage = pool.kind("conv").storage("state")
    storage.copy_(make_labels(storage.shape, storage.dtype, 3))
    before = as_bits(storage).clone()
    one, two = torch.tensor([1]), torch.tensor([2])
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        (torch.tensor([6]), two, SlotOutOfRange, "sources"),
        (torch.tensor([-1]), two, SlotOutOfRange, "sources"),
        (one, torch.tensor([6]), SlotOutOfRange, "targets"),
        (one.float(), two, DtypeMismatch, "sources"),
        (one, two.to(torch.int16), DtypeMismatch, "targets"),
        (one[None], two, RowMismatch, "sources"),
        (one, two.to("meta"), DeviceMismatch, "targets"),
        (one, torch.tensor([2, 3]), RowMismatch, "targets"),
    ]
    for sources, targets, error, name in wrong:
        with pytest.raises(error, match=name):
            pool.copy(sources, targets)
    assert torch.equal(as_bits(storage), before)


def test_states_travel_to_the_host_and_back(
    make_labels: Labels, as_bits: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    pool = make()
    for seed, name in enumerate(pool.kinds):
        kind = pool.kind(name)
        storage = kind.storage("state")
        storage.copy_(make_labels(storage.shape, storage.dtype, seed))
        host = HostPool(kind, pages=3)
        mover = create_mover("auto", host)
        expected = as_bits(storage).clone()
        mover.backup([5, 2], [1, 3])
        storage.zero_()
        mover.load([3, 4], [3, 1])
        assert torch.equal(as_bits(storage[:, [3, 4]]), expected[:, [2, 5]])
        assert not storage[:, [0, 1, 2, 5]].any()


def test_what_does_not_fit_is_refused() -> None:
    pool = make()
    with pytest.raises(SlotOutOfRange):
        pool.write("conv", 1, torch.tensor([6]), torch.zeros(1, 4, 6, dtype=torch.bfloat16))
    with pytest.raises(WidthMismatch):
        pool.write("recurrent", 1, torch.tensor([1]), torch.zeros(1, 4, 4, 2))
    with pytest.raises(UnknownLayer, match="conv"):
        pool.kind("ssm")
    with pytest.raises(UnknownLayer):
        pool.state("conv", 8)
    with pytest.raises(PoolSizeError):
        make(requests=0)
    with pytest.raises(LayoutError, match="8 elements"):
        make(shapes={"recurrent": (3, 3)})
    for layouts, shapes in (({}, {}), ({"conv": layout(6, "float32")}, {"other": (6,)})):
        with pytest.raises(LayoutError):
            StatePool(layouts, requests=1, device="cpu", shapes=shapes)
    with pytest.raises(LayoutError, match="request_row"):
        StatePool({"conv": layout(6, "float32", item_kind="page")}, requests=1, device="cpu")
    with pytest.raises(UnheldComponent, match="draft"):
        make(layer_ids=[1])
    with pytest.raises(HeadRangeError):
        make(placement=Placement(tp_size=3))


def test_no_two_dtypes_share_an_allocation_g35() -> None:
    """G35: a float32 state and a 16-bit one, target and draft: four allocations, none inside another."""
    pool = make()
    spans = []
    for kind in pool.kinds:
        for component, part in pool.kind(kind).components:
            held = pool.kind(kind).storage(component, part).untyped_storage()
            spans.append((held.data_ptr(), held.data_ptr() + held.nbytes()))
    spans.sort()
    assert len(spans) == 4 and all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
