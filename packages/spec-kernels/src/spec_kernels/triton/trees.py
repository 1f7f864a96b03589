"""Owns draft trees as Triton kernels; contracts in `spec_kernels.trees`."""

# Kernels are written in Triton's language, which has no types of Python's.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels._custom import filling_op
from spec_kernels.tiling import grid, tile

__all__ = ["build_chain_tree", "build_tree", "full_tree_mask", "link", "verify_tree_greedy"]


@triton.jit
def _chain_kernel(seq_lens, visible, positions, next_token, next_sibling, bs, width, TILE: tl.constexpr):
    for work in range(tl.program_id(0), bs * width, tl.num_programs(0)):
        at = tl.full((), work, tl.int64)
        own = at % width
        length = tl.load(seq_lens + at // width).to(tl.int64)
        tl.store(positions + at, length + own)
        tl.store(next_token + at, tl.where(own + 1 < width, own + 1, -1))
        tl.store(next_sibling + at, own * 0 - 1)
        for first in range(0, width, TILE):
            column = first + tl.arange(0, TILE)
            tl.store(visible + at * width + column, column <= own, mask=column < width)


@filling_op("build_chain_tree_triton", "visible", "positions", "next_token", "next_sibling")
def build_chain_tree(
    seq_lens: torch.Tensor,
    visible: torch.Tensor,
    positions: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
) -> None:
    """See `spec_kernels.build_chain_tree`."""
    bs, width, _ = visible.shape
    _chain_kernel[grid(bs * width)](
        seq_lens.contiguous(), visible, positions, next_token, next_sibling, bs, width, TILE=tile(width, itemsize=8)
    )


@triton.jit
def _parent(parents, groups, selected, drafts, topk, row, own, TILE: tl.constexpr):
    """Column of the parent of column `own`; -1 for the root and for orphans."""
    candidate = tl.load(selected + row * drafts + own - 1, mask=own > 0, other=-1).to(tl.int64)
    found = tl.full((), -1, tl.int64)
    group = candidate // topk
    if (candidate >= 0) & (group == 0):
        found = tl.full((), 0, tl.int64)
    if (candidate >= 0) & (group > 0) & (group < groups):
        named = tl.load(parents + row * groups + group).to(tl.int64)
        far = drafts + 1
        best = tl.full((), 0, tl.int64) + far
        for first in range(0, own - 1, TILE):
            other = (first + tl.arange(0, TILE)).to(tl.int64)
            value = tl.load(selected + row * drafts + other, mask=other < own - 1, other=-1).to(tl.int64)
            best = tl.minimum(best, tl.min(tl.where((value >= 0) & (value == named), other + 1, far)))
        if best < far:
            found = best
    return found


@triton.jit
def _tree_kernel(
    parents, groups, selected, drafts, topk, seq_lens, visible, positions, next_token, next_sibling, bs,
    TILE: tl.constexpr,
):  # fmt: skip
    width = drafts + 1
    for work in range(tl.program_id(0), bs * width, tl.num_programs(0)):
        at = tl.full((), work, tl.int64)
        row = at // width
        own = at % width
        for first in range(0, width, TILE):
            column = first + tl.arange(0, TILE)
            tl.store(visible + at * width + column, column == own, mask=column < width)
        depth = tl.full((), 0, tl.int64)
        mine = _parent(parents, groups, selected, drafts, topk, row, own, TILE)
        above = mine
        while above >= 0:
            tl.store(visible + at * width + above, tl.full((), 1, tl.int1))
            depth += 1
            above = _parent(parents, groups, selected, drafts, topk, row, above, TILE)
        tl.store(positions + at, tl.load(seq_lens + row).to(tl.int64) + depth)
        child = tl.full((), -1, tl.int64)
        sibling = tl.full((), -1, tl.int64)
        for other in range(own + 1, width):
            its = _parent(parents, groups, selected, drafts, topk, row, tl.full((), 0, tl.int64) + other, TILE)
            if (its == own) & (child < 0):
                child = tl.full((), 0, tl.int64) + other
            if (its == mine) & (mine >= 0) & (sibling < 0):
                sibling = tl.full((), 0, tl.int64) + other
        tl.store(next_token + at, child)
        tl.store(next_sibling + at, sibling)


@filling_op("build_tree_triton", "visible", "positions", "next_token", "next_sibling")
def build_tree(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,
    visible: torch.Tensor,
    positions: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
) -> None:
    """See `spec_kernels.build_tree`."""
    bs, drafts = selected_index.shape
    _tree_kernel[grid(bs * (drafts + 1))](
        parent_list.contiguous(), parent_list.shape[1], selected_index.contiguous(), drafts, topk,
        seq_lens.contiguous(), visible, positions, next_token, next_sibling, bs, TILE=tile(drafts + 1, itemsize=8),
    )  # fmt: skip


@triton.jit
def _full_mask_kernel(visible, seq_lens, out, bs, width, total, TILE: tl.constexpr):
    for row in range(tl.program_id(0), bs + 1, tl.num_programs(0)):
        before = tl.zeros((), tl.int64)
        for head in range(0, row, TILE):
            other = head + tl.arange(0, TILE)
            context = tl.maximum(tl.load(seq_lens + other, mask=other < row, other=0).to(tl.int64), 0)
            before += tl.sum(tl.where(other < row, width * (context + width), 0))
        if row < bs:
            wide = tl.full((), row, tl.int64)
            context = tl.maximum(tl.load(seq_lens + row).to(tl.int64), 0)
            span = context + width
            for first in range(0, width * span, TILE):
                place = first + tl.arange(0, TILE)
                column = place % span - context
                inside = (place < width * span) & (column >= 0)
                seen = tl.load(visible + (wide * width + place // span) * width + column, mask=inside, other=0)
                sees = (column < 0) | (seen != 0)
                tl.store(out + before + place, sees, mask=(place < width * span) & (before + place < total))
        else:
            for first in range(before, total, TILE):
                place = first + tl.arange(0, TILE)
                tl.store(out + place, tl.zeros((TILE,), tl.int1), mask=place < total)


@filling_op("full_tree_mask_triton", "out")
def full_tree_mask(visible: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor) -> None:
    """See `spec_kernels.full_tree_mask`."""
    bs, width, _ = visible.shape
    _full_mask_kernel[grid(bs + 1)](
        visible.contiguous(), seq_lens.contiguous(), out, bs, width, out.shape[0], TILE=tile(1024, itemsize=8)
    )


@triton.jit
def link(links, row_step, column_step, width, row, at):
    """Follow a link from a column; what lies outside the block becomes -1."""
    found = tl.load(links + row * row_step + at * column_step, mask=at >= 0, other=-1).to(tl.int64)
    return tl.where((found > 0) & (found < width), found, -1)


@triton.jit
def _greedy_kernel(
    candidates, row_step, column_step, target, target_row, target_column, children, child_row, child_column,
    siblings, sibling_row, sibling_column, accept_index, correct, predict, bonus, bs, width, depth,
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
        wanted = tl.load(target + row * target_row).to(tl.int64)
        tl.store(predict + row * width, wanted)
        child = link(children, child_row, child_column, width, row, current)
        visits = tl.zeros((), tl.int64)
        while (child >= 0) & (count < depth - 1) & (visits < width - 1):
            visits += 1
            token = tl.load(candidates + row * row_step + child * column_step).to(tl.int64)
            if (token >= 0) & (token == wanted):
                count += 1
                current = child
                wanted = tl.load(target + row * target_row + current * target_column).to(tl.int64)
                tl.store(accept_index + row * depth + count, row * width + current)
                tl.store(predict + row * width + current, wanted)
                child = link(children, child_row, child_column, width, row, current)
            else:
                child = link(siblings, sibling_row, sibling_column, width, row, child)
        tl.store(correct + row, count)
        tl.store(bonus + row, wanted)


@filling_op("verify_tree_greedy_triton", "accept_index", "num_correct_drafts", "predict", "bonus")
def verify_tree_greedy(
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    accept_index: torch.Tensor,
    num_correct_drafts: torch.Tensor,
    predict: torch.Tensor,
    bonus: torch.Tensor,
) -> None:
    """See `spec_kernels.verify_tree_greedy`."""
    bs, width = candidates.shape
    _greedy_kernel[grid(bs)](
        candidates, *candidates.stride(), target_predict, *target_predict.stride(), next_token, *next_token.stride(),
        next_sibling, *next_sibling.stride(), accept_index, num_correct_drafts, predict, bonus, bs, width,
        accept_index.shape[1],
    )  # fmt: skip
