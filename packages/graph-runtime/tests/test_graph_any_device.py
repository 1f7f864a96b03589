"""What holds on every device that takes no host lists: the CPU always, CUDA where there is one (see the header)."""

from __future__ import annotations

import pytest
import torch
from graph_runtime import DecodeRunner, StaticBuffers, StepInputs, UpdateSpec, get_device
from graph_runtime.errors import CaptureFailed, UnknownDevice, UnknownUpdateKey
from kv_planner import RowField, RowLayout


def _runner(kind: str, **changes: object) -> DecodeRunner:
    device = get_device(kind)
    layout = RowLayout([RowField("x", "float32", rows=4, width=8), RowField("lens", "int64", rows=4)])
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).to(device.torch_device)

    def forward(step: StepInputs) -> torch.Tensor:
        return torch.tanh(step.tensors["x"] @ weight) * step.tensors["lens"][:, None]

    arguments: dict[str, object] = {"forward": forward, "buffers": StaticBuffers(layout, device), "buckets": [1, 2, 4]}
    return DecodeRunner(device=device, **{**arguments, **changes})  # type: ignore[arg-type]


def test_replay_equals_eager_in_any_order(any_device: str) -> None:
    runner = _runner(any_device)
    report = runner.capture(progress=False)
    assert report.captured == (1, 2, 4) and all(size >= 0 for size in report.memory.values())
    generator = torch.Generator().manual_seed(2)
    for rows in (4, 1, 3, 0, 2, 4, 1):
        values = {"x": torch.randn(rows, 8, generator=generator), "lens": list(range(1, rows + 1))}
        replayed = runner.run(values, raw_bs=rows, clone=True)
        eager = runner.run(values, raw_bs=rows, eager=True)
        assert replayed.mode == "graph" and eager.mode == "eager"
        torch.testing.assert_close(replayed.output, eager.output)
    runner.close()


def test_keys_are_refused_where_no_op_takes_them(any_device: str) -> None:
    runner = _runner(any_device, update=UpdateSpec({"kv": "lens"}))
    with pytest.raises(UnknownUpdateKey):
        runner.capture(progress=False)
    runner.close()


def test_a_host_read_is_refused_at_capture(any_device: str) -> None:
    def forward(step: StepInputs) -> torch.Tensor:
        x = step.tensors["x"]
        return x * float(x.sum())

    runner = _runner(any_device, forward=forward)
    with pytest.raises(CaptureFailed, match="CaptureRefused"):
        runner.capture(progress=False)
    values = {"x": torch.ones(1, 8), "lens": [1]}
    assert runner.run(values, raw_bs=1).reason == "capture_failed"
    runner.close()


@pytest.mark.parametrize("name", ["cuda:x", "cuda:4096"])
def test_names_of_no_cuda_device(name: str) -> None:
    with pytest.raises(UnknownDevice):
        get_device(name)
