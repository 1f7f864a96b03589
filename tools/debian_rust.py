"""Owns a Rust compiler, with the standard library of another architecture, from Debian's packages in a folder.

rustup is the ordinary source of both. Where it cannot reach its server, Debian's packages can stand in: they are
fetched with apt (signatures checked, with the system's sources), unpacked below the given folder and never installed,
so neither the system nor rustup's toolchain changes. It does not build anything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

# Debian carries a second, newer compiler for its browsers.
COMPILERS = (("rustc-web", "libstd-rust-web-dev"), ("rustc", "libstd-rust-dev"))
ARCHITECTURES = {"x86_64-unknown-linux-gnu": "amd64", "aarch64-unknown-linux-gnu": "arm64"}


class Unavailable(RuntimeError):
    """Debian cannot provide the compiler here; the text says why."""


@dataclass(frozen=True)
class Toolchain:
    """A compiler below a folder.

    Attributes:
        version: what `rustc --version` prints.
        env: variables that make cargo use it.
    """

    version: str
    env: dict[str, str]


def _read(*command: str | Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, env={**os.environ, **(env or {})}
    )
    if done.returncode != 0:
        text = re.sub(r"https?://\S+", "…", done.stderr.strip())
        raise Unavailable(f"`{Path(command[0]).name} …` failed: {text.splitlines()[-1] if text else done.returncode}")
    return done.stdout


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _candidate(options: list[str], minimum: str) -> tuple[str, str, str]:
    """(compiler package, library package, version) of the first pair that is new enough."""
    seen = []
    for compiler, library in COMPILERS:
        listing = _read("apt-cache", *options, "policy", compiler)
        found = re.search(r"Candidate: (?:\d+:)?([\d.]+)(\S*)", listing)
        if found is None:
            continue
        seen.append(f"{compiler} {found[1]}")
        if _numbers(found[1]) >= _numbers(minimum):
            return compiler, library, found[1] + found[2]
    raise Unavailable(
        f"Debian's sources here offer {', '.join(seen) or 'no rustc'}; the crate needs {minimum} or later"
    )


def provide(folder: Path, target: str, *, host: str, minimum: str) -> Toolchain:
    """Unpack a compiler that runs on `host` and builds for `target`.

    Args:
        folder: owned by this function; what it holds already is used again.
        target: Rust target triple.
        host: Rust triple of this machine.
        minimum: oldest usable Rust version.

    Raises:
        Unavailable: no apt, no such architecture, no package that is new enough, or a download that failed.
    """
    missing = [tool for tool in ("apt-get", "apt-cache", "dpkg-deb", "cc") if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{', '.join(missing)} not found: this is no Debian with a C compiler")
    if target not in ARCHITECTURES or host not in ARCHITECTURES:
        raise Unavailable(f"no Debian architecture is known here for {host} → {target}")
    native, foreign = ARCHITECTURES[host], ARCHITECTURES[target]
    root = folder / "root"
    if not (folder / f"complete-{foreign}").exists():
        _unpack(folder, root, native, foreign, minimum)
    libraries = {str(path.parent) for path in root.glob("usr/lib/*-linux-gnu/lib*.so*")}
    env = {"RUSTC": str(root / "usr/bin/rustc"), "LD_LIBRARY_PATH": ":".join(sorted(libraries))}
    return Toolchain(_read(env["RUSTC"], "--version", env=env).strip(), env)


def _unpack(folder: Path, root: Path, native: str, foreign: str, minimum: str) -> None:
    lists, cache = folder / "state", folder / "cache"
    for path in (lists / "lists/partial", cache / "archives/partial", root):
        path.mkdir(parents=True, exist_ok=True)
    settings = {
        "APT::Architectures": f"{native},{foreign}",
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "1",
        "Dir::State": str(lists.resolve()),
        "Dir::State::status": "/var/lib/dpkg/status",
        "Dir::Cache": str(cache.resolve()),
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    options += ["-o", f"APT::Architectures::={native}", "-o", f"APT::Architectures::={foreign}"]
    _read("apt-get", *options, "update", "-qq")
    compiler, library, version = _candidate(options, minimum)
    # The compiler with what it needs to run here, and only the library itself of the other architecture.
    wanted = [f"{compiler}:{native}={version}"]
    _read("apt-get", *options, "install", "-qq", "-y", "--no-install-recommends", "--download-only", *wanted)
    _read("bash", "-c", 'cd "$1" && shift && apt-get "$@"', "-", cache / "archives", *options, "download", "-qq",
          f"{library}:{foreign}={version}")  # fmt: skip
    for package in sorted((cache / "archives").glob("*.deb")):
        _read("dpkg-deb", "-x", package, root)
    (folder / f"complete-{foreign}").write_text(version + "\n")
    shutil.rmtree(cache)
    shutil.rmtree(lists)
