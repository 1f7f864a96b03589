"""Bench of a cache hit: time to the first token of a prompt whose first 1,000 tokens lie on the host or in a store.

The reference computes the whole prompt, on the same cores, with the plain forward that judges the demo; what it
computes fills the cache. After a hit one token is computed, layer by layer as the pages arrive. The model is
SmolLM2-135M, whose first token must be the same on all ways. What Mooncake Store has is fetched by another client than
the one that lends the memory, over TCP; it listens on all interfaces, so the bench goes on in a namespace with loopback
only.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benching import Bench
from disaggregated_serving.reference import hidden_states
from disaggregated_serving.weights import Weights, load_smollm2
from kv_planner import ComponentSpec, ModelLayout, PrefixIndex
from kv_pool import MhaPool, PageAllocator, slots_for
from kv_pool.hicache import Acquired, FileStorage, HiCacheController, HostPool, PageStorage, StorageTier
from kv_pool.hicache.storage.engines.mooncake import MooncakeStorage
from kv_transfer.isolation import current_isolation
from local_mooncake import mooncake_master
from torch.nn import functional

HIT, PAGE = 1000, 8
ROUNDS = 3


class Server:
    """A model, a pool, and a cache over it of three levels."""

    def __init__(self, weights: Weights, store: PageStorage) -> None:
        shape = weights.shape
        self.weights, self.shape = weights, shape
        self.dim = shape.key_dim
        layers = range(len(weights.layers))
        shared: Any = {"layer_ids": layers, "dtype": "float16", "total_heads": shape.kv_heads, "dims": self.dim}
        layout = ModelLayout([ComponentSpec("key", **shared), ComponentSpec("value", **shared)], page_size=PAGE,
                             fingerprint="smollm2")  # fmt: skip
        self.pool = MhaPool(layout, size=2 * HIT, device="cpu")
        self.host = HostPool(self.pool, pages=2 * HIT // PAGE)
        index = PrefixIndex(PAGE, device_pages=self.pool.num_pages, host_pages=self.host.num_pages)
        tier = StorageTier(self.host, index, store)
        allocator = PageAllocator(self.pool.num_pages, PAGE)
        self.cache = HiCacheController(self.pool, allocator, self.host, index, storage=tier)

    def first_token(self, prompt: np.ndarray[Any, Any], *, fetch: bool) -> tuple[int, int]:
        """Serve a prompt up to its first token; returns it, and the tokens that were found."""
        if fetch:
            self.cache.prefetch(prompt)
            self.cache.drain()
        acquired = self.cache.acquire(prompt)
        self.cache.load(acquired)
        hidden = self.continued(acquired) if acquired.hit_tokens else self.whole(acquired)
        assert self.weights.head is not None
        token = int((self.weights.head @ hidden).argmax())
        self.cache.finish(acquired, prompt)
        return token, acquired.hit_tokens

    def fill(self, other: Server, prompt: np.ndarray[Any, Any]) -> None:
        """Keep what another server has of a prompt on its device, in this one's store."""
        theirs, mine = other.cache.acquire(prompt), self.cache.acquire(prompt)
        assert theirs.device_hit_tokens == HIT and mine.hit_tokens == 0
        count = HIT // PAGE
        for number in range(len(self.weights.layers)):
            for ours, held in ((self.pool.key, other.pool.key), (self.pool.value, other.pool.value)):
                ours(number)[torch.from_numpy(mine.pages[:count].copy())] = held(number)[
                    torch.from_numpy(theirs.pages[:count].copy())
                ]
        self.cache.load(mine)
        self.cache.finish(mine, prompt[:HIT])
        other.cache.abort(theirs)
        self.cache.drain()

    def whole(self, acquired: Acquired) -> torch.Tensor:
        """Compute the prompt and keep its K and V. Shape: [hidden]."""
        slots = torch.from_numpy(slots_for(acquired.pages, 0, acquired.tokens.size, PAGE))

        def keep(layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
            rows = [part.transpose(0, 1).to(torch.float16).contiguous() for part in (key, value)]
            self.pool.write(layer, slots, rows[0], rows[1])

        return hidden_states(self.weights, acquired.tokens.tolist(), torch.float16, keep)[-1]

    def continued(self, acquired: Acquired) -> torch.Tensor:
        """Compute the last token of the prompt over the pages that were found. Shape: [hidden]."""
        weights, shape, place = self.weights, self.shape, acquired.tokens.size - 1
        assert weights.embedding is not None and weights.final_norm is not None and acquired.hit_tokens == place
        pages = torch.from_numpy(acquired.pages[: place // PAGE].copy())
        slot = torch.from_numpy(slots_for(acquired.pages, place, place + 1, PAGE))
        x = weights.embedding[int(acquired.tokens[-1])]
        angle = place * shape.rope_base ** (-torch.arange(0, self.dim, 2) / self.dim)
        turn = torch.polar(torch.ones_like(angle), angle)

        def rotated(row: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(row.view(-1, self.dim // 2, 2))
            return torch.view_as_real(pairs * turn).flatten(-2)

        for number, layer in enumerate(weights.layers):
            acquired.wait_layer(number)
            y = functional.rms_norm(x, x.shape, layer.attention_norm, shape.norm_eps)
            q, k = rotated(layer.query @ y).half().float(), rotated(layer.key @ y).half()
            v = (layer.value @ y).view(shape.kv_heads, -1).half()
            self.pool.write(number, slot, k[None], v[None])
            held = [cache[pages].flatten(0, 1) for cache in (self.pool.key(number), self.pool.value(number))]
            keys, values = (
                torch.cat([found, own[None]]).transpose(0, 1).float() for found, own in zip(held, (k, v), strict=True)
            )
            group = shape.query_heads // shape.kv_heads
            mixed = functional.scaled_dot_product_attention(
                q[:, None], keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            )
            x = x + layer.output @ mixed[:, 0].half().float().reshape(-1)
            y = functional.rms_norm(x, x.shape, layer.ffn_norm, shape.norm_eps)
            x = x + layer.down @ (functional.silu(layer.gate @ y) * (layer.up @ y))
        return functional.rms_norm(x, x.shape, weights.final_norm, shape.norm_eps)


def milliseconds(work: Callable[[], tuple[int, int]]) -> tuple[float, tuple[int, int]]:
    """How long a call takes, and what it returns."""
    began = time.perf_counter()
    result = work()
    return (time.perf_counter() - began) * 1e3, result


@torch.inference_mode()
def main() -> None:
    """Measure and report."""
    if not current_isolation().isolated and "--inside" not in sys.argv:
        isolated = [sys.executable, "-m", "kv_transfer.isolation", "--", sys.executable, __file__, "--inside"]
        os.execv(sys.executable, isolated)
    bench = Bench("pool_hits")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    weights = load_smollm2()
    names = ("on the host", "in files, in the page cache", "in Mooncake Store")
    ways: dict[str, list[float]] = {name: [] for name in names}
    computed = []

    def hit(what: str, server: Server, prompt: np.ndarray[Any, Any], token: int, *, fetch: bool) -> None:
        taken, again = milliseconds(lambda: server.first_token(prompt, fetch=fetch))
        assert again == (token, HIT), f"{what}: {again} for {(token, HIT)}"
        ways[what].append(taken)

    for turn in range(ROUNDS):
        prompt = np.random.default_rng(turn).integers(1000, 40_000, HIT + 1)
        folder = Path(tempfile.mkdtemp(prefix="kv-pool-hits-"))
        try:
            with mooncake_master() as master:
                lent = MooncakeStorage(master, segment_bytes=1 << 28)
                server = Server(weights, FileStorage(folder, capacity_bytes=10**10))
                taken, (token, found) = milliseconds(lambda: server.first_token(prompt, fetch=False))  # noqa: B023
                assert found == 0
                computed.append(taken)
                server.cache.drain()
                server.cache.evict(server.pool.num_pages - 1)
                hit("on the host", server, prompt, token, fetch=False)
                later = Server(weights, FileStorage(folder, capacity_bytes=10**10))
                hit("in files, in the page cache", later, prompt, token, fetch=True)
                Server(weights, lent).fill(later, prompt)
                fetching = MooncakeStorage(master, segment_bytes=0)
                hit("in Mooncake Store", Server(weights, fetching), prompt, token, fetch=True)
                fetching.close()
                lent.close()
        finally:
            shutil.rmtree(folder)
    for what, values in ways.items():
        bench.record(
            f"first token of {HIT + 1:,} tokens, {HIT:,} of them {what}, beside computing all",
            values, "ms", references=computed, kind="reference/value", op=">=", target=5,
        )  # fmt: skip
    bench.finish()


if __name__ == "__main__":
    main()
