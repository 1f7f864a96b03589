"""Owns the import of an engine that may be absent, and memory that an engine names by address."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_pool.errors import LibraryUnavailable

__all__ = ["bytes_at", "engine_module", "stored_key"]


def engine_module(name: str, release: str) -> ModuleType:
    """Import a module of an engine.

    Raises:
        LibraryUnavailable: The engine is absent, or has no such module.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LibraryUnavailable(
            name,
            given=str(error),
            expected=release,
            consequence="there is nothing to plug into",
            remedy=f"install {release} beside kv-pool; importing this package does not need it",
        ) from error


def bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory that somebody else owns, and keeps, as bytes. Shape: [nbytes]; writable."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def stored_key(identity: dict[str, Any], digest: bytes) -> str:
    """A key for `PageStorage` from what the bytes mean and the engine's own digest of the tokens."""
    known = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    return hashlib.sha256(b"kv-pool engine page\0" + hashlib.sha256(known).digest() + digest).hexdigest()
