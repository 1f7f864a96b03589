"""Whether an object is an engine of this version, found before the first request and not by it.

Looks at names and signatures; it calls no method of an engine.
"""

from __future__ import annotations

import inspect
from typing import Final

from kv_transfer.engine import EngineCapabilities, TransferEngine
from kv_transfer.errors import EngineError
from kv_transfer.messages import SESSION_CHARACTERS

__all__ = ["require_engine"]

_CALLS: Final[dict[str, tuple[str, ...]]] = {
    "register": ("address", "nbytes"),
    "unregister": ("address",),
    "submit": ("peer", "batch"),
    "poll": ("handle",),
    "cancel": ("handle",),
    "close": (),
}
_REMEDY = "bring the engine to the TransferEngine protocol of the installed kv-transfer"


def require_engine(engine: object) -> TransferEngine:
    """The object itself, as an engine.

    Raises:
        EngineError: A member is missing, a method cannot be called as this version calls it, or a property is of
            another type; the text names the first one.
    """
    kind = type(engine).__name__
    missing = [name for name in ("name", "session", "capabilities", *_CALLS) if not hasattr(engine, name)]
    if missing or not isinstance(engine, TransferEngine):
        raise EngineError(
            f"{kind} does not satisfy TransferEngine: it lacks {', '.join(missing)}",
            local=", ".join(missing),
            consequence="a request would fail in the middle of a transfer",
            remedy=_REMEDY,
        )
    for name, most in (("name", 256), ("session", SESSION_CHARACTERS)):
        value: object = getattr(engine, name)
        if not (isinstance(value, str) and 0 < len(value) <= most):
            shown = f"{len(value)} characters" if isinstance(value, str) and value else repr(value)
            raise _misfit(f"{kind}.{name}", f"a text of 1 to {most} characters, got {shown}", shown)
    capabilities: object = engine.capabilities
    if not isinstance(capabilities, EngineCapabilities):
        found = type(capabilities).__name__
        raise _misfit(f"{kind}.capabilities", f"EngineCapabilities, got {found}", found)
    for name, arguments in _CALLS.items():
        wanted = f"{name}({', '.join(arguments)})"
        method = getattr(engine, name)
        if not callable(method):
            raise _misfit(f"{kind}.{name}", f"a method {wanted}, got {method!r}", method)
        try:
            signature = inspect.signature(method)
        except ValueError:
            continue  # Compiled methods may have no signature to look at.
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise _misfit(
                f"{kind}.{name}", f"a method that can be called as {wanted}, got {name}{signature}: {error}", signature
            ) from None
    return engine


def _misfit(what: str, expected: str, value: object) -> EngineError:
    return EngineError(
        f"{what}: expected {expected}",
        local=str(value),
        consequence="the first request would fail in the middle of a transfer",
        remedy=_REMEDY,
    )
