"""Real processes, real Mooncake and NIXL, real signals; children run in a loopback-only namespace if possible."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transfer_matrix as matrix

HERE = Path(__file__).parent


def _run(script: str, *arguments: str, timeout: float = 280) -> str:
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


@pytest.mark.parametrize(
    ("engine", "part", "processes"),
    [("loopback", "0-3", 2), ("loopback", "3-6", 1), ("mooncake", "6-9", 1), ("nixl", "9-10", 1)],
)
def test_a_covering_set_of_the_matrix_is_byte_exact_between_processes(engine: str, part: str, processes: int) -> None:
    """Every pair of values, each on one of the engines; the product runs in `nox -s soak -- kv-transfer`."""
    _run("transfer_ranks.py", engine, f"few:{part}/10", "3", str(processes))


def test_a_covering_set_covers_every_pair() -> None:
    """What the covering set leaves out is refused, or has too many connections."""
    cases = matrix.covering(3, most=matrix.FEW)
    exact = [case for case in cases if not case.refused]
    for one, other in itertools.combinations(matrix.DIMENSIONS, 2):
        held = {(getattr(case, one), getattr(case, other)) for case in exact}
        for pair in itertools.product(matrix.DIMENSIONS[one], matrix.DIMENSIONS[other]):
            alone = matrix.plain(**dict(zip((one, other), pair, strict=True)))
            assert (pair in held) != bool(alone.refused or alone.connections > matrix.FEW), (one, other, pair)
    assert {"heads", "draft"} <= {case.refused for case in cases}


@pytest.mark.parametrize(
    "script", ["transfer_mooncake_checks.py", "transfer_nixl_checks.py", "transfer_retry_checks.py"]
)
def test_an_engine_by_itself(script: str) -> None:
    _run(script)


def test_processes_are_killed_and_stopped_at_random_moments() -> None:
    """On the engine that no scenario above is about; the soak does it 200 times, on all of them."""
    _run("transfer_faults.py", "loopback", "3", "11")


def test_nothing_is_held_for_peers_that_died() -> None:
    """Files, sockets, threads, maps; the soak counts them after each of its faults too."""
    _run("transfer_handles.py", "loopback", "nixl", "mooncake")
