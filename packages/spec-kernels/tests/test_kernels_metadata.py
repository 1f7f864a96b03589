"""Owns the proof of the metadata builder: padding, capacity, widths, and inputs that stay as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import spec_kernels as sk
import torch


def test_page_lists_become_a_padded_table() -> None:
    built = sk.build_paged_metadata([[5, 2], np.array([9])], [1, 1], [130, 128], page_size=128, rows=4, columns=3)
    assert built.block_table.dtype == torch.int32
    assert built.block_table.tolist() == [[5, 2, 0], [9, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert (built.q_lens, built.kv_lens) == ([1, 1, 1, 1], [130, 128, 0, 0])


@pytest.mark.parametrize(
    "rows",
    [
        np.array([[5, 2], [9, 0]]),
        torch.tensor([[5, 2], [9, 0]]),
        torch.tensor([[5, 2], [9, 0]], dtype=torch.int32),
        [[5, 2], [9, 0]],
    ],
)
def test_table_rows_are_taken_as_they_are(rows: Any) -> None:
    built = sk.build_paged_metadata(rows, [2, 2], [8, 3], page_size=4, rows=3)
    assert built.block_table.tolist() == [[5, 2], [9, 0], [0, 0]]
    assert (built.q_lens, built.kv_lens) == ([2, 2, 2], [8, 3, 0])


def test_inputs_are_read_only() -> None:
    pages, queries, lengths = np.array([[5, 2]], dtype=np.int32), [1], np.array([7], dtype=np.int32)
    first = sk.build_paged_metadata(pages, queries, lengths, page_size=4, rows=2)
    second = sk.build_paged_metadata(pages, queries, lengths, page_size=4, rows=2)
    assert first.kv_lens == second.kv_lens == [7, 0]
    first.kv_lens[0] = 99
    first.block_table.zero_()
    assert queries == [1] and lengths.tolist() == [7] and pages.tolist() == [[5, 2]] and second.kv_lens == [7, 0]


def test_full_context_ends_at_the_table() -> None:
    pages = [list(range(1, 626))]
    assert sk.build_paged_metadata(pages, [1], [80_000], page_size=128).kv_lens == [80_000]
    with pytest.raises(sk.TableCapacityError, match="80000") as caught:
        sk.build_paged_metadata(pages, [1], [80_001], page_size=128)
    assert caught.value.given == 80_001
    with pytest.raises(sk.TableCapacityError, match="625 pages"):
        sk.build_paged_metadata(pages, [1], [80_000], page_size=128, columns=624)


def test_running_sums_become_lengths() -> None:
    """[0, 5, 5, 9] without its first: lengths 5, 0, 4 and back; cumulative KV lengths are never taken for lengths."""
    assert sk.lengths_from_ends("cu_seqlens", [5, 5, 9]) == [5, 0, 4] and sk.lengths_from_ends("ends", []) == []
    built = sk.build_paged_metadata([[1, 2], [], [3]], [5, 1, 4], [5, 0, 4], page_size=4)
    assert built.q_ends == [5, 6, 10] and sk.lengths_from_ends("q", built.q_ends) == built.q_lens
    with pytest.raises(sk.LengthError, match=r"cu_seqlens\[2\].*at least 5"):
        sk.lengths_from_ends("cu_seqlens", [0, 5, 4])


def test_an_idle_rank() -> None:
    built = sk.build_paged_metadata([], [], [], page_size=4, rows=2, columns=3, pad_q_len=4)
    assert built.block_table.tolist() == [[0] * 3] * 2
    assert (built.q_lens, built.kv_lens) == ([4, 4], [0, 0])
    assert sk.build_paged_metadata([], [], [], page_size=4).block_table.shape == (0, 0)


def test_a_request_without_tokens_is_a_padded_row() -> None:
    built = sk.build_paged_metadata([[3], []], [1, 1], [2, 0], page_size=4)
    assert built.block_table.tolist() == [[3], [0]] and built.kv_lens == [2, 0]


@pytest.mark.parametrize(
    ("pages", "q_lens", "kv_lens", "error"),
    [
        ([[3]], [1, 1], [2], sk.MetadataError),
        ([[3]], [1], [2, 2], sk.MetadataError),
        ([[3]], [3], [2], sk.LengthError),
        ([[3]], [-1], [2], sk.LengthError),
        ([[3]], [1], [-2], sk.LengthError),
        ([[3]], [1], [5], sk.TableCapacityError),
        ([[3, 0]], [1], [5], sk.MetadataError),
        ([[-1]], [1], [2], sk.MetadataError),
        ([[3, -1]], [1], [2], sk.IndexWidthError),
        ([[2**31]], [1], [2], sk.IndexWidthError),
        ([[3.0]], [1], [2], sk.DtypeError),
        ([[3]], [1.0], [2], sk.DtypeError),
        ([[3]], [[1]], [2], sk.MetadataError),
        ([[3]], [True], [2], sk.DtypeError),
    ],
)
def test_refusals(pages: Any, q_lens: Any, kv_lens: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        sk.build_paged_metadata(pages, q_lens, kv_lens, page_size=4)


def test_too_many_requests_for_the_bucket() -> None:
    with pytest.raises(sk.MetadataError, match="bucket"):
        sk.build_paged_metadata([[1], [2]], [1, 1], [1, 1], page_size=4, rows=1)


def test_lengths_before_a_replay() -> None:
    sk.check_kv_lens([8, 0], columns=2, page_size=4, q_len=2)
    for lengths, error in (
        ([9], sk.TableCapacityError),
        ([1], sk.LengthError),
        ([-1], sk.LengthError),
    ):
        with pytest.raises(error):
            sk.check_kv_lens(lengths, columns=2, page_size=4, q_len=2)


@pytest.mark.parametrize("value", [-3, -1, 1.5, float("nan"), True, "2"])
@pytest.mark.parametrize("name", ["page_size", "rows", "columns", "pad_q_len"])
@pytest.mark.parametrize("requests", [0, 1])
def test_sizes_that_are_no_counts_are_refused(name: str, value: Any, requests: int) -> None:
    sizes = {"page_size": 4, "rows": 2, "columns": 2, "pad_q_len": 1, name: value}
    with pytest.raises(sk.MetadataError, match=name) as caught:
        sk.build_paged_metadata([[3]] * requests, [1] * requests, [2] * requests, **sizes)
    assert caught.value.given is value


@pytest.mark.parametrize(
    "pages",
    [
        [[[3]]],
        [3],
        [np.int64(3)],
        [np.array(3)],
        [np.array([[3]])],
        [torch.tensor([[3]])],
        [np.zeros((1, 0), dtype=np.int64)],
        np.array([3]),
        np.array(3),
        np.array([[[3]]]),
        torch.tensor([3]),
        torch.tensor(3),
    ],
)
def test_pages_that_are_no_lists_are_refused(pages: Any) -> None:
    with pytest.raises(sk.MetadataError, match="pages"):
        sk.build_paged_metadata(pages, [1], [2], page_size=4)


def test_page_size_zero_is_refused() -> None:
    with pytest.raises(sk.MetadataError, match="page_size"):
        sk.build_paged_metadata([[3]], [1], [2], page_size=0)


def test_each_draft_step_has_lengths_of_its_own() -> None:
    """[8, 5] gives 9/6, 10/7, 11/8 and never one list for all (contracts.md A-08); a padded row stays 0."""
    table, committed = torch.zeros(3, 4, dtype=torch.int32), [8, 5, 0]
    found = sk.draft_step_metadata(table, committed, steps=3, page_size=4)
    assert [step.kv_lens for step in found] == [[9, 6, 0], [10, 7, 0], [11, 8, 0]]
    assert all(step.q_lens == [1, 1, 1] and step.block_table is table for step in found)
    found[0].kv_lens[0] = 99
    assert found[1].kv_lens[0] == 10 and committed == [8, 5, 0]


def test_a_draft_ends_where_the_table_does() -> None:
    """625 pages of 128 hold 80,000 tokens; 80,001 is refused (field_faults C10)."""
    table = torch.zeros(1, 625, dtype=torch.int32)
    assert sk.draft_step_metadata(table, [79_999], steps=1, page_size=128)[0].kv_lens == [80_000]
    with pytest.raises(sk.TableCapacityError, match="80001"):
        sk.draft_step_metadata(table, [79_999], steps=2, page_size=128)
    with pytest.raises(sk.MetadataError, match="steps"):
        sk.draft_step_metadata(table, [1], steps=0, page_size=128)
