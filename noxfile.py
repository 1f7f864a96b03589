"""The door to every task of this repository: `python -m nox -l` lists them.

Environments are made by uv, which links torch (several GB) from its cache instead of copying it, and are reused. The
packages of this repository are installed in editable form, so a second call starts within seconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PLANNER = Path("crates/kv-planner")
PLANNER_SHELL = PLANNER / "python"
PURE_PACKAGES = ("ascend-emulator", "kv-transfer", "kv-pool", "spec-kernels", "graph-runtime")
PYTHON_SOURCES = ("noxfile.py", "packages", "examples", "tests", "tools", str(PLANNER_SHELL), str(PLANNER / "benches"))
BENCHES = ("crates/*/benches", "packages/*/benches", "tools/benches")
DIST = ROOT / "dist"
ENGINES = (ROOT / "tests/engines", ROOT / "tests/engines_vllm")
# Property tests try the same examples in every run of `tests`; `soak` draws a seed and tries many more.
SEED = "20"
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
            if path.suffix in {".rs", ".toml"} and "target" not in path.parts:
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
    session.install("--no-deps", *_group("bare"))
    _debian_library(session, "libibverbs.so.1", "libibverbs1")


def _chosen(session: nox.Session) -> tuple[str, ...]:
    """The packages named after `--`, or all of them."""
    unknown = sorted(set(session.posargs) - {"kv-planner", *PURE_PACKAGES})
    if unknown:
        session.error(f"no such package: {', '.join(unknown)}; choose from kv-planner, {', '.join(PURE_PACKAGES)}")
    return tuple(session.posargs) or ("kv-planner", *PURE_PACKAGES)


def _pytest(session: nox.Session, *paths: str | Path) -> None:
    """Run pytest inside a network namespace that has loopback only (Mooncake listens on every interface).

    Two processes share the test files: most tests keep one core busy, and many wait.
    """
    command = ["python", "-m", "kv_transfer.isolation", "--", "python", "-m", "pytest", "-q", "-n2", "--dist=loadfile"]
    session.run(*command, f"--hypothesis-seed={SEED}", *map(str, paths), *session.posargs)


def _mypy(session: nox.Session, folder: Path) -> None:
    """Type-check one package; the path tells its conftest files apart and finds helpers beside the tests."""
    search = ":".join(str(path) for path in (folder / "src", folder / "tests", folder))
    session.run("mypy", str(folder / "src"), str(folder / "tests"), env={"MYPYPATH": search})


@nox.session
def tests(session: nox.Session) -> None:
    """All tests: the Rust core, every package on the CPU, and on the emulated NPU, and the end-to-end tests."""
    _install(session, "demo", "test")
    session.env["OMP_NUM_THREADS"] = "1"  # the tests start several processes; threads spinning at barriers slow all
    session.env["PROPTEST_RNG_SEED"] = SEED
    session.run("cargo", "test", "--quiet", "--manifest-path", str(PLANNER / "Cargo.toml"), external=True)
    packages = [ROOT / "packages" / name / "tests" for name in PURE_PACKAGES if name != "ascend-emulator"]
    npu = [folder / "npu" for folder in packages if (folder / "npu").is_dir()]
    apart = [*npu, *ENGINES]
    on_cpu: list[str | Path] = [PLANNER_SHELL / "tests", *packages, "tests", *(f"--ignore={path}" for path in apart)]
    _pytest(session, *on_cpu)
    _pytest(session, ROOT / "packages/ascend-emulator/tests", *npu)


@nox.session
def engines(session: nox.Session) -> None:
    """SGLang's own NPU classes on the emulated NPU, compared with ours. Optional: a large environment of its own."""
    _install(session, "test", "engines")
    session.install("--no-deps", *_group("engine"))
    session.env["OMP_NUM_THREADS"] = "1"
    _pytest(session, ENGINES[0])


