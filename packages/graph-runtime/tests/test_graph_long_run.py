"""Many replays: memory flat, no new thread. `nox -s soak` multiplies the examples."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import torch
from graph_runtime import DecodeRunner, StaticBuffers, get_device
from graph_runtime.testing import RecordingDevice
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_planner import RowField, RowLayout

REPLAYS = 100


def _grown(step: Callable[[int], None]) -> tuple[int, int]:
    """Objects and threads that REPLAYS steps left behind, after as many that may fill caches."""
    seen = []
    for _ in range(2):
        for index in range(REPLAYS):
            step(index)
        gc.collect()
        seen.append((len(gc.get_objects()), set(threading.enumerate())))
    return seen[1][0] - seen[0][0], len(seen[1][1] - seen[0][1])


@settings(deadline=None, max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 20))
def test_memory_is_flat_and_threads_do_not_grow(make: Callable[..., tuple[DecodeRunner, Any]], seed: int) -> None:
    device = get_device("cpu", updatable={"graph_test::scale": ("lens",)})
    layout = RowLayout([RowField("x", "float32", rows=4, width=2), RowField("seq_lens", "int64", rows=4, fill=1)])
    runner, _ = make(device=device, buffers=StaticBuffers(layout, device))
    runner.capture(progress=False)
    held = device.memory_held()

    def step(index: int) -> None:
        rows = (seed + index) % 5
        values = {"x": torch.ones(rows, 2), "seq_lens": [1] * rows}
        result = runner.run(values, {"kv": [index + 1] * rows}, rows)
        assert result.mode == "graph" and result.output.tolist() == [[2.0 * (index + 1)] * 2] * rows

    objects, threads = _grown(step)
    assert objects < REPLAYS / 10 and threads == 0 and device.memory_held() == held
    assert runner.counters.graph_replays == 2 * REPLAYS


def test_the_measure_sees_one_object_a_replay() -> None:
    kept: list[Any] = []
    assert _grown(lambda index: kept.append([index]))[0] > REPLAYS * 0.8


def test_one_thread_for_all_replays(make: Callable[..., tuple[DecodeRunner, Any]]) -> None:
    """E20: naively a thread a replay."""
    recorder = RecordingDevice(get_device("cpu", updatable={"graph_test::scale": ("lens",)}))
    runner, device = make(device=recorder)
    runner.capture(progress=False)
    before = {thread.ident for thread in threading.enumerate()}
    names = set()
    device.hook = lambda event: names.add(threading.current_thread().ident) if event == "update" else None
    for index in range(20):
        runner.run({"x": torch.ones(1, 2), "seq_lens": [1]}, {"kv": [index]}, 1)
    assert len(names) == 1 and len({thread.ident for thread in threading.enumerate()} - before) <= 1
    assert device.events.count("bind") == 1
