"""Faults on the NPU: slow, failing and missing updates, refused captures, threads, two devices, release."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_npu
from graph_runtime import Buckets, DecodeRunner, StaticBuffers, StepInputs, get_device
from graph_runtime.errors import (
    CaptureFailed,
    CaptureRefused,
    DeviceMismatch,
    FenceTimeout,
    StepFailed,
    UpdateFailed,
)
from graph_runtime.testing import RecordingDevice

Make = Callable[..., tuple[DecodeRunner, Any]]


def test_a_failing_update_reaches_the_caller_before_launch(toy: Any, make: Make) -> None:
    """E14: the exception arrives before the replay; the bucket is out of use until it is captured again."""
    device = RecordingDevice(get_device("npu:0"))
    runner, decoder = make(device=device, buckets=Buckets([2]))
    runner.capture()
    requests = [toy.Request(index) for index in range(2)]
    toy.check(toy.step(runner, requests), decoder, requests)

    def hook(event: str) -> None:
        if event == "update":
            raise RuntimeError("507015")

    device.hook = hook
    device.events.clear()
    with pytest.raises(UpdateFailed, match="507015"):
        toy.step(runner, requests)
    assert "replay" not in device.events
    device.hook = lambda event: None
    requests = [toy.Request(2), toy.Request(3)]
    result = toy.step(runner, requests)
    assert result.reason == "graph_broken"
    toy.check(result, decoder, requests)
    assert runner.capture().captured == (2,)
    result = toy.step(runner, requests)
    assert result.mode == "graph"
    toy.check(result, decoder, requests)


def test_an_update_that_the_op_refuses(toy: Any, make: Make) -> None:
    """E14 with the op's own refusal: a length beyond the block table, found when the op is re-issued."""
    runner, decoder = make(buckets=[1])
    runner.capture()
    request = toy.Request(0)
    toy.check(toy.step(runner, [request]), decoder, [request])
    values = {"x": request.xs[-1][None], "slots": [request.slot()], "table": [request.pages]}
    with pytest.raises(UpdateFailed, match="table"):
        runner.run(values, {"kv_lens": [3 * toy.PAGE + 1]}, 1)
    assert runner.can_run(1).reason == "graph_broken"
    runner.capture()
    result = runner.run(values, {"kv_lens": [1]}, 1)
    assert result.mode == "graph"
    toy.check(result, decoder, [request])


def test_a_fault_on_the_device_is_told_by_the_next_step(toy: Any, make: Make) -> None:
    """E12: reading slots that nobody wrote is the device's 507015; it is not blamed on the step after it."""
    decoder = toy.Decoder()
    decoder.keys = [torch.empty_like(cache) for cache in decoder.keys]
    decoder.values = [torch.empty_like(cache) for cache in decoder.values]
    runner, _ = make(decoder=decoder, buckets=[1])
    runner.capture()
    request = toy.Request(0)
    toy.check(toy.step(runner, [request]), decoder, [request])
    values = {"x": request.xs[-1][None], "slots": [request.slot()], "table": [request.pages]}
    runner.run(values, {"kv_lens": [17]}, 1)  # 16 added twice would look like this
    with pytest.raises(StepFailed, match="507015") as caught:
        runner.run(values, {"kv_lens": [1]}, 1)
    assert "previous step (bucket 1)" in str(caught.value)
    runner.capture()
    toy.check(runner.run(values, {"kv_lens": [1]}, 1), decoder, [request])


def test_a_slow_update_is_waited_for(toy: Any, make: Make) -> None:
    """E14: the batch size changes at every step while the update is slow."""
    device = RecordingDevice(get_device("npu:0"))
    runner, decoder = make(device=device)
    runner.capture()
    device.hook = lambda event: time.sleep(0.02) if event == "update" else None
    requests = [toy.Request(index) for index in range(4)]
    for n in (4, 1, 3, 2):
        toy.check(toy.step(runner, requests[:n]), decoder, requests[:n])


def test_a_replay_that_waits_for_an_update_is_diagnosed(toy: Any, make: Make) -> None:
    """A-50: a replay without update waits; the next step says so instead of hanging, and works later."""
    device = get_device("npu:0")
    runner, decoder = make(buckets=Buckets([1]), fence_timeout=0.3)
    runner.capture()
    request = toy.Request(0)
    toy.check(toy.step(runner, [request]), decoder, [request])
    graph: Any = runner._graphs[1].graph
    graph._graph.replay()
    runner._fence = device.record_fence()
    assert not runner._fence.done()
    values = {"x": request.xs[-1][None], "slots": [request.slot()], "table": [request.pages]}
    with pytest.raises(FenceTimeout, match="waits for an update"):
        runner.run(values, {"kv_lens": [1]}, 1)
    graph._graph.update(cpu_update_input=[{"actual_seq_kvlen": [1]}])
    toy.check(runner.run(values, {"kv_lens": [1]}, 1), decoder, [request])


