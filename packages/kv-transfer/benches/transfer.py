"""What a transfer costs beside its bytes: engines beside the bare libraries, sessions, planning, layer-wise sends.

`nox -s bench -- transfer`. References: the library called directly with the same blocks, the bytes alone, the same
layers sent after prefill. Writer and reader are in one process, as are the references.
"""

from __future__ import annotations

import importlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import kv_planner as kp
import numpy as np
import numpy.typing as npt
from benching import Bench

import kv_transfer as kt
from kv_transfer.engines.loopback import LoopbackEngine

ROUNDS = 21
MEGABYTE = 1 << 20
Bytes = npt.NDArray[np.uint8]


class Blocks:
    """Blocks of `size` bytes, one after the other in both arrays."""

    def __init__(self, source: Bytes, target: Bytes, count: int, size: int) -> None:
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(size)
        self.source = offsets + np.uint64(source.ctypes.data)
        self.destination = offsets + np.uint64(target.ctypes.data)
        self.nbytes = np.full(count, size, np.uint64)


def _pair(nbytes: int) -> tuple[Bytes, Bytes]:
    return np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8), np.zeros(nbytes, np.uint8)


def _through(engine: kt.TransferEngine, peer: str, blocks: Blocks) -> Callable[[], None]:
    def work() -> None:
        status = kt.wait_batch(engine, engine.submit(peer, blocks))
        assert status.state is kt.TransferState.DONE, status

    return work


def mooncake(bench: Bench) -> None:
    """The engine beside the library itself, both between two of their kind in this process."""
    source, target = _pair(64 * MEGABYTE)
    blocks = Blocks(source, target, 64, MEGABYTE)
    writer, reader = kt.create_engine("mooncake"), kt.create_engine("mooncake")
    kind = importlib.import_module("mooncake.engine").TransferEngine
    bare, peer = kind(), kind()
    for own, memory in ((bare, source), (peer, target)):
        assert own.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert own.register_memory(memory.ctypes.data, memory.nbytes) == 0
    writer.register(int(source.ctypes.data), source.nbytes)
    reader.register(int(target.ctypes.data), target.nbytes)
    session = f"127.0.0.1:{peer.get_rpc_port()}"
    columns = blocks.source.tolist(), blocks.destination.tolist(), blocks.nbytes.tolist()

    def direct() -> None:
        assert bare.batch_transfer_sync_write(session, *columns) == 0

    ours = _through(writer, reader.session, blocks)
    ours()
    direct()
    bench.faster("Mooncake TCP, 64 blocks of 1 MB, beside the bare library", ours, direct, at_least=0.95, unit="ms")
    writer.close()
    reader.close()


def nixl(bench: Bench) -> None:
    """As for Mooncake; a transfer is prepared, posted and polled on both sides of the comparison.

    The bare library's progress threads sleep between events as the engine's do: left as its constructor makes them,
    both take a core each, and whatever is measured beside them waits for the scheduler.
    """
    source, target = _pair(64 * MEGABYTE)
    blocks = Blocks(source, target, 64, MEGABYTE)
    writer, reader = kt.create_engine("nixl"), kt.create_engine("nixl")
    writer.register(int(source.ctypes.data), source.nbytes)
    reader.register(int(target.ctypes.data), target.nbytes)
    api: Any = importlib.import_module("nixl_cu12._api")
    bare, peer = (_bare_agent(api, name) for name in ("bench-writer", "bench-reader"))
    bare.register_memory([(int(source.ctypes.data), source.nbytes, 0, "")], "DRAM")
    peer.register_memory([(int(target.ctypes.data), target.nbytes, 0, "")], "DRAM")
    name = bare.add_remote_agent(peer.get_agent_metadata())
    rows = [
        np.stack([side, blocks.nbytes, np.zeros_like(side)], axis=1) for side in (blocks.source, blocks.destination)
    ]

    def direct() -> None:
        local, remote = (bare.get_xfer_descs(side, "DRAM") for side in rows)
        handle = bare.initialize_xfer("WRITE", local, remote, name)
        state = bare.transfer(handle)
        while state == "PROC":
            time.sleep(0)
            state = bare.check_xfer_state(handle)
        assert state == "DONE", state
        bare.release_xfer_handle(handle)

    ours = _through(writer, reader.session, blocks)
    ours()
    direct()
    bench.faster(
        "NIXL shared memory, 64 blocks of 1 MB, beside the bare library", ours, direct, at_least=0.9, unit="ms"
    )
    writer.close()
    reader.close()


def _bare_agent(api: Any, name: str) -> Any:
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
    config = api.nixlBind.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, 1000
    agent.agent = api.nixlBind.nixlAgent(name, config)
    agent.create_backend("UCX")
    return agent


def _rank(layers: int, heads: int, dims: int, page_size: int, pages: int) -> tuple[kp.RankManifest, Bytes]:
    layout = kp.ModelLayout(
        [
            kp.ComponentSpec(kind, layer_ids=list(range(layers)), dtype="float16", total_heads=heads, dims=dims)
            for kind in ("key", "value")
        ],
        page_size=page_size,
        fingerprint="bench",
    )
    item = layout.item_bytes("key")
    memory = np.ones((2 * layers, pages, item), np.uint8)
    entries = [
        kp.BufferEntry(
            spec.component,
            "target",
            layer,
            device="cpu",
            address=int(memory[number * layers + layer].ctypes.data),
            nbytes=item * pages,
            item_stride=item,
            item_bytes=item,
            head_range=(0, heads),
        )
        for number, spec in enumerate(layout.components)
        for layer in range(layers)
    ]
    return kp.RankManifest(layout, kp.Placement(), entries), memory.reshape(-1)


