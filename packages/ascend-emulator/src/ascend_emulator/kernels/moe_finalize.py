"""Bringing experts' results back to their tokens: npu_moe_finalize_routing and npu_moe_token_unpermute.

This module owns the ops' refusals; sums are float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .errors import DeviceFault
from .pose import current
from .rules import declare, document, note, online, refuse

OP = "npu::npu_moe_finalize_routing"
OP_UNPERMUTE = "npu::npu_moe_token_unpermute"
OP_INNER = "npu::_npu_moe_token_unpermute"
"""An op of torch_npu from 2.13 on."""
_TEST = "test_kernels_moe.py"
_DOC = online("torch_npu-npu_moe_finalize_routing")
_DOC_UNPERMUTE = document("npu_moe_token_unpermute")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)

declare(
    "npu_moe_finalize_routing",
    _DOC,
    _TEST,
    {
        "finalize-rows": ("rows (N * K, H), dropping: (E, C, H), of float16, bfloat16 or float32", "cast and reshape"),
        "finalize-dtype": ("skip1, skip2, bias and scales of the rows' dtype", "cast them"),
        "finalize-shape": ("skip1, skip2 (N, H), bias (E, H), scales (N, K)", "reshape them"),
        "finalize-skip": ("skip2 only with skip1", "pass it as skip1"),
        "finalize-index": (
            "an int32 expanded_src_to_dst_row (N * K,); an int32 export_for_source_row (N, K), needed by bias",
            "cast and reshape them",
        ),
        "finalize-mode": ("drop_pad_mode 0, 1, 2 or 3", "pass 2 for indices of npu_moe_init_routing_v2"),
    },
)
declare(
    "npu_moe_token_unpermute",
    _DOC_UNPERMUTE,
    _TEST,
    {
        "unpermute-tokens": ("tokens of 2 axes, bfloat16, float16 or float32", "cast and reshape them"),
        "unpermute-indices": ("int32 or int64 indices (tokens * K,)", "cast and flatten them"),
        "unpermute-probs": ("probs (tokens, K), K dividing the indices, K at most 512", "reshape probs"),
        "unpermute-padded": ("padded_mode False", "pass False"),
    },
)
note(
    "npu_moe_finalize_routing",
    "indices within the rows, -1 for a dropped token with dropping only",
    _DOC,
    "-1 adds nothing in every mode, as in the document's own code; other indices outside are a `DeviceFault` (507015): "
    + _TEST,
)
note(
    "npu_moe_token_unpermute",
    "(not documented) indices outside the tokens",
    "—",
    "past the end: they add nothing (the tokens were cut by num_out_tokens); negative: a `DeviceFault` (507015)",
)
note(
    "npu_moe_token_unpermute",
    "int64 indices, bfloat16 alone",
    _DOC_UNPERMUTE,
    "int32, float16 and float32 are taken: its own permuting op returns int32",
)


def _check(
    rows: torch.Tensor,
    parts: dict[str, torch.Tensor | None],
    index: torch.Tensor,
    experts: torch.Tensor | None,
    mode: int | None,
) -> tuple[int, int]:
    """Checks a call; number of tokens and experts a token."""
    if mode not in (0, 1, 2, 3):
        refuse(OP, "finalize-mode", "drop_pad_mode", mode)
    if rows.dtype not in _FLOATS or rows.dim() != (3 if mode in (1, 3) else 2):
        refuse(OP, "finalize-rows", "expanded_permuted_rows", f"{rows.dtype}, shape {tuple(rows.shape)}, mode {mode}")
    if parts["skip2"] is not None and parts["skip1"] is None:
        refuse(OP, "finalize-skip", "skip1", None)
    if index.dtype != torch.int32 or index.dim() != 1:
        refuse(OP, "finalize-index", "expanded_src_to_dst_row", f"{index.dtype}, shape {tuple(index.shape)}")
    scales = parts["scales"]
    each = scales.size(1) if scales is not None and scales.dim() == 2 else 1
    count = index.numel() // max(each, 1)
    hidden = rows.size(-1)
    shapes = {"skip1": (count, hidden), "skip2": (count, hidden), "scales": (count, each)}
    for name, tensor in parts.items():
        if tensor is None:
            continue
        if tensor.dtype != rows.dtype:
            refuse(OP, "finalize-dtype", name, f"{tensor.dtype} beside {rows.dtype}")
        fits = tensor.dim() == 2 and (tensor.size(1) == hidden if name == "bias" else tensor.shape == shapes[name])
        if not fits:
            refuse(OP, "finalize-shape", name, f"shape {tuple(tensor.shape)} for {count} tokens, {each} experts each")
    if index.numel() != count * each or (mode in (0, 2) and rows.size(0) != index.numel()):
        refuse(OP, "finalize-rows", "expanded_permuted_rows", f"{tuple(rows.shape)} for {index.numel()} indices")
    if experts is None and parts["bias"] is not None:
        refuse(OP, "finalize-index", "export_for_source_row", None)
    if experts is not None and (experts.dtype != torch.int32 or tuple(experts.shape) != (count, each)):
        refuse(OP, "finalize-index", "export_for_source_row", f"{experts.dtype}, shape {tuple(experts.shape)}")
    return count, each


def npu_moe_finalize_routing(
    expanded_permuted_rows: torch.Tensor,
    skip1: torch.Tensor | None,
    skip2: torch.Tensor | None,
    bias: torch.Tensor | None,
    scales: torch.Tensor | None,
    expanded_src_to_dst_row: torch.Tensor,
    export_for_source_row: torch.Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> torch.Tensor:
    """Adds up each token's results: ``skip1 + skip2 + sum of scale * (row + bias of its expert)``.

    Args:
        expanded_permuted_rows: Shape: [N * K, H], or [E, C, H] with dropping; float16, bfloat16 or float32.
        skip1: None, or Shape: [N, H]; dtype of the rows, as the next three.
        skip2: None, or Shape: [N, H].
        bias: None, or Shape: [E, H].
        scales: None (K is 1), or Shape: [N, K].
        expanded_src_to_dst_row: row of each (token, k): column by column in modes 0 and 1, row by row in 2 and 3; -1
            for none. Shape: [N * K]; int32.
        export_for_source_row: expert of each (token, k), for the bias. Shape: [N, K]; int32.
        drop_pad_mode: 0 to 3; odd ones with dropping.
        k: no effect; the experts a token are the columns of ``scales``.

    Returns:
        Shape: [N, H]; dtype of the rows.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_moe_finalize_routing.md.
    """
    parts = {"skip1": skip1, "skip2": skip2, "bias": bias, "scales": scales}
    index, mode = expanded_src_to_dst_row, drop_pad_mode
    count, each = _check(expanded_permuted_rows, parts, index, export_for_source_row, mode)
    rows = expanded_permuted_rows.reshape(-1, expanded_permuted_rows.size(-1)).float()
    places = (index.view(count, each) if mode in (2, 3) else index.view(each, count).T).long()
    if places.numel() and not -1 <= int(places.min()) <= int(places.max()) < rows.size(0):
        raise DeviceFault(OP, f"an index of {int(places.min())} to {int(places.max())} for {rows.size(0)} rows")
    picked = rows[places.clamp(min=0)].masked_fill((places < 0).unsqueeze(-1), 0) if rows.size(0) else rows[:0]
    if bias is not None and export_for_source_row is not None:
        experts = export_for_source_row.long()
        if experts.numel() and not 0 <= int(experts.min()) <= int(experts.max()) < bias.size(0):
            raise DeviceFault(OP, f"an expert outside the {bias.size(0)} rows of bias")
        picked = picked + bias.float()[experts]
    if scales is not None:
        picked = picked * scales.float().unsqueeze(-1)
    out = picked.view(count, each, rows.size(1)).sum(1)
    for skip in (skip1, skip2):
        out = out if skip is None else out + skip.float()
    return out.to(expanded_permuted_rows.dtype)


def npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Adds up each token's results, weighted: the way back from ``npu_moe_token_permute``.

    Args:
        permuted_tokens: Shape: [rows, H]; bfloat16, float16 or float32.
        sorted_indices: row of each (token, k). Shape: [tokens * K]; int32 or int64.
        probs: None (K is 1), or weights. Shape: [tokens, K].
        padded_mode: False.
        restore_shape: no effect.

    Returns:
        Shape: [tokens, H]; dtype of the tokens.

    Raises:
        OpRefused, DeviceFault: see ``errors``.

    Source:
        Document of torch_npu.npu_moe_token_unpermute in the torch_npu 2.12.0 wheel.
    """
    if padded_mode:
        refuse(OP_UNPERMUTE, "unpermute-padded", "padded_mode", padded_mode)
    if permuted_tokens.dtype not in _FLOATS or permuted_tokens.dim() != 2:
        given = f"{permuted_tokens.dtype}, shape {tuple(permuted_tokens.shape)}"
        refuse(OP_UNPERMUTE, "unpermute-tokens", "permuted_tokens", given)
    if sorted_indices.dtype not in (torch.int32, torch.int64) or sorted_indices.dim() != 1:
        given = f"{sorted_indices.dtype}, shape {tuple(sorted_indices.shape)}"
        refuse(OP_UNPERMUTE, "unpermute-indices", "sorted_indices", given)
    each = 1 if probs is None or probs.dim() != 2 else probs.size(1)
    if probs is not None and (probs.dim() != 2 or probs.numel() != sorted_indices.numel() or each > 512):
        refuse(OP_UNPERMUTE, "unpermute-probs", "probs", f"{tuple(probs.shape)} for {sorted_indices.numel()} indices")
    places = sorted_indices.long()
    if places.numel() and int(places.min()) < 0:
        raise DeviceFault(OP_UNPERMUTE, f"sorted_indices reaches down to {int(places.min())}")
    rows = torch.cat((permuted_tokens.float(), torch.zeros(1, permuted_tokens.size(1))))
    picked = rows[places.clamp(max=permuted_tokens.size(0))].view(-1, each, permuted_tokens.size(1))
    if probs is not None:
        picked = picked * probs.float().unsqueeze(-1)
    return picked.sum(1).to(permuted_tokens.dtype)


def npu_moe_token_unpermute_inner(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What ``npu_moe_token_unpermute`` calls from torch_npu 2.13 on; see there.

    Returns:
        The sums, and what a backward pass needs of ``permuted_tokens``: all of them with probs, on a 950 and before
        CANN 9.1, else None.
    """
    out = npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs, padded_mode, restore_shape)
    pose = current()
    later = pose.cann is not None and pose.cann >= (9, 1) and pose.chip != "950"
    return out, None if later and probs is None else permuted_tokens


KERNELS: dict[str, Callable[..., object]] = {OP: npu_moe_finalize_routing, OP_UNPERMUTE: npu_moe_token_unpermute}
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
    KERNELS[OP_INNER] = npu_moe_token_unpermute_inner
