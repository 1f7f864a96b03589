"""Names operators without a kernel: what torch_npu says of a missing device kernel becomes an error that tells how to
register one. It owns which operators these are and the error; `native/unemulated.h` notices the failed launch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ._native import Compiled
from ._schema import find_operator
from .errors import OperatorNotEmulatedError

__all__ = ["name_unemulated", "unemulated"]

_RAISER = "not_emulated"  # as unemulated.h calls it
_libraries: list[torch.library.Library] = []


def unemulated() -> Iterator[str]:
    """The operators with a kernel of torch_npu's own and none of the CPU's."""
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        namespace = name.partition("::")[0]
        if namespace not in ("npu", "atb", "aten"):
            continue
        try:
            find_operator(name)
        except AttributeError:  # torch_npu registers some names without a schema
            continue
        if namespace != "aten" or not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU"):
            yield name


def name_unemulated(compiled: Compiled) -> None:
    """Make every operator without a kernel raise the named error; kernels that are registered later replace this.

    It needs the compiled library: torch_npu's launches let go of the interpreter's lock and do not take it again when
    they fail, so they cannot be called from a Python kernel. Without it, the error is torch_npu's own.
    """
    library = torch.library.Library("ascend_emulator", "DEF")  # type: ignore[no-untyped-call]
    library.define(f"{_RAISER}(str name, str device_kernel) -> ()")  # type: ignore[no-untyped-call]
    library.impl(_RAISER, _raise, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    for name in unemulated():
        compiled.name_missing(name)


def _raise(name: str, device_kernel: str) -> None:
    raise OperatorNotEmulatedError(name, str(find_operator(name)._schema), device_kernel)
