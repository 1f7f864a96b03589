"""What a process holds for peers that died is no more after many than after one: `python transfer_handles.py ENGINE …`.

One side lives on; peers come, are served a room, and die idle, in a room, or stopped. Peers are forked by a process
that has imported everything, so that each costs little. Exits with 0 when everything was as it should be.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from transfer_memory import RankMemory, make_layout, stages, whole
from transfer_node import OPTIONS, TIMEOUTS, allocator

import kv_transfer as kt

PAGES = [3, 1, 4]
FAULTS = ("idle", "in a room", "stopped", "idle")
FORKS = multiprocessing.get_context("forkserver")


class Held(NamedTuple):
    """Counts of a process: open files and sockets, threads, maps of shared memory, peers that an engine knows."""

    files: int
    threads: int
    maps: int
    peers: int

    @classmethod
    def now(cls, engine: kt.TransferEngine) -> Held:
        maps = Path("/proc/self/maps").read_text()
        known: dict[str, object] = getattr(engine, "_connected" if engine.name == "mooncake" else "_peers")
        return cls(
            len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps.count("/dev/shm/"), len(known)
        )

    def is_within(self, other: Held) -> bool:
        return all(one <= most for one, most in zip(self, other, strict=True))


class Side:
    """One end with its memory and engine, here or in a process that dies."""

    def __init__(self, role: str, engine: str, endpoint: str) -> None:
        layout = make_layout()
        self.engine = kt.create_engine(engine, **OPTIONS.get(engine, {}))
        self.memory: RankMemory
        self.end: Any
        if role == "decode":
            self.memory = whole(layout, allocate=allocator(engine))
            self.end = kt.Receiver(self.memory.manifest, self.engine, bind=endpoint, prefill_ranks=1, timeouts=TIMEOUTS)
        else:
            self.memory = stages(layout, 1, allocate=allocator(engine))[0]
            self.end = kt.Sender(self.memory.manifest, self.engine, endpoint=endpoint, timeouts=TIMEOUTS)

    def serve(self, room: int) -> None:
        """This side's part of a room that ends well."""
        if isinstance(self.end, kt.Receiver):
            self.end.wait_ready()
            self.memory.wipe(PAGES)
            session = self.end.open(room, PAGES)
            session.wait(60)
            assert self.memory.faults({page: page for page in PAGES}) == []
            assert session.wait_released(60)
        else:
            sending = self.end.open(room)
            sending.send(PAGES, start=0)
            sending.finish()

    def close(self) -> None:
        self.end.close()
        self.engine.close()


def peer(number: int, role: str, engine: str, endpoint: str, link: Connection) -> None:
    """A process that serves the rooms it is told, until it is killed.

    It has ports of Mooncake's that no other peer has: for one that came again, the library would be started again.
    """
    low = 15000 + 100 * number
    os.environ |= {"MC_MIN_RPC_PORT": str(low), "MC_MAX_RPC_PORT": str(low + 99)}
    side = Side(role, engine, endpoint)
    if role == "decode":
        link.send(side.end.endpoint)
    else:
        side.end.connect()
        link.send(endpoint)
    while True:
        side.serve(link.recv())
        link.send("served")


@contextlib.contextmanager
def started(*arguments: str | int) -> Iterator[tuple[Any, Connection, str]]:
    """A peer: its process, a link to it, and the endpoint of the decode side."""
    link, other = FORKS.Pipe()
    process = FORKS.Process(target=peer, args=(*arguments, other), daemon=True)
    process.start()
    other.close()
    with link:
        assert link.poll(60), "the peer did not come up"
        yield process, link, link.recv()
    process.join()
    process.close()


def outlives(role: str, engine: str) -> Held:
    """A side that lives on when peer after peer dies."""
    here: Side | None = None
    most: Held | None = None
    endpoint = "tcp://127.0.0.1:0"
    if role == "decode":
        here = Side(role, engine, endpoint)
        endpoint = here.end.endpoint
    for room, fault in enumerate(FAULTS):
        other = "prefill" if role == "decode" else "decode"
        with started(room, other, engine, endpoint) as (process, link, endpoint):
            here = here or Side(role, engine, endpoint)
            if role == "prefill":
                here.end.connect()
                here.end.wait_ready()
            link.send(room)
            here.serve(room)
            assert link.poll(60) and link.recv() == "served"
            if fault == "in a room":
                link.send(100 + room)
                die_in_room(here, process, 100 + room)
            elif fault == "stopped":
                os.kill(process.pid, signal.SIGSTOP)
            process.kill()
        most = settle(here, most, fault)
    assert here is not None and most is not None
    here.close()
    return most


def die_in_room(here: Side, process: Any, room: int) -> None:
    if isinstance(here.end, kt.Receiver):
        arriving = here.end.open(room, PAGES)
        process.kill()
        with contextlib.suppress(kt.TransferError):
            arriving.wait(60)
        assert arriving.wait_released(60)
    else:
        leaving = here.end.open(room)
        process.kill()
        with contextlib.suppress(kt.TransferError):
            leaving.send(PAGES, start=0)
            leaving.finish(timeout=60)


def settle(here: Side, most: Held | None, fault: str) -> Held:
    """Waits until the peer is known to be gone and no more is held than `most`; returns what is."""
    deadline = time.monotonic() + 60
    while True:
        now = Held.now(here.engine)
        if not (here.end.is_ready or now.peers) and (most is None or now.is_within(most)):
            return most or now
        assert time.monotonic() < deadline, f"{fault}: {now} where {most} was held after the first peer"
        time.sleep(0.01)


def main(engines: list[str]) -> None:
    libraries = ["mooncake.engine", "nixl_cu12._api"]
    FORKS.set_forkserver_preload(["transfer_node", *libraries, *(f"kv_transfer.engines.{name}" for name in engines)])
    for engine in engines:
        for role in ("prefill", "decode") if engine == "loopback" else ("prefill",):  # readers hold nothing more
            print(f"{engine}: a {role} side that outlived its peers holds {outlives(role, engine)}", flush=True)
    print("as it should be", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
