"""Puts the compiled kernel of `native/fallback.cpp` in front of the Python kernels. It owns no meaning: they have it.

The library calls the Python kernel that was registered before it, so it needs neither Python's headers nor its ABI.
"""

from __future__ import annotations

import ctypes
from enum import IntFlag
from pathlib import Path

import torch
import torch_npu

from . import order
from ._build import FALLBACK, build_fallback
from ._schema import Plan
from .errors import RuntimeBuildError

__all__ = ["Compiled", "load"]


class Flag(IntFlag):
    """What the compiled kernel must know of an operator; the numbers are those of fallback.cpp."""

    STRICT = 1
    RESIZES = 2
    NEEDS_HOST = 4
    IS_INDEX = 8
    DRAWS = 16
    DRAWS_FROM_DEFAULT = 32
    TOUCHES_ROWS = 64


def _flags(plan: Plan) -> Flag:
    chosen = Flag(0)
    for flag, is_set in (
        (Flag.STRICT, plan.strict),
        (Flag.RESIZES, plan.resizes),
        (Flag.NEEDS_HOST, plan.needs_host),
        (Flag.IS_INDEX, plan.is_index),
        (Flag.DRAWS, plan.randomness == "generator"),
        (Flag.DRAWS_FROM_DEFAULT, plan.randomness == "default"),
        (Flag.TOUCHES_ROWS, order.touches_rows(plan)),
    ):
        chosen |= flag if is_set else Flag(0)
    return chosen


class Compiled:
    """The loaded library."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._take_originals = library.emulator_take_originals
        self._put_in_front = library.emulator_put_in_front
        self._name_missing = library.emulator_name_missing
        for function in (self._take_originals, self._put_in_front, self._name_missing):
            function.restype = ctypes.c_char_p
        self._put_in_front.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint]
        self._name_missing.argtypes = [ctypes.c_char_p, ctypes.c_char_p]

    def take_originals(self) -> None:
        """Keep torch_npu's own allocating kernels; call it before they are replaced."""
        self._check(self._take_originals())

    def put_in_front(self, plan: Plan) -> None:
        """Put a compiled kernel before the operator's Python kernel, which must be registered already."""
        name, _, overload = plan.name.partition(".")
        self._check(self._put_in_front(name.encode(), overload.encode(), int(_flags(plan))))

    def name_missing(self, name: str) -> None:
        """Let torch_npu's own kernel of an operator run, and name the operator when it launches a device kernel."""
        base, _, overload = name.partition(".")
        self._check(self._name_missing(base.encode(), overload.encode()))

    @staticmethod
    def _check(message: bytes | None) -> None:
        if message is not None:
            raise RuntimeBuildError(f"registering with {FALLBACK}", message.decode())


def load() -> Compiled:
    """Build the library when this machine has not done so for this torch and torch_npu, and load it.

    Raises:
        CompilerNotFoundError: no C++ compiler.
        RuntimeBuildError: the compiler failed, or what it made cannot be loaded.
    """
    torch_folder, torch_npu_folder = (Path(str(package.__file__)).parent for package in (torch, torch_npu))
    builds = (
        f"{torch.__version__} {torch.version.git_version} {torch.compiled_with_cxx11_abi()} {torch_npu.__version__}"
    )
    path = build_fallback(torch_folder, torch_npu_folder, builds) / FALLBACK
    try:
        return Compiled(ctypes.PyDLL(str(path)))
    except OSError as error:
        raise RuntimeBuildError(f"loading {path}", str(error)) from error
