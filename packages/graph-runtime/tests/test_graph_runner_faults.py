"""The decode runner under faults: slow, failing and hanging updates, failed captures, threads, release."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from graph_runtime import Buckets, DecodeRunner, StepInputs, get_device
from graph_runtime.errors import (
    CaptureFailed,
    CaptureRefused,
    FenceTimeout,
    GraphClosed,
    StepFailed,
    UpdateFailed,
    UpdateTimeout,
)
from graph_runtime.testing import RecordingDevice

Make = Callable[..., tuple[DecodeRunner, RecordingDevice]]


class Lengths(list[int]):
    """A list that can be watched."""


def _forward(step: StepInputs) -> torch.Tensor:
    x = step.tensors["x"] + step.tensors["seq_lens"][:, None]
    scaled: torch.Tensor = torch.ops.graph_test.scale(x, step.host["kv"])
    return scaled


def _weighted(weight: torch.Tensor, step: StepInputs) -> torch.Tensor:
    return _forward(step) @ weight


def _values(n: int, base: float = 1.0) -> dict[str, Any]:
    return {"x": torch.full((n, 2), float(base)), "seq_lens": list(range(10, 10 + n))}


def _expect(n: int, kv: list[int], base: float = 1.0) -> list[list[float]]:
    return [[(base + 10 + i) * kv[i]] * 2 for i in range(n)]


def test_a_slow_update_is_waited_for(make: Make) -> None:
    """E14: the replay of a batch sees the lengths of that batch; the naive hand-over does not."""
    runner, device = make()
    runner.capture()
    device.hook = lambda event: time.sleep(0.02) if event == "update" else None
    for n, kv in ((4, [1, 2, 3, 4]), (1, [9]), (2, [7, 8])):
        assert runner.run(_values(n), {"kv": kv}, n).output.tolist() == _expect(n, kv)

    # The naive version: update on a fresh thread, replay at once.
    replayed = threading.Event()

    def after_the_replay(event: str) -> None:
        if event == "update":
            assert replayed.wait(60)

    device.hook = after_the_replay
    x = torch.ones(1, 1)
    graph, output = device.capture(lambda: torch.ops.graph_test.scale(x, [0]))
    seen: list[Any] = []

    def naive(length: int) -> None:
        thread = threading.Thread(target=lambda: graph.update({"lens": [length]}))
        thread.start()
        try:
            graph.replay()
            seen.append(float(output))
        except RuntimeError as error:
            seen.append(error)
        replayed.set()
        thread.join()

    naive(3)
    assert seen[0] != 3.0  # our device refuses; a flag-based one waits or uses the old length


def test_an_exception_in_the_update_reaches_the_caller_before_launch(make: Make) -> None:
    runner, device = make()
    runner.capture()

    def hook(event: str) -> None:
        if event == "update":
            raise OSError("link down")

    device.hook = hook
    device.events.clear()
    with pytest.raises(UpdateFailed, match="link down") as caught:
        runner.run(_values(2), {"kv": [1, 2]}, 2)
    assert isinstance(caught.value.__cause__, OSError) and "replay" not in device.events
    device.hook = lambda event: None
    decision = runner.can_run(2)
    assert decision.bucket == 4 and "link down" in decision.detail  # the next larger bucket serves
    assert runner.run(_values(2), {"kv": [1, 2]}, 2).output.tolist() == _expect(2, [1, 2])
    assert runner.capture().captured == (1, 2, 4)
    assert runner.can_run(2).bucket == 2


def test_a_broken_largest_bucket_leads_to_eager_steps(make: Make) -> None:
    runner, device = make(buckets=Buckets([2]))
    runner.capture()

    def hook(event: str) -> None:
        if event == "update":
            raise OSError("link down")

    device.hook = hook
    with pytest.raises(UpdateFailed):
        runner.run(_values(2), {"kv": [1, 2]}, 2)
    result = runner.run(_values(2), {"kv": [1, 2]}, 2)
    assert result.reason == "graph_broken" and result.output.tolist() == _expect(2, [1, 2])


def test_an_update_that_hangs_is_diagnosed(make: Make) -> None:
    runner, device = make(update_timeout=0.05)
    runner.capture()
    release = threading.Event()

    def stuck(event: str) -> None:
        if event == "update":
            release.wait(10)

    device.hook = stuck
    device.events.clear()
    with pytest.raises(UpdateTimeout, match="stuck") as caught:
        runner.run(_values(4), {"kv": [1, 2, 3, 4]}, 4)
    assert "bucket 4" in str(caught.value) and "graph_test::scale" in str(caught.value)
    assert "replay" not in device.events and runner.can_run(4).reason == "graph_broken"
    release.set()
    device.hook = lambda event: None
    assert runner.run(_values(1), {"kv": [3]}, 1).mode == "graph"


def test_a_previous_step_that_hangs_is_diagnosed(make: Make) -> None:
    runner, device = make(fence_timeout=0.01)
    runner.capture()
    runner.run(_values(2), {"kv": [1, 2]}, 2)

    class Never:
        def done(self) -> bool:
            return False

        def wait(self, timeout: float | None) -> bool:
            return False

    reached, runner._fence = runner._fence, Never()
    device.events.clear()
    with pytest.raises(FenceTimeout, match="bucket 2"):
        runner.run(_values(1), {"kv": [1]}, 1)
    assert device.events == []
    runner._fence = reached
    assert runner.run(_values(1), {"kv": [1]}, 1).mode == "graph"


def test_a_device_error_of_the_previous_step_is_named(make: Make) -> None:
    runner, device = make(buckets=[2])
    runner.capture()
    runner.run(_values(2), {"kv": [1, 2]}, 2)

    class Fails:
        def done(self) -> bool:
            return True

        def wait(self, timeout: float | None) -> bool:
            raise RuntimeError("507015")

    runner._fence = Fails()
    device.events.clear()
    with pytest.raises(StepFailed, match="bucket 2"):
        runner.run(_values(1), {"kv": [1]}, 1)
    assert device.events == [] and "507015" in runner.can_run(1).detail
    assert runner.run(_values(1), {"kv": [1]}, 1).reason == "graph_broken"
    assert runner.capture().captured == (2,)
    assert runner.run(_values(1), {"kv": [1]}, 1).mode == "graph"


def test_two_runners_alternate(make: Make) -> None:
    device = RecordingDevice(get_device("cpu", updatable={"graph_test::scale": ("lens",)}))
    runners = [make(device=device)[0] for _ in range(2)]
    for runner in runners:
        runner.capture()
    for turn in range(12):
        n = (turn * 7) % 5
        kv = [turn + i for i in range(n)]
        assert runners[turn % 2].run(_values(n, turn), {"kv": kv}, n).output.tolist() == _expect(n, kv, turn)
    assert device.events.count("bind") == 1


def test_two_runners_in_two_threads(make: Make) -> None:
    device = RecordingDevice(get_device("cpu", updatable={"graph_test::scale": ("lens",)}))
    runners = [make(device=device)[0] for _ in range(2)]
    for runner in runners:
        runner.capture()
    wrong: list[Any] = []

    def work(index: int) -> None:
        for turn in range(60):
            n = (turn * 3 + index) % 5
            kv = [100 * index + turn + i for i in range(n)]
            got = runners[index].run(_values(n, index), {"kv": kv}, n).output.tolist()
            if got != _expect(n, kv, index):
                wrong.append((index, turn, got))

    before = set(threading.enumerate())
    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(set(threading.enumerate()) - before) <= 1


def test_one_runner_in_two_threads(make: Make) -> None:
    runner, _ = make()
    runner.capture()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for turn in range(30):
                runner.run(_values(turn % 5), {"kv": [1] * (turn % 5)}, turn % 5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and runner.counters.graph_replays == 90


def test_nothing_of_a_step_is_kept(make: Make) -> None:
    """E20: no strong reference to inputs after a step, one worker, no thread per replay."""

    runner, _ = make()
    runner.capture()
    runner.run(_values(1), {"kv": [1]}, 1)
    threads = set(threading.enumerate())
    for eager in (False, True):
        x, seq_lens, kv = torch.ones(2, 2), np.array([1, 2], dtype=np.int64), Lengths([1, 2])
        watches: list[Callable[[], object]] = [weakref.ref(x), weakref.ref(seq_lens), weakref.ref(kv)]
        runner.run({"x": x, "seq_lens": seq_lens}, {"kv": kv}, 2, eager=eager)
        del x, seq_lens, kv
        gc.collect()
        assert all(watch() is None for watch in watches)
    for _ in range(50):
        runner.run(_values(1), {"kv": [1]}, 1)
    assert set(threading.enumerate()) <= threads


def test_a_bucket_that_fails_leaves_the_others(make: Make) -> None:
    broken = [4]
    barriers: list[int] = []

    def forward(step: StepInputs) -> torch.Tensor:
        if step.bs in broken:
            raise RuntimeError(f"no memory for {step.bs}")
        return _forward(step)

    runner, _ = make(forward=forward, barrier=lambda: barriers.append(1))
    report = runner.capture()
    assert report.captured == (1, 2) and "no memory for 4" in report.failed[4] and len(barriers) == 9
    decision = runner.can_run(3)
    assert decision.reason == "capture_failed" and "no memory" in decision.detail
    assert runner.run(_values(3), {"kv": [1, 2, 3]}, 3).reason == "capture_failed"
    assert runner.run(_values(2), {"kv": [1, 2]}, 2).bucket == 2
    broken[0] = 0
    assert runner.capture().captured == (1, 2, 4)
    assert runner.can_run(3).bucket == 4


def test_no_bucket_at_all(make: Make) -> None:
    runner, _ = make(forward=lambda step: _forward(step) * step.tensors["x"].sum().item())
    with pytest.raises(CaptureFailed) as caught:
        runner.capture()
    assert set(caught.value.got) == {1, 2, 4} and isinstance(caught.value.__cause__, CaptureRefused)  # type: ignore[call-overload]
    assert runner.run(_values(1), {"kv": [1]}, 1).reason == "capture_failed"


def test_close_releases_everything(make: Make) -> None:
    before = set(threading.enumerate())
    weight = torch.ones(2, 2)
    watch = weakref.ref(weight.untyped_storage())
    runner, device = make(forward=partial(_weighted, weight))
    runner.capture()
    runner.run(_values(2), {"kv": [1, 2]}, 2)
    runner.close()
    runner.close()
    assert device.gate.users == 0 and set(threading.enumerate()) <= before
    with pytest.raises(GraphClosed):
        runner.run(_values(1), {"kv": [1]}, 1)
    with pytest.raises(GraphClosed):
        runner.capture()
    del weight
    runner._forward = _forward
    gc.collect()
    assert watch() is None
