"""pytest plugin: installs the emulator before any test module is imported, but only when asked.

Ask with `ascend_emulator = true` in the ini file or `--ascend-emulator` on the command line. Then every test ends with
a wait for all devices, and what that finds (a race, a fault of queued work, a deadlock) is the test's failure; the mark
`npu(devices=1, seed=None, check_order=None)` says what a test needs. It does not decide what is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest

from ._install import install, is_compiled, is_installed
from .errors import EmulatorError

__all__ = ["pytest_addoption", "pytest_configure", "pytest_report_header", "pytest_runtest_call"]

_ASKED = pytest.StashKey[bool]()
_MARK = (
    "npu(devices=1, seed=None, check_order=None): on emulated NPUs: at least so many, this seed, order checked or not"
)


@dataclass(frozen=True)
class _Wish:
    """What the mark asks for."""

    devices: int = 1
    seed: int | None = None
    check_order: bool | None = None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options and the ini values."""
    group = parser.getgroup("ascend_emulator", "emulated Ascend NPUs")
    group.addoption("--ascend-emulator", action="store_true", help="run torch_npu on emulated devices")
    group.addoption(
        "--ascend-emulator-no-order", action="store_true", help="do not look for races between streams (faster)"
    )
    parser.addini("ascend_emulator", "run torch_npu on emulated devices", type="bool", default=False)
    parser.addini("ascend_emulator_devices", "number of emulated devices", default="2")
    parser.addini("ascend_emulator_order", "look for races between streams", type="bool", default=True)


def pytest_configure(config: pytest.Config) -> None:
    """Install the emulator when asked."""
    asked = bool(config.getoption("--ascend-emulator") or config.getini("ascend_emulator"))
    config.stash[_ASKED] = asked
    if not asked:
        return
    config.addinivalue_line("markers", _MARK)
    check = bool(config.getini("ascend_emulator_order")) and not config.getoption("--ascend-emulator-no-order")
    if is_installed():
        install(check_order=check)
    else:
        install(devices=int(config.getini("ascend_emulator_devices")), check_order=check)


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say that the devices are emulated."""
    if not config.stash.get(_ASKED, False):
        return None
    import torch
    import torch_npu

    from . import order

    versions = f"torch {torch.__version__}, torch_npu {torch_npu.__version__}"
    operators = "compiled" if is_compiled() else "Python"
    checked = "checked" if order.on else "not checked"
    return (
        f"ascend_emulator: {versions}, {torch_npu.npu.device_count()} emulated devices, {operators} operators, "
        f"order {checked}"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Prepare what the mark asks for, run the test, and wait for all devices."""
    if not item.config.stash.get(_ASKED, False):
        return (yield)
    wish = _wish_of(item)
    from . import order

    before = order.on
    if wish is not None:
        _prepare(wish)
    try:
        try:
            result = yield
        except BaseException:
            with contextlib.suppress(EmulatorError, RuntimeError):  # the test's own error is the one to show
                _wait_for_devices()
            raise
        _wait_for_devices()
        return result
    finally:
        order.enable(before)


def _wish_of(item: pytest.Item) -> _Wish | None:
    mark = item.get_closest_marker("npu")
    if mark is None:
        return None
    try:
        return _Wish(*mark.args, **mark.kwargs)
    except TypeError as error:
        pytest.fail(f"@pytest.mark.npu takes devices, seed and check_order: {error}", pytrace=False)


def _prepare(wish: _Wish) -> None:
    import torch
    import torch_npu

    from . import order

    there = torch_npu.npu.device_count()
    if wish.devices > there:
        pytest.fail(
            f"@pytest.mark.npu(devices={wish.devices}): the emulator has {there}; set ascend_emulator_devices in the "
            "ini file",
            pytrace=False,
        )
    if wish.seed is not None:
        torch.manual_seed(wish.seed)
        torch_npu.npu.manual_seed_all(wish.seed)
    if wish.check_order is not None:
        order.enable(wish.check_order)


def _wait_for_devices() -> None:
    """Wait for every device that was used, also behind an error; raise the first one.

    torch_npu 2.13 ends the process at the next backward pass when a device was chosen and has no stream yet.
    """
    import torch_npu

    from ._queue import scheduler

    first: BaseException | None = None
    for device in scheduler.devices():
        try:
            torch_npu.npu.synchronize(device)
        except (EmulatorError, RuntimeError) as error:
            first = first or error
    if first is not None:
        raise first
