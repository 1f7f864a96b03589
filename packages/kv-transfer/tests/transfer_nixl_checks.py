"""Checks of the nixl engine by itself, run as a script inside the loopback-only namespace where possible."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np
from transfer_batches import Warnings, batch, end, refused

from kv_transfer import EngineError, RegionError, create_engine
from kv_transfer.engine import forget_peer

MEGABYTES = 64


class Reluctant:
    """The library's agent, which will not drop a transfer as long as it counts as running."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent
        self.runs = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.agent, name)

    def transfer(self, transfer: Any) -> str:
        state: str = self.agent.transfer(transfer)
        return "PROC" if self.runs else state

    def check_xfer_state(self, transfer: Any) -> str:
        return "PROC" if self.runs else str(self.agent.check_xfer_state(transfer))

    def release_xfer_handle(self, transfer: Any) -> None:
        if self.runs:
            raise RuntimeError("the transfer is under way")
        self.agent.release_xfer_handle(transfer)


def main() -> None:
    warnings = Warnings()
    refused(ValueError, "max_entries_per_batch", create_engine, "nixl", max_entries_per_batch=0)
    writer = create_engine("nixl", max_entries_per_batch=8)
    reader = create_engine("nixl")
    warnings.check("nixl")
    assert not {"torch", "nixl._api"} & set(sys.modules)
    time.sleep(0.2)
    busy = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - busy < 0.25, "threads of two idle engines keep asking"

    size = MEGABYTES << 20
    source = np.arange(size, dtype=np.uint32).view(np.uint8)[:size].copy()
    target = np.zeros(size, np.uint8)
    here, there = int(source.ctypes.data), int(target.ctypes.data)
    refused(RegionError, "source block 0 of 1", writer.submit, reader.session, batch((here, there, 64)))
    writer.register(here, size)
    refused(RegionError, "overlaps", writer.register, here + 4096, 4096)
    before = reader.session
    reader.register(there, size - 4096)
    session = reader.session
    assert before != session, "the session names the memory that is registered"
    two = batch((here, there, 8), (here + size - 8, there, 9))
    refused(RegionError, "source block 1 of 2", writer.submit, session, two)
    refused(EngineError, "the engine takes 8", writer.submit, session, batch(*[(here, there, 1)] * 9))

    assert end(writer, writer.submit(session, batch((here + 5, there + 100, 1000), (here, there, 64)))) is None
    assert (target[100:1100] == source[5:1005]).all()
    assert (target[:64] == source[:64]).all()
    assert not target[1100:].any()
    error = end(writer, writer.submit(session, batch((here, there + size - 4096 - 8, 64))))
    assert error is not None and "64 bytes" in error and "NotFound" in error, error
    assert not target[1100:].any(), "a refused batch wrote"
    error = end(writer, writer.submit("127.0.0.1:9", batch((here, there, 64))))
    assert error is not None and "no session of a nixl engine" in error, error

    whole = batch((here, there, size - 4096))
    for _ in range(8):  # cancelled at once or already on its way: it ends, and nothing else is disturbed
        running = writer.submit(session, whole)
        writer.cancel(running)
        assert end(writer, running) in (None, "cancelled")
        writer.cancel(running)
    assert end(writer, writer.submit(session, whole)) is None
    assert (target[: size - 4096] == source[: size - 4096]).all()

    target[:] = 0
    for _ in range(3):  # a peer that lives is forgotten, under way or not: what runs ends, and the next begins anew
        running = writer.submit(session, whole)
        forget_peer(writer, session)
        assert end(writer, running) is None
        forget_peer(writer, session)
        forget_peer(writer, "nobody")
    assert (target[: size - 4096] == source[: size - 4096]).all()

    agent = writer._agent = Reluctant(writer._agent)  # type: ignore[attr-defined]
    running = writer.submit(session, batch((here, there, 64)))
    writer.cancel(running)
    assert not writer.poll(running).is_terminal, "its memory counts as free while the library may write"
    agent.runs = False
    assert end(writer, running) is None
    writer._agent = agent.agent  # type: ignore[attr-defined]

    reader.register(there, size - 4096)
    reader.unregister(there)
    assert end(writer, writer.submit(session, batch((here, there, 64)))) is None
    reader.unregister(there)
    reader.register(there, 4096)  # the same address with another size: what the library was told first is not enough
    small = reader.session
    assert end(writer, writer.submit(small, batch((here + 9, there, 4096)))) is None
    reader.unregister(there)
    reader.register(there, size)
    assert end(writer, writer.submit(reader.session, batch((here, there, size)))) is None
    assert (target == source).all()
    assert end(writer, writer.submit(small, batch((here, there, 64)))) is None, "older news does not replace newer"
    reader.unregister(there)
    refused(RegionError, "no registered region", reader.unregister, there)

    reader.close()
    running = writer.submit(session, whole)
    writer.close()
    assert running.status.is_terminal
    for engine in (writer, reader):
        engine.close()
        engine.unregister(here)
        refused(EngineError, "is closed", engine.register, here, size)
        refused(EngineError, "is closed", getattr, engine, "session")
    refused(EngineError, "is closed", writer.submit, session, batch((here, there, 64)))
    assert threading.active_count() == 1
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
