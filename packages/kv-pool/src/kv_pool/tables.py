"""Owns the arithmetic between pages, token positions, slots and block tables, as numpy arrays on the host.

A slot is `page * page_size + offset`. Page 0 and its slots are reserved, so none of these functions accepts page 0 in a
request's list, and padding is always 0. It does not own pages (see `allocator`) nor memory (see `mha`).
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from kv_pool.errors import KvPoolError, SlotOutOfRange, TableError

__all__ = ["as_index_array", "block_table", "is_whole", "narrow_slots", "shown", "slots_for", "whole_number"]

IntArray: TypeAlias = npt.NDArray[np.int64]
IndexLike: TypeAlias = "npt.NDArray[Any] | Sequence[int]"
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def as_index_array(name: str, values: IndexLike, error: type[TableError] | Any = TableError) -> IntArray:
    """Return `values` as a 1-D int64 array, refusing every dtype that is not an integer.

    Args:
        name: Name of the argument, for the error.
        values: Sequence of ints or 1-D integer array of any width and stride. Never mutated.
        error: Error class to raise.

    Returns:
        Shape: [n]; dtype int64. May share memory with `values`.

    Raises:
        TableError: Not one-dimensional, or not of an integer dtype (bool counts as none).
    """
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as reason:  # lists of unequal lengths, tensors of a device
        raise error(
            name,
            given=f"{shown(values)} ({str(reason).partition('. ')[0]})",
            expected="a 1-D integer array",
            consequence="ids that the host cannot read name no page",
            remedy="pass int32 or int64 ids in host memory",
        ) from None
    if array.size == 0 and array.ndim == 1 and not isinstance(values, np.ndarray):
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise error(
            name,
            given=f"{array.dtype} of shape {array.shape}",
            expected="a 1-D integer array",
            consequence="an id that is rounded or reshaped names another page",
            remedy="pass int32 or int64 ids",
        )
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise error(
            name,
            given=int(array.max()),
            expected="values below 2**63",
            consequence="the id would wrap to a negative one",
            remedy="pass int64 ids",
        )
    return array.astype(np.int64, copy=False)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is an int, of Python or of NumPy; bools, floats, arrays and tensors are none."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def shown(value: object) -> str:
    """A value as a text of its kind that is never long, for an error; of an int that is too long, the kind."""
    try:
        text = f"{value!r:.80}"
    except ValueError:  # an int of more digits than Python prints
        return type(value).__name__
    return text if isinstance(value, int | float | None) else f"{type(value).__name__} {text}"


def whole_number(
    name: str,
    value: object,
    *,
    least: int = 0,
    most: int | None = INT64_MAX,
    error: type[KvPoolError] = TableError,
    consequence: str,
) -> int:
    """Return `value` as an int, refusing fractions, NaN, bools, tensors, below `least` or above `most`.

    Raises:
        TableError: As said, or the `error` that was asked for.
    """
    number = operator.index(value) if is_whole(value) else None
    if number is None or number < least or (most is not None and number > most):
        raise error(
            name,
            given=shown(value),
            expected=f"a whole number of at least {least}{'' if most is None else f' and at most {most}'}",
            consequence=consequence,
            remedy="pass an int",
        )
    return number


def slots_for(pages: IndexLike, start: int, stop: int, page_size: int) -> IntArray:
    """Return the slots of token positions `start..stop-1` of one request.

    Args:
        pages: Page ids of the request, in token order. Shape: [pages]; int32 or int64.
        start: First token position, 0-based within the request.
        stop: One past the last token position.
        page_size: Tokens in a page.

    Returns:
        Shape: [stop - start]; dtype int64. Computed in 64 bits whatever the dtype of `pages`.

    Raises:
        TableError: Negative, fractional or reversed positions, positions beyond the pages, a reserved or negative page
            in use, or one whose slots do not fit int64.
    """
    ids = as_index_array("pages", pages)
    consequence = "no slot can be computed"
    page_size = whole_number("page_size", page_size, least=1, consequence=consequence)
    start = whole_number("start", start, consequence="positions count from 0")
    stop = whole_number("stop", stop, consequence="positions count from 0")
    capacity = ids.size * page_size
    if not 0 <= start <= stop <= capacity:
        raise TableError(
            "start, stop",
            given=(start, stop),
            expected=f"0 <= start <= stop <= {capacity} ({ids.size} pages of {page_size})",
            consequence="positions without a page would take another request's slots",
            remedy="allocate the missing pages first",
        )
    if start == stop:
        return np.zeros(0, dtype=np.int64)
    first, last = start // page_size, (stop - 1) // page_size
    used = ids[first : last + 1]
    _refuse_reserved("pages", used)
    most = (INT64_MAX + 1) // page_size - 1
    if int(used.max()) > most:
        raise TableError(
            "pages",
            given=int(used.max()),
            expected=f"page ids up to {most}, whose {page_size} slots fit int64",
            consequence="the slot would wrap and name another page's token",
            remedy="pass pages that the allocator handed out",
        )
    positions = np.arange(start - first * page_size, stop - first * page_size, dtype=np.int64)
    slots: IntArray = used[positions // page_size] * np.int64(page_size) + positions % page_size
    return slots


def block_table(requests: Sequence[IndexLike], *, columns: int, rows: int | None = None) -> npt.NDArray[np.int32]:
    """Lay the page lists of several requests out as one table, padded with the reserved page 0.

    Args:
        requests: One page list a request.
        columns: Width of the table; the longest request must fit.
        rows: Height of the table; defaults to the number of requests. Further rows are all 0.

    Returns:
        Shape: [rows, columns]; dtype int32.

    Raises:
        TableError: A request with more pages than columns, more requests than rows, a reserved or too large page, or
            `columns` or `rows` is no whole number, or the requests are no list.
    """
    given: object = requests
    rows_of = given.ndim > 1 if isinstance(given, np.ndarray) else isinstance(given, Sequence)
    if not rows_of or isinstance(given, str | bytes):
        raise TableError(
            "requests",
            given=type(requests).__name__,
            expected="a list of page lists",
            consequence="no table can be laid out",
            remedy="pass one list of pages a request",
        )
    columns = whole_number("columns", columns, most=INT32_MAX, consequence="the table has no width")
    consequence = "the table has no height"
    height = len(requests) if rows is None else whole_number("rows", rows, most=INT32_MAX, consequence=consequence)
    if height < len(requests):
        raise TableError(
            "rows",
            given=height,
            expected=f"at least {len(requests)}",
            consequence="requests would fall off the table",
            remedy="pick a larger bucket",
        )
    table = np.zeros((height, columns), dtype=np.int32)
    for row, pages in enumerate(requests):
        ids = as_index_array(f"requests[{row}]", pages)
        if ids.size > columns:
            raise TableError(
                f"requests[{row}]",
                given=f"{ids.size} pages",
                expected=f"at most {columns} columns",
                consequence="the request's last tokens would have no entry",
                remedy="widen the table, or end the request at its length limit",
            )
        _refuse_reserved(f"requests[{row}]", ids)
        if ids.size and int(ids.max()) > INT32_MAX:
            raise TableError(
                f"requests[{row}]",
                given=int(ids.max()),
                expected=f"page ids up to {INT32_MAX}",
                consequence="the id would wrap in the int32 table",
                remedy="use a smaller pool or a larger page",
            )
        table[row, : ids.size] = ids
    return table


def narrow_slots(slots: IndexLike) -> npt.NDArray[np.int32]:
    """Return slots as int32 for operators that want it, refusing values that do not fit.

    Args:
        slots: Shape: [n]; any integer dtype.

    Returns:
        Shape: [n]; dtype int32.

    Raises:
        SlotOutOfRange: A slot is negative or above 2**31 - 1.
    """
    wide = as_index_array("slots", slots)
    if wide.size and (int(wide.min()) < 0 or int(wide.max()) > INT32_MAX):
        raise SlotOutOfRange(
            "slots",
            given=(int(wide.min()), int(wide.max())),
            expected=f"values in 0..{INT32_MAX}",
            consequence="the slot would wrap and name another token",
            remedy="use a writer that takes int64 slots",
        )
    return wide.astype(np.int32)


def _refuse_reserved(name: str, ids: IntArray) -> None:
    if ids.size and int(ids.min()) < 1:
        raise TableError(
            name,
            given=int(ids.min()),
            expected="page ids of at least 1",
            consequence="page 0 belongs to padded rows, and negative ids are no addresses",
            remedy="pass pages that the allocator handed out",
        )
