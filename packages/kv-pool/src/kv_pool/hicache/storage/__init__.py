"""Owns the third level of the cache: pages kept beyond the host's memory, under keys that carry their whole identity.

`PageStorage` is what a store has to do; `files` is one, others come through the entry point group `kv_pool.storages`.
It does not choose what to keep (see `tier`).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from kv_pool.errors import StorageError
from kv_pool.hicache.storage.files import FileStorage
from kv_pool.hicache.storage.identity import StorageIdentity, page_keys
from kv_pool.hicache.storage.tier import Prefetch, StorageCounters, StorageTier

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Pieces = Sequence[npt.NDArray[np.uint8]]

__all__ = [
    "FileStorage",
    "PageStorage",
    "Prefetch",
    "StorageCounters",
    "StorageIdentity",
    "StorageTier",
    "create_storage",
    "page_keys",
]

GROUP = "kv_pool.storages"


@runtime_checkable
class PageStorage(Protocol):
    """Keeps pages as pieces of bytes. Called from several threads.

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


def create_storage(name: str, **options: Any) -> PageStorage:
    """Create a store by name: `files`, or one that another package declares in the group `kv_pool.storages`.

    Args:
        name: Its name.
        **options: What its constructor takes.

    Raises:
        StorageError: There is no such store.
    """
    if name == FileStorage.name:
        return FileStorage(**options)
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise StorageError(
            "name",
            given=name,
            expected=f"one of {sorted([FileStorage.name, *found])}",
            consequence="nothing would be kept beyond the host",
            remedy=f"install the package that declares it in the group {GROUP}",
        )
    return cast(PageStorage, found[name].load()(**options))
