"""npu_rms_norm and npu_add_rms_norm.

This module owns root-mean-square normalisation over the axes of gamma, computed in float32 and rounded once.
"""

from __future__ import annotations

import torch

from .rules import META, declare, document, note, refuse

OP = "npu::npu_rms_norm"
OP_ADD = "npu::npu_add_rms_norm"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

declare(
    "npu_rms_norm, npu_add_rms_norm",
    document("npu_rms_norm"),
    "test_kernels_other_refusals.py",
    {
        "norm-dtype": ("float16, bfloat16, float32", "cast the input"),
        "norm-gamma-dtype": ("gamma and the second summand of the input's dtype", "cast it"),
        "norm-rank": ("an input of 2 to 8 axes", "reshape the input"),
        "norm-gamma": ("gamma shaped as the input's last axes", "pass the weight of the normalised axes"),
    },
)
declare(
    "npu_add_rms_norm",
    META,
    "test_kernels_other_refusals.py",
    {
        "norm-summands": ("two summands of one shape", "reshape the summands"),
    },
)
note("npu_rms_norm", "gamma of 2 to 8 axes", "its document", "1 axis is taken: the document's own example has it")
note("npu_add_rms_norm", "—", "no document in the wheel", "the rules of npu_rms_norm hold")


def _check(op: str, name: str, input: torch.Tensor, gamma: torch.Tensor) -> None:
    if input.dtype not in _DTYPES:
        refuse(op, "norm-dtype", name, input.dtype)
    if gamma.dtype != input.dtype:
        refuse(op, "norm-gamma-dtype", "gamma", f"{gamma.dtype} beside {input.dtype}")
    if not 2 <= input.dim() <= 8:
        refuse(op, "norm-rank", name, f"shape {tuple(input.shape)}")
    if gamma.dim() == 0 or tuple(input.shape[-gamma.dim() :]) != tuple(gamma.shape):
        refuse(op, "norm-gamma", "gamma", f"shape {tuple(gamma.shape)} for an input of {tuple(input.shape)}")


def _normalise(input: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    axes = tuple(range(-gamma.dim(), 0))
    reciprocal = torch.rsqrt(input.float().square().mean(axes, keepdim=True) + epsilon)
    return (input.float() * reciprocal * gamma.float()).to(input.dtype), reciprocal


def npu_rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06) -> tuple[torch.Tensor, torch.Tensor]:
    """Divides by the root of the mean square over gamma's axes and multiplies by gamma.

    Args:
        input: 2 to 8 axes; float16, bfloat16 or float32.
        gamma: Shape: the input's last axes; dtype of the input.
        epsilon: added to the mean square.

    Returns:
        The normalised tensor (shape and dtype of the input), and the reciprocal root (float32; gamma's axes of size 1).

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        Document of torch_npu.npu_rms_norm in the torch_npu 2.12.0 wheel.
    """
    _check(OP, "input", input, gamma)
    return _normalise(input, gamma, epsilon)


def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Adds two tensors and normalises the sum, rounded to their dtype, as ``npu_rms_norm`` does.

    Args:
        x1: 2 to 8 axes; float16, bfloat16 or float32.
        x2: shape and dtype of ``x1``.
        gamma: Shape: the last axes of ``x1``; dtype of ``x1``.
        epsilon: added to the mean square.

    Returns:
        The normalised sum, the reciprocal root (float32), and the sum.

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        Meta kernel of npu_add_rms_norm in the torch_npu 2.12.0 wheel.
    """
    _check(OP_ADD, "x1", x1, gamma)
    if x2.dtype != x1.dtype:
        refuse(OP_ADD, "norm-gamma-dtype", "x2", f"{x2.dtype} beside {x1.dtype}")
    if x2.shape != x1.shape:
        refuse(OP_ADD, "norm-summands", "x2", f"shape {tuple(x2.shape)} beside {tuple(x1.shape)}")
    total = x1 + x2
    out, reciprocal = _normalise(total, gamma, epsilon)
    return out, reciprocal, total


KERNELS = {OP: npu_rms_norm, OP_ADD: npu_add_rms_norm}
