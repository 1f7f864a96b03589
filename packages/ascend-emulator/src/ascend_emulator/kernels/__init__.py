"""CPU kernels of NPU operators, and the list of them by op name.

Each kernel takes and returns CPU tensors with the parameters of torch_npu's schema, refuses what the op's document
refuses, and faults where a device would. This package imports torch alone; registering the kernels with torch_npu is
the runtime's work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import (
    activation,
    atb_attention,
    atb_latent,
    attention_update,
    casts,
    fia_v1,
    fia_v2,
    gather_pa,
    norms,
    reshape_and_cache,
    rotary,
    scatter,
    scatter_pa,
    transfer,
)
from .errors import DeviceFault, KernelError, KernelNotCovered, OpRefused, Rule
from .rules import NOTES, RULES, Note

_MODULES: tuple[Any, ...] = (
    *(fia_v1, fia_v2, atb_attention, atb_latent, attention_update),
    *(scatter, scatter_pa, gather_pa, reshape_and_cache, transfer),
    *(norms, rotary, activation, casts),
)
REGISTRY: dict[str, Callable[..., Any]] = {
    name: kernel for module in _MODULES for name, kernel in module.KERNELS.items()
}
"""Kernel of each op, by full name and overload as torch.ops spells them."""

__all__ = [
    "NOTES",
    "REGISTRY",
    "RULES",
    "DeviceFault",
    "KernelError",
    "KernelNotCovered",
    "Note",
    "OpRefused",
    "Rule",
]
