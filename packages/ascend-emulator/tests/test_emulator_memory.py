"""Memory: accounting, exhaustion, pinned memory, poison, and whose memory an address is."""

from __future__ import annotations

import ctypes
import gc

import ascend_emulator as emulator
import pytest
import torch
import torch_npu

GIB = 1 << 30


def test_accounting_per_device() -> None:
    gc.collect()
    torch_npu.npu.empty_cache()
    before = torch_npu.npu.memory_allocated(1)
    free, total = torch_npu.npu.mem_get_info(1)
    assert total == 16 * GIB
    held = torch.empty(64 << 20, dtype=torch.uint8, device="npu:1")
    assert torch_npu.npu.memory_allocated(1) - before >= 64 << 20
    assert free - torch_npu.npu.mem_get_info(1)[0] >= 64 << 20
    del held
    torch_npu.npu.empty_cache()
    assert torch_npu.npu.memory_allocated(1) == before
    assert torch_npu.npu.mem_get_info(1)[0] == free


def test_exhaustion_is_torchs_own_error_and_the_device_stays_usable() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(17 * GIB, dtype=torch.uint8, device="npu")
    assert torch.ones(3, device="npu").sum().item() == 3


def test_pinned_memory() -> None:
    pinned = torch.ones(5).pin_memory()
    assert pinned.is_pinned()
    assert not torch.ones(5).is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    where = emulator.memory.describe(pinned.data_ptr())
    assert where is not None
    assert where.device == "pinned host"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str
)
def test_fresh_floating_point_memory_is_nan(dtype: torch.dtype) -> None:
    for tensor in (
        torch.empty(7, 3, dtype=dtype, device="npu"),
        torch.empty_strided((2, 2), (2, 1), dtype=dtype, device="npu"),
    ):
        assert bool(tensor.isnan().all())
        assert bool(emulator.poison.is_poisoned(tensor.cpu()).all())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fresh_float8_memory_is_nan(dtype: torch.dtype) -> None:
    assert bool(torch.empty(5, dtype=dtype, device="npu").float().isnan().all())


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8], ids=str)
def test_fresh_integers_are_far_out_of_range(dtype: torch.dtype) -> None:
    tensor = torch.empty(7, dtype=dtype, device="npu").cpu()
    assert bool(emulator.poison.is_poisoned(tensor).all())
    assert set(tensor.view(torch.uint8).tolist()) == {emulator.poison.POISON_BYTE_INTEGER}


def test_a_block_that_the_allocator_hands_out_again_is_poisoned_again() -> None:
    first = torch.full((1000,), 3.0, device="npu")
    address = first.data_ptr()
    del first
    second = torch.empty(1000, device="npu")
    assert second.data_ptr() == address
    assert bool(second.isnan().all())
    assert torch.zeros(1000, device="npu").sum().item() == 0


def test_memory_given_back_to_the_device_is_poisoned() -> None:
    torch_npu.npu.empty_cache()
    tensor = torch.ones(64 << 20, dtype=torch.uint8, device="npu")  # so large that it has a block of its own
    alias = torch.frombuffer((ctypes.c_uint8 * 16).from_address(tensor.data_ptr()), dtype=torch.uint8)
    assert set(alias.tolist()) == {1}
    del tensor
    torch_npu.npu.empty_cache()
    assert set(alias.tolist()) == {emulator.poison.POISON_BYTE}


def test_partial_poison_is_told_apart_from_a_computed_nan() -> None:
    tensor = torch.empty(4, device="npu")
    tensor[1] = float("nan")
    tensor[2] = 0
    assert emulator.poison.is_poisoned(tensor.cpu()).tolist() == [True, False, False, True]


def test_addresses_are_described() -> None:
    tensor = torch.zeros(100, device="npu:1")
    where = emulator.memory.describe(tensor.data_ptr() + 8)
    assert where is not None
    assert where.device == "npu:1"
    assert 0 <= where.offset < where.nbytes
    assert where.start + where.offset == tensor.data_ptr() + 8
    assert emulator.memory.describe(torch.zeros(3).data_ptr()) is None
    emulator.memory.label(tensor.data_ptr(), 400, "layer 3 keys")
    named = emulator.memory.describe(tensor.data_ptr() + 399)
    assert named is not None
    assert named.label == "layer 3 keys"
    assert "layer 3 keys" in str(named)
    emulator.memory.forget(tensor.data_ptr(), 400)
    assert "layer 3" not in str(emulator.memory.describe(tensor.data_ptr()))
