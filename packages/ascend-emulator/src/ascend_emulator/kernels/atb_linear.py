"""_npu_matmul_add_fp32 of atb: a product added to float32 numbers.

This module owns the op's refusals.
"""

from __future__ import annotations

import torch

from .rules import declare, note, refuse

OP = "atb::_npu_matmul_add_fp32"
_NAME = "atb::_npu_matmul_add_fp32"
_DOC = "op-plugin 517f2e7, op_plugin/ops/atb/LinearAtb.cpp"

declare(
    _NAME,
    _DOC,
    "test_kernels_block_quant.py",
    {
        "accumulate-dtype": ("x and weight both float16 or both bfloat16, a float32 C", "cast them"),
        "accumulate-shape": ("x (k, m), weight (k, n) and a contiguous C (m, n)", "transpose and reshape them"),
    },
)
note(_NAME, "(not documented) where the sum is rounded", "—", "the product is added in float32")


def npu_matmul_add_fp32(x: torch.Tensor, weight: torch.Tensor, C: torch.Tensor) -> None:
    """Adds ``x.T @ weight`` to ``C``.

    Args:
        x: Shape: [k, m]; float16 or bfloat16.
        weight: Shape: [k, n]; dtype of ``x``.
        C: Shape: [m, n]; float32. *Mutated*.

    Raises:
        OpRefused: a constraint of the source is broken.

    Source:
        op-plugin, LinearAtb.cpp: LinearOperation with transposeA and enAccum.
    """
    if x.dtype not in (torch.float16, torch.bfloat16) or weight.dtype != x.dtype or C.dtype != torch.float32:
        refuse(OP, "accumulate-dtype", "x", f"{x.dtype}, weight {weight.dtype}, C {C.dtype}")
    fits = x.dim() == weight.dim() == 2 and x.size(0) == weight.size(0) and C.is_contiguous()
    if not fits or tuple(C.shape) != (x.size(1), weight.size(1)):
        refuse(OP, "accumulate-shape", "x", f"{tuple(x.shape)}, weight {tuple(weight.shape)}, C {tuple(C.shape)}")
    C += x.float().T @ weight.float()


KERNELS = {OP: npu_matmul_add_fp32}
