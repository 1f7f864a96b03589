"""Real processes, real Mooncake and NIXL, real signals; children run in a loopback-only namespace if possible."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _run(script: str, *arguments: str, timeout: float = 60) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kv_transfer.isolation", "--", sys.executable, str(HERE / script), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    assert "as it should be" in done.stdout
    return done.stderr


@pytest.mark.parametrize("engine", ["mooncake", "nixl"])
@pytest.mark.parametrize("scenario", ["arrives", "killed", "stopped"])
def test_two_prefill_stages_and_decode(scenario: str, engine: str) -> None:
    assert "kv_transfer.isolation: " in _run("transfer_scenarios.py", scenario, engine)


@pytest.mark.parametrize("engine", ["loopback", "mooncake", "nixl"])
def test_a_sample_of_the_matrix_is_byte_exact_between_two_processes(engine: str) -> None:
    """All cases run in `nox -s soak -- kv-transfer`."""
    _run("transfer_matrix.py", engine, "24", "3")


@pytest.mark.parametrize("script", ["transfer_mooncake_checks.py", "transfer_nixl_checks.py"])
def test_an_engine_by_itself(script: str) -> None:
    _run(script)
