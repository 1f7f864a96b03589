"""scatter_nd_update and reshape_and_cache against plain loops."""

from __future__ import annotations

import itertools

import pytest
import torch
from ascend_emulator.kernels import REGISTRY
from hypothesis import assume, given, settings
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]


def labelled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


@settings(max_examples=80, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    strided=st.booleans(),
)
def test_scatter_writes_what_a_loop_writes(
    shape: list[int], data: st.DataObject, dtype: torch.dtype, index_dtype: torch.dtype, strided: bool
) -> None:
    width = data.draw(st.integers(1, len(shape)))
    assume(width > 1 or len(shape) < 4 or shape[1] > 1)  # scatter-4d
    places = list(itertools.product(*(range(size) for size in shape[:width])))
    chosen = data.draw(st.lists(st.sampled_from(places), unique=True, max_size=6))
    indices = torch.tensor(chosen, dtype=index_dtype).view(len(chosen), width)
    updates = labelled((len(chosen), *shape[width:]), dtype, 2)
    whole = labelled((*shape, 2), dtype, 1)
    target = whole[..., 0] if strided else whole[..., 0].contiguous()
    expected = target.clone()
    for number, place in enumerate(chosen):
        expected[place] = updates[number]
    before = target.clone()
    copy = REGISTRY["npu::npu_scatter_nd_update"](target, indices, updates)
    assert torch.equal(copy, expected) and torch.equal(target, before)
    beside = whole[..., 1].clone()
    assert REGISTRY["npu::npu_scatter_nd_update_"](target, indices, updates) is target
    assert torch.equal(target, expected) and torch.equal(whole[..., 1], beside)


def test_scatter_takes_indices_of_more_axes() -> None:
    target = torch.zeros(4, 5)
    indices = torch.tensor([[[0, 1], [2, 3]], [[3, 4], [1, 1]]])
    REGISTRY["npu::npu_scatter_nd_update_"](target, indices, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert [float(target[at]) for at in ((0, 1), (2, 3), (3, 4), (1, 1))] == [1, 2, 3, 4] and target.sum() == 10


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.int8]))
def test_cache_write_writes_what_a_loop_writes(data: st.DataObject, dtype: torch.dtype) -> None:
    blocks, size, heads = (data.draw(st.integers(1, 4)) for _ in range(3))
    dims = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    slots = data.draw(st.lists(st.integers(0, blocks * size - 1), unique=True, max_size=blocks * size))
    slots = [-1 - slot if data.draw(st.booleans()) else slot for slot in slots]
    storages = [labelled((2, blocks, size, heads, dim), dtype, seed) for seed, dim in enumerate(dims)]
    rows = [labelled((len(slots), heads, dim), dtype, seed + 7) for seed, dim in enumerate(dims)]
    expected = [storage.clone() for storage in storages]
    for storage, new in zip(expected, rows, strict=True):
        for token, slot in enumerate(slots):
            if slot >= 0:
                storage[1, slot // size, slot % size] = new[token]
    indices = torch.tensor(slots, dtype=torch.int32)
    assert REGISTRY["atb::_npu_reshape_and_cache"](*rows, storages[0][1], storages[1][1], indices) is None
    assert all(torch.equal(*pair) for pair in zip(storages, expected, strict=True))


@pytest.mark.parametrize("op", ["npu::npu_scatter_nd_update", "npu::npu_scatter_nd_update_"])
def test_scatter_of_nothing_changes_nothing(op: str) -> None:
    target = torch.ones(3, 2)
    out = REGISTRY[op](target, torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 2))
    assert torch.equal(out, torch.ones(3, 2))
