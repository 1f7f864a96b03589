"""Calls of runners from inside runners' calls, waits that end, interrupts, and outputs that are kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from graph_runtime import DecodeRunner, StepInputs, get_device
from graph_runtime.device import GraphDevice
from graph_runtime.errors import FenceTimeout, GraphError, ReentrantCall
from graph_runtime.testing import RecordingDevice

Make = Callable[..., tuple[DecodeRunner, RecordingDevice]]


def _forward(step: StepInputs) -> torch.Tensor:
    x = step.tensors["x"] + step.tensors["seq_lens"][:, None]
    scaled: torch.Tensor = torch.ops.graph_test.scale(x, step.host["kv"])
    return scaled


def _device() -> RecordingDevice:
    return RecordingDevice(get_device("cpu", updatable={"graph_test::scale": ("lens",)}))


def _run(runner: DecodeRunner, base: float = 1.0, n: int = 1, **options: Any) -> Any:
    values = {"x": torch.full((n, 2), float(base)), "seq_lens": [10] * n}
    return runner.run(values, {"kv": [2] * n}, n, **options)


def _ended(call: Callable[[], object], seconds: float = 60.0) -> object:
    """The result or exception of a call on a thread of its own, which must end."""
    found: list[object] = []

    def body() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    return found[0]


_CALLS: dict[str, Callable[[DecodeRunner], object]] = {
    "run": lambda runner: _run(runner),
    "eager run": lambda runner: _run(runner, eager=True),
    "capture": lambda runner: runner.capture(False),
    "close": lambda runner: runner.close(),
}


@pytest.mark.parametrize("call", sorted(_CALLS))
@pytest.mark.parametrize("place", ["forward", "before_step", "update", "barrier", "captured forward"])
def test_a_runner_inside_its_own_call(make: Make, call: str, place: str) -> None:
    seen: list[BaseException] = []
    active = [False]

    def nested() -> None:
        if active[0]:
            active[0] = False
            try:
                _CALLS[call](runner)
            except ReentrantCall as error:
                seen.append(error)

    def forward(step: StepInputs) -> torch.Tensor:
        if place in ("forward", "captured forward"):
            nested()
        return _forward(step)

    runner, device = make(
        buckets=[1],
        forward=forward,
        before_step=lambda step: nested() if place == "before_step" else None,
        barrier=lambda: nested() if place == "barrier" else None,
        fence_timeout=0.2 if place == "update" else 60.0,
    )
    if place in ("barrier", "captured forward"):
        active[0] = True
        _ended(lambda: runner.capture(False))
    else:
        runner.capture(False)
        active[0] = True
        if place == "update":  # on another thread: the wait for the turn ends, with a diagnosis
            device.hook = lambda event: nested() if event == "update" else None
            error = _ended(lambda: _run(runner))
            assert error is not None
            device.hook = lambda event: None
            assert runner.capture(False).captured == (1,)
        else:
            _ended(lambda: _run(runner, eager=place == "forward"))
    if place != "update":
        assert len(seen) == 1 and "decode runner on cpu" in str(seen[0])
    assert _ended(lambda: _run(runner).output.tolist()) == [[22.0, 22.0]]


@pytest.mark.parametrize("call", sorted(_CALLS))
@pytest.mark.parametrize("place", ["forward", "before_step"])
@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("shared", [True, False])
def test_another_runner_from_inside_a_step(make: Make, call: str, place: str, mode: str, shared: bool) -> None:
    device = _device()
    inner, _ = make(device=device if shared else _device(), buckets=[1])
    inner.capture(False)
    active = [False]
    done: list[object] = []

    def nested() -> None:
        if active[0]:
            done.append(_CALLS[call](inner))

    def forward(step: StepInputs) -> torch.Tensor:
        if place == "forward":
            nested()
        return _forward(step) * 10

    outer, _ = make(
        device=device,
        buckets=[1],
        forward=forward,
        before_step=lambda step: nested() if place == "before_step" else None,
    )
    outer.capture(False)
    active[0] = True
    eager = mode == "eager"
    assert _ended(lambda: _run(outer, eager=eager).output.tolist()) == [[220.0, 220.0]]
    assert bool(done) == (eager or place == "before_step")
    if call != "close":
        assert _ended(lambda: _run(inner).output.tolist()) == [[22.0, 22.0]]


@pytest.mark.parametrize("call", sorted(_CALLS))
@pytest.mark.parametrize("place", ["forward", "barrier"])
@pytest.mark.parametrize("shared", [True, False])
def test_another_runner_from_inside_a_capture(make: Make, call: str, place: str, shared: bool) -> None:
    device = _device()
    inner, _ = make(device=device if shared else _device(), buckets=[1])
    inner.capture(False)
    errors: list[BaseException] = []

    def nested() -> None:
        try:
            _CALLS[call](inner)
        except ReentrantCall as error:
            errors.append(error)

    def forward(step: StepInputs) -> torch.Tensor:
        if place == "forward":
            nested()
        return _forward(step)

    outer, _ = make(
        device=device, buckets=[1], forward=forward, barrier=lambda: nested() if place == "barrier" else None
    )
    _ended(lambda: outer.capture(False))
    assert errors and "bucket 1 on cpu" in str(errors[0])
    assert _ended(lambda: (_run(inner).output + _run(outer).output).tolist()) == [[44.0, 44.0]]


def test_a_draft_runner_is_used_by_its_own_thread_too(make: Make) -> None:
    """The thread inside before_step waits for the draft runner, whose thread waits for the device."""
    device = _device()
    draft, _ = make(device=device, buckets=[1], fence_timeout=20.0)
    target, _ = make(device=device, buckets=[1], fence_timeout=20.0, before_step=lambda step: _run(draft, 3.0))
    draft.capture(False)
    target.capture(False)
    device.hook = lambda event: time.sleep(0.001) if event in ("copy", "update") else None
    wrong: list[object] = []

    def work(runner: DecodeRunner, base: float) -> None:
        try:
            for _ in range(40):
                got = _run(runner, base, clone=True).output.tolist()
                if got != [[2 * (base + 10)] * 2]:
                    wrong.append(got)
        except BaseException as error:
            wrong.append(error)

    threads = [
        threading.Thread(target=work, args=(runner, base), daemon=True)
        for runner, base in ((draft, 5.0), (target, 7.0), (draft, 6.0))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("call", sorted(_CALLS))
@pytest.mark.parametrize("other", ["same runner", "same device"])
def test_waiting_for_another_thread_ends_with_a_diagnosis(make: Make, call: str, other: str) -> None:
    device = _device()
    hold, reached = threading.Event(), threading.Event()

    def slow(step: StepInputs) -> None:
        reached.set()
        hold.wait(20)

    first, _ = make(device=device, buckets=[1], before_step=slow)
    waiting, _ = make(device=device, buckets=[1], fence_timeout=0.05) if other == "same device" else (first, device)
    first.capture(False)
    if waiting is not first and call != "capture":
        waiting.capture(False)
    first._fence_timeout = 0.05
    thread = threading.Thread(target=lambda: _run(first), daemon=True, name="the slow one")
    thread.start()
    assert reached.wait(20)
    device.events.clear()
    try:
        if call == "capture" and waiting is not first:
            report = _ended(lambda: waiting.capture(False))
            assert isinstance(report, GraphError) and "the slow one" in str(report)
        else:
            error = _ended(lambda: _CALLS[call](waiting))
            assert isinstance(error, FenceTimeout)
            assert "the slow one" in str(error) and "slow" in str(error) and "run()" in str(error)
        assert "copy" not in device.events and "replay" not in device.events
    finally:
        hold.set()
        thread.join(20)
    assert not thread.is_alive()


class _Interrupt(BaseException):
    pass


@contextmanager
def _interrupted(runner: DecodeRunner, kind: type[BaseException], moment: str) -> Iterator[None]:
    """Raises on the runner's thread where a signal handler would: while the update runs, or after it has ended."""
    worker = runner._worker
    original = worker.run

    def late(call: Callable[[], object], options: dict[str, Any]) -> None:
        with suppress(GraphError):  # nobody waits for it any more; the graph may be out of use by then
            original(call, **options)

    def run(call: Callable[[], object], **options: Any) -> None:
        if moment == "after":
            original(call, **options)
        elif moment == "during":
            threading.Thread(target=late, args=(call, options), daemon=True).start()
        raise kind("stop")

    worker.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        worker.run = original  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, _Interrupt, SystemExit, OSError, TimeoutError])