@nox.session
def engines_vllm(session: nox.Session) -> None:
    """vLLM-Ascend's own model-runner pieces on the emulated NPU, compared with ours. Optional, as `engines` is."""
    _install(session, "test", "engines_vllm")
    session.install("--no-deps", *_group("engine_vllm"))
    session.env["OMP_NUM_THREADS"] = "1"
    _pytest(session, ENGINES[1])


@nox.session
@nox.parametrize("release", ["2.11", "2.13"])
def releases(session: nox.Session, release: str) -> None:
    """The emulator's tests beside another torch and torch_npu. Optional: an environment of its own for each pair."""
    session.env.update(ENVIRONMENT)
    session.env["OMP_NUM_THREADS"] = "1"
    group = f"release_{release.replace('.', '_')}"
    others = [line for line in _group("runtime") if line.startswith(("numpy", "pyyaml", "setuptools"))]
    session.install(*_group(group), *others, *_group("test"))
    session.install("--no-deps", *_group(f"{group}_npu"), "-e", "packages/ascend-emulator")
    tests = ROOT / "packages/ascend-emulator/tests"
    # The database of operators belongs to the release that `tests` runs.
    beside = f"--ignore={tests / 'test_emulator_opinfo.py'}"
    session.run("python", "-m", "pytest", "-q", f"--hypothesis-seed={SEED}", str(tests), beside, *session.posargs)


@nox.session
def golden(session: nox.Session) -> None:
    """Check the planner's golden files against SGLang's own functions and its compiled tree; `-- --write` records them.

    Optional, as `engines` is: that tree was built for another torch release than torch_npu pairs with.
    """
    session.env.update(ENVIRONMENT)
    session.install(*_group("golden"), *_group("engines"))
    session.install("--no-deps", *_group("engine"))
    extra = [] if "--write" in session.posargs else ["--check"]
    names = [word for word in session.posargs if word != "--write"]
    session.run("python", "-W", "ignore", "tools/record_golden.py", *extra, *names)


@nox.session
def demo(session: nox.Session) -> None:
    """Serve SmolLM2 with two prefill stages and a decode process on the emulated NPU, and check every token."""
    _install(session, "demo")
    session.env["PYTHONPATH"] = str(ROOT / "examples")
    session.env["DISAGGREGATED_SERVING_PARENT"] = str(os.getpid())  # the demo ends when this process does
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
    benches = [str(path) for path in sorted(ROOT.glob("*/*/benches/*.py"))]  # those in tools/ are found there
    session.run("mypy", "tools", *benches, env={"MYPYPATH": "tools:examples"})
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
    """Wheels and sdists of all packages under dist/, checked; the planner's for x86_64 and aarch64 (manylinux).

    `-- --require-all` makes it a failure when a wheel cannot be built on this machine.
    """
    session.install(*_group("release"))
    shutil.rmtree(DIST, ignore_errors=True)
    toolchains = ROOT / ".nox/debian-rust"
    extra = [word for word in session.posargs if word == "--require-all"]
    session.run("python", "tools/planner_wheels.py", "--out", str(DIST), "--toolchains", str(toolchains), *extra)
    for name in PURE_PACKAGES:
        session.run("uv", "build", "--quiet", "--out-dir", str(DIST), f"packages/{name}")
    (DIST / ".gitignore").unlink(missing_ok=True)
    files = sorted(str(path) for path in DIST.iterdir())
    session.run("twine", "check", "--strict", *files)
    for name in PURE_PACKAGES:
        stem = name.replace("-", "_")
        if not list(DIST.glob(f"{stem}-*-py3-none-any.whl")) or not list(DIST.glob(f"{stem}-*.tar.gz")):
            session.error(f"dist/ has no py3-none-any wheel, or no sdist, of {name}")
    for file in sorted(DIST.glob("kv_planner-*.whl")):
        session.run("auditwheel", "show", str(file))
        if "-cp310-abi3-manylinux" not in file.name:
            session.error(f"{file.name} is not an abi3 wheel with a manylinux tag")


