"""The loopback-only namespace, entered by child processes only: this process stays where it is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from kv_transfer import isolation
from kv_transfer.isolation import current_isolation, enter_loopback_namespace

REPORT = "import os, socket; print(os.getuid(), os.getgid(), [n for _, n in socket.if_nameindex()])"


def _run(*command: str, user: int | None = None, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    change = user is not None and user != os.geteuid()
    return subprocess.run(
        [python, *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        user=user if change else None,
        group=user if change else None,
        extra_groups=[] if change else None,
    )


def test_the_command_runs_inside_or_says_why_not() -> None:
    done = _run("-m", "kv_transfer.isolation", "--", sys.executable, "-c", REPORT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{os.getuid()} {os.getgid()} ")
    assert "kv_transfer.isolation: isolated: " in done.stderr or "kv_transfer.isolation: NOT isolated: " in done.stderr
    if "kv_transfer.isolation: isolated: entered" in done.stderr:
        assert "eth0" not in done.stdout


def test_loopback_works_inside() -> None:
    talk = (
        "import socket; from kv_transfer.isolation import current_isolation as c; print(c().isolated)\n"
        "s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname()); print('talks')"
    )
    done = _run("-m", "kv_transfer.isolation", "--", sys.executable, "-c", talk)
    assert done.stdout.split()[-1] == "talks", done.stderr
    assert ("kv_transfer.isolation: isolated" in done.stderr) == (done.stdout.split()[0] == "True")


def test_isolation_nests_and_requires() -> None:
    inner = ("-m", "kv_transfer.isolation", "--require", "--", "true")
    done = _run("-m", "kv_transfer.isolation", "--", sys.executable, *inner)
    if "kv_transfer.isolation: isolated" in done.stderr.splitlines()[0]:
        assert done.returncode == 0
        assert done.stderr.count("only the loopback interface is up") == 2
        assert done.stderr.count("entered a new") <= 1
    else:
        assert done.returncode == 3


def test_a_process_with_threads_stays_where_it_is() -> None:
    code = (
        "import threading; from kv_transfer.isolation import current_isolation, enter_loopback_namespace\n"
        "stop = threading.Event(); threading.Thread(target=stop.wait).start()\n"
        "before = current_isolation(); result = enter_loopback_namespace(); stop.set()\n"
        "print(result.isolated, result); assert before.isolated or not result.isolated"
    )
    done = _run("-c", code)
    assert done.returncode == 0, done.stderr
    assert "already" in done.stdout or current_isolation().isolated


def test_a_user_keeps_the_uid_in_a_user_namespace() -> None:
    """As another user where this process may become one and finds a Python that this user may run, else as itself."""
    nobody = 65534
    python = next((path for path in (sys.executable, "/usr/bin/python3") if _runs_as(path, nobody)), None)
    if os.geteuid() != 0 or python is None:
        nobody, python = os.geteuid(), sys.executable
    report = "import os; print(os.getuid(), os.getgid())"
    done = _run(isolation.__file__, "--", python, "-c", report, user=nobody, python=python)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == str(nobody)
    if nobody != 0 and "isolated: entered" in done.stderr:
        assert "a new user and network namespace" in done.stderr


def test_a_system_that_refuses_is_reported() -> None:
    """Inside a user namespace that may hold no further namespaces; if that is refused too, the same."""
    program = (
        "import ctypes, os\n"
        "from kv_transfer import isolation\n"
        "uid, gid = os.geteuid(), os.getegid()\n"
        "if ctypes.CDLL(None).unshare(0x10000000) == 0:\n"
        "    isolation._map_user(uid, gid)\n"
        "    for kind in ('net', 'user'):\n"
        "        isolation._write(f'/proc/sys/user/max_{kind}_namespaces', '0')\n"
        "before = isolation.current_isolation(); after = isolation.enter_loopback_namespace()\n"
        "print(after); assert after.isolated == before.isolated; assert before.isolated or 'refuses' in after.detail\n"
    )
    done = _run("-c", program)
    assert done.returncode == 0, done.stderr


def test_usage_and_unknown_commands() -> None:
    assert _run("-m", "kv_transfer.isolation").returncode == 2
    done = _run("-m", "kv_transfer.isolation", "--", "no-such-program-anywhere")
    assert done.returncode == 127
    assert "cannot run 'no-such-program-anywhere'" in done.stderr


def test_this_process_is_described() -> None:
    state = current_isolation()
    others = {name for _, name in socket.if_nameindex()} - {"lo"}
    assert state.isolated or others or "down" in state.detail
    if state.isolated:
        assert enter_loopback_namespace() == state


def _runs_as(python: str, user: int) -> bool:
    try:
        return _run(isolation.__file__, user=user, python=python).returncode == 2
    except (PermissionError, FileNotFoundError):
        return False
