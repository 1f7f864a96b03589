"""Owns the description of a paged-attention batch: block table on the device, query and KV lengths on the host.

KV lengths include this step's tokens; nobody adds a window to them later. Lengths are per request, never cumulative. It
does not own pages, and it does not decide how many tokens a step has.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from spec_kernels.errors import DtypeError, IndexWidthError, LengthError, MetadataError, TableCapacityError

__all__ = [
    "PagedAttentionMetadata",
    "build_paged_metadata",
    "check_kv_lens",
    "draft_step_metadata",
    "host_lengths",
    "lengths_from_ends",
    "whole",
]

IntList: TypeAlias = "Sequence[int] | npt.NDArray[Any] | torch.Tensor"
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, eq=False)
class PagedAttentionMetadata:
    """One batch of paged attention.

    Attributes:
        block_table: Pages of each request in token order, padded with page 0. Shape: [rows, columns]; dtype int32; on
            the device of the query.
        q_lens: Query tokens of each request.
        kv_lens: KV tokens of each request, this step's included; 0 marks a padded row. With a mask, upper bounds: what
            lies below them must be finite memory, hidden or not.
        mask: Which KV tokens each query token does not see (True hides), or None. Shape: [rows, q, columns *
            page_size]; dtype bool; on the device of the query. See `exact_length_mask`.
    """

    block_table: torch.Tensor
    q_lens: list[int]
    kv_lens: list[int]
    mask: torch.Tensor | None = None

    @property
    def q_ends(self) -> list[int]:
        """One past each request's last query token, counted over all requests; a new list."""
        return list(accumulate(self.q_lens))


def lengths_from_ends(name: str, ends: IntList) -> list[int]:
    """Turn running sums, one a request, into the length of each: `[5, 5, 9]` gives `[5, 0, 4]`.

    Metadata holds lengths of each request. Operators and engines that count otherwise say so here, by name.

    Args:
        name: What the sums are called, for an error.
        ends: One past each request's last token, host integers. Never mutated.

    Raises:
        DtypeError, MetadataError: See `host_lengths`.
        LengthError: They fall.
    """
    sums = host_lengths(name, ends)
    for index in range(1, len(sums)):
        if sums[index] < sums[index - 1]:
            raise LengthError(
                f"{name}[{index}]",
                given=sums[index],
                expected=f"at least {sums[index - 1]}, the sum before it",
                consequence="a request would have a negative length",
                remedy="pass running sums, or lengths of each request where they are wanted",
            )
    return [end - start for start, end in pairwise([0, *sums])]


def build_paged_metadata(
    pages: Sequence[IntList] | npt.NDArray[Any] | torch.Tensor,
    q_lens: IntList,
    kv_lens: IntList,
    *,
    page_size: int,
    rows: int | None = None,
    columns: int | None = None,
    pad_q_len: int | None = None,
    device: torch.device | str = "cpu",
) -> PagedAttentionMetadata:
    """Describe a batch from page lists or from rows of a block table.

    Padding: rows from the number of requests up to `rows` have a table of zeros, `pad_q_len` query tokens and KV length
        0. A
    request with KV length 0 is treated the same.

    Args:
        pages: One page list a request, or a 2-D integer array or tensor with one table row a request. Never mutated. A
            tensor on a device is taken as it is and must be int32: reading its values would wait for the device.
        q_lens: Query tokens a request. Never mutated.
        kv_lens: KV tokens a request, this step's included. Never mutated.
        page_size: Tokens in a page.
        rows: Rows to pad to; the number of requests when `None`.
        columns: Width of the table; that of the longest list when `None`.
        pad_q_len: Query tokens of a padded row; the largest of `q_lens` when `None`, or 1 for an empty batch.
        device: Where the table goes.

    Returns:
        The metadata; its lists are new ones.

    Raises:
        LengthError: A length is negative, or a request has more query than KV tokens.
        TableCapacityError: A KV length exceeds the request's pages, or pages exceed the columns.
        MetadataError: Numbers of requests differ, exceed `rows`, a page in use is reserved or negative, page lists are
            not one-dimensional, or `page_size`, `rows`, `columns` or `pad_q_len` is no whole number in its range.
        IndexWidthError: A page id does not fit int32.
        DtypeError: Ids or lengths are not integers, or a device table is not int32.
    """
    whole("page_size", page_size, least=1)
    for name, number in (("rows", rows), ("columns", columns), ("pad_q_len", pad_q_len)):
        if number is not None:
            whole(name, number, least=0)
    queries, lengths = host_lengths("q_lens", q_lens), host_lengths("kv_lens", kv_lens)
    if isinstance(pages, (np.ndarray, torch.Tensor)) and pages.ndim != 2:
        raise _not_a_list("pages", tuple(pages.shape), "one row a request (two axes)")
    count = len(pages)
    if not count == len(queries) == len(lengths):
        raise MetadataError(
            "pages, q_lens, kv_lens",
            given=(count, len(queries), len(lengths)),
            expected="three equal numbers of requests",
            consequence="a request would attend to another's pages",
            remedy="pass one entry a request in each",
        )
    height = count if rows is None else rows
    if height < count:
        raise MetadataError(
            "rows",
            given=height,
            expected=f"at least {count} requests",
            consequence="requests would be dropped",
            remedy="pick a larger bucket",
        )
    for index, (query, length) in enumerate(zip(queries, lengths, strict=True)):
        if length and query > length:
            raise LengthError(
                f"q_lens[{index}]",
                given=query,
                expected=f"at most kv_lens[{index}] = {length}",
                consequence="the first queries would stand before the request's start",
                remedy="KV lengths include this step's tokens",
            )
    pad = pad_q_len if pad_q_len is not None else max(queries, default=1)
    if isinstance(pages, torch.Tensor) and pages.device.type != "cpu":
        table = _device_table(pages, height, columns)
        capacities = [int(pages.shape[1])] * count
    else:
        array, capacities = _host_table(pages, lengths, page_size, height, columns)
        table = torch.from_numpy(array)
    for index, (length, held) in enumerate(zip(lengths, capacities, strict=True)):
        _check_capacity(f"kv_lens[{index}]", length, held, page_size)
    return PagedAttentionMetadata(
        table.to(device), queries + [pad] * (height - count), lengths + [0] * (height - count)
    )


