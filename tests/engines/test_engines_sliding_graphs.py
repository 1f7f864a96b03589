"""Both layers of a hybrid model from NPUCudaGraphBackend's graphs against a float64 loop: decode and verify.

The graph holds one layer; its window is a band of FIA v2, whose host lengths come in by updates.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines_attention import verify_input
from engines_sliding import FULL, KV_HEADS, NPU, PAGE, Q_HEADS, SLIDING, WINDOW, SlidingWorld
from sglang.srt.hardware_backend.npu.attention import ascend_backend
from sglang.srt.hardware_backend.npu.graph_runner.npu_cudagraph_backend import NPUCudaGraphBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel

KEY = "actual_seq_kvlen"  # of FIA v2, which hybrid models capture
LENGTHS = [3, WINDOW - 1, PAGE - 2, 2 * PAGE + 5]
BOUND = 1.5e-2


class Graphs:
    """Static buffers of one bucket, filled as SGLang's runner fills them, and a graph of one layer over them."""

    def __init__(self, world: SlidingWorld, layer: int, bucket: int, width: int, sinks: torch.Tensor | None) -> None:
        self.world, self.layer, self.bucket, self.width = world, layer, bucket, width
        self.sinks = sinks
        self.device_sinks = None if sinks is None else sinks.to(NPU)  # the graph reads it at every replay
        self.mode = ForwardMode.DECODE if width == 1 else ForwardMode.TARGET_VERIFY
        with get_parallel().override(tp_group=SimpleNamespace(barrier=lambda: None)):
            self.graphs: Any = NPUCudaGraphBackend(SimpleNamespace(device_module=torch.get_device_module("npu")))
        tokens = bucket * width
        heads = {"query": Q_HEADS, "key": KV_HEADS, "value": KV_HEADS}
        self.rows = {
            name: torch.zeros(tokens, count, world.dims, dtype=torch.bfloat16, device=NPU)
            for name, count in heads.items()
        }
        self.slots = torch.zeros(tokens, dtype=torch.int64, device=NPU)
        self.lens = torch.zeros(bucket, dtype=torch.int64, device=NPU)
        self.requests = torch.zeros(bucket, dtype=torch.int64, device=NPU)
        world.backend.init_cuda_graph_state(bucket, tokens)
        self._capture()

    def _batch(self) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=self.mode, batch_size=self.bucket, input_ids=self.slots, seq_lens=self.lens,
            req_pool_indices=self.requests, out_cache_loc=self.slots, seq_lens_sum=0, seq_lens_cpu=self.lens.cpu(),
            spec_info=None if self.width == 1 else verify_input(self.width),
        )  # fmt: skip

    def _capture(self) -> None:
        batch, backend = self._batch(), self.world.backend
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        call = backend.forward_decode if self.width == 1 else backend.forward_extend
        with self.graphs.capture_session(torch.get_device_module("npu").Stream()):
            self.graphs.capture_one(
                self.bucket,
                lambda: call(*self.rows.values(), self.world.layers[self.layer], batch, sinks=self.device_sinks),
            )

    def step(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A step of the first `count` requests: (what the graph gives, what the formula gives); they grow by it."""
        world, news = self.world, [self.width] * count
        tokens, pad = count * self.width, self.bucket - count
        query = world.random(tokens, Q_HEADS, world.dims)
        for buffer, rows in zip(self.rows.values(), (query, *world.fresh(self.layer, news)), strict=True):
            buffer[:tokens].copy_(rows)
        expected = world.expected(self.layer, query, news, sinks=self.sinks)
        self.slots.copy_(torch.cat([world.slots(news), self.slots.new_zeros(pad * self.width)]))
        ends = [length + self.width for length in world.lengths[:count]]
        before = ends if self.width == 1 else world.lengths[:count]
        self.lens.copy_(torch.tensor([*before, *[0] * pad]))
        self.requests.copy_(torch.tensor([*range(1, count + 1), *[0] * pad]))
        world.backend.init_forward_metadata_out_graph(self._batch())
        updated = [*ends, *[0 if self.width == 1 else self.width] * pad]
        found = self.graphs.replay_with_input_update(self.bucket, seq_lens=updated, attr_name=KEY, attr_type=[])
        world.lengths[:count] = ends
        return found[:tokens].cpu().view(query.shape).double(), expected


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("layer", [FULL, SLIDING], ids=["full", "sliding"])
def test_replays(monkeypatch: pytest.MonkeyPatch, layer: int, width: int, with_sinks: bool) -> None:
    """Random batch sizes in one bucket; lengths cross the window and page edges."""
    monkeypatch.setenv("ASCEND_USE_FIA", "1")
    spec = SimpleNamespace(speculative_num_draft_tokens=None if width == 1 else width)
    monkeypatch.setattr(ascend_backend, "get_spec", lambda: spec)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16) if with_sinks else None
    graphs, draw = Graphs(SlidingWorld(list(LENGTHS)), layer, 4, width, sinks), random.Random(3)
    for _ in range(4):
        found, expected = graphs.step(draw.randint(1, 4))
        torch.testing.assert_close(found, expected, atol=BOUND, rtol=BOUND)
    graphs.graphs.cleanup()
