"""Owns the contracts of multi-layer drafting: token rotation between draft layers, and the boundary stash.

The stash keeps each request's last `front` committed tokens with their hidden states, so that a draft-extend window can
be widened to the left of the step's own tokens. It does not run draft layers, and maps no step to a layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_kernels._checks import FLOATS, check_disjoint, check_number, check_tensor, output
from spec_kernels.cache_locs import LocsAndPositions
from spec_kernels.dispatch import BackendName, choose, load

__all__ = ["BoundaryStash", "WidenedInputs", "append_to_stash", "rotate_input_ids", "widened_inputs", "widened_locs"]


class BoundaryStash(NamedTuple):
    """The last committed tokens of each pool row; slot `front - 1` is the newest.

    Attributes:
        tokens: Shape: [requests, front]; dtype int32 or int64; contiguous.
        hidden_states: Shape: [requests, front, hidden]; floating point; contiguous.
        valid_lens: Newest slots that hold something. Shape: [requests]; dtype int32 or int64; contiguous.
    """

    tokens: torch.Tensor
    hidden_states: torch.Tensor
    valid_lens: torch.Tensor

    def check(self) -> tuple[int, int, int]:
        """Check the shapes; rows, front and hidden width."""
        check_tensor("stash.tokens", self.tokens, ("requests", "front"))
        rows, front = (int(size) for size in self.tokens.shape)
        device = self.tokens.device
        check_tensor("stash.hidden_states", self.hidden_states, (rows, front, "hidden"), dtypes=FLOATS, device=device)
        check_tensor("stash.valid_lens", self.valid_lens, (rows,), device=device)
        output("stash.tokens", self.tokens, (rows, front), dtype=self.tokens.dtype, device=device)
        output("stash.valid_lens", self.valid_lens, (rows,), dtype=self.valid_lens.dtype, device=device)
        shape, dtype = self.hidden_states.shape, self.hidden_states.dtype
        output("stash.hidden_states", self.hidden_states, shape, dtype=dtype, device=device)
        return rows, front, int(self.hidden_states.shape[2])


class WidenedInputs(NamedTuple):
    """Inputs of a widened draft-extend window.

    Attributes:
        input_ids: Shape: [bs * (front + width)]; dtype int64.
        hidden_states: Shape: [bs * (front + width), hidden]; dtype of the stash.
    """

    input_ids: torch.Tensor
    hidden_states: torch.Tensor


def rotate_input_ids(
    input_ids: torch.Tensor,
    start_locs: torch.Tensor,
    seq_lens: torch.Tensor,
    next_tokens: torch.Tensor,
    *,
    select_index: torch.Tensor | None = None,
    backend: BackendName | None = None,
) -> None:
    """Shift each request's tokens left by one and put the drafted token where the next layer reads it.

    Inside a segment `ids[k] = ids[k + 1]`; then its last cell, or cell `select_index`, gets the new token. The last
    cell keeps its value when another one is selected.

    Args:
        input_ids: Shape: [tokens]; dtype int32 or int64; contiguous.
        start_locs: First cell of each segment; segments are disjoint. Shape: [bs]; dtype int32 or int64.
        seq_lens: Cells of each segment; one that leaves `input_ids` is cut. Shape: [bs]; dtype int32 or int64.
        next_tokens: The drafted tokens; of several candidates the first is taken. Shape: [bs] or [bs, topk]; dtype
            int32 or int64.
        select_index: Cell for the new token; one outside the request's own segment writes nothing. Shape: [bs].
        backend: Insist on a backend.

    Padding: an empty segment changes nothing; zero requests launch nothing.

    Mutates: `input_ids`.

    Raises:
        ShapeError, DtypeError, DeviceError: An argument does not fit its role.
        IndexWidthError: `input_ids` is narrower than the tokens.
        AliasError: `input_ids` shares memory with another argument.

    Source: contracts.md §1.2 and §A-30.
    """
    check_tensor("start_locs", start_locs, ("bs",))
    bs, device = int(start_locs.shape[0]), start_locs.device
    first = next_tokens[:, 0] if next_tokens.ndim == 2 and next_tokens.shape[1] else next_tokens
    check_tensor("next_tokens", first, (bs,), device=device)
    check_tensor("seq_lens", seq_lens, (bs,), device=device)
    inputs = {"start_locs": start_locs, "seq_lens": seq_lens, "next_tokens": next_tokens}
    if select_index is not None:
        check_tensor("select_index", select_index, (bs,), device=device)
        inputs["select_index"] = select_index
    shape = (int(input_ids.shape[0]) if input_ids.ndim == 1 else 0,)
    output("input_ids", input_ids, shape, dtype=first.dtype, device=device, holds=first.dtype)
    check_disjoint({"input_ids": input_ids}, inputs)
    chosen = choose("rotate_input_ids", device, backend)
    if bs and input_ids.numel():
        load("rotate_input_ids", chosen)(input_ids, start_locs, seq_lens, first, select_index)


def append_to_stash(
    stash: BoundaryStash,
    tokens: torch.Tensor,
    hidden_states: torch.Tensor,
    row_ends: torch.Tensor,
    num_available: torch.Tensor,
    req_pool_indices: torch.Tensor,
    *,
    fresh: bool,
    backend: BackendName | None = None,
) -> None:
    """Append each request's newest committed tokens to its stash row, shifting the older ones out.

    Args:
        stash: Destination.
        tokens: Committed tokens, request after request. Shape: [tokens]; dtype not wider than the stash's.
        hidden_states: Shape: [tokens, hidden]; dtype of the stash; any strides.
        row_ends: One past each request's last token row. Shape: [bs]; dtype int32 or int64.
        num_available: Token rows before that end that are committed; may exceed the stash. Shape: [bs].
        req_pool_indices: Distinct stash rows; an index outside the stash is skipped. Shape: [bs].
        fresh: Whether the request starts anew (prefill), so that what its row held does not count.
        backend: Insist on a backend.

    With `m = min(num_available, front)`: the row moves left by `m`, the rows `row_ends - m .. row_ends` follow, and the
    valid length becomes `m` when fresh, else `min(valid + m, front)`.

    Padding: nothing available changes no token, and sets the valid length to 0 when fresh. Rows before the first or
        after the last token row are not read: `m` is cut to what is there.

    Mutates: the named rows of `stash`.

    Raises: as `rotate_input_ids`.

    Source: contracts.md §1.2, `stash_append_boundary_state`.
    """
    rows, front, hidden = stash.check()
    device = stash.tokens.device
    check_tensor("tokens", tokens, ("tokens",), device=device)
    shape = (int(tokens.shape[0]), hidden)
    check_tensor("hidden_states", hidden_states, shape, dtypes=(stash.hidden_states.dtype,), device=device)
    check_tensor("req_pool_indices", req_pool_indices, ("bs",), device=device)
    bs = int(req_pool_indices.shape[0])
    check_tensor("row_ends", row_ends, (bs,), device=device)
    check_tensor("num_available", num_available, (bs,), device=device)
    output("stash.tokens", stash.tokens, (rows, front), dtype=stash.tokens.dtype, device=device, holds=tokens.dtype)
    check_disjoint(
        {f"stash.{name}": tensor for name, tensor in stash._asdict().items()},
        {"tokens": tokens, "hidden_states": hidden_states, "row_ends": row_ends, "num_available": num_available},
    )
    chosen = choose("append_to_stash", device, backend)
    if bs and rows and front:
        load("append_to_stash", chosen)(
            *stash, tokens, hidden_states, row_ends, num_available, req_pool_indices, bool(fresh)
        )


def widened_inputs(
    stash: BoundaryStash,
    predict: torch.Tensor,
    hidden_states: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    *,
    width: int,
    backend: BackendName | None = None,
) -> WidenedInputs:
    """Put each request's stash before its verified tokens: windows of `front + width` rows.

    Must follow sampling and precede `append_to_stash` of the same step.

    Args:
        stash: Shape: see `BoundaryStash`.
        predict: The verified tokens. Shape: [bs * width]; dtype int32 or int64.
        hidden_states: Their hidden states. Shape: [bs * width, hidden]; dtype of the stash; any strides.
        seq_lens: Committed tokens before the verify step. Shape: [bs]; dtype int32 or int64.
        req_pool_indices: An index outside the stash has nothing stashed. Shape: [bs].
        width: Verified tokens a request.
        backend: Insist on a backend.

    Returns:
        New tensors. Front row `j` comes from stash slot `j`, row `front + j` from verified row `j`.

    Padding: front rows below `max(front - valid, front - seq_len, 0)` have id 0 and zeros.

    Mutates: nothing.

    Raises: as `rotate_input_ids`.

    Source: contracts.md §1.2, `fill_widened_draft_extend_inputs`.
    """
    _, front, hidden = stash.check()
    device = stash.tokens.device
    check_number("width", width, least=1)
    check_tensor("req_pool_indices", req_pool_indices, ("bs",), device=device)
    bs = int(req_pool_indices.shape[0])
    check_tensor("predict", predict, (bs * width,), device=device)
    shape = (bs * width, hidden)
    check_tensor("hidden_states", hidden_states, shape, dtypes=(stash.hidden_states.dtype,), device=device)
    check_tensor("seq_lens", seq_lens, (bs,), device=device)
    rows = bs * (front + width)
    ids = torch.empty((rows,), dtype=torch.int64, device=device)
    states = torch.empty((rows, hidden), dtype=stash.hidden_states.dtype, device=device)
    chosen = choose("widened_inputs", device, backend)
    if bs:
        load("widened_inputs", chosen)(*stash, predict, hidden_states, seq_lens, req_pool_indices, ids, states, width)
    return WidenedInputs(ids, states)


def widened_locs(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    stash_valid_lens: torch.Tensor,
    *,
    width: int,
    num_front_tokens: int,
    num_warmup_tokens: int,
    backend: BackendName | None = None,
) -> LocsAndPositions:
    """Return slots and positions of widened windows.

    With `first = max(front - valid, front - seq_len, 0)`: row `j` stands at `seq_len - front + j`, or 0 below `first`;
    it writes its slot from row `min(first + warmup, front)` on, and slot 0 of the reserved page before.

    Args:
        req_to_token: Shape: [requests, positions]; dtype int32 or int64; any strides.
        req_pool_indices: Shape: [bs]; dtype int32 or int64.
        seq_lens: Committed tokens before the verify step. Shape: [bs]; dtype int32 or int64.
        stash_valid_lens: Shape: [stash rows]; dtype int32 or int64.
        width: Verified tokens a request.
        num_front_tokens: Front rows.
        num_warmup_tokens: Front rows that only warm up rolling state.
        backend: Insist on a backend.

    Returns:
        New tensors of shape [bs * (front + width)], both int64.

    Padding: what lies outside the table gives slot 0; a request outside the stash has nothing stashed.

    Mutates: nothing.

    Raises: as `rotate_input_ids`.

    Source: contracts.md §1.2, `compute_widened_draft_extend_locs_positions`.
    """
    check_tensor("req_to_token", req_to_token, ("requests", "positions"))
    device = req_to_token.device
    check_tensor("req_pool_indices", req_pool_indices, ("bs",), device=device)
    bs = int(req_pool_indices.shape[0])
    check_tensor("seq_lens", seq_lens, (bs,), device=device)
    check_tensor("stash_valid_lens", stash_valid_lens, ("stash rows",), device=device)
    check_number("width", width, least=1)
    check_number("num_front_tokens", num_front_tokens, least=0)
    check_number("num_warmup_tokens", num_warmup_tokens, least=0)
    result = torch.empty((2, bs * (num_front_tokens + width)), dtype=torch.int64, device=device)
    chosen = choose("widened_locs", device, backend)
    if bs:
        load("widened_locs", chosen)(
            req_to_token, req_pool_indices, seq_lens, stash_valid_lens, result[0], result[1], num_front_tokens,
            num_warmup_tokens,
        )  # fmt: skip
    return LocsAndPositions(result[0], result[1])
