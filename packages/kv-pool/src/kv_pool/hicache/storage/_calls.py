"""Owns how a store is called: what it answers is checked, and what it raises is a `StorageError` that names the call.

A store may be somebody else's, and raise whatever its libraries raise. It does not own what becomes of a call that has
failed (see `tier`, `companions`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kv_pool.errors import StorageDamaged, StorageError
from kv_pool.hicache.storage.protocols import leading_pages

if TYPE_CHECKING:
    from kv_pool.hicache.storage.protocols import PageStorage, Pieces

__all__ = ["Read", "ask", "read_batches", "stored_pages", "write_pages"]

Operation: TypeAlias = Literal["exists", "read", "write", "remove", "register", "close"]


@dataclass(frozen=True)
class Read:
    """How a read has ended.

    Attributes:
        pages: Leading pages that are whole.
        damaged: Key of the page after them, if it was refused.
        failure: The other error with which the store has ended it.
    """

    pages: int
    damaged: str | None = None
    failure: StorageError | None = None


def ask(store: object, operation: Operation, *arguments: object) -> Any:
    """Call a method of a store's protocols, and return what it answers.

    Raises:
        StorageError: What the store raised, or an error that names the call, with what it raised as the cause.
    """
    try:
        return getattr(store, operation)(*arguments)
    except StorageError:
        raise
    except Exception as error:
        name = getattr(store, "name", type(store).__name__)
        raise StorageError(
            f"{operation} of the store {name!r}",
            given=f"{type(error).__name__}: {error}",
            expected="an answer, or a StorageError",
            consequence="nothing of this call counts",
            remedy="see the cause, and mend the store or what it depends on",
        ) from error


def stored_pages(store: PageStorage, keys: Sequence[str]) -> int:
    """Return how many leading keys a store has.

    Raises:
        StorageError: See `ask` and `leading_pages`.
    """
    return leading_pages("exists", ask(store, "exists", keys), len(keys))


def write_pages(store: PageStorage, keys: Sequence[str], pages: Sequence[Pieces]) -> int:
    """Return how many leading pages a store has kept.

    Raises:
        StorageError: See `ask` and `leading_pages`.
    """
    return leading_pages("write", ask(store, "write", keys, pages), len(pages))


def read_batches(
    store: PageStorage, keys: Sequence[str], pages: Sequence[Pieces], batch: int, cancelled: Callable[[], bool]
) -> Read:
    """Read pages, `batch` of them in a call, up to the first one that is missing, refused, or not told of.

    Args:
        store: The store.
        keys: One a page.
        pages: Pieces of each page. Mutated, also beyond those that are whole.
        batch: Pages of one call.
        cancelled: Whether to stop; asked before each call.
    """
    done = 0
    while done < len(keys) and not cancelled():
        part = slice(done, done + batch)
        asked = len(keys[part])
        try:
            got = leading_pages("read", ask(store, "read", keys[part], pages[part]), asked)
        except StorageDamaged as error:
            whole = error.pages_read
            if type(whole) is int and 0 <= whole < asked:
                return Read(done + whole, damaged=keys[done + whole])
            return Read(done, failure=error)
        except StorageError as error:
            return Read(done, failure=error)
        done += got
        if got < asked:
            break
    return Read(done)
