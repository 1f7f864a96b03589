"""Pools, planner and transfer together: bytes that tell where they belong, from two stages into one decode pool.

Every element carries (component, layer, logical page, slot, head, dim); pages are permuted on all sides; everything
that the transfer must not touch holds a sentinel.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import kv_planner
import kv_transfer
import numpy as np
import pytest
import torch
from kv_pool import MhaPool

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYERS, STAGES, PAGE, HEADS, KEY_DIM, VALUE_DIM, POOL_PAGES = 5, 2, 16, 3, 8, 6, 12
LAYOUT = kv_planner.ModelLayout(
    [
        kv_planner.ComponentSpec("key", layer_ids=range(LAYERS), dtype="float32", total_heads=HEADS, dims=KEY_DIM),
        kv_planner.ComponentSpec("value", layer_ids=range(LAYERS), dtype="float32", total_heads=HEADS, dims=VALUE_DIM),
    ],
    page_size=PAGE,
    fingerprint="labelled",
)
SENTINEL = -7


def labels(component: int, layer: int, page: int, dims: int) -> torch.Tensor:
    """One page of labels, each different from every other in the test."""
    base = ((component * LAYERS + layer) * POOL_PAGES + page) * PAGE * HEADS * max(KEY_DIM, VALUE_DIM)
    return torch.arange(PAGE * HEADS * dims, dtype=torch.float32).view(PAGE, HEADS, dims) + base


def stage_pool(stage: int) -> MhaPool:
    layers = range(LAYERS * stage // STAGES, LAYERS * (stage + 1) // STAGES)
    pool = MhaPool(
        LAYOUT,
        size=(POOL_PAGES - 1) * PAGE,
        device="cpu",
        layer_ids=layers,
        placement=kv_planner.Placement(pp_rank=stage, pp_size=STAGES),
    )
    pool.key_storage.fill_(SENTINEL)
    pool.value_storage.fill_(SENTINEL)
    return pool


def fill(pool: MhaPool, layers: range, pages: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    for layer in layers:
        for logical, page in enumerate(pages):
            pool.key(layer)[page] = labels(0, layer, logical, KEY_DIM)
            pool.value(layer)[page] = labels(1, layer, logical, VALUE_DIM)


@pytest.fixture(params=["loopback", "mooncake"])
def engine_name(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def test_every_byte_arrives_where_its_label_says(engine_name: str) -> None:
    generator = np.random.default_rng(11)
    pools = [stage_pool(stage) for stage in range(STAGES)]
    target = MhaPool(LAYOUT, size=(POOL_PAGES - 1) * PAGE, device="cpu")
    target.key_storage.fill_(SENTINEL)
    target.value_storage.fill_(SENTINEL)
    count = 7
    there = [generator.permutation(np.arange(1, POOL_PAGES))[:count] for _ in range(STAGES)]
    here = generator.permutation(np.arange(1, POOL_PAGES))[:count]
    for stage, pool in enumerate(pools):
        fill(pool, range(LAYERS * stage // STAGES, LAYERS * (stage + 1) // STAGES), there[stage])

    with kv_transfer.Receiver(
        target.manifest(), kv_transfer.create_engine(engine_name), prefill_ranks=STAGES
    ) as receiver:

        def prefill(stage: int) -> None:
            engine = kv_transfer.create_engine(engine_name)
            with kv_transfer.Sender(pools[stage].manifest(), engine, endpoint=receiver.endpoint) as sender:
                sender.connect()
                session = sender.open(0)
                for start, stop in ((0, 3), (3, 4), (4, count)):  # in chunks, the middle one a single page
                    session.send(there[stage][start:stop], start=start)
                session.finish({"stage": stage})

        threads = [threading.Thread(target=prefill, args=(stage,)) for stage in range(STAGES)]
        for thread in threads:
            thread.start()
        receiver.wait_ready()
        result = receiver.open(0, here, tokens=count * PAGE - 5).wait(timeout=30)
        for thread in threads:
            thread.join(30)

    assert sorted(int(str(item["stage"])) for item in result.metadata.values()) == [0, 1]
    assert result.nbytes == count * PAGE * HEADS * (KEY_DIM + VALUE_DIM) * 4 * LAYERS
    for layer in range(LAYERS):
        for page in range(POOL_PAGES):
            where = np.flatnonzero(here == page)
            key, value = target.key(layer)[page], target.value(layer)[page]
            if len(where):
                assert torch.equal(key, labels(0, layer, int(where[0]), KEY_DIM)), (layer, page)
                assert torch.equal(value, labels(1, layer, int(where[0]), VALUE_DIM)), (layer, page)
            else:
                assert (key == SENTINEL).all() and (value == SENTINEL).all(), (layer, page)


def test_a_peer_with_another_page_size_is_refused_before_any_byte_moves(engine_name: str) -> None:
    other = kv_planner.ModelLayout(list(LAYOUT.components), page_size=2 * PAGE, fingerprint="labelled")
    target = MhaPool(LAYOUT, size=4 * PAGE, device="cpu")
    pool = MhaPool(other, size=4 * PAGE, device="cpu")
    with (
        kv_transfer.Receiver(target.manifest(), kv_transfer.create_engine(engine_name), prefill_ranks=1) as receiver,
        kv_transfer.Sender(
            pool.manifest(), kv_transfer.create_engine(engine_name), endpoint=receiver.endpoint
        ) as sender,
        pytest.raises(kv_transfer.TransferError) as caught,
    ):
        sender.connect()
    text = str(caught.value)
    assert "page_size" in text and str(PAGE) in text and str(2 * PAGE) in text


def test_engines_are_not_loaded_by_the_package() -> None:
    program = "import sys, kv_transfer, kv_pool; print('mooncake' in sys.modules, 'torch_npu' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
