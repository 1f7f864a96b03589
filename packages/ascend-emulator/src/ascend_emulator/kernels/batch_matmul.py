"""npu_transpose_batchmatmul: a batched product with its axes reordered on the way in and out.

This module owns the op's refusals; floats are multiplied in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import KernelNotCovered
from .pose import Scope
from .rules import META, declare, holds, note, online, refuse

OP = "npu::npu_transpose_batchmatmul"
_NAME = "npu_transpose_batchmatmul"
_DOC = online("torch_npu-npu_transpose_batchmatmul")
_TEST = "test_kernels_matmul.py"

declare(
    _NAME,
    _DOC,
    _TEST,
    {
        "tbm-dtype": ("input and weight of one of float16, bfloat16, float32", "cast them"),
        "tbm-rank": ("input (B, M, K), or (M, B, K) with perm_x1 [1, 0, 2], and weight (B, K, N)", "reshape them"),
        "tbm-align": ("K and N multiples of 16", "pad K and N"),
        "tbm-limit": ("B, N and the input's last axis (times B with perm_x1 [1, 0, 2]) below 65536", "split the batch"),
        "tbm-perm": (
            "perm_x1 [0, 1, 2] or [1, 0, 2]; perm_x2 [0, 1, 2] or [0, 2, 1]; perm_y [1, 0, 2]",
            "pass a supported order",
        ),
        "tbm-split": ("a batch_split_factor from 1 that divides the batch", "pass 1"),
        "tbm-bias": ("no bias", "add the bias to the result"),
    },
)
declare(
    _NAME,
    META + " (CANN below 8.5)",
    _TEST,
    {"tbm-perm-x2": ("perm_x2 [0, 1, 2]", "transpose the weight beforehand")},
    Scope(before=(8, 5)),
)
note(_NAME, "a scale, for int8 results", _DOC, "not computed: `KernelNotCovered`: " + _TEST)
note(
    _NAME,
    "batch_split_factor divides N",
    _DOC,
    "it must divide the batch: the document's shape of the result needs that",
)


def npu_transpose_batchmatmul(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> torch.Tensor:
    """Multiplies batch by batch and returns the batch as the second axis.

    Args:
        input: Shape: [B, M, K], or [M, B, K] with ``perm_x1`` [1, 0, 2]; float16, bfloat16 or float32.
        weight: Shape: [B, K, N]; the input's dtype.
        bias: None.
        scale: not computed.
        perm_x1: order of the input's axes that gives [B, M, K].
        perm_x2: None or [0, 1, 2]; from CANN 8.5 on also [0, 2, 1].
        perm_y: None or [1, 0, 2].
        batch_split_factor: number of slices of the batch that come as a first axis.

    Returns:
        Shape: [M, B, N]; with f slices [f, M, B * N / f].

    Raises:
        OpRefused, KernelNotCovered: see ``errors``.

    Source:
        op-plugin, torch_npu-npu_transpose_batchmatmul.md.
    """
    if bias is not None:
        refuse(OP, "tbm-bias", "bias", f"shape {tuple(bias.shape)}")
    if scale is not None:
        raise KernelNotCovered(OP, "scale", f"a tensor of shape {tuple(scale.shape)}")
    orders = (
        ("perm_x1", perm_x1, ([0, 1, 2], [1, 0, 2])),
        ("perm_x2", perm_x2, ([0, 1, 2], [0, 2, 1])),
        ("perm_y", perm_y, ([1, 0, 2],)),
    )
    for name, order, allowed in orders:
        if order and list(order) not in allowed:
            refuse(OP, "tbm-perm", name, list(order))
    for name, tensor in (("input", input), ("weight", weight)):
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32) or tensor.dtype != input.dtype:
            refuse(OP, "tbm-dtype", name, tensor.dtype)
        if tensor.dim() != 3:
            refuse(OP, "tbm-rank", name, f"shape {tuple(tensor.shape)}")
    if list(perm_x2 or ()) == [0, 2, 1]:
        if holds("tbm-perm-x2"):
            refuse(OP, "tbm-perm-x2", "perm_x2", [0, 2, 1])
        weight = weight.transpose(1, 2)
    turned = list(perm_x1 or ()) == [1, 0, 2]
    x = input.transpose(0, 1) if turned else input
    batch, rows, inner = x.shape
    if tuple(weight.shape[:2]) != (batch, inner):
        refuse(OP, "tbm-rank", "weight", f"{tuple(weight.shape)} for an input of {tuple(input.shape)}")
    columns = weight.size(2)
    if inner % 16 or columns % 16:
        refuse(OP, "tbm-align", "weight", f"K = {inner}, N = {columns}")
    if max(batch, columns, inner * (batch if turned else 1)) >= 65536:
        refuse(OP, "tbm-limit", "input", f"{tuple(input.shape)} @ {tuple(weight.shape)}")
    factor = batch_split_factor or 1
    if factor < 1 or batch % factor:
        refuse(OP, "tbm-split", "batch_split_factor", f"{factor} for a batch of {batch}")
    out = torch.bmm(x.float(), weight.float()).to(input.dtype)
    if factor == 1:
        return out.transpose(0, 1).contiguous()
    return out.view(factor, batch // factor, rows, columns).transpose(1, 2).reshape(factor, rows, -1)


KERNELS = {OP: npu_transpose_batchmatmul}
