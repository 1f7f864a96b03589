"""What memfabric_hybrid's wheel says of its calls: their signatures, as its docstrings spell them, and its transports.

Only imports the wheel, which needs no driver for that; nothing of it is started.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Any

__all__ = ["record"]

_CALL = re.compile(r"(\w+)\((.*)\) -> (.+)")
_MEMBER = re.compile(r"<[\w.]+\.\w+: (-?\d+)>")
_KINDS = {"str": "text", "typing.SupportsInt": "integer", "collections.abc.Sequence[typing.SupportsInt]": "integers"}


def _parameter(text: str) -> dict[str, Any]:
    name, _, rest = text.partition(": ")
    kind, _, default = rest.partition(" = ")
    found: dict[str, Any] = {"name": name, "kind": _KINDS.get(kind, kind)}
    if default:
        member = _MEMBER.fullmatch(default)
        found["default"] = int(member[1]) if member else default.strip("'") if kind == "str" else int(default)
    return found


def record() -> dict[str, Any]:
    """Name, parameters and result of each method; a parameter without a default is required."""
    engine = importlib.import_module("memfabric_hybrid").TransferEngine
    methods = []
    for name in sorted(name for name in dir(engine) if not name.startswith("_")):
        text = (getattr(engine, name).__doc__ or "").strip().split("\n")[0].replace("_pymf_transfer.", "")
        call = _CALL.fullmatch(text)
        if call:
            own, *parts = re.split(r", (?=\w+: )", call[2])
            if call[1] != name or not own.startswith("self: "):
                raise ValueError(f"{name}: a signature of another form: {text!r}")
            methods.append({"name": name, "parameters": [_parameter(part) for part in parts], "returns": call[3]})
    transports = [{"name": name, "value": int(value)} for name, value in engine.TransDataOpType.__members__.items()]
    version = importlib.metadata.version("memfabric_hybrid")
    return {"engine": f"memfabric_hybrid {version}", "methods": methods, "transports": transports}
