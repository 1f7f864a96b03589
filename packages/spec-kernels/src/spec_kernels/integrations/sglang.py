"""Owns SGLang's form of the draft-extend fill: 26 positional parameters, in SGLang 0.5.23's order.

It imports nothing of SGLang. What the op refuses, this refuses; nothing is left over from an earlier batch.
"""

from __future__ import annotations

import torch

from spec_kernels.dispatch import BackendName
from spec_kernels.draft_extend import DraftExtendBatch, DraftExtendBuffers, fill_draft_extend_buffers

__all__ = ["fill_draft_extend_prepare_buffers"]


def fill_draft_extend_prepare_buffers(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    src_input_ids: torch.Tensor,
    src_positions: torch.Tensor,
    src_out_cache_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    num_correct_drafts: torch.Tensor,
    num_accept_tokens: torch.Tensor,
    select_index: torch.Tensor,
    temperatures: torch.Tensor | None,
    src_seq_lens: torch.Tensor,
    src_req_pool_indices: torch.Tensor,
    src_num_correct_drafts: torch.Tensor,
    src_num_accept_tokens: torch.Tensor,
    src_temperatures: torch.Tensor | None,
    hidden_states: torch.Tensor,
    src_hidden_states: torch.Tensor | None,
    global_num_tokens: torch.Tensor | None,
    global_num_tokens_for_logprob: torch.Tensor | None,
    raw_bs: int,
    bs: int,
    num_tokens_per_bs: int,
    num_front_tokens: int,
    seq_len_fill_value: int,
    *,
    backend: BackendName | None = None,
) -> None:
    """As `spec_kernels.fill_draft_extend_buffers`, which says what each parameter means and what is refused.

    `src_hidden_states` of None leaves `hidden_states` alone: SGLang passes it when the widths differ, and fills the
    buffer elsewhere. `src_temperatures` without `temperatures` is not read.

    Args:
        input_ids: Buffer. Shape: [max_tokens].
        positions: Buffer. Shape: [max_tokens].
        out_cache_loc: Buffer. Shape: [max_tokens].
        src_input_ids: Shape: [raw_bs * num_tokens_per_bs].
        src_positions: Likewise.
        src_out_cache_loc: Likewise.
        seq_lens: Buffer. Shape: [max_rows].
        req_pool_indices: Buffer. Shape: [max_rows].
        num_correct_drafts: Buffer. Shape: [max_rows].
        num_accept_tokens: Buffer. Shape: [max_rows].
        select_index: Buffer. Shape: [max_rows].
        temperatures: Buffer. Shape: [max_rows, 1].
        src_seq_lens: Shape: [raw_bs], or longer.
        src_req_pool_indices: Likewise.
        src_num_correct_drafts: Likewise.
        src_num_accept_tokens: Likewise.
        src_temperatures: Likewise, or [raw_bs, 1].
        hidden_states: Buffer. Shape: [max_tokens, hidden].
        src_hidden_states: Shape: [raw_bs * num_tokens_per_bs, hidden].
        global_num_tokens: Buffer. Shape: [ranks].
        global_num_tokens_for_logprob: Buffer. Shape: [ranks].
        raw_bs: Live requests.
        bs: Rows of the bucket.
        num_tokens_per_bs: Token rows of each request, front tokens included.
        num_front_tokens: Front tokens.
        seq_len_fill_value: Length of a row without a request.
        backend: Insist on a backend.

    Mutates: every buffer.

    Raises:
        SpecKernelsError: See `fill_draft_extend_buffers`.

    Source: contracts.md §1.1.
    """
    buffers = DraftExtendBuffers(
        input_ids,
        positions,
        out_cache_loc,
        seq_lens,
        req_pool_indices,
        num_correct_drafts,
        num_accept_tokens,
        select_index,
        temperatures,
        None if src_hidden_states is None else hidden_states,
        global_num_tokens,
        global_num_tokens_for_logprob,
    )
    batch = DraftExtendBatch(
        src_input_ids,
        src_positions,
        src_out_cache_loc,
        src_seq_lens,
        src_req_pool_indices,
        src_num_correct_drafts,
        src_num_accept_tokens,
        None if temperatures is None else src_temperatures,
        src_hidden_states,
        raw_bs,
    )
    fill_draft_extend_buffers(
        buffers,
        batch,
        bs=bs,
        width=num_tokens_per_bs,
        num_front_tokens=num_front_tokens,
        seq_len_fill=seq_len_fill_value,
        backend=backend,
    )
