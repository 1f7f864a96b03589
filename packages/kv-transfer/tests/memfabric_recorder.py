"""A module with the names and signatures of memfabric_hybrid's wheel, which records every call and returns given codes.

`golden/memfabric.json` holds them, as `tools/golden/memfabric.py` reads them from the wheel. It moves no bytes and
stands for no device: it proves that the engine's calls are ones that the library takes.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "memfabric.json").read_text())
_KINDS = {"text": str, "integer": int, "integers": list, "TransDataOpType": int}


class Recorder:
    """What was called, and what the calls return.

    Attributes:
        calls: Name and bound arguments of each call, in order.
        codes: Next return values by name; 0 afterwards.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, object]]] = []
        self.codes: dict[str, list[int]] = {}

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def answer(self, name: str) -> int:
        return self.codes[name].pop(0) if self.codes.get(name) else 0


def _signature(parameters: list[dict[str, Any]]) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own = [
        inspect.Parameter(
            fact["name"],
            kind,
            default=fact.get("default", inspect.Parameter.empty),
            annotation=_KINDS.get(fact["kind"], object),
        )
        for fact in parameters
    ]
    return inspect.Signature([inspect.Parameter("self", kind), *own])


def _method(name: str, signature: inspect.Signature, recorder: Recorder) -> Callable[..., int]:
    def call(*arguments: object, **options: object) -> int:
        bound = signature.bind(*arguments, **options)
        for own, value in bound.arguments.items():
            kind = signature.parameters[own].annotation
            if own != "self" and not isinstance(value, kind):
                raise TypeError(f"{name}(): incompatible function arguments: {own}={value!r} is no {kind.__name__}")
        recorder.calls.append((name, {own: value for own, value in bound.arguments.items() if own != "self"}))
        return recorder.answer(name)

    call.__dict__["__signature__"] = signature
    return call


def make_module(recorder: Recorder) -> types.ModuleType:
    """A module `memfabric_hybrid` whose TransferEngine records."""
    members: dict[str, object] = {
        fact["name"]: _method(fact["name"], _signature(fact["parameters"]), recorder) for fact in FACTS["methods"]
    }
    members["TransDataOpType"] = types.SimpleNamespace(**{fact["name"]: fact["value"] for fact in FACTS["transports"]})
    module = types.ModuleType("memfabric_hybrid")
    module.__dict__["TransferEngine"] = type("TransferEngine", (), members)
    return module
