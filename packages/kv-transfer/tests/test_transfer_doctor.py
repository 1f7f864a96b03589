"""The doctor tells engines that move bytes from those that do not, and survives those that crash or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kv_transfer.__main__ import app
from kv_transfer.doctor import Finding, Report, examine


def test_engines_that_work_here_are_found_working() -> None:
    report = examine()
    by_name = {engine.name: engine for engine in report.engines}
    assert {"loopback", "mooncake", "nixl"} <= set(by_name)
    assert "store_url" in by_name.pop("memfabric").problem
    for engine in by_name.values():
        assert engine.works and not engine.problem and (engine.megabytes_per_second or 0) > 0, engine
    assert not by_name["loopback"].cross_process and by_name["nixl"].cross_process
    assert {finding.subject for finding in report.findings} >= {"network", "ports", "locked memory", "shared memory"}
    assert report.ok
    assert not examine(("loopback",)).ok, "an engine that stays in its process does not serve"


BAD = {
    "crash": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "ended with -11"),
    "hang": ("import time\ntime.sleep(60)", "did not end within 3 s"),
    "absent": ("raise ModuleNotFoundError('no module named that')", "no module named that"),
}


@pytest.mark.parametrize("fault", sorted(BAD))
def test_an_engine_with_a_fault_is_named_and_the_others_are_tried(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault lies in the library that mooncake's engine imports."""
    code, words = BAD[fault]
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "engine.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    report = examine(("mooncake", "loopback"), seconds=3 if fault == "hang" else 30)
    bad, good = report.engines
    assert not bad.works and words in bad.problem, bad
    assert good.works or fault == "hang"  # three seconds may be short for a process on a loaded machine
    assert not report.ok


def test_a_problem_of_the_machine_is_not_ready() -> None:
    good = examine(("nixl",))
    assert good.ok
    worse = good.model_copy(update={"findings": (Finding(level="problem", subject="ports", text="none"),)})
    assert not worse.ok
    assert Report.model_validate_json(worse.model_dump_json()) == worse


def _cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MC_LOG_LEVEL": "ERROR", "COLUMNS": "200"}
    command = [sys.executable, "-m", "kv_transfer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=environment)


def test_the_command_line() -> None:
    done = _cli("doctor", "--engine", "nixl", "--engine", "loopback")
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("nixl", "loopback", "MC_LOG_LEVEL", "set here", "shared memory", "ready: nixl can move K/V"):
        assert word in done.stdout
    done = _cli("doctor", "--engine", "loopback")
    assert done.returncode == 1 and "not ready: no engine that was tried reaches other processes" in done.stdout
    done = _cli("doctor", "--engine", "loopback", "--json")
    assert done.returncode == 1
    assert [item["name"] for item in json.loads(done.stdout)["engines"]] == ["loopback"]
    done = _cli("doctor", "--engine", "loopback", "--ports", "7-x")
    assert done.returncode == 2 and "7701-7708" in done.stderr
    done = _cli("doctor", "--engine", "rdma")
    assert done.returncode == 2 and "loopback, memfabric, mooncake, nixl" in done.stderr


@pytest.mark.parametrize(
    "option", [("--seconds", "inf"), ("--seconds", "nan"), ("--host", ""), ("--host", "a\0b"), ("--ports", "\u00b2")]
)
def test_an_odd_option_is_an_error_of_use(option: tuple[str, str]) -> None:
    done = CliRunner().invoke(app, ["doctor", "--engine", "loopback", *option])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
