"""A module with the names and signatures of memfabric_hybrid's wheel, which records every call and returns given codes.

`golden/memfabric_hybrid-1.3.0.txt` holds the signatures as the wheel's own docstrings spell them; run this file with a
Python that has the wheel to print them anew. It moves no bytes and stands for no device: it proves that the engine's
calls are ones that the library takes.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "memfabric_hybrid-1.3.0.txt"
_ENUM = re.compile(r"<\w+\.(\w+): (-?\d+)>")


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


def _parameters(text: str) -> list[inspect.Parameter]:
    found = []
    for part in re.split(r", (?=\w+: )", text):
        name, _, rest = part.partition(": ")
        kind, _, default = rest.partition(" = ")
        plain = int if "SupportsInt" in kind or "DataOpType" in kind else str if kind == "str" else object
        annotation = list if kind.startswith("collections.abc.Sequence") else plain
        enum = _ENUM.fullmatch(default)
        value = int(enum[2]) if enum else default.strip("'") if annotation is str else default
        found.append(
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=value if default else inspect.Parameter.empty,
                annotation=annotation,
            )
        )
    return found


def _method(name: str, signature: inspect.Signature, recorder: Recorder) -> Callable[..., int]:
    def call(*arguments: object, **options: object) -> int:
        bound = signature.bind(*arguments, **options)
        for own, value in bound.arguments.items():
            kind = signature.parameters[own].annotation
            if own != "self" and not isinstance(value, kind):
                raise TypeError(f"{name}(): incompatible function arguments: {own}={value!r} is no {kind.__name__}")
        recorder.calls.append((name, {own: value for own, value in bound.arguments.items() if own != "self"}))
        return recorder.answer(name)

    return call


def make_module(recorder: Recorder) -> types.ModuleType:
    """A module `memfabric_hybrid` whose TransferEngine records."""
    members: dict[str, object] = {}
    enums: dict[str, int] = {}
    for line in GOLDEN.read_text().splitlines():
        method = re.fullmatch(r"(\w+)\((.*)\) -> .*", line)
        if method:
            members[method[1]] = _method(method[1], inspect.Signature(_parameters(method[2])), recorder)
        elif line.startswith("TransDataOpType."):
            name, _, value = line.removeprefix("TransDataOpType.").partition(" = ")
            enums[name] = int(value)
    members["TransDataOpType"] = types.SimpleNamespace(**enums)
    module = types.ModuleType("memfabric_hybrid")
    module.__dict__["TransferEngine"] = type("TransferEngine", (), members)
    return module


def signatures() -> list[str]:
    """The lines of the golden file, from the wheel that is installed."""
    import importlib

    engine = importlib.import_module("memfabric_hybrid").TransferEngine
    lines = []
    for name in sorted(dir(engine)):
        text = (getattr(engine, name).__doc__ or "").strip().split("\n")[0]
        if not name.startswith("_") and text.startswith(f"{name}("):
            lines.append(text.replace("_pymf_transfer.", ""))
    members = engine.TransDataOpType.__members__
    return [*lines, *(f"TransDataOpType.{name} = {int(value)}" for name, value in members.items())]


if __name__ == "__main__":
    print("\n".join(signatures()), file=sys.stdout)
