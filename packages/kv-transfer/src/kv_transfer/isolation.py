"""A network namespace that holds only a loopback interface, for engines that listen on all interfaces.

Enters it for the calling process, or runs a command inside. It protects this machine from the network; it does not
authenticate peers inside the namespace. Both ends of a transfer must be started inside the same namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import logging
import os
import socket
import struct
import sys
from collections.abc import Sequence

__all__ = ["Isolation", "current_isolation", "enter_loopback_namespace", "main", "warn_if_open"]

_LOG = logging.getLogger(__name__)

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_IFREQ = "16sH22x"


@dataclasses.dataclass(frozen=True, slots=True)
class Isolation:
    """Whether this process reaches nothing but loopback.

    Attributes:
        isolated: True when no interface but `lo` is up, and `lo` is.
        detail: What was done, or why not.
    """

    isolated: bool
    detail: str

    def __str__(self) -> str:
        """One line for logs and test headers."""
        return f"{'isolated' if self.isolated else 'NOT isolated'}: {self.detail}"


def current_isolation() -> Isolation:
    """How the calling process stands now; changes nothing."""
    if not sys.platform.startswith("linux"):
        return Isolation(False, f"network namespaces are Linux's, this is {sys.platform}")
    up = _interfaces_up()
    others = [name for name in up if name != "lo"]
    if others:
        return Isolation(False, f"interfaces {', '.join(others)} are up")
    if "lo" not in up:
        return Isolation(False, "the loopback interface is down")
    return Isolation(True, "only the loopback interface is up")


@functools.cache
def warn_if_open(engine: str) -> None:
    """Logs, once a process, that an engine which listens on all interfaces can be reached from other machines."""
    now = current_isolation()
    if not now.isolated:
        _LOG.warning(
            "engine %s listens on every interface and asks nobody who writes (%s): whoever reaches its port can write "
            "registered memory; keep it inside a trusted network, or run under python -m kv_transfer.isolation",
            engine,
            now.detail,
        )


def enter_loopback_namespace() -> Isolation:
    """Moves the calling process into a new network namespace with only `lo`, and brings that up.

    As root, or with CAP_SYS_ADMIN, a network namespace suffices; else it comes with a user namespace in which the user
    keeps its own uid and gid. Children inherit it. Call it early: a process with several threads is not moved, since
    only the calling thread would be. Does nothing when the process is isolated already.

    Returns:
        What holds afterwards. The process is unchanged when it is not isolated, except where `detail` says otherwise.
    """
    now = current_isolation()
    if now.isolated or not sys.platform.startswith("linux"):
        return now
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return Isolation(
            False,
            f"the process has {threads} threads already; call before threads start and libraries are imported, "
            f"or start the program with `python -m kv_transfer.isolation -- command`",
        )
    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    done = "entered a new network namespace"
    if libc.unshare(_CLONE_NEWNET) != 0:
        first = os.strerror(ctypes.get_errno())
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            second = os.strerror(ctypes.get_errno())
            return Isolation(
                False,
                f"the system refuses a network namespace ({first}) and a user with a network namespace ({second}); "
                f"check user.max_user_namespaces, kernel.unprivileged_userns_clone and the container's seccomp profile",
            )
        try:
            _map_user(uid, gid)
        except OSError as error:
            return Isolation(False, f"entered a user namespace, but the uid and gid cannot be mapped: {error}")
        done = "entered a new user and network namespace"
    try:
        _bring_up("lo")
    except OSError as error:
        return Isolation(False, f"{done}, but the loopback interface cannot be brought up: {error}")
    after = current_isolation()
    return Isolation(after.isolated, f"{done}; {after.detail}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `[--require] -- command…` inside the namespace, or plainly where that is impossible, and says which.

    Returns:
        An exit status; only when the command was not started, else the process becomes the command.
    """
    rest = list(sys.argv[1:] if arguments is None else arguments)
    require = rest[:1] == ["--require"]
    if require:
        rest.pop(0)
    if rest[:1] == ["--"]:
        rest.pop(0)
    if not rest or rest[0].startswith("-"):
        print("usage: python -m kv_transfer.isolation [--require] -- command [argument …]", file=sys.stderr)
        return 2
    result = enter_loopback_namespace()
    print(f"kv_transfer.isolation: {result}", file=sys.stderr, flush=True)
    if require and not result.isolated:
        return 3
    try:
        os.execvp(rest[0], rest)
    except OSError as error:
        print(f"kv_transfer.isolation: cannot run {rest[0]!r}: {error}", file=sys.stderr)
        return 127


def _map_user(uid: int, gid: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _flags(control: socket.socket, name: str) -> int:
    answer = fcntl.ioctl(control.fileno(), _SIOCGIFFLAGS, struct.pack(_IFREQ, name.encode(), 0))
    return int(struct.unpack(_IFREQ, answer)[1])


def _interfaces_up() -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        names = [name for _, name in socket.if_nameindex()]
        return [name for name in names if _flags(control, name) & _IFF_UP]


def _bring_up(name: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack(_IFREQ, name.encode(), _flags(control, name) | _IFF_UP)
        fcntl.ioctl(control.fileno(), _SIOCSIFFLAGS, request)


if __name__ == "__main__":
    sys.exit(main())
