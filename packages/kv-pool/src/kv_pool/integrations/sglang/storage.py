"""Owns SGLang's dynamic storage backend over any `PageStorage` of this package: files, Mooncake Store, others.

Configured by `--hicache-storage-backend dynamic` and the extra config
`{"backend_name": "kv_pool", "module_path": "kv_pool.integrations.sglang", "class_name": "KvPoolStorage",
"interface_v1": 1, "storage": "files", "options": {"root": …, "capacity_bytes": …}, "salt": ""}`. SGLang's page hashes
name the tokens; everything else that the bytes mean goes into the key, where SGLang's own file store leaves out dtype,
layout, layers and drafts. Groups of pools (its v2 calls: sliding windows, states) are not served.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kv_pool.errors import StorageDamaged, StorageError
from kv_pool.hicache.storage import Closes, RegistersMemory, create_storage
from kv_pool.integrations._engine import bytes_at, engine_module, stored_key

if TYPE_CHECKING:
    from kv_pool.hicache.storage import PageStorage
    from kv_pool.hicache.storage.protocols import Pieces

__all__ = ["HostPages", "storage_class"]

SCHEMA_VERSION = 1
_RANKED = ("tp_rank", "tp_size")
_FIELDS = (
    "model_name", "is_mla_model", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size",
    "tp_lcm_size", "should_split_heads", "logical_page_size",
)  # fmt: skip


class HostPages:
    """SGLang's host pool and its keys, as pieces and keys of a `PageStorage`; the calls are those of `HiCacheStorage`.

    Args:
        storage_config: SGLang's `HiCacheStorageConfig`; its `extra_config` names the store.
        kwargs: What SGLang's factory passes; not read.

    Raises:
        StorageError: The store does not exist or cannot be used.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = dict(storage_config.extra_config or {})
        self._storage: PageStorage = create_storage(extra.get("storage", "files"), **extra.get("options", {}))
        self._identity = {name: getattr(storage_config, name) for name in _FIELDS}
        if not storage_config.is_mla_model:  # replicated pages are the same on all ranks
            self._identity |= {name: getattr(storage_config, name) for name in _RANKED}
        self._identity |= {"schema": SCHEMA_VERSION, "salt": extra.get("salt", "")}
        self._pool: Any = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool; what its pages are goes into every key from now on."""
        self._pool = mem_pool_host
        self.mem_pool_host = mem_pool_host
        _, sizes = mem_pool_host.get_page_buffer_meta(torch.arange(mem_pool_host.page_size))
        self._identity |= {
            "host_pool": type(mem_pool_host).__name__,
            "layout": str(mem_pool_host.layout),
            "dtype": str(mem_pool_host.dtype),
            "page_size": mem_pool_host.page_size,
            "layers": [mem_pool_host.start_layer, mem_pool_host.target_layer_num, mem_pool_host.layer_num],
            "pieces": [int(size) for size in sizes],
        }
        if isinstance(self._storage, RegistersMemory):
            self._storage.register(_buffers(mem_pool_host))

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading keys are there."""
        return self._storage.exists(self._keys(keys))

    def exists(self, key: str) -> bool:
        """Whether one key is there."""
        return self.batch_exists([key]) == 1

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Fill host pages in place; the first miss, or damaged page, ends.

        Args:
            keys: SGLang's page hashes.
            host_indices: Slots of the host pages. Shape: [len(keys) * page_size]; whole pages.
            extra_info: Not read: a page hash covers all pages before it.

        Raises:
            StorageError: Slots that are no whole pages, or the store does not answer.
        """
        read = self._read(keys, self._pieces(keys, host_indices))
        return [number < read for number in range(len(keys))]

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Keep host pages; arguments and errors as for `batch_get_v1`."""
        kept = self._storage.write(self._keys(keys), self._pieces(keys, host_indices))
        return [number < kept for number in range(len(keys))]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill flat tensors, one a page, and return those that are whole, `None` for the rest."""
        pages = [[_flat(target)] for target in target_locations]
        read = self._read(keys, pages)
        return [target if number < read else None for number, target in enumerate(target_locations)]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Fill one flat tensor; `None` if the page is not there."""
        return self.batch_get([key], [target_location])[0]

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Keep flat tensors, one a page; whether all are kept."""
        return self._storage.write(self._keys(keys), [[_flat(value)] for value in values]) == len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Keep one flat tensor."""
        return self.batch_set([key], [value])

    def close(self) -> None:
        """Let the store go; SGLang calls it when the backend is detached."""
        if isinstance(self._storage, Closes):
            self._storage.close()

    def _keys(self, keys: Sequence[str]) -> list[str]:
        if self._pool is None:
            raise _refused("mem_pool_host", "none", "a registered host pool", "call register_mem_pool_host first")
        return [stored_key(self._identity, key.encode()) for key in keys]

    def _read(self, keys: list[str], pages: Sequence[Pieces]) -> int:
        try:
            return self._storage.read(self._keys(keys), pages)
        except StorageDamaged as error:
            return error.pages_read

    def _pieces(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[Pieces]:
        self._keys(())
        size = self._pool.page_size
        slots = host_indices.cpu()
        pages = slots.reshape(-1, size) if slots.numel() == len(keys) * size else None
        if pages is None or bool((pages != pages[:, :1] + torch.arange(size)).any() or (pages[:, 0] % size).any()):
            expected = f"{len(keys)} whole pages of {size} slots, each from its first slot on"
            raise _refused("host_indices", f"{slots.numel()} slots", expected, "pass whole pages")
        addresses, sizes = self._pool.get_page_buffer_meta(slots)
        each = len(addresses) // max(len(keys), 1)
        pieces = [bytes_at(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
        return [pieces[number * each : (number + 1) * each] for number in range(len(keys))]


def _flat(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise _refused("target", f"strides {tensor.stride()} on {tensor.device}", "contiguous host memory", "copy it")
    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


def _buffers(pool: Any) -> Pieces:
    """The whole memory of a host pool, each allocation once."""
    names = ("k_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer", "kv_buffer")
    found: dict[int, np.ndarray[Any, np.dtype[np.uint8]]] = {}
    for name in names:
        held = getattr(pool, name, None)
        for tensor in held if isinstance(held, (list, tuple)) else [held]:
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                found.setdefault(storage.data_ptr(), bytes_at(storage.data_ptr(), storage.nbytes()))
    return list(found.values())


def _refused(argument: str, given: object, expected: str, remedy: str) -> StorageError:
    return StorageError(
        argument,
        given=given,
        expected=expected,
        consequence="bytes would be read or written in another place",
        remedy=remedy,
    )


@functools.cache
def storage_class() -> type[Any]:
    """`HostPages` as a subclass of SGLang's `HiCacheStorage`, which its factory asks for.

    Raises:
        LibraryUnavailable: SGLang 0.5.23 is not installed.
    """
    base = engine_module("sglang.srt.mem_cache.hicache_storage", "SGLang 0.5.23").HiCacheStorage
    return type("KvPoolStorage", (HostPages, base), {"__module__": __name__, "__doc__": HostPages.__doc__})
