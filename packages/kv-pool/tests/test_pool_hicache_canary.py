"""Owns the proof that a changed token of a host page, or of a stored one, is named and never loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kv_pool import CanaryMismatch, HostPoolError, MhaPool
from kv_pool.hicache import HOST_LAYOUTS, Canary, FileStorage, HostLayout, HostPool, StorageTier

Text = Callable[[int, int], list[int]]


@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("widths", [(8, 6), (5, 3), (1, 1)])
def test_every_changed_byte_is_seen_in_its_token(
    make_layout: Callable[..., Any], layout: HostLayout, widths: tuple[int, int]
) -> None:
    made = make_layout(layers=(0, 1), heads=1, dims=widths[0], value_dims=widths[1], dtype="int8", draft=(2,))
    host = HostPool(MhaPool(made, size=8, device="cpu"), pages=2, layout=layout)
    canary = Canary(host)
    random = np.random.default_rng(1)
    for mirror in host.mirrors:
        raw = mirror.storage.view(torch.uint8)
        raw.copy_(torch.from_numpy(random.integers(0, 256, raw.shape, dtype=np.uint8)))
    canary.record([1, 2])
    canary.check([2, 1])
    checked = 0
    for mirror in host.mirrors:
        for layer in range(len(mirror.layer_ids)):
            for token in range(4):
                held = mirror.host[2, layer, token].reshape(-1)
                assert held.data_ptr() == mirror.host[2, layer, token].data_ptr()
                held = held.view(torch.uint8)
                for byte in range(held.numel()):
                    was = int(held[byte])
                    held[byte] = was ^ (1 << int(random.integers(8)))
                    with pytest.raises(CanaryMismatch, match="page 2") as caught:
                        canary.check([1, 2])
                    assert (caught.value.position, caught.value.tokens) == (1, (token,))
                    held[byte] = was
                    checked += 1
    canary.check([1, 2])
    assert checked == sum(mirror.host[2].view(torch.uint8).numel() for mirror in host.mirrors)


def test_exchanged_tokens_and_pages_without_a_checksum_are_seen(make_layout: Callable[..., Any]) -> None:
    host = HostPool(MhaPool(make_layout(), size=8, device="cpu"), pages=2)
    canary = Canary(host)
    for mirror in host.mirrors:
        mirror.host.copy_(torch.arange(mirror.host.numel()).remainder(997).view(mirror.host.shape))
    with pytest.raises(CanaryMismatch) as caught:
        canary.check([1])
    assert caught.value.tokens == (0, 1, 2, 3)
    canary.record([1])
    page = host.mirrors[0].host[1]
    page.copy_(page[:, [0, 2, 1, 3]].clone())
    with pytest.raises(CanaryMismatch) as caught:
        canary.check([1])
    assert caught.value.tokens == (1, 2)


def with_canary(bench: Any, **options: Any) -> Any:
    bench.options["canary"] = Canary(bench.host)
    bench.attach(None)
    return bench


def test_a_changed_host_page_is_refused_and_computed_again(make_cache: Callable[..., Any], text: Text) -> None:
    bench = with_canary(make_cache())
    bench.serve(text(1, 26))
    bench.cache.drain()
    bench.cache.evict(8)
    assert bench.serve(text(1, 26)) == (0, 24)  # every page is as it was backed up
    bench.cache.drain()
    bench.cache.evict(8)
    acquired = bench.cache.acquire(text(1, 26))
    bench.host.mirrors[1].host[int(acquired._host_pages[3]), 0, 2, 0, 0] += 1
    with pytest.raises(CanaryMismatch) as caught:
        bench.cache.load(acquired)
    assert (caught.value.position, caught.value.tokens, acquired.state) == (3, (2,), "acquired")
    bench.check_books()
    assert bench.cache.counters.refused_host_pages == 3  # it and two behind it
    found = bench.index.match(text(1, 26))
    assert (found.tokens, found.host_tokens) == (12, 12), "nobody finds it any more"
    with pytest.raises(CanaryMismatch):
        bench.cache.load(acquired)  # the handle knows it still
    assert bench.cache.counters.refused_host_pages == 3
    bench.cache.limit(acquired, acquired.device_hit_tokens + 4 * caught.value.position)
    bench.cache.finish(acquired, bench.run(acquired))  # checks the bytes of the hit that is left
    assert acquired.host_hit_tokens == 12
    bench.cache.drain()
    bench.check_books()
    assert bench.host.allocator.held == bench.index.counts().host.held == 6 + 3  # three wait for the next eviction
    assert bench.index.counts().locks == 0
    assert bench.serve(text(1, 26))[0] == 24  # and what was computed is found on the device
    bench.cache.drain()
    bench.cache.evict(8)
    assert bench.serve(text(1, 26)) == (0, 24)  # and was backed up again
    assert bench.index.evict_host(3).pages.size == 3


def test_others_who_found_a_refused_page_are_refused_too(make_cache: Callable[..., Any], text: Text) -> None:
    """A request that branches off behind the page, one that ends before it, and one that is on the device."""
    bench = with_canary(make_cache(pages=40, host_pages=40))
    for tokens in (text(1, 26), [*text(1, 20), *text(2, 9)]):
        bench.serve(tokens)
    bench.cache.drain()
    bench.cache.evict(40)
    running = [bench.cache.acquire(tokens) for tokens in (text(1, 26), [*text(1, 20), *text(2, 9)], text(1, 9))]
    bench.host.mirrors[0].host[int(running[0]._host_pages[3]), 1, 0, 0, 0] += 1
    for acquired in running[:2]:
        with pytest.raises(CanaryMismatch) as caught:
            bench.cache.load(acquired)
        assert caught.value.position == 3
        bench.cache.limit(acquired, 12)
    for acquired, tokens in zip(running, (text(1, 26), [*text(1, 20), *text(2, 9)], text(1, 9)), strict=True):
        bench.cache.finish(acquired, bench.run(acquired, tokens))
        bench.check_books()
    bench.cache.drain()
    assert bench.cache.counters.refused_host_pages == 3 + 2 and bench.index.counts().locks == 0
    bench.cache.evict(40)
    assert bench.serve(text(1, 26)) == (0, 24)
    bench.cache.drain()
    held = bench.index.counts().host
    assert (held.held, held.protected) == (bench.host.allocator.held, 0)


def test_checksums_travel_with_the_pages(make_cache: Callable[..., Any], text: Text, tmp_path: Path) -> None:
    """A store that says it read a page, and filled it with something else, is found out at the load."""

    class Careless(FileStorage):
        """Like Mooncake Store it does not look at the bytes."""

        def read(self, keys: Any, pages: Any) -> int:
            count = super().read(keys, pages)
            if spoil and count > 2:
                pages[2][0][5] ^= 64
            return count

    spoil: list[int] = []

    def make() -> Any:
        bench = make_cache()
        bench.options["canary"] = canary = Canary(bench.host)
        store = Careless(tmp_path / "pages", capacity_bytes=10**8)
        bench.tier = StorageTier(bench.host, bench.index, store, threshold=4, threads=0, canary=canary)
        bench.attach(bench.tier)
        return bench

    bench = make()
    bench.serve(text(1, 26))
    bench.cache.drain()
    for _ in range(2):
        again = make()
        again.cache.prefetch(text(1, 26))
        again.cache.drain()
        acquired = again.cache.acquire(text(1, 26))
        assert acquired.host_hit_tokens == 24
        if spoil:
            with pytest.raises(CanaryMismatch) as caught:
                again.cache.load(acquired)
            assert caught.value.position == 2 and len(caught.value.tokens) == 1
            again.cache.abort(acquired)
            again.cache.drain()
            assert again.tier.counters.damaged_pages == 1
            assert again.cache.prefetch(text(1, 26)).state == "reading"
            again.cache.drain()
            assert again.tier.counters.read_pages == 6  # the store has lost it, so the others behind it are not read
        else:
            again.cache.finish(acquired, again.run(acquired))
        again.check_books()
        spoil.append(1)


def test_parts_must_share_one_canary(make_cache: Callable[..., Any], tmp_path: Path) -> None:
    bench, other = make_cache(), make_cache()
    store = FileStorage(tmp_path / "pages", capacity_bytes=10**8)
    tier = StorageTier(bench.host, bench.index, store, canary=Canary(bench.host))
    with pytest.raises(HostPoolError, match=r"storage\.canary"):
        bench.attach(tier)
    bench.options["canary"] = Canary(other.host)
    with pytest.raises(HostPoolError, match=r"canary\.host"):
        bench.attach(None)


def test_keys_and_values_that_change_places_are_seen(
    make_layout: Callable[..., Any], make_labels: Callable[..., torch.Tensor]
) -> None:
    pool = MhaPool(make_layout(value_dims=8), size=16, device="cpu")
    host = HostPool(pool, pages=2)
    for seed, mirror in enumerate(host.mirrors):
        mirror.host.copy_(make_labels(mirror.host.shape, mirror.host.dtype, seed))
    canary = Canary(host)
    canary.record([1])
    canary.check([1])
    key, value = (mirror.host[1] for mirror in host.mirrors)
    saved = key.clone()
    key.copy_(value)
    value.copy_(saved)
    with pytest.raises(CanaryMismatch):
        canary.check([1])
