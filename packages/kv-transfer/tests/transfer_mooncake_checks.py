"""Checks of the mooncake engine by itself, run as a script inside the loopback-only namespace where possible."""

from __future__ import annotations

import os
import threading

import numpy as np
from transfer_batches import Warnings, batch, end, refused

from kv_transfer import EngineError, RegionError, TransferState, create_engine
from kv_transfer.engine import forget_peer

MEGABYTES = 64


def main() -> None:
    warnings = Warnings()
    refused(EngineError, "'rdma' is not supported", create_engine, "mooncake", protocol="rdma")
    refused(ValueError, "workers", create_engine, "mooncake", workers=0)
    writer = create_engine("mooncake", transfer_timeout=2.2, max_entries_per_batch=8)
    reader = create_engine("mooncake", transfer_timeout=2.2)
    assert os.environ["MC_TRANSFER_TIMEOUT"] == "3"
    warnings.check("mooncake")
    assert writer.session != reader.session
    assert all(engine.session.startswith("127.0.0.1:") for engine in (writer, reader))

    size = MEGABYTES << 20
    source = np.arange(size, dtype=np.uint32).view(np.uint8)[:size].copy()
    target = np.zeros(size, np.uint8)
    here, there = int(source.ctypes.data), int(target.ctypes.data)
    refused(RegionError, "source block 0 of 1", writer.submit, reader.session, batch((here, there, 64)))
    writer.register(here, size)
    refused(RegionError, "overlaps", writer.register, here + 4096, 4096)
    reader.register(there, size - 4096)
    refused(
        RegionError,
        "source block 1 of 2",
        writer.submit,
        reader.session,
        batch((here, there, 8), (here + size - 8, there, 9)),
    )
    refused(EngineError, "the engine takes 8", writer.submit, reader.session, batch(*[(here, there, 1)] * 9))

    assert end(writer, writer.submit(reader.session, batch((here + 5, there + 100, 1000), (here, there, 64)))) is None
    assert (target[100:1100] == source[5:1005]).all()
    assert (target[:64] == source[:64]).all()
    assert not target[1100:].any()
    error = end(writer, writer.submit(reader.session, batch((here, there + size - 4096 - 8, 64))))
    assert error is not None and "mooncake code -1" in error and "64 bytes" in error, error
    error = end(writer, writer.submit("127.0.0.1:9", batch((here, there, 64))))
    assert error is not None and "127.0.0.1:9" in error, error

    gate, write = threading.Event(), writer._write  # type: ignore[attr-defined]
    writer._write = lambda *batch: gate.wait(100) and write(*batch)  # type: ignore[attr-defined]
    running = writer.submit(reader.session, batch((here, there, size - 4096)))
    waiting = writer.submit(reader.session, batch((here, there, 64)))
    assert writer.poll(running).state is TransferState.PENDING, "submit waited"
    writer.cancel(waiting)
    gate.set()
    assert end(writer, waiting) == "cancelled"
    assert end(writer, running) is None
    writer.cancel(running)
    assert writer.poll(running).state is TransferState.DONE

    target[:] = 0
    running = writer.submit(reader.session, batch((here, there, size - 4096)))
    for peer in (reader.session, "127.0.0.1:9", "nobody"):  # one that lives, one that was never there, no address
        forget_peer(writer, peer)
    assert end(writer, running) is None
    assert (target[: size - 4096] == source[: size - 4096]).all()

    # What the library knows of an address it never asks again: one that comes back there has a word of its own.
    back = create_engine("mooncake")
    back.register(there, 4096)
    address, first = back.session.split("/")
    known = writer._writer  # type: ignore[attr-defined]
    assert end(writer, writer.submit(back.session, batch((here, there, 64)))) is None
    assert writer._writer is known  # type: ignore[attr-defined]
    assert end(writer, writer.submit(f"{address}/{first[::-1]}", batch((here + 9, there, 64)))) is None
    assert (target[:64] == source[9:73]).all() and writer._writer is not known  # type: ignore[attr-defined]
    error = end(writer, writer.submit(back.session, batch((here, there, 64))))
    assert error is not None and "was started again" in error, error
    assert (target[:64] == source[9:73]).all()
    back.close()

    error = end(writer, writer.submit("no text \ud800", batch((here, there, 64))))
    assert error is not None and "TypeError" in error, error

    reader.register(there, size - 4096)
    reader.unregister(there)
    assert end(writer, writer.submit(reader.session, batch((here, there, 64)))) is None
    reader.unregister(there)
    assert end(writer, writer.submit(reader.session, batch((here, there, 64)))) is not None
    refused(RegionError, "no registered region", reader.unregister, there)

    for engine in (writer, reader):
        engine.close()
        engine.close()
        engine.unregister(here)
        refused(EngineError, "is closed", engine.register, here, size)
    refused(EngineError, "is closed", writer.submit, reader.session, batch((here, there, 64)))
    assert not [thread for thread in threading.enumerate() if "mooncake" in thread.name]
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
