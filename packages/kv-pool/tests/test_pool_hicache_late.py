"""Owns the proof that a load which fails when somebody has built on it takes all of that along, from every level."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kv_pool.hicache import FileStorage, StorageTier

sys.path.insert(0, str(Path(__file__).parent))

from test_pool_hicache_copies import GatedStreams
from test_pool_hicache_mistakes import held_load

Text = Callable[[int, int], list[int]]


@pytest.mark.parametrize("backed_up", [False, True])
def test_what_was_built_on_a_load_that_fails_later_is_found_by_nobody(
    make_cache: Callable[..., Any], text: Text, tmp_path: Path, backed_up: bool
) -> None:
    """A request ends behind its load; its own pages, and their copies, hold what was computed from nothing."""
    streams = GatedStreams()
    bench = make_cache(pages=20, host_pages=40, streams=streams)
    store = FileStorage(tmp_path, capacity_bytes=10**8)
    bench.attach(StorageTier(bench.host, bench.index, store, threshold=4, threads=0))
    for name in (1, 2):
        bench.serve(text(name, 13))
    bench.cache.drain()
    bench.cache.evict(20)
    first, other = bench.cache.acquire(text(1, 21)), bench.cache.acquire(text(2, 13))
    assert first.host_hit_tokens == 12
    bench.cache.load(first)
    failing = streams.gates["load"][-1]
    bench.cache.load(other)
    bench.cache.finish(first, text(1, 21))
    reader = bench.cache.acquire(text(1, 25))
    assert reader.device_hit_tokens == 20
    if backed_up:
        streams.let_go("backup")
        bench.cache.poll()
        assert bench.index.match(text(1, 21)).host_tokens == 20 and len(list(tmp_path.glob("??/*"))) == 8
    failing.broken = True
    with pytest.raises(OSError, match="device"):
        bench.cache.drain()
    bench.check_books()
    with pytest.raises(OSError, match="device"):
        reader.wait_layer(2)
    bench.cache.abort(reader)
    bench.cache.drain()
    bench.check_books()
    assert bench.index.match(text(1, 25)).tokens == 12 and bench.index.match(text(2, 13)).device_tokens == 12
    assert len(list(tmp_path.glob("??/*"))) == 6
    bench.cache.finish(other, bench.run(other))
    assert bench.serve(text(1, 21)) == (0, 12) and bench.serve(text(1, 21)) == (20, 0)


@pytest.mark.parametrize("kind", ["draft", "window", "states"])
def test_what_was_built_on_a_companions_load_that_fails_later_is_found_by_nobody(text: Text, kind: str) -> None:
    """The cache's own pages of the hit are sound; those behind it were computed with what never came."""
    bench, streams, acquired = held_load(text, kind, 34)
    assert acquired.hit_tokens == 24
    bench.cache.finish(acquired, bench.run(acquired))
    assert bench.index.match(text(1, 34)).device_tokens == 32
    streams.go = streams.broken = True
    with pytest.raises(RuntimeError, match="device has failed"):
        bench.cache.poll()
    streams.broken = False
    found = bench.index.match(text(1, 34))
    assert (found.device_tokens, found.tokens) == (24, 24)
    bench.cache.drain()
    bench.check_books()
    assert sum(bench.serve(text(1, 34))) == 24
    bench.cache.drain()
    bench.check_books()
