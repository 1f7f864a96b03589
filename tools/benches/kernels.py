"""Bench of spec-kernels on a CPU: launches and host time of the prepare steps, attention beside torch's own.

The references are written here: each step statement by statement, as a plain engine runs it, and torch's
scaled_dot_product_attention over gathered KV. On a CPU a launch costs little, so the times show what the checks cost;
what a device saves is the count of launches, which Triton's interpreter tells for the kernels. Device allocations are
those of torch_npu's allocator on the emulated NPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # kernels are counted, never timed

import kv_planner as kp
import spec_kernels as sk
import torch
from benching import Bench
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, WIDTH, HIDDEN = 64, 4, 2048
PAGE, HEADS, KV_HEADS, DIMS = 128, 16, 4, 128


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that write memory of the given tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run, and count if an argument that is written is one of ours."""
        named = [*zip(func._schema.arguments, args, strict=False)]
        named += [(a, (kwargs or {})[a.name]) for a in func._schema.arguments if a.name in (kwargs or {})]
        writes = [value for argument, value in named if argument.alias_info and argument.alias_info.is_write]
        hit = [v for v in writes if isinstance(v, torch.Tensor) and v.untyped_storage().data_ptr() in self.storages]
        self.count += bool(hit)
        return func(*args, **(kwargs or {}))


