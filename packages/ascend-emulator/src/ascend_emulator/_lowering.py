"""Turns an npu operator's arguments into what the CPU kernel takes, and its results into what the operator returns.

It owns the mapping of arguments and results; when the kernel runs is decided by `_operators.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_npu

from ._alias import CPU, alias, private_alias
from ._schema import Plan
from .errors import CaptureError, WrongDeviceError

__all__ = ["Lowered", "bring_home", "call_resizing", "lower", "new_tensors", "resize_out", "results", "snapshots"]

_Tensor = torch.Tensor


class Lowered:
    """Arguments of one call as the CPU kernel takes them; `elsewhere`: the results belong on the host."""

    __slots__ = ("args", "device", "elsewhere", "kwargs", "mixed")

    def __init__(self) -> None:
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        self.device: torch.device | None = None
        self.elsewhere = False
        self.mixed = False


def _mismatch(plan: Plan, first: torch.device, second: Any) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}! "
        f"(when calling {plan.name})"
    )


def _check_devices(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for a tensor whose address the device kernel could not use."""
    home: torch.device | None = None
    elsewhere: list[tuple[str, torch.Tensor]] = []
    for argument in plan.arguments:
        given = plan.value(argument.name, args, kwargs)
        for x in given if isinstance(given, (list, tuple)) else (given,):
            if not isinstance(x, _Tensor) or x.is_meta:
                continue
            if not x.is_cpu and home is None:
                home = x.device
            if x.device != home:
                elsewhere.append((argument.name, x))
    if home is not None and elsewhere:
        name, tensor = elsewhere[0]
        raise WrongDeviceError(plan.name, name, tensor, home)


def _lower_list(out: Lowered, plan: Plan, values: Any, written: bool) -> list[Any]:
    return [_lower_tensor(out, plan, x, written) if isinstance(x, _Tensor) else x for x in values]


def _lower_tensor(out: Lowered, plan: Plan, x: torch.Tensor, written: bool) -> torch.Tensor:
    if x.is_cpu:
        if x.dim():
            out.mixed = True
        return x
    device = x.device
    if device.type != "npu":
        return x
    if out.device is None:
        out.device = device
    elif plan.strict and device != out.device and x.dim():
        raise _mismatch(plan, out.device, device)
    return private_alias(x) if written and plan.resizes else alias(x)


def _lower_device(out: Lowered, x: torch.device) -> torch.device:
    if x.type != "npu":
        out.elsewhere = True
        return x
    if out.device is None:
        out.device = x if x.index is not None else torch.device("npu", torch_npu.npu.current_device())
    return CPU


def _lower_value(out: Lowered, plan: Plan, kind: str, written: bool, x: Any) -> Any:
    if isinstance(x, _Tensor):
        return _lower_tensor(out, plan, x, written)
    if kind == "tensors":
        return _lower_list(out, plan, x, written)
    return _lower_device(out, x) if kind == "device" else x


