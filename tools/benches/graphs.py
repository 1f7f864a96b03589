"""Bench of graph-runtime: what the hand-off of an update costs, and what a step does not do.

The hand-off is measured apart from torch_npu's own `update()` and `replay()`, which both sides need: the persistent
worker beside a new thread a replay, as engines did it. The counts are of steps on the emulated NPU: threads, copies
between host and device, and waits for the whole device.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ascend_emulator
from benching import Bench

ascend_emulator.install(devices=1)

import torch  # noqa: E402
import torch_npu  # noqa: E402
from graph_runtime import DecodeRunner, DerivedUpdate, StaticBuffers, StepInputs, UpdateWorker, get_device  # noqa: E402
from graph_runtime.testing import RecordingDevice  # noqa: E402
from kv_planner import RowField, RowLayout  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

HEADS, DIM, PAGE, PAGES, ROWS, STEPS = 2, 64, 128, 9, 4, 50


def new_thread(call: Callable[[], None]) -> None:
    """The field's way: a thread for every replay, joined."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


class HostCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that take tensors of the NPU and give or fill one of the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.to_host = 0
        self.to_device = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if name in {"copy_", "_to_copy", "_local_scalar_dense"}:
            given = [leaf.device.type for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            target = given[0] if name == "copy_" else result.device.type if name == "_to_copy" else "cpu"
            self.to_host += given[-1] == "npu" and target == "cpu"
            self.to_device += given[-1] == "cpu" and target == "npu"
        return result


def decoder(device: Any) -> DecodeRunner:
    """Two layers of FIA v2 over a paged cache."""
    caches = [torch.zeros(PAGES, PAGE, DIM, dtype=torch.float16, device="npu:0") for _ in range(4)]
    layout = RowLayout(
        [
            RowField("x", "float16", rows=ROWS, width=HEADS * DIM),
            RowField("slots", "int64", rows=ROWS),
            RowField("table", "int32", rows=ROWS, width=2),
        ]
    )

    def forward(step: StepInputs) -> torch.Tensor:
        x = step.tensors["x"]
        for key, value in ((caches[0], caches[1]), (caches[2], caches[3])):
            for cache in (key, value):
                torch_npu.npu_scatter_nd_update_(
                    cache.view(PAGES * PAGE, -1), step.tensors["slots"].view(-1, 1), x[:, :DIM].contiguous()
                )
            attended = torch_npu.npu_fused_infer_attention_score_v2(
                x.view(step.bs, 1, HEADS, DIM),
                key,
                value,
                actual_seq_kvlen=step.host["kv_lens"],
                block_table=step.tensors["table"],
                num_query_heads=HEADS,
                num_key_value_heads=1,
                softmax_scale=DIM**-0.5,
                block_size=PAGE,
                input_layout="BSND",
            )[0]
            x = x + attended.view(step.bs, -1)
        return x

    runner = DecodeRunner(
        device=device,
        forward=forward,
        buffers=StaticBuffers(layout, device),
        buckets=[1, 2, ROWS],
        update=DerivedUpdate(),
    )
    runner.capture(progress=False)
    return runner


def counted(bench: Bench) -> None:
    """STEPS steps, and what happened in them."""
    device = RecordingDevice(get_device("npu:0"))
    runner = decoder(device)

    def step(rows: list[int], length: int) -> None:
        values = {
            "x": torch.ones(len(rows), HEADS * DIM, dtype=torch.float16),
            "slots": [(1 + 2 * row) * PAGE + length - 1 for row in rows],
            "table": torch.tensor([[1 + 2 * row, 2 + 2 * row] for row in rows], dtype=torch.int32),
        }
        runner.run(values, {"kv_lens": [length] * len(rows)}, len(rows))

    for row in range(ROWS):  # then every slot below a length has been written
        for length in range(1, 5):
            step([row], length)
    device.events.clear()
    started: Counter[str] = Counter()
    threads: Any = threading.Thread
    start = threads.start

    def counting(thread: threading.Thread) -> None:
        started["threads"] += 1
        start(thread)

    threads.start = counting
    with HostCopies() as probe:  # the counter sees what it counts
        torch.ones(1, device="npu:0").cpu()
        torch.ones(1).to("npu:0")
    if (probe.to_host, probe.to_device) != (1, 1):
        sys.exit(f"copies are not counted: {probe.to_host} to the host, {probe.to_device} to the device")
    copies = HostCopies()
    try:
        with copies:
            for index in range(STEPS):
                step(list(range(1 + index % ROWS)), 1 + index % 4)
    finally:
        threads.start = start
    events = Counter(device.events)
    bench.record("steps that were replays", [events["replay"] / STEPS], "of all", op=">=", target=1.0)
    bench.record("new threads a step", [started["threads"] / STEPS], "threads", op="<=", target=0.0)
    bench.record("waits for the whole device a step", [events["synchronize"] / STEPS], "waits", op="<=", target=0.0)
    bench.record("copies to the host a step", [copies.to_host / STEPS], "copies", op="<=", target=0.0)
    bench.record("copies to the device a step", [copies.to_device / STEPS], "copies", op="<=", target=1.0)
    runner.close()


def main() -> None:
    """Measure and report."""
    bench = Bench("graphs")
    torch.set_num_threads(1)
    worker = UpdateWorker(lambda: None, name="bench")

    def nothing() -> None:
        return None

    bench.near(
        "hand-off of an update; beside a new thread a replay",
        lambda: worker.run(nothing, timeout=30.0),
        lambda: new_thread(nothing),
        at_most=0.5,
        unit="µs",
    )
    worker.close()
    counted(bench)
    bench.finish()


if __name__ == "__main__":
    main()
