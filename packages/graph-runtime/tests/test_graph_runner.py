"""The decode runner: order of a step, graph or eager with a reason, errors before launch, release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from graph_runtime import Buckets, DecodeRunner, StaticBuffers, StepInputs, UpdateSpec, get_device
from graph_runtime.devices.cpu import CpuDevice
from graph_runtime.errors import (
    BatchTooLarge,
    BucketError,
    DeviceMismatch,
    HostListError,
    OutputShapeError,
    RowCountError,
    RowDtypeError,
    UncoveredKey,
    UnknownUpdateKey,
    UnwrittenRows,
)
from graph_runtime.testing import RecordingDevice
from kv_planner import RowField, RowLayout

Make = Callable[..., tuple[DecodeRunner, RecordingDevice]]


def _forward(step: StepInputs) -> torch.Tensor:
    x = step.tensors["x"] + step.tensors["seq_lens"][:, None]
    scaled: torch.Tensor = torch.ops.graph_test.scale(x, step.host["kv"])
    return scaled


def _layout(rows: int = 4) -> RowLayout:
    return RowLayout([RowField("x", "float32", rows=rows, width=2), RowField("seq_lens", "int64", rows=rows, fill=1)])


def _values(n: int, base: float = 1.0) -> dict[str, Any]:
    return {"x": torch.full((n, 2), float(base)), "seq_lens": list(range(10, 10 + n))}


def _expect(n: int, kv: list[int], base: float = 1.0) -> list[list[float]]:
    return [[(base + 10 + i) * kv[i]] * 2 for i in range(n)]


def test_order_of_a_step(make: Make) -> None:
    """E16: the update of a replay comes after the wait for the one before and ends before the replay."""
    runner, device = make()
    runner.capture()
    runner.run(_values(1), {"kv": [1]}, 1)
    device.events.clear()
    runner.run(_values(3), {"kv": [1, 2, 3]}, 3)
    core = [event for event in device.events if event not in {"bind"}]
    assert core == ["wait", "wait", "copy", "fence", "update", "updated", "replay", "fence"]
    # first wait: the previous step; second: the copy of the load before it


def test_capture_order_warm_ups_and_barriers(make: Make) -> None:
    seen: list[tuple[str, int]] = []

    def forward(step: StepInputs) -> torch.Tensor:
        seen.append(("forward", step.bs))
        assert step.raw_bs == 0 and step.host["kv"] == [0] * step.bs
        return _forward(step)

    runner, device = make(forward=forward, barrier=lambda: seen.append(("barrier", 0)))
    report = runner.capture(progress=False)
    assert report.captured == (1, 2, 4) and not report.failed and report.updatable_ops == {1: 1, 2: 1, 4: 1}
    one = [("barrier", 0), ("forward", 4), ("barrier", 0), ("forward", 4), ("barrier", 0), ("forward", 4)]
    assert seen[:6] == one and [bs for what, bs in seen if what == "forward"] == [4] * 3 + [2] * 3 + [1] * 3
    assert device.events.count("capture") == 3 and device.events.count("synchronize") == 9
    assert runner.capture().captured == (1, 2, 4)  # nothing left to capture
    assert device.events.count("capture") == 3


def test_graph_and_eager_agree_and_say_so(make: Make) -> None:
    runner, _ = make()
    assert runner.can_run(2).reason == "not_captured"
    early = runner.run(_values(2), {"kv": [3, 4]}, 2)
    assert (early.mode, early.bucket, early.reason) == ("eager", None, "not_captured")
    runner.capture()
    for n in (4, 2, 1, 3, 0, 4):
        kv = [2 + i for i in range(n)]
        graph = runner.run(_values(n), {"kv": kv}, n)
        assert graph.mode == "graph" and graph.bucket == Buckets([1, 2, 4]).pick(n) and graph.reason is None
        assert graph.output.tolist() == _expect(n, kv)
        eager = runner.run(_values(n), {"kv": kv}, n, eager=True)
        assert (eager.mode, eager.reason) == ("eager", "forced") and eager.output.tolist() == _expect(n, kv)
    assert runner.counters.graph_replays == 6 and runner.counters.eager_steps == {"not_captured": 1, "forced": 6}
    assert runner.counters.padded_rows == 2


def test_more_rows_than_the_largest_bucket(make: Make) -> None:
    device = RecordingDevice(get_device("cpu", updatable={"graph_test::scale": ("lens",)}))
    runner, _ = make(device=device, buffers=StaticBuffers(_layout(6), device))
    runner.capture()
    decision = runner.can_run(5)
    assert decision.bucket is None and decision.reason == "no_bucket" and "5 rows" in decision.detail
    result = runner.run(_values(5), {"kv": [1] * 5}, 5)
    assert result.reason == "no_bucket" and result.output.tolist() == _expect(5, [1] * 5)
    with pytest.raises(BatchTooLarge):
        runner.run(_values(7), {"kv": [1] * 7}, 7)
    with pytest.raises(BucketError):
        make(buckets=[1, 8])
    for eager in (False, True):
        with pytest.raises(BucketError):
            runner.run({}, {"kv": []}, -1, eager=eager)


def test_idle_step_replays_the_captured_shape(make: Make) -> None:
    """E18: no row, no reduction over an empty list, and still the captured shape."""
    runner, device = make()
    runner.capture()
    device.events.clear()
    result = runner.run({}, {"kv": []}, 0)
    assert (result.mode, result.bucket) == ("graph", 1) and tuple(result.output.shape) == (0, 2)
    assert "replay" in device.events
    idle = runner.run({}, {"kv": []}, 0, eager=True)
    assert tuple(idle.output.shape) == (0, 2)


def test_padded_rows_get_fill_and_length_zero(make: Make) -> None:
    """E02: [10, 11] is [10, 11, 1, 1] on the device during the step; the caller's list never changes."""
    sums: list[int] = []
    fail = [False]

    def look(step: StepInputs) -> None:
        sums.append(int(step.tensors["seq_lens"].sum()))
        if fail[0]:
            raise OSError("planned")

    runner, _ = make(before_step=look, buckets=Buckets([4]))
    runner.capture()
    lens, kv = [10, 11], [5, 6]
    runner.run({"x": torch.ones(2, 2), "seq_lens": lens}, {"kv": kv}, 2)
    fail[0] = True
    with pytest.raises(OSError, match="planned"):
        runner.run({"x": torch.ones(2, 2), "seq_lens": lens}, {"kv": kv}, 2)
    fail[0] = False
    assert sums == [23, 23] and sum(lens) == 21 and kv == [5, 6]
    again = runner.run({"x": torch.ones(2, 2), "seq_lens": lens}, {"kv": kv}, 2)
    assert again.output.tolist() == [[55.0, 55.0], [72.0, 72.0]]


