"""vLLM-Ascend's ops around drafting: npu_copy_and_expand_eagle_inputs, npu_ngram_spec_decode and the vocabulary mask.

This module owns the ops' definitions (torch_npu has none) and their refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .definitions import define
from .errors import DeviceFault
from .rules import declare, note, refuse

OP_EAGLE = "_C_ascend::npu_copy_and_expand_eagle_inputs"
OP_NGRAM = "_C_ascend::npu_ngram_spec_decode"
OP_VOCABULARY = "_C_ascend::get_masked_input_and_mask"
SCHEMAS = (
    "npu_copy_and_expand_eagle_inputs(Tensor target_token_ids, Tensor target_positions, Tensor next_token_ids, "
    "Tensor query_start_loc, Tensor query_end_loc, int padding_token_id, int parallel_drafting_token_id, "
    "int num_padding_slots_per_request, bool shift_input_ids, int total_draft_tokens) -> (Tensor out_input_ids, "
    "Tensor out_positions, Tensor out_is_rejected_token_mask, Tensor out_is_masked_token_mask, "
    "Tensor out_new_token_indices, Tensor out_hidden_state_mapping)",
    "npu_ngram_spec_decode(Tensor(a!) token_ids, Tensor num_tokens_no_spec, Tensor sampled_token_ids, "
    "Tensor discard_request_mask, int vocab_size, int min_n, int max_n, int k) -> (Tensor token_ids, "
    "Tensor next_token_ids, Tensor draft_token_ids, Tensor num_valid_draft_tokens)",
    "get_masked_input_and_mask(Tensor input, int org_vocab_start_index, int org_vocab_end_index, "
    "int num_org_vocab_padding, int added_vocab_start_index, int added_vocab_end_index) -> (Tensor masked_input, "
    "Tensor mask)",
)
_SOURCE = "vllm-ascend v0.23.0, csrc/"
_INT32 = 2**31
_TEST = "test_kernels_vllm_drafts.py"

declare(
    OP_EAGLE,
    _SOURCE + "moe/copy_and_expand_eagle_inputs/op_host",
    _TEST,
    {
        "eagle-dtype": ("int32 tensors of one axis", "cast them"),
        "eagle-count": ("one next token and one query end a request, one position a token", "pass all requests"),
    },
)
declare(
    OP_EAGLE,
    "(not documented) its outputs are int32",
    _TEST,
    {
        "eagle-range": (
            "padding_token_id and parallel_drafting_token_id of int32; num_padding_slots_per_request and "
            "total_draft_tokens of 0 to 2**31 - 1",
            "pass the drafter's numbers",
        ),
    },
)
declare(
    OP_NGRAM,
    _SOURCE + "attention/ngram_spec_decode",
    _TEST,
    {
        "ngram-dtype": ("int32 tensors, a bool mask too", "cast them"),
        "ngram-shape": (
            "token_ids (b, n), sampled_token_ids (b, m), the others (b,); contiguous token_ids",
            "reshape them",
        ),
    },
)
declare(
    OP_NGRAM,
    "(not documented) lengths and counts",
    _TEST,
    {
        "ngram-range": ("min_n of 1 to max_n, k of 0 to 2**31 - 1", "pass the drafter's numbers"),
    },
)
declare(
    OP_VOCABULARY,
    _SOURCE + "torch_binding.cpp and csrc/kernels",
    _TEST,
    {
        "vocabulary-dtype": ("an int32 input of 1 axis or more: the kernel reads int32 whatever is given", "cast it"),
        "vocabulary-range": (
            "0 <= org start <= org end <= added start <= added end, a padding of 0 or more, all below 2**31",
            "pass the ranges of the shard",
        ),
    },
)
note(
    OP_EAGLE,
    "(not documented) outputs that hold what the requests need",
    "—",
    "a range outside the inputs or total_draft_tokens is a `DeviceFault` (507015): " + _TEST,
)
note(
    OP_NGRAM,
    "a suffix shorter than max_n in a row of fewer tokens: for rows that do not fit on the core the kernel compares "
    "from a place max_n before the end, which lies before the row's start",
    _SOURCE + "attention/ngram_spec_decode/op_kernel",
    "not emulated: rows are compared as those that fit on the core",
)
note(OP_NGRAM, "(not documented) num_tokens_no_spec within the row", "—", "others are a `DeviceFault`: " + _TEST)


def _check_eagle_range(padding: int, drafting: int, slots: int, total: int) -> None:
    ranges = {"padding_token_id": (padding, -_INT32), "parallel_drafting_token_id": (drafting, -_INT32)}
    ranges |= {"num_padding_slots_per_request": (slots, 0), "total_draft_tokens": (total, 0)}
    for name, (given, least) in ranges.items():
        if not least <= given < _INT32:
            refuse(OP_EAGLE, "eagle-range", name, given)


def _check_ngram_range(min_n: int, max_n: int, k: int) -> None:
    if not 1 <= min_n <= max_n or not 0 <= k < _INT32:
        refuse(OP_NGRAM, "ngram-range", "min_n", f"{min_n}, max_n {max_n}, k {k}")


def _request(start: int, next_start: int, end: int, shift: bool) -> tuple[int, int]:
    """Valid and rejected tokens of a request."""
    return max(end - start + (0 if shift else 1), 0), max(next_start - end - 1, 0)


def npu_copy_and_expand_eagle_inputs(
    target_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    next_token_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_end_loc: torch.Tensor,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    num_padding_slots_per_request: int,
    shift_input_ids: bool,
    total_draft_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lays out a parallel drafter's inputs: each request's accepted tokens, the new one, slots to draft, rejected ones.

    Args:
        target_token_ids: the target's tokens of all requests. Shape: [tokens]; int32.
        target_positions: Shape: [tokens]; int32.
        next_token_ids: newly sampled token of each request. Shape: [requests]; int32.
        query_start_loc: first token of each request, and the end. Shape: [requests + 1]; int32.
        query_end_loc: last accepted token of each request. Shape: [requests]; int32.
        padding_token_id: token at rejected places.
        parallel_drafting_token_id: token at places to draft.
        num_padding_slots_per_request: places of the new token and of those to draft.
        shift_input_ids: whether a request's first token is left out.
        total_draft_tokens: places of all requests.

    Returns:
        Tokens and positions (int32 [total_draft_tokens]), masks of rejected and drafted places (int8, the same shape),
        places of the new and the drafted tokens (int32 [requests * slots]), and, with ``shift_input_ids``, the place of
        each target token (int32 [tokens]). What no request covers is 0.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        vllm-ascend v0.23.0, csrc/moe/copy_and_expand_eagle_inputs.
    """
    named = {"target_token_ids": target_token_ids, "target_positions": target_positions}
    named |= {"next_token_ids": next_token_ids, "query_start_loc": query_start_loc, "query_end_loc": query_end_loc}
    for name, tensor in named.items():
        if tensor.dtype != torch.int32 or tensor.dim() != 1:
            refuse(OP_EAGLE, "eagle-dtype", name, f"{tensor.dtype}, shape {tuple(tensor.shape)}")
    requests, tokens, slots = query_start_loc.numel() - 1, target_token_ids.numel(), num_padding_slots_per_request
    for name, tensor, count in (
        ("next_token_ids", next_token_ids, requests),
        ("query_end_loc", query_end_loc, requests),
        ("target_positions", target_positions, tokens),
    ):
        if tensor.numel() != count:
            refuse(OP_EAGLE, "eagle-count", name, f"{tensor.numel()} for {count}")
    _check_eagle_range(padding_token_id, parallel_drafting_token_id, slots, total_draft_tokens)
    if requests > 0 and slots > total_draft_tokens:
        raise DeviceFault(OP_EAGLE, f"request 0 has {slots} slots, more than {total_draft_tokens} places")
    ids, positions, new, mapping = (
        torch.zeros(n, dtype=torch.int32) for n in (total_draft_tokens, total_draft_tokens, requests * slots, tokens)
    )
    rejected, drafted = (torch.zeros(total_draft_tokens, dtype=torch.int8) for _ in range(2))
    starts, ends = query_start_loc.tolist(), query_end_loc.tolist()
    for number in range(requests):
        start, next_start, end = starts[number], starts[number + 1], ends[number]
        valid, lost = _request(start, next_start, end, shift_input_ids)
        at = start + number * (slots - 1 if shift_input_ids else slots)
        first = start + 1 if shift_input_ids else start
        count = valid + slots + lost
        last = max(min(first + valid, tokens if shift_input_ids else next_start), first)
        if not 0 <= start < tokens or not start <= next_start <= tokens or (valid and last == first):
            raise DeviceFault(OP_EAGLE, f"request {number} has tokens [{start}:{next_start}] of {tokens}, end {end}")
        if not 0 <= at <= at + count <= total_draft_tokens:
            raise DeviceFault(OP_EAGLE, f"request {number} fills [{at}:{at + count}] of {total_draft_tokens} places")
        for place in range(valid):
            ids[at + place] = target_token_ids[min(first + place, last - 1)]
        ids[at + valid] = next_token_ids[number]
        ids[at + valid + 1 : at + valid + slots] = parallel_drafting_token_id
        ids[at + valid + slots : at + count] = padding_token_id
        positions[at : at + valid + slots] = int(target_positions[start]) + torch.arange(valid + slots)
        drafted[at + valid + 1 : at + valid + slots] = 1
        rejected[at + valid + slots : at + count] = 1
        new[number * slots : (number + 1) * slots] = at + valid + torch.arange(slots)
        if shift_input_ids:
            mapping[start:next_start] = at + torch.arange(next_start - start)
    return ids, positions, rejected, drafted, new, mapping


