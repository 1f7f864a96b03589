"""Starts the worker processes, talks to them, and sees that none outlives the front.

Workers die with the front (Linux's parent-death signal), and the front stops all of them when one ends unasked: it then
listens a little longer, because the worker that notices a loss first is seldom the one that caused it. It does not know
what the workers compute.
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
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import zmq

from .config import ROLES, TO_FRONT, Failed, Lost, Role, ServeConfig, Shutdown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel


LISTEN_AFTER_FAILURE = 4.0  # seconds


@dataclass(frozen=True)
class Cause:
    """Why one worker is out.

    Attributes:
        role: which.
        reason: how it ended, or what it reported.
        rank: 0 killed or ended by itself, 1 an error of its own, 2 the loss of a peer.
    """

    role: str
    reason: str
    rank: int


class WorkerFailed(RuntimeError):
    """Workers ended or reported errors; the message begins with the cause, then says what followed from it."""

    def __init__(self, causes: list[Cause], tail: str) -> None:
        self.causes = sorted(causes, key=lambda cause: cause.rank)
        first, *others = self.causes
        lines = [f"{first.role} {first.reason}", *(f"then {cause.role} {cause.reason}" for cause in others)]
        if tail and first.rank:
            lines += [f"last output of {first.role}:", tail]
        super().__init__("\n".join(lines))


@dataclass
class _Worker:
    role: Role
    process: subprocess.Popen[bytes]
    socket: zmq.Socket[bytes]
    log: BinaryIO  # a file without a name: nothing remains of it, however the front ends


class Workers:
    """The worker processes of one run; `close` ends them."""

    def __init__(self, config: ServeConfig) -> None:
        """Start one process a role."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._workers: dict[Role, _Worker] = {}
        try:
            for role in ROLES:
                self._workers[role] = self._start(role, config)
        except BaseException:
            self.close()
            raise

    def _start(self, role: Role, config: ServeConfig) -> _Worker:
        socket = self._context.socket(zmq.PAIR)
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        process = subprocess.Popen(
            [
                sys.executable, "-m", "disaggregated_serving.worker",
                role, f"tcp://127.0.0.1:{port}", str(os.getpid()), config.model_dump_json(),
            ],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return _Worker(role, process, socket, log)

    def kill(self, role: Role) -> None:
        """End a worker as a fault would: at once, without a word."""
        self._workers[role].process.kill()

    def restart(self, role: Role, config: ServeConfig) -> None:
        """Start a worker again, with another config; what is left of the old one is ended."""
        self._end(self._workers.pop(role))
        self._workers[role] = self._start(role, config)

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
                if isinstance(message, Failed | Lost):
                    raise self._explain({worker.role: self._reported(worker, message)})
                yield worker.role, message
            self._check_alive()
            if time.monotonic() - heard > timeout:
                raise TimeoutError(f"no worker said anything for {timeout:.0f} s")

    def _check_alive(self) -> None:
        for worker in self._workers.values():
            ended = self._ended(worker)
            if ended is not None and not worker.socket.poll(0):  # what it said before it ended is read first
                raise self._explain({worker.role: ended})

    @staticmethod
    def _ended(worker: _Worker) -> Cause | None:
        code = worker.process.poll()
        if code is None:
            return None
        how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return Cause(worker.role, how, 0)

    @staticmethod
    def _reported(worker: _Worker, message: Failed | Lost) -> Cause:
        if isinstance(message, Lost):
            return Cause(worker.role, f"lost its peer: {message.message}", 2)
        return Cause(worker.role, f"failed: {message.message}", 2 if message.peer_lost else 1)

    def _explain(self, causes: dict[str, Cause]) -> WorkerFailed:
        """Listen a little longer, so that the cause is named before what followed from it."""
        deadline = time.monotonic() + LISTEN_AFTER_FAILURE
        while time.monotonic() < deadline and len(causes) < len(self._workers):
            for worker in self._workers.values():
                while worker.role not in causes and worker.socket.poll(0):
                    message = TO_FRONT.validate_json(worker.socket.recv())
                    if isinstance(message, Failed | Lost):
                        causes[worker.role] = self._reported(worker, message)
                ended = self._ended(worker)
                if ended is not None and worker.role not in causes:
                    causes[worker.role] = ended
            time.sleep(0.05)
        first = min(causes.values(), key=lambda cause: cause.rank)
        return WorkerFailed(list(causes.values()), self._tail(self._workers[cast("Role", first.role)]))

    @staticmethod
    def _tail(worker: _Worker, lines: int = 12) -> str:
        worker.log.seek(0)
        return "\n".join(worker.log.read().decode(errors="replace").splitlines()[-lines:])

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
            worker.process.kill()
        for worker in self._workers.values():
            self._end(worker)
        self._workers.clear()
        self._context.term()

    @staticmethod
    def _end(worker: _Worker) -> None:
        worker.process.kill()
        worker.process.wait()
        worker.socket.close()
        worker.log.close()
