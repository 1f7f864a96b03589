"""Bench of the planner: agree, route, plan and lower, beside the field's way and beside the speed of memory.

The field's way: group page pairs into runs with numpy, then expand runs × buffers in Python into tuples of addresses
and lengths. The physical limit: fill three uint64 arrays of the same length. The prefix index is measured beside a
Python dictionary over tuples of tokens, page hashes beside the bare hash function.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import kv_planner as kp
import numpy as np
import numpy.typing as npt
from benching import Bench

LAYERS = 61
ENTRIES = 2 * LAYERS
Pages = npt.NDArray[np.int64]
Block = tuple[int, int, int]


def layout(layers: int, heads: int = 1) -> kp.ModelLayout:
    """K and V of a decoder."""
    specs = [
        kp.ComponentSpec(name, layer_ids=range(layers), dtype="float16", total_heads=heads, dims=64)
        for name in ("key", "value")
    ]
    return kp.ModelLayout(specs, page_size=16, fingerprint="bench")


def rank(
    model: kp.ModelLayout, placement: kp.Placement, heads: tuple[int, int], base: int, pages: int
) -> kp.RankManifest:
    """All layers of some heads, one buffer after another."""
    item = model.item_bytes("key", heads=heads[1] - heads[0])
    places = [(spec.component, layer) for spec in model.components for layer in spec.layer_ids]
    entries = [
        kp.BufferEntry(
            name, "target", layer, device="npu:0", address=base + number * item * pages, nbytes=item * pages,
            item_stride=item, item_bytes=item, head_range=heads,
        )
        for number, (name, layer) in enumerate(places)
    ]  # fmt: skip
    return kp.RankManifest(model, placement, entries)


def field_runs(source: Pages, destination: Pages) -> list[tuple[int, int, int]]:
    """Neighbouring pairs grouped, with numpy and lists of arrays."""
    breaks = np.nonzero((np.diff(source) != 1) | (np.diff(destination) != 1))[0] + 1
    groups = zip(np.split(source, breaks), np.split(destination, breaks), strict=True)
    return [(int(a[0]), int(b[0]), len(a)) for a, b in groups]


def field_blocks(route: list[Block], source: Pages, destination: Pages) -> list[Block]:
    """(source address, destination address, bytes) of every run in every buffer, as tuples."""
    runs = field_runs(source, destination)
    blocks = []
    for from_base, to_base, item in route:
        for from_page, to_page, count in runs:
            blocks.append((from_base + from_page * item, to_base + to_page * item, item * count))
    return blocks


def fill(count: int) -> tuple[npt.NDArray[np.uint64], ...]:
    """Three fresh arrays, every word written once."""
    return tuple(np.full(count, value, dtype=np.uint64) for value in (1, 2, 3))


def peak_over_output(plan: kp.Plan, kept: list[kp.LoweredPlan]) -> float:
    """Largest growth of resident memory while lowering, over the bytes of the three arrays.

    Results are kept, so that no call writes the memory of one before.
    """

    def resident(name: str) -> int:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return int(lines[name].split()[0]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    before = resident("VmRSS")
    kept.append(kp.lower(plan))
    return (resident("VmHWM") - before) / (24 * kept[-1].block_count)


def lowering(bench: Bench) -> None:
    """122 buffers, pages scattered or in one piece."""
    pages = 8200
    model = layout(LAYERS)
    local, remote = (rank(model, kp.Placement(), (0, 1), base, pages) for base in (1 << 30, 1 << 40))
    route = kp.agree(local, remote).route()
    table = [
        (local.entries[pair.source_entry].address, remote.entries[pair.destination_entry].address, pair.row_bytes)
        for pair in route.pairs
    ]
    order = np.random.default_rng(0)
    scattered = {n: (order.permutation(n) + 1, order.permutation(n) + 1) for n in (1024, 8192)}
    together = (np.arange(1, 1025), np.arange(7, 1031))

    def ours(source: Pages, destination: Pages) -> kp.LoweredPlan:
        return kp.lower(kp.Plan(route, kp.Runs(source, destination)))

    for source, destination in (scattered[1024], together):  # both ways say the same before they are timed
        (batch,) = ours(source, destination).batches
        planned = zip(batch.source.tolist(), batch.destination.tolist(), batch.nbytes.tolist(), strict=True)
        assert sorted(planned) == sorted(field_blocks(table, source, destination))

    for count in (1024, 8192):
        bench.faster(
            f"plan + lower, {count:,} scattered pages × {ENTRIES} buffers, beside tuples in Python",
            partial(ours, *scattered[count]),
            partial(field_blocks, table, *scattered[count]),
            at_least=150,
        )
    case = scattered[1024]
    blocks = ours(*case).block_count
    bench.near(
        f"the same, {blocks:,} blocks, beside filling three arrays",
        lambda: ours(*case),
        lambda: fill(blocks),
        at_most=3,
    )
    bench.faster(
        f"plan + lower, 1,024 contiguous pages × {ENTRIES} buffers, beside tuples in Python",
        partial(ours, *together),
        partial(field_blocks, table, *together),
        at_least=25,
        unit="µs",
    )
    plan = kp.Plan(route, kp.Runs(*scattered[8192]))
    kept: list[kp.LoweredPlan] = []
    peaks = [peak_over_output(plan, kept) for _ in range(5)]
    kept.clear()
    bench.record("peak memory of lowering 8,192 × 122, over the output", peaks, "×", op="<=", target=1.2)
    runs = plan.runs
    bench.within("a plan of 8,192 scattered pages, not lowered", lambda: kp.Plan(route, runs), at_most=20, unit="µs")
    small = kp.Runs([1], [1])
    bench.within("a plan of one page, not lowered", lambda: kp.Plan(route, small), at_most=20, unit="µs")


def agreeing(bench: Bench) -> None:
    """Two deployments of 16 ranks with 200 buffers each."""
    ranks, layers = 16, 100
    model = layout(layers, heads=ranks)

    def side(base: int) -> kp.Deployment:
        places = [kp.Placement(tp_rank=index, tp_size=ranks) for index in range(ranks)]
        return kp.Deployment(
            [rank(model, place, (index, index + 1), base * (index + 1), 8) for index, place in enumerate(places)]
        )

    local, remote = side(1 << 30), side(1 << 32)
    assert len(kp.agree(local, remote).route(3, 3)) == 2 * layers
    sizes = f"2 deployments × {ranks} ranks × {2 * layers} buffers"
    bench.within(f"agree, {sizes}", lambda: kp.agree(local, remote), at_most=2, unit="ms")

    def routes() -> None:
        agreement = kp.agree(local, remote)
        for index in range(ranks * ranks):
            agreement.route(*divmod(index, ranks))

    bench.within(f"agree and all {ranks * ranks} routes, {sizes}", routes, at_most=100, unit="ms")


def stepping(bench: Bench) -> None:
    """What a decode step asks for 512 rows."""
    rows, width = 512, 5
    fields = [kp.RowField("tokens", "int64", rows=rows * width), kp.RowField("kv_lens", "int32", rows=rows)]
    drafts = np.arange(rows, dtype=np.int64) % width
    lengths = np.arange(rows, dtype=np.int64) + 100

    def step() -> None:
        kp.RowLayout(fields)
        kp.select_index(drafts, rows=rows, width=width)
        kp.kv_lengths("eagle", lengths, window=width)

    bench.within(f"row layout + select index + lengths, {rows} rows", step, at_most=20, unit="µs")


def threading(bench: Bench, pages: int, times: int, target: float) -> None:
    """One thread and two, each lowering its own plan; many pages are bound by the memory that both fill."""
    model = layout(LAYERS)
    local, remote = (rank(model, kp.Placement(), (0, 1), base, pages + 8) for base in (1 << 30, 1 << 40))
    route = kp.agree(local, remote).route()
    order = np.random.default_rng(1)
    plans = [kp.Plan(route, kp.Runs(order.permutation(pages) + 1, order.permutation(pages) + 1)) for _ in range(2)]

    def work(plan: kp.Plan) -> None:
        for _ in range(times):
            kp.lower(plan)

    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))  # the system may leave two short-lived threads on one core
    with ThreadPoolExecutor(2, initializer=lambda: os.sched_setaffinity(0, {next(cores)})) as pool:
        list(pool.map(work, plans))
        alone, together = [], []
        for _ in range(bench.rounds):
            began = time.perf_counter()
            pool.submit(work, plans[0]).result()
            alone.append(2e3 * (time.perf_counter() - began))
            began = time.perf_counter()
            list(pool.map(work, plans))
            together.append(1e3 * (time.perf_counter() - began))
    metric = f"two threads lower {pages:,} × {ENTRIES} at once, beside one after the other"
    bench.record(metric, together, "ms", references=alone, kind="reference/value", op=">=", target=target)


class DictionaryIndex:
    """The field's way in Python: (node above, tokens of the page) to node, least recently used first."""

    def __init__(self) -> None:
        self.nodes: OrderedDict[tuple[int, tuple[int, ...]], int] = OrderedDict()
        self.made = 0

    def insert(self, tokens: list[int], page: int) -> None:
        """Add the pages that are missing."""
        above = 0
        for start in range(0, len(tokens), page):
            key = (above, tuple(tokens[start : start + page]))
            above = self.nodes.get(key, 0)
            if not above:
                self.made += 1
                above = self.nodes[key] = self.made

    def match(self, tokens: list[int], page: int) -> list[int]:
        """Nodes of the longest prefix."""
        above, found = 0, []
        for start in range(0, len(tokens), page):
            node = self.nodes.get((above, tuple(tokens[start : start + page])))
            if node is None:
                break
            found.append(node)
            above = node
        return found

    def evict(self, pages: int) -> None:
        """Drop the newest, which are leaves."""
        for _ in range(pages):
            self.nodes.popitem()


