"""Defining ops that a library on the device brings and torch_npu does not have.

This module owns the library objects; each op's module owns its schema.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARIES: dict[str, torch.library.Library] = {}


def define(schema: str, namespace: str = "npu", meta: Callable[..., Any] | None = None) -> None:
    """Define an op, unless a library has done so.

    Args:
        schema: name, arguments and results, such as "op(Tensor x) -> Tensor".
        namespace: npu for sgl_kernel_npu's ops, _C_ascend for those of vLLM-Ascend's extension.
        meta: its results as meta tensors, where the library brings such a kernel.
    """
    name = schema.partition("(")[0]
    if hasattr(getattr(torch.ops, namespace), name):
        return
    if namespace not in _LIBRARIES:
        _LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    _LIBRARIES[namespace].define(schema)  # type: ignore[no-untyped-call]
    if meta is not None:
        _LIBRARIES[namespace].impl(name, meta, "Meta")  # type: ignore[no-untyped-call]
