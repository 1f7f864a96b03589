"""What the doctor says of a machine: addresses, ports, versions, and settings with what counts."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import socket
from typing import Any

import pytest

from kv_transfer.machine import Finding, addresses, effective_settings, findings


def _of(subject: str, found: tuple[Finding, ...]) -> list[Finding]:
    return [finding for finding in found if finding.subject == subject]


def test_every_address_is_tried() -> None:
    found = addresses()
    assert "127.0.0.1" in found.values()
    assert set(found) <= {name for _, name in socket.if_nameindex()}
    ports = _of("ports", findings())
    assert len(ports) == len(found) + 1 and all(finding.level == "ok" for finding in ports)
    for name, address in found.items():
        assert any(f"{name} {address}" in finding.text for finding in ports)
    assert "all interfaces" in ports[-1].text


def test_a_taken_port_and_a_foreign_address_are_problems() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (taken, _) = _of("ports", findings("127.0.0.1", range(port, port + 1)))
        assert taken.level == "problem" and f"cannot have port {port} (Address already in use)" in taken.text
    (free, _) = _of("ports", findings("127.0.0.1", range(port, port + 1)))
    assert free.level == "ok" and f"{port} to {port} are free" in free.text
    (foreign, _) = _of("ports", findings("198.51.100.7"))
    assert foreign.level == "problem" and "an address of this host" in foreign.text


def test_settings_say_what_counts_and_where_it_comes_from() -> None:
    environment = {"MC_TRANSFER_TIMEOUT": "5", "UCX_TLS": "tcp", "MC_REDIS_PASSWORD": "hush", "HOME": "/x"}
    found = effective_settings(environment)
    assert found["UCX_TLS"].value == "tcp" and found["UCX_TLS"].origin == "set here"
    assert found["NIXL_LOG_LEVEL"].value == "ERROR" and "engine nixl" in found["NIXL_LOG_LEVEL"].origin
    assert "replaces it" in found["MC_TRANSFER_TIMEOUT"].origin
    assert "hush" not in str(found) and "HOME" not in found and list(found) == sorted(found)


@pytest.mark.parametrize(
    ("name", "value", "level", "words"),
    [
        ("UCX_NET_DEVICES", "lo,absent0", "problem", "UCX_NET_DEVICES names absent0; interfaces here are"),
        ("UCX_TLS", "shm,self", "note", "no transport between hosts"),
        ("MC_MIN_RPC_PORT", "9000", "problem", "leave mooncake no port"),
        ("UCX_TLS", "^rc", None, ""),
        ("UCX_NET_DEVICES", "mlx5_0:1", None, ""),
    ],
)
def test_settings_that_cannot_work(
    name: str, value: str, level: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    if name == "MC_MIN_RPC_PORT":
        monkeypatch.setenv("MC_MAX_RPC_PORT", "8000")
    found = _of("setting", findings())
    assert [(finding.level, words in finding.text) for finding in found] == ([] if level is None else [(level, True)])


def test_versions_that_were_not_tested_and_two_wheels_of_one_library(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"mooncake-transfer-engine": "0.3.13", "mooncake-transfer-engine-non-cuda": "0.4.0", "nixl": "1.55.0"}

    def version(name: str) -> str:
        if name in versions:
            return versions[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = {finding.text: finding.level for finding in _of("version", findings())}
    assert found["mooncake-transfer-engine 0.3.13"] == "ok"
    assert found["mooncake-transfer-engine-non-cuda 0.4.0; tested with 0.3.13"] == "note"
    assert found["nixl 1.55.0; tested with 1.5"] == "note"
    assert [text for text, level in found.items() if level == "problem" and "own the same files" in text]


def test_limits_and_names_that_stand_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    small: Any = shutil.disk_usage(os.curdir)._replace(free=64 << 20, total=64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: small)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    found = findings()
    (memory,) = _of("shared memory", found)
    assert memory.level == "note" and "64 of 64 MiB" in memory.text and "--shm-size" in memory.text
    assert _of("host name", found)[0].level == "note" and "only this machine reaches" in _of("host name", found)[0].text
    assert [finding.level for finding in _of("open files", found)] == ["note"]
    assert "can be pinned" in _of("locked memory", found)[0].text

    def unknown(name: str) -> str:
        raise socket.gaierror("not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert "has no address" in _of("host name", findings())[0].text
