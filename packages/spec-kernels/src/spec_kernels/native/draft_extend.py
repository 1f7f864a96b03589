"""Owns the draft-extend buffer fill in plain torch, as the custom operator `spec_kernels::fill_draft_extend_buffers`.

Each buffer is written twice at most, source rows and fill, with static shapes and no host synchronisation. Sources do
not alias destinations here (see `spec_kernels.draft_extend`, which owns the contract and the checks).
"""

from __future__ import annotations

import torch

from spec_kernels.draft_extend import DraftExtendBatch, DraftExtendBuffers

__all__ = ["OUTPUTS", "SOURCES", "copy_rows", "fill_draft_extend_buffers", "run", "schema"]

OUTPUTS = (
    "input_ids",
    "positions",
    "out_cache_loc",
    "seq_lens",
    "req_pool_indices",
    "num_correct_drafts",
    "num_accept_tokens",
    "select_index",
    "temperatures",
    "hidden_states",
    "global_num_tokens",
    "global_num_tokens_for_logprob",
)
_OPTIONAL = OUTPUTS[8:]
SOURCES = (*OUTPUTS[:7], *OUTPUTS[8:10])


def schema() -> str:
    """Schema of the operator, shared by its backends."""
    outputs = [f"Tensor(a{i}!){'?' if name in _OPTIONAL else ''} {name}" for i, name in enumerate(OUTPUTS)]
    sources = [f"Tensor{'?' if name in _OPTIONAL else ''} src_{name}" for name in SOURCES]
    return f"({', '.join(outputs + sources)}, *, SymInt bs, SymInt width, SymInt front, SymInt fill) -> ()"


@torch.library.custom_op("spec_kernels::fill_draft_extend_buffers", mutates_args=OUTPUTS, schema=schema())
def fill_draft_extend_buffers(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    num_correct_drafts: torch.Tensor,
    num_accept_tokens: torch.Tensor,
    select_index: torch.Tensor,
    temperatures: torch.Tensor | None,
    hidden_states: torch.Tensor | None,
    global_num_tokens: torch.Tensor | None,
    global_num_tokens_for_logprob: torch.Tensor | None,
    src_input_ids: torch.Tensor,
    src_positions: torch.Tensor,
    src_out_cache_loc: torch.Tensor,
    src_seq_lens: torch.Tensor,
    src_req_pool_indices: torch.Tensor,
    src_num_correct_drafts: torch.Tensor,
    src_num_accept_tokens: torch.Tensor,
    src_temperatures: torch.Tensor | None,
    src_hidden_states: torch.Tensor | None,
    *,
    bs: int,
    width: int,
    front: int,
    fill: int,
) -> None:
    """See `spec_kernels.fill_draft_extend_buffers`.

    Mutates: every argument without the prefix `src_`.
    """
    copy_rows(input_ids, src_input_ids, 0)
    copy_rows(positions, src_positions, 0)
    copy_rows(out_cache_loc, src_out_cache_loc, 0)
    copy_rows(seq_lens, src_seq_lens, fill)
    copy_rows(req_pool_indices, src_req_pool_indices, 0)
    copy_rows(num_correct_drafts, src_num_correct_drafts, 0)
    copy_rows(num_accept_tokens, src_num_accept_tokens, -1)
    torch.arange(
        front, front + width * select_index.shape[0], width, dtype=select_index.dtype, device=select_index.device,
        out=select_index,
    )  # fmt: skip
    select_index.add_(num_correct_drafts)
    if temperatures is not None:
        copy_rows(temperatures.view(-1), src_temperatures, 1.0)
    if hidden_states is not None:
        copy_rows(hidden_states, src_hidden_states, 0)
    for counts in (global_num_tokens, global_num_tokens_for_logprob):
        if counts is not None:
            counts.fill_(bs * width)


@fill_draft_extend_buffers.register_fake
def _fill_draft_extend_buffers_fake(*args: torch.Tensor | None, bs: int, width: int, front: int, fill: int) -> None:
    return None


def run(buffers: DraftExtendBuffers, batch: DraftExtendBatch, *, bs: int, width: int, front: int, fill: int) -> None:
    """Backend entry."""
    outputs = [getattr(buffers, name) for name in OUTPUTS]
    sources = [getattr(batch, name) for name in SOURCES]
    fill_draft_extend_buffers(*outputs, *sources, bs=bs, width=width, front=front, fill=fill)


def copy_rows(target: torch.Tensor, source: torch.Tensor | None, fill: float) -> None:
    """Copy the rows of a source, and give the other rows the fill."""
    rows = 0 if source is None else source.shape[0]
    if source is not None and rows:
        target[:rows].copy_(source)
    if rows < target.shape[0]:
        target[rows:].fill_(fill)
