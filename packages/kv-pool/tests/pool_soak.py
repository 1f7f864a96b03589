"""The long proof of HiCache: 500 random steps for each of 200 seeds, over pools, policies and levels; 200 kills.

`nox -s soak -- kv-pool` runs it as a script, which prints a line a figure; `test_pool_soak.py` runs a slice. Bytes
are checked whenever a prompt is served, books after every step. It owns the choice of steps; what a step does, and what
must hold after it, is `CacheMachine` in `conftest.py`.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from conftest import BRANCHES, CacheBench, CacheMachine, branch
from kv_planner import ComponentSpec, ModelLayout
from kv_pool import OutOfPages
from kv_pool.hicache import Canary, CopyLimits, FileStorage, ImmediateStreams, StorageTier, WritePolicy
from pool_group import GroupBench
from test_pool_hicache_random import LateStreams, sparse_layout
from test_pool_storage_files import crash
from test_pool_storage_files_foreign import share

__all__ = ["KINDS", "soak"]

SEEDS, STEPS, KILLS = 200, 500, 200
WRITERS, ROUNDS = 4, 2000  # processes that share a folder, and their calls
COMPANIONS: dict[str, tuple[str, ...]] = {
    "heads": (),
    "heads and draft": (),
    "latents, index keys and draft": (),
    "memory of an engine": (),
    "heads, draft apart": ("draft",),
    "heads and window": ("window",),
    "heads and states": ("states",),
    "heads and draft, window and states": ("window", "states"),
    "latents, index keys and draft, states": ("states",),
    "memory of an engine, draft apart, window and states": ("draft", "window", "states"),
}
POOLS = tuple(COMPANIONS)
POLICIES: tuple[WritePolicy, ...] = ("write_through", "write_through_selective", "write_back")
LEVELS = ("two levels", "three levels", "three levels and canary")
KINDS = tuple(itertools.product(POOLS, POLICIES, LEVELS))
Random = np.random.Generator


def layout(pool: str) -> ModelLayout:
    """K and V of unequal widths, or a sparse model's latents."""
    if "latents" in pool:
        return sparse_layout()
    shared: Any = {"layer_ids": (0, 1), "dtype": "float16", "total_heads": 2}
    specs = [ComponentSpec("key", dims=8, **shared), ComponentSpec("value", dims=6, **shared)]
    if "heads and draft" in pool:
        draft: Any = {"layer_ids": (2,), "dtype": "float32", "total_heads": 1}
        specs += [ComponentSpec("key", "draft", dims=4, **draft), ComponentSpec("value", "draft", dims=3, **draft)]
    return ModelLayout(specs, page_size=4, fingerprint="soak")


class Moody(FileStorage):
    """A store of which one call in twenty ends with an error of whatever lies below it."""

    random: Random
    raised = 0

    def _meet(self) -> None:
        if self.random.integers(20) == 0:
            self.raised += 1
            raise (KeyError, OSError, RuntimeError)[int(self.random.integers(3))]("below")

    def exists(self, keys: Any) -> int:
        self._meet()
        return super().exists(keys)

    def read(self, keys: Any, pages: Any) -> int:
        read = super().read(keys, pages)
        self._meet()
        return read

    def write(self, keys: Any, pages: Any) -> int:
        self._meet()
        return super().write(keys, pages)

    def remove(self, keys: Any) -> None:
        self._meet()
        super().remove(keys)


