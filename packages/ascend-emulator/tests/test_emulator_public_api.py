"""The public names, and the README's promises that can be run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ascend_emulator as emulator
from ascend_emulator import errors

README = Path(__file__).parents[1] / "README.md"
NAMES = [
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


def test_public_names() -> None:
    assert emulator.__all__ == NAMES
    for name in NAMES:
        assert hasattr(emulator, name)
    for module in ("kernels", "memory", "order", "poison"):
        assert hasattr(emulator, module)


def test_errors_form_a_catalogue() -> None:
    """Every error is public, is described in the README, and is of the package's base and of a builtin."""
    text = README.read_text()
    for name in errors.__all__:
        error = getattr(errors, name)
        assert getattr(emulator, name) is error
        assert issubclass(error, emulator.EmulatorError)
        if error is not emulator.EmulatorError:
            assert issubclass(error, (RuntimeError, LookupError, ImportError))
        if name not in ("EmulatorError", "InstallError"):
            assert f"`{name}`" in text


def test_the_readmes_snippet_prints_what_it_says() -> None:
    snippet = re.search(r"```python\n(.*?)```", README.read_text(), re.S)
    assert snippet is not None
    expected = re.search(r"print\(.*?# (.*)$", snippet[1], re.M)
    assert expected is not None
    result = subprocess.run([sys.executable, "-c", snippet[1]], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == expected[1]
