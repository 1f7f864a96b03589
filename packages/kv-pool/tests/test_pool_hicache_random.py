"""Owns the proof that no interleaving of requests, evictions and acknowledgements breaks bytes or books (on a CPU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kv_pool import OutOfPages
from kv_pool.hicache import ImmediateStreams, Lane, Mark


class LateMark:
    """Reached when it was asked for often enough, or waited for."""

    def __init__(self, asks: int) -> None:
        self.asks = asks

    def reached(self) -> bool:
        self.asks -= 1
        return self.asks < 0

    def wait_on_host(self) -> None:
        self.asks = 0


class LateStreams(ImmediateStreams):
    """Lanes whose copies are acknowledged late, as a device's are."""

    def mark(self, lane: Lane) -> Mark:
        return LateMark(3)


@pytest.fixture
def make_cache(make_cache: Callable[..., Any], request: pytest.FixtureRequest) -> Callable[..., Any]:
    """The caches of this file, with the streams that a test asks for."""

    def make(*args: Any, **options: Any) -> Any:
        return make_cache(*args, streams=request.param(), **options)

    return make


@pytest.mark.parametrize("make_cache", [ImmediateStreams, LateStreams], indirect=True)
def test_any_interleaving(run_machine: Callable[..., None]) -> None:
    run_machine("cpu", examples=50, steps=40)


@pytest.mark.parametrize("make_cache", [LateStreams], indirect=True)
def test_pages_under_way_are_waited_for_before_a_request_is_refused(
    make_cache: Callable[..., Any], text: Callable[[int, int], list[int]]
) -> None:
    bench = make_cache(pages=4)
    bench.serve(text(1, 13))
    assert bench.cache.accounting().protected == 3
    assert bench.serve(text(2, 16)) == (0, 0)
    bench.cache.drain()
    assert bench.cache.counters.backed_up_pages == 3 + 4
    running = bench.cache.acquire(text(1, 13))
    with pytest.raises(OutOfPages):
        bench.cache.acquire(text(3, 4))
    bench.cache.abort(running)
    bench.cache.drain()
    bench.check_books()