def test_inputs_are_not_changed_and_twice_gives_the_same(make: Make) -> None:
    """E12: nobody adds a window to lengths that are given; host arrays stay as they are."""
    runner, _ = make()
    runner.capture()
    kv = np.array([116, 23], dtype=np.int32)
    values = {"x": torch.zeros(2, 2), "seq_lens": np.array([0, 0], dtype=np.int64)}
    outputs = [runner.run(values, {"kv": kv}, 2).output.tolist() for _ in range(2)]
    values["x"] = torch.ones(2, 2)
    third = runner.run(values, {"kv": kv}, 2).output.tolist()
    assert outputs[0] == outputs[1] == [[0.0, 0.0]] * 2 and third == [[116.0, 116.0], [23.0, 23.0]]
    assert kv.tolist() == [116, 23]


@pytest.mark.parametrize(
    ("host", "word"),
    [
        ({}, "old lengths"),
        ({"kv": [1, 2], "q": [1, 1]}, "baked"),
        ({"kv": [1]}, "2 lengths"),
        ({"kv": [1, 2, 3]}, "2 lengths"),
        ({"kv": [1, -2]}, "Clamp"),
        ({"kv": [1, 2.5]}, "host sequence of ints"),
    ],
)
def test_host_lists_are_checked_before_anything_happens(make: Make, host: dict[str, Any], word: str) -> None:
    """E04, E19: a missing, surplus, short or negative length is an error before launch."""
    runner, device = make()
    runner.capture()
    device.events.clear()
    with pytest.raises(HostListError, match=word):
        runner.run(_values(2), host, 2)
    assert device.events == []
    assert runner.run(_values(2), {"kv": [1, 2]}, 2).output.tolist() == _expect(2, [1, 2])


def test_values_are_checked_before_anything_happens(make: Make) -> None:
    runner, device = make()
    runner.capture()
    device.events.clear()
    with pytest.raises(RowDtypeError):
        runner.run({**_values(2), "seq_lens": [0.5, 1.0]}, {"kv": [1, 2]}, 2)
    with pytest.raises(RowCountError):
        runner.run(_values(3), {"kv": [1, 2]}, 2)
    assert device.events == []


