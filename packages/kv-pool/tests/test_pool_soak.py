"""Owns the slice of the long proof that every run of the tests does: each kind of cache, for a few steps."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pool_soak


def test_a_slice_of_the_soak() -> None:
    kinds = len(pool_soak.KINDS)
    total = pool_soak.soak(range(4711, 4711 + kinds), 40)
    assert total["steps"] == 40 * kinds and total["caches"] == kinds == 10 * 3 * 3
    rules = ("acquire", "serve", "evict", "acknowledge", "limit", "load", "finish", "abort", "prefetch", "restart")
    done = ("device_hits", "host_hits", "stored", "read", "evicted", "stopped", "given_up")
    companions = ("companion_hits", "companion_host_hits", "companion_stored", "companion_read", "uncovered")
    assert all(total[name] > 0 for name in (*rules, *done, *companions))


def test_a_hit_that_is_lowered_keeps_what_others_have_brought_meanwhile() -> None:
    """Seed 9153: a window's page came to the device with another request, which ended between `limit` and `load`."""
    assert pool_soak.soak(range(9153, 9154), 110)["limit"] > 0
