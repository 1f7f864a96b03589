"""Scenarios over real processes, run as `python transfer_scenarios.py NAME ENGINE`.

Each starts two prefill processes and a decode process, and exits with 0 when everything was as it should be.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NODE = Path(__file__).with_name("transfer_node.py")
SOURCES = {0: [3, 8, 1, 5, 2], 1: [6, 1, 9, 4, 15]}
PAGES = [7, 2, 9, 4, 11]
BIG = list(range(1, 17))


class Refused(AssertionError):
    """An answer that holds an error where none was expected."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(answer)
        self.answer = answer


class Process:
    """A node: `call` sends a command and returns its answer."""

    node = NODE

    def __init__(self, **options: object) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, str(self.node), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._read = b""

    def up(self) -> Process:
        assert self._answer() == {"up": True}
        return self

    def begin(self, do: str, **arguments: object) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def _answer(self, seconds: float = 60.0) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while not (line := self._line(deadline)).startswith(b"{"):
            print(line.decode(), file=sys.stderr, flush=True)  # UCX complains on standard output
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def _line(self, deadline: float) -> bytes:
        assert self.popen.stdout is not None
        while b"\n" not in self._read:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self.popen.stdout], [], [], left)[0], "no answer in time"
            data = os.read(self.popen.stdout.fileno(), 1 << 16)
            assert data, f"the process ended with {self.popen.wait()}"
            self._read += data
        line, self._read = self._read.split(b"\n", 1)
        return line

    def end(self, seconds: float = 60.0) -> dict[str, Any]:
        return self._answer(seconds)

    def call(self, do: str, **arguments: object) -> dict[str, Any]:
        self.begin(do, **arguments)
        return self._answer()

    def ok(self, do: str, **arguments: object) -> dict[str, Any]:
        answer = self.call(do, **arguments)
        if "error" in answer:
            raise Refused(answer)
        return answer

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def leave(self) -> int:
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        return self.popen.wait(60)


class Cluster:
    """Two prefill stages and one decode rank, connected; a peer that is silent for `patience` seconds is lost."""

    def __init__(self, engine: str, keep: contextlib.ExitStack, patience: float) -> None:
        self.engine = engine
        self.patience = patience
        self._keep = keep
        self.decode = self.start_decode("tcp://127.0.0.1:0").up()
        self.endpoint = self.decode.ok("endpoint")["endpoint"]
        self.prefill = [self.start_stage(stage) for stage in SOURCES]
        for process in self.prefill:
            process.up().ok("connect")
        self.decode.ok("ready")

    def start(self, **options: object) -> Process:
        process = Process(**options)
        self._keep.callback(process.kill)
        return process

    def start_decode(self, bind: str) -> Process:
        return self.start(role="decode", engine=self.engine, bind=bind, patience=self.patience)

    def start_stage(self, stage: int) -> Process:
        options = {"engine": self.engine, "endpoint": self.endpoint, "patience": self.patience}
        return self.start(role="prefill", stage=stage, **options)

    def serve(self, room: int, stages: tuple[int, ...] = (0, 1)) -> None:
        """One room, chunked and permuted, with every byte checked."""
        self.decode.ok("wipe", pages=BIG)
        self.decode.ok("open", room=room, pages=PAGES)
        for stage in stages:
            process, source = self.prefill[stage], SOURCES[stage]
            assert process.ok("open", room=room)["pages"] == len(PAGES)
            process.ok("send", room=room, pages=source[:2], start=0)
            process.ok("send", room=room, pages=source[2:], start=2)
            assert process.ok("finish", room=room, metadata={"stage": stage})["state"] == "finished"
        result = self.decode.ok("wait", room=room)
        assert result["metadata"] == {f"pp{stage} tp0": {"stage": stage} for stage in SOURCES}
        for stage in stages:
            moved = list(zip(PAGES, SOURCES[stage], strict=True))
            faults = self.decode.ok("faults", moved=moved, stages=[stage])["faults"]
            assert [fault for fault in faults if f", {2 * stage})" in fault or f", {2 * stage + 1})" in fault] == []
            assert not any("outside" in fault for fault in faults)

    def begin_room(self, room: int) -> None:
        """A room whose sixteen pages every stage is about to send."""
        self.decode.ok("open", room=room, pages=BIG)
        for process in self.prefill:
            process.ok("open", room=room)


