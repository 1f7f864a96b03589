"""Integrations without their engine: the module is importable, its classes are a typed error."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from graph_runtime.errors import EngineMissing
from graph_runtime.integrations import sglang as integration


def test_the_module_needs_no_engine() -> None:
    code = "import sys; sys.modules['sglang'] = None; import graph_runtime.integrations.sglang as m; print(m.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(integration.__all__)


@pytest.mark.parametrize("name", integration.__all__)
def test_a_class_without_the_engine_says_what_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    for part in ("backend", "runners"):
        monkeypatch.delitem(sys.modules, f"{integration.__name__}.{part}", raising=False)
    with pytest.raises(EngineMissing, match=r"SGLang 0\.5\.23") as refused:
        getattr(integration, name)
    assert isinstance(refused.value, ImportError)


def test_other_names_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="Runner"):
        importlib.import_module("graph_runtime.integrations.sglang").Runner  # noqa: B018
