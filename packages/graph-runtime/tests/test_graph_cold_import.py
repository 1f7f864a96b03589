"""Importing the package imports no device library, and every public name is there."""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import graph_runtime
import pytest
from graph_runtime import errors

_HEAVY = ["torch_npu", "triton", "rich", "kv_pool", "kv_transfer", "spec_kernels", "ascend_emulator", "sglang", "vllm"]


def test_a_cold_import_is_light() -> None:
    code = f"import json, sys, graph_runtime; print(json.dumps([n for n in {_HEAVY} if n in sys.modules]))"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout) == []


def test_public_names_exist() -> None:
    for info in pkgutil.iter_modules(graph_runtime.__path__):
        if info.name.startswith("_") or info.name in {"devices", "integrations"}:
            continue
        module = importlib.import_module(f"graph_runtime.{info.name}")
        assert module.__all__ and all(hasattr(module, name) for name in module.__all__), info.name
    assert graph_runtime.__version__ == "0.1.0"


def test_errors_are_a_family() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.GraphError)
        if kind is not errors.GraphError:
            error = kind("this", expected=1, got=2, consequence="Then.", remedy="Do.")
            assert str(error) == "this: expected 1, got 2. Then. Do."
            assert (error.subject, error.expected, error.got) == ("this", 1, 2)
            assert any(issubclass(kind, builtin) for builtin in (ValueError, RuntimeError, TimeoutError))


def test_every_error_is_raised_somewhere_in_a_test() -> None:
    text = "".join(
        path.read_text() for path in Path(__file__).parent.rglob("test_graph_*.py") if path != Path(__file__)
    )
    bases = {"GraphError", "RowValueError", "UpdateSpecError"}
    assert not [name for name in errors.__all__ if name not in bases and name not in text]


def test_device_libraries_are_named_in_leaves_only() -> None:
    source = Path(graph_runtime.__file__).parent
    for path in source.rglob("*.py"):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add((node.module or "").partition(".")[0])
            elif isinstance(node, ast.Constant) and node.value == "torch_npu":
                names.add("torch_npu")
        if not {"devices", "integrations"} & set(path.relative_to(source).parts):
            assert not names & set(_HEAVY) - {"rich"}, path
        assert len(path.read_text().splitlines()) < 400, path


def test_the_snippet_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    snippet = text.partition("```python\n")[2].partition("```")[0]
    exec(compile(snippet, "README.md", "exec"), {})
    assert "graph 4 tensor([ 9.0000, 16.5000, 27.5000])" in capsys.readouterr().out
