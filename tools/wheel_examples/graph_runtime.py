"""A fake engine on graph-runtime alone: decode steps replayed on the CPU give what the forward gives at once."""

import torch
from graph_runtime import Buckets, DecodeRunner, StaticBuffers, StepInputs, UpdateSpec, get_device
from kv_planner import RowField, RowLayout

torch.library.define("fake_engine::sum_of_first", "(Tensor table, Tensor rows, int[] kv_lens) -> Tensor")


@torch.library.impl("fake_engine::sum_of_first", "CPU")
def sum_of_first(table: torch.Tensor, rows: torch.Tensor, kv_lens: list[int]) -> torch.Tensor:
    """Stands for attention: its host lengths change from step to step."""
    return torch.stack([table[row, :length].sum() for row, length in zip(rows.tolist(), kv_lens, strict=True)])


table = torch.arange(1.0, 129.0).reshape(4, 32)
device = get_device("cpu", updatable={"fake_engine::sum_of_first": ("kv_lens",)})
layout = RowLayout([RowField("rows", "int64", rows=4), RowField("bias", "float32", rows=4, fill=-1)])


def forward(step: StepInputs) -> torch.Tensor:
    """One decode step."""
    total = torch.ops.fake_engine.sum_of_first(table, step.tensors["rows"], step.host["kv_lens"])
    return torch.as_tensor(total) * 2 + step.tensors["bias"]


runner = DecodeRunner(
    device=device,
    forward=forward,
    buffers=StaticBuffers(layout, device),
    buckets=Buckets([1, 2, 4]),
    update=UpdateSpec({"kv_lens": "kv_lens"}),
)
runner.capture()
lengths = [3, 9, 1]
for number in range(12):
    live = [row for row in range(3) if number < 4 * (row + 1)]  # requests finish one after the other
    for row in live:
        lengths[row] += 1
    kv_lens = [lengths[row] for row in live]
    done = runner.run({"rows": live, "bias": [row / 2 for row in live]}, {"kv_lens": kv_lens}, raw_bs=len(live))
    wanted = [2 * float(table[row, :length].sum()) + row / 2 for row, length in zip(live, kv_lens, strict=True)]
    assert done.mode == "graph" and done.output.tolist() == wanted, (done, wanted)
assert runner.counters.graph_replays == 12 and not runner.counters.eager_steps
runner.close()
print("graph-runtime on cpu: 12 replays, each with its own lengths")
