"""Bench of kv-pool: the indexed mover, the allocator, the controller, the stores of files and of Mooncake.

Time to the first token after a hit is in `pool_hits`. References in the same run: the better of numpy's `take(out=)`
and fancy assignment over the same pages for the mover, and for its two threads also two threads of memmove; plain
sequential files of the same bytes and Mooncake's own calls for the stores.
Mooncake listens on all interfaces, so the bench goes on in a namespace with loopback only.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from benching import Bench
from kv_planner import ComponentSpec, ModelLayout, PrefixIndex
from kv_pool import MhaPool, MlaPool, PageAllocator, Pool
from kv_pool.hicache import FileStorage, HiCacheController, HostPool, Mover, create_mover
from kv_pool.hicache.storage.engines.mooncake import MooncakeStorage
from kv_transfer.isolation import current_isolation
from local_mooncake import mooncake_master

MIB = 2**20
MOVED = 96 * MIB  # bytes of one call, well beyond the caches
Words = npt.NDArray[np.int64]


def heads(dims: int, page_size: int, layers: int = 1) -> ModelLayout:
    """K and V of one width in float16, one head."""
    shared = ("key", "value")
    specs = [ComponentSpec(name, layer_ids=range(layers), dtype="float16", total_heads=1, dims=dims) for name in shared]  # type: ignore[arg-type]
    return ModelLayout(specs, page_size=page_size, fingerprint="bench")


def records() -> ModelLayout:
    """A latent of 512 and a rope of 64 in 16 bits, as one record: 147 KB a page of 128 tokens."""
    spec = ComponentSpec("latent", layer_ids=[0], dtype="uint8", total_heads=1, dims=576 * 2)
    return ModelLayout([spec], page_size=128, fingerprint="bench")


def permuted(count: int, pages: int, seed: int) -> npt.NDArray[np.int64]:
    """`count` distinct page ids in no order."""
    return np.random.default_rng(seed).permutation(np.arange(1, pages + 1))[:count]


def seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """Median time of some calls."""
    work()
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def once(work: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def moving(bench: Bench, name: str, pool: Pool, *, backup: bool) -> None:
    """Permuted pages of every component, one layer, beside the better of numpy's two ways."""
    pages = pool.num_pages - 1
    count = pages // 2
    host = HostPool(pool, pages=pages)
    for mirror in host.mirrors:
        mirror.layers[0].view(-1).view(mirror.layers[0].dtype).fill_(1)
        mirror.host.fill_(2)
    near, far = permuted(count, pages, 1), permuted(count, pages, 2)
    device = [mirror.layers[0].numpy().reshape(pages + 1, -1).view(np.int64) for mirror in host.mirrors]
    others = [mirror.host.numpy().reshape(pages + 1, -1).view(np.int64) for mirror in host.mirrors]
    pairs: list[tuple[Words, Words]] = list(zip(device, others, strict=True))
    source, target = (near, far) if backup else (far, near)
    rooms = [np.empty((count, one.shape[1]), dtype=np.int64) for one, _ in pairs]

    def fancy() -> None:
        for one, two in pairs:
            from_, to = (one, two) if backup else (two, one)
            to[target] = from_[source]

    def take() -> None:
        """Gathers only: its target is in order, which the pages of a pool are not."""
        for (one, two), room in zip(pairs, rooms, strict=True):
            np.take(one if backup else two, source, axis=0, out=room, mode="clip")

    one, two = (create_mover("indexed", host, threads=threads) for threads in (1, 2))

    def move(mover: Mover) -> None:
        (mover.backup if backup else mover.load)(near, far)

    order = np.argsort(target)
    parts = np.array_split(np.stack([source[order], target[order]], axis=1), 2)

    def memmove(part: npt.NDArray[np.int64]) -> None:
        for one, two in pairs:
            from_, to = (one, two) if backup else (two, one)
            nbytes, first, last = one.strides[0], from_.ctypes.data, to.ctypes.data
            for here, there in part.tolist():
                ctypes.memmove(last + there * nbytes, first + here * nbytes, nbytes)

    def together() -> None:
        """What memory gives to two threads: the C library's copy of each page."""
        other = helper.submit(memmove, parts[1])
        memmove(parts[0])
        other.result()

    better = min((fancy, take), key=seconds)
    what = f"{name}, {count} pages permuted, {'to' if backup else 'from'} the host"
    bench.faster(f"{what}, beside numpy's {better.__name__}", lambda: move(one), better, at_least=1.0)
    with ThreadPoolExecutor(1) as helper:
        together()
        rounds = [[once(work) for work in (lambda: move(two), better, together)] for _ in range(bench.rounds)]
    ours, theirs, limit = ([row[column] for row in rounds] for column in range(3))
    bench.record(
        f"{what}, two threads, beside numpy's {better.__name__}", ours, "ms", references=theirs,
        kind="reference/value", op=">=", target=1.3,
    )  # fmt: skip
    bench.record(
        f"{what}, two threads, beside two threads of memmove", ours, "ms", references=limit, op="<=", target=1.1
    )


def allocating(bench: Bench) -> None:
    """A thousand pages out of many, taken and given back."""
    pages = PageAllocator(100_000, 128)
    bench.within("1,000 pages allocated and released", lambda: pages.release(pages.alloc(1000)), at_most=100, unit="µs")


