"""Owns what pool tests share: labelled bytes, the plain loop, builders, a cache of known bytes, a random machine.

Long because a conftest is the only module that all tests of a folder share.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kv_planner import ComponentSpec, ModelLayout, PrefixIndex
from kv_pool import MhaPool, MlaPool, OutOfPages, PageAllocator, Pool
from kv_pool.hicache import (
    Acquired,
    CopyLimits,
    HiCacheController,
    HostLayout,
    HostPool,
    Mirror,
    Mover,
    MoverName,
    Namespace,
    StorageTier,
    Streams,
    WritePolicy,
    create_mover,
)
from kv_pool.writers import Writer

CHECKS = list(HealthCheck)
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as integers on the host, so that NaN patterns compare too."""
    return tensor.detach().cpu().contiguous().view(BITS[tensor.element_size()])


def labels(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values that tell where they belong: a running number, mixed with a seed, as raw bits of `dtype`."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = 1
    for dim in shape:
        count *= dim
    numbers = (torch.arange(count, dtype=torch.int64) * 7 + seed * 131 + 1) % 2 ** (8 * size - 2)
    labelled: torch.Tensor = numbers.to(BITS[size]).view(dtype).reshape(tuple(shape))
    return labelled


def loop_write(cache: torch.Tensor, slots: Sequence[int], rows: torch.Tensor) -> None:
    """The meaning of a write, said once more: element by element, on integers."""
    page_size = cache.shape[1]
    for token, slot in enumerate(slots):
        for head in range(cache.shape[2]):
            for dim in range(cache.shape[3]):
                cache[slot // page_size, slot % page_size, head, dim] = rows[token, head, dim]


@pytest.fixture
def check_writer() -> Callable[..., None]:
    """A writer, on a device, equals the plain loop: everything else keeps its bytes, inputs stay untouched."""

    def check(
        writer: Writer, device: str, dtype: torch.dtype, *, slot_dtype: torch.dtype = torch.int64, strided: bool = False
    ) -> None:
        pages, page_size, heads, dims, value_dims, margin = 5, 4, 3, 16, 32, 64
        slots = [17, 4, 5, 19, 8, 11, 0]
        buffers, caches = [], []
        for seed, width in ((1, dims), (2, value_dims)):
            count = pages * page_size * heads * width
            buffer = labels([count + 2 * margin], dtype, seed).to(device)
            buffers.append(buffer)
            caches.append(buffer[margin : margin + count].view(pages, page_size, heads, width))
        expected = [bits(buffer).clone() for buffer in buffers]
        rows = [labels([len(slots), heads, width], dtype, seed) for seed, width in ((3, dims), (4, value_dims))]
        for flat, cache, row in zip(expected, caches, rows, strict=True):
            loop_write(flat[margin : margin + cache.numel()].view(cache.shape), slots, bits(row))
        given = [row.to(device) for row in rows]
        if strided:
            given = [row.transpose(1, 2).contiguous().transpose(1, 2) for row in given]
        before = [bits(row) for row in given]
        index = torch.tensor(slots, dtype=slot_dtype, device=device)
        writer.write(caches[0], caches[1], index, given[0], given[1])
        for buffer, flat in zip(buffers, expected, strict=True):
            assert torch.equal(bits(buffer), flat)
        for row, old in zip(given, before, strict=True):
            assert torch.equal(bits(row), old)
        assert index.tolist() == slots and index.dtype == slot_dtype

    return check


@pytest.fixture
def make_layout() -> Callable[..., ModelLayout]:
    """Build a layout with K and V of unequal width, and a draft part of other widths when asked."""

    def make(
        *,
        layers: Sequence[int] = (0, 1),
        heads: int = 2,
        dims: int = 8,
        value_dims: int = 6,
        dtype: str = "float16",
        page_size: int = 4,
        draft: Sequence[int] = (),
    ) -> ModelLayout:
        shared: Any = {"layer_ids": layers, "dtype": dtype, "total_heads": heads}
        specs = [ComponentSpec("key", dims=dims, **shared), ComponentSpec("value", dims=value_dims, **shared)]
        if draft:
            own: Any = {"layer_ids": draft, "dtype": "float32", "total_heads": 1}
            specs += [ComponentSpec("key", "draft", dims=4, **own), ComponentSpec("value", "draft", dims=3, **own)]
        return ModelLayout(specs, page_size=page_size, fingerprint="test")

    return make


@pytest.fixture
def as_bits() -> Callable[[torch.Tensor], torch.Tensor]:
    """The bytes of a tensor as integers on the host."""
    return bits


@pytest.fixture
def make_labels() -> Callable[..., torch.Tensor]:
    """Values that tell where they belong, as raw bits of a dtype."""
    return labels


@pytest.fixture
def check_mover(make_layout: Callable[..., ModelLayout]) -> Callable[..., None]:
    """A mover brings permuted pages to the host and back bit for bit; every other page keeps its bytes."""

    def check(
        device: str,
        name: MoverName,
        layout: HostLayout,
        dtype: str,
        *,
        widths: tuple[int, int] = (512, 64),
        heads: int = 2,
    ) -> None:
        made = make_layout(layers=(4, 7), dims=widths[0], value_dims=widths[1], dtype=dtype, heads=heads, draft=(8,))
        pool = MhaPool(made, size=20, device=device)
        host = HostPool(pool, pages=6, layout=layout)
        mover = create_mover(name, host)
        for seed, mirror in enumerate(host.mirrors):
            mirror.device.copy_(labels(mirror.device.shape, mirror.device.dtype, seed))
            mirror.host.copy_(labels(mirror.host.shape, mirror.host.dtype, seed + 10))
        before = [(bits(mirror.device), bits(mirror.host).clone()) for mirror in host.mirrors]
        mover.backup([4, 1], [2, 5])
        finish(device)
        for mirror, (device_bits, host_bits) in zip(host.mirrors, before, strict=True):
            host_bits[[2, 5]] = device_bits[:, [4, 1]].transpose(0, 1)
            assert torch.equal(bits(mirror.host), host_bits)
            assert torch.equal(bits(mirror.device), device_bits)
        mover.load([3, 5, 1], [5, 2, 6])
        finish(device)
        for mirror, (device_bits, host_bits) in zip(host.mirrors, before, strict=True):
            device_bits = device_bits.clone()
            device_bits[:, [3, 5, 1]] = host_bits[[5, 2, 6]].transpose(0, 1)
            assert torch.equal(bits(mirror.device), device_bits)
            assert torch.equal(bits(mirror.host), host_bits)

    return check


def finish(device: str) -> None:
    """Wait for a device to do all its work."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


class CacheBench:
    """A cache whose bytes are known: what a page holds is a function of the text up to its end."""

    def __init__(
        self,
        layout: ModelLayout,
        *,
        device: str,
        pages: int,
        host_pages: int,
        policy: WritePolicy = "write_through",
        mover: Mover | MoverName | None = None,
        host_layout: HostLayout = "page_first_direct",
        streams: Streams | None = None,
        limits: CopyLimits | None = None,
        pool: Pool | None = None,
        poison: bool = True,
    ) -> None:
        self.size = layout.page_size
        kind = MlaPool if any(spec.component == "latent" for spec in layout.components) else MhaPool
        self.pool: Any = pool if pool is not None else kind(layout, size=pages * self.size, device=device)
        self.allocator = PageAllocator(self.pool.num_pages, self.size)
        self.host = HostPool(self.pool, pages=host_pages, layout=host_layout)
        self.index = PrefixIndex(self.size, device_pages=pages + 1, host_pages=host_pages + 1)
        self.options: Any = {
            "policy": policy, "mover": mover, "streams": streams, "limits": limits, "poison": poison,
        }  # fmt: skip
        self.layers = sorted({layer for mirror in self.host.mirrors for layer in mirror.layer_ids})
        self.attach(None)

    def attach(self, storage: StorageTier | None) -> None:
        """Make the cache over empty pools, with a third level or not."""
        parts = (self.pool, self.allocator, self.host, self.index)
        self.cache = HiCacheController(*parts, storage=storage, **self.options)

    def expected(
        self, mirror: Mirror, layer: int, text: Sequence[int], namespace: Namespace, page: int
    ) -> torch.Tensor:
        """What a layer of a page holds after the text up to its end was computed. Shape: [page_size, heads, dims]."""
        known = f"{mirror.component} {mirror.part} {layer} {namespace} {list(text[: (page + 1) * self.size])}"
        first = mirror.layers[0]
        return labels(first.shape[1:], first.dtype, zlib.crc32(known.encode()) % 9973)

    def compute(self, acquired: Acquired, text: Sequence[int], layer: int, start: int, pages: int) -> None:
        """Write a layer of the pages from `start` on, as a model would."""
        for mirror in self.host.mirrors:
            if layer not in mirror.layer_ids:
                continue
            position = mirror.layer_ids.index(layer)
            for page in range(start, pages):
                content = self.expected(mirror, layer, text, acquired.namespace, page)
                mirror.layers[position][int(acquired.pages[page])].copy_(content)

    def check_hits(self, acquired: Acquired, layer: int) -> None:
        """Every page that was found holds what was computed for this text, in this layer."""
        for mirror in self.host.mirrors:
            if layer not in mirror.layer_ids:
                continue
            position = mirror.layer_ids.index(layer)
            for page in range(acquired.hit_tokens // self.size):
                read = mirror.layers[position][int(acquired.pages[page])]
                wanted = self.expected(mirror, layer, acquired.tokens.tolist(), acquired.namespace, page)
                assert torch.equal(bits(read), bits(wanted)), f"{mirror.component} {mirror.part} {layer}, page {page}"

    def run(self, acquired: Acquired, text: Sequence[int] | None = None) -> list[int]:
        """Load, check what was found layer by layer, and compute the rest; returns the text whose pages are filled."""
        done = acquired.tokens.tolist() if text is None else list(text)
        if acquired.state == "acquired":
            self.cache.load(acquired)
        for layer in self.layers:
            acquired.wait_layer(layer)
            self.check_hits(acquired, layer)
            self.compute(acquired, done, layer, acquired.hit_tokens // self.size, -(-len(done) // self.size))
        return done

    def acquire(self, tokens: Sequence[int], namespace: Namespace = None) -> Acquired:
        """Begin a prompt."""
        return self.cache.acquire(list(tokens), namespace)

    def serve(self, tokens: Sequence[int], namespace: Namespace = None) -> tuple[int, int]:
        """One prompt from beginning to end; returns the tokens found on the device and on the host."""
        acquired = self.acquire(tokens, namespace)
        self.check_books()
        self.cache.finish(acquired, self.run(acquired))
        self.check_books()
        return acquired.device_hit_tokens, acquired.host_hit_tokens

    def check_books(self) -> None:
        """All counts agree with each other, and no free page holds anything but poison."""
        self.allocator.verify()
        self.host.allocator.verify()
        books, counts = self.cache.accounting(), self.index.counts()
        assert self.allocator.available == books.available
        assert counts.device.held == books.evictable + books.protected

    def check_poison(self, used: set[int]) -> None:
        """Every free page that was `used` before is poisoned in every component and layer."""
        free = [page for page in used if self.allocator.holders([page])[0] == 0]
        for mirror in self.host.mirrors:
            for layer in mirror.layers:
                held = layer[free].cpu()
                poisoned = held.float().isnan() if held.is_floating_point() else held.view(torch.int8) == -1
                assert bool(poisoned.all())


@pytest.fixture
def make_cache(make_layout: Callable[..., ModelLayout]) -> Callable[..., CacheBench]:
    """Build a cache over a pool of target and draft, K and V of unequal widths."""

    def make(device: str = "cpu", pages: int = 8, host_pages: int = 16, **options: Any) -> CacheBench:
        layout = options.pop("layout", None)
        layout = layout or make_layout(layers=(0, 1), draft=(2,), dtype=options.pop("dtype", "float16"))
        return CacheBench(layout, device=device, pages=pages, host_pages=host_pages, **options)

    return make


@pytest.fixture
def text() -> Callable[..., list[int]]:
    """Token ids of a named text: equal names begin alike, whatever the length."""

    def make(name: int, length: int) -> list[int]:
        return [int(token) for token in np.random.default_rng(name).integers(0, 50_000, length)]

    return make


# Texts over a tree: which text each branches off, and after how many tokens.
BRANCHES = [(0, 0), (0, 8), (0, 12), (1, 4), (4, 0), (4, 8), (2, 16), (7, 0)]


def branch(name: int, length: int) -> list[int]:
    """A text that shares its first tokens with another one."""
    parent, shared = BRANCHES[name]
    head = branch(parent, min(shared, length)) if shared else []
    return head + [1000 * (name + 1) + number for number in range(len(head), length)]


class CacheMachine(RuleBasedStateMachine):
    """Several running requests over one small cache."""

    make: Callable[..., Any]
    device = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.running: list[Any] = []

    @initialize(
        pages=st.integers(3, 9),
        host_pages=st.integers(1, 14),
        policy=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
        limits=st.builds(CopyLimits, batch_pages=st.sampled_from([1, 2, 3, 1024]), layers_ahead=st.integers(1, 4)),
    )
    def start(self, pages: int, host_pages: int, policy: WritePolicy, limits: CopyLimits) -> None:
        self.sizes, self.limits = (pages, host_pages), limits
        self.bench = self.make(self.device, pages, host_pages, policy=policy, limits=limits)

    @rule(name=st.integers(0, len(BRANCHES) - 1), length=st.integers(1, 22), namespace=st.sampled_from([None, "other"]))
    def acquire(self, name: int, length: int, namespace: str | None) -> None:
        try:
            acquired = self.bench.acquire(branch(name, length), namespace)
        except OutOfPages:
            return
        assert acquired.hit_tokens < length and acquired.hit_tokens % 4 == 0
        assert acquired.device_hit_tokens + acquired.host_hit_tokens == acquired.hit_tokens
        assert len(set(acquired.pages.tolist())) == -(-length // 4)
        self.running.append(acquired)

    @rule(name=st.integers(0, len(BRANCHES) - 1), length=st.integers(8, 22), wait=st.booleans())
    def serve(self, name: int, length: int, wait: bool) -> None:
        with suppress(OutOfPages):
            self.bench.serve(branch(name, length))
        self.acknowledge(wait)

    @precondition(lambda self: self.bench.cache._storage is not None)
    @rule(name=st.integers(0, len(BRANCHES) - 1), length=st.integers(1, 22), cancel=st.booleans())
    def prefetch(self, name: int, length: int, cancel: bool) -> None:
        prefetch = self.bench.cache.prefetch(branch(name, length))
        if cancel:
            prefetch.cancel()
        self.bench.cache.poll()
        assert prefetch.state != "reading" and 4 * prefetch.pages <= length

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def limit(self, data: st.DataObject) -> None:
        acquired = data.draw(st.sampled_from(self.running))
        if acquired.state != "acquired":
            return
        hit = acquired.hit_tokens
        least = acquired.restorable(data.draw(st.integers(0, hit // 4)) * 4)
        try:
            self.bench.cache.limit(acquired, least)
        except OutOfPages:
            assert acquired.hit_tokens == hit

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        if (acquired := data.draw(st.sampled_from(self.running))).state == "acquired":
            self.bench.cache.load(acquired)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        acquired = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        done = self.bench.run(acquired)
        kept = data.draw(st.integers(acquired.hit_tokens, len(done)))
        self.bench.cache.finish(acquired, done[:kept])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.bench.cache.abort(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @precondition(lambda self: self.bench.cache._storage is not None)
    @rule(name=st.integers(0, len(BRANCHES) - 1), length=st.integers(8, 22))
    def restart(self, name: int, length: int) -> None:
        self.serve(name, length, True)
        self.teardown()
        self.bench = self.make(
            self.device, *self.sizes, policy=self.bench.cache.policy, limits=self.limits, restarted=True
        )
        self.prefetch(name, length, False)
        self.serve(name, length, False)

    @rule(name=st.integers(0, len(BRANCHES) - 1), length=st.integers(8, 22))
    def stop(self, name: int, length: int) -> None:
        """A prompt is brought back from the host, and aborted at once."""
        self.serve(name, length, True)
        self.bench.cache.evict(self.bench.allocator.total)
        with suppress(OutOfPages):
            acquired = self.bench.cache.acquire(branch(name, length))
            self.bench.cache.load(acquired)
            self.bench.cache.abort(acquired)

    @rule()
    def cancel_backups(self) -> None:
        waiting = self.bench.cache.under_way.queued_backups
        assert self.bench.cache.cancel_backups() == waiting and self.bench.cache.under_way.queued_backups == 0

    @rule(pages=st.integers(1, 9))
    def evict(self, pages: int) -> None:
        self.bench.cache.evict(pages)

    @rule(wait=st.booleans())
    def acknowledge(self, wait: bool) -> None:
        (self.bench.cache.drain if wait else self.bench.cache.poll)()

    @invariant()
    def laws(self) -> None:
        self.bench.check_books()
        books, counts = self.bench.cache.accounting(), self.bench.index.counts()
        assert books.available + books.evictable + books.protected + books.in_use == books.total
        owned = [page for acquired in self.running for page in acquired.pages[acquired._owned].tolist()]
        assert len(owned) == len(set(owned))
        if not self.bench.cache.pending:
            assert books.in_use == len(owned) and counts.locks == len(self.running)
            assert counts.host.held == self.bench.host.allocator.held

    def teardown(self) -> None:
        while self.running:
            self.bench.cache.abort(self.running.pop())
        self.bench.cache.drain()
        self.bench.cache.evict(self.bench.allocator.total)
        assert self.bench.allocator.held == 0 and self.bench.index.counts().locks == 0
        assert self.bench.cache.accounting().in_use == 0


@pytest.fixture
def run_machine(make_cache: Callable[..., CacheBench]) -> Callable[..., None]:
    """Run random interleavings on a device."""

    def run(device: str, *, examples: int, steps: int) -> None:
        machine = type("Machine", (CacheMachine,), {"make": staticmethod(make_cache), "device": device})
        chosen = settings(max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=CHECKS)
        run_state_machine_as_test(machine, settings=chosen)

    return run


settings.register_profile("untimed", deadline=None)  # a busy machine is no fault
settings.load_profile("untimed")
