"""Facts about this machine that decide whether transfers can live here: addresses, ports, limits, versions, settings.

Reads only, and binds sockets for a moment. Which engines really move bytes is the doctor's.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import resource
import shutil
import socket
import struct
from collections.abc import Mapping
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from kv_transfer.arguments import check_kind, check_text, check_whole
from kv_transfer.isolation import current_isolation

__all__ = ["Finding", "Setting", "addresses", "check_place", "effective_settings", "findings"]

_SHARED_MEMORY: Final = "/dev/shm"
_PREFIXES: Final = ("MC_", "UCX_", "NIXL_", "MEMFABRIC_", "ASCEND_", "HCCL_")
_SECRET_WORDS: Final = ("PASSWORD", "SECRET", "TOKEN")
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR
_DEFAULTS: Final = {
    "MC_TRANSFER_TIMEOUT": ("10", "seconds; engine mooncake, transfer_timeout"),
    "MC_TCP_PROGRESS_TIMEOUT_SEC": ("10", "seconds; engine mooncake, transfer_timeout"),
    "MC_TCP_STATUS_TIMEOUT_SEC": ("10", "seconds; engine mooncake, transfer_timeout"),
    "MC_LOG_LEVEL": ("ERROR", "engine mooncake, log_level"),
    "NIXL_LOG_LEVEL": ("ERROR", "engine nixl, log_level"),
    "UCX_TLS": ("all", "UCX's own default: shared memory within a host, TCP or RDMA beyond"),
    "UCX_NET_DEVICES": ("all", "UCX's own default: every interface"),
}
_TESTED: Final = {
    "mooncake-transfer-engine-non-cuda": "0.3.13",
    "mooncake-transfer-engine": "0.3.13",
    "nixl-cu12": "1.5",
    "nixl": "1.5",
    "memfabric_hybrid": "1.3",
    "kv-planner": "0.1",
}

Level = Literal["ok", "note", "problem"]


class Finding(BaseModel):
    """One fact about the machine, and whether transfers can live with it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Level
    subject: str
    text: str


