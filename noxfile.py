"""The door to every task of this repository: `python -m nox -l` lists them.

Environments are made by uv, which links torch (several GB) from its cache instead of copying it, and are reused. The
packages of this repository are installed in editable form, so a second call starts within seconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PLANNER = Path("crates/kv-planner")
PLANNER_SHELL = PLANNER / "python"
PURE_PACKAGES = ("ascend-emulator", "kv-transfer", "kv-pool", "spec-kernels", "graph-runtime")
PYTHON_SOURCES = ("noxfile.py", "packages", "examples", "tests", str(PLANNER_SHELL))
# With torch_npu installed, `import torch` loads it, which fails without Ascend libraries. Programs that want the
# emulated device ask ascend_emulator for it, in their own process.
ENVIRONMENT = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests"]


def _group(name: str) -> list[str]:
    return list(nox.project.dependency_groups(PROJECT, name))


def _digest(*folders: Path) -> str:
    """A fingerprint of the sources that a compiled extension is built from."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in {".rs", ".toml", ".lock"} and "target" not in path.parts:
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def _debian_library(session: nox.Session, soname: str, package: str) -> None:
    """See that the shared library `soname` can be loaded; install Debian's `package` where we may."""
    try:
        ctypes.CDLL(soname)
    except OSError:
        apt = shutil.which("apt-get")
        root = [] if os.geteuid() == 0 else ["sudo", "-n"]
        if apt is None or (root and shutil.which("sudo") is None):
            session.error(f"{soname} is missing: install the system package that holds it (Debian: {package})")
        session.log(f"{soname} is missing: installing Debian's {package}")
        session.run(*root, apt, "update", "-qq", external=True, silent=True)
        session.run(*root, apt, "install", "-y", "-qq", "--no-install-recommends", package, external=True, silent=True)


def _install(session: nox.Session, *groups: str) -> None:
    """Install the shared dependencies, the named groups and all packages of this repository."""
    session.env.update(ENVIRONMENT)
    wanted = [requirement for name in ("runtime", *groups) for requirement in _group(name)]
    session.install(*wanted)
    stamp = Path(session.virtualenv.location) / "kv-planner.sources"
    digest = _digest(ROOT / PLANNER)
    if not stamp.exists() or stamp.read_text() != digest:
        session.install("--no-deps", "--reinstall-package", "kv-planner", "-e", str(PLANNER_SHELL))
        stamp.write_text(digest)
    session.install("--no-deps", *(part for name in PURE_PACKAGES for part in ("-e", f"packages/{name}")))
    session.install("--no-deps", *_group("model"))
    _debian_library(session, "libibverbs.so.1", "libibverbs1")


def _pytest(session: nox.Session, *paths: str | Path) -> None:
    """Run pytest inside a network namespace that has loopback only (Mooncake listens on every interface)."""
    command = ["python", "-m", "kv_transfer.isolation", "--", "python", "-m", "pytest", "-q"]
    session.run(*command, *map(str, paths), *session.posargs)


def _mypy(session: nox.Session, folder: Path) -> None:
    """Type-check one package; the path tells its conftest files apart and finds helpers beside the tests."""
    search = ":".join(str(path) for path in (folder / "src", folder / "tests", folder))
    session.run("mypy", str(folder / "src"), str(folder / "tests"), env={"MYPYPATH": search})


@nox.session
def tests(session: nox.Session) -> None:
    """All tests: the Rust core, every package on the CPU, and on the emulated NPU, and the end-to-end tests."""
    _install(session, "demo", "test")
    session.env["OMP_NUM_THREADS"] = "1"  # the tests start several processes; threads spinning at barriers slow all
    session.run("cargo", "test", "--quiet", "--manifest-path", str(PLANNER / "Cargo.toml"), external=True)
    packages = [ROOT / "packages" / name / "tests" for name in PURE_PACKAGES if name != "ascend-emulator"]
    npu = [folder / "npu" for folder in packages if (folder / "npu").is_dir()]
    on_cpu = [PLANNER_SHELL / "tests", *packages, "tests", *(f"--ignore={folder}" for folder in npu)]
    _pytest(session, *on_cpu)
    _pytest(session, ROOT / "packages/ascend-emulator/tests", *npu)


@nox.session
def demo(session: nox.Session) -> None:
    """Serve SmolLM2 with two prefill stages and a decode process on the emulated NPU, and check every token."""
    _install(session, "demo")
    session.env["PYTHONPATH"] = str(ROOT / "examples")
    session.run(
        "python", "-m", "kv_transfer.isolation", "--", "python", "-m", "disaggregated_serving", *session.posargs
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting and lint rules, Python and Rust."""
    session.install(*_group("lint"))
    session.run("ruff", "format", "--check", *PYTHON_SOURCES)
    session.run("ruff", "check", *PYTHON_SOURCES)
    manifest = str(PLANNER / "Cargo.toml")
    session.run("cargo", "fmt", "--all", "--check", "--manifest-path", manifest, external=True)


@nox.session
def types(session: nox.Session) -> None:
    """Strict mypy over every package, the examples and the tests, and the planner's stubs against its extension."""
    _install(session, "demo", "test", "types")
    for name in PURE_PACKAGES:
        _mypy(session, Path("packages") / name)
    session.run("mypy", "noxfile.py", "examples/disaggregated_serving", "tests")
    session.run("python", "-m", "mypy.stubtest", "kv_planner")


@nox.session
def rust(session: nox.Session) -> None:
    """The Rust core: clippy without warnings, and its tests in the release profile."""
    manifest = str(PLANNER / "Cargo.toml")
    command = ["clippy", "--quiet", "--workspace", "--all-targets", "--manifest-path", manifest, "--", "-D", "warnings"]
    session.run("cargo", *command, external=True)
    session.run("cargo", "test", "--quiet", "--release", "--manifest-path", manifest, external=True)


@nox.session
def build(session: nox.Session) -> None:
    """Wheels and source distributions of all packages, under dist/."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for folder in (PLANNER_SHELL, *(Path("packages") / name for name in PURE_PACKAGES)):
        session.run("uv", "build", "--quiet", "--out-dir", "dist", str(folder), external=True)
    for path in sorted((ROOT / "dist").glob("*.*")):
        session.log(path.name)


@nox.session
def local(session: nox.Session) -> None:
    """Before a commit: format, lint, types, and the CPU tests of one package (`-- kv-pool`) or of all."""
    _install(session, "demo", "test", "types", "lint")
    session.run("ruff", "format", *PYTHON_SOURCES)
    session.run("ruff", "check", "--fix", *PYTHON_SOURCES)
    chosen = [name for name in session.posargs if name in (*PURE_PACKAGES, "kv-planner")]
    unknown = sorted(set(session.posargs) - set(chosen))
    if unknown:
        session.error(f"no such package: {', '.join(unknown)}; choose from kv-planner, {', '.join(PURE_PACKAGES)}")
    for name in chosen or ("kv-planner", *PURE_PACKAGES):
        folder = PLANNER_SHELL if name == "kv-planner" else Path("packages") / name
        if name != "kv-planner":
            _mypy(session, folder)
        session.run(
            "python", "-m", "kv_transfer.isolation", "--", "python", "-m", "pytest", "-q", str(folder / "tests")
        )
