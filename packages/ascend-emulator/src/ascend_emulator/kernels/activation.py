"""npu_swiglu, npu_geglu and npu_fast_gelu.

This module owns the activations without quantisation: in float32, rounded once.
"""

from __future__ import annotations

import torch

from .rules import declare, document, refuse

OP = "npu::npu_swiglu"
OP_GEGLU = "npu::npu_geglu"
OP_GELU = "npu::npu_fast_gelu"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

declare(
    "npu_swiglu",
    document("npu_swiglu"),
    "test_kernels_other_refusals.py",
    {
        "swiglu-dtype": ("float16, bfloat16, float32", "cast the input"),
        "swiglu-rank": ("an input of 1 to 8 axes", "reshape the input"),
        "swiglu-even": ("an existing axis of even length to split", "split along another axis"),
    },
)
declare(
    "npu_geglu",
    "ops-nn e5c3fa9, activation/ge_glu_v2/docs/aclnnGeGluV3.md",
    "test_kernels_elementwise.py",
    {
        "geglu-dtype": ("float16, bfloat16, float32", "cast the input"),
        "geglu-rank": ("an input of at most 8 axes", "reshape the input"),
        "geglu-even": ("an existing axis of even length to split", "split along another axis"),
        "geglu-approximate": ("approximate 0 (erf) or 1 (tanh)", "pass 0 or 1"),
    },
)
declare(
    "npu_fast_gelu",
    document("npu_fast_gelu"),
    "test_kernels_other_refusals.py",
    {
        "gelu-dtype": ("float16, bfloat16, float32", "cast the input"),
        "gelu-rank": ("an input of at most 8 axes", "reshape the input"),
    },
)


def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Splits a tensor in two along an axis and returns ``a * sigmoid(a) * b``.

    Args:
        input: 1 to 8 axes; float16, bfloat16 or float32.
        dim: axis to split; of even length.

    Returns:
        Half of the input's length along ``dim``; dtype of the input.

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        Document of torch_npu.npu_swiglu in the torch_npu 2.12.0 wheel.
    """
    if input.dtype not in _DTYPES:
        refuse(OP, "swiglu-dtype", "input", input.dtype)
    if not 1 <= input.dim() <= 8:
        refuse(OP, "swiglu-rank", "input", f"{input.dim()} axes")
    if not -input.dim() <= dim < input.dim() or input.size(dim) % 2:
        refuse(OP, "swiglu-even", "dim", f"{dim} of shape {tuple(input.shape)}")
    first, second = input.float().chunk(2, dim)
    return (torch.nn.functional.silu(first) * second).to(input.dtype)


def npu_geglu(
    input: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits a tensor in two along an axis and multiplies one half by the GELU of the other.

    Args:
        input: 1 to 8 axes; float16, bfloat16 or float32.
        dim: axis to split; of even length.
        approximate: 0 for the error function, 1 for its tanh form.
        activate_left: whether the first half goes through the GELU; else the second.

    Returns:
        The product and the GELU. Half of the input's length along ``dim``; dtype of the input.

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        ops-nn, aclnnGeGluV3.md.
    """
    if input.dtype not in _DTYPES:
        refuse(OP_GEGLU, "geglu-dtype", "input", input.dtype)
    if input.dim() > 8:
        refuse(OP_GEGLU, "geglu-rank", "input", f"{input.dim()} axes")
    if not -input.dim() <= dim < input.dim() or input.size(dim) % 2:
        refuse(OP_GEGLU, "geglu-even", "dim", f"{dim} of shape {tuple(input.shape)}")
    if approximate not in (0, 1):
        refuse(OP_GEGLU, "geglu-approximate", "approximate", approximate)
    first, second = input.float().chunk(2, dim)
    gate, other = (first, second) if activate_left else (second, first)
    gate = torch.nn.functional.gelu(gate, approximate="tanh" if approximate else "none")
    return (gate * other).to(input.dtype), gate.to(input.dtype)


def npu_fast_gelu(input: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(1.702 * x)``, the form that A2 and A3 have.

    Args:
        input: at most 8 axes; float16, bfloat16 or float32.

    Returns:
        Shape and dtype of the input.

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        Document of torch_npu.npu_fast_gelu in the torch_npu 2.12.0 wheel.
    """
    if input.dtype not in _DTYPES:
        refuse(OP_GELU, "gelu-dtype", "input", input.dtype)
    if input.dim() > 8:
        refuse(OP_GELU, "gelu-rank", "input", f"{input.dim()} axes")
    x = input.float()
    return (x * (1.702 * x).sigmoid()).to(input.dtype)


KERNELS = {OP: npu_swiglu, OP_GEGLU: npu_geglu, OP_GELU: npu_fast_gelu}
