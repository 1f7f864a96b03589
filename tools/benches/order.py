"""Bench of the emulator's check of the order: what it costs, on against off, in the same process and in turns.

Small tensors show the cost per operator, large ones and strided views the cost of the bytes. The reference is the same
work with the check off; the targets say that tests may leave it on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import ascend_emulator
from benching import Bench

ascend_emulator.install()

import torch  # noqa: E402
import torch_npu  # noqa: E402

Work = Callable[[], object]
ROUNDS = 31
CHAIN = 100  # operators of a chain or a graph


def timed(work: Work, calls: int) -> float:
    """Microseconds a call."""
    began = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - began) / calls * 1e6


def both(work: Work, calls: int) -> tuple[list[float], list[float]]:
    """Times with and without the check, in turns."""
    with_check: list[float] = []
    without: list[float] = []
    for _ in range(ROUNDS):
        for on, values in ((True, with_check), (False, without)):
            torch_npu.npu.synchronize()
            ascend_emulator.order.enable(on)
            timed(work, max(1, calls // 4))
            values.append(timed(work, calls))
    ascend_emulator.order.enable(True)
    return with_check, without


def chain() -> Work:
    """A hundred operators on small tensors, half in place, with an event between two streams every ten."""
    x, y, out = (torch.randn(8, 8, device="npu") for _ in range(3))
    side = torch_npu.npu.Stream()
    torch_npu.npu.synchronize()

    def work() -> None:
        value = x
        for i in range(CHAIN // 2):
            value = value + y
            out.mul_(0.5)
            if i % 10 == 9:
                side.wait_stream(torch_npu.npu.current_stream())
                torch_npu.npu.current_stream().wait_stream(side)

    return work


def replay() -> Work:
    """A captured chain, replayed and waited for."""
    x, y = torch.randn(8, 8, device="npu"), torch.randn(8, 8, device="npu")
    graph = torch_npu.npu.NPUGraph()
    with torch_npu.npu.graph(graph):
        value = x
        for _ in range(CHAIN):
            value = value + y

    def work() -> None:
        graph.replay()
        torch_npu.npu.synchronize()

    return work


def attention() -> Work:
    """Paged attention over 8 requests: the pages are read off the block table."""
    page, requests, dim = 128, 8, 64
    cache = torch.zeros(4 * requests + 1, page, dim, dtype=torch.float16, device="npu")
    query = torch.zeros(requests, 1, dim, dtype=torch.float16, device="npu")
    table = torch.arange(1, 4 * requests + 1, dtype=torch.int32, device="npu").view(requests, 4)
    torch_npu.npu.synchronize()
    return lambda: torch_npu.npu_fused_infer_attention_score_v2(
        query, cache, cache, actual_seq_kvlen=[300] * requests, block_table=table, num_query_heads=1,
        num_key_value_heads=1, softmax_scale=0.125, block_size=page, input_layout="BSH",
    )  # fmt: skip


def main() -> None:
    """Measure and report."""
    torch.set_num_threads(1)
    small, other = torch.randn(8, 8, device="npu"), torch.randn(8, 8, device="npu")
    large = torch.zeros(4 << 20, device="npu")
    columns = torch.zeros(4096, 64, device="npu")[:, ::2]
    torch_npu.npu.synchronize()
    works: dict[str, tuple[Work, int, float]] = {
        "add of 64 elements": (lambda: small + other, 200, 2.0),
        "add_ of 64 elements": (lambda: small.add_(other), 200, 2.0),
        "item": (lambda: small[0, 0].item(), 200, 2.0),
        "a chain of 100 operators with events": (chain(), 2, 1.5),
        "replay of 100 operators": (replay(), 2, 1.5),
        "paged attention": (attention(), 4, 1.5),
        "add_ of 4 Mi elements": (lambda: large.add_(1), 2, 1.2),
        "add_ of 131072 single elements in a strided view": (lambda: columns.add_(1), 2, 50.0),
    }
    bench = Bench("order", rounds=ROUNDS)
    for name, (work, calls, target) in works.items():
        with_check, without = both(work, calls)
        bench.record(f"{name}, checked", with_check, "µs", references=without, op="<=", target=target)
    bench.finish()


if __name__ == "__main__":
    main()
