"""Owns draft trees in plain torch; contracts in `spec_kernels.trees`."""

from __future__ import annotations

import torch

from spec_kernels._custom import filling_op

__all__ = ["build_chain_tree", "build_tree", "full_tree_mask", "link", "verify_tree_greedy"]


@filling_op("build_chain_tree", "visible", "positions", "next_token", "next_sibling")
def build_chain_tree(
    seq_lens: torch.Tensor,
    visible: torch.Tensor,
    positions: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
) -> None:
    """See `spec_kernels.build_chain_tree`."""
    width = visible.shape[1]
    column = torch.arange(width, device=seq_lens.device)
    visible.copy_((column.unsqueeze(1) >= column).expand_as(visible))
    positions.copy_(seq_lens.to(torch.int64).unsqueeze(1) + column)
    next_token.copy_(torch.where(column + 1 < width, column + 1, -1).expand_as(next_token))
    next_sibling.fill_(-1)


@filling_op("build_tree", "visible", "positions", "next_token", "next_sibling")
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
    width = visible.shape[1]
    column = torch.arange(width, device=seq_lens.device)
    parent = _parents(parent_list.to(torch.int64), selected_index.to(torch.int64), topk)
    sees = (parent.unsqueeze(2) == column) | torch.eye(width, dtype=torch.bool, device=seq_lens.device)
    for _ in range(width.bit_length()):  # paths double in length each time
        sees = torch.bmm(sees.float(), sees.float()) > 0
    visible.copy_(sees)
    positions.copy_(seq_lens.to(torch.int64).unsqueeze(1) + sees.sum(2) - 1)
    child = parent.unsqueeze(1) == column.unsqueeze(1)  # [bs, parent, child]
    next_token.copy_(_first(child, column))
    brothers = (parent.unsqueeze(2) == parent.unsqueeze(1)) & (parent >= 0).unsqueeze(2)
    next_sibling.copy_(_first(brothers & (column > column.unsqueeze(1)), column))


def _parents(parent_list: torch.Tensor, selected: torch.Tensor, topk: int) -> torch.Tensor:
    """Column of each token's parent; -1 for the root and for orphans. Shape: [bs, width]."""
    bs, drafts = selected.shape
    groups = parent_list.shape[1]
    group = torch.div(selected, topk, rounding_mode="floor")
    found = torch.full_like(selected, -1)
    if groups and drafts:
        named = parent_list.gather(1, group.clamp(0, groups - 1))
        named = torch.where((group > 0) & (group < groups) & (named >= 0), named, -1)
        earlier = torch.ones((drafts, drafts), dtype=torch.bool, device=selected.device).tril(-1)
        match = (named.unsqueeze(2) == selected.unsqueeze(1)) & (selected >= 0).unsqueeze(1) & earlier
        column = torch.arange(1, drafts + 1, device=selected.device)
        found = _first(match, column)
    found = torch.where((group == 0) & (selected >= 0), 0, torch.where(selected >= 0, found, -1))
    return torch.cat((torch.full((bs, 1), -1, dtype=torch.int64, device=selected.device), found), 1)


def _first(match: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """First column along the last axis that matches, or -1."""
    far = torch.iinfo(torch.int64).max
    best = torch.where(match, column, far).amin(-1)
    return torch.where(best == far, -1, best)


@filling_op("full_tree_mask", "out")
def full_tree_mask(visible: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor) -> None:
    """See `spec_kernels.full_tree_mask`."""
    bs, width, _ = visible.shape
    context = seq_lens.to(torch.int64).clamp(min=0)
    stops = (width * (context + width)).cumsum(0)
    at = torch.arange(out.shape[0], device=out.device)
    row = torch.searchsorted(stops, at, right=True)
    live = row < bs
    row = row.clamp_(max=bs - 1)
    span = (context + width)[row]
    place = (at - (stops - width * (context + width))[row]).clamp(min=0)
    token, column = torch.div(place, span, rounding_mode="floor").clamp(max=width - 1), place % span - context[row]
    out.copy_(live & ((column < 0) | visible[row, token, column.clamp(min=0)]))


def link(links: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Follow links from columns; what lies outside the block becomes -1."""
    found = links[rows, at].to(torch.int64)
    return torch.where((found > 0) & (found < links.shape[1]), found, -1)


@filling_op("verify_tree_greedy", "accept_index", "num_correct_drafts", "predict", "bonus")
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
    """See `spec_kernels.verify_tree_greedy`. Each pass visits one token a request; no token is visited twice."""
    bs, width = candidates.shape
    depth = accept_index.shape[1]
    rows = torch.arange(bs, device=candidates.device)
    current, count = torch.zeros_like(rows), torch.zeros_like(rows)
    path = torch.full((bs, depth + 1), -1, dtype=torch.int64, device=rows.device)  # the last column takes what is void
    path[:, 0] = 0
    child = link(next_token, rows, current)
    for _ in range(width - 1):
        at = child.clamp(min=0)
        token = candidates[rows, at]
        visited = (child >= 0) & (count < depth - 1)
        hit = visited & (token >= 0) & (token == target_predict[rows, current])
        count = count + hit
        path[rows, torch.where(hit, count, depth)] = child
        current = torch.where(hit, child, current)
        child = torch.where(hit, link(next_token, rows, at), torch.where(visited, link(next_sibling, rows, at), -1))
    accepted = path[:, :depth]
    accept_index.copy_(torch.where(accepted >= 0, accepted + (rows * width).unsqueeze(1), -1))
    num_correct_drafts.copy_(count)
    bonus.copy_(target_predict[rows, current])
    kept = torch.zeros((bs, width + 1), dtype=torch.bool, device=rows.device)
    kept.scatter_(1, torch.where(accepted >= 0, accepted, width), True)
    predict.copy_(torch.where(kept[:, :width], target_predict, 0).reshape(-1))
