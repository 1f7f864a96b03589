"""The real torch_npu on a CPU: emulated Ascend devices for tests, with checked graphs, updates and copies.

`install()` before torch_npu is imported, then use torch_npu as on a device. Importing this package imports neither
torch nor torch_npu. It does not emulate timing, the real kernels' numerics or formats other than ND.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ._engine_libraries import without_library
from ._install import install, is_compiled, is_installed, register_kernel
from .errors import (
    AlreadyLoadedError,
    CaptureError,
    CaptureFailedError,
    CompilerNotFoundError,
    DeadlockError,
    DeferredExecutionError,
    DoubleUpdateError,
    EmulatorError,
    FenceError,
    HostRaceError,
    InstallError,
    KernelNotFoundError,
    MissingPackageError,
    NotInstalledError,
    OperatorNotEmulatedError,
    RaceError,
    RuntimeBuildError,
    VersionPairError,
    WrongDeviceError,
)

__version__ = "0.1.0"
__all__ = [
    "AlreadyLoadedError",
    "CaptureError",
    "CaptureFailedError",
    "CompilerNotFoundError",
    "DeadlockError",
    "DeferredExecutionError",
    "DoubleUpdateError",
    "EmulatorError",
    "FenceError",
    "HostRaceError",
    "InstallError",
    "KernelNotFoundError",
    "MissingPackageError",
    "NotInstalledError",
    "OperatorNotEmulatedError",
    "RaceError",
    "RuntimeBuildError",
    "VersionPairError",
    "WrongDeviceError",
    "install",
    "is_compiled",
    "is_installed",
    "register_kernel",
    "without_library",
]


def __getattr__(name: str) -> ModuleType:
    if name in ("kernels", "memory", "order", "poison"):  # modules that import torch
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
