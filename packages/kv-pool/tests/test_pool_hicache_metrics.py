"""Owns the proof that Prometheus is told what the cache counts, and that its library is optional."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kv_pool import CacheError, HostPoolError, LibraryUnavailable
from kv_pool.hicache import CacheMetrics, FileStorage, StorageTier
from prometheus_client import CollectorRegistry, generate_latest

sys.path.insert(0, str(Path(__file__).parent))

from pool_group_store import over
from test_pool_storage_companions import ALL


def test_figures_are_those_of_the_last_look(
    make_cache: Callable[..., Any], text: Callable[[int, int], list[int]], tmp_path: Path
) -> None:
    bench = make_cache()
    store = FileStorage(tmp_path / "pages", capacity_bytes=10**8)
    tier = StorageTier(bench.host, bench.index, store, threshold=4)
    bench.attach(tier)
    registry = CollectorRegistry()
    metrics = CacheMetrics(bench.cache, tier, registry=registry, labels={"rank": "3"})

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"rank": "3", **labels})

    assert value("kv_pool_finished_total") == 0 and value("kv_pool_device_pages", state="available") == 8
    bench.serve(text(1, 26))
    bench.cache.drain()
    assert value("kv_pool_finished_total") == 0
    metrics.observe()
    assert value("kv_pool_finished_total") == 1 and value("kv_pool_prompt_tokens_total") == 26
    assert value("kv_pool_storage_written_pages_total") == value("kv_pool_backed_up_pages_total") == 6
    assert value("kv_pool_host_pages", state="held") == 6 and value("kv_pool_host_pages", state="available") == 10
    states = ("available", "evictable", "protected", "in_use")
    pages = [value("kv_pool_device_pages", state=state) for state in states]
    assert pages == [2, 6, 0, 0] and value("kv_pool_device_pages", state="total") == 8
    assert value("kv_pool_pages_under_way", state="queued_writes") == 0
    shown = generate_latest(registry).decode()
    assert '# TYPE kv_pool_finished_total counter\nkv_pool_finished_total{rank="3"} 1.0' in shown
    without = CollectorRegistry()
    CacheMetrics(bench.cache, registry=without)
    assert without.get_sample_value("kv_pool_finished_total") == 1
    assert without.get_sample_value("kv_pool_storage_written_pages_total") is None


def test_each_companion_has_its_figures(text: Callable[[int, int], list[int]], tmp_path: Path) -> None:
    """A window of two pages, a draft apart and states, over three levels; every figure beside what is known of it."""
    bench = over(FileStorage(tmp_path / "pages", capacity_bytes=10**8), ALL)
    registry = CollectorRegistry()
    metrics = CacheMetrics(bench.cache, registry=registry, labels={"rank": "3"})

    def value(name: str, companion: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kv_pool_companion_{name}", {"rank": "3", "companion": companion, **labels})

    bench.serve(text(1, 17))
    bench.serve(text(1, 17))
    bench.cache.drain()
    bench.cache.evict(8)
    bench.serve(text(1, 17))
    bench.cache.drain()
    assert value("loaded_pages_total", "draft") == 0
    metrics.observe()
    read = {"window": 2, "draft": 4, "states": 1}  # pages that a hit of four needs
    for name, pages in read.items():
        assert value("device_hit_pages_total", name) == value("host_hit_pages_total", name) == pages
        assert value("loaded_pages_total", name) == pages and value("cancelled_load_pages_total", name) == 0
        assert value("backed_up_pages_total", name) == value("storage_written_pages_total", name) == 4
        assert value("host_pages", name, state="held") == 4 and value("host_pages", name, state="available") == 12
        states = ("available", "evictable", "protected", "in_use")
        device = [value("device_pages", name, state=state) or 0 for state in states]
        assert sum(device) == value("device_pages", name, state="total") == 8
        assert device[1] == {"window": 2, "draft": 4, "states": 0}[name], "a row of states went with its request"
        assert value("pages_under_way", name, state="writes") == 0
    shown = generate_latest(registry).decode()
    assert shown.count("# TYPE kv_pool_companion_device_pages gauge") == 1
    assert sum(line.startswith("kv_pool_companion_loaded_pages_total") for line in shown.splitlines()) == 3
    acquired = bench.cache.acquire(text(2, 17))
    metrics.observe()
    assert value("device_pages", "window", state="in_use") == 5 and value("device_pages", "states", state="in_use") == 1
    bench.cache.abort(acquired)
    storage: Any = bench.cache.companion_storage
    calls = (bench.cache.companion_counters, bench.cache.companion_under_way, storage.counters_of, storage.under_way)
    for call in calls:
        with pytest.raises(CacheError, match="other"):
            call("other")


def test_the_library_is_optional(make_cache: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys, kv_pool.hicache; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    bench = make_cache()
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(LibraryUnavailable, match=r"kv-pool\[metrics\]"):
        CacheMetrics(bench.cache)


@pytest.mark.parametrize("label", ["a b", "", "__name", "companion", "state", "\u00e9", "1"])
def test_labels_that_no_scrape_could_tell_are_refused(make_cache: Callable[..., Any], label: str) -> None:
    registry = CollectorRegistry()
    with pytest.raises(HostPoolError, match="labels"):
        CacheMetrics(make_cache().cache, registry=registry, labels={label: "x"})
    assert generate_latest(registry) == b""


def test_a_second_cache_in_a_registry_that_tells_names_apart_is_refused(make_cache: Callable[..., Any]) -> None:
    registry, cache = CollectorRegistry(auto_describe=True), make_cache().cache
    CacheMetrics(cache, registry=registry)
    with pytest.raises(HostPoolError, match="registry"):
        CacheMetrics(cache, registry=registry)
