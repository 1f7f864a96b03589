"""Engines by name: each is an import string, imported when it is first created.

Knows the names only; what an engine's options are is documented at its class.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Mapping

from kv_transfer.arguments import check_text
from kv_transfer.engine import TransferEngine
from kv_transfer.engine_check import require_engine
from kv_transfer.errors import ArgumentError, EngineError, EngineUnavailable

__all__ = ["create_engine", "engine_names", "register_engine"]

_FACTORIES: dict[str, str] = {
    "loopback": "kv_transfer.engines.loopback:LoopbackEngine",
    "memfabric": "kv_transfer.engines.memfabric:MemfabricEngine",
    "mooncake": "kv_transfer.engines.mooncake:MooncakeEngine",
    "nixl": "kv_transfer.engines.nixl:NixlEngine",
}
_LOCK = threading.Lock()


def engine_names() -> tuple[str, ...]:
    """The names that `create_engine` knows, in alphabetical order; whether they can run here is another question."""
    with _LOCK:
        return tuple(sorted(_FACTORIES))


def register_engine(name: str, factory: str) -> None:
    """Adds an engine.

    Args:
        name: The name for `create_engine`; both sides of a transfer must use the same one.
        factory: Import string "module:callable" of something that returns a `TransferEngine`.

    Raises:
        ArgumentError: The name is no text or is taken by another factory, or the import string has no colon.
    """
    check_text("name", name)
    module, colon, attribute = check_text("factory", factory).partition(":")
    if not (module and colon and attribute):
        raise ArgumentError(
            f"factory: expected 'module:callable', got {factory!r}",
            local=factory,
            consequence="no engine was added",
            remedy="name a module, and what it has to be called in it",
        )
    with _LOCK:
        known = _FACTORIES.setdefault(name, factory)
    if known != factory:
        raise ArgumentError(
            f"engine name {name!r} is taken by {known!r}, cannot become {factory!r}",
            local=name,
            consequence="it stays what it was",
            remedy="choose another name",
        )


def create_engine(name: str, **options: object) -> TransferEngine:
    """Creates an engine.

    Args:
        name: "loopback", "memfabric", "mooncake", "nixl", or a name given to `register_engine`.
        **options: Passed to the engine's class.

    Raises:
        ArgumentError: The name is no text; an option that the engine does not take, or one that it needs and was not
            given.
        EngineError: No engine has this name, or the factory returned something that is no `TransferEngine` of this
            version.
        EngineUnavailable: Its factory cannot be imported, or its library cannot be loaded here.
    """
    check_text("name", name)
    with _LOCK:
        factory = _FACTORIES.get(name)
    if factory is None:
        raise EngineError(
            f"no transfer engine is named {name!r}",
            local=name,
            remedy=f"use one of {', '.join(engine_names())}, or register_engine() yours",
        )
    module, _, attribute = factory.partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except EngineError:
        raise
    except Exception as error:
        # A module may fail in any way while it is imported: a missing package, a system library, its own code.
        raise EngineUnavailable(
            f"transfer engine {name!r}: {factory!r} cannot be imported: {type(error).__name__}: {error}",
            local=factory,
            consequence="no bytes can be moved with it",
            remedy="install the package that provides it, or correct the import string given to register_engine()",
        ) from error
    _require_options(name, make, options)
    return require_engine(make(**options))


def _require_options(name: str, make: Callable[..., object], options: Mapping[str, object]) -> None:
    """Options may come from a file or the environment: a wrong one is named, with those that there are."""
    try:
        takes = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return  # a factory that does not say what it takes
    kinds = inspect.Parameter
    named = {key: item for key, item in takes.items() if item.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)}
    missing = [key for key, item in named.items() if item.default is kinds.empty and key not in options]
    anything = any(item.kind is kinds.VAR_KEYWORD for item in takes.values())
    unknown = [] if anything else [key for key in options if key not in named]
    if missing or unknown:
        says = [f"it needs {', '.join(missing)}"] if missing else []
        says += [f"it does not take {', '.join(unknown)}"] if unknown else []
        raise ArgumentError(
            f"options of engine {name!r}: {' and '.join(says)}",
            local=sorted(options),
            consequence="no engine was made",
            remedy=f"give {', '.join(missing)}" if missing else f"choose from {', '.join(named) or 'none'}",
        )
