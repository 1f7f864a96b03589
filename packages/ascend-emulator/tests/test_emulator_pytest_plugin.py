"""The pytest plugin: silent unless asked, by ini or by option."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

_TEST = """
import sys

def test_state():
    assert ("torch_npu" in sys.modules) is {expected}
"""


def test_nothing_happens_unless_asked(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(_TEST.format(expected=False))
    result = pytester.runpytest_subprocess("-p", "no:randomly")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*ascend_emulator:*")


def test_asked_by_ini(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TASK_QUEUE_ENABLE", raising=False)
    pytester.makeini("[pytest]\nascend_emulator = true\nascend_emulator_devices = 3\nfilterwarnings = error\n")
    pytester.makepyfile(
        _TEST.format(expected=True)
        + """
def test_devices():
    import torch
    import torch_npu
    assert torch_npu.npu.device_count() == 3
    assert torch.ones(2, device="npu:2").sum().item() == 2
"""
    )
    result = pytester.runpytest_subprocess("-p", "no:randomly")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["ascend_emulator: torch 2.*, torch_npu 2.*, 3 emulated devices, * operators"])


def test_option_is_known(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--help")
    result.stdout.fnmatch_lines(["*--ascend-emulator*run torch_npu on emulated devices*"])
