"""Bench of spec-kernels on a CPU: launches and host time of the prepare steps, attention beside torch's own.

The references are written here: the fill statement by statement, as a plain engine runs it, and torch's
scaled_dot_product_attention over gathered KV. On a CPU a launch costs little, so the times show what the checks cost;
what a device saves is the count of launches.
"""

from __future__ import annotations

from typing import Any

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
    out, positions = torch.empty(ROWS * WIDTH, dtype=torch.int64), torch.empty(ROWS * WIDTH, dtype=torch.int64)

    def locs() -> None:
        sk.uniform_cache_locs(table, rows, starts, width=WIDTH, out=out, positions_out=positions)

    bench.within("cache locations of a verify step, 64 requests: host time", locs, at_most=1000, unit="µs")
    layout_of = sk.build_chain_tree(starts, width=WIDTH)
    tokens = torch.randint(0, 3, (ROWS, WIDTH))

    def verify() -> None:
        sk.verify_tree_greedy(tokens, tokens, layout_of.next_token, layout_of.next_sibling, depth=WIDTH)

    bench.within("greedy tree verification, 64 requests of 4: host time", verify, at_most=3000, unit="µs")


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
    bench.finish()


if __name__ == "__main__":
    main()
