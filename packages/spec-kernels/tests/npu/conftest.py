"""Owns the emulated NPU of these tests: installed before torch_npu is imported."""

from __future__ import annotations

from typing import Any

import ascend_emulator
import pytest

ascend_emulator.install()

import torch  # noqa: E402
import torch_npu  # noqa: E402, F401


@pytest.fixture(params=[("npu:0", "native")], ids=["native-npu"])
def place(request: pytest.FixtureRequest, place_on: Any) -> Any:
    """The emulated device; the other backends have no NPU version of these ops."""
    return place_on(*request.param)


@pytest.fixture(params=["npu", "native"])
def attention_place(request: pytest.FixtureRequest, attention_place_on: Any) -> Any:
    """The device's operator, and native attention on the device."""
    return attention_place_on("npu:0", request.param, dtypes=(torch.float16, torch.bfloat16), page=128)
