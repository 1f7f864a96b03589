"""Bench of the emulator: what an operator costs on an emulated device over the same operator on the CPU.

An operator at once (compiled and Python kernels), in a captured graph, in its replay, and the update of a record before
it. The reference is the CPU's own operator on tensors of the same few bytes, so the figures are overheads per operator,
not kernels. Targets are what the design asks for, with room for a busy machine where they concern Python. The check of
the order is off: what it adds is measured by the bench `order`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import ascend_emulator
from benching import Bench

COMPILED = os.environ.get("ASCEND_EMULATOR_COMPILED") != "0"
ascend_emulator.install(compiled=COMPILED, check_order=False)

import torch  # noqa: E402
import torch_npu  # noqa: E402

Work = Callable[[], object]
ROUNDS = 61  # short ones, so that most are not disturbed on a busy machine
CALLS = 40  # of one operator, in one round
CHAIN = 100  # operators of a graph
RECORDS = 8  # attention calls of a graph that is updated


def tensors(device: str) -> dict[str, torch.Tensor]:
    """The same small tensors on either device."""
    torch.manual_seed(1)
    made = {
        "x": torch.randn(8, 8), "y": torch.randn(8, 8), "out": torch.zeros(8, 8), "host": torch.randn(8, 8),
        "rows": torch.tensor([3, 0, 5]),
    }  # fmt: skip
    return {name: value if name == "host" else value.to(device) for name, value in made.items()}


def operators(device: str) -> dict[str, Work]:
    """Operators by the way that they return: a new tensor, in place, into out=, several, fresh memory, to the host."""
    held = tensors(device)
    x, y, out, host, rows = held["x"], held["y"], held["out"], held["host"], held["rows"]
    return {
        "add": lambda: x + y,
        "matmul": lambda: x @ y,
        "softmax": lambda: x.softmax(-1),
        "index_select": lambda: x.index_select(0, rows),
        "cat": lambda: torch.cat([x, y]),
        "sort": lambda: x.sort(),
        "add_": lambda: out.add_(y),
        "add, out=": lambda: torch.add(x, y, out=out),
        "foreach_add_ of 2": lambda: torch._foreach_add_([out, out], [x, y]),
        "index_put_": lambda: out.index_put_((rows,), x[:3]),
        "empty": lambda: torch.empty(8, 8, device=device),
        "zeros": lambda: torch.zeros(8, 8, device=device),
        "rand": lambda: torch.rand(8, 8, device=device),
        "copy to the device": lambda: out.copy_(host),
        "copy to the host": lambda: host.copy_(out),
        "item": lambda: x[0, 0].item(),
    }


def timed(work: Work, calls: int) -> float:
    """Microseconds a call."""
    began = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - began) / calls * 1e6


def over(ours: Work, reference: Work, *, calls: int = CALLS, each: int = 1) -> list[float]:
    """Overheads in microseconds of rounds in which both take turns; `each` is the operators in a call."""
    for work in (ours, reference):
        timed(work, max(1, calls // 10))
    pairs = [(timed(ours, calls), timed(reference, calls)) for _ in range(ROUNDS)]
    return [(mine - theirs) / each for mine, theirs in pairs]


def eager() -> dict[str, list[float]]:
    """Overhead of each operator, called at once on an idle stream."""
    on_cpu = operators("cpu")
    return {name: over(work, on_cpu[name]) for name, work in operators("npu").items()}


def chain(held: dict[str, torch.Tensor]) -> torch.Tensor:
    """Half its operators in place, half with new results."""
    value = held["x"]
    for _ in range(CHAIN // 2):
        value = value + held["y"]
        held["out"].mul_(0.5)
    return value


def graphs(bench: Bench) -> None:
    """Capture and replay, per operator."""
    held, plain = tensors("npu"), tensors("cpu")
    kept: list[Any] = []

    def capture() -> None:
        graph = torch_npu.npu.NPUGraph()
        with torch_npu.npu.graph(graph):
            chain(held)
        kept[:] = [graph]

    captured = [timed(capture, 1) / CHAIN for _ in range(9)]
    bench.record(f"capture of {CHAIN} operators, per operator", captured, "µs", op="<=", target=1000)

    def replay() -> None:
        kept[0].replay()
        torch_npu.npu.synchronize()

    bench.record(
        f"replay and wait, per operator of {CHAIN}, over the CPU's",
        over(replay, lambda: chain(plain), calls=2, each=CHAIN),
        "µs",
        op="<=",
        target=10,
    )
    torch_npu.npu.synchronize()
    bench.record("replay() itself, which queues", launches(kept[0]), "µs", op="<=", target=100)


def launches(graph: Any) -> list[float]:
    """Microseconds of `replay()` without the wait behind it."""
    values = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        graph.replay()
        values.append((time.perf_counter() - began) * 1e6)
        torch_npu.npu.synchronize()
    return values


def updates(bench: Bench) -> None:
    """`graph.update()` of attention calls, per record."""
    page, pages, dim = 128, 4, 64
    cache = torch.zeros(pages, page, dim, dtype=torch.float16, device="npu")
    query = torch.zeros(1, 1, 1, dim, dtype=torch.float16, device="npu")
    table = torch.arange(1, pages, dtype=torch.int32, device="npu").view(1, -1)
    graph = torch_npu.npu.NPUGraph()
    with torch_npu.npu.graph(graph, auto_dispatch_capture=True):
        for _ in range(RECORDS):
            torch_npu.npu_fused_infer_attention_score_v2(
                query, cache, cache, actual_seq_kvlen=[3], block_table=table, num_query_heads=1,
                num_key_value_heads=1, softmax_scale=0.125, block_size=page, sparse_mode=0, input_layout="BSND",
            )  # fmt: skip
    values = []
    for turn in range(ROUNDS):
        given = [{"actual_seq_kvlen": [turn + 1]}] * RECORDS
        began = time.perf_counter()
        graph.update(cpu_update_input=given)
        values.append((time.perf_counter() - began) / RECORDS * 1e6)
        graph.replay()
        torch_npu.npu.synchronize()
    bench.record("update, per record", values, "µs", op="<=", target=500)


def python_kernels() -> dict[str, list[float]]:
    """The overheads of `eager` in a process without the compiled kernels."""
    done = subprocess.run(
        [sys.executable, __file__, "--overheads"],
        env={**os.environ, "ASCEND_EMULATOR_COMPILED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    figures: dict[str, list[float]] = json.loads(done.stdout)
    return figures


def main() -> None:
    """Measure and report."""
    torch.set_num_threads(1)
    if sys.argv[1:] == ["--overheads"]:
        print(json.dumps(eager()))
        return
    bench = Bench("emulator", rounds=ROUNDS)
    slower = python_kernels()
    for name, values in eager().items():
        bench.record(f"{name}: over the CPU's", values, "µs", op="<=", target=10)
    for name in ("add", "add_"):
        bench.record(f"{name}: over the CPU's, Python kernels", slower[name], "µs", op="<=", target=100)
    graphs(bench)
    updates(bench)
    bench.finish()


if __name__ == "__main__":
    main()