@pytest.mark.parametrize("moment", ["before", "during", "after"])
@pytest.mark.parametrize("buckets", [[1], [1, 2, 4]])
def test_an_interrupt_while_an_update_runs(
    make: Make, kind: type[BaseException], moment: str, buckets: list[int]
) -> None:
    runner, device = make(buckets=buckets)
    runner.capture(False)
    device.hook = lambda event: time.sleep(0.02) if event == "update" else None
    device.events.clear()
    with _interrupted(runner, kind, moment), pytest.raises((kind, GraphError)):
        _run(runner)
    assert "replay" not in device.events
    for _ in range(3):
        result = _run(runner)
        assert result.output.tolist() == [[22.0, 22.0]]
        assert result.bucket == (2 if len(buckets) > 1 else None)
    assert "stop" in runner.can_run(1).detail
    assert runner.capture(False).captured == tuple(buckets)
    assert _run(runner).bucket == 1


def test_an_interrupt_in_a_callback_leaves_the_runner_usable(make: Make) -> None:
    active = [False]

    def before(step: StepInputs) -> None:
        if active[0]:
            raise KeyboardInterrupt

    runner, device = make(before_step=before)
    runner.capture(False)
    active[0] = True
    with pytest.raises(KeyboardInterrupt):
        _run(runner)
    active[0] = False
    assert not device.gate.lock.mine
    assert _ended(lambda: _run(runner).bucket) == 1


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "tuple", "static view"])
def test_a_clone_is_kept_and_a_view_is_overwritten(make: Make, eager: bool, kind: str) -> None:
    def forward(step: StepInputs) -> Any:
        if kind == "static view":
            torch.ops.graph_test.scale(step.tensors["x"], step.host["kv"])
            return step.tensors["x"]
        out = _forward(step)
        return out if kind == "tensor" else (out, None, out + 1)

    runner, _ = make(forward=forward)
    runner.capture(False)

    def flat(value: Any) -> list[Any]:
        return [None if item is None else item.tolist() for item in (value if isinstance(value, tuple) else (value,))]

    kept = _run(runner, 1.0, 2, clone=True, eager=eager).output
    view = _run(runner, 1.0, 2, eager=eager).output
    before = flat(kept)
    assert before == flat(view) and len(before[0]) == 2
    _run(runner, 5.0, 2, eager=eager)
    assert flat(kept) == before
    assert (flat(view) != before) == (not eager or kind == "static view")


def test_clones_of_threads_that_share_a_runner(make: Make) -> None:
    runner, _ = make()
    runner.capture(False)
    wrong: list[object] = []

    def work(base: float) -> None:
        for turn in range(60):
            output = _run(runner, base, 1 + turn % 4, clone=True).output
            time.sleep(0)
            if not output.eq(2 * (base + 10)).all():
                wrong.append(output)

    threads = [threading.Thread(target=work, args=(float(base),)) for base in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_thread_that_holds_a_device_may_hold_it_again() -> None:
    device: GraphDevice = _device()
    with device.gate.lock.hold(1.0, "a test"), device.gate.lock.hold(1.0, "the same thread"):
        assert device.gate.lock.mine
    assert not device.gate.lock.mine
