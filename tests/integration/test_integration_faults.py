"""Killing any process of a run, at several moments, leaves no orphan and says what happened."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from disaggregated_serving.config import ROLES, RandomModel, Role, ServeConfig
from disaggregated_serving.front import Served, serve
from disaggregated_serving.launcher import WorkerFailed, Workers

CONFIG = ServeConfig(
    model=RandomModel(), device="cpu", chunk=128, new_tokens=400, prefill_pool=1024, decode_pool=2048,
    peer_lost_after=30.0,
)  # fmt: skip
PROMPTS = [[5, 6, 7] * 60, [9, 8] * 40]


def gone(pids: list[int], *, within: float = 60.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("moment", ["at start", "while decoding"])
def test_a_killed_worker_ends_the_run_with_its_name(role: Role, moment: str) -> None:
    pids: dict[Role, int] = {}
    killed = threading.Event()

    def kill() -> None:
        if not killed.is_set():
            killed.set()
            psutil.Process(pids[role]).kill()

    def on_start(workers: Workers) -> None:
        pids.update(workers.processes)
        if moment == "at start":
            kill()

    def on_progress(served: Served) -> None:
        if moment == "while decoding" and len(served.output) >= 3:
            kill()

    with pytest.raises(WorkerFailed) as caught:
        serve(CONFIG, PROMPTS, on_start=on_start, on_progress=on_progress)
    assert killed.is_set()
    # Whoever noticed first, the killed one is named first.
    assert str(caught.value).startswith(f"{role} was killed by signal SIGKILL"), str(caught.value)
    assert gone(list(pids.values()))


FRONT = """
import signal
import sys
from disaggregated_serving.config import ServeConfig
from disaggregated_serving.front import serve
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run behind an `&`
config = ServeConfig.model_validate_json(sys.argv[1])
def on_start(workers):
    print(*workers.processes.values(), flush=True)
serve(config, [[5, 6, 7] * 60], on_start=on_start, on_progress=lambda served: print("progress", flush=True))
"""


# To a process without a handler SIGTERM is SIGKILL: once is enough.
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("at start", signal.SIGKILL),
        ("at start", signal.SIGTERM),
        ("at start", signal.SIGINT),
        ("while decoding", signal.SIGKILL),
        ("while decoding", signal.SIGINT),
    ],
)
def test_workers_die_with_their_front(number: signal.Signals, moment: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FRONT, CONFIG.model_dump_json()],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as front:  # fmt: skip
        assert front.stdout is not None
        pids = [int(word) for word in front.stdout.readline().split()]
        assert len(pids) == 3
        try:
            if moment == "while decoding":
                for _ in range(4):
                    assert front.stdout.readline() == "progress\n"
            front.send_signal(number)
            front.wait(60)
            assert gone(pids)
        finally:
            for pid in [*pids, front.pid]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
