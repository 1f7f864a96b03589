"""What the other tests rest on: the published engine, unchanged, on the real torch_npu, and nothing absent ran."""

from __future__ import annotations

import importlib.metadata
import sys

import engines_absent
import pytest
import torch
import torch_npu
from sglang.srt.utils.common import is_npu


def test_the_engine_and_torch_npu_are_the_published_ones() -> None:
    assert importlib.metadata.version("sglang") == "0.5.23"
    assert importlib.metadata.version("torch-npu") == "2.12.0"
    assert is_npu() and torch_npu.npu.device_count() == 2
    assert torch.zeros(1, device="npu").device == torch.device("npu:0")


def test_only_named_packages_are_absent() -> None:
    modules = [name for name, module in sys.modules.items() if isinstance(module, engines_absent.AbsentModule)]
    found = {name.partition(".")[0] for name in modules}  # which of them depends on the files that ran before
    assert "sgl_kernel_npu" in found and found <= engines_absent.NAMES


def test_an_absent_package_cannot_be_used() -> None:
    from sgl_kernel_npu.attention.sinks_attention import attention_sinks_triton

    with pytest.raises(engines_absent.AbsentPackageUsed, match=r"sgl_kernel_npu\.attention\.sinks_attention"):
        attention_sinks_triton(torch.zeros(1))
    with pytest.raises(engines_absent.AbsentPackageUsed):
        list(attention_sinks_triton)
