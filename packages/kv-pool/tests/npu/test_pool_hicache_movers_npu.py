"""Owns the proof that every mover brings pages over and back on an NPU, and what `dim_exchange` refuses there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch_npu
from kv_planner import ModelLayout
from kv_pool import MhaPool, MoveRefused, UnsupportedMover
from kv_pool.hicache import HOST_LAYOUTS, HostLayout, HostPool, MoverName, create_mover

sys.path.insert(0, str(Path(__file__).parents[1]))

from pool_matrix import DTYPES, POOLS, Bits, Labels, check_round_trip

NPU = "npu:0"
PAIRS: list[tuple[MoverName, HostLayout]] = [
    ("dim_exchange", "page_first_direct"),
    *(("indexed", x) for x in HOST_LAYOUTS),
]


@pytest.mark.parametrize(("name", "layout"), PAIRS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", POOLS)
def test_items_of_every_pool_go_and_come(
    make_labels: Labels, as_bits: Bits, kind: str, dtype: str, name: MoverName, layout: HostLayout
) -> None:
    """The operator refuses a tensor a layer; everything else travels by both movers."""
    for pool in POOLS[kind](dtype, NPU):
        scattered = any(
            len({layer.untyped_storage().data_ptr() for layer in pool.layers(*c)}) > 1 for c in pool.components
        )
        if name == "dim_exchange" and scattered:
            with pytest.raises(UnsupportedMover, match="a tensor a layer"):
                create_mover(name, HostPool(pool, pages=1, layout=layout))
        else:
            check_round_trip(pool, layout, name, make_labels, as_bits)


def test_the_value_has_its_own_width(make_layout: Callable[..., ModelLayout]) -> None:
    """Layers 2, pages of 4 tokens, K 512 and V 64 wide: pages 2 and 1 go to host pages 1 and 2, page 3 stays."""
    pool = MhaPool(make_layout(heads=1, dims=512, value_dims=64, dtype="float32"), size=12, device=NPU)
    host = HostPool(pool, pages=3)
    mover = create_mover("dim_exchange", host)
    start = 0
    for mirror in host.mirrors:
        stop = start + mirror.device.numel()
        mirror.device.copy_(torch.arange(start, stop).view(mirror.device.shape))
        mirror.host.fill_(-1)
        start = stop
    mover.backup([2, 1], [1, 2])
    torch_npu.npu.synchronize()
    saved = [mirror.device.cpu() for mirror in host.mirrors]
    for mirror, old in zip(host.mirrors, saved, strict=True):
        assert torch.equal(mirror.host[1], old[:, 2]) and torch.equal(mirror.host[2], old[:, 1])
        assert bool((mirror.host[[0, 3]] == -1).all())
        mirror.device.fill_(-2)
    mover.load([1, 3], [2, 1])
    torch_npu.npu.synchronize()
    for mirror, old in zip(host.mirrors, saved, strict=True):
        now = mirror.device.cpu()
        assert torch.equal(now[:, 1], old[:, 1]) and torch.equal(now[:, 3], old[:, 2])
        assert bool((now[:, [0, 2]] == -2).all())


def test_key_and_value_of_unequal_dtype_go_in_calls_of_their_own(make_layout: Callable[..., ModelLayout]) -> None:
    """The operator takes the item size from its first tensor; the draft here is float32 beside a float16 target."""
    pool = MhaPool(make_layout(draft=(2,)), size=12, device=NPU)
    host = HostPool(pool, pages=3)
    assert host.pinned and all(mirror.host.is_pinned() for mirror in host.mirrors)
    mover = create_mover("auto", host)
    assert mover.name == "dim_exchange" and mover.capabilities.granularity == "page"
    for number, mirror in enumerate(host.mirrors):
        mirror.device.fill_(number + 1)
    mover.backup([3], [1])
    torch_npu.npu.synchronize()
    assert [float(mirror.host[1].min()) for mirror in host.mirrors] == [1, 2, 3, 4]


def test_refusals(make_layout: Callable[..., ModelLayout]) -> None:
    pool = MhaPool(make_layout(), size=12, device=NPU)
    host = HostPool(pool, pages=3)
    mover = create_mover("dim_exchange", host)
    for mirror in host.mirrors:
        mirror.host.fill_(3)
    with pytest.raises(MoveRefused, match="each layer would move all"):
        mover.load([1], [1], 0)
    for device_pages, host_pages in (([1, 2], [1]), ([1, 1], [1, 2]), ([4], [1]), ([1], [0]), ([-1], [1])):
        for call in (mover.backup, mover.load):
            with pytest.raises(MoveRefused):
                call(device_pages, host_pages)
    mover.load([], [])
    torch_npu.npu.synchronize()
    assert not pool.key_storage.any() and not pool.value_storage.any()
    with pytest.raises(UnsupportedMover, match="page_first on npu"):
        create_mover("dim_exchange", HostPool(pool, pages=3, layout="page_first"))
