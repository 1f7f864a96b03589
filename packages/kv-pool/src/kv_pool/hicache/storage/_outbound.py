"""Owns what goes to a store: pages that wait to be written or are being written, and removals.

The pages of a cache's own pool and those of its companions go through one queue, under one limit, and each is counted
in the books of whoever asked. Threads do the work; everything here is called by the owner of the cache. It does not
choose what is written, nor read (see `tier`, `companions`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_pool.errors import StorageError
from kv_pool.hicache.storage._calls import ask, write_pages
from kv_pool.hicache.storage.protocols import Removes

if TYPE_CHECKING:
    from kv_pool.hicache.storage._work import Books
    from kv_pool.hicache.storage.protocols import PageStorage, Pieces

__all__ = ["Outbound", "Write"]

_MOST_FORGOTTEN = 65536  # keys; the oldest is asked for again when there are more


@dataclass(frozen=True, eq=False)
class Write:
    """Pages of one text that are to be written.

    Attributes:
        keys: One a page.
        pages: Pieces of each page.
        let_go: Ends what keeps the pages; called once, when the store is done with them.
        books: Where it is counted.
    """

    keys: list[str]
    pages: list[Pieces]
    let_go: Callable[[], object]
    books: Books


@dataclass(frozen=True, eq=False)
class _Writing:
    parts: list[Write]
    pages: int
    work: Future[int]


class Outbound:
    """Writes to one store, those of each owner in the order in which they were asked for, and removals.

    Args:
        store: The store.
        threads: Who does the work.
        batch: Pages of one call; what waits is merged up to this number.
        limit: Pages that the store writes at a time.
    """

    def __init__(self, store: PageStorage, threads: Executor, batch: int, limit: int) -> None:
        self._store = store
        self._threads = threads
        self._batch = batch
        self._limit = limit
        self._queue: deque[Write] = deque()
        self._writing: deque[_Writing] = deque()
        self._removals: deque[tuple[str, Books, Future[None]]] = deque()
        self._forgotten: OrderedDict[str, None] = OrderedDict()

    @property
    def pending(self) -> bool:
        """Whether anything waits or is under way."""
        return bool(self._queue or self._writing or self._removals)

    def pages(self, books: Books) -> tuple[int, int]:
        """Pages of one owner that wait, and pages that are being written."""
        waiting = sum(len(write.keys) for write in self._queue if write.books is books)
        return waiting, sum(writing.pages for writing in self._writing if writing.parts[0].books is books)

    @property
    def ignores_any(self) -> bool:
        """Whether there is a page that is not asked for any more."""
        return bool(self._forgotten)

    def ignores(self, key: str) -> bool:
        """Whether a page is not asked for any more: it was refused, and the store could not remove it."""
        return key in self._forgotten

    def write(self, write: Write) -> None:
        """Let pages wait; `submit` gives them to the store."""
        self._queue.append(write)

    def submit(self) -> None:
        """Give the store as much of what waits as the limit allows, whole batches of several texts of one owner."""
        room = self._limit - sum(writing.pages for writing in self._writing)
        leaving = {key for key, *_ in self._removals}  # what is written again must not be removed after that
        while self._queue and len(self._queue[0].keys) <= room and leaving.isdisjoint(self._queue[0].keys):
            parts = [self._queue.popleft()]
            count = len(parts[0].keys)
            for write in [write for write in self._queue if write.books is parts[0].books]:
                if count + len(write.keys) > min(room, self._batch) or not leaving.isdisjoint(write.keys):
                    break
                self._queue.remove(write)
                parts.append(write)
                count += len(write.keys)
            keys = [key for write in parts for key in write.keys]
            pages = [page for write in parts for page in write.pages]
            try:
                work = self._threads.submit(write_pages, self._store, keys, pages)
            except BaseException:
                self._end(parts, count)
                raise
            self._writing.append(_Writing(parts, count, work))
            room -= count

    def remove(self, key: str, books: Books) -> None:
        """A page that was refused leaves the store, or is not asked for any more; does not wait."""
        if not isinstance(self._store, Removes):
            self._ignore(key, books)
            return
        try:
            work = self._threads.submit(ask, self._store, "remove", [key])
        except BaseException:
            self._ignore(key, books)
            raise
        self._removals.append((key, books, work))

    def poll(self) -> None:
        """Take over what has ended, and submit what waits for that; never blocks."""
        while self._removals and self._removals[0][2].done():
            self._end_removal(*self._removals.popleft())
        while self._writing and self._writing[0].work.done():
            writing = self._writing.popleft()
            kept = 0
            try:
                kept = writing.work.result()
            except StorageError as error:
                writing.parts[0].books.fail(error)
            finally:
                self._end(writing.parts, writing.pages, kept)
        self.submit()

    def drain(self) -> None:
        """Wait for everything that waits or is under way, and take it over."""
        while self.pending:
            wait_for([writing.work for writing in self._writing])
            wait_for([work for *_, work in self._removals])
            self.poll()

    @staticmethod
    def _end(parts: list[Write], pages: int, kept: int = 0) -> None:
        parts[0].books.add(written_pages=kept, unwritten_pages=pages - kept)
        with ExitStack() as ends:
            for write in parts:
                ends.callback(write.let_go)

    def _end_removal(self, key: str, books: Books, work: Future[None]) -> None:
        removed = False
        try:
            work.result()
            removed = True
        except StorageError as error:
            books.fail(error)
        finally:
            if not removed:
                self._ignore(key, books)

    def _ignore(self, key: str, books: Books) -> None:
        self._forgotten[key] = None
        books.add(forgotten_pages=1)
        if len(self._forgotten) > _MOST_FORGOTTEN:
            self._forgotten.popitem(last=False)
