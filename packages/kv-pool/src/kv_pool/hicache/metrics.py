"""Owns what a cache shows to Prometheus: its counters, who holds its pages, and what its third level does.

The owner of the cache calls `observe`, say once a step; a scrape, on whatever thread, is answered with what was seen
last, so that it never looks into a cache at work. Needs the extra `metrics` (prometheus-client).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kv_pool.errors import LibraryUnavailable

if TYPE_CHECKING:
    from kv_pool.hicache.controller import HiCacheController
    from kv_pool.hicache.storage import StorageTier

__all__ = ["CacheMetrics"]


class CacheMetrics:
    """A collector over one cache.

    Counters are named `kv_pool_<what>_total` after the fields of `CacheCounters` and `kv_pool_storage_<what>_total`
    after those of `StorageCounters`; the gauge `kv_pool_device_pages` has a label `state` with the fields of
    `Accounting`, `kv_pool_host_pages` one with `available` and `held`, `kv_pool_pages_under_way` one with the fields of
    `UnderWay`.

    Args:
        cache: The cache.
        storage: Its third level.
        registry: Where to register (`CollectorRegistry.register`); `None` is the registry of the process.
        labels: Names and values on every metric: rank, model.

    Raises:
        LibraryUnavailable: prometheus-client is not installed.
    """

    def __init__(
        self,
        cache: HiCacheController,
        storage: StorageTier | None = None,
        *,
        registry: Any = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        try:
            library = importlib.import_module("prometheus_client")
            self._families = importlib.import_module("prometheus_client.core")
        except ImportError as error:
            raise LibraryUnavailable(
                "prometheus_client",
                given=str(error),
                expected="the library prometheus-client",
                consequence="nobody could ask for the figures",
                remedy='pip install "kv-pool[metrics]"',
            ) from error
        self._cache = cache
        self._storage = storage
        self._labels = dict(labels or {})
        self._seen: tuple[dict[str, int], dict[str, dict[str, int]]] = ({}, {})
        self.observe()
        (library.REGISTRY if registry is None else registry).register(self)

    def observe(self) -> None:
        """See how the cache stands now; called by its owner.

        Raises:
            IntegrityError: The cache's books do not add up.
        """
        counters = {f"kv_pool_{name}": value for name, value in asdict(self._cache.counters).items()}
        if self._storage is not None:
            told = asdict(self._storage.counters)
            counters |= {f"kv_pool_storage_{name}": value for name, value in told.items()}
        host = self._cache.host.allocator
        gauges = {
            "kv_pool_device_pages": asdict(self._cache.accounting()),
            "kv_pool_host_pages": {"available": host.available, "held": host.held},
            "kv_pool_pages_under_way": asdict(self._cache.under_way),
        }
        self._seen = (counters, gauges)  # one assignment: a scrape sees the old or the new figures

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of the last `observe`, as prometheus-client asks for them."""
        counters, gauges = self._seen
        names, values = list(self._labels), list(self._labels.values())
        for name, value in counters.items():
            counter = self._families.CounterMetricFamily(name, _words(name), labels=names)
            counter.add_metric(values, value)
            yield counter
        for name, states in gauges.items():
            gauge = self._families.GaugeMetricFamily(name, _words(name), labels=[*names, "state"])
            for state, value in states.items():
                gauge.add_metric([*values, state], value)
            yield gauge


def _words(name: str) -> str:
    return name.replace("_", " ")
