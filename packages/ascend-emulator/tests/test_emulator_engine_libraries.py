"""Packages without their compiled library: what imports, what does not, and what stays."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ascend_emulator
import pytest
import torch


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package whose `__init__` loads a library that is not there, with an extension that cannot be loaded."""
    root = tmp_path / "an_engine"
    (root / "ops").mkdir(parents=True)
    (root / "__init__.py").write_text("import torch\ntorch.ops.load_library('/nowhere/liban_engine.so')\n")
    (root / "ops" / "__init__.py").write_text("")
    (root / "ops" / "norm.py").write_text(
        "import torch\n\ndef norm(*args):\n    return torch.ops._C_ascend.npu_gemma_rms_norm(*args)[0]\n"
    )
    (root / "an_engine_C.so").write_bytes(b"no library")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "an_engine"
    for name in [name for name in sys.modules if name.partition(".")[0] == "an_engine"]:
        del sys.modules[name]


def test_a_packages_own_python_runs_on_the_emulators_operators(engine: str) -> None:
    with pytest.raises(OSError, match="liban_engine"):
        importlib.import_module(engine)
    module = ascend_emulator.without_library(engine)
    assert importlib.import_module(engine) is module is ascend_emulator.without_library(engine)
    norm = importlib.import_module(f"{engine}.ops.norm").norm
    x = torch.tensor([[3.0, 4.0]])
    got = norm(x.to("npu"), torch.zeros(2, device="npu")).cpu()
    assert torch.allclose(got, x / (12.5**0.5), atol=1e-4)


def test_an_extension_is_an_empty_module(engine: str) -> None:
    ascend_emulator.without_library(engine)
    with pytest.raises(ImportError):
        importlib.import_module(f"{engine}.an_engine_C")
    module = ascend_emulator.without_library(f"{engine}.an_engine_C")
    assert importlib.import_module(f"{engine}.an_engine_C") is module
    assert importlib.import_module(engine).an_engine_C is module
    assert not hasattr(module, "init_module") and not hasattr(module, "__path__")


def test_a_module_that_is_imported_stays() -> None:
    assert ascend_emulator.without_library("json") is importlib.import_module("json")


def test_what_is_not_installed_is_said(engine: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="no module named 'an_engine_of_nobody'") as caught:
        ascend_emulator.without_library("an_engine_of_nobody")
    assert caught.value.name == "an_engine_of_nobody"
    with pytest.raises(ModuleNotFoundError, match="install the engine's package"):
        ascend_emulator.without_library("an_engine_of_nobody.its_C")


def test_what_a_package_itself_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_package").mkdir()
    (tmp_path / "a_package" / "__init__.py").write_text("import a_package_of_nobody\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="No module named 'a_package_of_nobody'"):
        ascend_emulator.without_library("a_package.its_C")


def test_it_needs_the_emulator() -> None:
    code = "import ascend_emulator\nascend_emulator.without_library('json')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "NotInstalledError: without_library('json') needs" in result.stderr
