"""npu_rotary_mul: rotary position embedding of one tensor.

This module owns the op in both modes and with a rotate matrix, computed in float32 and rounded once.
"""

from __future__ import annotations

import torch

from .rules import declare, document, note, refuse

OP = "npu::npu_rotary_mul"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_AXES = {"BNSD": (0, 1), "BSND": (0, 2), "SBND": (1, 2)}
"""Where B and N are; the remaining axis of the first three is S."""
_HALF = {
    "BNSD": ((False, False, True), (True, False, True), (True, True, True)),
    "BSND": ((False, True, False), (True, True, False), (True, True, True)),
    "SBND": ((True, False, False), (True, True, False), (True, True, True)),
}
"""Which of the first three axes r1 and r2 have at full length, by layout."""

declare(
    "npu_rotary_mul",
    document("npu_rotary_mul"),
    "test_kernels_other_refusals.py",
    {
        "rotary-dtype": ("float16, bfloat16, float32", "cast it"),
        "rotary-rank": ("input, r1, r2 of rank 4", "reshape to BNSD, BSND or SBND"),
        "rotary-mode": ("half or interleave", "pass 'half'"),
        "rotary-dim": ("an even head dim below 896", "use a smaller head dim"),
        "rotary-shape": (
            "r1 and r2 of one shape: half: 11SD, B1SD, BNSD for BNSD; 1S1D, BS1D, BSND for BSND; S11D, SB1D, SBND "
            "for SBND, with B and N below 1000; interleave: 11SD, 1S1D, S11D, with B * N below 1000",
            "expand or reshape r1 and r2",
        ),
        "rotary-rotate": ("a rotate matrix of shape (D, D)", "pass a square matrix"),
    },
)
note("npu_rotary_mul", "r1, r2 within [-1, 1]", "its document", "values are not looked at")
note(
    "npu_rotary_mul",
    "jit_compile=True: D = 128, half mode, B, N at most 1000; B * N at most 1024 for gradients of r1, r2",
    "its document",
    "the emulator stands for jit_compile=False and computes no gradients",
)


def _shape_fits(shape: torch.Size, factor: torch.Size, mode: str) -> bool:
    if factor[3] != shape[3]:
        return False
    for layout, patterns in _HALF.items():
        b, n = (shape[axis] for axis in _AXES[layout])
        if (b >= 1000 or n >= 1000) if mode == "half" else b * n >= 1000:
            continue
        for pattern in patterns if mode == "half" else patterns[:1]:
            wanted = [size if full else 1 for size, full in zip(shape, pattern, strict=False)]
            if list(factor[:3]) == wanted:
                return True
    return False


def npu_rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes ``r1 * x + r2 * turn(x)``.

    Args:
        input: Shape: BNSD, BSND or SBND; float16, bfloat16 or float32; D even and below 896.
        r1: cosines, broadcast over the axes where they have size 1.
        r2: sines, shaped as ``r1``.
        rotary_mode: half: turn(x) = (-x2, x1) of the two halves; interleave: the same of even and odd elements.
        rotate: None, or a matrix [D, D]; then turn(x) = x @ rotate.

    Returns:
        Shape and dtype of the input.

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        Document of torch_npu.npu_rotary_mul in the torch_npu 2.12.0 wheel (jit_compile=False).
    """
    for name, tensor in (("input", input), ("r1", r1), ("r2", r2), ("rotate", rotate)):
        if tensor is not None and tensor.dtype not in _DTYPES:
            refuse(OP, "rotary-dtype", name, tensor.dtype)
        if tensor is not None and name != "rotate" and tensor.dim() != 4:
            refuse(OP, "rotary-rank", name, f"shape {tuple(tensor.shape)}")
    if rotary_mode not in ("half", "interleave"):
        refuse(OP, "rotary-mode", "rotary_mode", repr(rotary_mode))
    dim = input.size(-1)
    if dim % 2 or dim >= 896:
        refuse(OP, "rotary-dim", "input", f"D = {dim}")
    if r2.shape != r1.shape or not _shape_fits(input.shape, r1.shape, rotary_mode):
        given = f"{tuple(r1.shape)}, r2 {tuple(r2.shape)} for an input of {tuple(input.shape)}"
        refuse(OP, "rotary-shape", "r1", given)
    if rotate is not None and tuple(rotate.shape) != (dim, dim):
        refuse(OP, "rotary-rotate", "rotate", f"shape {tuple(rotate.shape)} for D = {dim}")
    x = input.float()
    if rotate is not None:
        turned = x @ rotate.float()
    elif rotary_mode == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return (r1.float() * x + r2.float() * turned).to(input.dtype)


KERNELS = {OP: npu_rotary_mul}
