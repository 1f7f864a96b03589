"""Owns the bookkeeping between verify and draft-extend: bonus tokens, new lengths, and the inputs of the next step.

Lengths that it returns say what they count; nobody adds a window to them later. It reads no token probabilities.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_kernels._checks import check_disjoint, check_number, check_tensor, output
from spec_kernels.dispatch import BackendName, choose, load

__all__ = [
    "DraftExtendInputs",
    "DraftExtendLayout",
    "VerifyCommit",
    "bonus_tokens",
    "draft_extend_inputs",
    "draft_extend_layout",
    "verify_commit_outputs",
]


class VerifyCommit(NamedTuple):
    """What a verify step commits, one row a request; every tensor has shape [bs] and dtype int64.

    Attributes:
        seq_lens: Committed tokens, this step's accepted ones and the bonus included.
        bonus: Last accepted token; 0 in a padded row.
        last_step: Column of the block that holds the last accepted token; 0 in a padded row.
        track_step: `last_step` where the new length crosses a multiple of the tracking interval, else -1.
        num_correct_drafts: Accepted tokens less the bonus; 0 in a padded row.
        select_index: Token row that continues the request: `row * width + num_correct_drafts`.
    """

    seq_lens: torch.Tensor
    bonus: torch.Tensor
    last_step: torch.Tensor
    track_step: torch.Tensor
    num_correct_drafts: torch.Tensor
    select_index: torch.Tensor


class DraftExtendInputs(NamedTuple):
    """Inputs of a draft-extend step after a chain was verified.

    Attributes:
        num_correct_drafts: Shape: [bs]; dtype int64.
        select_index: Shape: [bs]; dtype int64.
        input_ids: The verified tokens; a negative one becomes 0. Shape: [bs * width]; dtype int64.
    """

    num_correct_drafts: torch.Tensor
    select_index: torch.Tensor
    input_ids: torch.Tensor


class DraftExtendLayout(NamedTuple):
    """Where the tokens of a draft-extend step stand.

    Attributes:
        prefix_lens: Tokens before the window, never below 0. Shape: [bs]; dtype int64.
        extend_lens: Tokens of the window. Shape: [bs]; dtype int64.
        seq_lens: Tokens after the step. Shape: [bs]; dtype int64.
        start_locs: First token row of each request. Shape: [bs]; dtype int64.
        positions: Position of each token; 0 for front tokens before the sequence. Shape: [bs * (width + front)];
            dtype int64.
    """

    prefix_lens: torch.Tensor
    extend_lens: torch.Tensor
    seq_lens: torch.Tensor
    start_locs: torch.Tensor
    positions: torch.Tensor


def bonus_tokens(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    *,
    stride: int,
    out: torch.Tensor | None = None,
    backend: BackendName | None = None,
) -> torch.Tensor:
    """Return the last accepted token of each request: `accept_tokens[row * stride + accept_lens[row] - 1]`.

    Args:
        accept_tokens: Shape: [bs * stride]; dtype int32 or int64.
        accept_lens: Accepted tokens, the bonus included, up to `stride`. Shape: [bs]; dtype int32 or int64.
        stride: Tokens that each request's row holds: the longest chain plus one.
        out: Shape: [bs].
        backend: Insist on a backend.

    Returns:
        Shape: [bs]; dtype of the tokens.

    Padding: a row that accepted nothing, or more than its row holds, gives 0.

    Mutates: `out`, every element.

    Raises:
        ShapeError, DtypeError, DeviceError, IndexWidthError, AliasError: See `cache_locs.uniform_cache_locs`.

    Source: contracts.md §1.4, `fill_bonus_tokens`; field_faults F03.
    """
    check_number("stride", stride, least=1)
    check_tensor("accept_lens", accept_lens, ("bs",))
    bs, device = int(accept_lens.shape[0]), accept_lens.device
    check_tensor("accept_tokens", accept_tokens, (bs * stride,), device=device)
    dtype = accept_tokens.dtype
    bonus = output("out", out, (bs,), dtype=dtype, device=device, holds=dtype)
    check_disjoint({"out": bonus}, {"accept_tokens": accept_tokens, "accept_lens": accept_lens})
    chosen = choose("bonus_tokens", device, backend)
    if bs:
        load("bonus_tokens", chosen)(accept_tokens, accept_lens, bonus, stride)
    return bonus


def verify_commit_outputs(
    predict: torch.Tensor,
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    width: int,
    track_interval: int = 0,
    backend: BackendName | None = None,
) -> VerifyCommit:
    """Derive from a verify step what its requests commit.

    Args:
        predict: The target's token after each token row. Shape: [bs * width]; dtype int32 or int64.
        accept_index: Accepted token rows of each request, then -1. Shape: [bs, depth]; dtype int32 or int64.
        accept_lens: Accepted tokens, the bonus included; 0 marks a padded row. Shape: [bs]; dtype int32 or int64.
        seq_lens: Committed tokens before this step. Shape: [bs]; dtype int32 or int64.
        width: Tokens a request in the verify block.
        track_interval: Tokens between states that a recurrent layer keeps; 0 keeps none.
        backend: Insist on a backend.

    Returns:
        New tensors. With `last = accept_index[row, accept_lens[row] - 1]`: the bonus is `predict[last]`, the last step
        `last - row * width`.

    Padding: a row that accepted nothing keeps its length and gives zeros, -1 as the tracking step, and `row * width`
        as its token row. A last index outside the request's own block counts as its first token.

    Mutates: nothing.

    Raises: as `bonus_tokens`.

    Source: contracts.md §1.4, `prepare_verify_commit_outputs`.
    """
    check_number("width", width, least=1)
    check_number("track_interval", track_interval, least=0)
    check_tensor("accept_index", accept_index, ("bs", "depth"))
    bs, device = int(accept_index.shape[0]), accept_index.device
    check_tensor("predict", predict, (bs * width,), device=device)
    check_tensor("accept_lens", accept_lens, (bs,), device=device)
    check_tensor("seq_lens", seq_lens, (bs,), device=device)
    results = torch.empty((6, bs), dtype=torch.int64, device=device)
    chosen = choose("verify_commit_outputs", device, backend)
    if bs:
        load("verify_commit_outputs", chosen)(
            predict, accept_index, accept_lens, seq_lens, results, width, track_interval
        )
    return VerifyCommit(*results.unbind(0))


def draft_extend_inputs(
    predict: torch.Tensor, accept_lens: torch.Tensor, *, width: int, backend: BackendName | None = None
) -> DraftExtendInputs:
    """Derive the inputs of a draft-extend step from a verified chain.

    Args:
        predict: The target's token after each token row; -1 is a placeholder. Shape: [bs * width]; int32 or int64.
        accept_lens: Accepted tokens, the bonus included. Shape: [bs]; dtype int32 or int64.
        width: Tokens a request in the verify block.
        backend: Insist on a backend.

    Returns:
        New tensors: `accept_lens - 1`, `row * width + accept_lens - 1`, and the tokens as int64.

    Padding: a row that accepted nothing counts as one without drafts. A negative token becomes 0, so that no embedding
        is indexed from its end.

    Mutates: nothing.

    Raises: as `bonus_tokens`.

    Source: contracts.md §1.4, `prepare_draft_extend_inputs`; field_faults F01.
    """
    check_number("width", width, least=1)
    check_tensor("accept_lens", accept_lens, ("bs",))
    bs, device = int(accept_lens.shape[0]), accept_lens.device
    check_tensor("predict", predict, (bs * width,), device=device)
    rows = torch.empty((2, bs), dtype=torch.int64, device=device)
    ids = torch.empty((bs * width,), dtype=torch.int64, device=device)
    chosen = choose("draft_extend_inputs", device, backend)
    if bs:
        load("draft_extend_inputs", chosen)(predict, accept_lens, rows, ids, width)
    return DraftExtendInputs(rows[0], rows[1], ids)


def draft_extend_layout(
    seq_lens: torch.Tensor, *, width: int, num_front_tokens: int = 0, backend: BackendName | None = None
) -> DraftExtendLayout:
    """Lay out a draft-extend step of `num_front_tokens + width` tokens a request.

    Args:
        seq_lens: Committed tokens before the verify step. Shape: [bs]; dtype int32 or int64. Never mutated.
        width: Tokens of the verify block.
        num_front_tokens: Context tokens before them.
        backend: Insist on a backend.

    Returns:
        New tensors. With base `b`: prefix `max(b - front, 0)`, window `width + front`, length after the step
        `b + width`, positions `b - front + j`.

    Padding: zero requests give empty tensors; a negative length counts as 0.

    Mutates: nothing; two calls with one input give one answer.

    Raises: as `bonus_tokens`.

    Source: contracts.md §1.4, `prepare_draft_extend_lengths`, `..._layout`; field_faults E12.
    """
    check_number("width", width, least=1)
    check_number("num_front_tokens", num_front_tokens, least=0)
    check_tensor("seq_lens", seq_lens, ("bs",))
    bs = int(seq_lens.shape[0])
    rows = torch.empty((4, bs), dtype=torch.int64, device=seq_lens.device)
    positions = torch.empty((bs * (width + num_front_tokens),), dtype=torch.int64, device=seq_lens.device)
    chosen = choose("draft_extend_layout", seq_lens.device, backend)
    if bs:
        load("draft_extend_layout", chosen)(seq_lens, rows, positions, width, num_front_tokens)
    return DraftExtendLayout(rows[0], rows[1], rows[2], rows[3], positions)
