"""The loopback-only namespace, entered by child processes only: this process stays where it is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from kv_transfer.isolation import current_isolation, enter_loopback_namespace

REPORT = "import os, socket; print(os.getuid(), os.getgid(), [n for _, n in socket.if_nameindex()])"


def _run(*command: str, user: int | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        user=user,
        group=user,
        extra_groups=[] if user is not None else None,
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
    """As another user where this process may become one, else as itself."""
    program = (
        "import sys; from kv_transfer.isolation import enter_loopback_namespace as enter\n"
        "result = enter(); print(result); import os; print(os.geteuid(), os.getegid())"
    )
    user = 65534 if os.geteuid() == 0 and _can_read_as(65534) else None
    done = _run("-c", program, user=user)
    assert done.returncode == 0, done.stderr
    uid = user if user is not None else os.geteuid()
    first, second = done.stdout.splitlines()
    assert second.split()[0] == str(uid)
    if user is not None and first.startswith("isolated: entered"):
        assert "user and network namespace" in first


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


def _can_read_as(user: int) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", "import kv_transfer.isolation"],
        capture_output=True,
        timeout=60,
        check=False,
        user=user,
        group=user,
        extra_groups=[],
    )
    return done.returncode == 0