def _match(row: list[int], min_n: int, max_n: int) -> tuple[int, int] | None:
    """First place where the shortest repeated suffix of min_n to max_n tokens stood before, and its length."""
    for length in range(min_n, min(max_n, len(row)) + 1):
        suffix = row[len(row) - length :]
        for place in range(len(row) - length):
            if row[place : place + length] == suffix:
                return place, length
    return None


def npu_ngram_spec_decode(
    token_ids: torch.Tensor,
    num_tokens_no_spec: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    discard_request_mask: torch.Tensor,
    vocab_size: int,
    min_n: int,
    max_n: int,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Appends the sampled tokens to each request's row and drafts what followed its last tokens before.

    Args:
        token_ids: tokens of each request. Shape: [b, n]; int32. *Mutated*: accepted tokens are appended.
        num_tokens_no_spec: tokens that each row has. Shape: [b]; int32.
        sampled_token_ids: -1 and numbers from ``vocab_size`` on count as none. Shape: [b, m]; int32.
        discard_request_mask: requests that accept nothing. Shape: [b]; int32 or bool.
        vocab_size: tokens of the vocabulary.
        min_n: shortest suffix.
        max_n: longest suffix.
        k: tokens to draft.

    Returns:
        ``token_ids``, the last accepted token (else the row's last) [b], drafted tokens [b, k] (-1 for
        none), and their number [b]; int32 all.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        vllm-ascend v0.23.0, csrc/attention/ngram_spec_decode.
    """
    named = {"token_ids": token_ids, "num_tokens_no_spec": num_tokens_no_spec}
    named |= {"sampled_token_ids": sampled_token_ids, "discard_request_mask": discard_request_mask}
    for name, tensor in named.items():
        if tensor.dtype != torch.int32 and not (name == "discard_request_mask" and tensor.dtype == torch.bool):
            refuse(OP_NGRAM, "ngram-dtype", name, tensor.dtype)
    rows = token_ids.size(0) if token_ids.dim() else 0
    ranks = {"token_ids": 2, "sampled_token_ids": 2}
    for name, tensor in named.items():
        if tensor.dim() != ranks.get(name, 1) or tensor.size(0) != rows or not token_ids.is_contiguous():
            refuse(OP_NGRAM, "ngram-shape", name, f"shape {tuple(tensor.shape)} for token_ids {tuple(token_ids.shape)}")
    _check_ngram_range(min_n, max_n, k)
    lengths = num_tokens_no_spec.tolist()
    for number, length in enumerate(lengths):
        if not 0 <= length <= token_ids.size(1) or token_ids.size(1) == 0:
            raise DeviceFault(OP_NGRAM, f"request {number} has {length} tokens in a row of {token_ids.size(1)}")
    following = torch.empty(rows, dtype=torch.int32)
    drafts, counts = torch.full((rows, k), -1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    for number, length in enumerate(lengths):
        sampled = [t if t < vocab_size else -1 for t in sampled_token_ids[number].tolist()]
        discarded = bool(discard_request_mask[number])
        accepted = 0 if discarded else min(sum(t != -1 for t in sampled), token_ids.size(1) - length)
        following[number] = sampled[accepted - 1] if accepted else token_ids[number, max(length - 1, 0)]
        token_ids[number, length : length + accepted] = torch.tensor(sampled[:accepted], dtype=torch.int32)
        row = token_ids[number, : length + accepted].tolist()
        found = _match(row, min_n, max_n) if accepted else None
        if found is not None:
            draft = row[sum(found) :][:k]
            drafts[number, : len(draft)] = torch.tensor(draft, dtype=torch.int32)
            counts[number] = next((i for i, token in enumerate(draft) if token == -1), len(draft))
    return token_ids, following, drafts, counts


def get_masked_input_and_mask(
    input: torch.Tensor,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a vocabulary shard's embedding for tokens, and which tokens another shard has.

    Args:
        input: tokens; int32.
        org_vocab_start_index: first token of the shard.
        org_vocab_end_index: end of them.
        num_org_vocab_padding: rows of padding behind them.
        added_vocab_start_index: first added token of the shard.
        added_vocab_end_index: end of them.

    Returns:
        The row of each token (0 for those of other shards; int32), and True for those of other shards.

    Raises:
        OpRefused: a constraint of the host code is broken.

    Source:
        vllm-ascend v0.23.0, csrc/kernels/get_masked_input_and_mask_kernel.cpp.
    """
    if input.dtype != torch.int32 or input.dim() == 0:
        refuse(OP_VOCABULARY, "vocabulary-dtype", "input", f"{input.dtype}, shape {tuple(input.shape)}")
    bounds = [0, org_vocab_start_index, org_vocab_end_index, added_vocab_start_index, added_vocab_end_index]
    if sorted(bounds) != bounds or not 0 <= num_org_vocab_padding < _INT32 or bounds[-1] >= _INT32:
        refuse(OP_VOCABULARY, "vocabulary-range", "org_vocab_start_index", f"{bounds[1:]}, {num_org_vocab_padding}")
    own = (input >= org_vocab_start_index) & (input < org_vocab_end_index)
    added = (input >= added_vocab_start_index) & (input < added_vocab_end_index)
    width = org_vocab_end_index - org_vocab_start_index + num_org_vocab_padding
    rows = own * (input - org_vocab_start_index) + added * (input - added_vocab_start_index + width)
    return rows.to(torch.int32), ~(own | added)


def _eagle_meta(
    tokens: torch.Tensor, positions: torch.Tensor, following: torch.Tensor, starts: torch.Tensor, *rest: int
) -> tuple[torch.Tensor, ...]:
    padding, drafting, slots, _, total = rest[-5:]
    _check_eagle_range(padding, drafting, slots, total)
    places = [starts.new_empty(total, dtype=dtype) for dtype in (torch.int32, torch.int32, torch.int8, torch.int8)]
    new = starts.new_empty(max(starts.numel() - 1, 0) * slots, dtype=torch.int32)
    return *places, new, starts.new_empty(tokens.numel(), dtype=torch.int32)


def _ngram_meta(tokens: torch.Tensor, *rest: int) -> tuple[torch.Tensor, ...]:
    _check_ngram_range(*rest[-3:])
    rows, k = tokens.shape[0] if tokens.dim() else 0, rest[-1]
    return tokens.new_empty(tokens.shape), tokens.new_empty(rows), tokens.new_empty(rows, k), tokens.new_empty(rows)


_METAS: tuple[Callable[..., Any], ...] = (
    _eagle_meta,
    _ngram_meta,
    lambda input, *rest: (torch.empty_like(input), torch.empty_like(input, dtype=torch.bool)),
)
for _schema, _meta in zip(SCHEMAS, _METAS, strict=True):
    define(_schema, "_C_ascend", _meta)
KERNELS = {
    OP_EAGLE: npu_copy_and_expand_eagle_inputs,
    OP_NGRAM: npu_ngram_spec_decode,
    OP_VOCABULARY: get_masked_input_and_mask,
}
