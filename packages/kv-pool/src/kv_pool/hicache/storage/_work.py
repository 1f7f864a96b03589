"""Owns the record of what travels from a store to the host, and the counts of both ways. It starts and ends nothing."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import dataclass, fields, replace
from threading import Event
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_planner import PrefixLock

    from kv_pool.errors import StorageError
    from kv_pool.hicache.acquired import Namespace
    from kv_pool.hicache.storage._calls import Read
    from kv_pool.tables import IntArray

__all__ = ["Books", "Inline", "Prefetch", "PrefetchState", "StorageCounters"]

PrefetchState: TypeAlias = Literal["below_threshold", "reading", "done", "cancelled"]


@dataclass(frozen=True)
class StorageCounters:
    """What a tier has done.

    Attributes:
        written_pages: Pages that the store has kept, or had already.
        unwritten_pages: Pages for which it had no room, or which failed.
        read_pages: Pages that came back whole.
        wasted_pages: Of these, pages that were on the host meanwhile, or whose prefix had left.
        damaged_pages: Pages that were refused, by the store or by the canary.
        forgotten_pages: Of these, pages that are not asked for again, because the store could not remove them.
        failures: Calls that the store ended with another error, of whatever kind.
    """

    written_pages: int = 0
    unwritten_pages: int = 0
    read_pages: int = 0
    wasted_pages: int = 0
    damaged_pages: int = 0
    forgotten_pages: int = 0
    failures: int = 0

    def __add__(self, other: StorageCounters) -> StorageCounters:
        """What both have done."""
        return StorageCounters(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


class Books:
    """The counters of one owner of pages, as they are now.

    Attributes:
        counters: The counters.
        failure: The last error of the store.
    """

    def __init__(self) -> None:
        self.counters = StorageCounters()
        self.failure: StorageError | None = None

    def add(self, **more: int) -> None:
        """Count more, by the names of `StorageCounters`."""
        summed = {name: getattr(self.counters, name) + value for name, value in more.items()}
        self.counters = replace(self.counters, **summed)

    def fail(self, failure: StorageError | None) -> None:
        """Count and keep an error of the store, if it is one."""
        if failure is not None:
            self.failure = failure
            self.add(failures=1)


class Prefetch:
    """Pages of a text on their way from the store to the host.

    Attributes:
        state: `reading` until its end was seen by `poll`; `below_threshold` if too little was missing to ask.
        pages: Pages that it has brought into the index.
    """

    def __init__(self, tokens: IntArray, namespace: Namespace, state: PrefetchState) -> None:
        self.state: PrefetchState = state
        self.pages = 0
        self._tokens = tokens
        self._namespace = namespace
        self._stop = Event()
        self._wanted: IntArray = np.zeros(0, dtype=np.int64)  # positions in the text that are read
        self._host_pages: IntArray = np.zeros(0, dtype=np.int64)
        self._lock: PrefixLock | None = None
        self._work: Future[Read] | None = None

    @property
    def tokens(self) -> IntArray:
        """The text. Shape: [tokens]."""
        return self._tokens

    @property
    def namespace(self) -> Namespace:
        """Where it is looked up."""
        return self._namespace

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._stop.is_set()

    def cancel(self) -> None:
        """Stop after the batch that is under way; what was read whole until then is kept. Ends with the next `poll`."""
        self._stop.set()


class Inline(Executor):
    """Does the work in the call that submits it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)  # raised where the result is taken
        return done