def controlling(bench: Bench) -> None:
    """What the controller adds a page: prompts of 128 pages of 16 bytes, from the host, computed, kept, evicted."""
    size, batch, texts = 16, 128, 24
    pool = MhaPool(heads(1, size), size=size * batch * 4, device="cpu")
    host = HostPool(pool, pages=batch * texts)
    index = PrefixIndex(size, device_pages=pool.num_pages, host_pages=host.num_pages)
    cache = HiCacheController(pool, PageAllocator(pool.num_pages, size), host, index, poison=False)
    prompts = [np.random.default_rng(seed).integers(0, 50_000, size * batch + 1) for seed in range(texts)]
    turns = itertools.cycle(prompts)

    def serve() -> None:
        prompt = next(turns)
        acquired = cache.acquire(prompt)
        cache.load(acquired)
        acquired.wait_layer(0)
        cache.finish(acquired, prompt)

    for _ in range(2 * texts):
        serve()
    assert cache.counters.host_hit_tokens > 0
    values = []
    for _ in range(bench.rounds):
        began = time.perf_counter()
        for _ in range(texts):
            serve()
        values.append((time.perf_counter() - began) * 1e6 / texts / batch)
    bench.record("a page of a prompt of 128: acquire, load, finish, evict (copies of 64 bytes with it)", values, "µs",
                 op="<=", target=5)  # fmt: skip


def storing(bench: Bench) -> None:
    """Pages of 4 MiB through the page cache, with checksums, beside plain files of the same bytes in order."""
    count, nbytes = 32, 4 * MIB
    pages = [[np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)] for seed in range(count)]
    rooms = [[np.empty(nbytes, dtype=np.uint8)] for _ in range(count)]
    keys = [f"{number:064x}" for number in range(count)]
    folder = Path(tempfile.mkdtemp(prefix="kv-pool-bench-"))
    stores = itertools.count()
    plain = [folder / f"plain-{number}" for number in range(count)]

    def write_plain() -> None:
        for path, (piece,) in zip(plain, pages, strict=True):
            with path.open("wb", buffering=0) as file:
                file.write(piece.data)

    def read_plain() -> None:
        for path, (room,) in zip(plain, rooms, strict=True):
            with path.open("rb", buffering=0) as file:
                assert file.readinto(room.data) == nbytes

    held = [FileStorage(folder / "0", capacity_bytes=2**40)]

    def write() -> None:
        assert held[0].write(keys, pages) == count

    def anew() -> None:
        """Both write new files; that the old ones are removed is not part of it."""
        shutil.rmtree(held[0].root)
        held[0] = FileStorage(folder / f"store-{next(stores)}", capacity_bytes=2**40)
        for path in plain:
            path.unlink(missing_ok=True)

    def read() -> None:
        assert held[0].read(keys, rooms) == count

    try:
        what = f"{count} pages of 4 MiB"
        rounds = []
        for turn in range(bench.rounds + 1):
            anew()
            both = (write, write_plain) if turn % 2 else (write_plain, write)
            taken = {work: once(work) for work in both}
            rounds.append((taken[write], taken[write_plain]))
        ours, theirs = zip(*rounds[1:], strict=True)  # the first one warms up
        bench.record(
            f"files: {what} written, beside plain files", list(ours), "ms", references=list(theirs),
            kind="reference/value", op=">=", target=0.7,
        )  # fmt: skip
        bench.faster(f"files: {what} read and verified, beside plain files", read, read_plain, at_least=0.7)
        assert all(np.array_equal(room[0], page[0]) for room, page in zip(rooms, pages, strict=True))
    finally:
        shutil.rmtree(folder)


def storing_in_mooncake(bench: Bench) -> None:
    """Pages of K and V, put and got in place, beside the library's own calls with lists that are ready."""
    count, nbytes = 16, MIB // 2
    pages, rooms = (np.random.default_rng(seed).integers(0, 256, (count, 2, nbytes), dtype=np.uint8) for seed in (1, 2))
    pieces, places = ([[row[0], row[1]] for row in memory] for memory in (pages, rooms))
    pointers = [[[piece.ctypes.data for piece in page] for page in listed] for listed in (pieces, places)]
    sizes = [[nbytes, nbytes]] * count
    numbers = itertools.count()
    with mooncake_master() as master:
        storage = MooncakeStorage(master, segment_bytes=3 << 30)
        storage.register([pages.reshape(-1), rooms.reshape(-1)])
        direct = storage._library  # the same client: another one would copy over TCP

        def keys() -> list[str]:
            return [f"{next(numbers):064x}" for _ in range(count)]

        def write() -> None:
            assert storage.write(keys(), pieces) == count

        def put() -> None:
            assert not any(direct.batch_put_from_multi_buffers(keys(), pointers[0], sizes))

        known = keys()
        assert storage.write(known, pieces) == count

        def read() -> None:
            assert storage.read(known, places) == count

        def get() -> None:
            assert len(direct.batch_get_into_multi_buffers(known, pointers[1], sizes)) == count

        what = f"mooncake: {count} pages of K and V, 1 MiB each"
        bench.faster(f"{what}, written, beside its own call", write, put, at_least=0.9)
        bench.faster(f"{what}, read, beside its own call", read, get, at_least=0.9)
        assert np.array_equal(pages, rooms)
        storage.close()


def main() -> None:
    """Measure and report."""
    if not current_isolation().isolated and "--inside" not in sys.argv:
        isolated = [sys.executable, "-m", "kv_transfer.isolation", "--", sys.executable, __file__, "--inside"]
        os.execv(sys.executable, isolated)
    bench = Bench("pool")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for backup in (True, False):
        wide = MhaPool(heads(1024, 128), size=128 * (MOVED // (256 * 1024)), device="cpu")
        moving(bench, "256 KB pages of K and of V", wide, backup=backup)
        del wide
        narrow = MlaPool(records(), size=128 * (2 * MOVED // (144 * 1024)), device="cpu")
        moving(bench, "147 KB pages", narrow, backup=backup)
        del narrow
    allocating(bench)
    controlling(bench)
    storing(bench)
    storing_in_mooncake(bench)
    bench.finish()


if __name__ == "__main__":
    main()
