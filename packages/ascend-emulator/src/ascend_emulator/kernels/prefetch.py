"""npu_prefetch: loading weights into a cache that the emulator does not have.

This module owns the op's refusals; there is nothing to compute.
"""

from __future__ import annotations

import torch

from .rules import declare, online, refuse

OP = "npu::npu_prefetch"

declare(
    "npu_prefetch",
    online("torch_npu-npu_prefetch"),
    "test_kernels_elementwise.py",
    {
        "prefetch-size": ("a max_size above 0 (more than the weight is cut)", "pass the bytes to load"),
        "prefetch-offset": ("an offset of 0 or more, within the weight", "pass a byte of the weight"),
    },
)


def npu_prefetch(input: torch.Tensor, dependency: torch.Tensor | None, max_size: int, offset: int = 0) -> None:
    """Does nothing: no time is emulated.

    Args:
        input: the weight.
        dependency: what the load waits for.
        max_size: bytes.
        offset: first byte.

    Raises:
        OpRefused: a documented constraint is broken.

    Source:
        op-plugin, torch_npu-npu_prefetch.md.
    """
    if max_size <= 0:
        refuse(OP, "prefetch-size", "max_size", max_size)
    if not 0 <= offset <= input.numel() * input.element_size():
        refuse(OP, "prefetch-offset", "offset", f"{offset} of {input.numel() * input.element_size()} bytes")


KERNELS = {OP: npu_prefetch}
