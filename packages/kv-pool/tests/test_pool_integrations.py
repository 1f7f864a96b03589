"""Owns the proof that the integrations import without their engine, and name it when it is needed and absent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kv_pool import LibraryUnavailable
from kv_pool.integrations import sglang, vllm

ENGINES = ("sglang", "vllm")


@pytest.fixture(autouse=True)
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither engine can be imported, installed or not."""
    for name in ENGINES:
        monkeypatch.setitem(sys.modules, name, None)
    sglang.storage_class.cache_clear()
    vllm.tier_class.cache_clear()
    yield
    sglang.storage_class.cache_clear()
    vllm.tier_class.cache_clear()


def test_importing_loads_no_engine() -> None:
    program = (
        "import sys, kv_pool.integrations.sglang, kv_pool.integrations.vllm; print({'sglang', 'vllm'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda: sglang.KvPoolStorage, "SGLang 0.5.23"),
        (lambda: sglang.adopt_pool(SimpleNamespace(), fingerprint="m"), "SGLang 0.5.23"),
        (lambda: vllm.KvPoolTier, "vLLM 0.23"),
        (vllm.register, "vLLM 0.23"),
    ],
)
def test_use_without_the_engine_names_it(use: Callable[[], Any], named: str) -> None:
    with pytest.raises(LibraryUnavailable, match=named) as caught:
        use()
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("module", [sglang, vllm])
def test_other_names_do_not_exist(module: Any) -> None:
    with pytest.raises(AttributeError, match="Nothing"):
        _ = module.Nothing
