"""npu_rms_norm, npu_gemma_rms_norm, and npu_add_rms_norm in its forms that quantise nothing.

This module owns root-mean-square normalisation over the axes of gamma, computed in float32 and rounded once.
"""

from __future__ import annotations

import torch

from .rules import META, declare, document, note, online, refuse

OP = "npu::npu_rms_norm"
OP_ADD = "npu::npu_add_rms_norm"
OP_GEMMA = "npu::npu_gemma_rms_norm"
OP_CAST = "npu::npu_add_rms_norm_cast"
OP_V2 = "npu::npu_add_rms_norm_v2"
OP_V2_FUNCTIONAL = "npu::npu_add_rms_norm_v2_functional"
_ALL = "npu_rms_norm, npu_gemma_rms_norm, npu_add_rms_norm[_cast, _v2, _quant, _dynamic_quant]"
_SUMS = "npu_add_rms_norm[_cast, _v2, _quant, _dynamic_quant]"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

declare(
    _ALL,
    document("npu_rms_norm"),
    "test_kernels_norms.py",
    {
        "norm-dtype": ("float16, bfloat16, float32", "cast the input"),
        "norm-gamma-dtype": ("gamma and the second summand of the input's dtype", "cast it"),
        "norm-rank": ("an input of 2 to 8 axes (all but npu_rms_norm: 1 to 8)", "reshape the input"),
        "norm-gamma": ("gamma shaped as the input's last axes", "pass the weight of the normalised axes"),
    },
)
declare(
    _SUMS,
    META,
    "test_kernels_norms.py",
    {"norm-summands": ("two summands of one shape", "reshape the summands")},
)
declare(
    "npu_gemma_rms_norm, " + _SUMS,
    online("torch_npu-npu_add_rms_norm"),
    "test_kernels_norms.py",
    {"norm-empty": ("no empty tensor", "skip the call")},
)
declare(
    "npu_add_rms_norm_cast, _quant, _dynamic_quant",
    document("npu_add_rms_norm_cast"),
    "test_kernels_norms.py",
    {"norm-half": ("float16, bfloat16", "cast the input")},
)
declare(
    "npu_gemma_rms_norm",
    document("npu_gemma_rms_norm"),
    "test_kernels_norms.py",
    {"gemma-contiguous": ("contiguous tensors", "call .contiguous() on it")},
)
note("npu_rms_norm", "gamma of 2 to 8 axes", "its document", "1 axis is taken: the document's own example has it")
note(
    "npu_add_rms_norm_cast",
    "(not documented) whether the float32 result is rounded before",
    "—",
    "it is the rounded result, cast",
)


def _check(op: str, name: str, input: torch.Tensor, gamma: torch.Tensor, least: int = 2) -> None:
    if input.dtype not in _DTYPES:
        refuse(op, "norm-dtype", name, input.dtype)
    if gamma.dtype != input.dtype:
        refuse(op, "norm-gamma-dtype", "gamma", f"{gamma.dtype} beside {input.dtype}")
    if not least <= input.dim() <= 8:
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
    check_sum(OP_ADD, x1, x2, gamma)
    total = x1 + x2
    out, reciprocal = _normalise(total, gamma, epsilon)
    return out, reciprocal, total


def npu_gemma_rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor]:
    """``npu_rms_norm`` with a factor of ``1 + gamma``.

    Args:
        input: 1 to 8 axes; float16, bfloat16 or float32; contiguous.
        gamma: Shape: the input's last axes; dtype of the input.
        epsilon: added to the mean square.

    Returns:
        The normalised tensor, and the reciprocal root (float32; gamma's axes of size 1).

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        Document of torch_npu.npu_gemma_rms_norm in the torch_npu 2.12.0 wheel.
    """
    _check(OP_GEMMA, "input", input, gamma, least=1)
    for name, tensor in (("input", input), ("gamma", gamma)):
        if not tensor.is_contiguous():
            refuse(OP_GEMMA, "gemma-contiguous", name, f"strides {tensor.stride()}")
        if tensor.numel() == 0:
            refuse(OP_GEMMA, "norm-empty", name, f"shape {tuple(tensor.shape)}")
    return _normalise(input, gamma.float() + 1, epsilon)


def check_sum(op: str, x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor) -> None:
    """Refuses summands and gamma that do not fit each other.

    Raises:
        OpRefused: a documented constraint is broken.
    """
    _check(op, "x1", x1, gamma, least=1)
    if x2.dtype != x1.dtype:
        refuse(op, "norm-gamma-dtype", "x2", f"{x2.dtype} beside {x1.dtype}")
    if x2.shape != x1.shape:
        refuse(op, "norm-summands", "x2", f"shape {tuple(x2.shape)} beside {tuple(x1.shape)}")
    if x1.numel() == 0:
        refuse(op, "norm-empty", "x1", f"shape {tuple(x1.shape)}")


def npu_add_rms_norm_cast(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``npu_add_rms_norm`` with the normalised sum in float32 too.

    Args:
        x1: 1 to 8 axes; float16 or bfloat16.
        x2: shape and dtype of ``x1``.
        gamma: Shape: the last axes of ``x1``; dtype of ``x1``.
        epsilon: added to the mean square.

    Returns:
        The normalised sum in float32 and in the dtype of ``x1``, the reciprocal root (float32), and the sum.

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        Document of torch_npu.npu_add_rms_norm_cast in the torch_npu 2.12.0 wheel.
    """
    check_sum(OP_CAST, x1, x2, gamma)
    if x1.dtype == torch.float32:
        refuse(OP_CAST, "norm-half", "x1", x1.dtype)
    total = x1 + x2
    out, reciprocal = _normalise(total, gamma, epsilon)
    return out.float(), out, reciprocal, total


def npu_add_rms_norm_v2_functional(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``npu_add_rms_norm`` in the order of ``npu_add_rms_norm_v2``: reciprocal root, normalised sum, sum."""
    check_sum(OP_V2_FUNCTIONAL, x1, x2, gamma)
    total = x1 + x2
    out, reciprocal = _normalise(total, gamma, epsilon)
    return reciprocal, out, total


def npu_add_rms_norm_v2(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> torch.Tensor:
    """``npu_add_rms_norm`` in place.

    Args:
        x1: becomes the normalised sum. *Mutated*.
        x2: becomes the sum. *Mutated*.
        gamma: Shape: the last axes of ``x1``; dtype of ``x1``.
        epsilon: added to the mean square.

    Returns:
        The reciprocal root (float32).

    Raises:
        OpRefused: a documented constraint is broken; nothing is written then.

    Source:
        ops-nn, aclnnInplaceAddRmsNorm.md.
    """
    check_sum(OP_V2, x1, x2, gamma)
    total = x1 + x2
    out, reciprocal = _normalise(total, gamma, epsilon)
    x1.copy_(out)
    x2.copy_(total)
    return reciprocal


KERNELS = {
    OP: npu_rms_norm,
    OP_ADD: npu_add_rms_norm,
    OP_GEMMA: npu_gemma_rms_norm,
    OP_CAST: npu_add_rms_norm_cast,
    OP_V2: npu_add_rms_norm_v2,
    OP_V2_FUNCTIONAL: npu_add_rms_norm_v2_functional,
}
