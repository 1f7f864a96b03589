"""The update worker: one bound thread, exceptions and time-outs to the caller, nothing kept."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial

import pytest
from graph_runtime import UpdateWorker
from graph_runtime.errors import GraphClosed, UpdateTimeout
from graph_runtime.gate import DeviceGate


def test_bound_once_before_the_first_job_on_one_thread() -> None:
    """E15: two workers forced; each binds its own device once and no thread is started per job."""
    events: list[tuple[str, int]] = []

    def note(what: str) -> None:
        events.append((what, threading.get_ident()))

    workers = [UpdateWorker(partial(note, f"bind{n}"), name=f"w{n}") for n in range(2)]
    assert not workers[0].started
    before = set(threading.enumerate())
    for _ in range(20):
        for n, worker in enumerate(workers):
            worker.run(partial(note, f"job{n}"), timeout=5)
    assert len(set(threading.enumerate()) - before) == 2
    for n in range(2):
        own = [event for event in events if event[0].endswith(str(n))]
        assert own[0][0] == f"bind{n}" and [name for name, _ in own[1:]] == [f"job{n}"] * 20
        assert len({ident for _, ident in own}) == 1 and own[0][1] != threading.get_ident()
    for worker in workers:
        worker.close()
    assert set(threading.enumerate()) <= before


def test_an_exception_reaches_the_caller_and_the_worker_lives_on() -> None:
    worker = UpdateWorker(lambda: None, name="w")

    def fail() -> None:
        raise KeyError("lens")

    with pytest.raises(KeyError, match="lens"):
        worker.run(fail, timeout=5)
    done: list[int] = []
    worker.run(lambda: done.append(1), timeout=5)
    assert done == [1]
    worker.close()
    worker.close()
    with pytest.raises(GraphClosed):
        worker.run(lambda: None, timeout=5)


def test_a_failed_bind_is_tried_again() -> None:
    attempts: list[int] = []

    def bind() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("no device")

    worker = UpdateWorker(bind, name="w")
    with pytest.raises(OSError, match="no device"):
        worker.run(lambda: None, timeout=5)
    worker.run(lambda: None, timeout=5)
    worker.run(lambda: None, timeout=5)
    assert len(attempts) == 2
    worker.close()


def test_a_time_out_says_where_the_job_is() -> None:
    worker = UpdateWorker(lambda: None, name="graph-update-test")
    release = threading.Event()

    def waits_for_a_replay_that_never_comes() -> None:
        release.wait(10)

    with pytest.raises(UpdateTimeout) as caught:
        worker.run(waits_for_a_replay_that_never_comes, timeout=0.05, what="update of bucket 4")
    text = str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    assert (
        "waits_for_a_replay_that_never_comes" in text and "update of bucket 4" in text and "graph-update-test" in text
    )
    release.set()
    done: list[int] = []
    worker.run(lambda: done.append(1), timeout=5)  # usable again once the late job has ended
    assert done == [1]
    worker.close()


def test_nothing_of_a_job_is_kept() -> None:
    class Payload:
        pass

    worker = UpdateWorker(lambda: None, name="w")
    payload = Payload()
    watch = weakref.ref(payload)
    worker.run(partial(id, payload), timeout=5)
    del payload
    deadline = time.monotonic() + 60
    while watch() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    gc.collect()
    assert watch() is None
    worker.close()


def test_a_gate_shares_one_worker_and_ends_it_with_the_last_user() -> None:
    before = set(threading.enumerate())
    gate = DeviceGate("x", lambda: None)
    first, second = gate.enter(), gate.enter()
    assert first is second and gate.users == 2
    first.run(lambda: None, timeout=5)
    gate.leave()
    first.run(lambda: None, timeout=5)
    gate.leave()
    assert set(threading.enumerate()) <= before
    third = gate.enter()
    assert third is not first
    gate.leave()


def test_callers_of_several_threads_take_turns() -> None:
    worker = UpdateWorker(lambda: None, name="w")
    inside: list[int] = []
    overlaps: list[int] = []

    def job() -> None:
        inside.append(1)
        overlaps.append(len(inside))
        time.sleep(0.0005)
        inside.pop()

    def work() -> None:
        for _ in range(20):
            worker.run(job, timeout=5)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [1] * 60
    worker.close()
