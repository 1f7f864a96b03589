"""Owns the proof that movers move what was asked and nothing else, and refuse every list that does not pair."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kv_planner import ComponentSpec, ModelLayout
from kv_pool import MhaPool, MoveRefused, UnsupportedMover, adopt
from kv_pool.hicache import HOST_LAYOUTS, HostLayout, HostPool, Mover, create_mover, mover_names, whole_pages

sys.path.insert(0, str(Path(__file__).parent))

from pool_matrix import DTYPES, POOLS, Bits, Labels, check_round_trip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", POOLS)
def test_items_of_every_pool_go_and_come(
    make_labels: Labels, as_bits: Bits, kind: str, dtype: str, layout: HostLayout, threads: int
) -> None:
    for pool in POOLS[kind](dtype, "cpu"):
        check_round_trip(pool, layout, "indexed", make_labels, as_bits, threads=threads)


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_values_of_64_beside_keys_of_512_g02(layout: HostLayout) -> None:
    """G02: two layers, three pages of four tokens, a counter that no two elements share, index keys, sentinels."""
    widths: dict[str, int] = {"key": 512, "value": 64, "index_key": 48}
    specs = [
        ComponentSpec(name, layer_ids=[0, 1], dtype="float32", total_heads=1, dims=dims)  # type: ignore[arg-type]
        for name, dims in widths.items()
    ]
    memory: dict[Any, torch.Tensor] = {name: torch.zeros(2, 3, 4, 1, dims) for name, dims in widths.items()}
    start = 0
    for tensor in memory.values():
        tensor.copy_(torch.arange(start, start + tensor.numel()).view(tensor.shape))
        start += tensor.numel()
    saved = {name: tensor.clone() for name, tensor in memory.items()}
    host = HostPool(adopt(memory, ModelLayout(specs, page_size=4, fingerprint="g02")), pages=3, layout=layout)
    mover = create_mover("indexed", host)
    for mirror in host.mirrors:
        mirror.host.fill_(-1)
    mover.backup([2, 1], [1, 2])
    for mirror in host.mirrors:
        held = saved[mirror.component]
        assert torch.equal(mirror.host[1], held[:, 2]) and torch.equal(mirror.host[2], held[:, 1])
        assert bool((mirror.host[[0, 3]] == -1).all())
        memory[mirror.component].fill_(-2)
    mover.load([1], [1])
    for name, tensor in memory.items():
        assert torch.equal(tensor[:, 1], saved[name][:, 2]) and bool((tensor[:, [0, 2]] == -2).all())


@pytest.mark.parametrize("widths", [(1, 3), (3, 1), (5, 8)])
def test_round_trip_of_odd_widths(check_mover: Callable[..., None], widths: tuple[int, int]) -> None:
    check_mover("cpu", "indexed", "page_first_direct", "int8", widths=widths, heads=1)


@pytest.fixture
def host(make_layout: Callable[..., ModelLayout]) -> HostPool:
    return HostPool(MhaPool(make_layout(draft=(2,)), size=20, device="cpu"), pages=4)


def test_one_layer_at_a_time(host: HostPool) -> None:
    mover = create_mover("auto", host)
    assert mover.name == "indexed" and mover.capabilities.granularity == "layer_page" and isinstance(mover, Mover)
    for mirror in host.mirrors:
        mirror.host.fill_(3)
    loaded: list[int] = []
    for layer in (1, 2, 0):
        mover.load([5, 1], [2, 4], layer)
        loaded.append(layer)
        for mirror in host.mirrors:
            expected = torch.zeros_like(mirror.device)
            for position, held in enumerate(mirror.layer_ids):
                if held in loaded:
                    expected[position, [5, 1]] = 3
            assert torch.equal(mirror.device, expected)


REFUSED: list[tuple[object, object, str]] = [
    ([1, 2], [1], "2 and 1 pages"),
    ([1, 1], [1, 2], "device_pages: .*page 1 more than once"),
    ([1, 2], [3, 3], "host_pages: .*page 3 more than once"),
    ([0], [1], r"device_pages: .*got \[0\]"),
    ([1], [0], r"host_pages: .*got \[0\]"),
    ([6], [1], r"device_pages: .*1\.\.5, got \[6\]"),
    ([1], [5], r"host_pages: .*1\.\.4, got \[5\]"),
    ([-1], [1], r"\[-1\]"),
    ([1.0], [1], "float64"),
    (np.array([[1]]), [1], "shape"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_lists_that_do_not_pair_are_refused_before_anything_moves(host: HostPool, number: int) -> None:
    device_pages, host_pages, text = REFUSED[number]
    for mirror in host.mirrors:
        mirror.host.fill_(3)
        mirror.device.fill_(5)
    mover = create_mover("indexed", host)
    for call in (mover.backup, mover.load):
        with pytest.raises(MoveRefused, match=text):
            call(device_pages, host_pages)  # type: ignore[arg-type]
    assert all(bool((m.host == 3).all()) and bool((m.device == 5).all()) for m in host.mirrors)


def test_a_layer_that_nobody_has(host: HostPool) -> None:
    with pytest.raises(MoveRefused, match="layer_id"):
        create_mover("indexed", host).load([1], [1], 3)


def test_movers_that_do_not_serve_the_pool(host: HostPool) -> None:
    assert mover_names("page_first_direct", "npu") == ("dim_exchange", "indexed")
    assert mover_names("page_first", "npu") == mover_names("page_first_direct", "cpu") == ("indexed",)
    with pytest.raises(UnsupportedMover, match="dim_exchange for layout page_first_direct on cpu"):
        create_mover("dim_exchange", host)
    with pytest.raises(UnsupportedMover, match="dma"):
        create_mover("dma", host)  # type: ignore[arg-type]


def test_whole_pages() -> None:
    assert whole_pages(np.array([8, 9, 10, 11, 4, 5, 6, 7], dtype=np.int32), 4).tolist() == [2, 1]
    assert whole_pages([], 4).tolist() == []
    for slots, text in (
        (range(50, 66), "starting at slot 50"),
        (range(48, 63), "15 slots"),
        ([4, 5, 7, 6], "consecutive"),
        ([4, 5, 6, 6], "consecutive"),
        ([4, 5, 6, 7, -4, -3, -2, -1], "slot -4"),
    ):
        with pytest.raises(MoveRefused, match=text):
            whole_pages(list(slots), 16 if len(list(slots)) > 8 else 4)