def draft_step_metadata(
    block_table: torch.Tensor, committed_lens: Sequence[int], *, steps: int, page_size: int
) -> list[PagedAttentionMetadata]:
    """Describe the decode steps of a draft, each with lengths of its own: step `s` has `committed + s + 1` KV tokens.

    Args:
        block_table: Pages of each request, those of the draft's tokens included. Shape: [rows, columns]; dtype int32.
        committed_lens: Committed tokens of each request; 0 marks a padded row. Never mutated.
        steps: Draft steps.
        page_size: Tokens in a page.

    Returns:
        One a step; all share the table, none shares a list.

    Padding: a padded row keeps length 0 in every step.

    Raises:
        MetadataError: A size is no whole number in its range.
        LengthError: A length is negative.
        TableCapacityError: The last step would need a page beyond the table.

    Source: contracts.md §A-08; field_faults C10, E13.
    """
    whole("steps", steps, least=1)
    whole("page_size", page_size, least=1)
    lens = host_lengths("committed_lens", list(committed_lens))
    for index, length in enumerate(lens):
        _check_capacity(f"committed_lens[{index}]", length + steps if length else 0, block_table.shape[1], page_size)
    return [
        PagedAttentionMetadata(block_table, [1] * len(lens), [length + step + 1 if length else 0 for length in lens])
        for step in range(steps)
    ]


def check_kv_lens(kv_lens: Sequence[int], *, columns: int, page_size: int, q_len: int) -> None:
    """Check host lengths against a table's width, as before the replay of a captured graph.

    Args:
        kv_lens: KV tokens a row; 0 marks a padded row.
        columns: Columns of the block table.
        page_size: Tokens in a page.
        q_len: Query tokens of each row.

    Raises:
        LengthError: A length is negative, or shorter than the query in a live row.
        TableCapacityError: A length exceeds `columns * page_size`.
    """
    for index, length in enumerate(kv_lens):
        if length < 0 or 0 < length < q_len:
            raise LengthError(
                f"kv_lens[{index}]",
                given=length,
                expected=f"0 for a padded row, or at least the {q_len} query tokens",
                consequence="queries would stand before the request's start",
                remedy="KV lengths include this step's tokens",
            )
        _check_capacity(f"kv_lens[{index}]", length, columns, page_size)


def _check_capacity(name: str, length: int, held: int, page_size: int) -> None:
    if length > held * page_size:
        raise TableCapacityError(
            name,
            given=length,
            expected=f"at most {held * page_size} ({held} pages of {page_size})",
            consequence="the op would read page ids beyond the request's row",
            remedy="allocate a page, or end the request at its length limit",
        )


