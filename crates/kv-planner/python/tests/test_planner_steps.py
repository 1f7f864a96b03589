"""Lengths, positions, capacities and moves of a step: pure, exact, and refused where impossible."""

from __future__ import annotations

from collections.abc import Callable

import kv_planner as kp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

KINDS: list[kp.SpeculativeKind] = ["none", "eagle", "mtp", "dflash", "dspark"]
LENS = st.lists(st.integers(0, 10**6), max_size=8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_inputs_are_never_changed_e12(kind: kp.SpeculativeKind, dtype: type[np.signedinteger]) -> None:
    """Calling twice gives the same lengths, and the caller's own array stays as it is."""
    given_ = np.array([116, 23, 0], dtype)
    before = given_.copy()
    first = kp.kv_lengths(kind, given_, window=16)
    assert np.array_equal(first, kp.kv_lengths(kind, given_, window=16))
    for step in range(3):
        kp.draft_lengths(given_, step=step)
    kp.widened_lengths(given_, width=4, front=2)
    kp.local_lengths(given_, width=4, own=(0, 6))
    kp.addressable(given_, columns=1, page_size=16)
    assert np.array_equal(given_, before)


def test_draft_steps_do_not_share_lengths_e13() -> None:
    assert [kp.draft_lengths([100, 8, 5, 0], step=step).tolist() for step in range(3)] == [
        [101, 9, 6, 0],
        [102, 10, 7, 0],
        [103, 11, 8, 0],
    ]


def test_local_lengths_e04() -> None:
    """8 ranks, 80 token rows, 4 tokens a request: rank 6 owns rows 60..70, request 17 has rows 68..72."""
    padded = np.array([50] * 17 + [0] * 3)
    assert kp.local_lengths(padded, width=4, own=(60, 70)).tolist() == [0] * 15 + [50, 50, 0, 0, 0]
    padded[17] = 10
    assert kp.local_lengths(padded, width=4, own=(60, 70))[17] == 8


@given(LENS, st.integers(1, 5), st.data())
def test_ranks_together_see_every_length(lens: list[int], width: int, data: st.DataObject) -> None:
    rows = len(lens) * width
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=3)))
    seen = [0] * len(lens)
    for start, stop in zip([0, *cuts], [*cuts, rows], strict=True):
        local = kp.local_lengths(lens, width=width, own=(start, stop)).tolist()
        assert all(0 <= length <= own for length, own in zip(local, lens, strict=True))
        seen = [max(pair) for pair in zip(seen, local, strict=True)]
    assert seen == lens


@given(LENS, st.integers(0, 9), st.integers(0, 4))
def test_widened_lengths_count_every_token_once(lens: list[int], width: int, front: int) -> None:
    prefix, extend, after = (column.tolist() for column in kp.widened_lengths(lens, width=width, front=front))
    for own, before, window, end in zip(lens, prefix, extend, after, strict=True):
        assert (before, window, end) == (max(own - front, 0), width + front, own + width)
        if own >= front:
            assert before + window == end


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6), st.integers(0, 6))
def test_a_front_holds_what_there_is(rows: list[tuple[int, int]], front: int) -> None:
    lens, kept = [own for own, _ in rows], [own for _, own in rows]
    wanted = [max(front - k, front - n, 0) for n, k in rows]
    assert kp.first_valid(lens, kept, front=front).tolist() == wanted


def test_trim_then_clip_c04() -> None:
    pages = np.array([100, 101, 102, 103], np.int32)
    assert kp.window_pages(pages, tokens=129, page_size=128, window=2).tolist() == [100, 101]


