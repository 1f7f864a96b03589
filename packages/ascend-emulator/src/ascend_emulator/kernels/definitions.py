"""Defining ops that a library on the device brings and torch_npu does not have.

This module owns the library object; each op's module owns its schema.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("npu", "FRAGMENT")  # type: ignore[no-untyped-call]


def define(schema: str) -> None:
    """Define an op of namespace npu, unless a library has done so.

    Args:
        schema: name, arguments and results, such as "op(Tensor x) -> Tensor".
    """
    name = schema.partition("(")[0]
    if not hasattr(torch.ops.npu, name):
        _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
