"""Owns what a store of pages has to do, and may do. It holds no store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from kv_pool._arguments import check_all, check_list
from kv_pool.errors import StorageError
from kv_pool.tables import shown, whole_number

__all__ = [
    "Closes",
    "PageStorage",
    "Pieces",
    "RegistersMemory",
    "Removes",
    "check_keys",
    "check_pages",
    "leading_pages",
]

Pieces: TypeAlias = Sequence[npt.NDArray[np.uint8]]
"""Arrays of bytes, contiguous, in the order in which a store keeps them."""


@runtime_checkable
class PageStorage(Protocol):
    """Keeps pages as pieces of bytes. Called from several threads.

    Whatever a call raises ends that call alone: it becomes a `StorageError` with the cause, is counted, and costs hits.

    Attributes:
        name: Name under which it is chosen.
    """

    name: str

    def exists(self, keys: Sequence[str]) -> int:
        """Return how many leading keys are there; the first miss ends the count."""

    def read(self, keys: Sequence[str], pages: Sequence[Pieces]) -> int:
        """Fill pages, and return how many leading ones are whole; the first miss ends.

        Args:
            keys: One a page.
            pages: Pieces of each page, writable. Mutated, also beyond the number returned.

        Raises:
            StorageDamaged: A page that is shorter, longer or other than it was written. Its attribute `pages_read` says
                how many leading pages are whole.
        """

    def write(self, keys: Sequence[str], pages: Sequence[Pieces]) -> int:
        """Keep pages, and return how many leading ones are kept: each of them whole, also after a crash of the process.

        Raises:
            StorageError: The store cannot be written.
        """


@runtime_checkable
class RegistersMemory(Protocol):
    """A store that wants to know beforehand which memory pages lie in; a tier tells it when it is made."""

    def register(self, memory: Pieces) -> None:
        """Prepare memory, whole allocations of the host pool, for `read` and `write`.

        Raises:
            StorageError: It cannot be prepared.
        """


@runtime_checkable
class Closes(Protocol):
    """A store that holds something which it must give back: connections, threads, registered memory."""

    def close(self) -> None:
        """Give it back; a second call does nothing."""


@runtime_checkable
class Removes(Protocol):
    """A store that can remove pages. From one that cannot, a page that was refused is not asked for again."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove pages; keys that are not there are passed over.

        Raises:
            StorageError: A page could not be removed.
        """


def check_keys(keys: Sequence[str]) -> Sequence[str]:
    """The keys of a call to a store.

    Raises:
        StorageError: They are no list of texts.
    """
    return keys if _all(keys, str) else check_all("keys", keys, str, StorageError)


def check_pages(keys: Sequence[str], pages: Sequence[Pieces], *, writable: bool) -> None:
    """Refuse keys and pages of a call to a store that do not pair, before one of them is read or written.

    Raises:
        StorageError: They are no lists of one length, or a piece is no contiguous array of bytes; or is read-only,
            where it is to be filled.
    """
    check_keys(keys)
    if len(check_list("pages", pages, StorageError)) != len(keys):
        raise _unfit("pages", f"{len(pages)} pages for {len(keys)} keys", "one page a key")
    for number, pieces in enumerate(pages):
        for piece in check_list(f"pages[{number}]", pieces, StorageError):
            if not isinstance(piece, np.ndarray) or piece.dtype != np.uint8 or not piece.flags.c_contiguous:
                what = f"{piece.dtype} of strides {piece.strides}" if isinstance(piece, np.ndarray) else shown(piece)
                raise _unfit(f"pages[{number}]", what, "contiguous arrays of uint8")
            if writable and not piece.flags.writeable:
                raise _unfit(f"pages[{number}]", "a read-only array", "arrays that can be filled")


def _all(values: object, kind: type) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(value, kind) for value in values)


def _unfit(argument: str, given: str, expected: str) -> StorageError:
    return StorageError(
        argument,
        given=given,
        expected=expected,
        consequence="pages would be kept or filled under keys of others; nothing was read or written",
        remedy="pass the pieces of a page for each key",
    )


def leading_pages(call: str, answer: object, asked: int) -> int:
    """Return how many leading pages a store has answered for.

    Args:
        call: Which call of `PageStorage`, for the error.
        answer: What it returned.
        asked: Pages that it was called with.

    Raises:
        StorageError: No number of pages, or more than it was asked for: nothing of the call counts then.
    """
    consequence = "pages that were never filled would be served; nothing of this call counts"
    count = whole_number(f"answer of {call}", answer, error=StorageError, consequence=consequence)
    if count > asked:
        raise StorageError(
            f"answer of {call}",
            given=count,
            expected=f"at most the {asked} pages that it was called with",
            consequence=consequence,
            remedy="let the store return how many leading pages are whole",
        )
    return count
