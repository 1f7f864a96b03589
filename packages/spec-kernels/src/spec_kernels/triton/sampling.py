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
def _search(
    p_row,
    q_row,
    subtract,
    tried,
    tried_step,
    links,
    links_step,
    first_tried,
    last_tried,
    coin,
    width,
    vocabulary,
    TILE: tl.constexpr,
):
    """Draw from `max(p - q, 0)` or from p without the tokens of a sibling list; -1 where nothing weighs."""
    total = tl.zeros((), tl.float32)
    heaviest = tl.full((), -1, tl.int32)
    picked = tl.full((), 0, tl.int32) + vocabulary
    for turn in range(0, 2):
        running = tl.zeros((), tl.float32)
        for first in range(0, vocabulary, TILE):
            token = first + tl.arange(0, TILE)
            inside = token < vocabulary
            weight = _weigh(tl.load(p_row + token, mask=inside, other=0.0))
            if subtract:
                weight = tl.maximum(weight - _weigh(tl.load(q_row + token, mask=inside, other=0.0)), 0.0)
            node = first_tried
            steps = tl.full((), 0, tl.int64)
            while (node >= 0) & (steps < width):
                weight = tl.where(token == tl.load(tried + node * tried_step).to(tl.int64), 0.0, weight)
                steps += 1
                following = link(links, 0, links_step, width, 0, node)
                node = tl.where(node == last_tried, -1, following)
            if turn == 0:
                total += tl.sum(weight)
                heaviest = tl.maximum(heaviest, tl.max(tl.where(weight > 0, token, -1)))
            else:
                sums = running + tl.cumsum(weight, 0)
                over = (weight > 0) & (sums > coin * total)
                picked = tl.minimum(picked, tl.min(tl.where(over, token, vocabulary)))
                running += tl.sum(weight)
    return tl.minimum(picked, heaviest)


@triton.jit
def _draw(
    p_row,
    q_row,
    subtract,
    tried,
    tried_step,
    links,
    links_step,
    first_tried,
    last_tried,
    coin,
    width,
    vocabulary,
    TILE: tl.constexpr,
):
    """As `_search`, falling back to p, and to token 0."""
    found = _search(
        p_row, q_row, subtract, tried, tried_step, links, links_step, first_tried, last_tried, coin, width, vocabulary,
        TILE,
    )  # fmt: skip
    if found < 0:
        found = _search(
            p_row, q_row, False, tried, tried_step, links, links_step, last_tried * 0 - 1, last_tried, coin, width,
            vocabulary, TILE,
        )  # fmt: skip
    return tl.maximum(found, 0).to(tl.int64)


@triton.jit
def _chain_kernel(
    drafts, draft_row, draft_column, draft_probs, target_probs, coins, coin_row, coin_column, final_coins, correct,
    bonus, bs, steps, vocabulary, TILE: tl.constexpr,
):  # fmt: skip
    for index in range(tl.program_id(0), bs, tl.num_programs(0)):
        row = tl.full((), index, tl.int64)
        count = tl.zeros((), tl.int64)
        going = steps > 0
        real = False
        while going:
            token = tl.load(drafts + row * draft_row + count * draft_column).to(tl.int64)
            real = (token >= 0) & (token < vocabulary)
            q = tl.load(draft_probs + (row * steps + count) * vocabulary + token, mask=real, other=0.0)
            p = tl.load(target_probs + (row * (steps + 1) + count) * vocabulary + token, mask=real, other=0.0)
            coin = tl.load(coins + row * coin_row + count * coin_column)
            stands = real & (q > 0) & (q <= 1) & (coin * q < p)
            count += stands.to(tl.int64)
            going = stands & (count < steps)
        tl.store(correct + row, count)
        subtract = (count < steps) & real
        p_row = target_probs + (row * (steps + 1) + count) * vocabulary
        q_row = draft_probs + (row * steps + tl.where(count < steps, count, 0)) * vocabulary
        none = tl.full((), -1, tl.int64)
        final = tl.load(final_coins + row)
        token = _draw(p_row, q_row, subtract, drafts, 0, drafts, 0, none, none, final, 1, vocabulary, TILE)
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
        tokens = candidates + row * row_step
        brothers = siblings + row * sibling_row
        current = tl.zeros((), tl.int64)
        count = tl.zeros((), tl.int64)
        mass = tl.zeros((), tl.float32)
        coin = tl.load(coins + row * coin_row)
        child = link(children, child_row, child_column, width, row, current)
        first_tried = tl.full((), -1, tl.int64)
        last_tried = tl.full((), -1, tl.int64)
        visits = tl.zeros((), tl.int64)
        while (child >= 0) & (count < depth - 1) & (visits < width - 1):
            visits += 1
            token = tl.load(tokens + child * column_step).to(tl.int64)
            fresh = (token >= 0) & (token < vocabulary)
            node = first_tried
            while node >= 0:  # a token that was tried before counts once
                fresh = fresh & (tl.load(tokens + node * column_step).to(tl.int64) != token)
                following = link(brothers, 0, sibling_column, width, 0, node)
                node = tl.where(node == last_tried, -1, following)
            p_row = target_probs + (row * width + current) * vocabulary
            weight = _weigh(tl.load(p_row + token, mask=fresh, other=0.0))
            mass += weight
            if (weight > 0) & (coin < tl.minimum(mass, 1.0)):
                tl.store(predict + row * width + current, token)
                count += 1
                current = child
                mass = tl.zeros((), tl.float32)
                coin = tl.load(coins + row * coin_row + count * coin_column)
                tl.store(accept_index + row * depth + count, row * width + current)
                child = link(children, child_row, child_column, width, row, current)
                first_tried = tl.full((), -1, tl.int64)
                last_tried = tl.full((), -1, tl.int64)
            else:
                first_tried = tl.where(first_tried < 0, child, first_tried)
                last_tried = child
                child = link(brothers, 0, sibling_column, width, 0, child)
        p_row = target_probs + (row * width + current) * vocabulary
        final = tl.load(final_coins + row)
        token = _draw(
            p_row, p_row, False, tokens, column_step, brothers, sibling_column, first_tried, last_tried, final, width,
            vocabulary, TILE,
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
