"""Recurrent states: groups sharded independently, request rows, exact counts."""

from __future__ import annotations

import kv_planner as kp
import pytest
from hypothesis import given
from hypothesis import strategies as st

CONV = [(8, 1), (8, 1), (16, 1)]
Share = tuple[int, int]


def row(groups: list[tuple[int, int]], share: Share) -> list[tuple[int, int, int]]:
    """Labels (group, head, byte) of one row on a rank, written down without the planner."""
    rank, size = share
    labels = []
    for number, (heads, width) in enumerate(groups):
        own = range(rank * heads // size, (rank + 1) * heads // size) if size <= heads else [rank * heads // size]
        labels += [(number, head, byte) for head in own for byte in range(width)]
    return labels


def test_convolution_groups_b01() -> None:
    route = kp.StateRoute(CONV, source=(0, 1), destination=(1, 2))
    assert [column.tolist() for column in route.arrays()] == [[4, 12, 24], [0, 4, 8], [4, 4, 8]]
    assert (route.source_bytes, route.destination_bytes, len(route), route.blocks_per_request) == (32, 16, 3, 3)


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.data(),
)
def test_every_byte_of_a_state_arrives_once(
    groups: list[tuple[int, int]], rows: int, source_size: int, destination_size: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, destination_size - 1))
    target = (rank, destination_size)
    wanted = row(groups, target)
    image: dict[int, tuple[int, tuple[int, int, int]]] = {}
    requests = kp.Runs([3, 1], [2, 4], item_kind="request_row")
    for sender in range(source_size):
        share = (sender, source_size)
        own = row(groups, share)
        route = kp.StateRoute(groups, rows=rows, source=share, destination=target)
        assert (route.source_bytes, route.destination_bytes) == (rows * len(own), rows * len(wanted))
        batch = route.lower(
            requests, source=(1000, route.source_bytes + 3, 5), destination=(9000, route.destination_bytes, 5)
        )
        assert len(batch) == 2 * route.blocks_per_request
        columns = (batch.source.tolist(), batch.destination.tolist(), batch.nbytes.tolist())
        for from_, to, count in zip(*columns, strict=True):
            for byte in range(count):
                request, inside = divmod(from_ + byte - 1000, route.source_bytes + 3)
                assert to + byte not in image
                image[to + byte] = (request, own[inside % len(own)])
    expected = {
        9000 + to * rows * len(wanted) + position: (from_, wanted[position % len(wanted)])
        for from_, to in ((3, 2), (1, 4))
        for position in range(rows * len(wanted))
    }
    assert image == expected


def test_another_window_is_refused_a05() -> None:
    route = kp.StateRoute(CONV, rows=10, source=(0, 1), destination=(0, 1))
    rows = kp.Runs([1], [1], item_kind="request_row")
    with pytest.raises(kp.ManifestError, match=r"source.stride: 96 against 320") as caught:
        route.lower(rows, source=(4096, 3 * 32, 4), destination=(2**40, 10 * 32, 4))
    assert (caught.value.local, caught.value.remote) == (96, 320)


def test_counts_of_rows_are_exact() -> None:
    with pytest.raises(kp.UnequalPages):
        kp.Runs([1, 2], [1], item_kind="request_row")
    route = kp.StateRoute(CONV, source=(0, 1), destination=(0, 1))
    with pytest.raises(kp.PageOutOfRange):
        route.lower(kp.Runs([4], [1], item_kind="request_row"), source=(64, 32, 4), destination=(4096, 32, 4))
    with pytest.raises(kp.ItemKindMismatch):
        route.lower(kp.Runs([1], [1]), source=(64, 32, 4), destination=(4096, 32, 4))
    with pytest.raises(kp.ArgumentError, match="triple"):
        route.lower(kp.Runs([1], [1]), source=(64, 32), destination=(4096, 32, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("groups", "source", "kind"),
    [
        ([], (0, 1), kp.LayoutError),
        ([(4, 0)], (0, 1), kp.LayoutError),
        ([(3, 1)], (0, 2), kp.HeadsDoNotSplit),
        ([(4, 1)], (2, 2), kp.PlacementError),
        ([(2**63, 2**63)], (0, 1), kp.AddressOverflow),
    ],
)
def test_impossible_states_are_refused(groups: list[tuple[int, int]], source: Share, kind: type[kp.PlanError]) -> None:
    with pytest.raises(kind):
        kp.StateRoute(groups, source=source, destination=(0, 1))


def test_states_compare_and_hash() -> None:
    one, same = (kp.StateRoute(CONV, source=(0, 1), destination=(1, 2)) for _ in range(2))
    assert one == same and hash(one) == hash(same)
    assert one != kp.StateRoute(CONV, source=(0, 1), destination=(0, 2))
