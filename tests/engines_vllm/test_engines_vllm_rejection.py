"""vLLM-Ascend's rejection sampling of drafts on the emulated NPU (its torch form), against plain loops."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import pytest
import torch
from vllm_ascend.sample import rejection_sampler as module

NPU, PAD, VOCABULARY = "npu:0", -1, 7


def device(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=NPU)


@pytest.mark.parametrize("seed", range(4))
def test_greedy(seed: int) -> None:
    """Drafts are kept while they are the target's choice; then comes its choice, or the bonus at the end."""
    draw = random.Random(seed)
    counts = [draw.randint(1, 4) for _ in range(5)]
    drafts = [[draw.randint(0, 2) for _ in range(count)] for count in counts]
    target = [[draw.randint(0, 2) for _ in range(count)] for count in counts]
    bonus = [draw.randint(10, 19) for _ in counts]
    expected = []
    for mine, theirs, last in zip(drafts, target, bonus, strict=True):
        row = []
        for draft, choice in zip(mine, theirs, strict=True):
            row.append(choice)
            if draft != choice:
                break
        else:
            row.append(last)
        expected.append(row + [PAD] * (max(counts) + 1 - len(row)))
    out = torch.full((5, max(counts) + 1), PAD, dtype=torch.int32, device=NPU)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32).to(NPU)
    module.rejection_greedy_sample_pytorch(
        out,
        ends,
        device([*chain(*drafts)]),
        device([*chain(*target)]),
        device(bonus).view(-1, 1),
        counts,
        max(counts),
        None,
    )
    assert out.cpu().tolist() == expected


@pytest.mark.parametrize("ngram", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_random(seed: int, ngram: bool) -> None:
    """A draft is kept where the target's probability over the draft's reaches the uniform number; else recovered."""
    draw = torch.Generator().manual_seed(seed)
    counts = [1, 3, 2, 4]
    tokens, longest = sum(counts), max(counts)
    drafts = torch.randint(0, VOCABULARY, (tokens,), generator=draw)
    draft_probs, target_probs = (torch.rand(tokens, VOCABULARY, generator=draw).softmax(-1) for _ in range(2))
    uniform = torch.rand(tokens, generator=draw, dtype=torch.float64)
    recovered, bonus = torch.arange(100, 100 + tokens), torch.arange(200, 200 + len(counts))
    expected, start = [], 0
    for row, count in enumerate(counts):
        kept = []
        for at in range(start, start + count):
            token = int(drafts[at])
            before = 1.0 if ngram else float(draft_probs[at, token])
            if float(target_probs[at, token]) / before >= float(uniform[at]):
                kept.append(token)
                continue
            kept.append(int(recovered[at]))
            break
        else:
            kept.append(int(bonus[row]))
        expected.append(kept + [PAD] * (longest + 1 - len(kept)))
        start += count
    out = torch.full((len(counts), longest + 1), PAD, dtype=torch.int32, device=NPU)
    module.rejection_random_sample_pytorch(
        out, torch.tensor(counts).cumsum(0).to(torch.int32).to(NPU), drafts.to(torch.int32).to(NPU),
        None if ngram else draft_probs.to(NPU), target_probs.to(NPU), bonus.to(torch.int32).view(-1, 1).to(NPU),
        recovered.to(torch.int32).to(NPU), uniform.to(NPU), torch.zeros(len(counts), dtype=torch.bool, device=NPU),
        longest, VOCABULARY, IS_NGRAM=ngram,
    )  # fmt: skip
    assert out.cpu().tolist() == expected


def test_numbers_of_requests_spread_over_their_tokens() -> None:
    counts = [2, 0, 3, 1]
    ends = torch.tensor(counts).cumsum(0).to(torch.int32).to(NPU)
    found = module.expand_batch_to_tokens(device([5.0, 6.0, 0.0, 8.0], torch.float32), ends, 6, 0, 1)
    assert found.cpu().tolist() == [5, 5, 1, 1, 1, 8]
