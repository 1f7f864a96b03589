"""What vLLM-Ascend's draft proposer hands its model after a verify step, on the emulated NPU, against plain loops.

The proposer's own methods run on an object without its construction, which loads a draft model.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm_ascend.attention.utils import AscendCommonAttentionMetadata
from vllm_ascend.spec_decode.llm_base_proposer import AscendSpecDecodeBaseProposer

NPU = torch.device("npu:0")


class Verified:
    """Requests after a verify step: how many drafts each had, and how many tokens it kept (the bonus included).

    A request without drafts brought one token, or a chunk of its prompt.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.drafts = [draw.randint(0, 4) for _ in range(6)]
        self.tokens = [count + 1 if count else draw.randint(1, 9) for count in self.drafts]
        self.kept = [draw.randint(1, count + 1) if count else 1 for count in self.drafts]
        self.rejected = [count + 1 - kept if count else 0 for count, kept in zip(self.drafts, self.kept, strict=True)]
        self.lens = [tokens + draw.randint(0, 300) for tokens in self.tokens]
        self.starts = [0, *torch.tensor(self.tokens).cumsum(0).tolist()]
        starts, lens = torch.tensor(self.starts, dtype=torch.int32), torch.tensor(self.lens, dtype=torch.int32)
        total = self.starts[-1]
        self.metadata = AscendCommonAttentionMetadata(
            query_start_loc=starts.to(NPU), query_start_loc_cpu=starts, seq_lens=lens.to(NPU), seq_lens_cpu=lens,
            num_reqs=6, num_actual_tokens=total, max_query_len=max(self.tokens), max_seq_len=max(self.lens),
            block_table_tensor=torch.zeros(6, 4, dtype=torch.int32, device=NPU),
            slot_mapping=torch.arange(500, 500 + total, dtype=torch.int32, device=NPU),
            positions=torch.arange(900, 900 + total, device=NPU), causal=True,
        )  # fmt: skip


@pytest.fixture
def proposer() -> Any:
    made: Any = object.__new__(AscendSpecDecodeBaseProposer)
    made.token_arange_np, made.arange, made.pcp_size = np.arange(256), torch.arange(256, device=NPU), 1
    made.runner = SimpleNamespace(actual_seq_lengths_q=[], attn_state=None, decode_token_per_req=1)
    return made


@pytest.mark.parametrize("seed", range(4))
def test_rejected_tokens_are_cut_out(proposer: Any, seed: int) -> None:
    step = Verified(seed)
    sampled = [list(range(kept)) for kept in step.kept]
    made, indices = proposer.prepare_inputs(step.metadata, sampled, step.drafts)
    wanted: list[int] = []
    starts = [0]
    for start, tokens, rejected in zip(step.starts, step.tokens, step.rejected, strict=False):
        wanted += range(start, start + tokens - rejected)
        starts.append(len(wanted))
    assert indices.cpu().tolist() == wanted
    assert made.query_start_loc.cpu().tolist() == made.query_start_loc_cpu.tolist() == starts
    lens = [length - rejected for length, rejected in zip(step.lens, step.rejected, strict=True)]
    assert made.seq_lens.cpu().tolist() == made.seq_lens_cpu.tolist() == lens
    assert made.positions.cpu().tolist() == [900 + index for index in wanted]
    left = step.starts[-1] - len(wanted)
    assert made.slot_mapping.cpu().tolist() == [*(500 + index for index in wanted), *[-1] * left]


@pytest.mark.parametrize("seed", range(4))
def test_rejected_tokens_stay_as_padding(proposer: Any, seed: int) -> None:
    """The form without a wait of the host: all tokens stay, and each request names the row that it samples from."""
    step = Verified(seed)
    ends = torch.tensor(step.drafts).cumsum(0).to(torch.int32).to(NPU)
    kept = torch.tensor(step.kept, dtype=torch.int32, device=NPU)
    made, indices, rows, rejected = proposer.prepare_inputs_padded(
        step.metadata, SimpleNamespace(cu_num_draft_tokens=ends), kept
    )
    assert rejected.cpu().tolist() == step.rejected
    assert indices.cpu().tolist() == list(range(step.starts[-1]))
    last = [end - 1 - count for end, count in zip(step.starts[1:], step.rejected, strict=True)]
    assert rows.cpu().tolist() == last
    assert torch.equal(made.slot_mapping.cpu(), step.metadata.slot_mapping.cpu())
    assert made.seq_lens_cpu.tolist() == step.lens
