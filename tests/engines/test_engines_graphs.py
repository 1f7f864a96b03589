"""NPUCudaGraphBackend on the emulated NPU beside our runner: results, order of update and replay, and wrong keys."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ascend_emulator
import pytest
import torch
import torch_npu
from ascend_emulator import DeadlockError
from engines_attention import PAGE, World
from engines_graphs import KEY, Step, TheirGraphs, our_runner, ours
from graph_runtime import get_device
from graph_runtime.errors import UnknownUpdateKey
from graph_runtime.testing import RecordingDevice
from sglang.srt.hardware_backend.npu.attention import ascend_backend

LENGTHS = [1, PAGE - 2, PAGE, 2 * PAGE - 1]


@pytest.fixture(autouse=True)
def no_speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_backend, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=None))
    monkeypatch.setenv("ASCEND_USE_FIA", "1")


def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1.5e-2, rtol=1.5e-2)


def test_replays_equal_ours() -> None:
    """Random batch sizes in one bucket, lengths over page edges: SGLang's graphs, our runner, our attention."""
    theirs = TheirGraphs(World(list(LENGTHS)), bucket=4)
    theirs.capture()
    world = World(list(LENGTHS))
    runner = our_runner(world, get_device("npu:0"), bucket=4)
    runner.capture(progress=False)
    draw = random.Random(1)
    for _ in range(8):
        rows = draw.randint(1, 4)
        step, same = Step(theirs.world, rows), Step(world, rows)
        found, mine = theirs.run(step), ours(runner, world, same)
        assert torch.equal(found, mine)
        compare(found, step.expected)
    runner.close()
    theirs.graphs.cleanup()
    for one, other in zip(
        theirs.world.pool.get_hicache_transfer_buffers(), world.pool.get_hicache_transfer_buffers(), strict=True
    ):
        pages = slice(1, None)  # page 0 takes the writes of padded rows
        assert torch.equal(one.cpu()[:, pages], other.cpu()[:, pages])


class Spy:
    """Hears the graph's and the fence's calls; each still happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self._wrap(monkeypatch, torch_npu.npu.NPUGraph, "update", "update", "updated")
        self._wrap(monkeypatch, torch_npu.npu.NPUGraph, "replay", "replay", None)
        self._wrap(monkeypatch, torch_npu.npu.Event, "record", "fence", None)
        self._wrap(monkeypatch, torch_npu.npu.Event, "synchronize", "wait", None)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, before: str, after: str | None) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.events.append(before)
            result = real(*args, **kwargs)
            if after is not None:
                self.events.append(after)
            return result

        monkeypatch.setattr(owner, name, call)


def test_update_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang waits for the last replay, updates on its worker while it replays, and fences; ours updates first."""
    theirs = TheirGraphs(World(list(LENGTHS)), bucket=4)
    theirs.capture()
    lens = theirs.load(Step(theirs.world, 2))
    spy = Spy(monkeypatch)
    for _ in range(2):
        theirs.graphs.replay_with_input_update(4, seq_lens=lens, attr_name=KEY, attr_type=[])
    first, second = spy.events[:4], spy.events[4:]
    assert sorted(first[:3]) == sorted(second[1:4]) == ["replay", "update", "updated"]
    assert first[3:] == ["fence"] and second[0] == "wait" and second[4:] == ["fence"]
    monkeypatch.undo()
    theirs.graphs.cleanup()

    monkeypatch.setenv("ASCEND_USE_FIA", "1")
    monkeypatch.setattr(ascend_backend, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=None))
    device = RecordingDevice(get_device("npu:0"))
    world = World(list(LENGTHS))
    runner = our_runner(world, device, bucket=4)
    runner.capture(progress=False)
    ours(runner, world, Step(world, 2))
    device.events.clear()
    ours(runner, world, Step(world, 2))
    assert [event for event in device.events if event != "copy"][-4:] == ["update", "updated", "replay", "fence"]
    assert device.events[0] == "wait"
    runner.close()


def test_a_key_of_the_other_version_changes_nothing() -> None:
    """A-24: v2's key with a v1 operator: the replay attends with the lengths of the capture, without an error."""
    theirs = TheirGraphs(World(list(LENGTHS)), bucket=4)
    theirs.capture()
    step = Step(theirs.world, 4)
    found = theirs.run(step, key="actual_seq_kvlen")
    assert not found.any()  # captured with lengths 0
    compare(theirs.run(step), step.expected)
    theirs.graphs.cleanup()
    world = World(list(LENGTHS))
    runner = our_runner(world, get_device("npu:0"), bucket=4, key="actual_seq_kvlen")
    with pytest.raises(UnknownUpdateKey, match="v1 and v2"):
        runner.capture(progress=False)


@pytest.fixture
def short_waits() -> Iterator[None]:
    ascend_emulator.install(wait_seconds=0.5)
    yield
    ascend_emulator.install(wait_seconds=10.0)


def test_a_failed_update_leaves_a_replay_in_flight(short_waits: None) -> None:
    """A-50: the error of an update comes after the replay was launched, which then waits for what never comes."""
    theirs = TheirGraphs(World(list(LENGTHS)), bucket=4)
    theirs.capture()
    lens = theirs.load(Step(theirs.world, 4))
    with pytest.raises(RuntimeError):
        theirs.graphs.replay_with_input_update(4, seq_lens=[9999, *lens[1:]], attr_name=KEY, attr_type=[])
    with pytest.raises(DeadlockError, match=r"no graph\.update"):
        torch_npu.npu.synchronize()
