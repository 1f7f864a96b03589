"""Owns draft trees: their links, positions and causal visibility, and greedy verification along sibling links.

Column 0 of a block is the committed token, the root. A tree says who sees whom as `visible` (True sees);
`paged_attention` wants what is hidden, which `tree_attention_mask` derives. Sampling is in `spec_kernels.sampling`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_kernels._checks import check_disjoint, check_number, check_tensor
from spec_kernels.dispatch import BackendName, choose, load

__all__ = [
    "TreeAccept",
    "TreeLayout",
    "build_chain_tree",
    "build_tree",
    "full_tree_mask",
    "tree_attention_mask",
    "verify_tree_greedy",
]


class TreeLayout(NamedTuple):
    """A tree a request, `width` tokens each.

    Attributes:
        visible: Which tokens of the block each token sees: itself and its ancestors. Shape: [bs, width, width]; bool.
        positions: Position of each token: the request's length plus its depth. Shape: [bs, width]; dtype int64.
        next_token: First child, or -1. Shape: [bs, width]; dtype int64.
        next_sibling: Next child of the same parent, or -1. Shape: [bs, width]; dtype int64.
    """

    visible: torch.Tensor
    positions: torch.Tensor
    next_token: torch.Tensor
    next_sibling: torch.Tensor


class TreeAccept(NamedTuple):
    """What was accepted of each tree.

    Attributes:
        accept_index: Accepted token rows, `row * width + column`, the root's first, then -1. Shape: [bs, depth]; int64.
        num_correct_drafts: Accepted drafts, the bonus not counted. Shape: [bs]; dtype int64.
        predict: Token after each accepted token row, 0 elsewhere; the last accepted row's is the bonus. Shape: [bs *
            width]; dtype int64.
        bonus: Shape: [bs]; dtype int64.
    """

    accept_index: torch.Tensor
    num_correct_drafts: torch.Tensor
    predict: torch.Tensor
    bonus: torch.Tensor


def _new_layout(bs: int, width: int, device: torch.device) -> TreeLayout:
    visible = torch.empty((bs, width, width), dtype=torch.bool, device=device)
    numbers = torch.empty((3, bs, width), dtype=torch.int64, device=device)
    return TreeLayout(visible, *numbers.unbind(0))


def build_chain_tree(seq_lens: torch.Tensor, *, width: int, backend: BackendName | None = None) -> TreeLayout:
    """Lay out chains: every token sees those before it and has one child.

    Args:
        seq_lens: Committed tokens before the block. Shape: [bs]; dtype int32 or int64.
        width: Tokens of a block.
        backend: Insist on a backend.

    Returns:
        New tensors; `visible` is a lower triangle, positions are `seq_lens + column`.

    Padding: zero requests give empty tensors.

    Mutates: nothing.

    Raises:
        ShapeError, DtypeError, DeviceError: An argument does not fit its role.

    Source: contracts.md §1.4, `build_chain_tree`.
    """
    check_number("width", width, least=1)
    check_tensor("seq_lens", seq_lens, ("bs",))
    layout = _new_layout(int(seq_lens.shape[0]), width, seq_lens.device)
    chosen = choose("build_chain_tree", seq_lens.device, backend)
    if seq_lens.shape[0]:
        load("build_chain_tree", chosen)(seq_lens, *layout)
    return layout


def build_tree(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    topk: int,
    backend: BackendName | None = None,
) -> TreeLayout:
    """Lay out trees that a beam of `topk` drafts proposed and of which the best tokens were selected.

    Candidates are numbered in the order of drafting: `topk` children of the root, then `topk` children of each of the
    `topk` tokens kept in a step. Candidate `c` is a child of the root when `c < topk`, else of candidate
    `parent_list[c // topk]`.

    Args:
        parent_list: Shape: [bs, parents]; column 0 stands for the root and is not read; dtype int32 or int64.
        selected_index: Candidates of columns 1 and up, parents before children. Shape: [bs, width - 1]; dtype int32 or
            int64.
        seq_lens: Committed tokens before the block. Shape: [bs]; dtype int32 or int64.
        topk: Children of each expanded token.
        backend: Insist on a backend.

    Returns:
        New tensors.

    Padding: a candidate whose parent was not selected in an earlier column, or a negative one, is an orphan: it sees
        itself alone, stands at the request's length, and no link leads to it.

    Mutates: nothing.

    Raises: as `build_chain_tree`.

    Source: contracts.md §1.4, `build_tree_kernel_efficient`, and §A-13: the mask is causal.
    """
    check_number("topk", topk, least=1)
    check_tensor("selected_index", selected_index, ("bs", "width - 1"))
    bs, drafts = (int(size) for size in selected_index.shape)
    check_tensor("parent_list", parent_list, (bs, "parents"), device=selected_index.device)
    check_tensor("seq_lens", seq_lens, (bs,), device=selected_index.device)
    layout = _new_layout(bs, drafts + 1, selected_index.device)
    chosen = choose("build_tree", selected_index.device, backend)
    if bs:
        load("build_tree", chosen)(parent_list, selected_index, seq_lens, *layout, topk)
    return layout


def full_tree_mask(
    visible: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    total: int,
    out: torch.Tensor | None = None,
    backend: BackendName | None = None,
) -> torch.Tensor:
    """Flatten trees and their contexts into one mask: for each request `width` rows of `seq_len + width` tokens.

    Args:
        visible: Shape: [bs, width, width]; bool.
        seq_lens: Context tokens of each request; below 0 counts as 0. Shape: [bs]; dtype int32 or int64.
        total: Elements that the output holds, `sum(width * (seq_len + width))`, known to the host.
        out: Shape: [total]; bool.
        backend: Insist on a backend.

    Returns:
        True sees. Shape: [total]; bool.

    Padding: elements past the last request are False; what does not fit is dropped.

    Mutates: `out`, every element.

    Raises: as `build_chain_tree`; AliasError.

    Source: contracts.md §1.4, `TreeMaskMode` FULL_MASK.
    """
    check_tensor("visible", visible, ("bs", "width", "width"), dtypes=(torch.bool,))
    bs, width, other = (int(size) for size in visible.shape)
    check_number("visible.shape[2]", other, least=width, most=width)
    check_tensor("seq_lens", seq_lens, (bs,), device=visible.device)
    check_number("total", total, least=0)
    if out is not None:
        check_tensor("out", out, (total,), dtypes=(torch.bool,), device=visible.device)
    mask = torch.empty((total,), dtype=torch.bool, device=visible.device) if out is None else out
    check_disjoint({"out": mask}, {"visible": visible, "seq_lens": seq_lens})
    chosen = choose("full_tree_mask", visible.device, backend)
    if not bs:
        mask.zero_()
    elif total:
        load("full_tree_mask", chosen)(visible, seq_lens, mask)
    return mask


def tree_attention_mask(visible: torch.Tensor, kv_lens: torch.Tensor, *, columns: int, page_size: int) -> torch.Tensor:
    """Say what each token of a tree does not see, as `PagedAttentionMetadata.mask` wants it.

    Args:
        visible: Shape: [bs, width, width]; bool.
        kv_lens: Tokens of each request, the block included; below `width` only in padded rows. Shape: [bs]; dtype int32
            or int64. Never mutated.
        columns: Columns of the block table.
        page_size: Tokens in a page.

    Returns:
        True hides. Shape: [bs, width, columns * page_size]; bool. A token sees the context before the block and what
        the tree lets it see of the block.

    Padding: a row shorter than its block sees nothing.

    Raises: as `build_chain_tree`.
    """
    check_tensor("visible", visible, ("bs", "width", "width"), dtypes=(torch.bool,))
    bs, width, other = (int(size) for size in visible.shape)
    check_number("visible.shape[2]", other, least=width, most=width)
    check_tensor("kv_lens", kv_lens, (bs,), device=visible.device)
    check_number("columns", columns, least=1)
    check_number("page_size", page_size, least=1)
    place = torch.arange(columns * page_size, device=visible.device).unsqueeze(0)
    column = place - (kv_lens.to(torch.int64) - width).unsqueeze(1)  # in the block; negative in the context
    inside = column.clamp(0, width - 1).unsqueeze(1).expand(bs, width, -1)
    sees = torch.where((column < 0).unsqueeze(1), True, visible.gather(2, inside))
    live = (column < width) & (kv_lens >= width).unsqueeze(1)
    return ~(sees & live.unsqueeze(1))


def verify_tree_greedy(
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    *,
    depth: int,
    backend: BackendName | None = None,
) -> TreeAccept:
    """Walk each tree from its root to the child that the target would have chosen, as long as there is one.

    Args:
        candidates: Tokens of the block; a negative one is a placeholder and never accepted. Shape: [bs, width]; dtype
            int32 or int64.
        target_predict: The target's greedy token after each. Shape: [bs, width]; dtype int32 or int64.
        next_token: See `TreeLayout`. A link outside the block ends like -1.
        next_sibling: See `TreeLayout`.
        depth: Most tokens accepted, the root included: draft steps plus one. Need not be the width.
        backend: Insist on a backend.

    Returns:
        New tensors.

    Padding: a row without links accepts its root; zero requests give empty tensors.

    Mutates: nothing.

    Raises: as `build_chain_tree`.

    Source: contracts.md §1.4, `verify_tree_greedy`, and §A-11, §A-32.
    """
    bs, width = check_tree(candidates, next_token, next_sibling, depth)
    check_tensor("target_predict", target_predict, (bs, width), device=candidates.device)
    result = new_accept(bs, width, depth, candidates.device)
    chosen = choose("verify_tree_greedy", candidates.device, backend)
    if bs:
        load("verify_tree_greedy", chosen)(candidates, target_predict, next_token, next_sibling, *result)
    return result


def check_tree(
    candidates: torch.Tensor, next_token: torch.Tensor, next_sibling: torch.Tensor, depth: int
) -> tuple[int, int]:
    """Check a tree's tokens and links; its rows and width."""
    check_tensor("candidates", candidates, ("bs", "width"))
    bs, width = (int(size) for size in candidates.shape)
    check_number("candidates.shape[1]", width, least=1)
    check_number("depth", depth, least=1, most=width)
    for name, links in (("next_token", next_token), ("next_sibling", next_sibling)):
        check_tensor(name, links, (bs, width), device=candidates.device)
    return bs, width


def new_accept(bs: int, width: int, depth: int, device: torch.device) -> TreeAccept:
    """Outputs that a verify op fills."""
    rows = torch.empty((2, bs), dtype=torch.int64, device=device)
    accept_index = torch.empty((bs, depth), dtype=torch.int64, device=device)
    return TreeAccept(accept_index, rows[0], torch.empty((bs * width,), dtype=torch.int64, device=device), rows[1])
