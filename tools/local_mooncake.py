"""Owns a Mooncake master for benches, on loopback; it listens on more, so the caller sees to a namespace of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["mooncake_master"]


@contextmanager
def mooncake_master() -> Iterator[str]:
    """A master on loopback; its address."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as held:
            ports.append(held.getsockname()[1])
    program = str(Path(sys.executable).with_name("mooncake_master"))
    command = [program, f"--rpc_port={ports[0]}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
    silent = subprocess.DEVNULL
    process = subprocess.Popen([*command, f"--metrics_port={ports[1]}"], stdout=silent, stderr=silent)
    try:
        for _ in range(200):
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", ports[0])) == 0:
                    break
            time.sleep(0.05)
        yield f"127.0.0.1:{ports[0]}"
    finally:
        process.kill()
        process.wait()
