"""CPU tensors over the bytes of npu tensors. It owns aliasing only: no ownership of memory, no order, no copies."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["CPU", "alias", "private_alias"]

CPU = torch.device("cpu")
_VIEWS: dict[tuple[Any, ...], torch.Tensor] = {}
_LIMIT = 16384


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with the same bytes, shape, strides and dtype as an npu tensor; it does not own the memory.

    Equal requests get the same object, so nobody may change its shape or storage.
    """
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if nbytes == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
    dtype = tensor.dtype
    key = (storage.data_ptr(), nbytes, dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
    view = _VIEWS.get(key)
    if view is None:
        if len(_VIEWS) >= _LIMIT:
            _VIEWS.clear()
        with torch.inference_mode(False):  # usable in every mode later
            view = _VIEWS[key] = private_alias(tensor)
    if tensor.is_neg():
        view = torch._neg_view(view)
    if dtype.is_complex and tensor.is_conj():
        view = view.conj()
    return view


def private_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Like `alias`, but an object of its own over a storage object of its own, which an out= kernel may resize."""
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if nbytes == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
    own = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, nbytes)
    out = torch.empty(0, dtype=tensor.dtype, device=CPU)
    return out.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
