"""Wraps a CPU kernel as an npu kernel: aliases in, device tensors out, now, later or captured. It owns no kernel
itself.

This is the Python fallback; a boxed C++ kernel with the same contract can take `npu_kernel`'s place per operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_npu

from . import order, poison
from ._alias import CPU, alias, private_alias
from ._graphs import OperatorNode, Record, graphs, local
from ._queue import StreamQueue, Work, scheduler
from ._random import generator_for, with_default_generator
from ._schema import Plan, plan_of
from ._shapes import infer
from .errors import CaptureError

__all__ = ["allocate", "capturing_graph", "current_queue", "npu_kernel"]

_raw_stream = torch_npu._C._npu_getCurrentRawStream
_Tensor = torch.Tensor

_empty_strided = torch.library.get_kernel("aten::empty_strided", "PrivateUse1")
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)


def allocate(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A device tensor straight from torch_npu's allocator, without poison: the caller writes all of it."""
    tensor: torch.Tensor = _empty_strided.call_boxed(
        _KEYS, shape, stride, dtype=dtype, layout=torch.strided, device=device, pin_memory=None
    )
    return tensor


def current_queue(device_index: int) -> StreamQueue:
    """Queue of the device's current stream in this thread."""
    return scheduler.queue(_raw_stream(device_index))


def capturing_graph(queue: StreamQueue) -> Any:
    """The graph that the stream is being captured into, or None."""
    model = queue.state.model
    return graphs.get(model) if model else None


class _Lowered:
    """Arguments of one call as the CPU kernel takes them."""

    __slots__ = ("args", "device", "kwargs", "mixed")

    def __init__(self) -> None:
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        self.device: torch.device | None = None
        self.mixed = False


def _mismatch(plan: Plan, first: torch.device, second: Any) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}! "
        f"(when calling {plan.name})"
    )


