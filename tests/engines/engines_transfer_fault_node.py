"""A prefill or decode rank in a process of its own, to be stopped and killed: `test_engines_transfer_faults.py`.

It serves the rooms that it is told, a line each, and says how each ended. Bytes are those of the tests, stamped with
the room. `Nodes` runs this file once, and it forks the ranks: an import of SGLang takes longer than all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  # the emulated NPU and SGLang, before anything else
import numpy as np
import pytest
from engines_transfer import Cluster, Request, configured, decode_rank
from engines_transfer_queue import Gate, within
from transfer_sglang import MHA, SENTINEL, Side

__all__ = ["DELAY", "FROM", "TO", "Node", "Nodes", "check", "make_side", "stamp"]

FROM, TO = [3, 7, 8, 2, 9], [4, 5, 10, 1, 6]
DELAY = 0.1
"""Seconds before a batch of a prefill rank moves; a page is a chunk."""


def make_side() -> Side:
    return Side(MHA, range(2))


def stamp(side: Side, room: int) -> None:
    """The request's bytes at prefill; no other room has them."""
    side.fill(FROM)
    for memory in side.memory:
        memory[FROM] ^= np.uint8(room % 256)


def check(side: Side, room: int) -> None:
    """Every byte at decode is the room's, and no other was touched; then the pages are as new."""
    for memory in side.memory:
        memory[TO] ^= np.uint8(room % 256)
    side.check(TO)
    for memory in side.memory:
        memory[:] = SENTINEL


class Node:
    """The other process, seen from the test."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._file = link.makefile("rw")
        self.pid = int(self._file.readline())
        self.said: list[str] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def tell(self, room: int) -> None:
        print(room, file=self._file, flush=True)

    def heard(self, line: str, seconds: float = 30.0) -> None:
        within(seconds, lambda: line in self.said or not self.lives(), f"{line!r} among {self.said}")
        assert line in self.said, self.said

    def ends(self, room: int, seconds: float) -> None:
        within(
            seconds, lambda: any(f"{room} ended" in line for line in self.said), f"room {room} ended among {self.said}"
        )

    def lives(self) -> bool:
        return self._thread.is_alive()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # dead already
            os.kill(self.pid, number)

    def end(self) -> None:
        if self.lives():
            self.signal(signal.SIGKILL)
        self._thread.join()
        self._file.close()
        self._link.close()

    def _listen(self) -> None:
        self.said.extend(line.strip() for line in iter(self._file.readline, ""))


class Nodes:
    """Starts them: by a process that has imported SGLang, and forks."""

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / "nodes")
        self._process = subprocess.Popen([sys.executable, str(Path(__file__)), self._path], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"listens\n", "the process did not come up"

    @contextlib.contextmanager
    def start(self, role: str, engine: str, options: dict[str, Any], port: int) -> Iterator[Node]:
        """A node; it has begun to serve."""
        link = socket.socket(socket.AF_UNIX)
        link.connect(self._path)
        words = json.dumps({"role": role, "engine": engine, "options": options, "port": port})
        link.sendall(words.encode() + b"\n")
        made = Node(link)
        try:
            made.heard("ready")
            yield made
        finally:
            made.end()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def serve(link: socket.socket) -> None:
    """One node: what the first line says, a room a line behind it."""
    file = link.makefile("rw")
    print(os.getpid(), file=file, flush=True)
    words = json.loads(file.readline())
    options = json.dumps(words["options"])
    with pytest.MonkeyPatch.context() as patch, configured(patch, words["port"], words["engine"], options) as arguments:
        side = make_side()
        if words["role"] == "prefill":
            cluster = Cluster(arguments, words["port"], [side], [], mla=False)
            Gate(cluster.prefill[0], is_open=True, delay=DELAY)
        else:
            cluster = decode_rank(arguments, words["port"], side, mla=False)
        print("ready", file=file, flush=True)
        for line in file:
            room = int(line)
            request = Request(cluster, room)
            if words["role"] == "prefill":
                stamp(side, room)
                request.send(FROM, chunks=[1] * 4)
            else:
                request.offer(TO)
            ends = request.end()
            (status,) = ends[0] or ends[1]
            if words["role"] == "decode" and status:
                check(side, room)
            print(f"{room} ended {status}", file=file, flush=True)


def main() -> None:
    """Fork a node for each that connects."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        print("listens", flush=True)
        while True:
            link, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                serve(link)
                os._exit(0)
            link.close()


if __name__ == "__main__":
    main()
