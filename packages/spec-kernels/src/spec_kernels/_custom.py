"""Owns how ops that write into given outputs become custom operators, so that capture and `torch.compile` see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

__all__ = ["filling_op"]

Function = TypeVar("Function", bound=Callable[..., None])


def filling_op(name: str, *outputs: str) -> Callable[[Function], Function]:
    """Register a function without a result as `spec_kernels::<name>`; it mutates the named arguments and no others."""

    def decorate(function: Function) -> Function:
        op = torch.library.custom_op(f"spec_kernels::{name}", mutates_args=outputs)(function)

        @op.register_fake
        def _fake(*args: Any, **kwargs: Any) -> None:
            return None

        return cast(Function, op)

    return decorate