@given(st.integers(0, 40), st.integers(1, 5), st.integers(0, 9), st.integers(0, 3))
def test_a_window_ends_with_the_prompt(tokens: int, page_size: int, window: int, spare: int) -> None:
    filled = -(-tokens // page_size)
    pages = list(range(100, 100 + filled + spare))
    kept = kp.window_pages(pages, tokens=tokens, page_size=page_size, window=window).tolist()
    assert kept == pages[max(filled - window, 0) : filled]


class TestUnequalCounts:
    def test_offsets_c14(self) -> None:
        assert kp.token_offsets([4, 1, 4]).tolist() == [0, 4, 5, 9]
        assert kp.token_offsets([4, 1], rows=4).tolist() == [0, 4, 5, 5, 5]

    def test_empty_rows_c12(self) -> None:
        assert kp.token_offsets([5, 0, 4]).tolist() == [0, 5, 5, 9]
        assert kp.token_offsets([0, 0, 0]).tolist() == [0, 0, 0, 0]

    def test_row_strides_e03(self) -> None:
        assert kp.query_ends([8] * 3, rows=3).tolist() == [8, 16, 24]

    def test_idle_ranks_e18(self) -> None:
        assert kp.query_ends([], rows=0).tolist() == []
        assert kp.token_offsets([]).tolist() == [0]
        assert kp.query_ends([], rows=2, padded_width=4).tolist() == [4, 8]
        assert kp.kv_lengths("mtp", [], window=4).tolist() == []

    @given(st.lists(st.integers(1, 9), max_size=6), st.integers(0, 3), st.integers(0, 4))
    def test_rows_follow_each_other(self, counts: list[int], spare: int, width: int) -> None:
        rows = len(counts) + spare
        ends = kp.query_ends(counts, rows=rows, padded_width=width).tolist()
        assert ends == np.cumsum([*counts, *[width] * spare]).tolist()
        assert kp.token_offsets(counts, rows=rows).tolist() == [0, *np.cumsum([*counts, *[0] * spare]).tolist()]

    @given(st.lists(st.integers(1, 9), max_size=6), st.integers(0, 2), st.data())
    def test_the_last_accepted_token_is_in_its_row(self, counts: list[int], spare: int, data: st.DataObject) -> None:
        front = data.draw(st.integers(0, min(counts, default=1) - 1))
        drafts = [data.draw(st.integers(0, count - front - 1)) for count in counts]
        index = kp.last_accepted(drafts, counts, rows=len(counts) + spare, front=front).tolist()
        starts = kp.token_offsets(counts).tolist()
        assert index[: len(counts)] == [s + front + d for s, d in zip(starts, drafts, strict=False)]
        assert all(0 <= position < max(sum(counts), 1) for position in index)

    def test_equal_counts_agree_with_select_index(self) -> None:
        drafts = [2, 0, 1]
        assert np.array_equal(
            kp.last_accepted(drafts, [4] * 3, rows=3, front=1), kp.select_index(drafts, rows=3, width=4, front=1)
        )


class TestCapacities:
    def test_writers_and_readers_c09(self) -> None:
        assert kp.token_capacity(80, requests=12, speculative_tokens=5) == 128
        assert kp.token_capacity(80, requests=12, speculative_tokens=3) == 104

    def test_the_end_of_the_block_table_c10(self) -> None:
        cut, whole = kp.addressable([80000, 80001], columns=625, page_size=128)
        assert (cut.tolist(), whole.tolist()) == ([80000, 80000], [True, False])
        assert whole.dtype == np.bool_

    def test_the_end_of_the_context_c11(self) -> None:
        assert not kp.placeholders_fit(4094, drafts=3, limit=4096)
        assert kp.placeholders_fit(4093, drafts=3, limit=4096)

    def test_whole_pages_c16(self) -> None:
        assert kp.page_capacity([1] * 10, page_size=64) == 640


class TestAcceptedMoves:
    def test_a_path_is_shorter_than_a_tree_f03(self) -> None:
        """Two requests, 3 steps, 8 drafts: rows of 4 accepted positions and of 8 tokens."""
        slots = np.arange(40, 56)
        source, destination, last = kp.accepted_moves([0, 3, 5, -1, 8, 9, -1, -1], slots, columns=4, width=8)
        assert (source.tolist(), destination.tolist(), last.tolist()) == ([43, 45], [41, 42], [5, 9])

    @given(st.integers(1, 3), st.integers(1, 6), st.data())
    def test_accepted_tokens_lie_behind_each_other(self, rows: int, width: int, data: st.DataObject) -> None:
        columns = data.draw(st.integers(1, width))
        slots = data.draw(st.permutations(range(100, 100 + rows * width)))
        accepted, flat = [], []
        for row in range(rows):
            steps = data.draw(st.lists(st.integers(0, width - 1), unique=True, max_size=columns))
            accepted.append([row * width + step for step in sorted(steps)])
            flat += accepted[-1] + [-1] * (columns - len(steps))
        memory = {slot: position for position, slot in enumerate(slots)}
        source, destination, last = kp.accepted_moves(flat, slots, columns=columns, width=width)
        for from_, to in zip(source.tolist(), destination.tolist(), strict=True):
            memory[to] = memory[from_]
        for row, wanted in enumerate(accepted):
            own = slots[row * width : row * width + len(wanted)]
            assert [memory[slot] for slot in own] == wanted
        assert last.tolist() == [wanted[-1] if wanted else -1 for wanted in accepted]


@pytest.mark.parametrize(
    "call",
    [
        lambda: kp.draft_lengths([-1], step=0),
        lambda: kp.draft_lengths([2**63 - 1], step=0),
        lambda: kp.local_lengths([1], width=0, own=(0, 1)),
        lambda: kp.local_lengths([1], width=1, own=(2, 1)),
        lambda: kp.widened_lengths([-1], width=1, front=0),
        lambda: kp.first_valid([1], [], front=1),
        lambda: kp.window_pages([1], tokens=3, page_size=1, window=1),
        lambda: kp.window_pages([1], tokens=1, page_size=0, window=1),
        lambda: kp.token_offsets([1, 1], rows=1),
        lambda: kp.query_ends([-1], rows=1),
        lambda: kp.last_accepted([1], [1], rows=1),
        lambda: kp.last_accepted([0], [0], rows=1),
        lambda: kp.page_capacity([-1], page_size=1),
        lambda: kp.addressable([1], columns=1, page_size=0),
        lambda: kp.accepted_moves([0, 2], [1, 2], columns=2, width=2),
        lambda: kp.accepted_moves([0], [1, 2], columns=1, width=1),
    ],
)
def test_impossible_steps_are_named(call: Callable[[], object]) -> None:
    with pytest.raises(kp.LengthError) as caught:
        call()
    assert caught.value.consequence and caught.value.remedy and caught.value.local is not None