class Setting(BaseModel):
    """A variable that an engine reads, and what counts when it starts here.

    Attributes:
        value: What it is; secrets are not shown.
        origin: "set here", or whose default it is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: str
    origin: str


def findings(host: str | None = None, ports: range = range(0)) -> tuple[Finding, ...]:
    """Everything that was looked at, in the order of the report.

    Args:
        host: Address that ends are to listen on; every address of this machine by default.
        ports: Ports that they are to have there; any free one by default.

    Raises:
        ArgumentError: The host is no text, or the ports are no range within 1 to 65535.
    """
    check_place(host, ports)
    return (_isolation(), *_ports(host, ports), _name(), *_limits(), *_versions(), *_variables(os.environ))


def check_place(host: str | None, ports: range) -> None:
    """Refuses a host or ports that no socket could be asked for.

    Raises:
        ArgumentError: The host is no text, or the ports are no range within 1 to 65535.
    """
    if host is not None:
        check_text("host", host)
    for port in check_kind("ports", ports, range)[:: max(1, len(ports) - 1)]:
        check_whole("ports", port, 65_535, least=1)


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def effective_settings(environment: Mapping[str, str]) -> dict[str, Setting]:
    """Variables that engines read: those that are set, and defaults that count otherwise.

    Raises:
        ArgumentError: The environment is no mapping of texts.
    """
    check_kind("environment", environment, Mapping)  # type: ignore[type-abstract]
    found = {name: Setting(value=value, origin=f"default ({where})") for name, (value, where) in _DEFAULTS.items()}
    for name, value in environment.items():
        check_kind("environment", name, str)
        check_kind(f"environment[{name!r}]", value, str)
        if name.startswith(_PREFIXES):
            hidden = any(word in name for word in _SECRET_WORDS)
            found[name] = Setting(value="(not shown)" if hidden else value, origin="set here")
    for name in ("MC_TRANSFER_TIMEOUT", "MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC"):
        if found[name].origin == "set here":
            note = "set here; the engine's transfer_timeout replaces it unless that is None"
            found[name] = Setting(value=found[name].value, origin=note)
    return dict(sorted(found.items()))


def _isolation() -> Finding:
    now = current_isolation()
    if now.isolated:
        return Finding(level="ok", subject="network", text=now.detail)
    text = (
        f"{now.detail}; mooncake and nixl listen on every interface without asking who writes: keep their ports inside "
        f"a trusted network, or run under python -m kv_transfer.isolation"
    )
    return Finding(level="note", subject="network", text=text)


def _ports(host: str | None, ports: range) -> list[Finding]:
    places = {"given": host} if host is not None else addresses()
    found = [_bind(f"{name} {address}", address, ports) for name, address in places.items()]
    return [*found, _bind("all interfaces (mooncake, nixl)", "0.0.0.0", range(0))]


def _bind(where: str, address: str, ports: range) -> Finding:
    """Whether the ports, or any, can be had at an address."""
    taken = []
    for port in ports or (0,):
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind((address, port))
                server.listen(1)
        except OSError as error:
            taken.append(f"{port or 'any'} ({error.strerror or error})")
    if taken:
        text = f"{where}: cannot have port {', '.join(taken[:4])}{' …' if len(taken) > 4 else ''}"
        return Finding(level="problem", subject="ports", text=f"{text}; give other ports, or an address of this host")
    wanted = f"{ports.start} to {ports.stop - 1} are free" if ports else "ports can be had"
    return Finding(level="ok", subject="ports", text=f"{where}: {wanted}")


def _name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        text = f"{name} has no address ({error}); give engines and ends an address instead of a name"
        return Finding(level="note", subject="host name", text=text)
    if address.startswith("127."):
        text = (
            f"{name} is {address}, which only this machine reaches; give hostname= and host= an address of the network"
        )
        return Finding(level="note", subject="host name", text=text)
    return Finding(level="ok", subject="host name", text=f"{name} is {address}")


def _limits() -> list[Finding]:
    memory, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = f"at most {memory >> 20} MiB can be pinned (ulimit -l); RDMA registration needs the whole pool, TCP nothing"
    unlimited = memory == resource.RLIM_INFINITY
    locked = Finding(
        level="ok" if unlimited else "note", subject="locked memory", text="no limit" if unlimited else text
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"limit {soft}, can be raised to {hard} (ulimit -n)"
    files = Finding(level="ok" if soft >= 4096 else "note", subject="open files", text=text)
    return [locked, files, _shared_memory()]


def _shared_memory() -> Finding:
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError as error:
        return Finding(level="note", subject="shared memory", text=f"{_SHARED_MEMORY} cannot be used: {error}")
    text = f"{usage.free >> 20} of {usage.total >> 20} MiB free in {_SHARED_MEMORY}"
    if usage.free < 1 << 30:
        text += "; loopback with shared=True keeps pools there, nixl its queues (docker: --shm-size)"
        return Finding(level="note", subject="shared memory", text=text)
    return Finding(level="ok", subject="shared memory", text=text)


def _versions() -> list[Finding]:
    installed = {}
    for name in _TESTED:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found = []
    for name, version in installed.items():
        known = _TESTED[name]
        fits = version == known or version.startswith(f"{known}.")
        text = f"{name} {version}" + ("" if fits else f"; tested with {known}")
        found.append(Finding(level="ok" if fits else "note", subject="version", text=text))
    both = [name for name in installed if name.startswith("mooncake")]
    if len(both) > 1:
        text = f"{' and '.join(both)} own the same files; uninstall both and install one"
        found.append(Finding(level="problem", subject="version", text=text))
    return found


def _variables(environment: Mapping[str, str]) -> list[Finding]:
    """Settings that are known to make a transfer fail later, without a reason."""
    found = []
    devices = environment.get("UCX_NET_DEVICES", "all")
    interfaces = {name for _, name in socket.if_nameindex()}
    absent = [name for name in devices.split(",") if name != "all" and ":" not in name and name not in interfaces]
    if absent:
        text = f"UCX_NET_DEVICES names {', '.join(absent)}; interfaces here are {', '.join(sorted(interfaces))}"
        found.append(Finding(level="problem", subject="setting", text=text))
    transports = set(environment.get("UCX_TLS", "all").split(","))
    if not transports & {"all", "tcp", "rc", "rc_x", "ud", "dc", "ib"} and not any(
        t.startswith("^") for t in transports
    ):
        text = f"UCX_TLS={environment['UCX_TLS']} has no transport between hosts; nixl reaches this host only"
        found.append(Finding(level="note", subject="setting", text=text))
    low, high = environment.get("MC_MIN_RPC_PORT"), environment.get("MC_MAX_RPC_PORT")
    if low is not None and high is not None and not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        text = f"MC_MIN_RPC_PORT={low} and MC_MAX_RPC_PORT={high} leave mooncake no port"
        found.append(Finding(level="problem", subject="setting", text=text))
    return found
