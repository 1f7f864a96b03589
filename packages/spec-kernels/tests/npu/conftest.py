"""Owns the emulated NPU of these tests: installed before torch_npu is imported."""

from __future__ import annotations

from typing import Any

import ascend_emulator
import pytest

ascend_emulator.install()

import torch  # noqa: E402
import torch_npu  # noqa: E402, F401


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Native ops on the device, and the device's own operator where there is one."""
    if "place" in metafunc.fixturenames:
        own = ["npu"] if metafunc.definition.originalname.endswith("of_kv_writes") else []
        metafunc.parametrize("place", ["native", *own], indirect=True)


@pytest.fixture
def place(request: pytest.FixtureRequest, place_on: Any) -> Any:
    """The emulated device."""
    return place_on("npu:0", request.param)


@pytest.fixture(params=["npu", "native"])
def attention_place(request: pytest.FixtureRequest, attention_place_on: Any) -> Any:
    """The device's operator, and native attention on the device."""
    return attention_place_on("npu:0", request.param, dtypes=(torch.float16, torch.bfloat16), page=128)