def host_lengths(name: str, values: IntList) -> list[int]:
    """Lengths as a new list.

    Raises:
        DtypeError: They are no integers, or lie on a device.
        MetadataError: They have another number of axes than one.
        LengthError: One is negative.
    """
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        raise DtypeError(
            name,
            given=f"a tensor on {values.device}",
            expected="host integers",
            consequence="reading it would wait for the device",
            remedy="keep a host copy of the lengths",
        )
    array = _integers(name, values)
    if array.ndim != 1:
        raise _not_a_list(name, array.shape, "one length a request (one axis)")
    if array.size and int(array.min()) < 0:
        raise LengthError(
            name,
            given=int(array.min()),
            expected="0 or more",
            consequence="a negative length addresses memory before the cache",
            remedy="clamp local lengths at 0 where they are computed",
        )
    return [int(value) for value in array]


def _integers(name: str, values: Any) -> npt.NDArray[np.int64]:
    array = values.numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.size == 0 and not isinstance(values, (np.ndarray, torch.Tensor)):
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise DtypeError(
            name,
            given=array.dtype,
            expected="int32 or int64",
            consequence="a rounded id names another page",
            remedy="pass integers",
        )
    converted: npt.NDArray[np.int64] = array.astype(np.int64)
    return converted


def _device_table(pages: torch.Tensor, height: int, columns: int | None) -> torch.Tensor:
    if pages.ndim != 2 or pages.dtype != torch.int32:
        raise DtypeError(
            "pages",
            given=f"{pages.dtype} of shape {tuple(pages.shape)} on {pages.device}",
            expected="int32 of shape [requests, columns]",
            consequence="narrowing on the device would wrap large ids unseen",
            remedy="keep block tables in int32",
        )
    count, held = pages.shape
    width = held if columns is None else columns
    _check_columns("pages", held, width)
    if (height, width) == (count, held):
        return pages
    table = torch.zeros((height, width), dtype=torch.int32, device=pages.device)
    table[:count, :held] = pages
    return table


def _host_table(
    pages: Any, lengths: list[int], page_size: int, height: int, columns: int | None
) -> tuple[npt.NDArray[np.int32], list[int]]:
    lists = [_integers(f"pages[{index}]", row) for index, row in enumerate(pages)]
    for index, row in enumerate(lists):
        if row.ndim != 1:
            raise _not_a_list(f"pages[{index}]", row.shape, "one page list a request (one axis)")
    width = max((row.size for row in lists), default=0) if columns is None else columns
    table = np.zeros((height, width), dtype=np.int32)
    for index, (row, length) in enumerate(zip(lists, lengths, strict=True)):
        name = f"pages[{index}]"
        _check_columns(name, row.size, width)
        _check_capacity(f"kv_lens[{index}]", length, row.size, page_size)
        used = row[: -(-length // page_size)]
        if used.size and int(used.min()) < 1:
            raise MetadataError(
                name,
                given=int(used.min()),
                expected="page ids of at least 1",
                consequence="page 0 holds what padded rows wrote, and -1 is no address",
                remedy="pass pages that the allocator handed out; a padded row has KV length 0",
            )
        if row.size and (int(row.min()) < 0 or int(row.max()) > INT32_MAX):
            raise IndexWidthError(
                name,
                given=(int(row.min()), int(row.max())),
                expected=f"page ids in 0..{INT32_MAX}",
                consequence="the id would wrap in the int32 table",
                remedy="use a smaller pool or a larger page; pad with 0",
            )
        table[index, : row.size] = row
    return table, [row.size for row in lists]


def whole(name: str, value: object, *, least: int) -> None:
    """Refuse what is no whole number of at least `least`, with MetadataError."""
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least:
        raise MetadataError(
            name,
            given=value,
            expected=f"a whole number of at least {least}",
            consequence="rows or pages could not be counted, and attention would address memory outside the cache",
            remedy="pass the sizes of the captured step and of the pool",
        )


def _not_a_list(name: str, shape: tuple[int, ...], expected: str) -> MetadataError:
    return MetadataError(
        name,
        given=f"shape {tuple(shape)}",
        expected=expected,
        consequence="entries could not be assigned to requests",
        remedy="reshape it",
    )


def _check_columns(name: str, held: int, columns: int) -> None:
    if held > columns:
        raise TableCapacityError(
            name,
            given=f"{held} pages",
            expected=f"at most {columns} columns",
            consequence="the request's last tokens would have no entry",
            remedy="widen the table, or end the request at its length limit",
        )
