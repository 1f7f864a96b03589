"""Owns rejection sampling as Triton kernels; contracts in `spec_kernels.sampling`."""

# Kernels are written in Triton's language, which has no types of Python's.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels._custom import filling_op
from spec_kernels.tiling import grid, tile
from spec_kernels.triton.trees import link

__all__ = ["sample_chain", "sample_tree"]


@triton.jit
def _weigh(values):
    """NaN and negative values weigh nothing."""
    return tl.where(values > 0, values, 0.0)


@triton.jit
def _next_tried(siblings, sibling_at, sibling_step, width, node, last):
    """The sibling tried after `node`; -1 after the last."""
    return tl.where(node == last, -1, link(siblings + sibling_at, 0, sibling_step, width, 0, node))


@triton.jit
def _draw(
    target, target_at, draft, draft_at, subtract, tokens, token_at, token_step, siblings, sibling_at, sibling_step,
    first_tried, last_tried, coin, width, vocabulary, TILE: tl.constexpr,
):  # fmt: skip
    """Draw from `max(p - q, 0)` without the tokens that were tried; from p where that weighs nothing, and 0 at last."""
    total = tl.zeros((), tl.float32)
    spare_total = tl.zeros((), tl.float32)
    heaviest = tl.full((), -1, tl.int32)
    spare_heaviest = tl.full((), 0, tl.int32)
    picked = tl.full((), 0, tl.int32) + vocabulary
    for turn in tl.static_range(2):
        running = tl.zeros((), tl.float32)
        for first in range(0, vocabulary, TILE):
            token = first + tl.arange(0, TILE)
            inside = token < vocabulary
            spare = _weigh(tl.load(target + target_at + token, mask=inside, other=0.0))
            taken = _weigh(tl.load(draft + draft_at + token, mask=inside & subtract, other=0.0))
            weight = tl.maximum(spare - taken, 0.0)
            node = first_tried
            for _ in range(0, width):
                tried = tl.load(tokens + token_at + node * token_step, mask=node >= 0, other=-1)
                weight = tl.where(token == tried.to(tl.int64), 0.0, weight)
                node = _next_tried(siblings, sibling_at, sibling_step, width, node, last_tried)
            if turn == 0:
                total += tl.sum(weight)
                spare_total += tl.sum(spare)
                heaviest = tl.maximum(heaviest, tl.max(tl.where(weight > 0, token, -1)))
                spare_heaviest = tl.maximum(spare_heaviest, tl.max(tl.where(spare > 0, token, 0)))
            else:
                weight = tl.where(total > 0, weight, spare)
                sums = running + tl.cumsum(weight, 0)
                whole = tl.where(total > 0, total, spare_total)
                over = (weight > 0) & (sums > coin * whole)
                picked = tl.minimum(picked, tl.min(tl.where(over, token, vocabulary)))
                running += tl.sum(weight)
    return tl.minimum(picked, tl.where(total > 0, heaviest, spare_heaviest)).to(tl.int64)


@triton.jit
def _chain_kernel(
    drafts, draft_row, draft_column, draft_probs, target_probs, coins, coin_row, coin_column, final_coins, correct,
    bonus, bs, steps, vocabulary, TILE: tl.constexpr,
):  # fmt: skip
    for index in range(tl.program_id(0), bs, tl.num_programs(0)):
        row = tl.full((), index, tl.int64)
        count = tl.zeros((), tl.int64)
        rejected = tl.zeros((), tl.int32)
        going = tl.full((), 1, tl.int32)
        for step in range(0, steps):
            token = tl.load(drafts + row * draft_row + step * draft_column).to(tl.int64)
            real = (going > 0) & (token >= 0) & (token < vocabulary)
            q = tl.load(draft_probs + (row * steps + step) * vocabulary + token, mask=real, other=0.0)
            p = tl.load(target_probs + (row * (steps + 1) + step) * vocabulary + token, mask=real, other=0.0)
            coin = tl.load(coins + row * coin_row + step * coin_column)
            stands = (real & (q > 0) & (q <= 1) & (coin * q < p)).to(tl.int32)
            rejected = tl.where(going > stands, real.to(tl.int32), rejected)
            count += stands
            going = stands
        tl.store(correct + row, count)
        target_at = (row * (steps + 1) + count) * vocabulary
        draft_at = (row * steps + tl.where(count < steps, count, 0)) * vocabulary
        none = tl.full((), -1, tl.int64)
        token = _draw(
            target_probs, target_at, draft_probs, draft_at, rejected > 0, drafts, row * 0, 0, drafts, row * 0, 0, none,
            none, tl.load(final_coins + row), 0, vocabulary, TILE,
        )  # fmt: skip
        tl.store(bonus + row, token)


