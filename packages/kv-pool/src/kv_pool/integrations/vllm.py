"""Owns what vLLM 0.23 plugs in: a secondary tier of its K/V offloading over any `PageStorage`, by its block hashes.

Registered once with `register()`, then configured as `{"type": "kv_pool", "storage": "files", "options": {…}}` among
the `secondary_tiers` of `TieringOffloadingSpec`. The tier reads and writes vLLM's own host memory, so it serves every
device that vLLM offloads from (on NPUs by `vllm_npu`). `KvPoolTier` is made when it is asked for, since its base is
vLLM's; importing this imports nothing of vLLM. Block hashes of two processes are equal only if both run with one
PYTHONHASHSEED: without it vLLM draws the first block's parent at random, and the tier refuses.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from kv_pool._arguments import check_kind
from kv_pool.errors import StorageDamaged, StorageError, UnrepeatableKeys
from kv_pool.hicache.storage import Closes, RegistersMemory, create_storage
from kv_pool.hicache.storage._calls import ask, stored_pages, write_pages
from kv_pool.integrations._engine import engine_module, stored_key
from kv_pool.tables import whole_number

if TYPE_CHECKING:
    from kv_pool.hicache.storage import PageStorage
    from kv_pool.hicache.storage.protocols import Pieces

__all__ = ["BlockStore", "register", "tier_class"]

SCHEMA_VERSION = 2
TIER = "kv_pool"
_RELEASE = "vLLM 0.23"


class BlockStore:
    """Offloaded blocks in a store; the calls are those of vLLM's `SecondaryTierManager`.

    Args:
        offloading_spec: vLLM's spec; model, dtype, groups and parallel sizes of its configuration go into every key.
        primary_kv_view: Host memory of the primary tier. Shape: [blocks, bytes of a block].
        tier_type: Name under which the tier is registered.
        storage: Name of a store, see `create_storage`.
        options: What its constructor takes.
        threads: Threads that read and write.
        salt: Kept apart from other tiers of the same model.
        shared: Whether other processes, later ones among them, are to find the blocks; `False` is for a store that
            ends with this process.

    Raises:
        StorageError: The store does not exist or cannot be used, the memory is not as above, or an argument is of
            another kind.
        UnrepeatableKeys: The store is shared, and PYTHONHASHSEED is not set.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        storage: str = "files",
        options: dict[str, Any] | None = None,
        threads: int = 2,
        salt: str = "",
        shared: bool = True,
    ) -> None:
        self.tier_type = tier_type
        if check_kind("shared", shared, bool, StorageError) and "PYTHONHASHSEED" not in os.environ:
            raise UnrepeatableKeys(
                "PYTHONHASHSEED",
                given="not set",
                expected="one value in every process that shares the store",
                consequence="vLLM begins every chain of hashes with random bytes, drawn anew in each process, so that "
                "no block would ever be found again while the store fills up",
                remedy="set PYTHONHASHSEED before vLLM starts, or pass shared=false for a store of this process alone",
            )
        check_kind("storage", storage, str, StorageError)
        options = {} if options is None else check_kind("options", options, dict, StorageError)
        check_kind("salt", salt, str, StorageError)
        consequence = "nobody would read and write"
        threads = whole_number("threads", threads, least=1, most=1024, error=StorageError, consequence=consequence)
        check_kind("primary_kv_view", primary_kv_view, memoryview, StorageError)
        if primary_kv_view.ndim != 2 or not primary_kv_view.c_contiguous or primary_kv_view.readonly:
            raise StorageError(
                "primary_kv_view",
                given=f"shape {primary_kv_view.shape}, read-only {primary_kv_view.readonly}",
                expected="writable, contiguous memory of [blocks, bytes of a block]",
                consequence="blocks would be read and written at wrong places",
                remedy="pass the view that vLLM's primary tier gives",
            )
        self._blocks = np.asarray(primary_kv_view).view(np.uint8)
        self._identity = _identity(offloading_spec, self._blocks.shape[1], salt)
        self._storage: PageStorage = create_storage(storage, **options)
        if isinstance(self._storage, RegistersMemory):
            ask(self._storage, "register", [self._blocks.reshape(-1)])
        self._threads = ThreadPoolExecutor(threads, "kv-pool-vllm")
        self._jobs: dict[int, Future[bool]] = {}
        self._storing: dict[int, frozenset[bytes]] = {}

    def lookup(self, key: bytes, req_context: Any) -> bool | None:
        """Whether a block is there; `None` while it is being stored."""
        if stored_pages(self._storage, self._keys([key])) == 1:
            return True
        return None if any(key in keys for keys in self._storing.values()) else False

    def submit_store(self, job_metadata: Any) -> None:
        """Start to store blocks of the primary tier; does not wait."""
        keys = list(job_metadata.keys)
        self._storing[job_metadata.job_id] = frozenset(keys)
        self._submit(job_metadata.job_id, self._store, keys, job_metadata.block_ids)

    def submit_load(self, job_metadata: Any) -> None:
        """Start to load blocks into the primary tier; does not wait."""
        self._submit(job_metadata.job_id, self._load, list(job_metadata.keys), job_metadata.block_ids)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Jobs that have ended since the last call; one that did not move all of its blocks has failed."""
        result = engine_module("vllm.v1.kv_offload.tiering.base", _RELEASE).JobResult
        ended = [job for job, work in self._jobs.items() if work.done()]
        for job in ended:
            self._storing.pop(job, None)
        return [result(job_id=job, success=self._succeeded(self._jobs.pop(job))) for job in ended]

    def on_new_request(self, req_context: Any) -> Any:
        """New blocks of a request are offered as they come."""
        return engine_module("vllm.v1.kv_offload.base", _RELEASE).RequestOffloadingContext()

    def shutdown(self) -> None:
        """Wait for what is under way, end the threads, and let the primary tier's memory go."""
        self._threads.shutdown(wait=True)
        if isinstance(self._storage, Closes):
            ask(self._storage, "close")
        self._jobs.clear()
        self._blocks = self._blocks[:0].copy()

    def _keys(self, keys: Collection[bytes]) -> list[str]:
        return [stored_key(self._identity, key) for key in keys]

    def _submit(self, job: int, work: Any, keys: Sequence[bytes], block_ids: Any) -> None:
        pieces = [[self._blocks[int(block)]] for block in block_ids]
        self._jobs[job] = self._threads.submit(work, self._keys(keys), pieces)

    def _store(self, keys: list[str], pieces: list[Pieces]) -> bool:
        return write_pages(self._storage, keys, pieces) == len(keys)

    def _load(self, keys: list[str], pieces: list[Pieces]) -> bool:
        return bool(ask(self._storage, "read", keys, pieces) == len(keys))

    @staticmethod
    def _succeeded(work: Future[bool]) -> bool:
        """A store that does not answer, and a damaged block, end in a failed job: vLLM computes the tokens again."""
        try:
            return work.result()
        except (StorageDamaged, StorageError):
            return False


