"""Owns lossless rejection sampling of drafted chains and trees against the target's probabilities.

Coins are the caller's, so that a seed decides the result. Defined for every input: a proposal with q = 0 or NaN is
rejected, a NaN or negative probability weighs nothing, and a coin of 1 takes the last token that weighs something.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_kernels._checks import check_number, check_tensor
from spec_kernels.dispatch import BackendName, choose, load
from spec_kernels.trees import TreeAccept, check_tree, new_accept

__all__ = ["ChainSample", "sample_chain", "sample_tree"]

_FLOAT = (torch.float32,)


class ChainSample(NamedTuple):
    """What was sampled of each chain.

    Attributes:
        num_correct_drafts: Accepted drafts, the bonus not counted. Shape: [bs]; dtype int64.
        bonus: Token after them. Shape: [bs]; dtype int64.
    """

    num_correct_drafts: torch.Tensor
    bonus: torch.Tensor


def sample_chain(
    drafts: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    *,
    backend: BackendName | None = None,
) -> ChainSample:
    """Accept drafts with probability `min(1, p / q)` and draw the token after them, so that the target's law holds.

    Draft `t` of column `k` is accepted when all before it are, `0 < q(t) <= 1` and `coin * q(t) < p(t)`. After a
    rejection the next token is drawn from `max(p - q, 0)` of that column, after full acceptance from the last `p`.

    Args:
        drafts: A token outside the vocabulary (-1) is a placeholder: the chain ends there, and the next token is drawn
            from `p` itself. Shape: [bs, steps]; dtype int32 or int64.
        draft_probs: Law that each draft was drawn from. Shape: [bs, steps, vocabulary]; dtype float32; contiguous.
        target_probs: The target's law after each token. Shape: [bs, steps + 1, vocabulary]; dtype float32; contiguous.
        coins: One a draft, in [0, 1). Shape: [bs, steps]; dtype float32.
        final_coins: One a request, in [0, 1); 1 and more, and NaN, take the last token that weighs something. Shape:
            [bs]; dtype float32.
        backend: Insist on a backend.

    Returns:
        New tensors.

    Padding: a row of placeholders accepts nothing. Where `max(p - q, 0)` weighs nothing, `p` is drawn from; where `p`
        weighs nothing either, the token is 0. Zero requests give empty tensors.

    Mutates: nothing.

    Raises:
        ShapeError, DtypeError, DeviceError: An argument does not fit its role.

    Source: contracts.md §1.4, `chain_speculative_sampling_triton`, and §A-31; Leviathan et al., Fast Inference from
        Transformers via Speculative Decoding (2023).
    """
    check_tensor("drafts", drafts, ("bs", "steps"))
    bs, steps = (int(size) for size in drafts.shape)
    device = drafts.device
    check_tensor("draft_probs", draft_probs, (bs, steps, "vocabulary"), dtypes=_FLOAT, device=device)
    vocabulary = int(draft_probs.shape[2])
    check_number("draft_probs.shape[2]", vocabulary, least=1)
    check_tensor("target_probs", target_probs, (bs, steps + 1, vocabulary), dtypes=_FLOAT, device=device)
    check_tensor("coins", coins, (bs, steps), dtypes=_FLOAT, device=device)
    check_tensor("final_coins", final_coins, (bs,), dtypes=_FLOAT, device=device)
    rows = torch.empty((2, bs), dtype=torch.int64, device=device)
    chosen = choose("sample_chain", device, backend)
    if bs:
        load("sample_chain", chosen)(
            drafts, draft_probs.contiguous(), target_probs.contiguous(), coins, final_coins, rows[0], rows[1]
        )
    return ChainSample(rows[0], rows[1])


def sample_tree(
    candidates: torch.Tensor,
    target_probs: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    *,
    depth: int,
    backend: BackendName | None = None,
) -> TreeAccept:
    """Accept a path of each tree with the target's probabilities, and draw the token after it.

    At an accepted token with coin `u`, children are tried in sibling order: one is accepted as soon as `u` is below the
    probabilities of the children tried so far. If none is, the next token is drawn from the target's law without the
    children that were tried. So the next token follows the target's law, whatever the tree proposes.

    Args:
        candidates: Tokens of the block; one outside the vocabulary (-1) is never accepted. Shape: [bs, width]; dtype
            int32 or int64.
        target_probs: The target's law after each token. Shape: [bs, width, vocabulary]; dtype float32.
        next_token: See `TreeLayout`.
        next_sibling: See `TreeLayout`.
        coins: One a level, in [0, 1); 1 and more, and NaN, accept nothing. Shape: [bs, depth]; the last column is not
            read; dtype float32.
        final_coins: As `sample_chain`. Shape: [bs]; dtype float32.
        depth: Most tokens accepted, the root included.
        backend: Insist on a backend.

    Returns:
        New tensors. `predict` holds the accepted child after each accepted token, and the bonus after the last.

    Padding: a row without links draws from the root's law. A token that is proposed twice counts once. Where nothing
        is left to draw from, the law itself is drawn from.

    Mutates: nothing.

    Raises: as `sample_chain`.

    Source: contracts.md §1.4, `tree_speculative_sampling_target_only` with both thresholds 1.
    """
    bs, width = check_tree(candidates, next_token, next_sibling, depth)
    device = candidates.device
    check_tensor("target_probs", target_probs, (bs, width, "vocabulary"), dtypes=_FLOAT, device=device)
    check_number("target_probs.shape[2]", int(target_probs.shape[2]), least=1)
    check_tensor("coins", coins, (bs, depth), dtypes=_FLOAT, device=device)
    check_tensor("final_coins", final_coins, (bs,), dtypes=_FLOAT, device=device)
    result = new_accept(bs, width, depth, device)
    chosen = choose("sample_tree", device, backend)
    if bs:
        load("sample_tree", chosen)(
            candidates, target_probs.contiguous(), next_token, next_sibling, coins, final_coins, *result
        )
    return result
