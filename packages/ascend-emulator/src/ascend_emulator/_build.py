"""Builds the C runtime once per source, compiler and torch_npu, in the user's cache directory. It does not load it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from .errors import CompilerNotFoundError, RuntimeBuildError

__all__ = ["LIBRARIES", "build_runtime"]

_SOURCES = Path(__file__).parent / "runtime"
_HEADERS = Path("include") / "third_party" / "acl" / "inc"
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")

# Shared library (its SONAME is what torch_npu asks for) -> source files. The order is the order of loading.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "libascendcl.so": ("device.c", "memory.c", "stream.c", "graph.c", "copy.c", "launch.c", "support.c"),
    "libacl_op_compiler.so": ("compiler.c",),
    "libhccl.so": ("empty.c",),
    "libge_runner.so": ("empty.c",),
    "libgraph.so": ("empty.c",),
    "libacl_tdt_channel.so": ("empty.c",),
    "libatb.so": ("atb.c",),
}


def find_compiler() -> list[str]:
    """Command of the C compiler: the environment variable CC, else cc, gcc or clang.

    Raises:
        CompilerNotFoundError: none of them can be run.
    """
    chosen = os.environ.get("CC", "").split()
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise CompilerNotFoundError((f"CC={' '.join(chosen)}",))
        return chosen
    names = ("cc", "gcc", "clang")
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return [path]
    raise CompilerNotFoundError(("the environment variable CC", *names))


def cache_root() -> Path:
    """Folder for built libraries: $XDG_CACHE_HOME/ascend_emulator, else ~/.cache/ascend_emulator."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ascend_emulator"


def build_runtime(torch_npu_folder: Path, torch_npu_version: str) -> Path:
    """Folder that holds the built libraries; builds them when this machine has not done so yet.

    Safe when several processes do it at once: each builds in a folder of its own and renames it into place.

    Args:
        torch_npu_folder: installed package, whose headers give the exact signatures.
        torch_npu_version: its version, part of the key.

    Raises:
        CompilerNotFoundError: no C compiler.
        RuntimeBuildError: the compiler failed.
    """
    compiler = find_compiler()
    key = hashlib.sha256(torch_npu_version.encode())
    key.update(_compiler_identity(compiler))
    key.update(repr((_FLAGS, LIBRARIES)).encode())
    for source in sorted(_SOURCES.iterdir()):
        if source.suffix in (".c", ".h"):
            key.update(source.name.encode() + source.read_bytes())
    root = cache_root()
    target = root / key.hexdigest()[:20]
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(prefix="build-", dir=root))
    try:
        for name, sources in LIBRARIES.items():
            _compile(compiler, name, sources, torch_npu_folder / _HEADERS, working)
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


def _compile(compiler: list[str], name: str, sources: tuple[str, ...], headers: Path, folder: Path) -> None:
    command = [
        *compiler,
        *_FLAGS,
        f"-Wl,-soname,{name}",
        "-isystem",
        str(headers),
        "-o",
        str(folder / name),
        *(str(_SOURCES / source) for source in sources),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeBuildError(" ".join(command), result.stdout + result.stderr)
