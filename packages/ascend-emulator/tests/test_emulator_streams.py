"""Streams and events: issue order, waits between streams behind blocked work, timing, host functions, threads."""

from __future__ import annotations

import threading
import time
from typing import Any

import ascend_emulator as emulator
import pytest
import torch
import torch_npu


def test_operators_on_an_idle_stream_run_at_once() -> None:
    side = torch_npu.npu.Stream()
    with torch_npu.npu.stream(side):
        tensor = torch.ones(4, device="npu") * 3
    assert side.query()
    side.synchronize()
    assert tensor.cpu().tolist() == [3] * 4


def test_elapsed_time_between_events() -> None:
    first, last = torch_npu.npu.Event(enable_timing=True), torch_npu.npu.Event(enable_timing=True)
    began = time.perf_counter()
    first.record()
    time.sleep(0.02)
    last.record()
    last.synchronize()
    assert 15 < first.elapsed_time(last) <= (time.perf_counter() - began) * 1e3 + 1


def test_an_event_behind_a_blocked_replay_is_reached_with_it(attention: Any) -> None:
    before, after = torch_npu.npu.Event(), torch_npu.npu.Event()
    before.record()
    attention.graph.replay()
    after.record()
    assert before.query()
    assert not after.query()
    attention.update(9)
    assert after.query()
    attention.check(9)


def test_a_stream_that_waits_for_an_event_is_blocked_with_it(attention: Any) -> None:
    side = torch_npu.npu.Stream()
    attention.graph.replay()
    side.wait_stream(torch_npu.npu.current_stream())
    with torch_npu.npu.stream(side):
        doubled = attention.out * 2
    assert not side.query()
    attention.update(40)
    side.synchronize()
    torch.testing.assert_close(doubled.cpu()[0, 0, 0].float(), 2 * attention.expected(40), atol=2e-3, rtol=2e-3)


def test_a_stream_that_does_not_wait_goes_on_and_reads_old_data(attention: Any) -> None:
    side = torch_npu.npu.Stream()
    attention.update(7)
    attention.graph.replay()
    attention.check(7)
    attention.graph.replay()
    with torch_npu.npu.stream(side):
        copy = attention.out.clone()
        old = copy.cpu()[0, 0, 0].float()
    attention.update(300)
    attention.check(300)
    torch.testing.assert_close(old, attention.expected(7), atol=1e-3, rtol=1e-3)


def test_a_wait_covers_the_record_before_it_and_not_a_later_one(attention: Any) -> None:
    side, event = torch_npu.npu.Stream(), torch_npu.npu.Event()
    event.record()
    side.wait_event(event)
    attention.graph.replay()
    event.record()
    side.synchronize()
    attention.update(3)
    event.synchronize()
    attention.check(3)


def test_chains_over_three_streams(attention: Any) -> None:
    first, second, third = torch_npu.npu.current_stream(), torch_npu.npu.Stream(), torch_npu.npu.Stream()
    attention.graph.replay()
    second.wait_stream(first)
    with torch_npu.npu.stream(second):
        plus = attention.out + 1
    third.wait_stream(second)
    with torch_npu.npu.stream(third):
        twice = plus * 2
    first.wait_stream(third)
    attention.update(64)
    expected = 2 * (attention.expected(64) + 1)
    torch.testing.assert_close((twice + 0).cpu()[0, 0, 0].float(), expected, atol=5e-3, rtol=5e-3)


def test_streams_that_wait_for_each_others_past_do_not_deadlock() -> None:
    first, second = torch_npu.npu.Stream(), torch_npu.npu.Stream()
    for _ in range(3):
        first.wait_stream(second)
        second.wait_stream(first)
    first.synchronize()
    second.synchronize()


def test_an_external_event_between_two_streams(short_wait: float) -> None:
    waiting, recording = torch_npu.npu.Stream(), torch_npu.npu.Stream()
    event = torch_npu.npu.ExternalEvent()
    event.wait(waiting)
    with torch_npu.npu.stream(waiting):
        tensor = torch.full((2,), 4.0, device="npu")
    assert not waiting.query()
    with pytest.raises(emulator.DeadlockError, match="external event"):
        waiting.synchronize()
    event = torch_npu.npu.ExternalEvent()
    event.wait(waiting)
    event.record(recording)
    waiting.synchronize()
    assert tensor.cpu().tolist() == [4, 4]


def test_threads_have_their_own_current_stream_and_device() -> None:
    results: dict[int, tuple[int, list[float]]] = {}

    def work(device: int) -> None:
        torch_npu.npu.set_device(device)
        with torch_npu.npu.stream(torch_npu.npu.Stream()):
            tensor = torch.arange(3.0, device="npu") + device
            for _ in range(50):
                tensor = tensor + 1
            results[device] = (tensor.device.index, tensor.cpu().tolist())

    threads = [threading.Thread(target=work, args=(device,)) for device in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: (0, [50, 51, 52]), 1: (1, [51, 52, 53])}


def test_unknown_device_is_refused() -> None:
    with pytest.raises(RuntimeError):
        torch.ones(2, device="npu:7")
    assert torch_npu.npu.device_count() == 2


def test_memory_used_by_another_stream_is_not_handed_out_while_that_is_blocked(attention: Any) -> None:
    side = torch_npu.npu.Stream(priority=-1)  # of another pool than the stream of updates, which it would block
    attention.graph.replay()
    side.wait_stream(torch_npu.npu.current_stream())
    tensor = torch.full((3000,), 2.0, device="npu:0")
    with torch_npu.npu.stream(torch_npu.npu.Stream()):
        made = torch.full((3000,), 2.0, device="npu:0")
        side.wait_stream(torch_npu.npu.current_stream())
    address = made.data_ptr()
    with torch_npu.npu.stream(side):
        doubled = made * 2
    made.record_stream(side)
    del made
    assert tensor.data_ptr() != address
    attention.update(5)
    side.synchronize()
    assert set(doubled.cpu().tolist()) == {4.0}


def test_a_thread_that_never_chose_a_device_uses_the_first() -> None:
    """record_stream needs the device's context, which torch_npu takes when it first sets the device."""
    seen: list[float] = []

    def work() -> None:
        tensor = torch.ones(4, device="npu")
        tensor.record_stream(torch_npu.npu.Stream())
        seen.append(tensor.sum().item())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [4.0]
