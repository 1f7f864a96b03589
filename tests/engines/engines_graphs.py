"""Decode steps of one layer from graphs: SGLang's graph backend and our runner around SGLang's attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from engines_attention import DIMS, KV_HEADS, NPU, Q_HEADS, World
from graph_runtime import Buckets, DecodeRunner, GraphDevice, StaticBuffers, StepInputs, UpdateSpec
from kv_planner import RowField, RowLayout
from sglang.srt.hardware_backend.npu.attention.ascend_backend import ForwardMetadata
from sglang.srt.hardware_backend.npu.graph_runner.npu_cudagraph_backend import NPUCudaGraphBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel

__all__ = ["KEY", "Step", "TheirGraphs", "our_runner", "ours"]

KEY = "actual_seq_lengths_kv"  # of FIA v1, which decode captures
COLUMNS = 4


class Step:
    """One step of a batch: a new token for each of the first requests. Tensors are on the CPU."""

    def __init__(self, world: World, rows: int) -> None:
        self.rows = rows
        self.query = world.rows(rows, Q_HEADS)[0]
        self.key, self.value = world.rows(rows, KV_HEADS, count=2)
        self.slots = torch.cat([world.slots(row, world.lengths[row], world.lengths[row] + 1) for row in range(rows)])
        world.mirror(self.slots, self.key, self.value)
        self.expected = world.expected(self.query, [1] * rows)
        for row in range(rows):
            world.lengths[row] += 1
        self.lens = world.lengths[:rows]


class TheirGraphs:
    """NPUCudaGraphBackend and AscendAttnBackend with static buffers for one bucket, filled as SGLang's runner does."""

    def __init__(self, world: World, bucket: int) -> None:
        self.world, self.bucket = world, bucket
        with get_parallel().override(tp_group=SimpleNamespace(barrier=lambda: None)):
            self.graphs: Any = NPUCudaGraphBackend(SimpleNamespace(device_module=torch.get_device_module("npu")))
        self.query = torch.zeros(bucket, Q_HEADS, DIMS, dtype=world.dtype, device=NPU)
        self.key = torch.zeros(bucket, KV_HEADS, DIMS, dtype=world.dtype, device=NPU)
        self.value = torch.zeros_like(self.key)
        self.slots = torch.zeros(bucket, dtype=torch.int64, device=NPU)
        self.lens = torch.zeros(bucket, dtype=torch.int64, device=NPU)
        self.requests = torch.zeros(bucket, dtype=torch.int64, device=NPU)
        world.backend.init_cuda_graph_state(bucket, bucket)

    def _batch(self) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE, batch_size=self.bucket, input_ids=self.slots, seq_lens=self.lens,
            req_pool_indices=self.requests, out_cache_loc=self.slots, seq_lens_sum=0, seq_lens_cpu=self.lens.cpu(),
        )  # fmt: skip

    def capture(self) -> None:
        batch = self._batch()
        self.world.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        stream = torch.get_device_module("npu").Stream()
        with self.graphs.capture_session(stream):
            self.graphs.capture_one(
                self.bucket,
                lambda: self.world.backend.forward_decode(self.query, self.key, self.value, self.world.layer, batch),
            )

    def load(self, step: Step) -> list[int]:
        """Copy a step into the buffers, pad it, and plan it; the lengths to update with."""
        pad = self.bucket - step.rows
        for buffer, rows in ((self.query, step.query), (self.key, step.key), (self.value, step.value)):
            buffer[: step.rows].copy_(rows)
        for buffer, numbers in (
            (self.slots, step.slots.tolist()),
            (self.lens, step.lens),
            (self.requests, list(range(1, step.rows + 1))),
        ):
            buffer.copy_(torch.tensor([*numbers, *[0] * pad]))
        self.world.backend.init_forward_metadata_out_graph(self._batch())
        return [*step.lens, *[0] * pad]

    def run(self, step: Step, *, key: str = KEY) -> torch.Tensor:
        """Shape: [rows, Q_HEADS, DIMS]; on the CPU."""
        lens = self.load(step)
        out = self.graphs.replay_with_input_update(self.bucket, seq_lens=lens, attr_name=key, attr_type=[])
        found: torch.Tensor = out[: step.rows].cpu().view(step.rows, Q_HEADS, DIMS)
        return found


def our_runner(world: World, device: GraphDevice, *, bucket: int, key: str = KEY) -> DecodeRunner:
    """Our runner, whose forward is SGLang's attention in its graph mode with our buffers as its metadata."""
    name = {torch.bfloat16: "bfloat16", torch.float16: "float16"}[world.dtype]
    layout = RowLayout(
        [
            RowField("query", name, rows=bucket, width=Q_HEADS * DIMS),  # type: ignore[arg-type]
            RowField("key", name, rows=bucket, width=KV_HEADS * DIMS),  # type: ignore[arg-type]
            RowField("value", name, rows=bucket, width=KV_HEADS * DIMS),  # type: ignore[arg-type]
            RowField("slots", "int64", rows=bucket),
            RowField("table", "int32", rows=bucket, width=COLUMNS),
        ]
    )

    def forward(step: StepInputs) -> torch.Tensor:
        world.backend.graph_mode = True
        world.backend.forward_metadata = ForwardMetadata(
            block_tables=step.tensors["table"], seq_lens_cpu_list=step.host["kv_lens"]
        )
        query, rows = step.tensors["query"], (step.bs, KV_HEADS, DIMS)
        key, value = step.tensors["key"].view(rows), step.tensors["value"].view(rows)
        batch = SimpleNamespace(out_cache_loc=step.tensors["slots"])
        found: torch.Tensor = world.backend.forward_decode(query, key, value, world.layer, batch)
        return found

    return DecodeRunner(
        device=device, forward=forward, buffers=StaticBuffers(layout, device), buckets=Buckets([bucket]),
        update=UpdateSpec({key: "kv_lens"}),
    )  # fmt: skip


def ours(runner: DecodeRunner, world: World, step: Step) -> torch.Tensor:
    """Shape: [rows, Q_HEADS, DIMS]; on the CPU."""
    tables = [[*world.pages[row], *[0] * (COLUMNS - len(world.pages[row]))] for row in range(step.rows)]
    values = {
        "query": step.query.view(step.rows, -1), "key": step.key.view(step.rows, -1),
        "value": step.value.view(step.rows, -1), "slots": step.slots, "table": tables,
    }  # fmt: skip
    output: torch.Tensor = runner.run(values, {"kv_lens": step.lens}, step.rows).output
    return output.cpu().view(step.rows, Q_HEADS, DIMS)
