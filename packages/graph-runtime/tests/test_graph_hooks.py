"""Places around a runner's work: inside the graph, after a warm-up, ranges, a memory saver; and memory of captures."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from graph_runtime import DecodeRunner, StaticBuffers, get_device
from graph_runtime.errors import AddressChanged, RunnerPaused
from graph_runtime.hooks import Hooks
from kv_planner import RowField, RowLayout

Make = Callable[..., tuple[DecodeRunner, Any]]
ROW = {"x": torch.ones(1, 2), "seq_lens": [1]}


def test_metadata_outside_inside_and_after_warm_ups(make: Make) -> None:
    """The naive place for device metadata, before the capture, leaves that of capture time in the graph."""
    lens = torch.zeros(4, dtype=torch.int64)
    cache = torch.zeros(1)
    order: list[str] = []

    def inside(step: Any) -> None:
        order.append("inside")
        lens[: step.bs].copy_(step.tensors["seq_lens"] * 10)

    def forward(step: Any) -> torch.Tensor:
        cache.add_(1)
        scaled: torch.Tensor = torch.ops.graph_test.scale(step.tensors["x"], step.host["kv"])
        return scaled + lens[: step.bs, None]

    def undo(step: Any) -> None:
        order.append("undo")
        cache.zero_()

    hooks = Hooks(inside=inside, after_warmup=undo)
    runner, _ = make(
        forward=forward, hooks=hooks, buckets=[1], warmups=2, before_step=lambda step: order.append("outside")
    )
    runner.capture(progress=False)
    assert order == ["inside", "undo", "inside", "undo", "inside"]
    assert cache.item() == 1  # the CPU computes at capture; both warm-ups were undone
    order.clear()
    for length in (3, 5):
        got = runner.run({"x": torch.ones(1, 2), "seq_lens": [length]}, {"kv": [2]}, 1, clone=True)
        assert got.output.tolist() == [[2.0 + 10 * length] * 2]
    assert order == ["outside", "outside"]
    naive, _ = make(forward=lambda step: forward(step), buckets=[1])
    lens.fill_(0)
    naive.capture(progress=False)
    stale = naive.run({"x": torch.ones(1, 2), "seq_lens": [5]}, {"kv": [2]}, 1)
    assert stale.output.tolist() != [[52.0, 52.0]]


def test_ranges_for_a_profiler(make: Make) -> None:
    seen: list[str] = []

    @contextmanager
    def profile(name: str) -> Iterator[None]:
        seen.append(name)
        yield
        seen.append(f"/{name}")

    runner, _ = make(hooks=Hooks(profile=profile), buckets=[1], before_step=lambda step: None)
    runner.capture(progress=False)
    assert seen == ["capture", "/capture"]
    seen.clear()
    runner.run(ROW, {"kv": [1]}, 1)
    assert [name for name in seen if name[0] != "/"] == ["load", "before_step", "update", "replay"]
    assert all(seen[2 * i + 1] == f"/{seen[2 * i]}" for i in range(4))
    seen.clear()
    runner.run(ROW, {"kv": [1]}, 1, eager=True)
    assert seen == ["load", "/load", "before_step", "/before_step", "eager", "/eager"]


class Saver:
    """Takes memory away: it overwrites what was there."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lost: list[torch.Tensor] = []

    @contextmanager
    def region(self) -> Iterator[None]:
        self.calls.append("region")
        yield

    def pause(self) -> None:
        self.calls.append("pause")
        for tensor in self.lost:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 99)

    def resume(self) -> None:
        self.calls.append("resume")


def test_a_memory_saver_pauses_and_resumes(make: Make) -> None:
    saver = Saver()
    runner, device = make(hooks=Hooks(memory=saver), buckets=[2])
    runner.capture(progress=False)
    right = runner.run(ROW, {"kv": [3]}, 1, clone=True).output
    saver.lost = [runner._buffers.view(name) for name in ("x", "seq_lens")]
    runner.pause()
    device.events.clear()
    for call in (lambda: runner.run(ROW, {"kv": [3]}, 1), runner.capture, runner.pause):
        with pytest.raises(RunnerPaused, match="resume"):
            call()
    assert device.events == []
    runner.resume()
    runner.resume()
    assert saver.calls == ["region", "pause", "resume"]
    assert runner._buffers.view("seq_lens").tolist() == [1] * 4  # every row has its fill again
    assert torch.equal(runner.run(ROW, {"kv": [3]}, 1).output, right)


def test_memory_that_comes_back_elsewhere(make: Make) -> None:
    runner, _ = make(buckets=[1])
    runner.capture(progress=False)
    runner.pause()
    view = runner._buffers._views["x"]
    runner._buffers._views["x"] = view.clone()
    with pytest.raises(AddressChanged):
        runner.resume()
    with pytest.raises(RunnerPaused):
        runner.run(ROW, {"kv": [1]}, 1)
    runner._buffers._views["x"] = view
    runner.resume()
    assert runner.run(ROW, {"kv": [1]}, 1).mode == "graph"
    runner.pause()
    runner.close()  # a paused runner can be closed


def _layers(make: Make, run: range, weights: list[torch.Tensor | None]) -> DecodeRunner:
    device = get_device("cpu")
    layout = RowLayout([RowField("x", "float32", rows=4, width=64)])

    def forward(step: Any) -> torch.Tensor:
        x: torch.Tensor = step.tensors["x"]
        for layer in run:
            weight = weights[layer]
            assert weight is not None
            x = torch.tanh(x @ weight)
        return x

    runner, _ = make(device=device, forward=forward, buffers=StaticBuffers(layout, device), update=None)
    return runner


def test_capturing_one_layer_holds_one_layers_memory(make: Make) -> None:
    """The report shows it, and the memory of other layers is free to go."""
    arrays = [np.random.default_rng(layer).standard_normal((64, 64), dtype=np.float32) for layer in range(4)]
    refs = [weakref.ref(array) for array in arrays]  # alive as long as the memory is
    weights: list[torch.Tensor | None] = [torch.from_numpy(array) for array in arrays]
    del arrays
    every = _layers(make, range(4), weights)
    whole = every.capture(progress=False).memory
    one = _layers(make, range(1, 2), weights)
    held = one.capture(progress=False).memory
    assert set(held) == {1, 2, 4} and held[4] == 2 * 4 * 64 * 4  # a product and its tanh of 4 rows of float32
    assert whole == {bucket: 4 * size for bucket, size in held.items()}
    for layer in (0, 2, 3):
        weights[layer] = None
    gc.collect()
    assert all(ref() is not None for ref in refs)  # the graph of all layers holds them
    every.close()
    gc.collect()
    assert [ref() is None for ref in refs] == [True, False, True, True]
    x, kept = torch.ones(2, 64), weights[1]
    assert kept is not None and torch.equal(one.run({"x": x}, None, 2).output, torch.tanh(x @ kept))


def test_memory_is_given_back(make: Make) -> None:
    runner = _layers(make, range(1), [torch.randn(64, 64)])
    device: Any = runner._device
    runner.capture(progress=False)
    assert device.memory_held() > 0
    runner.close()
    assert device.memory_held() == 0
