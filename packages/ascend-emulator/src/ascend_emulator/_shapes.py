"""Shapes of results without computing them: the meta kernel, else a run on copies; it writes no npu memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._alias import alias

__all__ = ["infer"]

META = torch.device("meta")
# Their meta kernels give some results another shape or dtype than the CPU's kernels.
_MISLEADING = frozenset(
    {
        "aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_embedding_bag_forward_only",
        "aten::native_layer_norm",
    }
)  # fmt: skip


def _map(call: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_map(call, item) for item in value]
    return call(value)


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, torch.device):
        return META
    return None if isinstance(value, torch.Generator) else value


def _to_zeros(value: Any) -> Any:
    return torch.zeros_like(value, device="cpu") if isinstance(value, torch.Tensor) else _to_scratch(value)


def _to_scratch(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (alias(value) if value.device.type == "npu" else value).clone()
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value


def infer(
    name: str, operator: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """What the operator would return, as tensors without meaning, and the arguments that stood for its own.

    Args:
        name: the operator's qualified name.
        operator: the overload, whose meta kernel is asked first.
        call: the CPU kernel, run on copies when there is no meta kernel.
        args: the operator's positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The result (meta or CPU tensors; only shape, strides and dtype count) and the (args, kwargs) given to the
        kernel, of which out= tensors may have been resized.
    """
    with torch._C._DisableTorchDispatch():
        if name in _MISLEADING:
            zeros = _map(_to_zeros, args), {key: _map(_to_zeros, value) for key, value in kwargs.items()}
            return call(*zeros[0], **zeros[1]), zeros
        try:
            stand_in = _map(_to_meta, args), {key: _map(_to_meta, value) for key, value in kwargs.items()}
            stand_in[1].pop("generator", None)
            return operator(*stand_in[0], **stand_in[1]), stand_in
        except NotImplementedError:
            scratch = _map(_to_scratch, args), {key: _map(_to_scratch, value) for key, value in kwargs.items()}
            return call(*scratch[0], **scratch[1]), scratch
