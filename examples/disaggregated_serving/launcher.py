"""Starts the worker processes, talks to them, and sees that none outlives the front.

Workers die with the front (Linux's parent-death signal), and the front stops all of them when one ends unasked. It does
not know what the workers compute.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from .config import ROLES, TO_FRONT, Failed, Role, ServeConfig, Shutdown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel


class WorkerFailed(RuntimeError):
    """A worker ended or reported an error; the message says which, how, and what it printed last."""

    def __init__(self, role: str, reason: str, tail: str) -> None:
        self.role, self.reason, self.tail = role, reason, tail
        super().__init__(f"{role} {reason}" + (f"\nlast output of {role}:\n{tail}" if tail else ""))


@dataclass
class _Worker:
    role: Role
    process: subprocess.Popen[bytes]
    socket: zmq.Socket[bytes]
    log: Path


class Workers:
    """The worker processes of one run; use as a context manager."""

    def __init__(self, config: ServeConfig) -> None:
        """Start one process a role."""
        self._folder = tempfile.TemporaryDirectory(prefix="disaggregated-serving-")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._workers: dict[Role, _Worker] = {}
        try:
            for role in ROLES:
                self._workers[role] = self._start(role, config)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, role: Role, config: ServeConfig) -> _Worker:
        socket = self._context.socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        log = Path(self._folder.name) / f"{role}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "disaggregated_serving.worker",
                    role, f"tcp://127.0.0.1:{port}", str(os.getpid()), config.model_dump_json(),
                ],
                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        return _Worker(role, process, socket, log)

    @property
    def processes(self) -> dict[Role, int]:
        """Process ids by role."""
        return {role: worker.process.pid for role, worker in self._workers.items()}

    def send(self, role: Role, message: BaseModel) -> None:
        """Send `message` to a worker."""
        self._workers[role].socket.send(message.model_dump_json().encode())

    def events(self, *, timeout: float) -> Iterator[tuple[Role, Any]]:
        """Messages of the workers as they come.

        Raises:
            WorkerFailed: a worker ended, or reported an error.
            TimeoutError: no worker said anything for `timeout` seconds.
        """
        poller = zmq.Poller()
        roles = {}
        for worker in self._workers.values():
            poller.register(worker.socket, zmq.POLLIN)
            roles[worker.socket] = worker
        heard = time.monotonic()
        while True:
            ready = poller.poll(200)
            for socket, _ in ready:
                heard = time.monotonic()
                worker = roles[socket]
                message = TO_FRONT.validate_json(socket.recv())
                if isinstance(message, Failed):
                    raise WorkerFailed(worker.role, f"failed: {message.message}", self._tail(worker))
                yield worker.role, message
            self._check_alive()
            if time.monotonic() - heard > timeout:
                raise TimeoutError(f"no worker said anything for {timeout:.0f} s")

    def _check_alive(self) -> None:
        for worker in self._workers.values():
            code = worker.process.poll()
            if code is not None and not worker.socket.poll(0):  # what it said before it ended is read first
                how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
                raise WorkerFailed(worker.role, how, self._tail(worker))

    @staticmethod
    def _tail(worker: _Worker, lines: int = 12) -> str:
        return "\n".join(worker.log.read_text(errors="replace").splitlines()[-lines:])

    def shutdown(self, *, timeout: float = 10.0) -> None:
        """Ask all workers to leave and wait for them."""
        for role, worker in self._workers.items():
            if worker.process.poll() is None:
                self.send(role, Shutdown())
        deadline = time.monotonic() + timeout
        for worker in self._workers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.1, deadline - time.monotonic()))

    def close(self) -> None:
        """Kill what still runs and free everything."""
        for worker in self._workers.values():
            if worker.process.poll() is None:
                worker.process.kill()
        for worker in self._workers.values():
            worker.process.wait()
            worker.socket.close()
        self._workers.clear()
        self._context.term()
        self._folder.cleanup()