def sessions(bench: Bench) -> None:
    """A room of a few bytes from open to the end at both sides, less the bytes: what a session itself costs."""
    (here, first), (there, second) = _rank(2, 1, 8, 4, 8), _rank(2, 1, 8, 4, 8)
    engines = LoopbackEngine(), LoopbackEngine()
    with (
        kt.Receiver(there, engines[1], prefill_ranks=1) as receiver,
        kt.Sender(here, engines[0], endpoint=receiver.endpoint) as sender,
    ):
        sender.connect()
        receiver.wait_ready()

        def room() -> float:
            began = time.perf_counter()
            session = receiver.open(0, [1, 2])
            sending = sender.open(0)
            sending.send([3, 4], start=0)
            sending.finish()
            session.wait()
            return (time.perf_counter() - began) * 1e3

        for _ in range(50):
            room()
        times = [sorted(room() for _ in range(100)) for _ in range(ROUNDS)]
    assert first.any() and second.any()
    p50 = [statistics.median(own) for own in times]
    p99 = [own[98] for own in times]
    bench.record("a session beyond its bytes, p50", p50, "ms", op="<=", target=1.5)
    bench.record("a session beyond its bytes, p99", p99, "ms", op="<=", target=5.0)


def planning(bench: Bench) -> None:
    """Planning and lowering of 64 MB in scattered pages, beside the time that the bytes take."""
    (here, source), (there, target) = _rank(16, 8, 64, 16, 257), _rank(16, 8, 64, 16, 257)
    route = kp.agree(here, there).route()
    dice = np.random.default_rng(1)
    pages = [dice.permutation(np.arange(1, 257)) for _ in range(2)]
    assert route.item_bytes * 256 >= 64_000_000
    writer, reader = kt.create_engine("nixl"), kt.create_engine("nixl")
    writer.register(int(source.ctypes.data), source.nbytes)
    reader.register(int(target.ctypes.data), target.nbytes)
    capabilities = writer.capabilities.planner()

    def plan() -> Sequence[kp.Batch]:
        batches = kp.lower(kp.Plan(route, kp.Runs(*pages)), capabilities).batches
        assert all(len(own.source) == len(own.destination) == len(own.nbytes) for own in batches)  # arrays are made
        return batches

    session = reader.session
    moves = [_through(writer, session, batch) for batch in plan()]  # type: ignore[arg-type]

    def move() -> None:
        for own in moves:
            own()

    move()
    bench.near("planning and lowering of 64 MB, beside its transfer (NIXL)", plan, move, at_most=0.02)
    writer.close()
    reader.close()


def layer_wise(bench: Bench) -> None:
    """30 layers, prefill as a sleep a layer as long as its bytes need: last byte after prefill's end, both ways.

    Over TCP: within a host, the sender itself would copy, and prefill has the cores.
    """
    layers, count = 30, 128
    (here, source), (there, target) = _rank(layers, 8, 128, 16, count + 1), _rank(layers, 8, 128, 16, count + 1)
    assert source.any() and target.any()
    engines = kt.create_engine("mooncake"), kt.create_engine("mooncake")
    with (
        kt.Receiver(there, engines[1], prefill_ranks=1) as receiver,
        kt.Sender(here, engines[0], endpoint=receiver.endpoint) as sender,
    ):
        sender.connect()
        receiver.wait_ready()
        pages = list(range(1, count + 1))

        def room(seconds: float, by_layer: bool) -> float:
            session = receiver.open(0, pages)
            sending = sender.open(0)
            marks = kt.LayerMarks()
            if by_layer:
                sending.send(pages, start=0, ready=marks)
            for layer in range(layers):
                time.sleep(seconds)
                marks.mark(layer)
            ended = time.perf_counter()
            if not by_layer:
                sending.send(pages, start=0)
            sending.finish(wait=False)
            session.wait()
            took = time.perf_counter() - ended
            sending.wait()
            return took * 1e3

        after = [room(0.0, False) for _ in range(3)]
        ours = []
        for _ in range(ROUNDS):
            after.append(room(0.0, False))
            ours.append(room(statistics.median(after) / layers / 1e3, True))
    bench.record(
        "last byte after prefill's end, layer by layer beside all afterwards (Mooncake)",
        ours,
        "ms",
        references=after[3:],
        op="<=",
        target=0.15,
    )
    for engine in engines:
        engine.close()


def main() -> None:
    """All rows, in the namespace that holds loopback only."""
    if os.environ.get("KV_TRANSFER_BENCH_INSIDE") != "1":  # Mooncake listens on every interface
        command = [sys.executable, "-m", "kv_transfer.isolation", "--", sys.executable, __file__]
        sys.exit(subprocess.run(command, env={**os.environ, "KV_TRANSFER_BENCH_INSIDE": "1"}, check=False).returncode)
    bench = Bench("transfer", rounds=ROUNDS)
    for part in (sessions, planning, layer_wise, nixl, mooncake):
        part(bench)
    bench.finish()


if __name__ == "__main__":
    main()
