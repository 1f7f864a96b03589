"""pytest plugin: installs the emulator before any test module is imported, but only when asked.

Ask with `ascend_emulator = true` in the ini file or `--ascend-emulator` on the command line. It owns nothing else.
"""

from __future__ import annotations

import pytest

from ._install import install, is_compiled, is_installed

__all__ = ["pytest_addoption", "pytest_configure", "pytest_report_header"]

_ASKED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option and the ini values."""
    group = parser.getgroup("ascend_emulator", "emulated Ascend NPUs")
    group.addoption("--ascend-emulator", action="store_true", help="run torch_npu on emulated devices")
    parser.addini("ascend_emulator", "run torch_npu on emulated devices", type="bool", default=False)
    parser.addini("ascend_emulator_devices", "number of emulated devices", default="2")


def pytest_configure(config: pytest.Config) -> None:
    """Install the emulator when asked."""
    asked = bool(config.getoption("--ascend-emulator") or config.getini("ascend_emulator"))
    config.stash[_ASKED] = asked
    if asked and not is_installed():
        install(devices=int(config.getini("ascend_emulator_devices")))


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say that the devices are emulated."""
    if not config.stash.get(_ASKED, False):
        return None
    import torch
    import torch_npu

    versions = f"torch {torch.__version__}, torch_npu {torch_npu.__version__}"
    operators = "compiled" if is_compiled() else "Python"
    return f"ascend_emulator: {versions}, {torch_npu.npu.device_count()} emulated devices, {operators} operators"
