"""The pytest plugin: silent unless asked, by ini or by option."""

from __future__ import annotations

import pytest
from ascend_emulator._build import cache_root

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.timeout(600)  # each starts a process that imports torch_npu, slow on a busy machine
CACHE = cache_root().parent  # pytester has a home of its own, where everything would be built again


@pytest.fixture(autouse=True)
def built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))


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
    result.stdout.fnmatch_lines(
        ["ascend_emulator: torch 2.*, torch_npu 2.*, 3 emulated devices, * operators, order checked"]
    )


def test_option_is_known(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--help")
    result.stdout.fnmatch_lines(["*--ascend-emulator*run torch_npu on emulated devices*"])


_RACES = """
import pytest
import torch
import torch_npu

def race():
    x = torch.zeros(4, device="npu")
    side = torch_npu.npu.Stream()
    with torch_npu.npu.stream(side):
        x.add_(1)

def late_race():
    \"\"\"A race that the test itself never waits for.\"\"\"
    event, x = torch_npu.npu.ExternalEvent(), torch.zeros(4, device="npu")
    waiting, other = torch_npu.npu.Stream(), torch_npu.npu.Stream()
    torch_npu.npu.synchronize()
    event.wait(waiting)
    with torch_npu.npu.stream(waiting):
        x.add_(1)
    with torch_npu.npu.stream(torch_npu.npu.Stream()):
        x.add_(1)
    event.record(other)
"""


_MARKED = """
import ascend_emulator

drawn = []

def test_race():
    race()

def test_late_race():
    late_race()

def test_after_them():
    assert (torch.ones(2, device="npu") + 1).tolist() == [2, 2]

@pytest.mark.npu(check_order=False)
def test_unchecked():
    race()
    late_race()

@pytest.mark.npu(devices=2, seed=7)
@pytest.mark.parametrize("turn", range(2))
def test_seed(turn):
    drawn.append(torch.cat([torch.rand(4), *(torch.rand(4, device=f"npu:{i}").cpu() for i in range(2))]))
    assert drawn[0].unique().numel() > 4
    assert torch.equal(drawn[0], drawn[turn])

@pytest.mark.npu(devices=3)
def test_devices():
    pass

@pytest.mark.npu(chips=3)
def test_typing_error():
    pass

def test_waits_for_ever():
    ascend_emulator.install(wait_seconds=0.1)
    event = torch_npu.npu.ExternalEvent()
    event.wait(torch_npu.npu.current_stream())

def test_next():
    assert torch.ones(2, device="npu").sum().item() == 2
"""


def run(pytester: pytest.Pytester, code: str, *options: str, ini: str = "") -> pytest.RunResult:
    pytester.makeini(f"[pytest]\nascend_emulator = true\naddopts = --strict-markers\n{ini}")
    pytester.makepyfile(_RACES + code)
    return pytester.runpytest_subprocess("-p", "no:randomly", *options)


def test_what_a_test_leaves_behind_is_its_own_failure(pytester: pytest.Pytester) -> None:
    """Races, also those that no line of the test waits for; blocked work; wrong marks. The next test is undisturbed."""
    result = run(pytester, _MARKED, "-rA")
    result.assert_outcomes(passed=5, failed=5)
    result.stdout.fnmatch_lines(["ascend_emulator: * order checked"])
    for name, text in {
        "test_race": "*RaceError: race on 16 bytes*",
        "test_late_race": "*RaceError: race on 16 bytes*",
        "test_devices": "*devices=3*the emulator has 2; set ascend_emulator_devices*",
        "test_typing_error": "*unexpected*chips*",
        "test_waits_for_ever": "*DeadlockError*external event*",
    }.items():
        result.stdout.fnmatch_lines([text])
        result.stdout.fnmatch_lines([f"FAILED *::{name}*"])


@pytest.mark.parametrize("way", ["--ascend-emulator-no-order", "ini"])
def test_the_order_need_not_be_checked(pytester: pytest.Pytester, way: str) -> None:
    code = "def test_race():\n    race()\n    late_race()\n"
    options = [way] if way.startswith("--") else []
    result = run(pytester, code, *options, ini="ascend_emulator_order = false" if way == "ini" else "")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["ascend_emulator: *, order not checked"])