@nox.session(requires=["build"])
def wheel(session: nox.Session) -> None:
    """Every wheel alone in an empty environment: imported with -I, then a fake engine that uses only this package.

    `-- kv-pool` chooses. torch is held to the release of the development environment, which uv has in its cache.
    """
    session.install("uv")
    constraints = Path(session.create_tmp()) / "constraints.txt"
    planner = next(DIST.glob(f"kv_planner-*_{platform.machine()}.whl"))
    torch = [line for line in _group("runtime") if line.startswith("torch==")]
    constraints.write_text("\n".join([f"kv-planner @ {planner.as_uri()}", *torch]) + "\n")
    for name in _chosen(session):
        stem, home = name.replace("-", "_"), ROOT / f".nox/wheel-{name}"
        session.log(f"{name}: an empty environment with its declared dependencies only")
        session.run(
            "uv", "venv", "--quiet", "--clear", "--python", f"{session.virtualenv.location}/bin/python", str(home)
        )
        python = str(home / "bin/python")
        file = planner if name == "kv-planner" else next(DIST.glob(f"{stem}-*.whl"))
        install = ["uv", "pip", "install", "--quiet", "--python", python, "--constraint", str(constraints)]
        session.run(*install, "--reinstall-package", "kv-planner", str(file))
        session.run("uv", "pip", "check", "--quiet", "--python", python)
        with session.chdir(session.create_tmp()):  # no sources within reach
            isolated = [python, "-I", "-W", "error"]
            session.run(*isolated, "-c", f"import {stem} as p; print(p.__file__)", external=True)
            session.run(*isolated, str(ROOT / f"tools/wheel_examples/{stem}.py"), external=True)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure (`-- planner`, `-- demo`) beside references in the same run; bench-results/, a table, 1 on a miss."""
    known = {path.stem: path for folder in BENCHES for path in sorted(ROOT.glob(f"{folder}/*.py"))}
    known.pop("planner_tree")  # it has a session of its own
    chosen = [known[name] for name in session.posargs if name in known]
    if not chosen or len(chosen) != len(session.posargs):
        session.error(f"name the benches to run: {', '.join(sorted(known))}")
    _install(session, "demo")
    session.env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tools"), str(ROOT / "examples")])
    session.env["OMP_NUM_THREADS"] = "1"  # the demo's processes share the cores; so does its reference
    for path in chosen:
        session.run("python", str(path))


@nox.session
def bench_tree(session: nox.Session) -> None:
    """The prefix index beside SGLang's compiled tree, in the environment of `golden`. Optional, as that is."""
    session.env.update(ENVIRONMENT)
    session.install(*_group("golden"), *_group("engines"), "rich")
    session.install("--no-deps", *_group("engine"))
    session.install("--no-deps", "--reinstall-package", "kv-planner", str(PLANNER_SHELL))
    session.env["PYTHONPATH"] = str(ROOT / "tools")
    session.run("python", "-W", "ignore", str(PLANNER / "benches/planner_tree.py"))


@nox.session
def soak(session: nox.Session) -> None:
    """The long proofs of one package (`-- kv-planner`) with their full counts; the log goes to docs/evidence/."""
    _install(session, "demo", "test")
    session.env["OMP_NUM_THREADS"] = "1"
    session.run("python", "tools/soak.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The pages under docs/ as a site in .nox/site, without warnings; `tests` runs their snippets."""
    session.install(*_group("docs"))
    session.run("mkdocs", "build", "--strict", "--quiet", "--site-dir", str(ROOT / ".nox" / "site"))


@nox.session
def local(session: nox.Session) -> None:
    """Before a commit: format, lint, types, and the CPU tests of one package (`-- kv-pool`) or of all."""
    _install(session, "demo", "test", "types", "lint")
    session.run("ruff", "format", *PYTHON_SOURCES)
    session.run("ruff", "check", "--fix", *PYTHON_SOURCES)
    for name in _chosen(session):
        folder = PLANNER_SHELL if name == "kv-planner" else Path("packages") / name
        if name != "kv-planner":
            _mypy(session, folder)
        session.run(
            "python", "-m", "kv_transfer.isolation", "--", "python", "-m", "pytest", "-q", str(folder / "tests")
        )
