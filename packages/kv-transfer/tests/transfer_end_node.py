"""One prefill or decode process that finds its peers in a directory; commands and answers are JSON lines."""

from __future__ import annotations

import json
import sys
from typing import Any

from transfer_memory import make_layout, stages, whole
from transfer_node import PAGES, STAGES, TIMEOUTS, Answer, Node, serve

import kv_transfer as kt

EVERY = 0.1


def _layout() -> Any:
    return make_layout(page_size=16, layers=4, heads=2, key_dims=8, value_dims=6)


class Decode(Node):
    def __init__(self, directory: str) -> None:
        super().__init__(whole(_layout(), pages=PAGES), "nixl")
        client = kt.DirectoryClient(directory, timeout=1.0)
        self.end = kt.DecodeEnd(self.memory.manifest, self.engine, client, timeouts=TIMEOUTS, every=EVERY)
        self.sessions: dict[int, kt.ReceiverSession] = {}

    def ready(self, seconds: float) -> Answer:
        return {"endpoint": self.end.wait_ready(seconds).endpoint}

    def problem(self) -> Answer:
        return {"problem": str(self.end.problem or "")}

    def open(self, room: int, pages: list[int]) -> Answer:
        self.sessions[room] = self.end.receivers[0].open(room, pages)
        return {}

    def wait(self, room: int) -> Answer:
        return {"nbytes": self.sessions[room].wait(20).nbytes}

    def close(self) -> None:
        self.end.close()
        self.engine.close()


class Prefill(Node):
    def __init__(self, directory: str, stage: int) -> None:
        super().__init__(stages(_layout(), STAGES, pages=PAGES)[stage], "nixl")
        client = kt.DirectoryClient(directory, timeout=1.0)
        self.end = kt.PrefillEnd(self.memory.manifest, self.engine, client, timeouts=TIMEOUTS, every=EVERY)
        self.sessions: dict[int, kt.SenderSession] = {}

    def ready(self, seconds: float) -> Answer:
        return {"senders": len(self.end.wait_ready(seconds)), "generation": self.end.generation}

    def problem(self) -> Answer:
        return {"problem": str(self.end.problem or ""), "generation": self.end.generation}

    def open(self, room: int) -> Answer:
        (sender,) = self.end.group()
        self.sessions[room] = sender.open(room)
        return {"pages": self.sessions[room].pages}

    def send(self, room: int, pages: list[int]) -> Answer:
        self.sessions[room].send(pages, start=0)
        self.sessions[room].finish()
        return {"state": self.sessions[room].state.value}

    def close(self) -> None:
        self.end.close()
        self.engine.close()


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    serve(Decode(**options) if options.pop("role") == "decode" else Prefill(**options))
