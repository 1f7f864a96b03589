"""Puts the real torch_npu on the emulated runtime: environment, build, load, import, kernels, in this order."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._build import build_runtime
from ._config import compiled_from_environment
from ._quiet import without_lines, without_native_lines
from ._runtime import runtime
from .errors import (
    AlreadyLoadedError,
    CompilerNotFoundError,
    MissingPackageError,
    NotInstalledError,
    RuntimeBuildError,
    VersionPairError,
)

__all__ = ["install", "is_compiled", "is_installed", "register_kernel"]

# torch release -> torch_npu release that was tried on this runtime.
_PAIRS = {version: version for version in ("2.11.0", "2.12.0", "2.13.0")}
SUPPORTED = ", ".join(f"torch=={torch} with torch-npu=={npu}" for torch, npu in _PAIRS.items())
_MAX_DEVICES = 16
_DEFAULTS = {"devices": 2, "memory_bytes": 16 << 30}

_lock = threading.RLock()
_settings: dict[str, Any] = {}
_pending_kernels: dict[str, Callable[..., Any]] = {}


def is_installed() -> bool:
    """Whether `install()` has run in this process."""
    return bool(_settings)


def is_compiled() -> bool:
    """Whether aten operators run through the compiled kernel, not through the slower Python kernels.

    Raises:
        NotInstalledError: before `install()`.
    """
    if not _settings:
        raise NotInstalledError("is_compiled()")
    return bool(_settings["compiled"])


def install(
    *,
    devices: int = 2,
    memory_bytes: int = 16 << 30,
    wait_seconds: float = 10.0,
    compiled: bool | None = None,
    check_order: bool | None = None,
    cann: str | None = None,
    chip: str | None = None,
) -> None:
    """Load the real torch_npu with emulated devices `npu:0` … `npu:devices-1`.

    Call it before the first import of torch_npu. torch may be imported already, if its autoload was off. Calling it
    again does nothing but change `wait_seconds`, `check_order` and what it stands for.

    Args:
        devices: number of devices, 1 to 16.
        memory_bytes: memory of each device; host memory is used only as it is allocated.
        wait_seconds: how long a wait of the host goes on without progress before it is a `DeadlockError`.
        compiled: whether aten operators run through a compiled kernel (about 5 µs an operator beside the CPU's) or
            through Python kernels with the same results (about 50 µs). None: as the environment variable
            ASCEND_EMULATOR_COMPILED says (1 or 0), else compiled where a C++ compiler is found. An installed emulator
            keeps what it has.
        check_order: whether two streams that touch the same bytes without an event between them are a `RaceError`.
            None: yes at the first call, no change later; `order.enable()` and `order.unchecked()` switch it, too.
        cann: CANN release to stand for, such as "8.5" or "9.0"; None: what any release refuses is refused.
        chip: chip to stand for, "910B", "910C" or "950" (or A2, A3, A5); None: what any chip refuses is refused.

    Raises:
        AlreadyLoadedError: torch_npu was imported before.
        MissingPackageError: torch or torch_npu is not installed.
        VersionPairError: they are not a supported pair.
        CompilerNotFoundError: no C compiler, or no C++ compiler although `compiled` asks for it.
        RuntimeBuildError: the C compiler failed, or the C++ compiler although `compiled` asks for it.
        ValueError: an argument is out of range, or differs from that of the first call.
    """
    if not 1 <= devices <= _MAX_DEVICES:
        raise ValueError(f"devices: expected 1 to {_MAX_DEVICES}, got {devices}")
    if memory_bytes < 2 << 20:
        raise ValueError(
            f"memory_bytes: expected at least {2 << 20}, a block of torch_npu's allocator, got {memory_bytes}"
        )
    if wait_seconds <= 0:
        raise ValueError(f"wait_seconds: expected more than 0, got {wait_seconds}")
    with _lock:
        if _settings:
            _again(devices=devices, memory_bytes=memory_bytes, wait_seconds=wait_seconds)
            if check_order is not None:
                importlib.import_module(".order", __package__).enable(check_order)
            _pose(cann, chip)
            return
        if "torch_npu" in sys.modules:
            raise AlreadyLoadedError
        folder, version = _check_versions()
        libraries = build_runtime(folder, version)
        _set_environment()
        runtime.load(libraries, devices=devices, memory_bytes=memory_bytes)
        _import_quietly()
        in_front = _compiled_kernels(compiled_from_environment() if compiled is None else compiled)
        _register(wait_seconds, in_front)
        _first_allocation()
        _pose(cann, chip)
        importlib.import_module(".order", __package__).enable(check_order is not False)
        _settings.update(devices=devices, memory_bytes=memory_bytes, compiled=in_front is not None)
        for name, kernel in list(_pending_kernels.items()):
            register_kernel(name, kernel)
        _pending_kernels.clear()


def register_kernel(name: str, kernel: Callable[..., Any]) -> None:
    """Give an NPU operator a kernel.

    Args:
        name: full operator name, for example "npu::npu_rms_norm" or "npu::npu_fused_infer_attention_score_v2.out".
        kernel: takes the operator's arguments with every npu tensor replaced by a CPU tensor over the same bytes,
        returns
            CPU tensors or writes its arguments in place as the schema says. Called in stream order, at replays too. It
            must not change the shape or storage of its arguments (no `resize_`, `unsqueeze_`).

    Raises:
        KernelNotFoundError: the operator does not exist (after `install()`; before it, `install()` raises).
    """
    with _lock:
        if not _settings:
            _pending_kernels[name] = kernel
            return
        importlib.import_module("._fallback", __package__).register(name, kernel)


def _again(*, devices: int, memory_bytes: int, wait_seconds: float) -> None:
    for name, value in (("devices", devices), ("memory_bytes", memory_bytes)):
        if value != _settings[name] and value != _DEFAULTS[name]:
            raise ValueError(
                f"{name}: the emulator is installed with {_settings[name]} and cannot change to {value} in this process"
            )
    importlib.import_module("._queue", __package__).scheduler.wait_seconds = wait_seconds


def _pose(cann: str | None, chip: str | None) -> None:
    if cann is not None or chip is not None:
        importlib.import_module(".kernels.pose", __package__).set_pose(cann=cann, chip=chip)


def _check_versions() -> tuple[Path, str]:
    versions = {}
    for package in ("torch", "torch_npu"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise MissingPackageError(package, SUPPORTED) from None
    torch_version, npu_version = versions["torch"], versions["torch_npu"]
    if _PAIRS.get(torch_version.partition("+")[0]) != npu_version:
        raise VersionPairError(torch_version, npu_version, SUPPORTED)
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError("torch_npu", SUPPORTED)
    return Path(next(iter(spec.submodule_search_locations))), npu_version


def _set_environment() -> None:
    os.environ["TASK_QUEUE_ENABLE"] = "0"  # runtime calls in issue order, on the calling thread
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def _import_quietly() -> None:
    """Import torch and torch_npu without torch_npu's line about the missing toolkit and its files' syntax warnings."""
    importlib.import_module("torch")
    importlib.import_module("._allocator_options", __package__).make_room()
    with without_lines("ASCEND_HOME_PATH environment variable is not set"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch_npu's own source, about which nobody here can do anything
        importlib.import_module("torch_npu")


def _first_allocation() -> None:
    torch = importlib.import_module("torch")
    with without_native_lines(b"require processing for 32 padding size"):
        torch.empty(1, device="npu:0")
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()


def _compiled_kernels(wanted: bool | None) -> Any:
    """The loaded library of compiled kernels; None: the Python kernels do it all."""
    if wanted is False:
        return None
    try:
        return importlib.import_module("._native", __package__).load()
    except CompilerNotFoundError:
        if wanted:
            raise
    except RuntimeBuildError as error:
        if wanted:
            raise
        warnings.warn(f"operators run through the slower Python kernels: {error}", RuntimeWarning, stacklevel=3)
    return None


def _register(wait_seconds: float, in_front: Any) -> None:
    importlib.import_module("._calls", __package__).connect()
    importlib.import_module("._queue", __package__).scheduler.wait_seconds = wait_seconds
    importlib.import_module("._waits", __package__).install_waits()
    fallback = importlib.import_module("._fallback", __package__)
    fallback.register_aten(in_front)
    kernels: dict[str, Callable[..., Any]] = importlib.import_module(".kernels", __package__).REGISTRY
    for name, kernel in kernels.items():
        fallback.register(name, kernel)
    importlib.import_module("._defined_ops", __package__).implement()
