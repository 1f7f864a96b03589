"""Owns the proof that every writer equals the plain loop on an NPU, eagerly and inside a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch_npu
from kv_planner import ModelLayout
from kv_pool import (
    AliasedRows,
    DeviceMismatch,
    DtypeMismatch,
    MhaPool,
    PageAllocator,
    WriterName,
    create_writer,
    slots_for,
)

NPU = "npu:0"
HALF_AND_INT8 = [torch.float16, torch.bfloat16, torch.int8]
WRITERS: list[WriterName] = ["index", "scatter_nd", "reshape_and_cache"]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [*HALF_AND_INT8, torch.float32])
@pytest.mark.parametrize("name", ["index", "scatter_nd"])
def test_row_writers_equal_the_loop(
    check_writer: Callable[..., None], name: WriterName, dtype: torch.dtype, slot_dtype: torch.dtype, strided: bool
) -> None:
    writer = create_writer(name, torch.device(NPU), num_slots=20)
    check_writer(writer, NPU, dtype, slot_dtype=slot_dtype, strided=strided)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", HALF_AND_INT8)
def test_the_fused_writer_equals_the_loop(check_writer: Callable[..., None], dtype: torch.dtype, strided: bool) -> None:
    writer = create_writer("reshape_and_cache", torch.device(NPU), num_slots=20)
    check_writer(writer, NPU, dtype, slot_dtype=torch.int32, strided=strided)


def test_a_pool_on_the_device(make_layout: Callable[..., ModelLayout]) -> None:
    pool = MhaPool(make_layout(), size=16, device=NPU)
    assert pool.writer == "scatter_nd" and str(pool.device) == NPU
    assert {entry.device for entry in pool.manifest().entries} == {NPU}
    assert [entry.address for entry in pool.manifest().entries] == [
        view.data_ptr() for view in (pool.key(0), pool.key(1), pool.value(0), pool.value(1))
    ]
    assert not pool.key_storage.any() and not pool.value_storage.any()


def _rows(start: int, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = len(slots)
    key = torch.arange(start, start + count * 16).reshape(count, 2, 8).half()
    value = -torch.arange(start, start + count * 12).reshape(count, 2, 6).half()
    return torch.tensor(slots, dtype=torch.int32), key, value


@pytest.mark.parametrize("name", WRITERS)
def test_a_captured_write_follows_its_buffers(make_layout: Callable[..., ModelLayout], name: WriterName) -> None:
    pool = MhaPool(make_layout(layers=(0, 1, 2)), size=24, device=NPU, writer=name)
    pages = PageAllocator(pool.num_pages, pool.page_size).alloc(4)[[2, 0, 3, 1]]
    slots, key, value = (tensor.to(NPU) for tensor in _rows(0, [0, 0, 0]))
    for _ in range(2):
        pool.write(1, slots, key, value)
    torch_npu.npu.synchronize()
    pool.key_storage.zero_()
    pool.value_storage.zero_()
    graph = torch_npu.npu.NPUGraph()
    with torch_npu.npu.graph(graph, auto_dispatch_capture=True):
        pool.write(1, slots, key, value)
    expected_key, expected_value = pool.key_storage.cpu(), pool.value_storage.cpu()
    assert not expected_key.any()
    for step in range(3):
        live = slots_for(pages, 2 * step, 2 * step + 2, pool.page_size).tolist()
        new = _rows(100 * step + 1, [*live, 0])
        for static, fresh in zip((slots, key, value), new, strict=True):
            static.copy_(fresh)
        graph.replay()
        torch_npu.npu.synchronize()
        for token, slot in enumerate([*live, 0]):
            expected_key[1, slot // 4, slot % 4] = new[1][token]
            expected_value[1, slot // 4, slot % 4] = new[2][token]
        assert torch.equal(pool.key_storage.cpu(), expected_key)
        assert torch.equal(pool.value_storage.cpu(), expected_value)


def test_refusals_on_the_device(make_layout: Callable[..., ModelLayout]) -> None:
    slots, key, value = (tensor.to(NPU) for tensor in _rows(0, [4, 5]))
    fused = MhaPool(make_layout(), size=16, device=NPU, writer="reshape_and_cache")
    with pytest.raises(DtypeMismatch, match="int32"):
        fused.write(0, slots.long(), key, value)
    with pytest.raises(DeviceMismatch, match="slots"):
        fused.write(0, slots.cpu(), key, value)
    with pytest.raises(DeviceMismatch, match="value"):
        fused.write(0, slots, key, value.cpu())
    wide = MhaPool(make_layout(dtype="float32"), size=16, device=NPU, writer="reshape_and_cache")
    with pytest.raises(DtypeMismatch, match="scatter_nd"):
        wide.write(0, slots, key.float(), value.float())
    assert not fused.key_storage.any() and not wide.key_storage.any()
    for name in WRITERS:
        pool = MhaPool(make_layout(), size=16, device=NPU, writer=name)
        pool.write(0, slots[:0], key[:0], value[:0])
        assert not pool.key_storage.any()


def test_the_index_writer_never_counts_from_the_end(make_layout: Callable[..., ModelLayout]) -> None:
    pool = MhaPool(make_layout(dtype="float16"), size=64, device="npu:0", writer="index")
    layer = pool.layer_ids("target")[0]
    before = pool.key(layer).cpu().clone()
    slots = torch.tensor([pool.page_size + 2, -1], device="npu:0")
    key = torch.full((2, *pool.key(layer).shape[2:]), 3.0, dtype=torch.float16, device="npu:0")
    value = torch.full((2, *pool.value(layer).shape[2:]), 3.0, dtype=torch.float16, device="npu:0")
    pool.write(layer, slots, key, value)
    after = pool.key(layer).cpu()
    changed = (after != before).flatten(2).any(2).nonzero().tolist()
    assert changed == [[0, 0], [1, 2]], "only the slot asked for, and the reserved one"


@pytest.mark.parametrize("argument", ["key", "value"])
@pytest.mark.parametrize("name", WRITERS)
def test_rows_of_the_layers_own_memory_are_refused(
    make_layout: Callable[..., ModelLayout], name: WriterName, argument: str
) -> None:
    pool = MhaPool(make_layout(), size=16, device=NPU, writer=name)
    slots, key, value = (tensor.to(NPU) for tensor in _rows(1, [5, 6]))
    own = {"key": pool.key(1).view(-1, 2, 8)[8:10], "value": pool.value(1).view(-1, 2, 6)[8:10]}[argument]
    rows = {"key": key, "value": value, argument: own}
    with pytest.raises(AliasedRows, match=argument):
        pool.write(1, slots, rows["key"], rows["value"])
    torch_npu.npu.synchronize()
    assert not pool.key_storage.any() and not pool.value_storage.any()
    pool.write(0, slots, rows["key"], rows["value"])  # another layer of the same storage