def lower(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lowered:
    """Replace npu tensors by aliases and npu devices by the CPU.

    Raises:
        RuntimeError: tensors on several devices, with torch's own text.
        WrongDeviceError: the same of an NPU operator, with torch_npu's.
    """
    if plan.on_device:
        _check_devices(plan, args, kwargs)
    out = Lowered()
    lowered = out.args = list(args)
    count = len(lowered)
    for at, kind, written in plan.positional:
        if at >= count:
            break
        x = lowered[at]
        if x is not None:
            lowered[at] = _lower_value(out, plan, kind, written, x)
    if kwargs:
        keywords = plan.keywords
        for name, x in kwargs.items():
            if x is not None and name in keywords:
                kind, written = keywords[name]
                x = _lower_value(out, plan, kind, written, x)
            out.kwargs[name] = x
        if "pin_memory" in out.kwargs:
            out.kwargs["pin_memory"] = False
    if out.mixed and plan.strict and out.device is not None:
        raise _mismatch(plan, out.device, "cpu")
    return out


def _argument(at: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[at.position] if not at.keyword_only and at.position < len(args) else kwargs.get(at.name)


def call_resizing(plan: Plan, call: Callable[..., Any], lowered: Lowered) -> Any:
    """Call an out= kernel; when an output has another size, the kernel gets host tensors that it can resize."""
    try:
        return call(*lowered.args, **lowered.kwargs)
    except RuntimeError as error:
        if "not resizable" not in str(error):
            raise
    for argument in plan.written:
        given = lowered.kwargs.get(argument.name)
        if isinstance(given, _Tensor):
            lowered.kwargs[argument.name] = torch.empty(0, dtype=given.dtype)
        elif given is not None:
            lowered.kwargs[argument.name] = [torch.empty(0, dtype=x.dtype) for x in given]
    return call(*lowered.args, **lowered.kwargs)


def bring_home(plan: Plan, args: Any, kwargs: dict[str, Any], lowered: Lowered) -> None:
    """An out= kernel may have resized (so re-allocated) its alias: resize the npu tensor and copy the result."""
    for argument in plan.written:
        own, other = _argument(argument, args, kwargs), _argument(argument, lowered.args, lowered.kwargs)
        pairs = zip(own, other, strict=True) if argument.kind == "tensors" else ((own, other),)
        for target, source in pairs:
            if isinstance(target, _Tensor) and not target.is_cpu and target.shape != source.shape:
                result = source.clone()  # its bytes may be the target's own
                _reshape(target, result)
                alias(target).copy_(result)


def resize_out(plan: Plan, args: Any, kwargs: dict[str, Any], stand_in: Any, *, capturing: bool) -> None:
    """Before queued work: give out= tensors the shape that the kernel will produce."""
    for argument in plan.written:
        own, other = _argument(argument, args, kwargs), _argument(argument, *stand_in)
        pairs = zip(own, other, strict=True) if argument.kind == "tensors" else ((own, other),)
        for target, wanted in pairs:
            if isinstance(target, _Tensor) and not target.is_cpu and target.shape != wanted.shape:
                if capturing and target.numel():
                    raise CaptureError(plan.name, f"resizes its output {tuple(target.shape)} to {tuple(wanted.shape)}")
                _reshape(target, wanted)


def _reshape(target: torch.Tensor, like: torch.Tensor) -> None:
    """Give an out= tensor another shape, with the strides that the kernel chose."""
    target.resize_(like.shape)
    target.as_strided_(like.shape, like.stride())


def results(
    plan: Plan, args: Any, kwargs: dict[str, Any], out: Any, lift: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    """What the npu operator returns: its own written arguments, and lifted copies of new tensors."""
    returns = plan.returns
    if not returns:
        return None
    parts = out if len(returns) > 1 else (out,)
    results = []
    for at, part in zip(returns, parts, strict=True):
        if at is not None:
            results.append(_argument(plan.written[at], args, kwargs))
        elif isinstance(part, _Tensor):
            results.append(lift(part))
        elif isinstance(part, (list, tuple)):
            results.append([lift(x) if isinstance(x, _Tensor) else x for x in part])
        else:
            results.append(part)
    return tuple(results) if len(returns) > 1 else results[0]


def new_tensors(plan: Plan, out: Any) -> list[torch.Tensor]:
    parts = out if len(plan.returns) > 1 else (out,)
    new: list[torch.Tensor] = []
    for at, part in zip(plan.returns, parts, strict=True):
        if at is None:
            new.extend([x for x in part if isinstance(x, _Tensor)] if isinstance(part, (list, tuple)) else [part])
    return [x for x in new if isinstance(x, _Tensor)]


def _snapshot(own: Any, lowered: Any) -> Any:
    """Host data of queued or captured work is taken by value: host tensors and lists are copied, aliases are not."""
    if isinstance(own, _Tensor):
        return lowered.clone() if own.is_cpu else lowered
    if isinstance(own, (list, tuple)):
        return [_snapshot(x, y) for x, y in zip(own, lowered, strict=True)]
    return lowered


def snapshots(args: Any, kwargs: dict[str, Any], lowered: Lowered) -> tuple[list[Any], dict[str, Any]]:
    taken = [_snapshot(own, x) for own, x in zip(args, lowered.args, strict=True)]
    return taken, {name: _snapshot(kwargs.get(name), x) for name, x in lowered.kwargs.items()}