def test_two_runners_alternate_and_two_threads(toy: Any, make: Make) -> None:
    pairs = [make(decoder=toy.Decoder("npu:0", seed)) for seed in (5, 6)]
    for runner, _ in pairs:
        runner.capture()
    assert pairs[0][0]._worker is pairs[1][0]._worker
    requests = [[toy.Request(4 * 0 + index) for index in range(4)] for _ in pairs]
    for turn in range(6):
        runner, decoder = pairs[turn % 2]
        n = (turn * 3) % 5
        toy.check(toy.step(runner, requests[turn % 2][:n]), decoder, requests[turn % 2][:n])

    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            runner, decoder = pairs[index]
            for turn in range(8):
                n = (turn + index) % 5
                toy.check(toy.step(runner, requests[index][:n]), decoder, requests[index][:n])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_a_second_device_binds_its_own_worker(toy: Any, make: Make) -> None:
    """E15: the worker's device is that of the runner, not device 0."""
    seen: list[int] = []
    device = RecordingDevice(get_device("npu:1"))
    first, first_decoder = make()
    first.capture()
    runner, decoder = make(device=device, decoder=toy.Decoder("npu:1"))
    runner.capture()
    device.hook = lambda event: seen.append(torch_npu.npu.current_device()) if event == "update" else None
    requests, others = [toy.Request(index) for index in range(2)], [toy.Request(index) for index in range(2)]
    for _ in range(3):
        toy.check(toy.step(runner, requests), decoder, requests)
        toy.check(toy.step(first, others), first_decoder, others)
    assert seen == [1, 1, 1] and device.events.count("bind") == 1
    assert torch_npu.npu.current_device() == 0


def test_nothing_of_a_step_is_kept(toy: Any, make: Make) -> None:
    """E20: no reference to inputs after a step and no thread per replay."""
    runner, _ = make()
    runner.capture()
    toy.step(runner, [toy.Request(0)])
    threads = set(threading.enumerate())
    x, slots = torch.zeros(1, toy.WIDTH), np.array([toy.PAGE], dtype=np.int64)
    watches: list[Callable[[], object]] = [weakref.ref(x), weakref.ref(slots)]
    runner.run({"x": x, "slots": slots, "table": [[1, 2, 3]]}, {"kv_lens": [1]}, 1)
    del x, slots
    gc.collect()
    assert all(watch() is None for watch in watches)
    request = toy.Request(1)
    for _ in range(20):
        toy.step(runner, [request])
    assert set(threading.enumerate()) <= threads


def test_a_capture_that_the_device_refuses(toy: Any, make: Make) -> None:
    decoder = toy.Decoder()
    read = [True]

    def forward(step: StepInputs) -> Any:
        output = decoder.forward(step)
        if read[0] and step.bs == 4 and torch.npu.is_current_stream_capturing():  # type: ignore[attr-defined]
            return output * float(output.sum())
        return output

    runner, _ = make(forward=forward)
    stream = torch_npu.npu.current_stream()
    report = runner.capture()
    assert report.captured == (1, 2) and "CaptureRefused" in report.failed[4]
    assert torch_npu.npu.current_stream() == stream
    requests = [toy.Request(index) for index in range(3)]
    result = toy.step(runner, requests)
    assert result.reason == "capture_failed"
    toy.check(result, decoder, requests)
    result = toy.step(runner, requests[:2])
    assert result.bucket == 2
    toy.check(result, decoder, requests[:2])
    read[0] = False
    assert runner.capture().captured == (1, 2, 4)
    requests = [toy.Request(index) for index in range(3)]
    result = toy.step(runner, requests)
    assert result.bucket == 4
    toy.check(result, decoder, requests)


def test_no_bucket_at_all(toy: Any, make: Make) -> None:
    decoder = toy.Decoder()

    def forward(step: StepInputs) -> Any:
        output = decoder.forward(step)
        return output + float(output.sum()) * 0

    runner, _ = make(forward=forward, buckets=Buckets([2]))
    with pytest.raises(CaptureFailed) as caught:
        runner.capture()
    assert isinstance(caught.value.__cause__, CaptureRefused)
    requests = [toy.Request(0)]
    toy.check(toy.step(runner, requests), decoder, requests)


def test_close_gives_memory_back(toy: Any, make: Make) -> None:
    threads = set(threading.enumerate())
    runner, decoder = make()
    device_index = 0
    torch_npu.npu.synchronize()
    gc.collect()
    before = torch_npu.npu.memory_allocated(device_index)
    runner.capture()
    held = torch_npu.npu.memory_allocated(device_index)
    toy.step(runner, [toy.Request(0)])
    runner.close()
    gc.collect()
    assert held > before and torch_npu.npu.memory_allocated(device_index) <= before
    assert set(threading.enumerate()) <= threads
    assert decoder.keys[0].device.type == "npu"


def test_buffers_of_another_device(toy: Any, make: Make) -> None:
    with pytest.raises(DeviceMismatch, match="npu:1"):
        make(buffers=StaticBuffers(toy.layout(), get_device("npu:1")))
