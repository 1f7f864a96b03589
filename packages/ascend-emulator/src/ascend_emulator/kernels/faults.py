"""Recognising memory that was never written, and naming the place of a fault.

This module owns the poison test of rows and the arithmetic from a cache view to its layer. Filling memory with poison
is the runtime's work.
"""

from __future__ import annotations

import torch

from ascend_emulator.poison import poison_byte

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _pattern(dtype: torch.dtype) -> int:
    return int.from_bytes(bytes([poison_byte(dtype)]) * dtype.itemsize, "little", signed=True)


def poisoned_rows(rows: torch.Tensor) -> torch.Tensor | None:
    """Finds rows of which every byte is poison.

    One element of each row is looked at first; only when one of them is poison are those rows read whole.

    Args:
        rows: Shape: [..., dims]; any dtype of 1, 2, 4 or 8 bytes; any strides.

    Returns:
        None when no row is poisoned, else a bool tensor of shape [...].
    """
    if rows.numel() == 0:
        return None
    integers = rows.view(_INT_OF_SIZE[rows.element_size()])
    pattern = _pattern(rows.dtype)
    suspects = integers[..., 0] == pattern
    if not bool(suspects.any()):
        return None
    places = suspects.nonzero(as_tuple=True)
    suspects[places] = (integers[places] == pattern).all(-1)
    return suspects if bool(suspects.any()) else None


def fill_poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a contiguous tensor with its dtype's poison, as fresh memory is. Mutates ``tensor`` and returns it."""
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).fill_(poison_byte(tensor.dtype))
    return tensor


def layer_of(cache: torch.Tensor) -> int | None:
    """Layer of a cache that is one layer's view of a storage [layers, pages, ...]; None when the view does not tell."""
    size = int(cache.numel())
    if size == 0 or cache.untyped_storage().nbytes() < 2 * size * cache.element_size():
        return None
    layer, rest = divmod(int(cache.storage_offset()), size)
    return layer if rest == 0 else None


def place(layer: int | None) -> str:
    """Words for a layer in a fault's text."""
    return "" if layer is None else f" of layer {layer} (counted by the view's offset in its storage)"
