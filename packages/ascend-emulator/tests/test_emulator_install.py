"""Installing: what is checked, how it is said, building once, and fresh processes."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import threading
from pathlib import Path

import ascend_emulator as emulator
import pytest
from ascend_emulator import _build, _config, _install


def test_installing_again_changes_nothing() -> None:
    emulator.install()
    emulator.install(devices=2)
    assert emulator.is_installed()
    assert os.environ["TASK_QUEUE_ENABLE"] == "0"
    with pytest.raises(ValueError, match="devices: the emulator is installed with 2 and cannot change to 3"):
        emulator.install(devices=3)
    with pytest.raises(ValueError, match="memory_bytes"):
        emulator.install(memory_bytes=1 << 30)


@pytest.mark.parametrize(
    ("argument", "value"), [("devices", 0), ("devices", 17), ("memory_bytes", 100), ("wait_seconds", 0.0)]
)
def test_arguments_out_of_range(argument: str, value: float) -> None:
    with pytest.raises(ValueError, match=argument):
        emulator.install(**{argument: value})  # type: ignore[arg-type]


def _versions(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    def version(package: str) -> str:
        found = versions[package]
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_versions_that_do_not_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    _versions(monkeypatch, torch="2.13.0", torch_npu="2.12.0")
    with pytest.raises(emulator.VersionPairError, match=r"torch 2\.13\.0 and torch_npu 2\.12\.0") as caught:
        _install._check_versions()
    assert "torch==2.12.0 with torch-npu==2.12.0" in str(caught.value)
    assert (caught.value.torch_version, caught.value.torch_npu_version) == ("2.13.0", "2.12.0")


def test_a_local_build_of_torch_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    _versions(monkeypatch, torch="2.12.0+cpu", torch_npu="2.12.0")
    assert _install._check_versions()[1] == "2.12.0"


@pytest.mark.parametrize("missing", ["torch", "torch_npu"])
def test_a_missing_package(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    versions: dict[str, str | None] = {"torch": "2.12.0", "torch_npu": "2.12.0"}
    _versions(monkeypatch, **{**versions, missing: None})
    with pytest.raises(emulator.MissingPackageError, match=f"package {missing} is not installed") as caught:
        _install._check_versions()
    assert caught.value.package == missing
    assert isinstance(caught.value, ImportError)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(emulator.CompilerNotFoundError, match="CC, cc, gcc, clang"):
        _build.find_compiler()
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(emulator.CompilerNotFoundError, match="no-such-compiler"):
        _build.find_compiler()


def _broken_compiler(folder: Path) -> str:
    broken = folder / "broken"
    broken.write_text('#!/bin/sh\ncase "$1" in --version) echo broken;; *) echo "no such file" >&2; exit 1;; esac\n')
    broken.chmod(0o755)
    return str(broken)


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = _broken_compiler(tmp_path)
    monkeypatch.setenv("CC", broken)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(emulator.RuntimeBuildError, match="no such file") as caught:
        _build.build_runtime(*_install._check_versions())
    assert caught.value.command.startswith(broken)
    assert list((tmp_path / "ascend_emulator").iterdir()) == []


def test_without_a_cxx_compiler_python_does_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _install._compiled_kernels(None) is None
    with pytest.raises(emulator.CompilerNotFoundError, match=r"no C\+\+ compiler .*CXX, c\+\+, g\+\+, clang\+\+"):
        _install._compiled_kernels(True)


def test_a_cxx_compiler_that_fails_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", _broken_compiler(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="slower Python kernels"):
        assert _install._compiled_kernels(None) is None
    with pytest.raises(emulator.RuntimeBuildError, match="no such file"):
        _install._compiled_kernels(True)
    assert _install._compiled_kernels(False) is None


def test_the_environment_chooses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("", None), ("0", False), ("1", True)):
        monkeypatch.setenv("ASCEND_EMULATOR_COMPILED", value)
        assert _config.compiled_from_environment() is expected
    monkeypatch.setenv("ASCEND_EMULATOR_COMPILED", "no")
    with pytest.raises(ValueError, match="ASCEND_EMULATOR_COMPILED: expected 0 or 1, got 'no'"):
        _config.compiled_from_environment()


def test_operators_are_the_same_without_the_compiled_kernels() -> None:
    """The operators' tests again, in a process whose kernels are the Python ones."""
    code = "import ascend_emulator as e; e.install(); print(e.is_compiled())"
    assert run(code, ASCEND_EMULATOR_COMPILED="0").stdout == "False\n"
    tests = str(Path(__file__).with_name("test_emulator_operators.py"))
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ASCEND_EMULATOR_COMPILED": "0"},
    )
    assert result.returncode == 0, result.stdout


