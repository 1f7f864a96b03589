"""Owns the proof that Prometheus is told what the cache counts, and that its library is optional."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kv_pool import LibraryUnavailable
from kv_pool.hicache import CacheMetrics, FileStorage, StorageTier
from prometheus_client import CollectorRegistry, generate_latest


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


def test_the_library_is_optional(make_cache: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys, kv_pool.hicache; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    bench = make_cache()
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(LibraryUnavailable, match=r"kv-pool\[metrics\]"):
        CacheMetrics(bench.cache)
