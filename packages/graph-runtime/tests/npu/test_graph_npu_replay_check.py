"""Replay equals eager on the emulated NPU: FIA v2 over random caches, lengths and tables, sizes in random order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_runtime import DecodeRunner, DerivedUpdate, StepInputs
from graph_runtime.testing import Batch, ReplayDiffers, check_replay_equals_eager
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Make = Callable[..., tuple[DecodeRunner, Any]]


class Cases:
    """Batches over caches whose every slot was written, and the caches' first content."""

    def __init__(self, toy: Any, decoder: Any) -> None:
        self.toy = toy
        self.caches = [*decoder.keys, *decoder.values]
        for cache in self.caches:
            cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(cache.numel())).half())
        self.first = [cache.clone() for cache in self.caches]

    def restore(self) -> None:
        for cache, first in zip(self.caches, self.first, strict=True):
            cache.copy_(first)

    def draw(self, generator: random.Random, rows: int) -> Batch:
        pages = list(range(1, 13))
        generator.shuffle(pages)
        tables = [pages[3 * row : 3 * row + 3] for row in range(rows)]
        lens = [generator.randint(1, 3 * self.toy.PAGE) for _ in range(rows)]
        ends = [length - 1 for length in lens]
        size = self.toy.PAGE
        slots = [table[end // size] * size + end % size for table, end in zip(tables, ends, strict=True)]
        made = torch.Generator().manual_seed(generator.randrange(1 << 30))
        x = torch.randn(rows, self.toy.WIDTH, generator=made)
        table = torch.tensor(tables, dtype=torch.int32).reshape(rows, 3)
        return Batch({"x": x, "slots": slots, "table": table}, {"kv_lens": lens})


@settings(deadline=None, max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30))
def test_replay_equals_eager(toy: Any, make: Make, seed: int) -> None:
    runner, decoder = make(update=DerivedUpdate())
    runner.capture(progress=False)
    cases = Cases(toy, decoder)
    seen = check_replay_equals_eager(
        runner, cases.draw, steps=10, seed=seed, restore=cases.restore, rtol=3e-3, atol=3e-3
    )
    assert seen.replays == {1: 4, 2: 2, 4: 4}
    runner.close()


def test_a_number_of_capture_time_is_found(toy: Any, make: Make) -> None:
    """Naive: the forward reads a number in Python, and a replay repeats the one that it read at capture."""
    number = [3.0]

    def forward(step: StepInputs) -> Any:
        hidden = decoder.forward(step)
        return hidden + number[0]

    decoder = toy.Decoder()
    runner, _ = make(decoder=decoder, forward=forward)
    runner.capture(progress=False)
    number[0] = 4.0
    cases = Cases(toy, decoder)
    with pytest.raises(ReplayDiffers, match="loaded or updated"):
        check_replay_equals_eager(runner, cases.draw, steps=5, seed=1, restore=cases.restore, rtol=3e-3, atol=3e-3)
