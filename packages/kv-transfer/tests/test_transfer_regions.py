"""Memory is registered in few regions within what an engine says, wholly or not at all."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfer_memory import make_layout, whole

import kv_transfer as kt
from kv_transfer.engines.loopback import LoopbackEngine
from kv_transfer.regions import plan_regions, register_manifests


class Limited(LoopbackEngine):
    """An engine with the given limits; refuses the n-th region."""

    def __init__(self, *, refuse_at: int = 1 << 30, **limits: Any) -> None:
        super().__init__()
        self._capabilities = dataclasses.replace(self._capabilities, **limits)
        self.refuse_at = refuse_at
        self.opened: list[int] = []

    def register(self, address: int, nbytes: int) -> None:
        if len(self.opened) == self.refuse_at:
            raise kt.EngineError(f"region {len(self.opened)} is refused", code=-7)
        super().register(address, nbytes)
        self.opened.append(address)

    def unregister(self, address: int) -> None:
        super().unregister(address)
        self.opened.remove(address)


def test_neighbours_and_overlaps_are_joined() -> None:
    buffers = [(10, 5), (15, 5), (30, 1), (18, 4), (2, 3), (50, 0)]
    assert plan_regions(LoopbackEngine(), buffers) == ((2, 3), (10, 12), (30, 1))
    assert plan_regions(LoopbackEngine(), []) == ()


def test_ends_are_rounded_where_the_engine_wants_it() -> None:
    engine = Limited(region_alignment=16)
    assert plan_regions(engine, [(17, 3), (33, 15), (80, 16)]) == ((16, 32), (80, 16))


def test_a_long_region_ends_between_buffers() -> None:
    engine = Limited(max_region_bytes=20)
    assert plan_regions(engine, [(100, 10), (110, 10), (120, 10), (130, 5)]) == ((100, 20), (120, 15))
    with pytest.raises(kt.RegionError, match=r"buffers of 21 bytes at 0x6e cannot be parted; .* takes regions of 20"):
        plan_regions(engine, [(100, 10), (110, 21)])
    with pytest.raises(kt.RegionError, match="buffers of 25 bytes at 0x64 cannot be parted"):
        plan_regions(engine, [(100, 15), (110, 15)])
    rounded = Limited(region_alignment=8, max_region_bytes=16)
    assert plan_regions(rounded, [(8, 8), (16, 4), (24, 8)]) == ((8, 16), (24, 8))
    with pytest.raises(kt.RegionError, match="buffers of 24 bytes at 0x8"):
        plan_regions(rounded, [(8, 12), (20, 6), (28, 4)])


def test_too_many_regions_are_refused_before_the_engine_is_asked() -> None:
    engine = Limited(max_regions=2)
    assert len(plan_regions(engine, [(10, 5), (20, 5), (25, 5)])) == 2
    with pytest.raises(
        kt.RegionError, match="3 regions after neighbours were joined; engine 'loopback' takes 2"
    ) as got:
        plan_regions(engine, [(10, 5), (20, 5), (30, 5)])
    assert got.value.local == 3
    memory = whole(make_layout())
    with pytest.raises(kt.RegionError, match="takes 2"):
        register_manifests(engine, [memory.manifest])
    assert engine.opened == []


BUFFERS = st.lists(st.tuples(st.integers(1, 90), st.integers(0, 12)), max_size=8)


@given(buffers=BUFFERS, alignment=st.sampled_from([1, 2, 8]), most=st.sampled_from([None, 8, 16, 40]))
def test_regions_hold_every_buffer_whole(buffers: list[tuple[int, int]], alignment: int, most: int | None) -> None:
    """Regions are disjoint, aligned and short enough, every byte of a buffer is in one of them, and none is idle.

    They are refused only where buffers that share aligned blocks are too long together.
    """
    engine = Limited(region_alignment=alignment, max_region_bytes=most)
    held = np.zeros(256, np.int64)
    for number, (address, nbytes) in enumerate(buffers):
        held[address : address + nbytes] = number + 1
    blocks: list[set[int]] = []
    for address, nbytes in buffers:
        if nbytes:
            own = set(range(address // alignment, (address + nbytes - 1) // alignment + 1))
            own = own.union(*(other for other in blocks if other & own))
            blocks = [other for other in blocks if not other & own] + [own]
    unit = max((len(group) * alignment for group in blocks), default=0)
    try:
        regions = plan_regions(engine, buffers)
    except kt.RegionError:
        assert most is not None and unit > most
        return
    assert most is None or unit <= most
    used = np.zeros(256, np.int64)
    for start, size in regions:
        assert start % alignment == 0 and size % alignment == 0 and size > 0 and (most is None or size <= most)
        used[start : start + size] += 1
        assert held[start : start + size].any()
    assert used.max(initial=0) <= 1 and (used[held > 0] == 1).all()
    for address, nbytes in buffers:
        assert nbytes == 0 or any(start <= address and address + nbytes <= start + size for start, size in regions)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_refusal_half_way_takes_back_what_was_open(at: int) -> None:
    memory = whole(make_layout())
    engine = Limited(refuse_at=at)
    count = len(plan_regions(engine, {(entry.address, entry.nbytes) for entry in memory.manifest.entries}))
    assert count > 3
    with pytest.raises(kt.EngineError, match=f"region {at} is refused"):
        register_manifests(engine, [memory.manifest])
    assert engine.opened == []
    engine.refuse_at = 1 << 30
    addresses = register_manifests(engine, [memory.manifest])
    assert len(addresses) == count
    for address in addresses:
        engine.unregister(address)
    assert engine.opened == []


def test_foreign_overlap_is_refused_and_nothing_stays_open() -> None:
    memory = whole(make_layout())
    engine = LoopbackEngine()
    last = memory.manifest.entries[-1]
    engine.register(last.address + 8, 8)
    with pytest.raises(kt.RegionError, match="overlaps"):
        register_manifests(engine, [memory.manifest])
    engine.unregister(last.address + 8)
    for address in register_manifests(engine, [memory.manifest]):
        engine.unregister(address)
