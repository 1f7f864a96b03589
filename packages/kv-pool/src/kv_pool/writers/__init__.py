"""Owns the choice of how rows are stored into a pool: `create_writer`, once, at construction.

Each writer is one class in one module; those that need torch_npu live under `npu/`, imported only when chosen. It does
not own the pool's memory.
"""

from __future__ import annotations

from importlib import import_module
from typing import Literal, Protocol, TypeAlias, cast, runtime_checkable

import torch

from kv_pool._arguments import check_kind
from kv_pool.errors import PoolSizeError, UnknownWriter
from kv_pool.tables import whole_number

__all__ = ["Writer", "WriterName", "create_writer", "writer_names"]

WriterName: TypeAlias = Literal["auto", "index", "scatter_nd", "reshape_and_cache"]


@runtime_checkable
class Writer(Protocol):
    """Stores rows of one component, or of K and V together, at slots of one layer.

    Attributes:
        name: Name under which it is chosen.
        max_slots: Most slots that its index can address.
        pairs_only: Whether it can store K and V together only.
    """

    name: str
    max_slots: int
    pairs_only: bool

    def write(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Store `key[i]` and `value[i]` at `slots[i]`.

        Args:
            key_cache: Shape: [pages, page_size, heads, key_dims]; contiguous. Mutated.
            value_cache: Shape: [pages, page_size, heads, value_dims]; contiguous. Mutated.
            slots: Shape: [tokens]; the integer dtypes that the writer declares.
            key: Shape: [tokens, heads, key_dims]; dtype of `key_cache`.
            value: Shape: [tokens, heads, value_dims]; dtype of `value_cache`.

        Raises:
            WriteError: Something does not fit; nothing was written.
        """

    def write_rows(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store `rows[i]` of one component at `slots[i]`.

        Args:
            cache: Shape: [pages, page_size, heads, dims]; contiguous. Mutated.
            slots: Shape: [tokens]; the integer dtypes that the writer declares.
            rows: Shape: [tokens, heads, dims]; dtype of `cache`.

        Raises:
            WriteError: Something does not fit; nothing was written.
            UnknownWriter: The writer stores pairs only.
        """


# name -> (device types it serves, None for any; where its class lives)
_WRITERS: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "index": (None, "kv_pool.writers.index:IndexWriter"),
    "scatter_nd": (("npu",), "kv_pool.writers.npu.scatter_nd:ScatterNdWriter"),
    "reshape_and_cache": (("npu",), "kv_pool.writers.npu.reshape_and_cache:ReshapeAndCacheWriter"),
}


def writer_names(device_type: str) -> tuple[str, ...]:
    """Return the writers that serve a device type, e.g. `"cpu"` or `"npu"`.

    Raises:
        UnknownWriter: It is no text.
    """
    check_kind("device_type", device_type, str, UnknownWriter)
    return tuple(name for name, (types, _) in _WRITERS.items() if types is None or device_type in types)


def create_writer(name: WriterName, device: torch.device, *, num_slots: int) -> Writer:
    """Create the writer `name` for a pool of `num_slots` slots on `device`.

    Args:
        name: A writer, or `"auto"`: `scatter_nd` on an NPU, else `index`.
        device: The pool's device.
        num_slots: Slots of the pool, those of page 0 included.

    Raises:
        UnknownWriter: No such writer, or it does not serve the device.
        PoolSizeError: The pool has more slots than the writer's index can address.
    """
    check_kind("writer", name, str, UnknownWriter)
    check_kind("device", device, torch.device, UnknownWriter)
    num_slots = whole_number("num_slots", num_slots, error=PoolSizeError, consequence="no row could be stored")
    chosen = ("scatter_nd" if device.type == "npu" else "index") if name == "auto" else name
    eligible = writer_names(device.type)
    if chosen not in eligible:
        raise UnknownWriter(
            "writer",
            given=name,
            expected=f"auto or one of {list(eligible)} on {device.type}",
            consequence="rows could not be stored",
            remedy="leave it at auto",
        )
    module, _, attribute = _WRITERS[chosen][1].partition(":")
    writer = cast(Writer, getattr(import_module(module), attribute)())
    if num_slots > writer.max_slots:
        raise PoolSizeError(
            "size",
            given=f"{num_slots} slots",
            expected=f"at most {writer.max_slots} for writer {writer.name}",
            consequence="slots above that would wrap and overwrite other tokens",
            remedy="choose a writer with int64 slots",
        )
    return writer
