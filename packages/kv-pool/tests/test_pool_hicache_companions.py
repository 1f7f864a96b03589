"""Owns the proof of a cache over several pools (on a CPU): the deepest hit that all can serve, every byte right."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_pool.hicache._group import covered

sys.path.insert(0, str(Path(__file__).parent))

from pool_group import GroupBench, PageByPage

Text = Callable[[int, int], list[int]]
EACH = ["window", "draft", "states"]


@given(have=st.lists(st.booleans(), max_size=12), trailing=st.one_of(st.none(), st.integers(1, 14)))
def test_a_hit_is_served_when_its_last_pages_are_there(have: list[bool], trailing: int | None) -> None:
    wanted = [all(have[0 if trailing is None else max(0, hit - trailing) : hit]) for hit in range(len(have) + 1)]
    assert covered(np.array(have, dtype=np.bool_), trailing).tolist() == wanted


@pytest.mark.parametrize("kinds", [["window"], ["draft"], ["states"], EACH])
def test_what_is_served_comes_back_from_device_and_host(kinds: list[str], text: Text) -> None:
    bench = GroupBench(kinds, seed=1)
    bench.random = PageByPage()  # type: ignore[assignment]
    bench.serve(text(1, 17))
    assert bench.serve(text(1, 19)) == (16, 0)
    bench.cache.evict(8)
    assert bench.serve(text(1, 19)) == (0, 16)
    assert bench.cache.counters.companion_loaded_pages > 0
