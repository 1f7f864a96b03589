"""One prefill or decode process for the process tests: reads commands as JSON lines, answers with JSON lines."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from transfer_memory import Allocate, RankMemory, make_layout, stages, whole

import kv_transfer as kt

STAGES = 2
PAGES = 17
TIMEOUTS = kt.Timeouts(
    handshake=20,
    offer=10,
    transfer=30,
    heartbeat_interval=0.1,
    peer_lost_after=30,
    dead_writer_grace=0.5,
    drain=2,
)
OPTIONS: dict[str, dict[str, Any]] = {
    "mooncake": {"transfer_timeout": 3.0, "max_entries_per_batch": 64},
    "loopback": {"shared": True},
}
ARENAS: list[kt.SharedArena] = []  # as long as the process
Answer = dict[str, Any]


def allocator(engine: str) -> Allocate:
    """Where peers of other processes can reach it with this engine."""

    def shared(nbytes: int) -> npt.NDArray[np.uint8]:
        ARENAS.append(kt.SharedArena(nbytes))
        return ARENAS[-1].array

    return shared if engine == "loopback" else lambda nbytes: np.empty(nbytes, np.uint8)


class Node:
    """Commands are the public methods; a `TransferError` becomes an answer."""

    def __init__(self, memory: RankMemory, engine: str) -> None:
        self.memory = memory
        self.engine = kt.create_engine(engine, **OPTIONS.get(engine, {}))

    def faults(self, moved: list[tuple[int, int]], stages: list[int]) -> Answer:
        names = [name for name in self.memory.names if name[2] // 2 in stages]
        return {"faults": self.memory.faults(dict(moved), names=names)}

    def wipe(self, pages: list[int]) -> Answer:
        self.memory.wipe(pages)
        return {}

    def held(self) -> Answer:
        """Open files and sockets, threads, and maps of shared memory of this process."""
        maps = Path("/proc/self/maps").read_text().count("/dev/shm/")
        return {"files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")), "maps": maps}


class Decode(Node):
    def __init__(
        self,
        engine: str,
        bind: str,
        stages: int = STAGES,
        patience: float = TIMEOUTS.peer_lost_after,
        policy: Literal["fail", "retry", "recompute"] = "fail",
    ) -> None:
        super().__init__(whole(_layout(), pages=PAGES, allocate=allocator(engine)), engine)
        self.receiver = kt.Receiver(
            self.memory.manifest,
            self.engine,
            bind=bind,
            prefill_ranks=stages,
            timeouts=dataclasses.replace(TIMEOUTS, peer_lost_after=patience),
            on_failed_pages=policy,
        )
        self.sessions: dict[int, kt.ReceiverSession] = {}

    def endpoint(self) -> Answer:
        return {"endpoint": self.receiver.endpoint}

    def is_ready(self) -> Answer:
        return {"ready": self.receiver.is_ready}

    def ready(self) -> Answer:
        self.receiver.wait_ready()
        return {}

    def open(self, room: int, pages: list[int]) -> Answer:
        self.sessions[room] = self.receiver.open(room, pages)
        return {"generation": self.sessions[room].generation}

    def wait(self, room: int) -> Answer:
        result = self.sessions[room].wait(20)
        return {"nbytes": result.nbytes, "metadata": {str(rank): dict(data) for rank, data in result.metadata.items()}}

    def released(self, room: int, seconds: float) -> Answer:
        return {"released": self.sessions[room].wait_released(seconds), "state": self.sessions[room].state.value}

    def abort(self, room: int, reason: str) -> Answer:
        self.sessions[room].abort(reason)
        return {}

    def close(self) -> None:
        self.receiver.close()
        self.engine.close()


class Prefill(Node):
    def __init__(self, engine: str, stage: int, endpoint: str, patience: float = TIMEOUTS.peer_lost_after) -> None:
        memory = stages(_layout(), STAGES, pages=PAGES, only=[stage], allocate=allocator(engine))[0]
        super().__init__(memory, engine)
        timeouts = dataclasses.replace(TIMEOUTS, peer_lost_after=patience)
        self.sender = kt.Sender(self.memory.manifest, self.engine, endpoint=endpoint, timeouts=timeouts)
        self.sessions: dict[int, kt.SenderSession] = {}

    def connect(self) -> Answer:
        self.sender.connect()
        return {}

    def open(self, room: int) -> Answer:
        self.sessions[room] = self.sender.open(room)
        return {"pages": self.sessions[room].pages}

    def send(self, room: int, pages: list[int], start: int) -> Answer:
        self.sessions[room].send(pages, start=start)
        return {}

    def finish(self, room: int, metadata: dict[str, Any]) -> Answer:
        self.sessions[room].finish(metadata)
        return {"state": self.sessions[room].state.value}

    def wait(self, room: int) -> Answer:
        self.sessions[room].wait(20)
        return {}

    def released(self, room: int) -> Answer:
        return {"released": self.sessions[room].pages_released, "state": self.sessions[room].state.value}

    def abort(self, room: int, reason: str) -> Answer:
        self.sessions[room].abort(reason)
        return {}

    def close(self) -> None:
        self.sender.close()
        self.engine.close()


def _layout() -> Any:
    return make_layout(page_size=128, layers=4, heads=8, key_dims=64, value_dims=48)


def serve(node: Any) -> None:
    """Until standard input ends; commands are the node's methods."""
    print(json.dumps({"up": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        call: Callable[..., Answer] = getattr(node, command.pop("do"))
        try:
            answer = call(**command)
        except kt.TransferError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)
    node.close()


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    serve(Decode(**options) if options.pop("role") == "decode" else Prefill(**options))
