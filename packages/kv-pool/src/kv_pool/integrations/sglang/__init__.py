"""Owns what SGLang 0.5.23 plugs in: a storage backend for its HiCache, and descriptions of its NPU pools.

`KvPoolStorage` is made when it is asked for, since its base is SGLang's. Importing this imports nothing of SGLang.
"""

from __future__ import annotations

from typing import Any

from kv_pool.integrations.sglang.groups import adopt_groups
from kv_pool.integrations.sglang.pools import adopt_pool
from kv_pool.integrations.sglang.storage import HostPages, storage_class

__all__ = ["HostPages", "adopt_groups", "adopt_pool", "storage_class"]


def __getattr__(name: str) -> Any:
    if name == "KvPoolStorage":
        return storage_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