@pytest.mark.parametrize(
    ("update", "error"),
    [(UpdateSpec({"kv_lens": "kv"}), UnknownUpdateKey), (UpdateSpec(constant=["other"]), UncoveredKey)],
)
def test_an_update_that_does_not_fit_is_an_error_at_capture(make: Make, update: UpdateSpec, error: type) -> None:
    runner, _ = make(update=update, forward=lambda step: torch.ops.graph_test.scale(step.tensors["x"], [1] * step.bs))
    with pytest.raises(error):
        runner.capture()
    assert runner.can_run(1).reason == "not_captured"


@pytest.mark.parametrize("cut", [lambda x, step: x.sum(), lambda x, step: x[: step.raw_bs], lambda x, step: [x, 3]])
def test_outputs_that_cannot_be_cut(make: Make, cut: Callable[[torch.Tensor, StepInputs], Any]) -> None:
    runner, _ = make(forward=lambda step: cut(_forward(step), step))
    with pytest.raises(OutputShapeError):
        runner.capture()
    assert runner.can_run(4).reason == "not_captured"


def test_windows_of_tokens_and_fields_without_rows(make: Make) -> None:
    device = get_device("cpu", updatable={"graph_test::scale": ("lens",)})
    layout = RowLayout(
        [
            RowField("tokens", "float32", rows=12, fill=-1),
            RowField("base", "float32", rows=2, fill=0),
            RowField("bias", "float32", rows=3, fill=0),
        ]
    )

    def forward(step: StepInputs) -> tuple[torch.Tensor, torch.Tensor, None]:
        assert step.tensors["bias"].shape == (3,)
        tokens = step.tensors["tokens"].reshape(step.bs, 3) + step.tensors["bias"]
        scaled = torch.ops.graph_test.scale(tokens, step.host["kv"])
        return scaled.reshape(-1), scaled.sum(-1) + step.tensors["base"].sum(), None

    runner, _ = make(
        device=device,
        forward=forward,
        buffers=StaticBuffers(layout, device),
        rows_per_request={"tokens": 3, "base": 0, "bias": 0},
        output_rows_per_request=(3, 1, 1),
    )
    runner.capture()
    assert runner.capacity == 4
    values = {"tokens": [1.0, 2, 3, 4, 5, 6, 7, 8, 9], "base": [1.0, 1.0], "bias": [0.0, 1.0, 0.0]}
    result = runner.run(values, {"kv": [1, 2, 0]}, 3)
    assert result.bucket == 4
    flat, sums, nothing = result.output
    assert flat.tolist() == [1, 3, 3, 8, 12, 12, 0, 0, 0] and sums.tolist() == [9.0, 34.0, 2.0] and nothing is None


def test_device_written_fields_are_checked_in_poison_mode(make: Make) -> None:
    device = get_device("cpu", updatable={"graph_test::scale": ("lens",)})
    rows = [3]
    runner, _ = make(
        device=device,
        buffers=StaticBuffers(_layout(), device, device_written=["x"], poison=True),
        before_step=lambda step: step.tensors["x"][: rows[0]].fill_(2.0),
    )
    runner.capture()
    ids = {"seq_lens": [10, 11, 12]}
    assert runner.run(ids, {"kv": [1, 1, 1]}, 3).output.tolist() == _expect(3, [1, 1, 1], 2.0)
    rows[0] = 2
    with pytest.raises(UnwrittenRows, match="x"):
        runner.run(ids, {"kv": [1, 1, 1]}, 3)


def test_a_forward_without_updatable_ops(make: Make) -> None:
    runner, device = make(forward=lambda step: step.tensors["x"] * 2, update=None)
    runner.capture()
    device.events.clear()
    assert runner.run(_values(3), None, 3).output.tolist() == [[2.0, 2.0]] * 3
    assert "update" not in device.events and "bind" not in device.events
    with pytest.raises(HostListError, match="baked"):
        runner.run(_values(3), {"kv": [1, 2, 3]}, 3)


def test_buffers_of_another_device(make: Make) -> None:
    class Elsewhere(CpuDevice):
        @property
        def torch_device(self) -> torch.device:
            return torch.device("cpu", 1)

    with pytest.raises(DeviceMismatch, match="another device"):
        make(device=Elsewhere(), buffers=StaticBuffers(_layout(), get_device("cpu")))
