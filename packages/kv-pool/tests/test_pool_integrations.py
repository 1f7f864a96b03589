"""Owns the proof that the integrations import without their engine, and name it when it is needed and absent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from kv_pool import LibraryUnavailable, StorageDamaged, StorageError, UnrepeatableKeys
from kv_pool.integrations import sglang, vllm, vllm_npu
from kv_pool.integrations.sglang._host_pages import read_leading

ENGINES = ("sglang", "vllm")


@pytest.fixture(autouse=True)
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither engine can be imported, installed or not."""
    for name in ENGINES:
        monkeypatch.setitem(sys.modules, name, None)
    made = (
        sglang.storage_class, vllm.tier_class, vllm_npu.handler_class, vllm_npu.spec_class, vllm_npu.connector_class,
    )  # fmt: skip
    for one in made:
        one.cache_clear()
    yield
    for one in made:
        one.cache_clear()


def test_importing_loads_no_engine() -> None:
    program = (
        "import sys, kv_pool.integrations.sglang, kv_pool.integrations.vllm, kv_pool.integrations.vllm_npu; "
        "print({'sglang', 'vllm', 'torch_npu'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda: sglang.KvPoolStorage, "SGLang 0.5.23"),
        (lambda: sglang.adopt_pool(SimpleNamespace(), fingerprint="m"), "SGLang 0.5.23"),
        (lambda: sglang.adopt_groups(SimpleNamespace(), fingerprint="m"), "SGLang 0.5.23"),
        (lambda: vllm.KvPoolTier, "vLLM 0.23"),
        (lambda: vllm_npu.NpuTieringSpec, "vLLM 0.23"),
        (lambda: vllm_npu.NpuOffloadingConnector, "vLLM 0.23"),
        (vllm.register, "vLLM 0.23"),
    ],
)
def test_use_without_the_engine_names_it(use: Callable[[], Any], named: str) -> None:
    with pytest.raises(LibraryUnavailable, match=named) as caught:
        use()
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("module", [sglang, vllm, vllm_npu])
def test_other_names_do_not_exist(module: Any) -> None:
    with pytest.raises(AttributeError, match="Nothing"):
        _ = module.Nothing


def test_a_shared_store_of_vllms_blocks_wants_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PYTHONHASHSEED no other process would ever find a block; said before anything is opened."""
    view = np.zeros((2, 4096), np.int8).data
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(UnrepeatableKeys, match="set PYTHONHASHSEED before vLLM starts") as caught:
        vllm.BlockStore(SimpleNamespace(), view, "kv_pool")
    assert isinstance(caught.value, StorageError) and caught.value.given == "not set"


@pytest.mark.parametrize("error", [KeyError("bucket"), OSError(5, "gone"), RuntimeError("closed")])
def test_what_a_store_raises_below_sglangs_pages_is_named(error: Exception) -> None:
    """Beside a damaged page, which ends as a missing one does; keys and pages are what the backend would pass."""

    class Below:
        name = "below"

        def read(self, keys: Any, pages: Any) -> int:
            raise error

    with pytest.raises(StorageError, match="read of the store 'below'") as caught:
        read_leading(cast(Any, Below()), ["00"], [[np.zeros(8, np.uint8)]])
    assert caught.value.__cause__ is error
    damaged = StorageDamaged("page", given="bytes", expected="others", consequence="none", remedy="none")
    damaged.pages_read, error = 1, damaged
    assert read_leading(cast(Any, Below()), ["00", "01"], [[np.zeros(8, np.uint8)]] * 2) == 1
