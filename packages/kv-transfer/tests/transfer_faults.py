"""Processes that are killed or stopped at random moments, and what must hold for those that live on.

Whatever happens to one process while a room is under way, the others end the room within seconds, with the right bytes
or with a named error; and once the process is back, the next room arrives byte for byte.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable

from transfer_scenarios import BIG, HASTY, SOURCES, Cluster, Process, Refused

ATTEMPTS = 5
ERRORS = {"PeerLost", "TransferAborted", "TransferFailed"}
BOUND = 18.0  # seconds: silence of a peer, the engine's own time-out, and a busy machine
LAZY = {"mooncake": 20, "nixl": 2}
"""Connections to two peers, opened as engines see fit; and Mooncake's library twice, once an address came again."""
HOW = ("killed", "killed", "paused", "stopped and continued", "stopped and killed")


def _end(process: Process, do: str, since: float) -> bool:
    """Whether the call went well; else it ended in time with a named error."""
    answer = process.end(max(1.0, BOUND - (time.monotonic() - since)))
    error = answer.get("error")
    assert error is None or (error in ERRORS and len(answer["text"]) > 20), f"{do}: {answer}"
    return error is None


def _victim(cluster: Cluster, number: int) -> Process:
    return cluster.decode if number == len(SOURCES) else cluster.prefill[number]


def random_fault(cluster: Cluster, dice: random.Random, room: int) -> str:
    """One room with one fault; returns what happened."""
    number, how = dice.randrange(len(SOURCES) + 1), dice.choice(HOW)
    victim = _victim(cluster, number)
    decode = cluster.decode
    after = room + ATTEMPTS
    room = _begin(cluster, range(room, after))
    cluster.decode.begin("wait", room=room)
    for process in cluster.prefill:
        process.begin("send", room=room, pages=BIG, start=0)
        process.begin("finish", room=room, metadata={})
    time.sleep(dice.choice((0.0, 0.01, 0.05, 0.3)) * dice.random())
    since = time.monotonic()
    killed = how == "killed"
    victim.signal(signal.SIGKILL if killed else signal.SIGSTOP)
    if how == "paused":
        time.sleep(dice.uniform(0.1, 1.0))
        victim.signal(signal.SIGCONT)
    paused = how == "paused"
    if paused or victim is not cluster.decode:
        complete = _end(cluster.decode, "wait", since)
        if complete:
            moved = [(page, page) for page in BIG]
            assert cluster.decode.ok("faults", moved=moved, stages=list(SOURCES))["faults"] == []
    for process in cluster.prefill:
        if paused or process is not victim:
            _end(process, "send", since)
            _end(process, "finish", since)
    if how == "stopped and continued":
        since = time.monotonic()
        victim.signal(signal.SIGCONT)
        for do in ("wait",) if victim is cluster.decode else ("send", "finish"):
            _end(victim, do, since)
    if killed or how == "stopped and killed":
        victim.kill()
        _replace(cluster, number)
    if cluster.decode is decode:
        assert decode.ok("released", room=room, seconds=10)["released"]
    _serve_again(cluster, range(after, after + ATTEMPTS))
    return f"{'decode' if number == len(SOURCES) else 'prefill'} {how}"


class Steady:
    """What each process of a cluster holds, which is no more after many faults of its peers than after the first."""

    def __init__(self) -> None:
        self._first: dict[int, dict[str, int]] = {}

    def check(self, cluster: Cluster) -> None:
        slack = LAZY.get(cluster.engine, 0)
        for process in (*cluster.prefill, cluster.decode):
            now = process.ok("held")
            first = self._first.setdefault(process.popen.pid, now)
            deadline = time.monotonic() + BOUND
            while any(now[what] > first[what] + slack for what in first):
                assert time.monotonic() < deadline, f"{now}, where {first} was held after the first fault"
                time.sleep(0.1)
                now = process.ok("held")


def _replace(cluster: Cluster, number: int) -> None:
    if number == len(SOURCES):
        cluster.decode = cluster.start_decode(cluster.endpoint).up()
    else:
        cluster.prefill[number] = cluster.start_stage(number).up()


def _begin(cluster: Cluster, rooms: Iterable[int]) -> int:
    """Opens a room for all pages, and says which."""
    return _again(cluster, rooms, cluster.begin_room)


def _serve_again(cluster: Cluster, rooms: Iterable[int]) -> None:
    """A room with the right bytes."""
    _again(cluster, rooms, cluster.serve)


def _again(cluster: Cluster, rooms: Iterable[int], do: Callable[[int], None]) -> int:
    """On a machine that starves a process, its peers may take it for lost once more; that is told like any other."""
    for room in rooms:
        _heal(cluster)
        cluster.decode.ok("wipe", pages=BIG)
        try:
            do(room)
        except Refused as refused:
            assert refused.answer["error"] in ERRORS, refused.answer
            cluster.decode.call("abort", room=room, reason="once more")
            cluster.decode.call("released", room=room, seconds=10)
        else:
            return room
    raise AssertionError("no room is served any more")


def _heal(cluster: Cluster) -> None:
    """Whoever lost its peer connects again, as an engine would; until all are there, and think so."""
    deadline = time.monotonic() + 30
    while True:
        answers = [process.call("connect") for process in cluster.prefill]
        errors = {answer.get("error") for answer in answers}
        assert errors <= {None, "SessionStateError", "PeerLost", "PeerRefused", "TransferTimeout"}, answers
        if errors == {"SessionStateError"} and cluster.decode.ok("is_ready")["ready"]:
            assert all("is connected" in answer["text"] for answer in answers), answers
            return
        assert time.monotonic() < deadline, "the ranks do not find together again"
        time.sleep(0.05)


def main(engine: str, rounds: int, seed: int) -> None:
    dice = random.Random(seed)
    with contextlib.ExitStack() as keep:
        cluster, steady = Cluster(engine, keep, HASTY), Steady()
        for room in range(rounds):
            print(random_fault(cluster, dice, 10 * room), flush=True)
            steady.check(cluster)
    print("as it should be", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
