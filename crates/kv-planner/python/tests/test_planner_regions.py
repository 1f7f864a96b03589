"""Registered memory: rounded, joined, cut, limited; and blocks that stay inside."""

from __future__ import annotations

import kv_planner as kp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_planner.testing import build_rank, byte_map

MIB = 2**20
SPANS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 40)), max_size=8)


def spans(regions: kp.Regions) -> list[tuple[int, int]]:
    return list(zip(*(column.tolist() for column in regions.arrays()), strict=True))


def test_neighbours_within_the_alignment_are_one_region_d14() -> None:
    buffers = [(5 * MIB, 10), (MIB, 10), (3 * MIB, 0), (2 * MIB, MIB), (9 * MIB, 3 * MIB)]
    regions = kp.Regions(buffers)
    assert spans(regions) == [(0, 6 * MIB), (8 * MIB, 4 * MIB)]
    assert (len(regions), regions.nbytes, regions.alignment) == (2, 10 * MIB, 2 * MIB)
    with pytest.raises(kp.RegionLimitExceeded) as caught:
        kp.Regions(buffers, max_regions=1)
    assert (caught.value.local, caught.value.remote) == (2, 1)


def test_a_segment_beyond_the_largest_is_cut_d11() -> None:
    regions = kp.Regions([(0, 100 * 2**30)], max_bytes=32 * 2**30)
    assert [length // 2**30 for _, length in spans(regions)] == [32, 32, 32, 4]
    with pytest.raises(kp.RegionLimitExceeded):
        kp.Regions([(0, 100 * 2**30)], max_bytes=32 * 2**30, max_regions=3)


@given(SPANS, st.sampled_from([1, 4, 16]), st.none() | st.sampled_from([16, 48]))
def test_regions_cover_the_buffers_and_nothing_but_their_rounding(
    buffers: list[tuple[int, int]], alignment: int, most: int | None
) -> None:
    regions = kp.Regions(buffers, alignment=alignment, max_bytes=most)
    wanted = set()
    for start, length in buffers:
        if length:
            wanted |= {byte // alignment for byte in range(start, start + length)}
    covered: list[int] = []
    for start, length in spans(regions):
        assert start % alignment == length % alignment == 0 and 0 < length <= (most or 2**64)
        covered += range(start // alignment, (start + length) // alignment)
    assert sorted(wanted) == covered
    assert regions == kp.Regions(list(reversed(buffers)), alignment=alignment, max_bytes=most)


LAYOUT = kp.ModelLayout(
    [kp.ComponentSpec("key", layer_ids=[0, 1], dtype="uint8", total_heads=2, dims=3)], page_size=2, fingerprint="m"
)


@settings(deadline=None)
@given(
    st.permutations(range(1, 6)),
    st.integers(0, 5),
    st.sampled_from([1, 2]),
    st.builds(
        kp.Capabilities,
        max_entries_per_batch=st.none() | st.integers(1, 4),
        max_block_bytes=st.none() | st.integers(1, 9),
    ),
    st.sampled_from([16, 32, None]),
    st.sampled_from([16, 48, None]),
)
def test_blocks_stay_within_one_region_and_change_no_byte(
    pages: list[int],
    count: int,
    tp_size: int,
    limits: kp.Capabilities,
    at_source: int | None,
    at_destination: int | None,
) -> None:
    local = build_rank(LAYOUT, [0, 1], base=4100)
    remote = build_rank(LAYOUT, [0, 1], kp.Placement(tp_size=tp_size), base=2**40 + 7)
    plan = kp.Plan(kp.agree(local, remote).route(), kp.Runs(sorted(pages[:count]), pages[:count]))
    source, destination = (
        kp.Regions([(entry.address, entry.nbytes) for entry in rank.entries], alignment=16, max_bytes=most)
        for rank, most in ((local, at_source), (remote, at_destination))
    )
    bound = kp.lower(plan, limits, source_regions=source, destination_regions=destination)
    assert byte_map(bound) == byte_map(kp.lower(plan))
    assert bound.block_count == sum(len(batch) for batch in bound.batches)
    assert bound.total_bytes == plan.nbytes
    for batch in bound.batches:
        assert 0 < len(batch) <= (limits.max_entries_per_batch or 2**64)
        for columns, regions in ((batch.source, source), (batch.destination, destination)):
            for start, nbytes in zip(columns.tolist(), batch.nbytes.tolist(), strict=True):
                assert nbytes <= (limits.max_block_bytes or 2**64)
                assert any(a <= start and start + nbytes <= a + n for a, n in spans(regions))
    exact = kp.Capabilities(
        max_entries_per_batch=limits.max_entries_per_batch,
        max_block_bytes=limits.max_block_bytes,
        max_blocks=bound.block_count,
    )
    assert kp.lower(plan, exact, source_regions=source, destination_regions=destination) == bound
    if bound.block_count:
        tight = kp.Capabilities(max_block_bytes=limits.max_block_bytes, max_blocks=bound.block_count - 1)
        with pytest.raises(kp.BlockLimitExceeded):
            kp.lower(plan, tight, source_regions=source, destination_regions=destination)


@pytest.mark.parametrize("side", ["source", "destination"])
def test_memory_that_is_not_registered_is_refused(side: str) -> None:
    local, remote = build_rank(LAYOUT, [0, 1]), build_rank(LAYOUT, [0, 1], base=2**40)
    plan = kp.Plan(kp.agree(local, remote).route(), kp.Runs([1], [1]))
    rank = local if side == "source" else remote
    first = kp.Regions([(rank.entries[0].address, rank.entries[0].nbytes)], alignment=16)
    with pytest.raises(kp.UnregisteredMemory, match=f"{side} address: 0x"):
        kp.lower(plan, **{f"{side}_regions": first})  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [{"alignment": 3}, {"alignment": 0}, {"max_bytes": 3}, {"max_bytes": 0}])
def test_impossible_limits_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(kp.ArgumentError):
        kp.Regions([(4, 4)], **arguments)


@pytest.mark.parametrize("buffers", [[1], [(1,)], [(1, 2, 3)], [(-1, 2)], [("a", 2)]])
def test_buffers_are_pairs(buffers: list[object]) -> None:
    with pytest.raises(kp.ArgumentError):
        kp.Regions(buffers)  # type: ignore[arg-type]
