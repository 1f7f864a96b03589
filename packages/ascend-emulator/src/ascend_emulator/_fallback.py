"""Registers the npu kernels: every aten operator that torch_npu has runs its CPU kernel, NPU operators come by
`register`.

It owns the list of what is registered, not the wrapper (`_operators.py`), the copies or the factories.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._composites import lstm_cell, matmul_backward, scaled_dot_product_attention
from ._copies import copy_, copy_from, copy_from_and_resize, local_scalar_dense
from ._factories import FACTORIES
from ._native import Compiled
from ._operators import npu_kernel
from ._schema import Plan, find_operator, plan_of
from ._unemulated import name_unemulated
from .errors import KernelNotFoundError

__all__ = ["register", "register_aten"]

# What torch_npu does right by itself: views, storages, sizes, streams of tensors, pinning.
_KEEP = frozenset(
    {
        "view", "as_strided", "set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor",
        "_pin_memory", "is_pinned", "_reshape_alias", "detach", "alias", "_to_copy", "_to_sparse",
        "_to_sparse.sparse_dim", "_pack_padded_sequence",
    }
)  # fmt: skip
# What has a function of its own.
_OWN: dict[str, Callable[..., Any]] = {
    "copy_": copy_,
    "_copy_from": copy_from,
    "_copy_from_and_resize": copy_from_and_resize,
    "_local_scalar_dense": local_scalar_dense,
    "_fused_sdp_choice": lambda *args, **kwargs: 0,  # the composite one
    **FACTORIES,
}
# Those of them that `native/fallback.cpp` knows by name.
_OWN_COMPILED = (
    "copy_", "_local_scalar_dense", "empty.memory_format", "empty_strided", "empty_like", "zeros", "ones", "full",
)  # fmt: skip
# What torch differentiates or writes with other operators, and torch_npu runs as device kernels of its own.
_AS_TORCH = (
    "binary_cross_entropy_with_logits", "fft_fftshift", "fft_ifftshift", "fill_diagonal_", "gru.input", "kl_div",
    "l1_loss", "lstm.input", "lstm_cell", "max.out", "min.out", "nanmean.out", "one_hot", "renorm",
    "repeat_interleave.self_int", "repeat_interleave.self_Tensor", "slogdet", "stft",
)  # fmt: skip
# The same, written here; their gradients are those of the operators inside.
_DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "_thnn_fused_lstm_cell": lstm_cell,
}
_NPU = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
_SHAPE_ONLY = ("_get_max_workspace", "_infer_output", "_get_workspace")
_kernels: dict[str, Callable[..., Any]] = {}
_libraries: dict[str, torch.library.Library] = {}


def _library(namespace: str) -> torch.library.Library:
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    return _libraries[namespace]


def _implement(name: str, call: Callable[..., Any], key: str = "PrivateUse1") -> None:
    namespace, _, rest = name.partition("::")
    _library(namespace).impl(rest, call, key, allow_override=True)  # type: ignore[no-untyped-call]


def register(name: str, call: Callable[..., Any]) -> None:
    """Make `call`, a function of CPU tensors, the npu kernel of an existing operator.

    Raises:
        KernelNotFoundError: the operator does not exist.
    """
    try:
        operator = find_operator(name)
    except (AttributeError, RuntimeError) as error:
        raise KernelNotFoundError(name, "torch has no such operator; define it first with torch.library") from error
    shape_only = any(word in name for word in _SHAPE_ONLY)
    _kernels[name] = call
    plan = plan_of(name, operator)
    _implement(
        name, npu_kernel(plan, operator, call, shape_only=shape_only, check=None if shape_only else _check(name))
    )


def _check(name: str) -> Callable[[Any, dict[str, Any]], None]:
    """What an operator refuses when it is issued: its workspace function says, when that has a kernel."""
    namespace, _, rest = name.partition("::")
    workspace = f"{namespace}::_{rest.partition('.')[0]}_get_max_workspace"

    def check(args: Any, kwargs: dict[str, Any]) -> None:
        function = _kernels.get(workspace)
        if function is not None:
            function(*args, **{key: value for key, value in kwargs.items() if key not in ("workspace", "out")})

    return check


def register_aten(compiled: Compiled | None) -> int:
    """Register all aten operators that torch_npu has at its key; how many.

    Args:
        compiled: stands in front of the Python kernels when it is there.
    """
    if compiled is not None:
        compiled.take_originals()
        name_unemulated(compiled)  # first: kernels take their place
    plans = _general()
    for plan, operator in plans:
        _implement(plan.name, npu_kernel(plan, operator))
    for name, kernel in _OWN.items():
        _implement(f"aten::{name}", kernel)
    for name in _AS_TORCH:
        _implement(f"aten::{name}", _as_torch(f"aten::{name}"), "AutogradPrivateUse1")
    for name, kernel in _DIFFERENTIABLE.items():
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            _implement(f"aten::{name}", kernel, key)
    register("aten::matmul_backward", matmul_backward)
    if compiled is not None:
        for plan, _ in plans:
            compiled.put_in_front(plan)
        for name in _OWN_COMPILED:
            compiled.put_in_front(plan_of(f"aten::{name}", find_operator(f"aten::{name}")))
    return len(plans)


def _as_torch(name: str) -> Callable[..., Any]:
    """What torch does with the operator under autograd: its own derivative, or a form with other operators."""
    kernel = torch.library.get_kernel(name, "AutogradCPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradPrivateUse1) | _NPU
    return lambda *args, **kwargs: kernel.call_boxed(keys, *args, **kwargs)


def _general() -> list[tuple[Plan, Any]]:
    """The operators that run the CPU's kernel on the same bytes."""
    plans = []
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        if not name.startswith("aten::") or name[6:] in {*_KEEP, *_OWN}:
            continue
        try:
            operator = find_operator(name)
        except AttributeError:
            continue
        if any(a.alias_info is not None and not a.alias_info.is_write for a in operator._schema.arguments):
            continue  # a view: torch_npu's own
        if torch.Tag.inplace_view in operator.tags:
            continue  # changes the tensor, not its bytes
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU"):
            continue  # torch_npu's own; it fails and names the operator
        plans.append((plan_of(name, operator), operator))
    return plans
