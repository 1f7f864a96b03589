"""Builds the C runtime and the compiled operators once per source, compiler and package, in the user's cache directory.

The libraries link neither Python nor each other, so any Python takes them. It does not load them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import CompilerNotFoundError, RuntimeBuildError

__all__ = ["FALLBACK", "LIBRARIES", "OPTIONS", "build_fallback", "build_options", "build_runtime"]

_SOURCES = Path(__file__).parent / "runtime"
_HEADERS = Path("include") / "third_party" / "acl" / "inc"
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
_FALLBACK_SOURCES = Path(__file__).parent / "native"
_FALLBACK_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")

# Shared library (its SONAME is what torch_npu asks for) -> source files. The order is the order of loading.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "libascendcl.so": (
        "device.c",
        "memory.c",
        "clock.c",
        "stream.c",
        "order.c",
        "shadow.c",
        "graph.c",
        "copy.c",
        "launch.c",
        "unsupported.c",
        "support.c",
        "profiler.c",
    ),
    "libacl_op_compiler.so": ("compiler.c",),
    "libhccl.so": ("empty.c",),
    "libge_runner.so": ("empty.c",),
    "libgraph.so": ("empty.c",),
    "libacl_tdt_channel.so": ("empty.c",),
    "libatb.so": ("atb.c",),
    "libmsprofiler.so": ("profiler.c",),
    "libascend_hal.so": ("hal.c",),
}
FALLBACK = "libascend_emulator_operators.so"
OPTIONS = "libascend_emulator_options.so"


@dataclass(frozen=True)
class _Language:
    """A kind of compiler: the environment variable that chooses one, and the names to look for."""

    name: str
    variable: str
    commands: tuple[str, ...]


_C = _Language("C", "CC", ("cc", "gcc", "clang"))
_CXX = _Language("C++", "CXX", ("c++", "g++", "clang++"))


def find_compiler(language: _Language = _C) -> list[str]:
    """Command of a compiler: the environment variable CC (CXX), else cc, gcc or clang (c++, g++ or clang++).

    Raises:
        CompilerNotFoundError: none of them can be run.
    """
    chosen = os.environ.get(language.variable, "").split()
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise CompilerNotFoundError((f"{language.variable}={' '.join(chosen)}",), language.name)
        return chosen
    for name in language.commands:
        path = shutil.which(name)
        if path is not None:
            return [path]
    raise CompilerNotFoundError((f"the environment variable {language.variable}", *language.commands), language.name)


def cache_root() -> Path:
    """Folder for built libraries: $XDG_CACHE_HOME/ascend_emulator, else ~/.cache/ascend_emulator."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ascend_emulator"


def build_runtime(torch_npu_folder: Path, torch_npu_version: str) -> Path:
    """Folder that holds the C libraries; builds them when this machine has not done so yet.

    Safe when several processes do it at once: each builds in a folder of its own and renames it into place.

    Args:
        torch_npu_folder: installed package, whose headers give the exact signatures.
        torch_npu_version: its version, part of the key.

    Raises:
        CompilerNotFoundError: no C compiler.
        RuntimeBuildError: the compiler failed.
    """
    compiler = find_compiler()
    headers = ("-isystem", str(torch_npu_folder / _HEADERS))
    commands = {
        name: [*compiler, *_FLAGS, f"-Wl,-soname,{name}", *headers, *(str(_SOURCES / source) for source in sources)]
        for name, sources in LIBRARIES.items()
    }
    return _build(compiler, _SOURCES.iterdir(), commands, (torch_npu_version, repr((_FLAGS, LIBRARIES))))


def build_fallback(torch_folder: Path, torch_npu_folder: Path, builds: str) -> Path:
    """Folder that holds the compiled operators; builds them when this machine has not done so for this torch.

    Args:
        torch_folder: installed package, whose headers and libraries are used.
        torch_npu_folder: installed package, whose library is used.
        builds: names the builds of both (versions, commit, C++ ABI), part of the key.

    Raises:
        CompilerNotFoundError: no C++ compiler.
        RuntimeBuildError: the compiler failed.
    """
    compiler = find_compiler(_CXX)
    command = [
        *compiler, *_FALLBACK_FLAGS, "-isystem", str(torch_folder / "include"), str(_FALLBACK_SOURCES / "fallback.cpp"),
        "-L", str(torch_folder / "lib"), "-ltorch_cpu", "-lc10", "-L", str(torch_npu_folder / "lib"), "-ltorch_npu",
    ]  # fmt: skip
    return _build(
        compiler, _FALLBACK_SOURCES.iterdir(), {FALLBACK: command}, (builds, repr((_FALLBACK_FLAGS, FALLBACK)))
    )


def build_options() -> Path:
    """Folder that holds the library of `_allocator_options.py`; builds it when this machine has not done so yet.

    Raises:
        CompilerNotFoundError: no C++ compiler.
        RuntimeBuildError: the compiler failed.
    """
    compiler = find_compiler(_CXX)
    source = _FALLBACK_SOURCES / "allocator_options.cpp"
    return _build(compiler, [source], {OPTIONS: [*compiler, *_FALLBACK_FLAGS, str(source)]}, (repr(_FALLBACK_FLAGS),))


def _build(compiler: list[str], sources: Iterable[Path], commands: dict[str, list[str]], key: tuple[str, ...]) -> Path:
    """The folder of a set of libraries; each command gets its output file appended."""
    digest = hashlib.sha256(repr(key).encode())
    digest.update(_compiler_identity(compiler))
    for source in sorted(sources):
        if source.suffix in (".c", ".cpp", ".h"):
            digest.update(source.name.encode() + source.read_bytes())
    root = cache_root()
    target = root / digest.hexdigest()[:20]
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(prefix="build-", dir=root))
    try:
        for name, command in commands.items():
            _compile([*command, "-o", str(working / name)])
        try:
            working.rename(target)
        except OSError:
            if not target.is_dir():  # another process has not put it there: a real failure
                raise
    finally:
        shutil.rmtree(working, ignore_errors=True)
    return target


def _compiler_identity(compiler: list[str]) -> bytes:
    result = subprocess.run([*compiler, "--version"], capture_output=True, check=False)
    return " ".join(compiler).encode() + result.stdout


def _compile(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeBuildError(" ".join(command), result.stdout + result.stderr)
