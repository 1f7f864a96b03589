"""loopback between processes: bytes arrive, closed ranges are closed, and killed peers are known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transfer_batches import batch, end

import kv_transfer as kt
from kv_transfer.engines.loopback import LoopbackEngine

READER = """
import sys
import kv_transfer as kt
arena, engine = kt.SharedArena(4096), kt.create_engine("loopback", shared=True)
engine.register(arena.address, 2048)
print(engine.session, arena.address, flush=True)
for line in sys.stdin:
    if line.strip() == "close":
        engine.unregister(arena.address)
    print(arena.array.tobytes().hex(), flush=True)
"""


class Reader:
    """A process with 4 KiB of shared memory, of which the first half is registered."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.session, address = self._line().split()
        self.address = int(address)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def tell(self, word: str) -> bytes:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return bytes.fromhex(self._line())

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.stop()


@pytest.fixture
def writer() -> Iterator[tuple[LoopbackEngine, kt.SharedArena]]:
    arena, engine = kt.SharedArena(4096), LoopbackEngine(shared=True, blocks_per_poll=1)
    arena.array[:] = np.random.default_rng(1).integers(0, 256, 4096, dtype=np.uint8)
    engine.register(arena.address, 4096)
    yield engine, arena
    engine.close()
    arena.close()


def test_bytes_reach_another_process_and_nothing_else_does(
    reader: Reader, writer: tuple[LoopbackEngine, kt.SharedArena]
) -> None:
    engine, arena = writer
    blocks = batch((arena.address + 3, reader.address + 100, 50), (arena.address, reader.address + 2047, 1))
    assert end(engine, engine.submit(reader.session, blocks)) is None
    expected = np.zeros(4096, np.uint8)
    expected[100:150], expected[2047] = arena.array[3:53], arena.array[0]
    assert reader.tell("show") == expected.tobytes()
    outside = engine.submit(reader.session, batch((arena.address, reader.address + 2047, 2)))
    assert "destination block 0 of 1" in (end(engine, outside) or "")
    assert reader.tell("show") == expected.tobytes()


def test_what_is_unregistered_is_written_no_more(reader: Reader, writer: tuple[LoopbackEngine, kt.SharedArena]) -> None:
    engine, arena = writer
    handle = engine.submit(
        reader.session, batch((arena.address, reader.address, 1), (arena.address, reader.address + 1, 1))
    )
    assert engine.poll(handle).state is kt.TransferState.PENDING
    shown = reader.tell("close")
    assert "is not inside registered memory" in (end(engine, handle) or "")
    assert reader.tell("show") == shown


def test_a_killed_peer_is_known_and_swept(reader: Reader, writer: tuple[LoopbackEngine, kt.SharedArena]) -> None:
    engine, arena = writer
    first = engine.submit(reader.session, batch((arena.address, reader.address, 1)))
    assert end(engine, first) is None
    assert Path(reader.session).exists()
    os.kill(reader.process.pid, signal.SIGKILL)
    reader.process.wait()
    second = engine.submit(reader.session, batch((arena.address, reader.address, 1)))
    assert "not inside registered memory" in (end(engine, second) or "")
    kt.SharedArena(1).close()  # as any other process may have done before
    assert not Path(reader.session).exists()


def test_memory_that_is_not_shared_is_refused(writer: tuple[LoopbackEngine, kt.SharedArena]) -> None:
    engine, arena = writer
    mine = np.zeros(64, np.uint8)
    with pytest.raises(kt.RegionError, match="is not in shared memory"):
        engine.register(int(mine.ctypes.data), 64)
    handle = engine.submit("/dev/shm/somebody-else", batch((arena.address, 4096, 1)))
    assert "no engine with session '/dev/shm/somebody-else' on this host" in (end(engine, handle) or "")
    with pytest.raises(kt.ArgumentError, match="nbytes: expected a whole number from 1 to"):
        kt.SharedArena(0)
    with pytest.raises(kt.EngineError, match="cannot be had"):
        kt.SharedArena(1 << 60)


def test_engines_of_one_process_need_no_map(writer: tuple[LoopbackEngine, kt.SharedArena]) -> None:
    engine, arena = writer
    other = LoopbackEngine(shared=True)
    target = kt.SharedArena(16)
    other.register(target.address, 16)
    assert end(engine, engine.submit(other.session, batch((arena.address, target.address, 16)))) is None
    assert target.array.tobytes() == arena.array[:16].tobytes()
    other.close()
    target.close()
