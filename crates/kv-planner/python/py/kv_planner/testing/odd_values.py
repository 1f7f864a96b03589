"""Owns values that no argument should take by accident, and the walk over every public callable that tries them.

A table says how each callable is called rightly and which odd values an argument may take; all others must be refused
by an error that names the argument. A public argument that the table does not have is a failure of the walk.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

__all__ = [
    "ANY", "LISTED", "NUMBER", "ODD", "OPTIONAL", "SECONDS", "Case", "arguments", "missing", "public", "wrongs",
]  # fmt: skip

ODD: Mapping[str, object] = {
    "None": None,
    "true": True,
    "numpy's true": np.True_,
    "bools": [True],
    "-1": -1,
    "0": 0,
    "fraction": 1.5,
    "nan": float("nan"),
    "2**64": 2**64,
    "many digits": 10**5000,
    "text": "x",
    "empty text": "",
    "half a pair": "\ud800",
    "bytes": b"x",
    "empty list": [],
    "ragged": [[1], [1, 2]],
    "fractions": [1.5],
    "objects": np.array([1, None], object),
    "mapping": {"x": "y"},
    "object": object(),
}
"""Values by what is odd about them."""
NUMBER = ("0",)
SECONDS = ("0", "fraction")
OPTIONAL = ("None",)
LISTED = ("None", "empty list")
ANY = tuple(ODD)


@dataclasses.dataclass
class Case:
    """One callable.

    Attributes:
        call: It.
        valid: Arguments of a call that is right.
        takes: Odd values that an argument takes, by argument.
        says: Words by which its error names an argument, where that is not its name.
    """

    call: Callable[..., object]
    valid: Mapping[str, object]
    takes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    says: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def tries(self) -> Iterator[tuple[str, str, dict[str, object]]]:
        """Argument, what is odd, and the arguments of a call that must be refused."""
        for argument in self.valid:
            takes = self.takes.get(argument, ())
            for what, value in ODD.items():
                if what not in takes:
                    yield argument, what, {**self.valid, argument: value}


def public(module: ModuleType) -> dict[str, Callable[..., object]]:
    """Functions, constructors and methods with arguments that a module offers, by name."""
    found: dict[str, Callable[..., object]] = {}
    for name in module.__all__:
        held: Any = getattr(module, name)
        if inspect.isclass(held):
            if issubclass(held, BaseException) or getattr(held, "_is_protocol", False) or hasattr(held, "__members__"):
                continue
            found[name] = held
            for method, function in inspect.getmembers(held, inspect.isroutine):
                own = getattr(function, "__qualname__", "") == f"{held.__name__}.{method}"
                if own and not method.startswith("_"):
                    found[f"{name}.{method}"] = function
        elif inspect.isroutine(held):
            found[name] = held
    return {name: call for name, call in found.items() if arguments(call)}


def arguments(call: Callable[..., object]) -> set[str]:
    """Names of the arguments that a caller gives."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {
        name
        for name, parameter in inspect.signature(call).parameters.items()
        if name not in ("self", "cls") and parameter.kind not in kinds
    }


def missing(module: ModuleType, cases: Mapping[str, Case], exempt: Mapping[str, str]) -> list[str]:
    """Public arguments that neither the table nor the exemptions have, and those of the table that do not exist."""
    found = []
    for name, call in public(module).items():
        if name in exempt:
            continue
        own = set(cases[name].valid) if name in cases else set()
        found += [f"{name}({argument})" for argument in sorted(arguments(call) ^ own)]
    return found


def wrongs(cases: Mapping[str, Case], typed: tuple[type[BaseException], ...]) -> list[str]:
    """Calls that were not refused by name."""
    found = []
    for name, case in cases.items():
        for argument, what, values in case.tries():
            try:
                result = case.call(**values)
                found.append(f"{name}({argument}={what}) was taken: {result!r:.60}")
                close = getattr(result, "close", None)
                if callable(close):
                    close()
            except typed as error:
                if case.says.get(argument, argument).lower() not in str(error).lower():
                    found.append(f"{name}({argument}={what}) does not name it: {error}")
            except Exception as error:  # what this walk is for
                found.append(f"{name}({argument}={what}): {type(error).__name__}: {error}")
    return found
