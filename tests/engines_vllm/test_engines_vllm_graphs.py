"""vLLM-Ascend's ACLGraphWrapper on the emulated NPU: what it captures and replays, beside the same code run eagerly."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ascend_emulator
import pytest
import torch
import torch_npu
from ascend_emulator import DeadlockError
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm_ascend.compilation import acl_graph

NPU = "npu:0"


class Step:
    """The forward context of one step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.context = SimpleNamespace(
            batch_descriptor=BatchDescriptor(1), cudagraph_runtime_mode=CUDAGraphMode.NONE, capturing=False
        )
        monkeypatch.setattr(acl_graph, "get_forward_context", lambda: self.context)
        monkeypatch.setattr(acl_graph, "_EXTRA_CTX", SimpleNamespace(is_draft_model=False))
        monkeypatch.setattr(acl_graph, "validate_cudagraph_capturing_enabled", lambda: None)

    def set(self, rows: int, mode: CUDAGraphMode) -> None:
        self.context.batch_descriptor, self.context.cudagraph_runtime_mode = BatchDescriptor(rows), mode


def test_replays_equal_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batch sizes; inputs are rewritten in place between replays; other modes run eagerly."""
    step = Step(monkeypatch)
    weight = torch.randn(4, 4).to(NPU)
    calls: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return torch.relu(x @ weight) + 1

    config: Any = SimpleNamespace(compilation_config=SimpleNamespace())
    wrapper = acl_graph.ACLGraphWrapper(forward, config, CUDAGraphMode.FULL)
    inputs = {rows: torch.zeros(rows, 4, device=NPU) for rows in (1, 3)}
    for rows, buffer in inputs.items():
        step.set(rows, CUDAGraphMode.FULL)
        wrapper(buffer)
    assert calls == [1, 3] and len(wrapper.concrete_aclgraph_entries) == 2
    for _ in range(3):
        for rows, buffer in inputs.items():
            given = torch.randn(rows, 4)
            buffer.copy_(given)
            step.set(rows, CUDAGraphMode.FULL)
            found = wrapper(buffer).cpu()
            torch.testing.assert_close(found, torch.relu(given @ weight.cpu()) + 1)
    assert calls == [1, 3]
    step.set(1, CUDAGraphMode.NONE)
    wrapper(inputs[1])
    assert calls == [1, 3, 1]


@pytest.fixture
def short_waits() -> Iterator[None]:
    ascend_emulator.install(wait_seconds=0.5)
    yield
    ascend_emulator.install(wait_seconds=10.0)


def test_a_full_graph_waits_for_the_step_before(monkeypatch: pytest.MonkeyPatch, short_waits: None) -> None:
    """The wrapper waits for its stream before it replays a full graph, so what the stream waits for must come first."""
    step = Step(monkeypatch)
    blocked, event = torch_npu.npu.Stream(), torch_npu.npu.ExternalEvent()
    x = torch.ones(2, device=NPU)
    wrapper = acl_graph.ACLGraphWrapper(lambda: x * 2, SimpleNamespace(compilation_config=None), CUDAGraphMode.FULL)
    step.set(1, CUDAGraphMode.FULL)
    wrapper()
    with torch_npu.npu.stream(blocked):
        event.wait(blocked)
        with pytest.raises(DeadlockError):
            wrapper()
        event.record(torch_npu.npu.default_stream())
    torch_npu.npu.synchronize()
    assert wrapper().cpu().tolist() == [2.0, 2.0]
