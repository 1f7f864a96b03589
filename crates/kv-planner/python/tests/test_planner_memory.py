"""Memory of large results is used again, and never while somebody can still see it."""

from __future__ import annotations

import gc
import threading

import kv_planner as kp
import numpy as np
import pytest
from kv_planner.testing import build_rank

PAGES = 3000
LAYOUT = kp.ModelLayout(
    [kp.ComponentSpec("key", layer_ids=range(4), dtype="uint8", total_heads=1, dims=1)], page_size=1, fingerprint="m"
)
LOCAL = build_rank(LAYOUT, range(4), items=PAGES, padding=1)
REMOTE = build_rank(LAYOUT, range(4), items=PAGES, base=2**40, padding=1)
ROUTE = kp.agree(LOCAL, REMOTE).route()


def plan(seed: int) -> kp.Plan:
    order = np.random.default_rng(seed)
    return kp.Plan(ROUTE, kp.Runs(order.permutation(PAGES - 1) + 1, order.permutation(PAGES - 1) + 1))


def wanted(seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    order = np.random.default_rng(seed)
    pages = (order.permutation(PAGES - 1) + 1).astype(np.uint64)
    bases = [np.uint64(entry.address) for entry in LOCAL.entries]
    return np.concatenate([base + np.uint64(2) * pages for base in bases])


def test_a_view_outlives_its_plan_while_others_are_lowered() -> None:
    (batch,) = kp.lower(plan(0)).batches
    assert len(batch) > 4096
    view = batch.source[5:9000:7]
    del batch
    for seed in range(1, 6):
        (other,) = kp.lower(plan(seed)).batches
        assert np.array_equal(other.source, wanted(seed))
        del other
        gc.collect()
    assert np.array_equal(view, wanted(0)[5:9000:7])


def test_dropped_memory_is_written_again() -> None:
    """Not a promise to the caller, but what makes a second lowering quick."""
    addresses = set()
    for seed in range(8):
        (batch,) = kp.lower(plan(seed)).batches
        addresses.add(batch.source.ctypes.data)
        del batch
    assert len(addresses) < 8


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_never_share_a_column(threads: int) -> None:
    wrong: list[int] = []

    def work(first: int) -> None:
        for seed in range(first, first + 5):
            (batch,) = kp.lower(plan(seed)).batches
            if not np.array_equal(batch.source, wanted(seed)):
                wrong.append(seed)

    running = [threading.Thread(target=work, args=(10 * number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("length", [16, 5000])
def test_lists_arrays_and_strides_say_the_same(length: int) -> None:
    items = np.random.default_rng(0).permutation(length) + 1
    runs = kp.Runs(items, items)
    spread = np.repeat(items, 3)[::3]
    swapped = items.astype(np.int32)
    shifted = np.frombuffer(b"\0" + items.tobytes(), np.uint8)[1:].view(np.int64)
    for same in (items.tolist(), spread, swapped, shifted):
        assert kp.Runs(same, items) == runs == kp.Runs(items, same)
    for start, stop in ((0, 0), (0, 1), (3, length)):
        together = np.arange(start + 1, stop + 1)
        assert kp.Runs(together, together).run_count == min(1, stop - start)
