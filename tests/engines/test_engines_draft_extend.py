"""SGLang's fill of the draft-extend buffers on the NPU against ours in its form: parameters, live rows, padding."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from engines_pools import NPU
from sglang.kernels.ops.speculative import multi_layer_eagle as engine
from spec_kernels.integrations.sglang import fill_draft_extend_prepare_buffers

ROWS, WIDTH, HIDDEN, FILL = 4, 4, 6, 0
NAMES = list(inspect.signature(fill_draft_extend_prepare_buffers).parameters)[:26]
BUFFERS = [*NAMES[:3], *NAMES[6:12], "hidden_states"]


def buffers() -> dict[str, torch.Tensor]:
    found = {name: torch.full((ROWS * WIDTH,), 77, device=NPU) for name in NAMES[:3]}
    for name in ("seq_lens", "num_correct_drafts", "num_accept_tokens"):
        found[name] = torch.zeros(ROWS, dtype=torch.int32, device=NPU)
    for name in ("req_pool_indices", "select_index"):
        found[name] = torch.zeros(ROWS, dtype=torch.int64, device=NPU)
    found["temperatures"] = torch.zeros(ROWS, 1, device=NPU)
    found["hidden_states"] = torch.zeros(ROWS * WIDTH, HIDDEN, device=NPU)
    return found


def batch(raw_bs: int) -> dict[str, Any]:
    noise = torch.Generator().manual_seed(raw_bs)

    def numbers(count: int, high: int = 900) -> torch.Tensor:
        return torch.randint(1, high, (count,), generator=noise).to(NPU)

    tokens = raw_bs * WIDTH
    return {
        "src_input_ids": numbers(tokens), "src_positions": numbers(tokens), "src_out_cache_loc": numbers(tokens),
        "src_seq_lens": numbers(raw_bs).int(), "src_req_pool_indices": numbers(raw_bs),
        "src_num_correct_drafts": numbers(raw_bs, WIDTH).int(), "src_num_accept_tokens": numbers(raw_bs, WIDTH).int(),
        "src_temperatures": torch.rand(raw_bs, 1, generator=noise).to(NPU),
        "src_hidden_states": torch.randn(tokens, HIDDEN, generator=noise).to(NPU),
        "global_num_tokens": None, "global_num_tokens_for_logprob": None, "raw_bs": raw_bs, "bs": ROWS,
        "num_tokens_per_bs": WIDTH, "num_front_tokens": 0, "seq_len_fill_value": FILL,
    }  # fmt: skip


def fill(function: Any, into: dict[str, torch.Tensor], raw_bs: int) -> None:
    named = {**into, **batch(raw_bs)}
    function(*(named[name] for name in NAMES))


@pytest.mark.parametrize("kind", ["native", "triton"])
def test_the_parameters_are_the_engine_s(kind: str) -> None:
    theirs = inspect.signature(getattr(engine, f"fill_draft_extend_prepare_buffers_{kind}"))
    assert list(theirs.parameters) == NAMES


def test_a_full_bucket_is_alike() -> None:
    ours, theirs = buffers(), buffers()
    fill(fill_draft_extend_prepare_buffers, ours, ROWS)
    fill(engine.fill_draft_extend_prepare_buffers_native, theirs, ROWS)
    for name in BUFFERS:
        assert torch.equal(ours[name].cpu(), theirs[name].cpu()), name


def test_padded_rows_of_a_smaller_batch() -> None:
    """A-02 and A-03: the engine's version keeps what the larger batch left; ours gives every row its declared fill."""
    ours, theirs = buffers(), buffers()
    for raw_bs in (ROWS, 2):
        fill(fill_draft_extend_prepare_buffers, ours, raw_bs)
        fill(engine.fill_draft_extend_prepare_buffers_native, theirs, raw_bs)
    for name in BUFFERS:
        rows = 2 * WIDTH if ours[name].shape[0] == ROWS * WIDTH else 2
        assert torch.equal(ours[name][:rows].cpu(), theirs[name][:rows].cpu()), name
    old = batch(ROWS)
    for name in ("input_ids", "out_cache_loc", "req_pool_indices"):
        rows = 2 if name == "req_pool_indices" else 2 * WIDTH
        assert torch.equal(theirs[name][rows:].cpu(), old[f"src_{name}"][rows:].cpu()), name
        assert not ours[name][rows:].any(), name
    assert ours["select_index"].tolist()[2:] == [2 * WIDTH, 3 * WIDTH]
    stale = old["src_num_correct_drafts"][2:].tolist()
    assert theirs["select_index"].tolist()[2:] == [2 * WIDTH + stale[0], 3 * WIDTH + stale[1]]
