"""Owns a cache over several pools whose bytes are known: heads, a window, a draft apart, states; target and draft.

As in `CacheBench`, what a page holds is a function of the text up to its end, and what a state holds one of the text up
to exactly its place. Every page is looked at whenever a prompt is served; every free page must be poison.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from conftest import CacheBench, bits, labels
from kv_planner import ComponentSpec, ModelLayout
from kv_pool import HybridPool, MhaPool, OutOfPages, PageAllocator, PageMap, StatePool, adopt
from kv_pool.hicache import Acquired, Companion, HiCacheController, HostPool, Mirror, Namespace, StorageTier

if TYPE_CHECKING:
    from kv_planner import Part

__all__ = ["WINDOW", "GroupBench", "PageByPage", "group_layout", "state_layouts", "window_pool"]

WINDOW = 6  # tokens: two pages of four


def group_layout(
    parts: dict[Part, Sequence[int]], *, dims: tuple[int, int] = (8, 6), dtype: str = "float16"
) -> ModelLayout:
    """K and V of unequal widths on the layers of each part."""
    specs = []
    for part, layers in parts.items():
        shared: Any = {"layer_ids": layers, "dtype": dtype, "total_heads": 2 if part == "target" else 1}
        specs += [
            ComponentSpec("key", part, dims=dims[0], **shared),
            ComponentSpec("value", part, dims=dims[1], **shared),
        ]
    return ModelLayout(specs, page_size=4, fingerprint="group")


def state_layouts() -> dict[str, ModelLayout]:
    """Conv and recurrent states of unlike dtypes, of target and draft."""

    def one(dims: int, dtype: str) -> ModelLayout:
        shared: Any = {"dtype": dtype, "total_heads": 2, "dims": dims, "item_kind": "request_row"}
        target = ComponentSpec("state", layer_ids=(20, 21), **shared)
        draft = ComponentSpec("state", "draft", layer_ids=(22,), **shared)
        return ModelLayout([target, draft], page_size=4, fingerprint="group")

    return {"conv": one(3, "bfloat16"), "recurrent": one(4, "float32")}


def window_pool(pages: int, device: str) -> MhaPool:
    """The layers that attend to a window, of other widths than the rest."""
    layout = group_layout({"target": (10, 11)}, dims=(4, 2), dtype="float32")
    return MhaPool(layout, size=4 * pages, device=device)


class PageByPage:
    """In place of a generator: companions get pages for the whole prompt, which is computed page by page, with a
    snapshot after each."""

    def integers(self, *bounds: int) -> int:
        return bounds[0] if len(bounds) == 2 else bounds[0] - 1


class GroupBench(CacheBench):
    """A cache with companions.

    Args:
        kinds: Which: `window`, `draft`, `states`.
        own: Pages of each companion; fewer than the cache has, so that they leave earlier.
        own_host: Host pages of each.
        seed: Chooses reaches and places of snapshots.
        adopted: Whether the cache's own pool is memory of an engine, a tensor a layer.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        *,
        device: str = "cpu",
        pages: int = 8,
        host_pages: int = 16,
        own: int | None = None,
        own_host: int | None = None,
        layout: ModelLayout | None = None,
        seed: int = 0,
        adopted: bool = False,
        **options: Any,
    ) -> None:
        self.kinds = tuple(kinds)
        self.random = np.random.default_rng(seed)
        self.own = (pages if own is None else own, host_pages if own_host is None else own_host)
        self.seen: dict[str, set[int]] = {}
        self.window = 0
        layout = layout if layout is not None else group_layout({"target": (0, 1)})
        pool: Any = None
        if adopted:
            inner = MhaPool(layout, size=4 * pages, device=device)
            pool = adopt({name: [layer.clone() for layer in inner.layers(*name)] for name in inner.components}, layout)
        elif "window" in kinds:
            self.hybrid = HybridPool(MhaPool(layout, size=4 * pages, device=device), window_pool(self.own[0], device))
            pool = self.hybrid.full
        super().__init__(layout, device=device, pages=pages, host_pages=host_pages, pool=pool, **options)

    def attach(self, storage: StorageTier | None) -> None:
        """Make the cache over empty pools, its companions with it."""
        if "window" in self.kinds and hasattr(self, "hybrid"):
            self.allocator = self.hybrid.pages.full
        companions = [getattr(self, f"_{kind}")() for kind in self.kinds]
        parts = (self.pool, self.allocator, self.host, self.index)
        self.cache = HiCacheController(*parts, storage=storage, companions=companions, **self.options)
        mirrors = [mirror for one in self.cache.companions for host in one.hosts for mirror in host.mirrors]
        self.layers = sorted({layer for mirror in (*self.host.mirrors, *mirrors) for layer in mirror.layer_ids})

    def _host(self, pool: Any) -> HostPool:
        return HostPool(pool, pages=self.own[1], layout=self.host.layout)

    def _window(self) -> Companion:
        if hasattr(self, "hybrid"):
            return Companion.last_pages("window", self.hybrid.pages, self._host(self.hybrid.window), window=WINDOW)
        pool = window_pool(self.own[0], str(self.pool.device))
        pages = PageMap(self.allocator, PageAllocator(pool.num_pages, 4))
        return Companion.last_pages("window", pages, self._host(pool), window=WINDOW)

    def _draft(self) -> Companion:
        layout = group_layout({"target": (0, 1), "draft": (30,)}, dims=(5, 3), dtype="bfloat16")
        pool = MhaPool(layout, size=4 * self.own[0], device=self.pool.device, layer_ids={"target": [], "draft": [30]})
        pages = PageMap(self.allocator, PageAllocator(pool.num_pages, 4))
        return Companion.every_page("draft", pages, self._host(pool))

    def _states(self) -> Companion:
        self.states = StatePool(state_layouts(), requests=self.own[0], device=self.pool.device)
        pages = PageMap(self.allocator, PageAllocator(self.states.rows, 1))
        hosts = [self._host(self.states.kind(kind)) for kind in self.states.kinds]
        return Companion.snapshots("states", pages, self.states, hosts)

    def companion_mirrors(self, layer: int) -> list[tuple[Companion, str, Mirror, int]]:
        """Companion, kind of state, mirror and position of everything that companions hold of a layer."""
        return [
            (companion, str(number), mirror, mirror.layer_ids.index(layer))
            for companion in self.cache.companions
            for number, host in enumerate(companion.hosts)
            for mirror in host.mirrors
            if layer in mirror.layer_ids
        ]

    def state(self, kind: str, mirror: Mirror, layer: int, namespace: Namespace, text: Sequence[int]) -> torch.Tensor:
        """What a row holds after a text. Shape: [1, heads, dims]."""
        first = mirror.layers[0]
        if not text:
            return torch.zeros(first.shape[1:], dtype=first.dtype)
        known = f"state {kind} {mirror.part} {layer} {namespace} {list(text)}"
        return labels(first.shape[1:], first.dtype, zlib.crc32(known.encode()) % 9973)

    def compute(self, acquired: Acquired, text: Sequence[int], layer: int, start: int, pages: int) -> None:
        """Write a layer of pages, wherever it lies; states are written by `run`."""
        super().compute(acquired, text, layer, start, pages)
        for companion, _, mirror, position in self.companion_mirrors(layer):
            if companion.coverage == "snapshots":
                continue
            own = acquired.companion_pages(companion.name)
            for page in range(start, pages):
                if own[page]:
                    content = self.expected(mirror, layer, text, acquired.namespace, page)
                    mirror.layers[position][int(own[page])].copy_(content)

    def check_hits(self, acquired: Acquired, layer: int) -> None:
        """What the hit needs of each companion is there."""
        super().check_hits(acquired, layer)
        text, hit = acquired.tokens.tolist(), acquired.hit_tokens // self.size
        for companion, kind, mirror, position in self.companion_mirrors(layer):
            if companion.coverage == "snapshots":
                read = mirror.layers[position][acquired.row(companion.name)]
                wanted = self.state(kind, mirror, layer, acquired.namespace, text[: acquired.hit_tokens])
                assert torch.equal(bits(read), bits(wanted)), f"{companion} {kind} {mirror.part} {layer}, {hit} pages"
                continue
            own = acquired.companion_pages(companion.name)
            for page in range(0 if companion.trailing is None else max(0, hit - companion.trailing), hit):
                assert own[page], f"{companion}, page {page} of {hit}"
                read = mirror.layers[position][int(own[page])]
                wanted = self.expected(mirror, layer, text, acquired.namespace, page)
                assert torch.equal(bits(read), bits(wanted)), f"{companion} {mirror.part} {layer}, page {page}"

    def acquire(self, tokens: Sequence[int], namespace: Namespace = None) -> Acquired:
        """Begin a prompt; companions get pages for all of it, or for a part."""
        reach = None if self.random.integers(2) else int(self.random.integers(len(tokens) + 1))
        return self.cache.acquire(list(tokens), namespace, reach=reach)

    def run(self, acquired: Acquired, text: Sequence[int] | None = None) -> list[int]:
        """Load, check, and compute the rest in chunks, saving states on the way."""
        done = acquired.tokens.tolist() if text is None else list(text)
        if acquired.state == "acquired":
            self.cache.load(acquired)
        for layer in self.layers:
            acquired.wait_layer(layer)
            self.check_hits(acquired, layer)
        first, total = acquired.hit_tokens // self.size, -(-len(done) // self.size)
        while first < total:
            last = min(total, first + int(self.random.integers(1, 4)))
            try:
                self.cache.advance(acquired, first * self.size, reach=last * self.size)
            except OutOfPages:
                assert self.cache.companions
            for layer in self.layers:
                self.compute(acquired, done, layer, first, last)
            self.save_states(acquired, done[: last * self.size])
            first = last
        return done

    def save_states(self, acquired: Acquired, text: Sequence[int]) -> None:
        """Bring the running rows to the end of a text, and save them if a page ends there."""
        if "states" in self.kinds:
            self.write_states(acquired, text)
            if len(text) % self.size == 0 and self.random.integers(4):
                self.cache.snapshot(acquired, len(text))

    def write_states(self, acquired: Acquired, text: Sequence[int]) -> None:
        """Write the running rows of all states, as a model does on its way to the end of a text."""
        for layer in self.layers:
            for companion, kind, mirror, position in self.companion_mirrors(layer):
                if companion.coverage == "snapshots":
                    content = self.state(kind, mirror, layer, acquired.namespace, text)
                    mirror.layers[position][acquired.row(companion.name)].copy_(content)

    def check_books(self) -> None:
        """The books of each pool, and poison in its free pages."""
        super().check_books()
        for member in self.cache._group:
            name, own = member.companion.name, member.device.own
            books = self.cache.accounting(name)
            assert (books.available, books.total) == (own.available, own.total)
            PageMap.verify(member.device)  # requests hold further pages
            member.host.verify()
            every = np.arange(1, own.num_pages)
            held = set(every[own.holders(every) > 0].tolist())
            seen = self.seen.setdefault(name, set())
            seen |= held
            free = sorted(seen - held)
            mirrors = [mirror for host in member.companion.hosts for mirror in host.mirrors]
            for layer in (layer for mirror in mirrors for layer in mirror.layers):
                if self.options["poison"]:
                    assert bool(layer[free].cpu().float().isnan().all())
            if not self.cache.pending:
                assert member.host.own.held == member.host.named().size + self._held_host(name)

    def _held_host(self, name: str) -> int:
        """Host pages of which running requests are holders, and that no page names any more."""
        shares = [share for handle in self.cache._open.values() for share in handle._shares]
        held = {
            page
            for share in shares
            if share.member.companion.name == name
            for page in share.host[share.host > 0].tolist()
        }
        named = self.cache._group.member(name).host
        return len(held - set(named.find(named.named()).tolist()))
