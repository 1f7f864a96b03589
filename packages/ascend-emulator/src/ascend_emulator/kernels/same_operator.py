"""Ops that two libraries bring under two names: one computation, and errors that name the op that was called.

vLLM-Ascend's extension has builds of its own of operators that CANN has as well; their names behind the op (aclnn…) are
the same. This module owns the renaming of errors alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .errors import DeviceFault, KernelNotCovered, OpRefused

_P = ParamSpec("_P")
_R = TypeVar("_R")


def called_as(op: str, kernel: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Runs another op's kernel for ``op``.

    Args:
        op: full name of the op that was called.
        kernel: the kernel of the other op.
        *args: its arguments.
        **kwargs: its arguments.

    Returns:
        What the kernel returns.

    Raises:
        OpRefused, DeviceFault, KernelNotCovered: as the kernel raises them, with the name of ``op``.
    """
    try:
        return kernel(*args, **kwargs)
    except OpRefused as error:
        raise OpRefused(op, error.argument, error.value, error.rule) from None
    except KernelNotCovered as error:
        raise KernelNotCovered(op, error.argument, error.value) from None
    except DeviceFault as error:
        raise DeviceFault(op, error.detail, layer=error.layer, page=error.page, slot=error.slot) from None
