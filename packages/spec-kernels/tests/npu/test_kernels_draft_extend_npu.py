"""Owns the proof that the draft-extend fill gives on an NPU what it gives on a CPU, history and aliasing included."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import spec_kernels as sk
import torch

NPU = "npu:0"


def _garbage(rows: int, tokens: int, device: str) -> sk.DraftExtendBuffers:
    def numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), 7777, dtype=dtype, device=device)

    return sk.DraftExtendBuffers(
        input_ids=numbers(tokens, torch.int64),
        positions=numbers(tokens, torch.int64),
        out_cache_loc=numbers(tokens, torch.int64),
        seq_lens=numbers(rows, torch.int32),
        req_pool_indices=numbers(rows, torch.int64),
        num_correct_drafts=numbers(rows, torch.int32),
        num_accept_tokens=numbers(rows, torch.int32),
        select_index=numbers(rows, torch.int64),
        temperatures=torch.full((rows, 1), 9.0, device=device),
        hidden_states=torch.full((tokens, 5), 9.0, dtype=torch.float16, device=device),
        global_num_tokens=numbers(2, torch.int32),
    )


def _batch(raw_bs: int, width: int, device: str) -> sk.DraftExtendBatch:
    random = torch.Generator().manual_seed(raw_bs)

    def numbers(count: int, high: int = 900) -> torch.Tensor:
        return torch.randint(0, high, (count,), generator=random).to(device)

    tokens = raw_bs * width
    return sk.DraftExtendBatch(
        input_ids=numbers(tokens),
        positions=numbers(tokens),
        out_cache_loc=numbers(tokens),
        seq_lens=numbers(raw_bs),
        req_pool_indices=numbers(raw_bs),
        num_correct_drafts=numbers(raw_bs, width),
        num_accept_tokens=numbers(raw_bs, width + 1),
        temperatures=torch.rand(raw_bs, generator=random).to(device),
        hidden_states=torch.randn(5, tokens, generator=random).half().to(device).t(),
    )


def _equal(found: sk.DraftExtendBuffers, expected: sk.DraftExtendBuffers) -> None:
    for item in fields(found):
        left: Any = getattr(found, item.name)
        right: Any = getattr(expected, item.name)
        assert (left is None) == (right is None)
        if left is not None:
            assert torch.equal(left.cpu(), right), item.name


def test_the_device_gives_what_the_host_gives() -> None:
    assert sk.choose("fill_draft_extend_buffers", NPU) == "native"
    host, device = _garbage(4, 17, "cpu"), _garbage(4, 17, NPU)
    for raw_bs in (4, 2, 0, 1):
        for buffers, where in ((host, "cpu"), (device, NPU)):
            sk.fill_draft_extend_buffers(buffers, _batch(raw_bs, 4, where), bs=4, width=4, seq_len_fill=0)
        _equal(device, host)


def test_sources_inside_the_buffers() -> None:
    results = []
    for where in ("cpu", NPU):
        buffers = _garbage(4, 16, where)
        sk.fill_draft_extend_buffers(buffers, _batch(4, 4, where), bs=4, width=4, seq_len_fill=1)
        batch = replace(
            _batch(2, 4, where),
            input_ids=buffers.positions[4:12],
            positions=buffers.input_ids[2:10],
            seq_lens=buffers.seq_lens[1:3],
        )
        sk.fill_draft_extend_buffers(buffers, batch, bs=3, width=4, seq_len_fill=1)
        results.append(buffers)
    _equal(results[1], results[0])
