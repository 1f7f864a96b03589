"""CPU tensors over the bytes of npu tensors. It owns aliasing only: no ownership of memory, no order, no copies."""

from __future__ import annotations

import torch

__all__ = ["CPU", "alias", "private_alias"]

CPU = torch.device("cpu")
_BASES: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
_LIMIT = 8192


def _base(address: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        storage = torch._C._construct_storage_from_data_pointer(address, CPU, nbytes)
        base = torch.empty(0, dtype=dtype, device=CPU).set_(storage)
    if len(_BASES) >= _LIMIT:
        _BASES.clear()
    _BASES[address, nbytes, dtype] = base
    return base


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with the same bytes, shape, strides and dtype as an npu tensor; it does not own the memory."""
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    dtype = tensor.dtype
    if nbytes == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=CPU)
    address = storage.data_ptr()
    base = _BASES.get((address, nbytes, dtype))
    if base is None:
        base = _base(address, nbytes, dtype)
    view = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    if tensor.is_neg():
        view = torch._neg_view(view)
    if dtype.is_complex and tensor.is_conj():
        view = view.conj()
    return view


def private_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Like `alias`, over a storage object of its own: an out= kernel may resize it without touching other aliases."""
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if nbytes == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
    own = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, nbytes)
    out = torch.empty(0, dtype=tensor.dtype, device=CPU)
    return out.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