class Statements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that compute: neither views nor allocations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run, and count."""
        views = any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)
        self.count += not views and "empty" not in func._schema.name
        return func(*args, **(kwargs or {}))


def kernel_launches(work: Callable[[], Any]) -> int:
    """Triton kernels that an op starts."""
    from triton.runtime.interpreter import GridExecutor  # type: ignore[import-untyped]

    run, count = GridExecutor.__call__, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return run(*args, **kwargs)

    GridExecutor.__call__ = counted
    try:
        work()
    finally:
        GridExecutor.__call__ = run
    return count


def batch(raw_bs: int) -> sk.DraftExtendBatch:
    """A batch of random numbers."""
    tokens = raw_bs * WIDTH

    def numbers(count: int, high: int = 30_000) -> torch.Tensor:
        return torch.randint(0, high, (count,))

    return sk.DraftExtendBatch(
        numbers(tokens), numbers(tokens), numbers(tokens), numbers(raw_bs), numbers(raw_bs), numbers(raw_bs, WIDTH),
        numbers(raw_bs, WIDTH + 1), torch.rand(raw_bs, 1), torch.randn(tokens, HIDDEN),
    )  # fmt: skip


def plain_fill(buffers: sk.DraftExtendBuffers, given: sk.DraftExtendBatch, bs: int) -> None:
    """The same rows and fills, a statement a row range, as an engine without the op writes them."""
    tokens, raw_bs = given.input_ids.shape[0], given.seq_lens.shape[0]
    for name in ("input_ids", "positions", "out_cache_loc", "hidden_states"):
        target = getattr(buffers, name)
        target[:tokens].copy_(getattr(given, name))
        target[tokens:].zero_()
    fills = {"seq_lens": 0, "req_pool_indices": 0, "num_correct_drafts": 0, "num_accept_tokens": -1, "temperatures": 1}
    for name, fill in fills.items():
        target, source = getattr(buffers, name), getattr(given, name)
        target[:raw_bs].copy_(source.view(raw_bs, *target.shape[1:]))
        target[raw_bs:].fill_(fill)
    torch.arange(0, ROWS * WIDTH, WIDTH, out=buffers.select_index)
    buffers.select_index.add_(buffers.num_correct_drafts)
    for counts in (buffers.global_num_tokens, buffers.global_num_tokens_for_logprob):
        if counts is not None:
            counts.fill_(bs * WIDTH)


def tensors(buffers: sk.DraftExtendBuffers) -> list[torch.Tensor]:
    """All buffers that there are."""
    return [value for value in vars(buffers).values() if isinstance(value, torch.Tensor)]


def prepare(bench: Bench) -> None:
    """Launches and host time of the draft-extend fill, in each of its forms."""
    layout = kp.RowLayout([kp.RowField(**field) for field in sk.draft_extend_fields(ROWS, WIDTH, ranks=8)])
    plan = sk.DraftExtendPlan(layout, "cpu", hidden_states=torch.zeros(ROWS * WIDTH, HIDDEN))
    given, buffers = batch(ROWS - 3), plan.buffers

    def planned() -> None:
        plan.fill(given, bs=ROWS, width=WIDTH, seq_len_fill=0)

    def op() -> None:
        sk.fill_draft_extend_buffers(buffers, given, bs=ROWS, width=WIDTH, seq_len_fill=0, backend="native")

    def plain() -> None:
        plain_fill(buffers, given, ROWS)

    counts = []
    for work in (planned, plain):
        with Launches(tensors(buffers)) as launches:
            work()
        counts.append(float(launches.count))
    bench.record(
        "draft-extend fill, planned: launches, beside one a row range", counts[:1], "launches", references=counts[1:],
        kind="value/reference", op="<=", target=4 / 18,
    )  # fmt: skip
    bench.near(
        "draft-extend fill, planned: host time, beside the statements alone", planned, plain, at_most=8, unit="µs"
    )
    bench.near("draft-extend fill, the op: host time, beside the statements alone", op, plain, at_most=8, unit="µs")
    table, rows, starts = torch.randint(1, 9000, (256, 4096)), torch.arange(ROWS), torch.randint(0, 4000, (ROWS,))
    steps(bench, table, rows, starts)
    layout_of = sk.build_chain_tree(starts, width=WIDTH)
    tokens = torch.randint(0, 3, (ROWS, WIDTH))

    def verify() -> None:
        sk.verify_tree_greedy(tokens, tokens, layout_of.next_token, layout_of.next_sibling, depth=WIDTH)

    bench.within("greedy tree verification, 64 requests of 4: host time", verify, at_most=3000, unit="µs")


def steps(bench: Bench, table: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor) -> None:
    """Launches of the other steps as Triton kernels, and host time of the ops, beside the statements of an engine."""
    predict, accept_lens = torch.randint(0, 900, (ROWS * WIDTH,)), torch.randint(1, WIDTH + 1, (ROWS,))
    index = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH)
    block_table = torch.zeros(ROWS, 4096 // PAGE, dtype=torch.int32)
    out, positions = torch.empty(ROWS * WIDTH, dtype=torch.int64), torch.empty(ROWS * WIDTH, dtype=torch.int64)

    def commit(**on: Any) -> Any:
        return sk.verify_commit_outputs(predict, index, accept_lens, lens, width=WIDTH, track_interval=64, **on)

    def plain_commit() -> None:
        new = lens + accept_lens
        last = index.gather(1, (accept_lens - 1).unsqueeze(1)).squeeze(1)
        predict.index_select(0, last)
        first = torch.arange(0, ROWS * WIDTH, WIDTH)
        step = last - first
        torch.where(new // 64 != lens // 64, step, -1)
        first + (accept_lens - 1)

    def locs(**on: Any) -> Any:
        return sk.uniform_cache_locs(table, rows, lens, width=WIDTH, out=out, positions_out=positions, **on)

    def plain_locs() -> None:
        at = lens.unsqueeze(1) + torch.arange(WIDTH)
        out.copy_(table[rows.unsqueeze(1), at].flatten())
        positions.copy_(at.flatten())

    def pages(**on: Any) -> Any:
        return sk.fill_block_table(block_table, table, rows, lens, page_size=PAGE, **on)

    def plain_pages() -> None:
        first = torch.arange(0, 4096, PAGE)
        found = table[rows][:, first] // PAGE
        block_table.copy_(torch.where(first < lens.unsqueeze(1), found, 0))

    for name, ours, theirs in (
        ("verify-commit outputs", commit, plain_commit),
        ("cache locations of a verify step", locs, plain_locs),
        ("block table", pages, plain_pages),
    ):
        with Statements() as statements:  # type: ignore[no-untyped-call]
            theirs()
        launches = kernel_launches(lambda ours=ours: ours(backend="triton"))  # type: ignore[misc]
        bench.record(
            f"{name}, as a kernel: launches, beside the statements", [float(launches)], "launches",
            references=[float(statements.count)], kind="value/reference", op="<=", target=0.5,
        )  # fmt: skip
        # A handful of statements on 64 numbers: what is left to measure is the checks and torch's custom operators.
        bench.near(f"{name}: host time, beside the statements alone", ours, theirs, at_most=16, unit="µs")


def allocations(bench: Bench) -> None:
    """What 100 calls take from the device once their outputs are given; the last part, as it brings up the device."""
    import ascend_emulator

    ascend_emulator.install()
    import torch_npu  # noqa: F401

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("npu:0")

    layout = kp.RowLayout([kp.RowField(**field) for field in sk.draft_extend_fields(ROWS, WIDTH, ranks=8)])
    plan = sk.DraftExtendPlan(layout, "npu:0", hidden_states=on_device(torch.zeros(ROWS * WIDTH, HIDDEN)))
    given = batch(ROWS - 3)
    assert given.hidden_states is not None
    planned = replace(given, hidden_states=on_device(given.hidden_states))
    table, rows = on_device(torch.randint(1, 9000, (256, 4096))), on_device(torch.arange(ROWS))
    out, positions = (on_device(torch.empty(ROWS * WIDTH, dtype=torch.int64)) for _ in range(2))
    works: dict[str, Callable[[], Any]] = {
        "draft-extend fill, planned": lambda: plan.fill(planned, bs=ROWS, width=WIDTH, seq_len_fill=0),
        "cache locations of a verify step": lambda: sk.uniform_cache_locs(
            table, rows, rows, width=WIDTH, out=out, positions_out=positions
        ),
    }
    for name, work in works.items():
        work()
        work()
        torch.npu.synchronize()  # type: ignore[attr-defined]
        before = torch.npu.memory_stats()["segment.all.allocated"]  # type: ignore[attr-defined]
        for _ in range(100):
            work()
        torch.npu.synchronize()  # type: ignore[attr-defined]
        taken = torch.npu.memory_stats()["segment.all.allocated"] - before  # type: ignore[attr-defined]
        bench.record(
            f"{name}: device allocations over 100 calls", [float(taken)], "allocations", op="<=", target=0
        )  # fmt: skip


def attention(bench: Bench) -> None:
    """Native attention beside scaled_dot_product_attention over the same KV, gathered first."""
    for name, q_len, kv_len in (("decode", 1, 2048), ("a chunk of 128", 128, 1024)):
        rows = 4 if q_len == 1 else 1
        pages = -(-kv_len // PAGE)
        key, value = (torch.randn(rows * pages + 1, PAGE, KV_HEADS, DIMS) for _ in "kv")
        order = (torch.randperm(rows * pages) + 1).view(rows, pages)
        metadata = sk.build_paged_metadata(order.tolist(), [q_len] * rows, [kv_len] * rows, page_size=PAGE)
        query = torch.randn(rows, q_len, HEADS, DIMS)
        causal = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)

        def ours(args: Any = (query, key, value, metadata)) -> torch.Tensor:
            return sk.paged_attention(*args, scale=DIMS**-0.5, page_size=PAGE)

        def theirs(args: Any = (query, key, value, order, rows, causal)) -> torch.Tensor:
            query, key, value, order, rows, causal = args
            gathered = [cache[order].reshape(rows, -1, KV_HEADS, DIMS).transpose(1, 2) for cache in (key, value)]
            queries = query.transpose(1, 2)
            return torch.nn.functional.scaled_dot_product_attention(
                queries, gathered[0], gathered[1], attn_mask=causal, scale=DIMS**-0.5, enable_gqa=True
            ).transpose(1, 2)

        torch.testing.assert_close(ours(), theirs(), atol=1e-4, rtol=1e-4)
        bench.faster(f"native attention, {name}, beside torch's over gathered KV", ours, theirs, at_least=0.8)


def main() -> None:
    """Measure and report."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bench = Bench("kernels")
    prepare(bench)
    attention(bench)
    allocations(bench)
    bench.finish()


if __name__ == "__main__":
    main()