@filling_op("sample_chain_triton", "num_correct_drafts", "bonus")
def sample_chain(
    drafts: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    num_correct_drafts: torch.Tensor,
    bonus: torch.Tensor,
) -> None:
    """See `spec_kernels.sample_chain`."""
    bs, steps, vocabulary = draft_probs.shape
    _chain_kernel[grid(bs)](
        drafts, *drafts.stride(), draft_probs, target_probs, coins, *coins.stride(), final_coins.contiguous(),
        num_correct_drafts, bonus, bs, steps, vocabulary, TILE=tile(min(vocabulary, 4096), itemsize=4, live=8),
    )  # fmt: skip


@triton.jit
def _tree_kernel(
    candidates, row_step, column_step, target_probs, children, child_row, child_column, siblings, sibling_row,
    sibling_column, coins, coin_row, coin_column, final_coins, accept_index, correct, predict, bonus, bs, width, depth,
    vocabulary, TILE: tl.constexpr,
):  # fmt: skip
    for index in range(tl.program_id(0), bs, tl.num_programs(0)):
        row = tl.full((), index, tl.int64)
        for column in range(0, width):
            tl.store(predict + row * width + column, tl.zeros((), tl.int64))
        for column in range(0, depth):
            tl.store(accept_index + row * depth + column, tl.full((), -1, tl.int64))
        tl.store(accept_index + row * depth, row * width)
        current = tl.zeros((), tl.int64)
        count = tl.zeros((), tl.int64)
        mass = tl.zeros((), tl.float32)
        none = tl.full((), -1, tl.int64)
        first_tried = none
        last_tried = none
        child = link(children, child_row, child_column, width, row, current)
        for _ in range(0, width - 1):
            visited = (child >= 0) & (count < depth - 1)
            token = tl.load(candidates + row * row_step + child * column_step, mask=visited, other=-1).to(tl.int64)
            repeated = tl.zeros((), tl.int32)
            node = first_tried
            for _ in range(0, width):  # a token that was tried before counts once
                tried = tl.load(candidates + row * row_step + node * column_step, mask=node >= 0, other=-1)
                repeated += (tried.to(tl.int64) == token).to(tl.int32)
                node = _next_tried(siblings, row * sibling_row, sibling_column, width, node, last_tried)
            fresh = visited & (token >= 0) & (token < vocabulary) & (repeated == 0)
            weight = _weigh(tl.load(target_probs + (row * width + current) * vocabulary + token, mask=fresh, other=0.0))
            mass += weight
            coin = tl.load(coins + row * coin_row + count * coin_column)
            hit = fresh & (weight > 0) & (coin < tl.minimum(mass, 1.0))
            tl.store(predict + row * width + current, token, mask=hit)
            count += hit.to(tl.int64)
            tl.store(accept_index + row * depth + count, row * width + child, mask=hit)
            following = link(siblings, sibling_row, sibling_column, width, row, child)
            first_child = link(children, child_row, child_column, width, row, child)
            first_tried = tl.where(hit, none, tl.where(visited & (first_tried < 0), child, first_tried))
            last_tried = tl.where(hit, none, tl.where(visited, child, last_tried))
            current = tl.where(hit, child, current)
            mass = tl.where(hit, 0.0, mass)
            child = tl.where(hit, first_child, tl.where(visited, following, none))
        token = _draw(
            target_probs, (row * width + current) * vocabulary, target_probs, row * 0, row < 0, candidates,
            row * row_step, column_step, siblings, row * sibling_row, sibling_column, first_tried, last_tried,
            tl.load(final_coins + row), width, vocabulary, TILE,
        )  # fmt: skip
        tl.store(predict + row * width + current, token)
        tl.store(correct + row, count)
        tl.store(bonus + row, token)


@filling_op("sample_tree_triton", "accept_index", "num_correct_drafts", "predict", "bonus")
def sample_tree(
    candidates: torch.Tensor,
    target_probs: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    accept_index: torch.Tensor,
    num_correct_drafts: torch.Tensor,
    predict: torch.Tensor,
    bonus: torch.Tensor,
) -> None:
    """See `spec_kernels.sample_tree`."""
    bs, width, vocabulary = target_probs.shape
    _tree_kernel[grid(bs)](
        candidates, *candidates.stride(), target_probs, next_token, *next_token.stride(),
        next_sibling, *next_sibling.stride(), coins, *coins.stride(), final_coins.contiguous(), accept_index,
        num_correct_drafts, predict, bonus, bs, width, accept_index.shape[1], vocabulary,
        TILE=tile(min(vocabulary, 4096), itemsize=4, live=8),
    )  # fmt: skip