class Soak:
    """One seed: a cache of random size, and the machine that works on it."""

    def __init__(self, seed: int, folder: Path, device: str = "cpu") -> None:
        self.random = np.random.default_rng(seed)
        self.pool, self.policy, self.levels = KINDS[seed % len(KINDS)]
        self.folder = folder
        self.counts: collections.Counter[str] = collections.Counter()
        machine = type("Machine", (CacheMachine,), {"make": staticmethod(self.make), "device": device})
        self.machine: Any = machine()
        self.machine.start(
            pages=int(self.random.integers(3, 10)),
            host_pages=int(self.random.integers(1, 15)),
            policy=self.policy,
            limits=CopyLimits(int(self.random.choice([1, 2, 3, 1024])), int(self.random.integers(1, 5))),
        )

    def make(
        self,
        device: str,
        pages: int,
        host_pages: int,
        *,
        policy: WritePolicy,
        limits: CopyLimits,
        restarted: bool = False,
    ) -> Any:
        """A cache; after a restart over the store that the last one filled."""
        streams = (ImmediateStreams, LateStreams)[int(self.random.integers(2))]() if device == "cpu" else None
        made = layout(self.pool)
        options: Any = {"device": device, "policy": policy, "streams": streams, "limits": limits}
        options |= {"pages": pages, "host_pages": host_pages}
        kinds, adopted = COMPANIONS[self.pool], "engine" in self.pool
        if kinds or adopted:
            own = (int(self.random.integers(2, pages + 1)), int(self.random.integers(1, host_pages + 1)))
            seed = int(self.random.integers(2**32))
            options |= {"own": own[0], "own_host": own[1], "seed": seed, "adopted": adopted}
            bench: Any = GroupBench(kinds, layout=made, **options)
        else:
            bench = CacheBench(made, **options)
        canary = Canary(bench.host) if "canary" in self.levels else None
        bench.options["canary"] = canary
        if self.levels != LEVELS[0]:
            kind = (FileStorage, Moody)[int(self.random.integers(2))]
            store = kind(self.folder, capacity_bytes=int(self.random.choice([20_000, 10**8])))
            if isinstance(store, Moody):
                store.random = self.random
            numbers: Any = {"threshold": 4, "batch": 2, "write_limit": int(self.random.choice([2, 3, 1024]))}
            bench.attach(StorageTier(bench.host, bench.index, store, **numbers, threads=0, canary=canary))
        else:
            bench.attach(None)
        self.counts["restarts" if restarted else "caches"] += 1
        return bench

    def step(self) -> None:
        """One of the machine's steps, chosen and filled in at random; then its laws."""
        machine, random = self.machine, self.random
        rules: list[Callable[[], None]] = [
            self.acquire,
            self.serve,
            self.evict,
            self.acknowledge,
            self.stop,
            self.queue,
        ]
        if machine.running:
            rules += [self.limit, self.load, self.finish, self.finish, self.abort]
        if machine.bench.cache._storage is not None:
            rules.append(self.prefetch)
            if random.integers(20) == 0:
                rules = [self.restart]
        rule = rules[int(random.integers(len(rules)))]
        rule()
        self.counts[rule.__name__] += 1
        machine.laws()

    def text(self, least: int = 1) -> dict[str, int]:
        return {"name": int(self.random.integers(len(BRANCHES))), "length": int(self.random.integers(least, 23))}

    def one(self) -> Any:
        return self.machine.running[int(self.random.integers(len(self.machine.running)))]

    def taken(self) -> Any:
        return self.machine.running.pop(int(self.random.integers(len(self.machine.running))))

    def acquire(self) -> None:
        self.machine.acquire(**self.text(), namespace=(None, "other")[int(self.random.integers(2))])

    def serve(self) -> None:
        self.machine.serve(**self.text(8), wait=bool(self.random.integers(2)))

    def evict(self) -> None:
        cache = self.machine.bench.cache
        pools = [None, *(companion.name for companion in cache.companions)]
        cache.evict(int(self.random.integers(1, 10)), pools[int(self.random.integers(len(pools)))])

    def acknowledge(self) -> None:
        self.machine.acknowledge(wait=bool(self.random.integers(2)))

    def prefetch(self) -> None:
        self.machine.prefetch(**self.text(), cancel=bool(self.random.integers(2)))

    def restart(self) -> None:
        self.count_tokens()
        self.machine.restart(**self.text(8))

    def limit(self) -> None:
        acquired = self.one()
        if acquired.state == "acquired":
            hit = acquired.hit_tokens
            least = acquired.restorable(4 * int(self.random.integers(hit // 4 + 1)))
            try:
                self.machine.bench.cache.limit(acquired, least)
            except OutOfPages:
                assert acquired.hit_tokens == hit

    def load(self) -> None:
        acquired = self.one()
        if acquired.state == "acquired":
            self.machine.bench.cache.load(acquired)

    def stop(self) -> None:
        self.machine.stop(**self.text(8))

    def queue(self) -> None:
        """Backups that find another one under way, and now and then are given up."""
        for _ in range(2):
            with suppress(OutOfPages):
                self.machine.bench.serve(branch(**self.text(16)))
            if self.random.integers(2):
                self.machine.cancel_backups()

    def finish(self) -> None:
        acquired = self.taken()
        text = acquired.tokens.tolist()
        if acquired.state == "loaded" and self.random.integers(2):
            with suppress(OutOfPages):
                more = int(self.random.integers(1, 3))
                self.machine.bench.cache.extend(acquired, more)
                text += list(range(70_000, 70_000 + 4 * (acquired.pages.size) - len(text)))
                self.counts["extended"] += more
        done = self.machine.bench.run(acquired, text)
        kept = int(self.random.integers(acquired.hit_tokens, len(done) + 1))
        self.machine.bench.cache.finish(acquired, done[:kept])

    def abort(self) -> None:
        self.machine.bench.cache.abort(self.taken())

    def count_tokens(self) -> None:
        """What the cache that ends now has served."""
        counters = self.machine.bench.cache.counters
        self.counts["device_hits"] += counters.device_hit_tokens
        self.counts["host_hits"] += counters.host_hit_tokens
        self.counts["stopped"] += counters.cancelled_load_pages
        self.counts["given_up"] += counters.cancelled_backup_pages
        self.counts["evicted"] += counters.evicted_device_pages + counters.evicted_host_pages
        self.counts["companion_host_hits"] += counters.companion_loaded_pages
        self.counts["uncovered"] += counters.uncovered_tokens
        if COMPANIONS[self.pool]:
            self.counts["companion_hits"] += counters.hit_tokens
        if (storage := self.machine.bench.cache._storage) is not None:
            self.counts["stored"] += storage.counters.written_pages
            self.counts["read"] += storage.counters.read_pages
            self.counts["failures"] += getattr(storage.store, "raised", 0)
        if (further := self.machine.bench.cache.companion_storage) is not None:
            self.counts["companion_stored"] += further.counters.written_pages
            self.counts["companion_read"] += further.counters.read_pages


def soak(seeds: range, steps: int) -> collections.Counter[str]:
    """Run the seeds; returns how often each thing was done. An error names its seed."""
    total: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(prefix="kv-pool-soak-"))
        try:
            one = Soak(seed, folder)
            for _ in range(steps):
                one.step()
            one.count_tokens()
            one.machine.teardown()
        except BaseException:
            print(f"seed {seed}: {KINDS[seed % len(KINDS)]}", file=sys.stderr)
            raise
        finally:
            shutil.rmtree(folder)
        total += one.counts
        total["steps"] += steps
    return total


def main() -> None:
    """All seeds, and what was done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--kills", type=int, default=KILLS)
    options = parser.parse_args()
    total = soak(range(options.seed, options.seed + options.seeds), options.steps)
    with tempfile.TemporaryDirectory(prefix="kv-pool-soak-") as folder:
        for part in range(options.kills // 50):  # a process each
            crash(Path(folder) / str(part), options.seed + part, 50)
        share(Path(folder) / "shared", WRITERS, ROUNDS)
    assert total["device_hits"] and total["host_hits"] and total["read"], "nothing was found again"
    print(f"count: seeds × steps | {options.seeds} × {options.steps}")
    print(f"count: writers of files killed at random places | {options.kills}")
    print(f"count: processes × calls on one folder of files | {WRITERS} × {ROUNDS}")
    print(f"count: pools × policies × levels | {len(POOLS)} × {len(POLICIES)} × {len(LEVELS)}")
    for name, title in (
        ("device_hits", "tokens found on the device, bytes checked"),
        ("host_hits", "tokens brought back from the host, bytes checked"),
        ("stored", "pages written to a store"),
        ("read", "pages read from a store"),
        ("failures", "calls of a store that ended with an error of their own"),
        ("evicted", "pages evicted"),
        ("abort", "requests aborted"),
        ("extended", "pages taken for what follows a prompt"),
        ("stopped", "pages of loads stopped by an abort"),
        ("given_up", "pages of backups given up while they waited"),
        ("restarts", "restarts over the store"),
        ("companion_hits", "tokens found in caches over several pools, bytes of all checked"),
        ("companion_host_hits", "pages and rows of companions brought back from the host"),
        ("companion_stored", "pages and rows of companions written to a store"),
        ("companion_read", "pages and rows of companions read from a store"),
        ("uncovered", "tokens that a companion lacked, computed again"),
    ):
        print(f"count: {title} | {total[name]:,}")


if __name__ == "__main__":
    main()
