"""Owns the proof that no interleaving of requests, evictions and acknowledgements breaks bytes or books (on a CPU)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kv_planner import ComponentSpec, ModelLayout
from kv_pool import OutOfPages
from kv_pool.hicache import FileStorage, ImmediateStreams, Lane, Mark, StorageTier


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


def sparse_layout() -> ModelLayout:
    """Latent and rope on all layers, index keys and scales on one of them and on the draft."""
    shapes: Any = {
        "latent": ("bfloat16", 8), "rope": ("bfloat16", 4),
        "index_key": ("float8_e4m3fn", 3), "index_scale": ("float32", 1),
    }  # fmt: skip
    owners: Any = {"target": [0, 1, 2], "draft": [5]}
    specs = [
        ComponentSpec(name, part, layer_ids=ids[-1:] if "index" in name else ids, dtype=dtype, total_heads=1, dims=dims)
        for part, ids in owners.items()
        for name, (dtype, dims) in shapes.items()
    ]
    return ModelLayout(specs, page_size=4, fingerprint="sparse")


@pytest.fixture
def make_cache(
    make_cache: Callable[..., Any], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """The caches of this file, with the streams, pools and third level that a test asks for."""
    streams, chosen = request.param[0], request.param[1:]
    folders = [tmp_path_factory.mktemp("pages")]

    def make(*args: Any, restarted: bool = False, **options: Any) -> Any:
        layout = sparse_layout() if "sparse" in chosen else None
        bench = make_cache(*args, streams=streams(), layout=layout, **options)
        if "store" in chosen:
            if not restarted:  # each example begins with an empty store
                folders.append(tmp_path_factory.mktemp("pages"))
            store = FileStorage(folders[-1], capacity_bytes=10**8)
            bench.attach(StorageTier(bench.host, bench.index, store, threshold=4, batch=2, threads=0))
        return bench

    return make


KINDS = [
    (ImmediateStreams,),
    (LateStreams,),
    (LateStreams, "sparse"),
    (LateStreams, "store"),
    (LateStreams, "sparse", "store"),
]


@pytest.mark.parametrize(
    "make_cache", KINDS, indirect=True, ids=lambda kind: "-".join(map(str, kind[1:])) or kind[0].__name__
)
def test_any_interleaving(run_machine: Callable[..., None]) -> None:
    run_machine("cpu", examples=25, steps=40)


@pytest.mark.parametrize("make_cache", [(LateStreams,)], indirect=True)
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