def _lower(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Lowered:
    out = _Lowered()
    strict = plan.strict
    make = private_alias if plan.resizes else alias

    def tensor(x: torch.Tensor, written: bool) -> torch.Tensor:
        if x.is_cpu:
            if x.dim():
                out.mixed = True
            return x
        device = x.device
        if device.type != "npu":
            return x
        if out.device is None:
            out.device = device
        elif strict and device != out.device and x.dim():
            raise _mismatch(plan, out.device, device)
        return make(x) if written else alias(x)

    def value(argument: Any, x: Any) -> Any:
        kind = argument.kind
        if isinstance(x, _Tensor):
            return tensor(x, argument.written)
        if kind == "tensors":
            return [tensor(y, argument.written) if isinstance(y, _Tensor) else y for y in x]
        if kind == "device":
            if x.type != "npu":
                return x
            if out.device is None:
                out.device = x if x.index is not None else torch.device("npu", torch_npu.npu.current_device())
            return CPU
        return x

    lowered = list(args)
    count = len(lowered)
    for argument in plan.positional:
        at = argument.position
        if at >= count:
            break
        x = lowered[at]
        if x is not None:
            lowered[at] = value(argument, x)
    out.args = lowered
    if kwargs:
        keywords = plan.keywords
        out.kwargs = {
            name: value(keywords[name], x) if x is not None and name in keywords else x for name, x in kwargs.items()
        }
        if out.kwargs.get("pin_memory"):
            out.kwargs["pin_memory"] = False
    if strict and out.mixed and out.device is not None:
        raise _mismatch(plan, out.device, "cpu")
    return out


def _argument(at: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[at.position] if not at.keyword_only and at.position < len(args) else kwargs.get(at.name)


def _call_resizing(plan: Plan, call: Callable[..., Any], lowered: _Lowered) -> Any:
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


def _bring_home(plan: Plan, args: Any, kwargs: dict[str, Any], lowered: _Lowered) -> None:
    """An out= kernel may have resized (so re-allocated) its alias: resize the npu tensor and copy the result."""
    for argument in plan.written:
        own, other = _argument(argument, args, kwargs), _argument(argument, lowered.args, lowered.kwargs)
        pairs = zip(own, other, strict=True) if argument.kind == "tensors" else ((own, other),)
        for target, source in pairs:
            if isinstance(target, _Tensor) and not target.is_cpu and target.shape != source.shape:
                target.resize_(source.shape)
                alias(target).copy_(source)


def _resize_out(plan: Plan, args: Any, kwargs: dict[str, Any], stand_in: Any, *, capturing: bool) -> None:
    """Before queued work: give out= tensors the shape that the kernel will produce."""
    for argument in plan.written:
        own, other = _argument(argument, args, kwargs), _argument(argument, *stand_in)
        pairs = zip(own, other, strict=True) if argument.kind == "tensors" else ((own, other),)
        for target, wanted in pairs:
            if isinstance(target, _Tensor) and not target.is_cpu and target.shape != wanted.shape:
                if capturing and target.numel():
                    raise CaptureError(plan.name, f"resizes its output {tuple(target.shape)} to {tuple(wanted.shape)}")
                target.resize_(wanted.shape)


def _results(
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


def _new_tensors(plan: Plan, out: Any) -> list[torch.Tensor]:
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


def _snapshots(args: Any, kwargs: dict[str, Any], lowered: _Lowered) -> tuple[list[Any], dict[str, Any]]:
    taken = [_snapshot(own, x) for own, x in zip(args, lowered.args, strict=True)]
    return taken, {name: _snapshot(kwargs.get(name), x) for name, x in lowered.kwargs.items()}


def npu_kernel(
    name: str,
    operator: Any,
    call: Callable[..., Any] | None = None,
    *,
    shape_only: bool = False,
    check: Callable[[Any, dict[str, Any]], None] | None = None,
) -> Any:
    """The npu kernel of an operator.

    Args:
        name: qualified name, for messages.
        operator: the overload; its schema decides what is written and returned, its meta kernel the shapes.
        call: kernel on CPU tensors; None: the operator's own CPU kernel.
        shape_only: the results carry a shape and no data (workspace, output allocation), so nothing is queued or
            captured.
        check: called with the lowered arguments when the work is queued, captured or updated; raises what the device
            refuses at that moment, without looking at the tensors' contents.

    Returns:
        A function for `torch.library.Library.impl(..., "PrivateUse1")`.
    """
    plan = plan_of(name, operator)
    cpu: Callable[..., Any] = call or operator
    simple = not (plan.randomness or plan.needs_host or plan.is_index)

    def npu_device(lowered: _Lowered) -> torch.device:
        return lowered.device or torch.device("npu", torch_npu.npu.current_device())

    def run(*args: Any, **kwargs: Any) -> Any:
        if scheduler.slow:
            return slow(args, kwargs)
        lowered = _lower(plan, args, kwargs)
        return compute(args, kwargs, lowered)

    def compute(args: Any, kwargs: dict[str, Any], lowered: _Lowered) -> Any:
        device = lowered.device
        if device is None:
            device = npu_device(lowered)
        fn = cpu if simple else prepare(lowered, device, capturing=False)
        if plan.resizes:
            out = _call_resizing(plan, fn, lowered)
            _bring_home(plan, args, kwargs, lowered)
        else:
            out = fn(*lowered.args, **lowered.kwargs)

        def lift(x: torch.Tensor) -> torch.Tensor:
            tensor = allocate(x.shape, x.stride(), x.dtype, device)
            if x.numel():
                alias(tensor).copy_(x)
            return tensor

        return _results(plan, args, kwargs, out, lift)

    def prepare(lowered: _Lowered, device: torch.device, *, capturing: bool) -> Callable[..., Any]:
        """Put a CPU generator into the arguments; what has to be called."""
        if not plan.randomness:
            return cpu
        index = device.index or 0
        if plan.randomness == "default":
            return with_default_generator(cpu, generator_for(None, index, capturing=capturing))
        for argument in plan.arguments:
            if argument.kind != "generator":
                continue
            positional = not argument.keyword_only and argument.position < len(lowered.args)
            given = lowered.args[argument.position] if positional else lowered.kwargs.get(argument.name)
            generator = generator_for(given, index, capturing=capturing)
            if positional:
                lowered.args[argument.position] = generator
            else:
                lowered.kwargs[argument.name] = generator
        return cpu

    def needs_data(args: Any) -> bool:
        if plan.needs_host:
            return True
        return plan.is_index and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])

    def slow(args: Any, kwargs: dict[str, Any]) -> Any:
        record = local.updating
        if record is not None and not shape_only:
            return rewrite(record, args, kwargs)
        lowered = _lower(plan, args, kwargs)
        device = npu_device(lowered)
        queue = current_queue(device.index)
        graph = capturing_graph(queue)
        if order.observer is not None:
            order.observer(plan.name, queue.address, (args, kwargs))
        if graph is None:
            if not queue.items or scheduler.progress(queue) is None:
                return compute(args, kwargs, lowered)
            if needs_data(args):
                scheduler.wait_stream(queue)
                return compute(args, kwargs, lowered)
        elif needs_data(args):
            raise CaptureError(plan.name, "needs its data on the host")
        return later(args, kwargs, lowered, device, queue, graph)

    def later(
        args: Any, kwargs: dict[str, Any], lowered: _Lowered, device: torch.device, queue: StreamQueue, graph: Any
    ) -> Any:
        """Nothing is computed now: shapes from the meta kernel, and the work is captured or queued."""
        if shape_only:
            return compute(args, kwargs, lowered)
        if check is not None:
            check(lowered.args, lowered.kwargs)
        new_results = None in plan.returns
        targets: list[torch.Tensor] = []
        results: Any
        if new_results or plan.resizes or plan.name.startswith("aten::"):
            out, stand_in = infer(operator, cpu, args, kwargs)
            if plan.resizes:
                before = [_argument(a, args, kwargs) for a in plan.written]
                _resize_out(plan, args, kwargs, stand_in, capturing=graph is not None)
                if before:
                    lowered = _lower(plan, args, kwargs)

            def lift(x: torch.Tensor) -> torch.Tensor:
                tensor = allocate(x.shape, x.stride(), x.dtype, device)
                target = alias(tensor)
                if graph is not None:
                    storage = tensor.untyped_storage()
                    poison.fill(storage.data_ptr(), storage.nbytes(), tensor.dtype)
                targets.append(target)
                return tensor

            results = _results(plan, args, kwargs, out, lift)
        else:
            results = _results(plan, args, kwargs, (None,) * len(plan.returns), lambda x: x)
        fn = prepare(lowered, device, capturing=graph is not None)

        def execute(own_args: Any, own_kwargs: dict[str, Any]) -> None:
            produced = fn(*own_args, **own_kwargs)
            if not targets:
                return
            for target, source in zip(targets, _new_tensors(plan, produced), strict=True):
                if target.shape != source.shape:
                    raise RuntimeError(
                        f"{plan.name} produced shape {tuple(source.shape)}, its meta kernel said {tuple(target.shape)}"
                    )
                target.copy_(source)

        frozen_args, frozen_kwargs = _snapshots(args, kwargs, lowered)
        if graph is None:
            scheduler.submit(queue, Work(plan.short, lambda: execute(frozen_args, frozen_kwargs)))
        else:
            graph.add(OperatorNode(plan.short, execute, frozen_args, frozen_kwargs))
            if local.group is not None and local.group.graph is graph:
                local.group.outputs = results  # an update returns them
        return results

    def rewrite(record: Record, args: Any, kwargs: dict[str, Any]) -> Any:
        """An update: the record's node gets new arguments; nothing runs."""
        graphs.end_update()
        with scheduler.lock:
            node = record.node
            if node is None or node.name != plan.short:
                raise RuntimeError(f"graph.update() issued {plan.name} for record {record.index} ({record.operator})")
            record.check_update()
            lowered = _lower(plan, args, kwargs)
            if check is not None:
                check(lowered.args, lowered.kwargs)
            node.args, node.kwargs = _snapshots(args, kwargs, lowered)
            record.updated()
        if all(at is not None for at in plan.returns):
            return _results(plan, args, kwargs, (None,) * len(plan.returns), lambda x: x)
        return record.outputs

    return run
