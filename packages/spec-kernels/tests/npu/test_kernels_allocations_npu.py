"""Owns the proof that ops with given outputs allocate nothing on the device: counts of torch_npu's allocator, no times.

The allocator keeps what it once took from the device, so temporaries of a step that was run before cost no device
allocation. The fills of captured buffers do not even ask the allocator for memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kv_planner as kp
import spec_kernels as sk
import torch

NPU, BS, WIDTH = "npu:0", 4, 3


def counts(call: Callable[[], Any]) -> dict[str, int]:
    """What 100 calls take after two of warm-up: blocks of the allocator, and allocations of the device."""
    call()
    call()
    torch.npu.synchronize()  # type: ignore[attr-defined]
    before = torch.npu.memory_stats()  # type: ignore[attr-defined]
    for _ in range(100):
        call()
    torch.npu.synchronize()  # type: ignore[attr-defined]
    after = torch.npu.memory_stats()  # type: ignore[attr-defined]
    names = {"blocks": "allocation.all.allocated", "device": "segment.all.allocated"}
    return {name: after[key] - before[key] for name, key in names.items()}


def ints(*shape: int, high: int = 90) -> torch.Tensor:
    return torch.randint(1, high, shape, device=NPU)


def outputs() -> dict[str, Callable[[], Any]]:
    """Every op that takes outputs, on the device, with all of them given."""
    table, rows, lens = ints(9, 40).int(), torch.arange(BS, device=NPU), ints(BS, high=20)
    slots, accepted = ints(BS * WIDTH), ints(BS, 2, high=BS * WIDTH)
    long, short = ints(BS * WIDTH), ints(BS)
    wide = torch.empty(BS * WIDTH, dtype=torch.int32, device=NPU)
    pages = torch.empty(BS, 5, dtype=torch.int32, device=NPU)
    logits, probabilities = torch.randn(BS, 5000, device=NPU), torch.empty(BS, 5000, device=NPU)
    key, value = (torch.randn(BS, 2, 16, device=NPU).half() for _ in "kv")
    caches = [torch.zeros(12, 16, 2, 16, device=NPU).half() for _ in "kv"]
    tree = sk.build_chain_tree(lens, width=WIDTH)
    total = int((WIDTH * (lens + WIDTH)).sum())
    mask = torch.empty(total, dtype=torch.bool, device=NPU)
    moves = [torch.empty(BS * 2, dtype=torch.int64, device=NPU) for _ in "st"]
    packed = torch.empty(BS * 2, dtype=torch.int64, device=NPU)
    slot_map = ints(90)
    return {
        "uniform_cache_locs": lambda: sk.uniform_cache_locs(
            table, rows, lens, width=WIDTH, out=wide, positions_out=long
        ),
        "draft_cache_locs": lambda: sk.draft_cache_locs(
            table, rows, lens, topk=1, steps=WIDTH, out=wide, positions_out=short
        ),
        "extend_cache_locs": lambda: sk.extend_cache_locs(table, rows, lens, lens + 2, total=BS * WIDTH, out=wide),
        "front_cache_locs": lambda: sk.front_cache_locs(slots, lens, width=WIDTH, out=long),
        "translate_locs": lambda: sk.translate_locs(slots, slot_map, page_size=1, out=long),
        "fill_block_table": lambda: sk.fill_block_table(pages, table, rows, lens, page_size=4, slot_map=slot_map),
        "compact_accepted_locs": lambda: sk.compact_accepted_locs(slots, accepted, out=packed),
        "accepted_moves": lambda: sk.accepted_moves(
            slots, accepted, width=WIDTH, sources_out=moves[0], targets_out=moves[1]
        ),
        "bonus_tokens": lambda: sk.bonus_tokens(slots, lens, stride=WIDTH, out=short),
        "wide_row_softmax": lambda: sk.wide_row_softmax(logits, out=probabilities),
        "full_tree_mask": lambda: sk.full_tree_mask(tree.visible, lens, total=total, out=mask),
        "write_kv": lambda: sk.write_kv(key, value, caches[0], caches[1], short),
        "rotate_input_ids": lambda: sk.rotate_input_ids(long, rows * WIDTH, lens, lens),
    }


def test_given_outputs_take_no_memory_of_the_device() -> None:
    taken = {name: counts(call)["device"] for name, call in outputs().items()}
    assert taken == dict.fromkeys(taken, 0) and len(taken) >= 13


def test_the_fill_of_captured_buffers_asks_for_no_block() -> None:
    def full(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=NPU)

    tokens, given, i64, i32 = BS * WIDTH, (BS - 1) * WIDTH, torch.int64, torch.int32
    buffers = sk.DraftExtendBuffers(
        full(tokens, i64), full(tokens, i64), full(tokens, i64), full(BS, i32), full(BS, i64), full(BS, i32),
        full(BS, i32), full(BS, i64), torch.zeros(BS, 1, device=NPU), torch.zeros(tokens, 8, device=NPU), full(2, i32),
    )  # fmt: skip
    batch = sk.DraftExtendBatch(
        ints(given), ints(given), ints(given), ints(BS - 1).int(), ints(BS - 1), ints(BS - 1, high=WIDTH).int(),
        ints(BS - 1).int(), torch.rand(BS - 1, 1, device=NPU), torch.randn(given, 8, device=NPU), BS - 1,
    )  # fmt: skip
    found = counts(lambda: sk.fill_draft_extend_buffers(buffers, batch, bs=BS, width=WIDTH, seq_len_fill=0))
    assert found == {"blocks": 0, "device": 0}


def test_the_planned_fill_asks_for_no_block() -> None:
    layout = kp.RowLayout([kp.RowField(**field) for field in sk.draft_extend_fields(BS, WIDTH, ranks=2)])
    plan = sk.DraftExtendPlan(layout, NPU, hidden_states=torch.zeros(BS * WIDTH, 8, device=NPU))
    tokens, rows = (BS - 1) * WIDTH, BS - 1
    ids, numbers = torch.randint(0, 90, (tokens,)), torch.ones(rows, dtype=torch.int64)
    batch = sk.DraftExtendBatch(
        ids, ids, ids, numbers, numbers, numbers, numbers, torch.rand(rows, 1), torch.randn(tokens, 8, device=NPU)
    )
    found = counts(lambda: plan.fill(batch, bs=BS, width=WIDTH, seq_len_fill=0))
    assert found == {"blocks": 0, "device": 0}


def test_attention_takes_no_memory_of_the_device() -> None:
    cache = torch.randn(5, 128, 2, 64, device=NPU).half()
    metadata = sk.build_paged_metadata([[1, 2], [3]], [1, 1], [140, 5], page_size=128, device=NPU)
    query = torch.randn(2, 1, 4, 64, device=NPU).half()
    found = counts(lambda: sk.paged_attention(query, cache, cache, metadata, scale=0.125, page_size=128))
    assert found["device"] == 0


def test_the_counters_count() -> None:
    held: list[torch.Tensor] = []
    found = counts(lambda: held.append(torch.empty(1 << 20, device=NPU)))
    assert found["blocks"] >= 100 and found["device"] > 0
