"""vLLM-Ascend's BlockTable against our tables, slots and context-parallel plans."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import kv_planner as kp
import numpy as np
import pytest
import torch
import torch_npu
from kv_pool import block_table, slots_for
from vllm_ascend.worker import block_table as module

NPU = torch.device("npu:0")
PAGE, REQUESTS, COLUMNS = 16, 5, 8


def make(monkeypatch: pytest.MonkeyPatch, *, rank: int = 0, size: int = 1, interleave: int = 1) -> Any:
    group = SimpleNamespace(world_size=size, rank_in_group=rank)
    monkeypatch.setattr(module, "get_dcp_group", lambda: group)
    monkeypatch.setattr(module, "get_pcp_group", lambda: SimpleNamespace(world_size=1, rank_in_group=0))
    return module.BlockTable(
        PAGE, REQUESTS, COLUMNS, 512, True, NPU, kernel_sizes=[PAGE], cp_kv_cache_interleave_size=interleave
    )


def test_rows_follow_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random additions, moves, swaps and removals, then the table on the device."""
    table, draw = make(monkeypatch), random.Random(4)
    pages: list[list[int]] = [[] for _ in range(REQUESTS)]
    for _ in range(60):
        row, other = draw.sample(range(REQUESTS), 2)
        kind = draw.choice(["add", "append", "move", "swap", "clear"])
        fresh = [draw.randint(1, 99) for _ in range(draw.randint(1, 3))]
        if kind == "add":
            table.clear_row(row)
            table.add_row(fresh, row)
            pages[row] = fresh
        elif kind == "append" and len(pages[row]) + len(fresh) <= COLUMNS:
            table.append_row(fresh, row)
            pages[row] = pages[row] + fresh
        elif kind == "move":
            table.clear_row(other)
            table.move_row(row, other)
            pages[other] = list(pages[row])
        elif kind == "swap":
            table.swap_row(row, other)
            pages[row], pages[other] = pages[other], pages[row]
        elif kind == "clear":
            table.clear_row(row)
            pages[row] = []
        table.commit_block_table(REQUESTS)
        torch_npu.npu.synchronize()
        assert np.array_equal(table.get_device_tensor().cpu().numpy(), block_table(pages, columns=COLUMNS))


def test_a_moved_row_keeps_what_was_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving a short row over a longer one leaves the longer one's pages behind it; our tables are built whole."""
    table = make(monkeypatch)
    table.add_row([7], 0)
    table.add_row([3, 4, 5], 1)
    table.move_row(0, 1)
    assert table.get_numpy_array()[1, :3].tolist() == [7, 4, 5]
    assert block_table([[7], [7]], columns=COLUMNS)[1, :3].tolist() == [7, 0, 0]


def test_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    table, pages = make(monkeypatch), [[9, 4, 30], [11], [2, 8]]
    spans = [(5, 40), (0, 16), (15, 18)]
    for row, held in enumerate(pages):
        table.add_row(held, row)
    rows = np.concatenate([np.full(stop - start, row) for row, (start, stop) in enumerate(spans)])
    positions = np.concatenate([np.arange(*span) for span in spans])
    table.compute_slot_mapping_draft(rows, positions)
    torch_npu.npu.synchronize()
    ours = np.concatenate([slots_for(held, *span, PAGE) for held, span in zip(pages, spans, strict=True)])
    assert np.array_equal(table.slot_mapping.gpu[: len(rows)].cpu().numpy(), ours)


@pytest.mark.parametrize("interleave", [1, PAGE])
@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (2, 3), (3, 4)])
def test_slots_of_a_context_parallel_rank(
    monkeypatch: pytest.MonkeyPatch, rank: int, size: int, interleave: int
) -> None:
    """Tokens that the rank does not own have slot -1; the others go where our plans send them."""
    table, pages, tokens = make(monkeypatch, rank=rank, size=size, interleave=interleave), [21, 6, 40, 13], 3 * PAGE + 5
    table.add_row(pages, 0)
    table.compute_slot_mapping_draft(torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens))
    found = table.slot_mapping.cpu[:tokens].tolist()
    source = list(range(1, -(-tokens // PAGE) + 1))
    call: dict[str, Any] = {"page_size": PAGE, "dcp_rank": rank, "dcp_size": size, "tokens": tokens}
    plan = kp.token_interleaved if interleave == 1 else kp.page_interleaved
    expected = [-1] * tokens
    scale = 1 if interleave == 1 else PAGE  # items are tokens or pages
    for from_, to, count in zip(*(column.tolist() for column in plan(source, pages, **call).arrays()), strict=True):
        for offset in range(count * scale):
            if (token := from_ * scale + offset - PAGE) < tokens:
                expected[token] = to * scale + offset
    assert found == expected
