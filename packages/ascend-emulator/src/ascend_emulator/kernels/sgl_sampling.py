"""Ops of sgl_kernel_npu around sampling: build_tree_kernel_efficient and apply_token_bitmask.

This module owns the ops' definitions (torch_npu has none) and their refusals.
"""

from __future__ import annotations

import torch

from .definitions import define
from .errors import DeviceFault
from .rules import declare, note, refuse

OP_TREE = "npu::build_tree_kernel_efficient"
OP_MASK = "npu::apply_token_bitmask"
_SOURCE = "sgl-kernel-npu f425bdf, csrc/"
_TEST = "test_kernels_sgl.py"
FULL_MASK, QLEN_ONLY, BITPACKED = 0, 1, 2
SCHEMAS = (
    "build_tree_kernel_efficient(Tensor parent_list, Tensor selected_index, Tensor verified_seq_len, Tensor tree_mask, "
    "Tensor positions, Tensor retrive_index, Tensor retrive_next_token, Tensor retrive_next_sibling, int topk, "
    "int depth, int draft_token_num, int tree_mask_mode) -> ()",
    "apply_token_bitmask(Tensor logits, Tensor bitmask, Tensor? indices=None) -> Tensor",
)

declare(
    "npu::build_tree_kernel_efficient",
    _SOURCE + "build_tree",
    _TEST,
    {
        "tree-dtype": ("int64 throughout, a bool tree_mask", "cast them"),
        "tree-shape": (
            "parent_list (b, topk * (depth - 1) + 1), selected_index (b, w - 1), verified_seq_len (b,), outputs (b, "
            "w), "
            "a tree_mask of w * (sum of lengths + b * w) elements",
            "allocate the buffers for b requests of w tokens",
        ),
        "tree-packed": ("tree_mask_mode 0 or 1", "use an unpacked mask"),
        "tree-qlen": (
            "tree_mask_mode 0: in mode 1 the kernel writes every row of a request to one place, the last one outside",
            "use the full mask, of which the kernel writes the last w columns",
        ),
    },
)
declare(
    "npu::apply_token_bitmask",
    _SOURCE + "apply_token_bitmask/op_host",
    _TEST,
    {
        "bitmask-logits": (
            "contiguous logits (b, vocabulary) of float32, float16 or bfloat16",
            "cast and reshape them",
        ),
        "bitmask-mask": ("a contiguous int32 bitmask (b, ceil(vocabulary / 32))", "cast and reshape it"),
        "bitmask-indices": ("indices of one axis", "flatten them"),
    },
)
note(
    "npu::build_tree_kernel_efficient",
    "1 is FULL_MASK in its README, 0 in its code and in SGLang",
    _SOURCE + "build_tree",
    "0 is",
)
note(
    "npu::build_tree_kernel_efficient",
    "(not documented) a parent that is not among the selected tokens",
    "—",
    "the kernel does not end, or leaves the token out; here a `DeviceFault` (507015): " + _TEST,
)
note(
    "npu::build_tree_kernel_efficient, apply_token_bitmask",
    "schemas without a mark on what they write",
    _SOURCE + "pytorch_extensions.cpp",
    "they write in place nevertheless",
)


def _check_tree(
    parents: torch.Tensor,
    selected: torch.Tensor,
    lens: torch.Tensor,
    mask: torch.Tensor,
    outputs: dict[str, torch.Tensor],
    width: int,
    wanted: int,
) -> None:
    named = {"parent_list": parents, "selected_index": selected, "verified_seq_len": lens, **outputs}
    for name, tensor in named.items():
        if tensor.dtype != torch.int64:
            refuse(OP_TREE, "tree-dtype", name, tensor.dtype)
    if mask.dtype != torch.bool:
        refuse(OP_TREE, "tree-dtype", "tree_mask", mask.dtype)
    batch = lens.numel()
    shapes = {"parent_list": batch * wanted, "selected_index": batch * (width - 1)}
    for name, tensor in (named | {"tree_mask": mask}).items():
        size = shapes.get(name, batch * width)
        if name == "tree_mask":
            size = width * (int(lens.sum()) + batch * width)
        if name != "verified_seq_len" and (tensor.numel() != size or not tensor.is_contiguous()):
            refuse(OP_TREE, "tree-shape", name, f"shape {tuple(tensor.shape)}, wanted {size} elements")


def _parent(parents: list[int], selected: list[int], place: int, topk: int) -> int:
    """Node (0 is the root) above the selected token at ``place``."""
    above = selected[place] // topk
    if above == 0:
        return 0
    token = parents[above] if above < len(parents) else -1
    if token not in selected:
        raise DeviceFault(OP_TREE, f"the parent {token} of selected token {place} was not selected")
    return selected.index(token) + 1