def _identity(spec: Any, block_bytes: int, salt: str) -> dict[str, Any]:
    config, parallel = spec.vllm_config, spec.vllm_config.parallel_config
    groups = [
        [group.kv_cache_spec.block_size, type(group.kv_cache_spec).__name__, list(group.layer_names)]
        for group in spec.kv_cache_config.kv_cache_groups
    ]
    return {
        "schema": SCHEMA_VERSION,
        "model": config.model_config.model,
        "dtype": str(config.cache_config.cache_dtype),
        "model_dtype": str(config.model_config.dtype),
        "hash": str(config.cache_config.prefix_caching_hash_algo),
        "hash_block_size": spec.hash_block_size,
        "block_size_factor": spec.block_size_factor,
        "block_bytes": block_bytes,
        "groups": groups,
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "pcp": parallel.prefill_context_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
        "rank": parallel.rank,
        "salt": salt,
    }


@functools.cache
def tier_class() -> type[Any]:
    """`BlockStore` as a subclass of vLLM's `SecondaryTierManager`.

    Raises:
        LibraryUnavailable: vLLM 0.23 is not installed.
    """
    base = engine_module("vllm.v1.kv_offload.tiering.base", _RELEASE).SecondaryTierManager
    return type("KvPoolTier", (BlockStore, base), {"__module__": __name__, "__doc__": BlockStore.__doc__})


def register() -> None:
    """Make the tier `kv_pool` known to vLLM's factory, once a process.

    Raises:
        LibraryUnavailable: vLLM 0.23 is not installed.
        ValueError: vLLM's own, when the name is taken.
    """
    factory = engine_module("vllm.v1.kv_offload.tiering.factory", _RELEASE).SecondaryTierFactory
    factory.register_tier(TIER, __name__, "KvPoolTier")


def __getattr__(name: str) -> Any:
    if name == "KvPoolTier":
        return tier_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
