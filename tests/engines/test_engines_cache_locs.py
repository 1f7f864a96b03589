"""Slots of a step's new tokens: SGLang's function on the NPU against our slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ascend_emulator.kernels import DeviceFault
from engines_pools import NPU, PAGE
from kv_pool import slots_for
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func

PAGES = [[9, 4, 30], [11, 2, 6], [8, 7, 3]]
COMMITTED = [5, PAGE - 1, PAGE]


def theirs(width: int) -> torch.Tensor:
    table = torch.zeros(4, 3 * PAGE, dtype=torch.int32)
    for row, pages in enumerate(PAGES):
        table[row + 1] = torch.from_numpy(slots_for(pages, 0, 3 * PAGE, PAGE))
    start = torch.tensor(COMMITTED, device=NPU)
    found: torch.Tensor = assign_extend_cache_locs_func(
        req_pool_indices=torch.arange(1, 4, device=NPU), req_to_token=table.to(NPU), start_offset=start,
        end_offset=start + width, batch_size=3, draft_token_num=width, device=NPU,
    )  # fmt: skip
    return found


@pytest.mark.parametrize("width", [1, 4, 16])
def test_slots(width: int) -> None:
    """Over page edges too; int32 on an NPU."""
    spans = [(start, start + width) for start in COMMITTED]
    expected = np.concatenate([slots_for(pages, *span, PAGE) for pages, span in zip(PAGES, spans, strict=True)])
    found = theirs(width)
    assert found.dtype == torch.int32 and np.array_equal(found.cpu().numpy(), expected)


def test_more_positions_than_the_operator_takes() -> None:
    """A-12: the operator handles 16 positions a request; SGLang passes any width."""
    with pytest.raises(DeviceFault, match="the kernel holds 16"):
        theirs(17)