def build_tree_kernel_efficient(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Builds each request's verification tree of w = ``draft_token_num`` tokens.

    Args:
        parent_list: parent of each group of ``topk`` candidates. Shape: [b, topk * (depth - 1) + 1]; int64.
        selected_index: chosen candidates. Shape: [b, w - 1]; int64.
        verified_seq_len: verified tokens of each request. Shape: [b]; int64.
        tree_mask: for each request w rows of length + w columns; True lets a token see. Of each row the last w columns
            are written. *Mutated*.
        positions: Shape: [b, w]; int64. *Mutated*, as the next three.
        retrive_index: number of each node in the batch. Shape: [b, w].
        retrive_next_token: first child, or -1. Shape: [b, w].
        retrive_next_sibling: next sibling, or -1. Shape: [b, w].
        topk: candidates a step.
        depth: steps.
        draft_token_num: tokens a tree, the root included.
        tree_mask_mode: 0, the full mask.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        sgl-kernel-npu, csrc/build_tree.
    """
    if tree_mask_mode not in (FULL_MASK, QLEN_ONLY):
        refuse(OP_TREE, "tree-packed", "tree_mask_mode", tree_mask_mode)
    if tree_mask_mode == QLEN_ONLY:
        refuse(OP_TREE, "tree-qlen", "tree_mask_mode", tree_mask_mode)
    outputs = {"positions": positions, "retrive_index": retrive_index}
    outputs |= {"retrive_next_token": retrive_next_token, "retrive_next_sibling": retrive_next_sibling}
    width = draft_token_num
    groups = topk * (depth - 1) + 1
    _check_tree(parent_list, selected_index, verified_seq_len, tree_mask, outputs, width, groups)
    place, flat = 0, tree_mask.view(-1)
    for request, length in enumerate(verified_seq_len.tolist()):
        selected = selected_index.view(-1, width - 1)[request].tolist() if width > 1 else []
        parents = parent_list.view(-1, groups)[request].tolist()
        above = [_parent(parents, selected, i, topk) for i in range(width - 1)]
        first, sibling = [-1] * width, [-1] * width
        for node in range(width - 1, 0, -1):
            sibling[node], first[above[node - 1]] = first[above[node - 1]], node
        rows = flat[place : place + width * (length + width)].view(width, length + width)
        place += width * (length + width)
        rows[:, length:] = False
        rows[:, length] = True
        depths = [0] * width
        for node in range(1, width):
            at = node
            while at:
                rows[node, length + at] = True
                depths[node] += 1
                at = above[at - 1]
                if depths[node] > width:
                    raise DeviceFault(OP_TREE, f"the parents of node {node} of request {request} form a circle")
        targets = (positions, retrive_index, retrive_next_token, retrive_next_sibling)
        start = request * width
        new = ([length + d for d in depths], list(range(start, start + width)), first, sibling)
        for target, numbers in zip(targets, new, strict=True):
            target.view(-1)[start : start + width] = torch.tensor(numbers)


def apply_token_bitmask(
    logits: torch.Tensor, bitmask: torch.Tensor, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """Sets the logits of tokens whose bit is 0 to -inf.

    Args:
        logits: Shape: [b, vocabulary]; float32, float16 or bfloat16. *Mutated*.
        bitmask: bit t % 32 of word t // 32 belongs to token t. Shape: [b, ceil(vocabulary / 32)]; int32.
        indices: None or empty for all rows, or the rows to mask.

    Returns:
        ``logits``.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        sgl-kernel-npu, csrc/apply_token_bitmask.
    """
    floats = (torch.float32, torch.float16, torch.bfloat16)
    if logits.dim() != 2 or logits.dtype not in floats or not logits.is_contiguous() or logits.numel() == 0:
        refuse(OP_MASK, "bitmask-logits", "logits", f"{logits.dtype}, shape {tuple(logits.shape)}")
    wanted = (logits.size(0), -(-logits.size(1) // 32))
    if bitmask.dtype != torch.int32 or tuple(bitmask.shape) != wanted or not bitmask.is_contiguous():
        refuse(OP_MASK, "bitmask-mask", "bitmask", f"{bitmask.dtype}, shape {tuple(bitmask.shape)}, wanted {wanted}")
    if indices is not None and indices.numel() and indices.dim() != 1:
        refuse(OP_MASK, "bitmask-indices", "indices", f"shape {tuple(indices.shape)}")
    rows = torch.arange(logits.size(0)) if indices is None or not indices.numel() else indices.long()
    if not 0 <= int(rows.min()) <= int(rows.max()) < logits.size(0):
        raise DeviceFault(OP_MASK, f"indices reach from {int(rows.min())} to {int(rows.max())}")
    bits = (bitmask[rows].unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
    closed = bits.flatten(1)[:, : logits.size(1)] == 0
    logits[rows] = logits[rows].masked_fill(closed, float("-inf"))
    return logits


for _schema in SCHEMAS:
    define(_schema)
UNDECLARED_WRITES = {
    OP_TREE: ("tree_mask", "positions", "retrive_index", "retrive_next_token", "retrive_next_sibling"),
    OP_MASK: ("logits",),
}
"""Arguments that an op writes although its schema does not say so."""
KERNELS = {OP_TREE: build_tree_kernel_efficient, OP_MASK: apply_token_bitmask}
