"""Latent attention from NPUCudaGraphBackend's graphs against a float64 loop: decode, verify, ND, NZ, padded heads.

Lengths grow from replay to replay and come in by the update of host arguments; rows that pad a bucket write to slot 0.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines_attention import verify_input
from engines_latent import LATENT, NPU, PAGE, ROPE, LatentWorld
from sglang.srt.hardware_backend.npu.attention import ascend_backend
from sglang.srt.hardware_backend.npu.graph_runner.npu_cudagraph_backend import NPUCudaGraphBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel

KEY = "actual_seq_lengths_kv"  # of FIA v1, which both steps capture
LENGTHS = [1, PAGE - 2, PAGE, 2 * PAGE - 9]
BOUND = 1.5e-2


class Graphs:
    """Static buffers of one bucket, filled as SGLang's runner fills them, and the graph over them.

    Args:
        world: The layer and its requests.
        bucket: Rows of the graph.
        width: Tokens a request and step: 1 decodes, more verify.
    """

    def __init__(self, world: LatentWorld, bucket: int, width: int) -> None:
        self.world, self.bucket, self.width = world, bucket, width
        self.mode = ForwardMode.DECODE if width == 1 else ForwardMode.TARGET_VERIFY
        with get_parallel().override(tp_group=SimpleNamespace(barrier=lambda: None)):
            self.graphs: Any = NPUCudaGraphBackend(SimpleNamespace(device_module=torch.get_device_module("npu")))
        tokens, heads = bucket * width, world.heads
        shapes = {"query": (heads, LATENT), "query_rope": (heads, ROPE), "latent": (1, LATENT), "rope": (1, ROPE)}
        self.rows = {
            name: torch.zeros(tokens, *shape, dtype=torch.bfloat16, device=NPU) for name, shape in shapes.items()
        }
        self.slots = torch.zeros(tokens, dtype=torch.int64, device=NPU)
        self.lens = torch.zeros(bucket, dtype=torch.int64, device=NPU)
        self.requests = torch.zeros(bucket, dtype=torch.int64, device=NPU)
        world.backend.init_cuda_graph_state(bucket, tokens)

    def _batch(self) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=self.mode, batch_size=self.bucket, input_ids=self.slots, seq_lens=self.lens,
            req_pool_indices=self.requests, out_cache_loc=self.slots, seq_lens_sum=0, seq_lens_cpu=self.lens.cpu(),
            spec_info=None if self.width == 1 else verify_input(self.width),
        )  # fmt: skip

    def capture(self) -> None:
        batch, backend = self._batch(), self.world.backend
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        call = backend.forward_decode if self.width == 1 else backend.forward_extend
        with self.graphs.capture_session(torch.get_device_module("npu").Stream()):
            self.graphs.capture_one(
                self.bucket,
                lambda: call(
                    self.rows["query"], self.rows["latent"], self.rows["latent"], self.world.layer, batch,
                    q_rope=self.rows["query_rope"], k_rope=self.rows["rope"],
                ),
            )  # fmt: skip

    def step(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A step of the first `count` requests: (what the graph gives, what the formula gives); they grow by it."""
        world, news = self.world, [self.width] * count
        tokens, pad = count * self.width, self.bucket - count
        latent, rope = world.fresh(news)
        query = world.random(tokens, world.heads, LATENT)
        query_rope = world.random(tokens, world.heads, ROPE)
        given = {"query": query, "query_rope": query_rope, "latent": latent, "rope": rope}
        for name, rows in given.items():
            self.rows[name][:tokens].copy_(rows)
        expected = world.expected(query, query_rope, news)
        ends = [length + self.width for length in world.lengths[:count]]
        slots = [world.slots(row, end - self.width, end) for row, end in enumerate(ends)]
        self.slots.copy_(torch.cat([*slots, torch.zeros(pad * self.width, dtype=torch.int64)]))
        before = ends if self.width == 1 else world.lengths[:count]  # a verify step's own tokens are not counted
        self.lens.copy_(torch.tensor([*before, *[0] * pad]))
        self.requests.copy_(torch.tensor([*range(1, count + 1), *[0] * pad]))
        world.backend.init_forward_metadata_out_graph(self._batch())
        updated = [*ends, *[0 if self.width == 1 else self.width] * pad]
        found = self.graphs.replay_with_input_update(self.bucket, seq_lens=updated, attr_name=KEY, attr_type=[])
        world.lengths[:count] = ends
        return found[:tokens].cpu().view(query.shape).double(), expected


@pytest.fixture(params=["nd", "nz"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ASCEND_USE_FIA", "1")
    monkeypatch.setenv("SGLANG_USE_FIA_NZ", "1" if request.param == "nz" else "0")
    ascend_backend.is_fia_nz.cache_clear()

    def graphs(heads: int, width: int) -> Graphs:
        spec = SimpleNamespace(speculative_num_draft_tokens=None if width == 1 else width)
        monkeypatch.setattr(ascend_backend, "get_spec", lambda: spec)
        made = Graphs(LatentWorld(list(LENGTHS), heads), 4, width)
        made.capture()
        return made

    return graphs


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("heads", [16, 24])
def test_replays(make: Any, heads: int, width: int) -> None:
    """Random batch sizes in one bucket; 24 heads are padded to 32 with rows that nobody wrote."""
    graphs, draw = make(heads, width), random.Random(2)
    for _ in range(4):
        found, expected = graphs.step(draw.randint(1, 4))
        torch.testing.assert_close(found, expected, atol=BOUND, rtol=BOUND)
    graphs.graphs.cleanup()
