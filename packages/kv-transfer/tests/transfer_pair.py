"""Prefill stages and a decode rank in one process, ready to transfer: ZeroMQ on loopback, the loopback engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from transfer_memory import RankMemory

import kv_transfer as kt
from kv_transfer.engine import Blocks, TransferHandle, TransferStatus
from kv_transfer.engines.loopback import LoopbackEngine

# Nobody is lost, and nothing runs out of time, however busy the machine is; a test of that has times of its own.
FAST = kt.Timeouts(
    handshake=30,
    offer=30,
    transfer=60,
    heartbeat_interval=0.05,
    peer_lost_after=30,
    dead_writer_grace=0.2,
    drain=2,
)


class HeldEngine(LoopbackEngine):
    """Begins a batch and finishes it when told: a library whose running call cannot be cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.begun = 0

    def submit(self, peer: str, batch: Blocks) -> TransferHandle:
        self.begun += 1
        return super().submit(peer, batch)

    def poll(self, handle: TransferHandle) -> TransferStatus:
        return super().poll(handle) if self.go.is_set() else handle.status

    def cancel(self, handle: TransferHandle) -> None:
        return


class Hardware(LoopbackEngine):
    """Moves bytes when the test says so, and cannot stop a batch that it has begun, like a library that blocks."""

    def __init__(self) -> None:
        super().__init__(blocks_per_poll=1, max_entries_per_batch=3)
        self.begun: list[TransferHandle] = []

    def submit(self, peer: str, batch: Blocks) -> TransferHandle:
        handle = super().submit(peer, batch)
        self.begun.append(handle)
        return handle

    def poll(self, handle: TransferHandle) -> TransferStatus:
        return handle.status

    def cancel(self, handle: TransferHandle) -> None:
        return

    def run(self, blocks: int) -> None:
        for _ in range(blocks):
            self.begun = [handle for handle in self.begun if not super(Hardware, self).poll(handle).is_terminal]


class Pair:
    """Prefill stages and one decode rank, ready."""

    def __init__(
        self,
        prefill: list[RankMemory],
        decode: RankMemory,
        engine: Callable[[], LoopbackEngine] = LoopbackEngine,
        timeouts: kt.Timeouts = FAST,
        limits: kt.Limits | None = None,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.engines = [engine() for _ in range(len(prefill))]
        self.receiver_engine = LoopbackEngine()
        self.receiver = kt.Receiver(
            decode.manifest, self.receiver_engine, prefill_ranks=len(prefill), timeouts=timeouts, limits=limits
        )
        self.senders = [
            kt.Sender(memory.manifest, used, endpoint=self.receiver.endpoint, timeouts=timeouts, limits=limits)
            for memory, used in zip(prefill, self.engines, strict=True)
        ]
        for sender in self.senders:
            sender.connect()
        self.receiver.wait_ready()

    def close(self) -> None:
        for engine in self.engines:
            if isinstance(engine, HeldEngine):
                engine.go.set()
        for sender in self.senders:
            sender.close()
        self.receiver.close()
        for engine in (*self.engines, self.receiver_engine):
            engine.close()


def held_engine(pair: Pair) -> HeldEngine:
    engine = pair.engines[0]
    assert isinstance(engine, HeldEngine)
    return engine


def eventually(what: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.005)
    return False
