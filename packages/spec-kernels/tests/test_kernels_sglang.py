"""Owns the proof that SGLang's form of the fill takes its parameters in its order and writes what the op writes."""

from __future__ import annotations

import inspect
from typing import Any

import spec_kernels as sk
import torch
from spec_kernels.integrations.sglang import fill_draft_extend_prepare_buffers

ORDER = [
    "input_ids",
    "positions",
    "out_cache_loc",
    "src_input_ids",
    "src_positions",
    "src_out_cache_loc",
    "seq_lens",
    "req_pool_indices",
    "num_correct_drafts",
    "num_accept_tokens",
    "select_index",
    "temperatures",
    "src_seq_lens",
    "src_req_pool_indices",
    "src_num_correct_drafts",
    "src_num_accept_tokens",
    "src_temperatures",
    "hidden_states",
    "src_hidden_states",
    "global_num_tokens",
    "global_num_tokens_for_logprob",
    "raw_bs",
    "bs",
    "num_tokens_per_bs",
    "num_front_tokens",
    "seq_len_fill_value",
]


def test_the_26_parameters_in_order() -> None:
    kinds = inspect.signature(fill_draft_extend_prepare_buffers).parameters
    positional = [name for name, one in kinds.items() if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert positional == ORDER and len(ORDER) == 26
    assert all(kinds[name].default is inspect.Parameter.empty for name in ORDER)


def arguments(place: Any, raw_bs: int, hidden: bool) -> list[Any]:
    """Two rows of front token and two tokens each, in buffers of four rows full of garbage."""

    def garbage(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, 7777, dtype=dtype, device=place.device)

    def source(count: int, first: int) -> torch.Tensor:
        return torch.arange(first, first + count, device=place.device)

    tokens = raw_bs * 3
    return [
        garbage(12), garbage(12), garbage(12), source(tokens, 1), source(tokens, 20), source(tokens, 40),
        garbage(4, dtype=torch.int32), garbage(4), garbage(4, dtype=torch.int32), garbage(4, dtype=torch.int32),
        garbage(4), garbage(4, 1, dtype=torch.float32), source(3, 60), source(3, 70), source(3, 0) % 2, source(3, 1),
        torch.full((3, 1), 0.5, device=place.device), garbage(12, 2, dtype=torch.float32),
        torch.ones(tokens, 2, device=place.device) if hidden else None, garbage(2, dtype=torch.int32),
        garbage(2, dtype=torch.int32), raw_bs, 3, 3, 1, 0,
    ]  # fmt: skip


def test_it_writes_every_row(place: Any) -> None:
    given = arguments(place, 2, hidden=True)
    fill_draft_extend_prepare_buffers(*given, backend=place.backend)
    named = dict(zip(ORDER, given, strict=True))
    assert named["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0, 0]
    assert named["out_cache_loc"].tolist() == [*range(40, 46), 0, 0, 0, 0, 0, 0]
    assert named["seq_lens"].tolist() == [60, 61, 0, 0] and named["req_pool_indices"].tolist() == [70, 71, 0, 0]
    assert named["num_accept_tokens"].tolist() == [1, 2, -1, -1]
    assert named["select_index"].tolist() == [1, 5, 7, 10]
    assert named["temperatures"].flatten().tolist() == [0.5, 0.5, 1.0, 1.0]
    assert named["hidden_states"].sum(1).tolist() == [2.0] * 6 + [0.0] * 6
    assert named["global_num_tokens"].tolist() == named["global_num_tokens_for_logprob"].tolist() == [9, 9]


def test_hidden_states_of_another_width_are_somebody_elses(place: Any) -> None:
    given = arguments(place, 1, hidden=False)
    fill_draft_extend_prepare_buffers(*given, backend=place.backend)
    assert (given[ORDER.index("hidden_states")] == 7777).all()


def test_the_table_of_backends() -> None:
    text = str(sk.backends(capabilities=sk.Capabilities()))
    lines = text.splitlines()
    assert [line.split()[0] for line in lines] == list(sk.ops())
    assert all("native: yes" in line for line in lines)
    assert "triton: triton is not installed" in text and "npu: serves npu only" in text
