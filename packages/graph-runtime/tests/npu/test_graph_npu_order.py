"""Owns the proof that the wait for the previous step is needed: without it the update is refused, every time.

The update rewrites host arguments that the previous replay may still read. Nothing is delayed here: the emulator looks
at what the host has waited for, so it does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ascend_emulator
import pytest
import torch_npu
from graph_runtime import DecodeRunner
from graph_runtime.errors import UpdateFailed

Make = Callable[..., tuple[DecodeRunner, Any]]
TIMES = 4


def test_an_update_waits_for_the_previous_replay(toy: Any, make: Make) -> None:
    for n in (1, 2, 4):
        runner, decoder = make(buckets=[n])
        runner.capture()
        requests = [toy.Request(index) for index in range(n)]
        for _ in range(TIMES):
            result = toy.step(runner, requests)
        assert result.mode == "graph"
        toy.check(result, decoder, requests)


def test_without_the_wait_for_the_previous_replay_the_update_is_refused_every_time(toy: Any, make: Make) -> None:
    found = 0
    for n in (1, 2, 4):
        for steps in range(1, TIMES + 1):
            runner, _ = make(buckets=[n])
            runner.capture()
            requests = [toy.Request(index) for index in range(n)]
            for _ in range(steps):
                toy.step(runner, requests)
            runner._fence = None  # nobody waits for the last step
            with pytest.raises(UpdateFailed, match="has not waited") as caught:
                toy.step(runner, requests)
            assert isinstance(caught.value.__cause__, ascend_emulator.FenceError)
            found += 1
            torch_npu.npu.synchronize()
    assert found == 3 * TIMES
