"""Owns the third level of the cache: pages kept beyond the host's memory, under keys that carry their whole identity.

`PageStorage` is what a store has to do; `files` and `mooncake` are two, others come through the entry point group
`kv_pool.storages`.
It does not choose what to keep (see `tier`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from inspect import signature
from typing import Any, cast

from kv_pool._arguments import check_kind
from kv_pool.errors import KvPoolError, StorageError
from kv_pool.hicache.storage._work import Prefetch, StorageCounters
from kv_pool.hicache.storage.files import FileStorage
from kv_pool.hicache.storage.identity import StorageIdentity, page_keys
from kv_pool.hicache.storage.protocols import Closes, PageStorage, RegistersMemory, Removes
from kv_pool.hicache.storage.tier import StorageTier

__all__ = [
    "Closes",
    "FileStorage",
    "PageStorage",
    "Prefetch",
    "RegistersMemory",
    "Removes",
    "StorageCounters",
    "StorageIdentity",
    "StorageTier",
    "create_storage",
    "page_keys",
]

GROUP = "kv_pool.storages"
_OURS = {
    "files": "kv_pool.hicache.storage.files:FileStorage",
    "mooncake": "kv_pool.hicache.storage.engines.mooncake:MooncakeStorage",
}


def create_storage(name: str, **options: Any) -> PageStorage:
    """Create a store by name: `files`, `mooncake`, or one that a package declares in the group `kv_pool.storages`.

    Args:
        name: Its name.
        **options: What its constructor takes.

    Raises:
        StorageError: There is no such store, it does not take these options, or its package or constructor has raised
            what is no error of kv_pool (the cause).
        KvPoolError: What its constructor raises of them.
    """
    make = _constructor(name)
    takes = signature(make)
    try:
        takes.bind(**options)
    except TypeError as error:
        raise StorageError(
            "options",
            given=f"{sorted(options)}: {error}",
            expected=f"those of {name!r}: {', '.join(takes.parameters)}",
            consequence="the store was not opened",
            remedy="give the options that its constructor takes",
        ) from error
    try:
        return cast(PageStorage, make(**options))
    except KvPoolError:
        raise
    except Exception as error:
        raise _unusable(name, error) from error


def _constructor(name: str) -> Callable[..., Any]:
    check_kind("name", name, str, StorageError)
    if name in _OURS:
        module, _, attribute = _OURS[name].partition(":")
        ours: Callable[..., Any] = getattr(import_module(module), attribute)
        return ours
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise StorageError(
            "name",
            given=name,
            expected=f"one of {sorted([*_OURS, *found])}",
            consequence="nothing would be kept beyond the host",
            remedy=f"install the package that declares it in the group {GROUP}",
        )
    try:
        theirs: Callable[..., Any] = found[name].load()
    except Exception as error:
        raise _unusable(name, error) from error
    return theirs


def _unusable(name: str, error: Exception) -> StorageError:
    return StorageError(
        f"the store {name!r}",
        given=f"{type(error).__name__}: {error}",
        expected="a store",
        consequence="the store was not opened",
        remedy="see the cause, and mend its options or its package",
    )
