"""Copies in all directions against the same copy on the CPU, and the moment when non-blocking copies take effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ascend_emulator as emulator
import pytest
import torch
import torch_npu

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool]
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1),
    "strided": lambda t: t[::2, 1:],
    "offset": lambda t: t[3:, :2],
    "expanded": lambda t: t[:1].expand(6, 6),
    "permuted": lambda t: t.view(2, 3, 6).permute(2, 0, 1).reshape(6, 6).t(),
}


def values(dtype: torch.dtype) -> torch.Tensor:
    """Shape: [6, 6]; every element its own value as far as the dtype can tell."""
    return (torch.arange(36).view(6, 6) % 2 == 0) if dtype is torch.bool else torch.arange(36).view(6, 6).to(dtype)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back(view: str, dtype: torch.dtype) -> None:
    source = values(dtype)
    expected = VIEWS[view](source)
    assert torch.equal(VIEWS[view](source.to("npu")).cpu(), expected)
    assert torch.equal(expected.to("npu").cpu(), expected)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(
    "devices", [("npu:0", "npu:0"), ("npu:0", "npu:1"), ("cpu", "npu:0"), ("npu:0", "cpu")], ids=str
)
@pytest.mark.parametrize(
    "cast", [(torch.float32, torch.float16), (torch.int64, torch.int32), (torch.bfloat16, torch.float32)], ids=str
)
def test_copy_casts_between_views(view: str, devices: tuple[str, str], cast: tuple[torch.dtype, torch.dtype]) -> None:
    source, target = VIEWS[view](values(cast[0]).to(devices[0])), torch.full((6, 8), 99, dtype=cast[1]).to(devices[1])
    rows, columns = source.shape
    target[:rows, 1 : 1 + columns].copy_(source)
    expected = torch.full((6, 8), 99, dtype=cast[1])
    expected[:rows, 1 : 1 + columns] = VIEWS[view](values(cast[0]))
    assert torch.equal(target.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_casts_on_the_device(dtype: torch.dtype) -> None:
    source = torch.linspace(-3, 3, 12)
    assert torch.equal(source.to("npu").to(dtype).to(torch.float32).cpu(), source.to(dtype).float())


def test_copy_broadcasts() -> None:
    target = torch.zeros(3, 4, device="npu")
    target.copy_(torch.arange(4.0).to("npu"))
    assert torch.equal(target.cpu(), torch.arange(4.0).expand(3, 4))
    target.copy_(torch.tensor([[1.0], [2.0], [3.0]]))
    assert torch.equal(target.cpu(), torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 4))
    target[1] = 7
    assert target.cpu()[1].tolist() == [7, 7, 7, 7]


def test_copy_refuses_shapes_that_do_not_broadcast() -> None:
    with pytest.raises(RuntimeError, match="size"):
        torch.zeros(3, device="npu").copy_(torch.zeros(4))


def test_out_argument_is_resized_and_aliases_stay_apart() -> None:
    first = torch.arange(4.0).to("npu")
    out = torch.empty(0, device="npu")
    assert torch.add(first, 1, out=out) is out
    assert out.cpu().tolist() == [1, 2, 3, 4]
    small = torch.zeros(2, device="npu")
    with pytest.warns(UserWarning, match="resized"):
        torch.cat([first, first], out=small)
    assert small.cpu().tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_storage_resize_keeps_what_was_there() -> None:
    tensor = torch.arange(4.0).to("npu")
    tensor.resize_(8)
    assert tensor.cpu()[:4].tolist() == [0, 1, 2, 3]
    assert bool(tensor.cpu()[4:].isnan().all())
    tensor.resize_(2)
    assert tensor.cpu().tolist() == [0, 1]


def test_two_devices_have_their_own_memory() -> None:
    first = torch.arange(4.0, device="npu:0")
    second = first.to("npu:1")
    second += 1
    assert second.device == torch.device("npu:1")
    assert first.cpu().tolist() == [0, 1, 2, 3]
    assert (second * 2).device == torch.device("npu:1")
    with pytest.raises(RuntimeError, match="at least two devices, npu:0 and npu:1"):
        first + second
    with pytest.raises(RuntimeError, match="at least two devices, npu:0 and cpu"):
        first + torch.ones(4)
    assert (first + torch.tensor(2.0)).cpu().tolist() == [2, 3, 4, 5]


# --- non-blocking ---


def pinned(*data: float) -> torch.Tensor:
    return torch.tensor(data, dtype=torch.float32).pin_memory()


def test_device_to_pinned_host_arrives_at_the_wait_and_is_poison_before() -> None:
    device, host = torch.tensor([1.0, 2.0]).to("npu"), pinned(8, 9)
    host.copy_(device, non_blocking=True)
    assert bool(emulator.poison.is_poisoned(host).all())
    device.fill_(5)  # behind the copy in the stream: the copy took its bytes before
    event = torch_npu.npu.Event()
    event.record()
    assert bool(host.isnan().all())
    event.synchronize()
    assert host.tolist() == [1, 2]


@pytest.mark.parametrize("part", [slice(0, 4), slice(2, 4)])
def test_copies_into_the_same_host_memory_end_with_the_last_one(part: slice) -> None:
    first, second = torch.arange(4.0, device="npu"), torch.full((4,), 7.0, device="npu")
    host = torch.zeros(4).pin_memory()
    host.copy_(first, non_blocking=True)
    between = torch_npu.npu.Event()
    between.record()
    host[part].copy_(second[part], non_blocking=True)
    between.synchronize()
    assert host[part].isnan().all() and host[: part.start].tolist() == [0.0, 1.0][: part.start]
    torch_npu.npu.synchronize()
    assert host[part].tolist() == [7.0] * (part.stop - part.start)


def test_a_wait_that_does_not_cover_the_copy_does_not_deliver_it() -> None:
    device, host = torch.tensor([1.0, 2.0]).to("npu"), pinned(8, 9)
    before = torch_npu.npu.Event()
    before.record()
    host.copy_(device, non_blocking=True)
    side = torch_npu.npu.Stream()
    before.synchronize()
    side.synchronize()
    assert bool(host.isnan().all())
    side.wait_stream(torch_npu.npu.current_stream())
    side.synchronize()
    assert host.tolist() == [1, 2]


def test_non_blocking_copy_from_pageable_or_to_pageable_memory_is_blocking() -> None:
    device, host = torch.empty(2, device="npu"), torch.tensor([1.0, 2.0])
    device.copy_(host, non_blocking=True)
    host.fill_(0)
    assert device.cpu().tolist() == [1, 2]
    host.copy_(device, non_blocking=True)
    assert host.tolist() == [1, 2]


def test_to_cpu_non_blocking_gives_pinned_poison_until_the_wait() -> None:
    host = torch.tensor([3.0]).to("npu").to("cpu", non_blocking=True)
    assert host.isnan().item()
    torch_npu.npu.synchronize()
    assert host.item() == 3


def test_pinned_host_to_device_is_there_for_the_next_operator() -> None:
    host, device = pinned(1, 2), torch.zeros(2, device="npu")
    device.copy_(host, non_blocking=True)
    assert (device + 1).cpu().tolist() == [2, 3]


def test_rewriting_the_pinned_source_before_the_wait_is_an_error() -> None:
    host, device = pinned(1, 2), torch.zeros(2, device="npu")
    device.copy_(host, non_blocking=True)
    sum_of_it = device.sum()  # the stream has read it, but the host cannot know
    host[0] = 5
    with pytest.raises(emulator.HostRaceError, match=r"host to device copy of \(2,\) torch.float32"):
        torch_npu.npu.synchronize()
    assert sum_of_it.item() == 3


def test_rewriting_the_pinned_source_after_the_wait_is_fine() -> None:
    host, device = pinned(1, 2), torch.zeros(2, device="npu")
    for step in range(3):
        host.fill_(step)
        device.copy_(host, non_blocking=True)
        event = torch_npu.npu.Event()
        event.record()
        event.synchronize()
    host.fill_(9)
    assert device.cpu().tolist() == [2, 2]


def test_the_destination_is_poisoned_for_streams_that_do_not_wait() -> None:
    host, device = pinned(1, 2), torch.zeros(2, device="npu")
    torch_npu.npu.synchronize()
    with emulator.order.unchecked():  # it is a race
        with torch_npu.npu.stream(torch_npu.npu.Stream()):
            device.copy_(host, non_blocking=True)
        stale = device.cpu()  # the default stream did not wait for the copy's stream
        assert bool(stale.isnan().all())
        torch_npu.npu.synchronize()
    assert device.cpu().tolist() == [1, 2]


def test_non_blocking_copies_behind_a_blocked_replay_keep_the_order(attention: Any) -> None:
    host, landed = pinned(1, 2), pinned(0, 0)
    device = torch.zeros(2, device="npu")
    attention.graph.replay()
    device.copy_(host, non_blocking=True)
    landed.copy_(device * 2, non_blocking=True)
    attention.update(4)
    torch_npu.npu.synchronize()
    assert landed.tolist() == [2, 4]
    attention.check(4)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype is not torch.bool], ids=str)
@pytest.mark.parametrize("view", ["whole", "transposed", "strided", "offset"])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_captured_copy_to_the_host_shows_poison_until_a_replay_was_waited_for(
    dtype: torch.dtype, view: str, fresh: bool
) -> None:
    device = values(dtype).to("npu") + 1
    memory = torch.zeros(6, 6, dtype=dtype).pin_memory()
    host = VIEWS[view](memory)
    graph = torch_npu.npu.NPUGraph()
    with torch_npu.npu.graph(graph):
        source = VIEWS[view](device)
        if fresh:
            host = source.to("cpu", non_blocking=True)
        else:
            host.copy_(source, non_blocking=True)
    assert bool(emulator.poison.is_poisoned(host.contiguous()).all())
    if not fresh:  # what lies beside a view is left alone
        beside = torch.ones(6, 6, dtype=torch.bool)
        VIEWS[view](beside).fill_(False)
        assert not memory[beside].any()
    for step in range(2):
        device.copy_(values(dtype) + step)
        graph.replay()
        assert bool(emulator.poison.is_poisoned(host.contiguous()).all())
        torch_npu.npu.synchronize()
        assert torch.equal(host, VIEWS[view](values(dtype) + step))
