"""sgl_kernel_npu's batch_matmul_transpose: one product a head, heads as the second axis throughout.

This module owns the op's definition (torch_npu has none) and its refusals; sums are float32 and rounded once.
"""

from __future__ import annotations

import torch

from .definitions import define
from .rules import declare, note, refuse

OP = "npu::batch_matmul_transpose"
SCHEMA = (
    "batch_matmul_transpose(Tensor tensor_a, Tensor tensor_b, Tensor(a!) tensor_c, str? format_mode=None, str? "
    "quant_mode=None) -> ()"
)
_SOURCE = "sgl-kernel-npu f425bdf, csrc/batch_matmul_transpose/op_host"

declare(
    OP,
    _SOURCE,
    "test_kernels_sgl_matmul.py",
    {
        "bmt-dtype": ("three tensors of one dtype, float16 or bfloat16", "cast them"),
        "bmt-shape": (
            "tensor_a (m, heads, k); tensor_b (heads, k, n), NZ: (heads, n / 16, k, 16); tensor_c (m, heads, n), which "
            "the kernel does not check",
            "reshape them",
        ),
        "bmt-contiguous": ("contiguous tensors: the kernel reads none of their strides", "call .contiguous()"),
        "bmt-rows": ("m of 1 to 1024", "split the tokens"),
        "bmt-format": ("format_mode ND or NZ", "pass ND"),
        "bmt-quant": ("quant_mode per_channel_symm, per_channel_asymm or per_token_symm", "leave it out"),
    },
)
note(OP, "quant_mode", _SOURCE, "without effect: float16 and bfloat16 alone are taken")
note(
    OP,
    "(not documented) tilings are kept one for each m, for all shapes of tensor_b",
    _SOURCE,
    "not emulated: a graph with products of two shapes for one m would replay both with the last one's tiling",
)


def batch_matmul_transpose(
    tensor_a: torch.Tensor,
    tensor_b: torch.Tensor,
    tensor_c: torch.Tensor,
    format_mode: str | None = None,
    quant_mode: str | None = None,
) -> None:
    """Writes ``tensor_a[:, head] @ tensor_b[head]`` to ``tensor_c[:, head]``.

    Args:
        tensor_a: Shape: [m, heads, k]; float16 or bfloat16.
        tensor_b: Shape: [heads, k, n], or NZ [heads, n / 16, k, 16]; dtype of ``tensor_a``.
        tensor_c: Shape: [m, heads, n]; dtype of ``tensor_a``. *Mutated*.
        format_mode: ND (None) or NZ, of ``tensor_b``.
        quant_mode: no effect.

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        sgl-kernel-npu f425bdf, csrc/batch_matmul_transpose.
    """
    if format_mode not in (None, "ND", "NZ"):
        refuse(OP, "bmt-format", "format_mode", format_mode)
    if quant_mode not in (None, "per_channel_symm", "per_channel_asymm", "per_token_symm"):
        refuse(OP, "bmt-quant", "quant_mode", quant_mode)
    named = {"tensor_a": tensor_a, "tensor_b": tensor_b, "tensor_c": tensor_c}
    for name, tensor in named.items():
        if tensor.dtype not in (torch.float16, torch.bfloat16) or tensor.dtype != tensor_a.dtype:
            refuse(OP, "bmt-dtype", name, tensor.dtype)
        if not tensor.is_contiguous():
            refuse(OP, "bmt-contiguous", name, f"strides {tensor.stride()}")
    shapes = f"shapes {', '.join(str(tuple(tensor.shape)) for tensor in named.values())}"
    blocked = format_mode == "NZ"
    if tensor_a.dim() != 3 or tensor_b.dim() != (4 if blocked else 3) or (blocked and tensor_b.size(3) != 16):
        refuse(OP, "bmt-shape", "tensor_b", shapes)
    plain = tensor_b.transpose(1, 2).flatten(2) if blocked else tensor_b
    rows, heads, depth = tensor_a.shape
    if tuple(plain.shape[:2]) != (heads, depth) or tuple(tensor_c.shape) != (rows, heads, plain.size(2)):
        refuse(OP, "bmt-shape", "tensor_c", shapes)
    if not 1 <= rows <= 1024:
        refuse(OP, "bmt-rows", "tensor_a", shapes)
    tensor_c.copy_((tensor_a.transpose(0, 1).float() @ plain.float()).transpose(0, 1))


KERNELS = {OP: batch_matmul_transpose}
define(SCHEMA)