def indexing(bench: Bench) -> None:
    """An index of a million pages."""
    page, pages, length = 128, 1_000_000, 1024
    index, reference = kp.PrefixIndex(page, device_pages=pages + length), DictionaryIndex()
    words = list(range(50_000))  # one object a word, so that the dictionary fits in memory

    def sequence(number: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng(number).integers(0, len(words), length * page)

    for number in range(pages // length):
        tokens = sequence(number)
        index.insert(tokens, np.arange(number * length + 1, (number + 1) * length + 1))
        reference.insert([words[token] for token in tokens.tolist()], page)
    asked = [sequence(number) for number in range(3, pages // length, 97)]
    lists = [tokens.tolist() for tokens in asked]
    assert all(len(index.match(tokens)) == length for tokens in asked)
    assert all(len(reference.match(tokens, page)) == length for tokens in lists)
    turns = itertools.cycle(range(len(asked)))
    bench.faster(
        f"match {length * page:,} tokens at page {page} in {index.counts().nodes:,} pages, beside a dictionary",
        lambda: index.match(asked[next(turns)]),
        lambda: reference.match(lists[next(turns)], page),
        at_least=10,
        unit="µs",
    )


def refilling(bench: Bench) -> None:
    """An index of 10,000 pages, filled and emptied."""
    page, some, vocabulary = 128, 10_000, 50_000
    small, other = kp.PrefixIndex(page, device_pages=some + 1), DictionaryIndex()
    tokens = np.random.default_rng(0).integers(0, vocabulary, some * page)
    numbers, held = np.arange(1, some + 1), tokens.tolist()

    def ours() -> None:
        small.insert(tokens, numbers)
        assert len(small.evict_device(some).pages) == some

    def dictionary() -> None:
        other.insert(held, page)
        other.evict(some)

    bench.faster(f"insert and evict {some:,} pages, beside a dictionary", ours, dictionary, at_least=2)


def hashing(bench: Bench) -> None:
    """The hash chain of 1,024 pages beside sha256 over as many blocks in one call."""
    page, pages = 128, 1024
    tokens = np.random.default_rng(0).integers(0, 50_000, pages * page)
    blocks = -(-(32 + 4 * page + 9) // 64)  # parent, tokens and padding, in blocks of the hash
    text = bytes(64 * blocks * pages)
    bench.near(
        f"hashes of {pages:,} pages of {page} tokens, beside sha256 of as many blocks",
        lambda: kp.page_digests(tokens, page),
        lambda: hashlib.sha256(text).digest(),
        at_most=1 / 0.8,
        unit="µs",
    )


def main() -> None:
    """Measure and report."""
    bench = Bench("planner")
    assert kp.BUILD_PROFILE == "release", f"this planner was built as {kp.BUILD_PROFILE}"
    lowering(bench)
    agreeing(bench)
    stepping(bench)
    threading(bench, 1024, 96, 1.6)
    threading(bench, 8192, 12, 1.2)
    hashing(bench)
    refilling(bench)
    indexing(bench)
    bench.finish()


if __name__ == "__main__":
    main()
