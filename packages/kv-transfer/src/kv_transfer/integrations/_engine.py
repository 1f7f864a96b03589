"""Owns the import of a serving engine that may be absent. It does not own what is done with it."""

from __future__ import annotations

import importlib
from types import ModuleType

from kv_transfer.errors import EngineUnavailable

__all__ = ["engine_module"]


def engine_module(name: str, release: str) -> ModuleType:
    """Import a module of a serving engine.

    Args:
        name: Its dotted name.
        release: The release that this package is written for.

    Raises:
        EngineUnavailable: The engine is absent, or has no such module.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EngineUnavailable(
            f"{name} cannot be imported: {error}",
            local=name,
            consequence="there is nothing to plug into",
            remedy=f"install {release} beside kv-transfer; importing this package does not need it",
        ) from error
