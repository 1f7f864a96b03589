"""vLLM-Ascend's moves of cache blocks against plain loops, their schemas, refusals and faults, and when bytes move."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import ascend_emulator
import pytest
import torch
import torch_npu
from ascend_emulator.kernels import REGISTRY, RULES, DeviceFault, OpRefused, vllm_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

PLAN, STORE, TRANSPOSE, SWAP, BATCH = vllm_blocks.KERNELS
H, B = torch.float16, torch.bfloat16


def draw(*shape: int, dtype: torch.dtype = H, seed: int = 0) -> torch.Tensor:
    return torch.randint(-99, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def i32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_the_schemas_are_those_of_the_library() -> None:
    for text in vllm_blocks.SCHEMAS:
        registered = getattr(torch.ops._C_ascend, text.partition("(")[0]).default._schema
        assert registered == torch._C.parse_schema(f"_C_ascend::{text}")


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.sampled_from([1, 4]), dtype=st.sampled_from([torch.int8, H, B]), spare=st.integers(0, 2))
def test_a_plan_and_its_copies_are_what_a_loop_writes(
    data: st.DataObject, size: int, dtype: torch.dtype, spare: int
) -> None:
    blocks = 5
    starts = data.draw(st.permutations(range(blocks * size)))
    slots: list[int] = []
    for start in starts[: data.draw(st.integers(1, 4))]:
        run = [start + i for i in range(data.draw(st.integers(1, 6))) if start + i < blocks * size]
        slots += [slot for slot in run if slot not in slots] or [-1]
    key, cache = draw(len(slots), 2, 3, dtype=dtype), draw(blocks, size, 2, 3, dtype=dtype, seed=1)
    wanted = cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            wanted[slot // size, slot % size] = key[token]
    plan = [torch.full((len(slots) + spare,), 77, dtype=torch.int32) for _ in range(3)]
    REGISTRY[PLAN](i32(*slots), *plan, size)
    groups = [group for group in zip(*(part.tolist() for part in plan), strict=True) if group[0]]
    named = [(token + i, slot + i) for count, token, slot in groups for i in range(count)]
    assert named == [(token, slot) for token, slot in enumerate(slots) if slot >= 0]
    assert all(slot // size == (slot + count - 1) // size for count, _, slot in groups)
    joined = [a[0] + a[1] == b[1] and a[2] + a[0] == b[2] and b[2] % size for a, b in pairwise(groups)]
    assert not any(joined), "two groups that are one"
    REGISTRY[STORE](key, cache, *plan, size)
    assert torch.equal(cache, wanted)


@pytest.mark.parametrize(("heads", "split"), [(4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("dtype", [H, B])
def test_blocks_turned(heads: int, split: int, dtype: torch.dtype) -> None:
    size, dim = 3, 16
    caches = [[draw(4, size, heads, dim, dtype=dtype, seed=i + 9 * v) for i in range(2)] for v in range(2)]
    before = [[cache.clone() for cache in group] for group in caches]
    REGISTRY[TRANSPOSE](*caches, torch.tensor([3, 0]), size, heads, dim, split, 2)
    each = heads // split
    for group, old in zip(caches, before, strict=True):
        for cache, was in zip(group, old, strict=True):
            for block in range(4):
                flat = was[block].flatten().tolist()
                for token in range(size):
                    for head in range(heads):
                        at = (head // each * size + token) * each * dim + head % each * dim
                        want = flat[at : at + dim] if block in (3, 0) else was[block, token, head].tolist()
                        assert cache[block, token, head].tolist() == want


def test_blocks_and_bytes_between_host_tensors() -> None:
    x, y = draw(4, 2, 3), draw(5, 2, 3, seed=1)
    wanted = y.clone()
    wanted[4], wanted[0] = x[1], x[3]
    REGISTRY[SWAP](x, y, torch.tensor([[1, 4], [3, 0]]))
    assert torch.equal(y, wanted)
    again = torch.zeros_like(x)
    size = x[0].numel() * 2
    addresses = [torch.tensor([t.data_ptr() + i * size for i in range(4)]) for t in (x, again)]
    REGISTRY[BATCH](*addresses, torch.full((4,), size), 0)
    assert torch.equal(again, x)


def plan(**over: Any) -> tuple[str, list[Any]]:
    options: dict[str, Any] = {"slots": i32(1, 2), "count": i32(0, 0), "token": i32(0, 0), "slot": i32(0, 0), "size": 4}
    return PLAN, list((options | over).values())


def store(**over: Any) -> tuple[str, list[Any]]:
    options: dict[str, Any] = {
        "key": draw(2, 1, 8), "cache": draw(2, 4, 1, 8), "count": i32(2, 0), "token": i32(0, 0), "slot": i32(5, 0),
        "size": 4,
    }  # fmt: skip
    return STORE, list((options | over).values())


def turn(**over: Any) -> tuple[str, list[Any]]:
    options: dict[str, Any] = {
        "k": [draw(2, 3, 2, 16)], "v": [draw(2, 3, 2, 16)], "ids": torch.tensor([1]), "size": 3, "heads": 2, "dim": 16,
        "split": 2, "layers": 1,
    }  # fmt: skip
    return TRANSPOSE, list((options | over).values())


def swap(**over: Any) -> tuple[str, list[Any]]:
    options: dict[str, Any] = {"x": draw(2, 3), "y": draw(3, 3), "z": torch.tensor([[0, 2]])}
    return SWAP, list((options | over).values())


def batch(**over: Any) -> tuple[str, list[Any]]:
    options: dict[str, Any] = {name: torch.zeros(1, dtype=torch.int64) for name in "xyz"} | {"direction": 0}
    return BATCH, list((options | over).values())


REFUSED: list[tuple[str, tuple[str, list[Any]]]] = [
    ("store-numbers", plan(slots=torch.tensor([1, 2]))),
    ("store-numbers", plan(count=i32(0))),
    ("store-numbers", plan(slots=i32())),
    ("store-numbers", store(token=i32(0))),
    ("store-block-size", plan(size=0)),
    ("store-rank", store(key=draw(2))),
    ("store-rank", store(cache=draw(2, 4, 8, 1).transpose(2, 3)[:, ::2])),
    ("store-dtype", store(cache=draw(2, 4, 1, 8, dtype=B))),
    ("store-dtype", store(key=draw(2, 1, 8).float(), cache=draw(2, 4, 1, 8).float())),
    ("store-room", store(size=180 * 128 + 1)),
    ("turn-dtype", turn(ids=i32(1))),
    ("turn-dtype", turn(v=[draw(2, 3, 2, 16).float()])),
    ("turn-dim", turn(dim=8)),
    ("turn-shape", turn(v=[draw(2, 3, 2, 32)])),
    ("turn-shape", turn(split=3)),
    ("turn-shape", turn(layers=2)),
    ("swap-mapping", swap(z=i32(0, 2).view(1, 2))),
    ("swap-mapping", swap(z=torch.tensor([0, 2]))),
    ("swap-shape", swap(y=draw(3, 4))),
    ("swap-shape", swap(y=draw(3, 3, dtype=B))),
    ("swap-pointers", batch(z=torch.zeros(2, dtype=torch.int64))),
    ("swap-pointers", batch(x=i32(0))),
    ("swap-direction", batch(direction=3)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "call"), REFUSED)
def test_it_refuses(refuses: Callable[..., None], rule: str, call: tuple[str, list[Any]]) -> None:
    refuses(rule, call[0], *call[1])


def test_a_swap_needs_a_device() -> None:
    with pytest.raises(OpRefused) as caught:
        torch.ops._C_ascend.swap_blocks(draw(2, 3).to("npu:0"), draw(2, 3).to("npu:1"), torch.tensor([[0, 1]]))
    assert caught.value.rule is RULES["swap-device"]


def test_every_rule_has_a_call_that_breaks_it() -> None:
    broken = {rule for rule, _ in REFUSED} | {"swap-device"}
    assert broken == {rule.id for rule in RULES.values() if rule.test == Path(__file__).name}


@pytest.mark.parametrize(
    "call",
    [
        store(slot=i32(7, 0)),
        store(count=i32(5, 0)),
        store(token=i32(1, 0)),
        turn(ids=torch.tensor([2])),
        swap(z=torch.tensor([[2, 0]])),
        swap(z=torch.tensor([[0, 3]])),
    ],
)
def test_rows_and_blocks_outside_fault(call: tuple[str, list[Any]]) -> None:
    with pytest.raises(DeviceFault, match="507015"):
        REGISTRY[call[0]](*call[1])


def test_swapped_blocks_come_when_the_stream_says_so() -> None:
    states, host = draw(4, 8), torch.full((4, 8), 7.0).half().pin_memory()
    device = states.to("npu")
    torch.ops._C_ascend.swap_blocks(device, host, torch.tensor([[0, 3], [2, 1]]))
    assert not torch.equal(host[3], states[0]), "the host sees it after a wait"
    torch_npu.npu.synchronize()
    assert torch.equal(host[[3, 1]], states[[0, 2]]) and bool((host[[0, 2]] == 7).all())
    torch.ops._C_ascend.swap_blocks(host, device, torch.tensor([[3, 1]]))
    assert torch.equal(device.cpu()[1], states[0])


def test_bytes_by_address_move_in_the_streams_order() -> None:
    states = draw(4, 8)
    device, host = states.to("npu"), torch.zeros(4, 8).half().pin_memory()
    size = 16
    places = [torch.tensor([t.data_ptr() + i * size for i in (0, 3)]) for t in (device, host)]
    sizes = torch.full((2,), size)
    writer, reader = torch_npu.npu.Stream(), torch_npu.npu.Stream()
    with torch_npu.npu.stream(writer):
        device.fill_(1)
    with torch_npu.npu.stream(reader):
        torch.ops._C_ascend.swap_blocks_batch(*places, sizes, vllm_blocks.DEVICE_TO_HOST)
    with pytest.raises(ascend_emulator.RaceError, match="aclrtMemcpyAsync reads"):
        torch_npu.npu.synchronize()
    torch_npu.npu.synchronize()
    device.copy_(states)
    torch.ops._C_ascend.swap_blocks_batch(*places, sizes, vllm_blocks.DEVICE_TO_HOST)
    torch_npu.npu.synchronize()
    assert torch.equal(host[[0, 3]], states[[0, 3]]) and not host[1:3].any()
    device.zero_()
    torch.ops._C_ascend.swap_blocks_batch(*places[::-1], sizes, vllm_blocks.HOST_TO_DEVICE)
    assert torch.equal(device.cpu()[[0, 3]], states[[0, 3]])


@pytest.mark.parametrize("direction", [0, 1, 2])
def test_addresses_of_other_memory_fault(direction: int) -> None:
    device, pinned, plain = draw(4, 8).to("npu"), draw(4, 8).pin_memory(), draw(4, 8)
    right = {0: (pinned, device), 1: (device, pinned), 2: (device, device)}[direction]
    size = torch.tensor([16])
    for place in (0, 1):
        pair = list(right)
        pair[place] = plain
        addresses = [torch.tensor([t.data_ptr()]) for t in pair]
        with pytest.raises(DeviceFault, match="not within one allocation"):
            torch.ops._C_ascend.swap_blocks_batch(*addresses, size, direction)
    torch.ops._C_ascend.swap_blocks_batch(*(torch.tensor([t.data_ptr()]) for t in right), size, direction)
    torch_npu.npu.synchronize()
