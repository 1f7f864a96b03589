"""Packages that SGLang imports and that cannot be had here: importable for a while, an error as soon as one is used.

SGLang imports whole families of models and kernels before the classes that the tests here want. `install` lets those
imports pass for the packages in `NAMES`. `seal` ends that: from then on every call into such a package raises
`AbsentPackageUsed`, so that no test can pass on something that did not run. It owns no operator; what the classes call
of sgl_kernel_npu is under `stand_ins`, over the emulator's operators.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

NAMES = frozenset(
    {
        "sgl_kernel_npu",  # no wheel for a CPU; what the tests call of it is under stand_ins
        "torchair",  # inside torch_npu, but needs the graph engine of CANN (libfmk_parser.so)
        "torchvision",  # brings a CUDA torch
    }
)

_sealed = False


class AbsentPackageUsed(RuntimeError):
    """Something called into a package that is not installed."""


def _refuse(name: str) -> NoReturn:
    raise AbsentPackageUsed(
        f"{name}: called, but its package is not installed here; the code under test reached a path that these tests "
        "cannot prove: give it inputs that stay on NPU code, or add the operator to the emulator"
    )


class _Base:
    """What a class becomes that derives from an absent one."""


class _Absent:
    """One attribute of an absent package: may be decorated with, subclassed and annotated with during imports."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _sealed:
            _refuse(self.__name__)
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]  # a decorator
        return _Absent(f"{self.__name__}()")

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (_Base,)

    def __or__(self, other: Any) -> _Absent:
        return self

    __ror__ = __or__

    def __getitem__(self, key: Any) -> _Absent:
        return self

    def __iter__(self) -> Iterator[Any]:
        _refuse(self.__name__)

    def __bool__(self) -> bool:
        return False


class AbsentModule(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = _Absent(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: asked only for what is not installed."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


def install(more: Iterable[str] = ()) -> None:
    """Let imports of the packages in `NAMES`, and of `more`, pass where they are not installed.

    transformers is asked first whether torchvision is there, and remembers that it is not.
    """
    importlib.import_module("transformers.utils.import_utils").is_torchvision_available()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchair"]:
        del sys.modules[name]  # torch_npu's lazy module, which fails when it is touched
    sys.meta_path.append(_Finder(NAMES | {*more}))


def seal() -> None:
    """From now on a call into an absent package raises `AbsentPackageUsed`."""
    global _sealed
    _sealed = True
