"""Wraps a CPU kernel as an npu kernel, which runs now, later or at a replay. It owns no kernel itself.

This is the meaning of every operator. `native/fallback.cpp` stands in front of it where a C++ compiler was found, and
does the same for calls that run at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_npu

from . import order, poison
from ._alias import alias
from ._graphs import Graph, Record, graphs, local
from ._lowering import Lowered, bring_home, call_resizing, lower, new_tensors, resize_out, results, snapshots
from ._nodes import OperatorNode
from ._queue import StreamQueue, Work, scheduler
from ._random import seeded, source_of, with_default_generator
from ._runtime import runtime
from ._schema import Plan
from ._shapes import infer

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
    if order.on:
        storage = tensor.untyped_storage()
        runtime.order_allocated(storage.data_ptr(), storage.nbytes())
    return tensor


def current_queue(device_index: int) -> StreamQueue:
    """Queue of the device's current stream in this thread."""
    return scheduler.queue(_raw_stream(device_index))


def capturing_graph(queue: StreamQueue) -> Graph | None:
    """The graph that the stream is being captured into, or None."""
    model = queue.state.model
    return graphs.get(model) if model else None


def npu_kernel(
    plan: Plan,
    operator: Any,
    call: Callable[..., Any] | None = None,
    *,
    shape_only: bool = False,
    check: Callable[[Any, dict[str, Any]], None] | None = None,
) -> Any:
    """The npu kernel of an operator.

    Args:
        plan: what the operator's schema says.
        operator: the overload; its meta kernel decides the shapes.
        call: kernel on CPU tensors; None: the operator's own CPU kernel.
        shape_only: the results carry a shape and no data (workspace, output allocation), so nothing is queued or
            captured.
        check: called with the lowered arguments when the work is queued, captured or updated; raises what the device
            refuses at that moment, without looking at the tensors' contents.

    Returns:
        A function for `torch.library.Library.impl(..., "PrivateUse1")`.
    """
    cpu: Callable[..., Any] = call or operator._op
    simple = not (plan.randomness or plan.needs_host or plan.is_index)

    def npu_device(lowered: Lowered) -> torch.device:
        return lowered.device or torch.device("npu", torch_npu.npu.current_device())

    def run(*args: Any, **kwargs: Any) -> Any:
        if scheduler.slow:
            return slow(args, kwargs)
        lowered = lower(plan, args, kwargs)
        return compute(args, kwargs, lowered)

    def compute(args: Any, kwargs: dict[str, Any], lowered: Lowered) -> Any:
        device = lowered.device
        if device is None:
            device = npu_device(lowered)
        fn = cpu
        checking = order.on and not shape_only
        stream = _raw_stream(device.index or 0) if checking else 0
        if checking:
            accesses = order.accesses_of(plan, args, kwargs)
            order.touch(stream, order.words_of(accesses, lowered.args, lowered.kwargs))
        if not simple:
            if needs_data(args):
                scheduler.wait_stream(current_queue(device.index or 0))
            fn = prepare(lowered, device, None)
        if plan.resizes:
            out = call_resizing(plan, fn, lowered)
            bring_home(plan, args, kwargs, lowered)
        else:
            out = fn(*lowered.args, **lowered.kwargs)
        if plan.gives_out:
            return tuple(kwargs["out"])

        def lift(x: torch.Tensor) -> torch.Tensor:
            if lowered.elsewhere:
                return x
            tensor = allocate(x.shape, x.stride(), x.dtype, device)
            if checking:
                order.touch(stream, order.results_of(plan, [tensor]))
            if x.numel():
                alias(tensor).copy_(x)
            return tensor

        return results(plan, args, kwargs, out, lift)

    def prepare(lowered: Lowered, device: torch.device, graph: Graph | None) -> Callable[..., Any]:
        """Put a CPU generator into the arguments; what has to be called."""
        if not plan.randomness:
            return cpu
        index = device.index or 0
        stand_in = seeded if graph is None else graph.generator
        if plan.randomness == "default":
            return with_default_generator(cpu, stand_in(source_of(None, index)))
        for argument in plan.arguments:
            if argument.kind != "generator":
                continue
            positional = not argument.keyword_only and argument.position < len(lowered.args)
            given = lowered.args[argument.position] if positional else lowered.kwargs.get(argument.name)
            generator = stand_in(source_of(given, index))
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
        lowered = lower(plan, args, kwargs)
        device = npu_device(lowered)
        queue = current_queue(device.index)
        graph = capturing_graph(queue)
        if lowered.elsewhere:
            return compute(args, kwargs, lowered)
        if graph is None:
            if not queue.items or scheduler.progress(queue) is None:
                return compute(args, kwargs, lowered)
            if needs_data(args):  # compute() waits
                return compute(args, kwargs, lowered)
        elif needs_data(args):
            raise graph.refuse(plan.name, "needs its data on the host")
        return later(args, kwargs, lowered, device, queue, graph)

    def later(
        args: Any,
        kwargs: dict[str, Any],
        lowered: Lowered,
        device: torch.device,
        queue: StreamQueue,
        graph: Graph | None,
    ) -> Any:
        """Nothing is computed now: shapes from the meta kernel, and the work is captured or queued."""
        if shape_only:  # the kernel looks at shapes and refuses; `empty` poisons in the stream's order
            out = cpu(*lowered.args, **lowered.kwargs)
            return results(
                plan,
                args,
                kwargs,
                out,
                lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device),
            )
        if check is not None:
            check(lowered.args, lowered.kwargs)
        new_results = None in plan.returns
        made: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        returned: Any
        if plan.gives_out:
            returned = tuple(kwargs["out"])
        elif new_results or plan.resizes or plan.name.startswith("aten::"):
            out, stand_in = infer(plan.name, operator, cpu, args, kwargs)
            if plan.resizes:
                resize_out(plan, args, kwargs, stand_in, capturing=graph is not None)
                lowered = lower(plan, args, kwargs)

            def lift(x: torch.Tensor) -> torch.Tensor:
                tensor = allocate(x.shape, x.stride(), x.dtype, device)
                target = alias(tensor)
                if graph is not None:
                    storage = tensor.untyped_storage()
                    poison.fill(storage.data_ptr(), storage.nbytes(), tensor.dtype)
                made.append(tensor)
                targets.append(target)
                return tensor

            returned = results(plan, args, kwargs, out, lift)
        else:
            returned = results(plan, args, kwargs, (None,) * len(plan.returns), lambda x: x)
        fn = prepare(lowered, device, graph)

        expected = [target.shape for target in targets]

        def execute(own_args: Any, own_kwargs: dict[str, Any]) -> None:
            produced = fn(*own_args, **own_kwargs)
            if not targets:
                return
            sources = (produced,) if isinstance(produced, _Tensor) else new_tensors(plan, produced)
            for target, shape, source in zip(targets, expected, sources, strict=True):
                if shape != source.shape:
                    raise RuntimeError(
                        f"{plan.name} produced shape {tuple(source.shape)}, its meta kernel said {tuple(shape)}"
                    )
                target.copy_(source)

        frozen_args, frozen_kwargs = snapshots(args, kwargs, lowered)
        accesses = order.with_results(order.accesses_of(plan, args, kwargs), order.results_of(plan, made))
        if graph is None:
            scheduler.submit(
                queue,
                Work(
                    plan.short,
                    lambda: execute(frozen_args, frozen_kwargs),
                    lambda: order.words_of(accesses, frozen_args, frozen_kwargs),
                ),
            )
        else:
            graph.add(OperatorNode(plan.short, execute, frozen_args, frozen_kwargs, accesses), queue)
            if local.group is not None and local.group.graph is graph:
                local.group.outputs = returned  # an update returns them
        return returned

    def rewrite(record: Record, args: Any, kwargs: dict[str, Any]) -> Any:
        """An update: the record's node gets new arguments; nothing runs."""
        graphs.end_update()
        with scheduler.lock:
            node = record.node
            if node is None or node.name != plan.short:
                raise RuntimeError(f"graph.update() issued {plan.name} for record {record.index} ({record.operator})")
            record.check_update()
            lowered = lower(plan, args, kwargs)
            if check is not None:
                check(lowered.args, lowered.kwargs)
            node.args, node.kwargs = snapshots(args, kwargs, lowered)
            record.updated()
        if all(at is not None for at in plan.returns):
            return results(plan, args, kwargs, (None,) * len(plan.returns), lambda x: x)
        return record.outputs

    return run