def test_concurrent_builds_end_in_one_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, version = _install._check_versions()
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(_build.build_runtime(folder, version))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert sorted(path.name for path in results[0].iterdir()) == sorted(_build.LIBRARIES)
    assert list((tmp_path / "ascend_emulator").iterdir()) == [results[0]]
    stamp = (results[0] / "libascendcl.so").stat().st_mtime_ns
    assert _build.build_runtime(folder, version) == results[0]
    assert (results[0] / "libascendcl.so").stat().st_mtime_ns == stamp


def test_the_runtime_compiles_without_a_warning(tmp_path: Path) -> None:
    folder, _ = _install._check_versions()
    for name, sources in _build.LIBRARIES.items():
        command = [*_build.find_compiler(), *_build._FLAGS, "-Wall", "-Wextra", "-Werror"]
        command += ["-isystem", str(folder / _build._HEADERS), "-o", str(tmp_path / name)]
        command += [str(_build._SOURCES / source) for source in sources]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in ("TASK_QUEUE_ENABLE", "LD_LIBRARY_PATH")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**own, **environment},
    )


def test_torch_npu_that_is_already_loaded_is_named() -> None:
    result = run(
        "import sys, types; sys.modules['torch_npu'] = types.ModuleType('torch_npu')\n"
        "import ascend_emulator; ascend_emulator.install()"
    )
    assert "AlreadyLoadedError: torch_npu is already imported" in result.stderr


def test_importing_the_package_imports_no_torch() -> None:
    result = run("import sys, ascend_emulator, ascend_emulator.pytest_plugin; print('torch' in sys.modules)")
    assert result.stdout == "False\n", result.stderr


def test_a_fresh_process_is_quiet_and_takes_torch_that_was_imported_before() -> None:
    result = run(
        "import torch, ascend_emulator\n"
        "ascend_emulator.register_kernel('npu::npu_silu', lambda x: x * torch.sigmoid(x))\n"
        "ascend_emulator.install(devices=3, memory_bytes=64 << 20)\n"
        "import torch_npu\n"
        "x = torch.ones(3, device='npu:2')\n"
        "print(torch_npu.npu.device_count(), (x + 1).cpu().tolist(), torch.npu.mem_get_info(2)[1])\n"
        "try: torch.empty(65 << 20, dtype=torch.uint8, device='npu:1')\n"
        "except torch.OutOfMemoryError: print('out of memory')\n",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert result.returncode == 0, result.stderr
    complaints = [
        line for line in result.stderr.splitlines() if "NPU out of memory" not in line
    ]  # torch_npu logs it too
    assert complaints == []
    assert result.stdout == f"3 [2.0, 2.0, 2.0] {64 << 20}\nout of memory\n"


def test_memory_mapped_piece_by_piece_is_refused_and_torch_npu_goes_on_without() -> None:
    code = "import ascend_emulator as e; e.install(); import torch; print(torch.ones(2, device='npu').tolist())"
    result = run(code, PYTORCH_NPU_ALLOC_CONF="expandable_segments:True")
    assert result.stdout.endswith("[1.0, 1.0]\n"), result.stderr
    assert "expandable_segments setting failure" in result.stdout + result.stderr
