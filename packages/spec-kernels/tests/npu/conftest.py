"""Owns the emulated NPU of these tests: installed before torch_npu is imported."""

from __future__ import annotations

import ascend_emulator

ascend_emulator.install()

import torch_npu  # noqa: E402, F401
