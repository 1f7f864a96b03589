"""vLLM-Ascend's norms: npu_add_rms_norm_bias, npu_gemma_rms_norm and npu_rms_norm_dynamic_quant of _C_ascend.

This module owns the ops' definitions (torch_npu has none) and the refusals that its own norms do not have. Sums are
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import norms
from .definitions import define
from .quantising import quantise_rows
from .rules import declare, note, refuse
from .same_operator import called_as

OP_BIAS = "_C_ascend::npu_add_rms_norm_bias"
OP_GEMMA = "_C_ascend::npu_gemma_rms_norm"
OP_QUANT = "_C_ascend::npu_rms_norm_dynamic_quant"
SCHEMAS = (
    "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, float epsilon=1e-6) -> "
    "(Tensor y, Tensor rstd, Tensor x)",
    "npu_gemma_rms_norm(Tensor x, Tensor gamma, float epsilon=1e-6) -> (Tensor y, Tensor rstd)",
    "npu_rms_norm_dynamic_quant(Tensor x, Tensor gamma, Tensor? smooth_scale=None, Tensor? beta=None, "
    "float epsilon=1e-6) -> (Tensor y_out, Tensor scale_out)",
)
_SOURCE = "vllm-ascend v0.23.0, csrc/"
_TEST = "test_kernels_vllm_norms.py"

declare(
    OP_BIAS,
    _SOURCE + "moe/add_rms_norm_bias/op_host",
    _TEST,
    {
        "bias-norm-beta": ("a beta of gamma's shape and dtype", "pass the bias of the norm, or None"),
        "bias-norm-epsilon": ("an epsilon of 0 or more", "pass the model's"),
    },
)
declare(
    OP_QUANT,
    _SOURCE + "torch_binding.cpp and csrc/attention/rms_norm_dynamic_quant/op_host",
    _TEST,
    {
        "quant-norm-x": ("a float16 or bfloat16 x with elements", "cast it"),
        "quant-norm-gamma": (
            "gamma, smooth_scale and beta of the dtype of x, one axis, as long as its last",
            "pass the weight of the normalised axis",
        ),
        "quant-norm-epsilon": ("an epsilon above 0", "pass the model's"),
    },
)
note(
    OP_BIAS + ", npu_gemma_rms_norm",
    "dtypes, axes and shapes of the summands and of gamma",
    _SOURCE + "moe/add_rms_norm_bias/op_host; torch_binding.cpp (aclnnGemmaRmsNorm)",
    "as the rows of npu_add_rms_norm and npu_gemma_rms_norm say, under this op's name: " + _TEST,
)


def _lines(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """The shape of the reciprocal roots: gamma's axes of size 1, as the extension allocates them."""
    kept = max(x.dim() - gamma.dim(), 0)
    return torch.empty((*x.shape[:kept], *[1] * (x.dim() - kept)), dtype=torch.float32, device=x.device)


def npu_add_rms_norm_bias(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``npu_add_rms_norm`` with a bias that is added to the normalised sum before it is rounded.

    Args:
        x1: 1 to 8 axes; float16, bfloat16 or float32.
        x2: shape and dtype of ``x1``.
        gamma: Shape: the last axes of ``x1``; dtype of ``x1``.
        beta: shape and dtype of ``gamma``, or None.
        epsilon: added to the mean square.

    Returns:
        The normalised sum, the reciprocal root (float32; gamma's axes of size 1), and the sum.

    Raises:
        OpRefused: a constraint of its tiling is broken.

    Source:
        vllm-ascend v0.23.0, csrc/moe/add_rms_norm_bias.
    """
    norms.check_sum(OP_BIAS, x1, x2, gamma)
    if beta is not None and (beta.shape != gamma.shape or beta.dtype != gamma.dtype):
        refuse(OP_BIAS, "bias-norm-beta", "beta", f"{beta.dtype}, shape {tuple(beta.shape)}")
    if epsilon < 0:
        refuse(OP_BIAS, "bias-norm-epsilon", "epsilon", epsilon)
    total = x1 + x2
    wide, axes = total.float(), tuple(range(-gamma.dim(), 0))
    reciprocal = torch.rsqrt(wide.square().mean(axes, keepdim=True) + epsilon)
    out = wide * reciprocal * gamma.float()
    return (out if beta is None else out + beta.float()).to(x1.dtype), reciprocal, total


def npu_gemma_rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``npu::npu_gemma_rms_norm``, of the same operator."""
    return called_as(OP_GEMMA, norms.npu_gemma_rms_norm, x, gamma, epsilon)


def npu_rms_norm_dynamic_quant(
    x: torch.Tensor,
    gamma: torch.Tensor,
    smooth_scale: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalises over the last axis and quantises every row with a scale of its own.

    Args:
        x: float16 or bfloat16.
        gamma: Shape: [last axis of ``x``]; dtype of ``x``.
        smooth_scale: factor of the normalised row before it is quantised, or None. Shape and dtype of ``gamma``.
        beta: added before that, or None. Shape and dtype of ``gamma``.
        epsilon: added to the mean square.

    Returns:
        int8 of the shape of ``x``, and the scales (float32, without the last axis): largest magnitude / 127.

    Raises:
        OpRefused: a constraint of its host code is broken.

    Source:
        vllm-ascend v0.23.0, csrc/attention/rms_norm_dynamic_quant.
    """
    if x.dtype not in (torch.float16, torch.bfloat16) or x.numel() == 0 or x.dim() == 0:
        refuse(OP_QUANT, "quant-norm-x", "x", f"{x.dtype}, shape {tuple(x.shape)}")
    for name, tensor in (("gamma", gamma), ("smooth_scale", smooth_scale), ("beta", beta)):
        if tensor is not None and (tensor.dtype != x.dtype or tuple(tensor.shape) != (x.size(-1),)):
            refuse(OP_QUANT, "quant-norm-gamma", name, f"{tensor.dtype}, shape {tuple(tensor.shape)}")
    if epsilon <= 0:
        refuse(OP_QUANT, "quant-norm-epsilon", "epsilon", epsilon)
    wide = x.float()
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * gamma.float()
    out = out if beta is None else out + beta.float()
    return quantise_rows(out if smooth_scale is None else out * smooth_scale.float())


_METAS: tuple[Callable[..., Any], ...] = (
    lambda x1, x2, gamma, *rest: (torch.empty_like(x1), _lines(x1, gamma), torch.empty_like(x1)),
    lambda x, gamma, *rest: (torch.empty_like(x), _lines(x, gamma)),
    lambda x, *rest: (torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[:-1], dtype=torch.float32)),
)
for _schema, _meta in zip(SCHEMAS, _METAS, strict=True):
    define(_schema, "_C_ascend", _meta)
KERNELS = {
    OP_BIAS: npu_add_rms_norm_bias,
    OP_GEMMA: npu_gemma_rms_norm,
    OP_QUANT: npu_rms_norm_dynamic_quant,
}