@contextlib.contextmanager
def soon(seconds: float, what: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    print(f"{what}: {took:.2f} s", flush=True)
    assert took < seconds, f"{what} took {took:.2f} s"


def exact(cluster: Cluster) -> None:
    for room in (0, 1, 2**63 - 1):
        cluster.serve(room)


def aborts(cluster: Cluster) -> None:
    cluster.begin_room(1)
    for process in cluster.prefill:
        process.ok("send", room=1, pages=BIG, start=0)
    cluster.decode.ok("abort", room=1, reason="client went away")
    answer = cluster.decode.call("wait", room=1)
    assert (answer["error"], "client went away" in answer["text"]) == ("TransferAborted", True), answer
    assert cluster.decode.ok("released", room=1, seconds=10) == {"released": True, "state": "aborted"}
    cluster.decode.ok("wipe", pages=BIG)
    for process in cluster.prefill:
        answer = process.call("finish", room=1, metadata={})
        assert (answer["error"], "client went away" in answer["text"]) == ("TransferAborted", True), answer
    time.sleep(0.3)
    assert cluster.decode.ok("faults", moved=[], stages=[0, 1])["faults"] == []
    cluster.begin_room(1)
    cluster.prefill[0].ok("send", room=1, pages=BIG, start=0)
    cluster.prefill[0].ok("abort", room=1, reason="prompt too long")
    answer = cluster.decode.call("wait", room=1)
    assert (answer["error"], "pp0 tp0: " in answer["text"], "prompt too long" in answer["text"]) == (
        "TransferAborted",
        True,
        True,
    )
    answer = cluster.prefill[1].call("wait", room=1)
    assert "prompt too long" in answer["text"], answer
    assert cluster.decode.ok("released", room=1, seconds=10)["released"]
    cluster.serve(1)


def receiver_killed(cluster: Cluster, pause: float = 0.2) -> None:
    """In the middle of a write; then a new one listens at the same address and the senders serve on."""
    cluster.begin_room(0)
    cluster.decode.signal(signal.SIGSTOP)
    for process in cluster.prefill:
        process.ok("send", room=0, pages=BIG, start=0)
    time.sleep(pause)
    cluster.decode.kill()
    with soon(15, "senders know that the receiver is dead"):
        for process in cluster.prefill:
            answer = process.call("wait", room=0)
            assert answer["error"] == "PeerLost", answer
    for process in cluster.prefill:
        assert process.call("open", room=1)["error"] == "PeerLost"
    cluster.decode = cluster.start_decode(cluster.endpoint).up()
    for process in cluster.prefill:
        process.ok("connect")
    cluster.decode.ok("ready")
    cluster.serve(0)


def sender_killed(cluster: Cluster, pause: float = 0.2) -> None:
    """One stage in the middle of a write; then it is started again and the same room number works."""
    cluster.begin_room(0)
    cluster.decode.signal(signal.SIGSTOP)
    cluster.prefill[0].ok("send", room=0, pages=BIG, start=0)
    time.sleep(pause)
    cluster.prefill[0].kill()
    cluster.decode.signal(signal.SIGCONT)
    with soon(15, "the receiver knows that a sender is dead"):
        answer = cluster.decode.call("wait", room=0)
        assert (answer["error"], "pp0 tp0 is lost" in answer["text"]) == ("PeerLost", True), answer
    answer = cluster.prefill[1].call("wait", room=0)
    assert "pp0 tp0 is lost" in answer["text"], answer
    assert cluster.decode.call("open", room=9, pages=[1])["error"] == "PeerLost"
    with soon(15, "its pages are released"):
        assert cluster.decode.ok("released", room=0, seconds=10)["released"]
    cluster.decode.ok("wipe", pages=BIG)
    time.sleep(0.3)
    assert cluster.decode.ok("faults", moved=[], stages=[0, 1])["faults"] == []
    cluster.prefill[0] = cluster.start_stage(0).up()
    cluster.prefill[0].ok("connect")
    cluster.decode.ok("ready")
    cluster.serve(0)


def stopped(cluster: Cluster, pause: float = 0.2) -> None:
    """SIGSTOP is not death: pages stay held until the writer wakes up and answers."""
    cluster.begin_room(0)
    time.sleep(pause)
    cluster.prefill[1].signal(signal.SIGSTOP)
    with soon(15, "the receiver takes a stopped sender for lost"):
        answer = cluster.decode.call("wait", room=0)
        assert (answer["error"], "pp1 tp0 is lost: silent" in answer["text"]) == ("PeerLost", True), answer
    assert cluster.decode.ok("released", room=0, seconds=1.0) == {"released": False, "state": "aborting"}
    cluster.prefill[1].signal(signal.SIGCONT)
    assert cluster.decode.ok("released", room=0, seconds=10)["released"]
    assert cluster.prefill[1].call("wait", room=0)["error"] in ("PeerLost", "TransferAborted")
    assert cluster.prefill[1].call("open", room=1)["error"] == "PeerLost"
    cluster.prefill[1].ok("connect")
    cluster.decode.ok("ready")
    cluster.serve(0)
    cluster.begin_room(3)
    cluster.decode.signal(signal.SIGSTOP)
    cluster.prefill[0].ok("send", room=3, pages=BIG, start=0)
    with soon(15, "a sender takes a stopped receiver for lost"):
        answer = cluster.prefill[0].call("wait", room=3)
        assert (answer["error"], "silent" in answer["text"]) == ("PeerLost", True), answer
    with soon(20, "its engine gives up"):
        while not cluster.prefill[0].ok("released", room=3)["released"]:
            time.sleep(0.05)


def leaves(cluster: Cluster) -> None:
    for process in (*cluster.prefill, cluster.decode):
        assert process.leave() == 0


SCENARIOS: dict[str, tuple[Callable[[Cluster], None], ...]] = {
    "arrives": (exact, aborts, leaves),
    "killed": (sender_killed, receiver_killed, leaves),
    "stopped": (stopped,),
}
HASTY, PATIENT = 2.0, 30.0  # nobody is lost by silence, however busy the machine is, where that is not the scenario


def main(name: str, engine: str) -> None:
    with contextlib.ExitStack() as keep:
        cluster = Cluster(engine, keep, HASTY if name == "stopped" else PATIENT)
        for scenario in SCENARIOS[name]:
            scenario(cluster)
    print("as it should be", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
