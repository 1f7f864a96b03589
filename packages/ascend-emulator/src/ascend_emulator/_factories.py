"""Operators that make tensors: fresh memory is poisoned, filled memory is allocated on the device and filled in place.

It owns `empty*`, `resize_`, `zeros`, `ones`, `full`, and what `record_stream` says of memory; other factories go
through the general wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_npu

from . import order, poison
from ._alias import alias
from ._nodes import OperatorNode
from ._operators import allocate, capturing_graph, current_queue
from ._queue import Work, scheduler
from ._runtime import runtime

__all__ = ["FACTORIES"]

_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)


def _poisoned(short: str) -> Callable[..., torch.Tensor]:
    """`empty` in its two forms: torch_npu's allocation, then poison, since its allocator reuses blocks."""
    call = torch.library.get_kernel(f"aten::{short}", "PrivateUse1").call_boxed

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = call(_KEYS, *args, **kwargs)
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes:
            if order.on:
                runtime.order_allocated(storage.data_ptr(), nbytes)
            _poison_later(tensor.device.index, storage.data_ptr(), nbytes, tensor.dtype)
        return tensor

    return empty


def _poison_later(device_index: int, address: int, nbytes: int, dtype: torch.dtype) -> None:
    """Poison memory now, or behind the stream's pending work, which may still use the block."""
    if scheduler.slow:
        queue = current_queue(device_index)
        if queue.items and scheduler.progress(queue) is not None:
            scheduler.submit(queue, Work("poison", lambda: poison.fill(address, nbytes, dtype)))
            return
    poison.fill(address, nbytes, dtype)


_resize = torch.library.get_kernel("aten::resize_", "PrivateUse1").call_boxed


def _resize_(
    self: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    """`resize_`: what it adds is as unwritten as a fresh tensor."""
    before = self.untyped_storage().nbytes()
    _resize(_KEYS, self, size, memory_format=memory_format)
    storage = self.untyped_storage()
    if storage.nbytes() > before:
        if order.on:
            runtime.order_allocated(storage.data_ptr(), storage.nbytes())
        _poison_later(self.device.index, storage.data_ptr() + before, storage.nbytes() - before, self.dtype)
    return self


def _empty_like(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    dtype, device = dtype or self.dtype, device or self.device
    plain = memory_format in (None, torch.preserve_format, torch.contiguous_format)
    if plain and self.is_contiguous():
        return torch.empty(self.shape, dtype=dtype, device=device, pin_memory=bool(pin_memory))
    like = torch.empty_strided(self.shape, self.stride(), dtype=dtype, device="meta")
    like = torch.empty_like(like, memory_format=memory_format or torch.preserve_format)
    return torch.empty_strided(
        like.shape, like.stride(), dtype=dtype, device=device, pin_memory=bool(pin_memory) and device.type == "cpu"
    )


def _new_empty_strided(
    self: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype or self.dtype, device=device or self.device)


_record_stream = torch.library.get_kernel("aten::record_stream", "PrivateUse1").call_boxed


def _note_stream(self: torch.Tensor, s: torch.Stream) -> None:
    """`record_stream`: torch_npu's, and the allocator will wait for this stream before it reuses the block."""
    _record_stream(_KEYS, self, s)
    if order.on:
        storage = self.untyped_storage()
        stream = torch_npu.npu.Stream(stream_id=s.stream_id, device_index=s.device_index, device_type=s.device_type)
        runtime.order_shared(storage.data_ptr(), storage.nbytes(), stream.npu_stream)


def _strides(size: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for extent in reversed(size):
        strides.append(step)
        step *= max(extent, 1)
    return strides[::-1]


def _filled(size: Sequence[int], value: Any, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    if any(extent < 0 for extent in size):
        raise RuntimeError(f"Trying to create tensor with negative dimension: {list(size)}")
    if device is None or device.index is None:
        device = torch.device("npu", torch_npu.npu.current_device())
    tensor = allocate(size, _strides(size), dtype, device)
    target = alias(tensor)
    accesses = order.plain_accesses("aten::fill_", {}, {"self": tensor})
    if scheduler.slow:
        queue = current_queue(device.index)
        graph = capturing_graph(queue)
        if graph is not None:
            poison.fill(target.data_ptr(), target.untyped_storage().nbytes(), dtype)
            graph.add(
                OperatorNode("fill_", lambda args, _: args[0].fill_(args[1]), (target, value), {}, accesses), queue
            )
            return tensor
        if queue.items and scheduler.progress(queue) is not None:
            scheduler.submit(queue, Work("fill_", lambda: target.fill_(value), lambda: accesses))
            return tensor
    if order.on:
        order.touch(current_queue(device.index).address, accesses)
    target.fill_(value)
    return tensor


def _constant(value: int) -> Callable[..., torch.Tensor]:
    def run(
        size: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
    ) -> torch.Tensor:
        return _filled(size, value, dtype or torch.get_default_dtype(), device)

    return run


def _full(
    size: Sequence[int],
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    if dtype is None:
        dtype = torch.tensor(fill_value).dtype
    return _filled(size, fill_value, dtype, device)


FACTORIES: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _poisoned("empty.memory_format"),
    "empty_strided": _poisoned("empty_strided"),
    "empty_like": _empty_like,
    "new_empty_strided": _new_empty_strided,
    "record_stream": _note_stream,
    "resize_": _resize_,
    "zeros": _constant(0),
    "ones": _constant(1),
    "full": _full,
}
