"""SGLang's NPU runners of drafts over its graph backend: which lengths they bind to which step, against ours.

Their own methods run here, `_replay_graph` and the multi-step attention backend, over graphs of one attention layer.
What is left out is their parents' construction and `execute`, which need a loaded draft model and a server's options.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ascend_emulator
import pytest
import torch
import torch_npu
from ascend_emulator import DeadlockError
from ascend_emulator.kernels import OpRefused
from engines_attention import DIMS, KV_HEADS, NPU, PAGE, Q_HEADS, World
from kv_planner import kv_lengths
from sglang.srt.hardware_backend.npu.attention import ascend_backend
from sglang.srt.hardware_backend.npu.graph_runner import (
    eagle_draft_extend_npu_graph_runner,
    eagle_draft_npu_graph_runner,
    multi_layer_eagle_draft_extend_npu_graph_runner,
)
from sglang.srt.hardware_backend.npu.graph_runner.npu_cudagraph_backend import NPUCudaGraphBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel

STEPS, WIDTH, BUCKET = 3, 4, 3
LENGTHS = [1, PAGE - 2, 2 * PAGE - 1]
BOUND = 1.5e-2


@pytest.fixture(autouse=True)
def speculation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_backend, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=WIDTH))
    monkeypatch.setenv("ASCEND_USE_FIA", "1")


def runner_of(kind: type, graphs: Any, rows: int) -> Any:
    """A runner as it is when a batch of `rows` requests has been prepared."""
    made: Any = object.__new__(kind)
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["LlamaForCausalLMEagle"]))
    made.backend, made.bs, made.raw_bs = graphs, BUCKET, rows
    made.model_runner, made.speculative_num_steps = SimpleNamespace(model_config=config), STEPS
    return made


class Drafts:
    """Static buffers of a graph over one attention layer of a draft.

    Args:
        world: The layer and its requests.
        steps: Attention calls in the graph.
        width: Tokens a request brings to each.
    """

    def __init__(self, world: World, steps: int, width: int) -> None:
        self.world, self.steps, self.width = world, steps, width
        with get_parallel().override(tp_group=SimpleNamespace(barrier=lambda: None)):
            self.graphs: Any = NPUCudaGraphBackend(SimpleNamespace(device_module=torch.get_device_module("npu")))
        tokens = BUCKET * width
        heads = {"query": Q_HEADS, "key": KV_HEADS, "value": KV_HEADS}
        self.rows = {
            name: torch.zeros(steps, tokens, count, DIMS, dtype=world.dtype, device=NPU)
            for name, count in heads.items()
        }
        self.slots = torch.zeros(steps, tokens, dtype=torch.int64, device=NPU)
        self.lens = torch.zeros(BUCKET, dtype=torch.int64, device=NPU)
        self.requests = torch.zeros(BUCKET, dtype=torch.int64, device=NPU)

    def batch(self, mode: ForwardMode) -> ForwardBatch:
        """The static batch."""
        return ForwardBatch(
            forward_mode=mode, batch_size=BUCKET, input_ids=self.slots[0], seq_lens=self.lens,
            req_pool_indices=self.requests, out_cache_loc=self.slots[0], seq_lens_sum=0, seq_lens_cpu=self.lens.cpu(),
            extend_seq_lens_cpu=[self.width] * BUCKET, spec_info=SimpleNamespace(spec_input_type=None),
        )  # fmt: skip

    def capture(self, forward: Any) -> None:
        """Capture `forward`, which returns the output of each step."""
        with self.graphs.capture_session(torch.get_device_module("npu").Stream()):
            self.graphs.capture_one(BUCKET, forward)

    def load(self, rows: int, base: list[int]) -> list[torch.Tensor]:
        """Random steps of the first `rows` requests behind `base` tokens; what each step's attention must give."""
        world, pad = self.world, (BUCKET - rows) * self.width
        expected = []
        for step in range(self.steps):
            starts = [length + step * self.width for length in base]
            slots = torch.cat([world.slots(row, start, start + self.width) for row, start in enumerate(starts)])
            query, (key, value) = world.rows(rows * self.width, Q_HEADS)[0], world.pair(rows * self.width)
            world.mirror(slots, key, value)
            for buffer, given in zip(self.rows.values(), (query, key, value), strict=True):
                buffer[step, : rows * self.width].copy_(given)
            self.slots[step].copy_(torch.cat([slots, torch.zeros(pad, dtype=torch.int64)]))
            world.lengths[:rows] = starts
            expected.append(world.expected(query, [self.width] * rows))
        self.requests.copy_(torch.tensor([*range(1, rows + 1), *[0] * (BUCKET - rows)]))
        return expected


def compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found[: len(expected)].cpu().view(expected.shape), expected, atol=BOUND, rtol=BOUND)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_draft_steps(rows: int) -> None:
    """STEPS - 1 attention calls in one graph, each with the lengths of its own step; ours are the same numbers."""
    world = World(list(LENGTHS))
    drafts = Drafts(world, STEPS - 1, 1)
    backend: Any = ascend_backend.AscendAttnMultiStepDraftBackend(world.runner(), 1, STEPS)
    backend.init_cuda_graph_state(BUCKET, BUCKET)
    batch = drafts.batch(ForwardMode.DECODE)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def forward() -> list[torch.Tensor]:
        outputs = []
        for step in range(STEPS - 1):
            batch.out_cache_loc = drafts.slots[step]
            given = (buffer[step] for buffer in drafts.rows.values())
            outputs.append(backend.attn_backends[step].forward_decode(*given, world.layer, batch))
        return outputs

    drafts.capture(forward)
    runner = runner_of(eagle_draft_npu_graph_runner.EAGLEDraftNpuGraphRunner, drafts.graphs, rows)
    runner._init_arch_map()
    updates: list[Any] = []
    replay = drafts.graphs.replay_with_input_update

    def heard(*args: Any, **more: Any) -> Any:
        updates.append(more["cpu_update_input"])
        return replay(*args, **more)

    drafts.graphs.replay_with_input_update = heard
    for _ in range(2):
        base = list(world.lengths[:rows])
        expected = drafts.load(rows, base)
        drafts.lens.copy_(torch.tensor([*base, *[0] * (BUCKET - rows)]))
        backend.init_forward_metadata_out_graph(drafts.batch(ForwardMode.DECODE))
        outputs = runner._replay_graph(BUCKET, SimpleNamespace(seq_lens_cpu=torch.tensor(base)))
        for found, wanted in zip(outputs, expected, strict=True):
            compare(found, wanted)
        ours = [kv_lengths("eagle", base, window=step + 1).tolist() for step in range(STEPS - 1)]
        assert [one["actual_seq_lengths_kv"][:rows] for one in updates[-1]] == ours
        world.lengths[:rows] = [length + STEPS - 1 for length in base]
    drafts.graphs.cleanup()


def extend_graph(world: World) -> Drafts:
    drafts = Drafts(world, 1, WIDTH)
    world.backend.init_cuda_graph_state(BUCKET, BUCKET * WIDTH)
    batch = drafts.batch(ForwardMode.DRAFT_EXTEND_V2)
    world.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    drafts.capture(
        lambda: [world.backend.forward_extend(*(rows[0] for rows in drafts.rows.values()), world.layer, batch)]
    )
    return drafts


def prepare(drafts: Drafts, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Load a draft-extend step: (lengths with its tokens, what attention must give)."""
    base = list(drafts.world.lengths[:rows])
    (expected,) = drafts.load(rows, base)
    ends = torch.tensor([length + WIDTH for length in base])
    drafts.lens.copy_(torch.cat([ends, torch.zeros(BUCKET - rows, dtype=torch.int64)]))
    drafts.world.backend.init_forward_metadata_out_graph(drafts.batch(ForwardMode.DRAFT_EXTEND_V2))
    return ends, expected


@pytest.mark.parametrize("rows", [1, 3])
def test_draft_extend(rows: int) -> None:
    drafts = extend_graph(World(list(LENGTHS)))
    runner = runner_of(eagle_draft_extend_npu_graph_runner.EAGLEDraftExtendNpuGraphRunner, drafts.graphs, rows)
    ends, expected = prepare(drafts, rows)
    (found,) = runner._replay_graph(BUCKET, SimpleNamespace(seq_lens_cpu=ends))
    compare(found, expected)
    drafts.graphs.cleanup()


@pytest.fixture
def short_waits() -> Iterator[None]:
    ascend_emulator.install(wait_seconds=0.5)
    yield
    ascend_emulator.install(wait_seconds=10.0)


def test_draft_extend_takes_the_mirror_for_live_rows(short_waits: None) -> None:
    """A host mirror that is padded already gets the padding once more: more lengths than the graph has requests.

    The update is refused, and the replay, which was launched before (A-50), waits for it.
    """
    drafts = extend_graph(World(list(LENGTHS)))
    runner = runner_of(eagle_draft_extend_npu_graph_runner.EAGLEDraftExtendNpuGraphRunner, drafts.graphs, 1)
    ends, _ = prepare(drafts, 1)
    padded = torch.cat([ends, torch.zeros(BUCKET - 1, dtype=torch.int64)])
    with pytest.raises(OpRefused, match="5 lengths for 3 requests"):
        runner._replay_graph(BUCKET, SimpleNamespace(seq_lens_cpu=padded))
    with pytest.raises(DeadlockError, match=r"no graph\.update"):
        torch_npu.npu.synchronize()


def test_multi_layer_drafts_bind_the_other_versions_key() -> None:
    """A-24: the runner of multi-layer drafts names v2's lengths always; a model without sliding layers captures v1."""
    drafts = extend_graph(World(list(LENGTHS)))
    kind = multi_layer_eagle_draft_extend_npu_graph_runner.MultiLayerEagleDraftExtendNpuGraphRunner
    runner = runner_of(kind, drafts.graphs, BUCKET)
    ends, expected = prepare(drafts, BUCKET)
    runner.buffers = SimpleNamespace(seq_lens_cpu=ends)
    (found,) = runner._replay_graph(BUCKET, None)
    assert not found.cpu().any() and expected.any()  # captured with lengths 0
    drafts.graphs.cleanup()
