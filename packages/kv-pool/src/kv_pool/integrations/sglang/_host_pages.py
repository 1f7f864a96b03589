"""Owns one of SGLang's host pools as pages of a `PageStorage`: what they are, where they lie, what they are called.

It asks a pool for the addresses of its pages and moves bytes there; a pool that cannot tell them (side states of a
slot) is copied page by page through its own flat form. It does not know hit policies (see `storage`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kv_pool._arguments import check_kind, check_list
from kv_pool.errors import StorageError
from kv_pool.hicache.storage._calls import read_batches, write_pages
from kv_pool.integrations._engine import bytes_at, stored_key

if TYPE_CHECKING:
    from kv_pool.hicache.storage import PageStorage
    from kv_pool.hicache.storage.protocols import Pieces

__all__ = ["PoolPages", "flat", "refused"]

_FACTS = (
    "layout", "dtype", "page_size", "start_layer", "target_layer_num", "layer_num", "num_mamba_layers", "head_num",
    "head_dim", "v_head_dim", "conv_dtype", "conv_state_shapes", "temporal_dtype", "temporal_state_shape",
    "indexer_dtype", "item_bytes", "state_page_bytes",
)  # fmt: skip
_HELD = (
    "k_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer", "kv_buffer", "index_k_with_scale_buffer",
    "temporal_buffer", "conv_buffer", "slot_state_buffers",
)  # fmt: skip


class PoolPages:
    """Pages of one host pool.

    Args:
        name: SGLang's name of the pool in its group.
        pool: The host pool.
        identity: What the bytes mean beside the pool: model, stage, ranks.

    Raises:
        StorageError: The pool has neither addresses nor a flat form of its pages.
    """

    def __init__(self, name: str, pool: Any, identity: Mapping[str, Any]) -> None:
        self.pool = pool
        self.page_size = int(pool.page_size)
        self._direct, sizes = _sizes(name, pool)
        facts = {fact: str(getattr(pool, fact)) for fact in _FACTS if hasattr(pool, fact)}
        self._identity = {**identity, "pool": name, "kind": type(pool).__name__, "facts": facts, "pieces": sizes}

    def keys(self, keys: Sequence[str], *, flat: bool = False) -> list[str]:
        """Keys of a store for page hashes: SGLang's name the tokens, these also what the bytes mean.

        Args:
            keys: SGLang's page hashes.
            flat: Whether the pages go in SGLang's flat form, which may order their bytes in another way.
        """
        identity = {**self._identity, "form": "flat"} if flat else self._identity
        return [stored_key(identity, key.encode()) for key in keys]

    def read(self, storage: PageStorage, keys: Sequence[str], host_indices: torch.Tensor | None) -> int:
        """Fill host pages and return how many leading ones are whole; a damaged page ends as a missing one does."""
        starts = self._starts(keys, host_indices)
        if self._direct:
            return read_leading(storage, self.keys(keys), self._pieces(starts))
        pages = [self.pool.get_dummy_flat_data_page() for _ in keys]
        read = read_leading(storage, self.keys(keys), [[flat(page)] for page in pages])
        for start, page in zip(starts[:read], pages, strict=False):
            self.pool.set_from_flat_data_page(start, page)
        return read

    def write(self, storage: PageStorage, keys: Sequence[str], host_indices: torch.Tensor | None) -> int:
        """Keep host pages and return how many leading ones are kept."""
        starts = self._starts(keys, host_indices)
        if self._direct:
            return write_pages(storage, self.keys(keys), self._pieces(starts))
        pages = [[flat(self.pool.get_data_page(start).contiguous())] for start in starts]
        return write_pages(storage, self.keys(keys), pages)

    def memory(self) -> Pieces:
        """The whole memory of the pool, each allocation once."""
        found: dict[int, np.ndarray[Any, np.dtype[np.uint8]]] = {}
        for name in _HELD:
            held = getattr(self.pool, name, None)
            for tensor in held if isinstance(held, (list, tuple)) else [held]:
                if isinstance(tensor, torch.Tensor) and tensor.numel():
                    storage = tensor.untyped_storage()
                    found.setdefault(storage.data_ptr(), bytes_at(storage.data_ptr(), storage.nbytes()))
        return list(found.values())

    def _starts(self, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[int]:
        """First slots of the pages; refuses whatever is not one whole page a key."""
        size = self.page_size
        check_list("keys", keys, StorageError)
        if host_indices is None:
            slots = torch.zeros(0, dtype=torch.int64)
        else:
            slots = check_kind("host_indices", host_indices, torch.Tensor, StorageError).cpu()
        pages = slots.reshape(-1, size) if slots.numel() == len(keys) * size else None
        if pages is None or bool((pages != pages[:, :1] + torch.arange(size)).any() or (pages[:, 0] % size).any()):
            expected = f"{len(keys)} whole pages of {size} slots, each from its first slot on"
            raise refused("host_indices", f"{slots.numel()} slots", expected, "pass whole pages")
        starts: list[int] = pages[:, 0].tolist()
        return starts

    def _pieces(self, starts: Sequence[int]) -> list[Pieces]:
        if not starts:
            return []
        slots = (torch.tensor(starts)[:, None] + torch.arange(self.page_size)).reshape(-1)
        found = self.pool.get_page_buffer_meta(slots)
        addresses, sizes = found if found is not None else ([], [])
        each = len(addresses) // len(starts)
        pieces = [bytes_at(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
        return [pieces[number * each : (number + 1) * each] for number in range(len(starts))]


def read_leading(storage: PageStorage, keys: Sequence[str], pages: Sequence[Pieces]) -> int:
    """How many leading pages a store filled whole; a damaged page ends as a missing one does."""
    read = read_batches(storage, keys, pages, max(1, len(keys)), lambda: False)
    if read.failure is not None:
        raise read.failure
    return read.pages


def flat(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A tensor's bytes. Shape: [nbytes].

    Raises:
        StorageError: Not contiguous host memory.
    """
    check_kind("target", tensor, torch.Tensor, StorageError)
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise refused("target", f"strides {tensor.stride()} on {tensor.device}", "contiguous host memory", "copy it")
    found: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return found


def _sizes(name: str, pool: Any) -> tuple[bool, list[int]]:
    """Whether a pool tells where its pages lie, and the bytes of each piece of one."""
    try:
        found = pool.get_page_buffer_meta(torch.arange(pool.page_size))
        return True, [] if found is None else [int(size) for size in found[1]]
    except (NotImplementedError, ValueError, AttributeError) as error:
        try:
            return False, [int(flat(pool.get_dummy_flat_data_page()).size)]
        except (NotImplementedError, ValueError, AttributeError):
            expected = "addresses of its pages, or a flat form of them"
            raise refused(
                name, str(error), expected, "keep this pool out of the storage, or change its layout"
            ) from error


def refused(argument: str, given: object, expected: str, remedy: str) -> StorageError:
    """An argument that would put bytes elsewhere."""
    return StorageError(
        argument,
        given=given,
        expected=expected,
        consequence="bytes would be read or written in another place",
        remedy=remedy,
    )
