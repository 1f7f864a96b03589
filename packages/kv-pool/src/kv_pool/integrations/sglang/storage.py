"""Owns SGLang's dynamic storage backend over any `PageStorage` of this package: files, Mooncake Store, others.

Configured by `--hicache-storage-backend dynamic` and the extra config
`{"backend_name": "kv_pool", "module_path": "kv_pool.integrations.sglang", "class_name": "KvPoolStorage",
"interface_v1": 1, "storage": "files", "options": {"root": …, "capacity_bytes": …}, "salt": ""}`. SGLang's page hashes
name the tokens; everything else that the bytes mean goes into the key, where SGLang's own file store leaves out dtype,
layout, layers and drafts. Groups of pools (its v2 calls: sliding windows, states, index keys, drafts) keep a key a pool
and a page; which prefixes are whole is said here, by SGLang's hit policies.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kv_pool._arguments import check_kind, check_mapping
from kv_pool.errors import StorageError
from kv_pool.hicache.storage import Closes, RegistersMemory, create_storage
from kv_pool.hicache.storage._calls import ask, stored_pages, write_pages
from kv_pool.integrations._engine import engine_module
from kv_pool.integrations.sglang._host_pages import PoolPages, flat, read_leading, refused

if TYPE_CHECKING:
    from kv_pool.hicache.storage import PageStorage
    from kv_pool.hicache.storage.protocols import Pieces

__all__ = ["HostPages", "storage_class"]

SCHEMA_VERSION = 2
_KV, _STATES = "kv", "mamba"  # SGLang's names of the pool of K and V, and of the pool of states
_RELEASE = "SGLang 0.5.23"
_STORAGE = "sglang.srt.mem_cache.hicache_storage"
_RANKED = ("tp_rank", "tp_size")
_FIELDS = (
    "model_name", "is_mla_model", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size",
    "tp_lcm_size", "should_split_heads", "logical_page_size",
)  # fmt: skip


class HostPages:
    """SGLang's host pools and its keys, as pieces and keys of a `PageStorage`; the calls are those of `HiCacheStorage`.

    Args:
        storage_config: SGLang's `HiCacheStorageConfig`; its `extra_config` names the store.
        kwargs: What SGLang's factory passes; not read.

    Raises:
        StorageError: The store does not exist or cannot be used, or a value of the extra config is of another kind.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        given = storage_config.extra_config
        extra: Mapping[str, Any] = {} if given is None else check_mapping("extra_config", given, StorageError)
        store = check_kind("extra_config['storage']", extra.get("storage", "files"), str, StorageError)
        options = check_mapping("extra_config['options']", extra.get("options", {}), StorageError)
        check_kind("extra_config['salt']", extra.get("salt", ""), str, StorageError)
        self._storage: PageStorage = create_storage(store, **options)
        self._identity = {name: getattr(storage_config, name) for name in _FIELDS}
        self._identity |= {"schema": SCHEMA_VERSION, "salt": extra.get("salt", "")}
        self._rank = {name: getattr(storage_config, name) for name in _RANKED}
        self._flat = not extra.get("interface_v1", 0)  # which calls SGLang will make for K and V
        self._replicated = bool(storage_config.is_mla_model)
        self._pools: dict[str, PoolPages] = {}
        self._registered: set[int] = set()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool of K and V; what its pages are goes into every key from now on.

        Raises:
            StorageError: See `register_mem_host_pool_v2`.
        """
        self.register_mem_host_pool_v2(mem_pool_host, _KV)
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Take one pool of a group by its name; a group of pools as the pool of K and V is its first.

        Raises:
            StorageError: The pool does not say where its pages lie, and has no flat form of them.
        """
        name, entries = str(host_pool_name), getattr(host_pool, "entry_map", None)
        pool = host_pool if entries is None else host_pool.anchor_entry.host_pool
        ranked = not self._replicated or name == _STATES or hasattr(pool, "head_num")
        pages = PoolPages(name, pool, self._identity | (self._rank if ranked else {}))
        self._pools[name] = pages
        fresh = [piece for piece in pages.memory() if piece.ctypes.data not in self._registered]
        if isinstance(self._storage, RegistersMemory) and fresh:
            ask(self._storage, "register", fresh)
            self._registered.update(piece.ctypes.data for piece in fresh)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading keys are there."""
        names = self._pool(_KV).keys(keys, flat=self._flat)
        return stored_pages(self._storage, names)

    def exists(self, key: str) -> bool:
        """Whether one key is there."""
        return self.batch_exists([key]) == 1

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Which prefixes can be restored whole, K and V and every other pool of the group by its own policy.

        Args:
            keys: SGLang's page hashes, those of a prefix in order.
            pool_transfers: SGLang's `PoolTransfer`, one a pool beside K and V. `ALL_PAGES` wants every page of the
                prefix, `TRAILING_PAGES` its last `len(transfer.keys)` pages.
            extra_info: Not read: a page hash covers all pages before it.

        Returns:
            SGLang's `PoolTransferResult`: the longest prefix that all pools have, the pages that each pool has by
            itself, and every prefix that can be restored.

        Raises:
            StorageError: A pool that was not registered, a policy that no pool of SGLang 0.5.23 asks for
                (`BLOCK_GROUPS`), or the store does not answer.
        """
        engine = engine_module(_STORAGE, _RELEASE)
        leading = self.batch_exists(keys)
        hits: dict[Any, int] = {engine.PoolName.KV: leading} if leading else {}
        whole = list(range(1, leading + 1))
        for transfer in pool_transfers or []:
            if not whole:
                break
            names = self._pool(transfer.name).keys(keys[:leading])
            if transfer.hit_policy == engine.PoolHitPolicy.ALL_PAGES:
                mine = set(range(1, stored_pages(self._storage, names) + 1))
            elif transfer.hit_policy == engine.PoolHitPolicy.TRAILING_PAGES:
                mine = _trailing(self._storage, names, max(1, len(transfer.keys or ())))
            else:
                policy = f"{transfer.hit_policy.value} of pool {transfer.name}"
                raise refused("hit_policy", policy, "all_pages or trailing_pages", "leave this pool out of the storage")
            if mine:
                hits[transfer.name] = max(mine)
            whole = [length for length in whole if length in mine]
        return engine.PoolTransferResult(whole[-1] if whole else 0, hits, whole)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Fill host pages in place; the first miss, or damaged page, ends.

        Args:
            keys: SGLang's page hashes.
            host_indices: Slots of the host pages. Shape: [len(keys) * page_size]; whole pages.
            extra_info: Not read: a page hash covers all pages before it.

        Raises:
            StorageError: Slots that are no whole pages, or the store does not answer.
        """
        return _leading(self._pool(_KV).read(self._storage, keys, host_indices), keys)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Keep host pages; arguments and errors as for `batch_get_v1`."""
        return _leading(self._pool(_KV).write(self._storage, keys, host_indices), keys)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Fill host pages of several pools in place; in each pool the first miss, or damaged page, ends.

        Args:
            transfers: SGLang's `PoolTransfer`, each with the page hashes and the slots of its own host pool.
            extra_info: Not read: a page hash covers all pages before it.

        Raises:
            StorageError: A pool that was not registered, slots that are no whole pages, or the store does not answer.
        """
        return {
            one.name: _leading(self._pool(one.name).read(self._storage, one.keys or (), one.host_indices), one.keys)
            for one in transfers
        }

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Keep host pages of several pools; arguments and errors as for `batch_get_v2`."""
        return {
            one.name: _leading(self._pool(one.name).write(self._storage, one.keys or (), one.host_indices), one.keys)
            for one in transfers
        }

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill flat tensors, one a page, and return those that are whole, `None` for the rest."""
        pages: list[Pieces] = [[flat(target)] for target in target_locations]
        read = read_leading(self._storage, self._pool(_KV).keys(keys, flat=True), pages)
        return [target if number < read else None for number, target in enumerate(target_locations)]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Fill one flat tensor; `None` if the page is not there."""
        return self.batch_get([key], [target_location])[0]

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Keep flat tensors, one a page; whether all are kept."""
        names = self._pool(_KV).keys(keys, flat=True)
        return write_pages(self._storage, names, [[flat(value)] for value in values]) == len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Keep one flat tensor."""
        return self.batch_set([key], [value])

    def close(self) -> None:
        """Let the store go; SGLang calls it when the backend is detached."""
        if isinstance(self._storage, Closes):
            ask(self._storage, "close")

    def _pool(self, name: str) -> PoolPages:
        found = self._pools.get(str(name))
        if found is None:
            call = "register_mem_pool_host" if name == _KV else "register_mem_host_pool_v2"
            known = f"a registered host pool, one of {sorted(self._pools)}"
            raise refused("host pool", str(name), known, f"call {call} first")
        return found


def _trailing(storage: PageStorage, names: Sequence[str], count: int) -> set[int]:
    """Lengths of prefixes whose last `count` pages are there."""
    there = [stored_pages(storage, [name]) == 1 for name in names]
    return {end for end in range(1, len(there) + 1) if all(there[max(0, end - count) : end])}


def _leading(count: int, keys: Sequence[str] | None) -> list[bool]:
    return [number < count for number in range(len(keys or ()))]


@functools.cache
def storage_class() -> type[Any]:
    """`HostPages` as a subclass of SGLang's `HiCacheStorage`, which its factory asks for.

    Raises:
        LibraryUnavailable: SGLang 0.5.23 is not installed.
    """
    base = engine_module(_STORAGE, _RELEASE).HiCacheStorage
    return type("KvPoolStorage", (HostPages, base), {"__module__": __name__, "__doc__": HostPages.__doc__})
