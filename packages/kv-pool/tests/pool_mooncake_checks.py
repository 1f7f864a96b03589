"""Checks of the store `mooncake` against a real master, one scenario a process, run as a script.

Started by `test_pool_storage_mooncake.py` inside a loopback-only namespace where the system allows one.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kv_planner import ComponentSpec, ModelLayout, PrefixIndex
from kv_pool import MhaPool, PageAllocator, StorageDamaged, StorageError
from kv_pool.hicache import HiCacheController, HostPool, PageStorage, RegistersMemory, StorageTier, create_storage
from kv_pool.hicache.storage.engines.mooncake import MooncakeStorage

sys.path.insert(0, str(Path(__file__).parent))

from pool_group import GroupBench, PageByPage

MIB = 1 << 20
LEASE, SHORT_LEASE = 30.0, 0.5  # seconds; a busy machine moves any of these pages within the first
PAGES = [f"{number:064x}" for number in range(64)]
Bytes = npt.NDArray[np.uint8]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


@contextmanager
def master(lease: float = LEASE, **options: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A master on loopback; its address, and the process."""
    program = shutil.which("mooncake_master", path=str(Path(sys.executable).parent)) or "mooncake_master"
    ports = free_port(), free_port()
    command = [program, f"--rpc_port={ports[0]}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
    command += [f"--metrics_port={ports[1]}", f"--default_kv_lease_ttl={int(lease * 1000)}"]
    command += [f"--{name}={value}" for name, value in options.items()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", ports[0]), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, "the master did not start"
                time.sleep(0.02)
        yield f"127.0.0.1:{ports[0]}", process
    finally:
        process.kill()
        process.wait()


@contextmanager
def lenders(address: str, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that lend 64 MiB each, and do nothing else."""
    program = "import sys, pool_mooncake_checks as c; s = c.connect(sys.argv[1], segment_bytes=64 * c.MIB)\n"
    program += "print('lent', flush=True); sys.stdin.read()"
    search = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command, environment = [sys.executable, "-c", program, address], {**os.environ, "PYTHONPATH": search}
    running = [subprocess.Popen(command, env=environment, **pipes) for _ in range(count)]
    try:
        for process in running:
            assert process.stdout is not None and process.stdout.readline() == b"lent\n"
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process as a debugger does, and see that it is stopped."""
    process.send_signal(signal.SIGSTOP)
    while b"\nState:\tT" not in Path(f"/proc/{process.pid}/status").read_bytes():
        time.sleep(0.01)


def until(done: Callable[[], bool], what: str) -> None:
    """Ask again and again, for half a minute at the most."""
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def connect(address: str, **options: Any) -> MooncakeStorage:
    options = {"segment_bytes": 64 * MIB, "buffer_bytes": 16 * MIB, **options}
    made = create_storage("mooncake", master=address, **options)
    assert isinstance(made, MooncakeStorage) and isinstance(made, PageStorage) and isinstance(made, RegistersMemory)
    return made


def page(seed: int, *sizes: int) -> list[Bytes]:
    return [np.random.default_rng([seed, size]).integers(0, 256, size, dtype=np.uint8) for size in sizes]


def rooms(pages: list[list[Bytes]]) -> list[list[Bytes]]:
    return [[np.full(piece.size, 255, dtype=np.uint8) for piece in pieces] for pieces in pages]


def same(got: list[list[Bytes]], wanted: list[list[Bytes]]) -> bool:
    flat = zip((p for one in got for p in one), (p for one in wanted for p in one), strict=True)
    return all(np.array_equal(one, other) for one, other in flat)


def refused(kind: type[Exception], text: str, call: Callable[[], object]) -> Exception:
    try:
        call()
    except kind as error:
        assert text in str(error), error
        return error
    raise AssertionError(f"no {kind.__name__} with {text!r}")


def pages_come_back() -> None:
    """Batches of one piece and of several, misses, first values, wrong lengths; from another process's store too."""
    with master() as (address, _):
        storage, other = connect(address), connect(address, segment_bytes=0)
        for number, sizes in enumerate([(300_000,), (4096, 70_000, 12)]):
            keys = PAGES[10 * number : 10 * number + 8]
            pages = [page(seed, *sizes) for seed in range(8)]
            assert storage.exists(keys) == 0 == storage.read(keys, rooms(pages))
            assert storage.write(keys[:5], pages[:5]) == 5 and storage.exists(keys) == 5
            for reader in (storage, other):
                got = rooms(pages)
                assert reader.read(keys, got) == 5 and same(got[:5], pages[:5])
                assert all((piece == 255).all() for pieces in got[5:] for piece in pieces)
            assert storage.write(keys[6:], pages[6:]) == 2 and other.exists(keys) == 5  # the first miss ends
            assert other.write(keys[:1], pages[1:2]) == 1  # a key that is there keeps its first value
            got = rooms(pages[:1])
            assert other.read(keys[:1], got) == 1 and same(got, pages[:1])
            for wrong in (-1, 1):
                changed = [*sizes[:-1], sizes[-1] + wrong]
                bad = rooms([page(0, *sizes), page(1, *changed), page(2, *sizes)])
                error = refused(StorageDamaged, keys[1], lambda k=keys, b=bad: other.read(k[:3], b))  # type: ignore[misc]
                assert isinstance(error, StorageDamaged) and error.pages_read == 1
                assert same(bad[:1], pages[:1]) and storage.exists(keys) == 1  # gone, so that it is written again
                assert storage.write(keys[1:2], pages[1:2]) == 1
        assert storage.read([], []) == storage.write([], []) == storage.exists([]) == 0
        other.close()
        storage.close()
        storage.close()


def no_room_while_pages_are_leased() -> None:
    """Pages read or written lately stay; a full store keeps fewer pages, and takes them when the leases have ended."""
    with master(lease=4.0) as (address, _):
        storage = connect(address, segment_bytes=32 * MIB)
        pages = [page(seed, 4 * MIB) for seed in range(12)]
        kept = storage.write(PAGES[:12], pages)
        assert 0 < kept < 12 and storage.exists(PAGES[:12]) == kept
        got = rooms(pages)
        assert storage.read(PAGES[:12], got) == kept and same(got[:kept], pages[:kept])
        deadline = time.monotonic() + 30
        while storage.write(PAGES[20:22], pages[:2]) < 2:
            assert time.monotonic() < deadline, "leases do not end"
            time.sleep(0.2)
        assert storage.exists(PAGES[20:22]) == 2
        left = storage.exists(PAGES[:12])
        again = rooms(pages)
        assert storage.read(PAGES[:12], again) == left < 12 and same(again[:left], pages[:left])
        storage.close()


def a_dead_master_is_an_error() -> None:
    """Every call raises; nothing hangs, nothing is taken for a miss; no master at all is an error at the beginning."""
    refused(StorageError, "master", lambda: connect("127.0.0.1:9"))
    refused(StorageError, "one of ['tcp', 'rdma']", lambda: connect("127.0.0.1:9", protocol="ascend"))
    with master() as (address, process):
        storage = connect(address)
        one, two = [page(1, 5000)], [page(1, 5000, 100)]
        assert storage.write(PAGES[:1], one) == 1
        process.kill()
        process.wait()
        refused(StorageError, "mooncake code", lambda: storage.write(PAGES[1:2], one))
        refused(StorageError, "mooncake code", lambda: storage.exists(PAGES[:1]))
        refused(StorageError, "mooncake code", lambda: storage.read(PAGES[:1], rooms(one)))
        refused(StorageError, "mooncake code", lambda: storage.read(PAGES[1:2], rooms(two)))
        storage.close()


def a_host_that_lends_memory_dies() -> None:
    """Its pages are errors, then misses; those of the other stay, bit for bit; the store takes pages as before."""
    with master(client_ttl=4) as (address, _), lenders(address, 2) as hosts:
        storage = connect(address, segment_bytes=0)
        # The master picks a host for each page at random. There are so many that both get some, and so few that
        # either could hold all: a survivor that is full would have its pages evicted, and rightly so.
        pages = [page(seed, MIB - 300, 300) for seed in range(40)]
        keys = PAGES[: len(pages)]
        until(lambda: storage.write(keys, pages) == len(pages), "both hosts lend")
        assert storage.read(keys, rooms(pages)) == len(pages)
        hosts[0].kill()
        hosts[0].wait()
        lost: list[str] = []
        kept: list[str] = []
        errors = 0
        for key, wanted in zip(keys, pages, strict=True):
            got = rooms([wanted])
            try:
                found = storage.read([key], got)
                assert not found or same(got, [wanted])
                (kept if found else lost).append(key)
            except StorageDamaged:
                raise
            except StorageError as error:
                assert "host that lends the memory is gone" in str(error)
                errors += 1
                lost.append(key)
        assert lost and kept and errors
        until(lambda: storage.exists(lost[:1]) == 0, "the master forgets a host")
        for number, key in enumerate(keys):
            got = rooms([pages[number]])
            assert storage.read([key], got) == (key in kept), (number, lost, kept)
            assert key in lost or same(got, [pages[number]]), (number, lost, kept)
        assert storage.write(lost[:1], [pages[keys.index(lost[0])]]) == 1 == storage.exists(lost[:1])
        storage.close()


def a_lease_that_ends_is_taken_anew() -> None:
    """Bytes that come after the lease are not believed, but asked for again; a lease too short for a page is named."""
    with master(lease=SHORT_LEASE) as (address, _), lenders(address, 1) as hosts:
        storage = connect(address, segment_bytes=0)
        for number, sizes in enumerate([(MIB,), (MIB - 300, 300)]):
            keys, pages = PAGES[3 * number : 3 * number + 3], [page(seed, *sizes) for seed in range(3)]
            got = rooms(pages)
            until(lambda k=keys, p=pages: storage.write(k, p) == 3, "a host lends")  # type: ignore[misc]
            stop(hosts[0])
            with ThreadPoolExecutor(1) as other:
                reading = other.submit(storage.read, keys, got)
                time.sleep(3 * SHORT_LEASE)
                assert not reading.done()
                hosts[0].send_signal(signal.SIGCONT)
                assert reading.result() == 3 and same(got, pages)
        storage.close()
    with master(lease=0.001) as (address, _):
        storage, big = connect(address), [page(0, 48 * MIB)]
        assert storage.write(PAGES[:1], big) == 1
        refused(StorageError, "default_kv_lease_ttl is too short", lambda: storage.read(PAGES[:1], rooms(big)))
        storage.close()


def a_paused_master_is_an_error_in_time() -> None:
    """Every call raises, a new store too; the process goes on meanwhile, and so does the store afterwards."""
    one, two = [page(1, 5000)], [page(1, 5000, 100)]
    with master() as (address, process):
        storage = connect(address, timeout_s=0.6)
        assert storage.write(PAGES[:1], one) == 1
        stop(process)
        calls: list[Callable[[], object]] = [
            lambda: storage.exists(PAGES[:1]), lambda: storage.read(PAGES[:1], rooms(one)),
            lambda: storage.read(PAGES[1:2], rooms(two)), lambda: storage.write(PAGES[1:2], two),
            lambda: storage.remove(PAGES[:1]),
        ]  # fmt: skip
        for call in calls:
            began, turns = time.monotonic(), 0
            with ThreadPoolExecutor(1) as other:
                work = other.submit(refused, StorageError, "not answered in time", call)
                while not work.done():
                    turns += 1
                    time.sleep(0.05)
                work.result()
            assert turns > 3 and time.monotonic() - began < 20  # Python went on
        refused(StorageError, "a master that answers", lambda: connect(address, timeout_s=0.6))
        refused(StorageError, "above 0", lambda: connect(address, timeout_s=0))
        process.send_signal(signal.SIGCONT)
        until(lambda: storage.write(PAGES[2:3], two) == 1, "the store serves again")
        got = rooms(two)
        assert storage.read(PAGES[2:3], got) == 1 and same(got, two)
        storage.close()
        assert not {"MC_RPC_TIMEOUT_MS", "MC_RPC_CONNECT_TIMEOUT_MS"} & set(os.environ)


def a_cache_is_served_from_it() -> None:
    """A second cache, with nothing but the store, finds every page of the first, bit for bit."""
    shared: Any = {"layer_ids": range(3), "dtype": "float16", "total_heads": 2}
    specs = [ComponentSpec("key", dims=24, **shared), ComponentSpec("value", dims=16, **shared)]
    layout = ModelLayout(specs, page_size=4, fingerprint="mooncake")
    prompt, computed = list(range(41)), np.random.default_rng(7).integers(1, 99, (3, 10, 4)).astype(np.float16)
    with master() as (address, process):
        stores = [connect(address, segment_bytes=size, timeout_s=1) for size in (64 * MIB, 0)]
        for turn, storage in enumerate(stores):
            pool = MhaPool(layout, size=48, device="cpu")
            host = HostPool(pool, pages=24)
            index = PrefixIndex(4, device_pages=pool.num_pages, host_pages=host.num_pages)
            tier = StorageTier(host, index, storage, threshold=4, batch=3)
            cache = HiCacheController(pool, PageAllocator(pool.num_pages, 4), host, index, storage=tier)
            prefetch = cache.prefetch(prompt)
            cache.drain()
            assert prefetch.pages == 10 * turn
            plan = cache.acquire(prompt)
            cache.load(plan)
            assert plan.host_hit_tokens == 40 * turn
            for layer in range(3):
                plan.wait_layer(layer)
                for number, held in enumerate(plan.pages[:10].tolist()):
                    wanted = computed[layer, number][:, None, None]
                    if turn == 0:
                        pool.key(layer)[held] = pool.key(layer)[held].new_tensor(wanted)
                        pool.value(layer)[held] = -pool.value(layer)[held].new_tensor(wanted)
                    assert (pool.key(layer)[held].numpy() == wanted).all()
                    assert (pool.value(layer)[held].numpy() == -wanted).all()
            cache.finish(plan, prompt)
            cache.drain()
            assert (tier.counters.written_pages, tier.counters.read_pages) == ((10, 0), (0, 10))[turn]
        stop(process)
        others = list(range(100, 141))
        lost = cache.prefetch(others)
        plan = cache.acquire(others)  # nothing of it waits for the store
        cache.load(plan)
        cache.finish(plan, others)
        assert lost.state == "reading" and tier.pending
        cache.drain()
        assert (lost.pages, tier.counters.failures, tier.counters.unwritten_pages) == (0, 5, 10)
        assert host.allocator.held == index.counts().host.held and not cache.pending
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        lost = cache.prefetch(list(range(200, 240)))
        cache.drain()
        assert (lost.pages, tier.counters.failures) == (0, 6)
        for storage in stores:
            storage.close()


def companions_are_served_from_it() -> None:
    """What a window, a draft apart and states had comes back through the store, into another cache, byte for byte."""
    with master() as (address, _):
        stores = [connect(address, segment_bytes=size) for size in (64 * MIB, 0)]
        for storage, hit in zip(stores, (0, 24), strict=True):
            bench = GroupBench(["window", "draft", "states"])
            bench.random = PageByPage()  # type: ignore[assignment]
            bench.attach(StorageTier(bench.host, bench.index, storage, threshold=4, batch=3))
            prefetch = bench.cache.prefetch(list(range(26)))
            bench.cache.drain()
            assert prefetch.state == "done" and bench.serve(range(26)) == (0, hit)
            bench.cache.drain()
            assert bench.cache.companion_storage is not None
            counters = bench.cache.companion_storage.counters
            assert (counters.written_pages, counters.read_pages) == ((18, 0) if not hit else (0, 2 + 6 + 1)), counters
        for storage in stores:
            storage.close()


SCENARIOS: dict[str, Callable[[], None]] = {
    work.__name__: work
    for work in (
        pages_come_back,
        no_room_while_pages_are_leased,
        a_dead_master_is_an_error,
        a_paused_master_is_an_error_in_time,
        a_host_that_lends_memory_dies,
        a_lease_that_ends_is_taken_anew,
        a_cache_is_served_from_it,
        companions_are_served_from_it,
    )
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]]()
    print("as it should be", flush=True)
