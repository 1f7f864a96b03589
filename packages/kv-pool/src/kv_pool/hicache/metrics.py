"""Owns what a cache shows to Prometheus: its counters, who holds its pages, and what its third level does.

The owner of the cache calls `observe`, say once a step; a scrape, on whatever thread, is answered with what was seen
last, so that it never looks into a cache at work. Needs the extra `metrics` (prometheus-client).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

from kv_pool._arguments import check_call, check_kind, check_mapping, check_optional
from kv_pool.errors import HostPoolError, LibraryUnavailable
from kv_pool.hicache.controller import HiCacheController
from kv_pool.hicache.storage import StorageTier
from kv_pool.tables import shown

if TYPE_CHECKING:
    from kv_pool.hicache.host_pool import HostPool

__all__ = ["CacheMetrics"]

_NO_METHOD = object()
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)
_OWN_LABELS = ("companion", "state")


class CacheMetrics:
    """A collector over one cache.

    Counters are named `kv_pool_<what>_total` after the fields of `CacheCounters` and `kv_pool_storage_<what>_total`
    after those of `StorageCounters`; the gauge `kv_pool_device_pages` has a label `state` with the fields of
    `Accounting`, `kv_pool_host_pages` one with `available` and `held`, `kv_pool_pages_under_way` one with the fields of
    `UnderWay` (all pools together).

    Each companion has the same under its name, the label `companion`: `kv_pool_companion_<what>_total` after the fields
    of `CompanionCounters` (hits by level among them), `kv_pool_companion_storage_<what>_total`, and the gauges
    `kv_pool_companion_device_pages`, `kv_pool_companion_host_pages` and `kv_pool_companion_pages_under_way`.

    Args:
        cache: The cache.
        storage: Its third level.
        registry: Where to register (`CollectorRegistry.register`); `None` is the registry of the process.
        labels: Names and values on every metric: rank, model.

    Raises:
        LibraryUnavailable: prometheus-client is not installed.
        HostPoolError: An argument of another kind, a label that is none, or a registry that has another cache.
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
        self._cache = check_kind("cache", cache, HiCacheController, HostPoolError)
        self._storage = check_optional("storage", storage, StorageTier, HostPoolError)
        self._labels = {} if labels is None else dict(check_mapping("labels", labels, HostPoolError))
        for name, value in self._labels.items():
            if not isinstance(name, str) or not _LABEL.fullmatch(name) or name in _OWN_LABELS:
                raise _unfit("labels", shown(name), f"names of letters, digits and _ that are none of {_OWN_LABELS}")
            check_kind(f"labels[{name!r}]", value, str, HostPoolError)
        registry = library.REGISTRY if registry is None else registry
        check_call("registry.register", getattr(registry, "register", _NO_METHOD), HostPoolError)
        self._seen: dict[str, _Family] = {}
        self.observe()
        try:
            registry.register(self)
        except ValueError as error:  # figures of these names are there
            raise _unfit("registry", str(error), "a registry in which no other cache is") from None

    def observe(self) -> None:
        """See how the cache stands now; called by its owner.

        Raises:
            IntegrityError: The cache's books do not add up.
        """
        cache, seen = self._cache, _Seen()
        done = asdict(cache.counters)
        seen.counters("kv_pool", {name: value for name, value in done.items() if not name.startswith("companion_")})
        if self._storage is not None:
            seen.counters("kv_pool_storage", asdict(self._storage.counters))
        seen.gauge("kv_pool_device_pages", asdict(cache.accounting()))
        seen.gauge("kv_pool_host_pages", _host(cache.host))
        seen.gauge("kv_pool_pages_under_way", asdict(cache.under_way))
        for companion in cache.companions:
            name, prefix = companion.name, "kv_pool_companion"
            seen.counters(prefix, asdict(cache.companion_counters(name)), name)
            if cache.companion_storage is not None:
                seen.counters(f"{prefix}_storage", asdict(cache.companion_storage.counters_of(name)), name)
            seen.gauge(f"{prefix}_device_pages", asdict(cache.accounting(name)), name)
            seen.gauge(f"{prefix}_host_pages", _host(companion.host), name)
            seen.gauge(f"{prefix}_pages_under_way", asdict(cache.companion_under_way(name)), name)
        self._seen = seen.families  # one assignment: a scrape sees the old or the new figures

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of the last `observe`, as prometheus-client asks for them."""
        names, values = list(self._labels), list(self._labels.values())
        for name, (kind, labels, figures) in self._seen.items():
            family = getattr(self._families, f"{kind}MetricFamily")(name, _words(name), labels=[*names, *labels])
            for told, value in figures:
                family.add_metric([*values, *told], value)
            yield family


_Family: TypeAlias = "tuple[str, list[str], list[tuple[list[str], int]]]"
"""Its kind, the names of its own labels, and their values with each figure."""


class _Seen:
    """Families of figures, by their names."""

    def __init__(self) -> None:
        self.families: dict[str, _Family] = {}

    def counters(self, prefix: str, figures: Mapping[str, int], *companion: str) -> None:
        """A counter for each figure."""
        labels = ["companion"] * len(companion)
        for name, value in figures.items():
            family = self.families.setdefault(f"{prefix}_{name}", ("Counter", labels, []))
            family[2].append(([*companion], value))

    def gauge(self, name: str, states: Mapping[str, int], *companion: str) -> None:
        """One gauge, with the names of the figures as states."""
        labels = [*["companion"] * len(companion), "state"]
        family = self.families.setdefault(name, ("Gauge", labels, []))
        family[2].extend(([*companion, state], value) for state, value in states.items())


def _unfit(argument: str, given: str, expected: str) -> HostPoolError:
    return HostPoolError(
        argument,
        given=given,
        expected=expected,
        consequence="a scrape would fail, or mix two caches",
        remedy="give each cache a registry of its own, or one process one cache",
    )


def _host(host: HostPool) -> dict[str, int]:
    return {"available": host.allocator.available, "held": host.allocator.held}


def _words(name: str) -> str:
    return name.replace("_", " ")
