"""Owns K/V offloading of vLLM 0.23 for NPUs: vLLM's tiers and managers, with our copies of vLLM-Ascend's caches.

vLLM-Ascend 0.23 brings an offloading spec of its own that imports modules which vLLM 0.23 no longer has, and vLLM's
refuses every platform but CUDA and XPU; besides, its connector wants one tensor a layer where vLLM-Ascend keeps a tuple
(K and V, or latent and rope). Configured as `kv_connector="NpuOffloadingConnector"` with
`kv_connector_module_path="kv_pool.integrations.vllm_npu"` and, among the extra config, `spec_name="NpuTieringSpec"`,
`spec_module_path="kv_pool.integrations.vllm_npu"`, `cpu_bytes_to_use` and `secondary_tiers` (see `vllm`). Blocks go
through page-locked memory in one copy a tensor. Importing this imports nothing of vLLM.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from kv_pool.errors import LayoutError, StorageError
from kv_pool.hicache.streams import create_streams
from kv_pool.integrations._engine import engine_module

if TYPE_CHECKING:
    from kv_pool.hicache.streams import Mark
    from kv_pool.tables import IntArray

__all__ = ["BlockCopies", "NpuCaches", "NpuHandlers", "connector_class", "handler_class", "spec_class"]

_RELEASE = "vLLM 0.23"
_OFFLOAD = "vllm.v1.kv_offload"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
_Direction = Literal["load", "backup"]


@dataclass
class _Job:
    """Copies under way: when the device is done, and what then remains to be done on the host."""

    number: int
    mark: Mark
    begun: float
    nbytes: int
    ends: list[Callable[[], None]]

    def finish(self) -> None:
        """What remains on the host, once."""
        while self.ends:
            self.ends.pop()()


@dataclass(frozen=True)
class _Blocks:
    """Where the blocks of one group lie, as vLLM counts: device blocks, and for each a host block and a part of it."""

    device: IntArray
    host: IntArray
    part: IntArray


class BlockCopies:
    """Copies of blocks between NPU caches and vLLM's host memory; the calls are those of vLLM's `OffloadingHandler`.

    Copies wait for what was issued to the compute stream before them, and run in their own streams in the order of
    their submission, each direction by itself. A block that was stored may be overwritten when `wait` returns or its
    job is reported; a block that is loaded may be read when its job is reported.

    Args:
        caches: vLLM's `CanonicalKVCaches`: tensors of bytes, [blocks, bytes of a block], and which a group reads.
        host: Host memory of each tensor. Shape: [host blocks, factor * bytes of a block]; rows may be apart.
        factor: Device blocks in a host block.
    """

    def __init__(self, caches: Any, host: Sequence[torch.Tensor], factor: int) -> None:
        self._groups = [[(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in caches.group_data_refs]
        self._device = [held.tensor for held in caches.tensors]
        self._host = [
            np.lib.stride_tricks.as_strided(
                rows.numpy(), (len(rows), factor, rows.shape[1] // factor), (rows.stride(0), rows.shape[1] // factor, 1)
            )
            for rows in host
        ]
        self._factor = factor
        self._streams = create_streams(self._device[0].device)
        self._jobs: dict[_Direction, deque[_Job]] = {"load": deque(), "backup": deque()}

    def transfer_async(self, job_id: int, transfer_spec: Any) -> bool:
        """Issue the copies of a job; does not wait for the device.

        Raises:
            StorageError: Block lists that do not match, or no transfer between device and host.
        """
        source, target = transfer_spec
        lane: _Direction = "backup" if (source.medium(), target.medium()) == ("GPU", "CPU") else "load"
        if lane == "load" and (source.medium(), target.medium()) != ("CPU", "GPU"):
            raise _refused("transfer_spec", (source.medium(), target.medium()), "GPU to CPU, or back")
        begun = time.monotonic()
        groups = self._blocks(*((source, target) if lane == "backup" else (target, source)))
        self._streams.wait(lane, self._streams.mark("compute"))
        ends: list[Callable[[], None]] = []
        nbytes = 0
        with self._streams.on(lane):
            for blocks, tensors in zip(groups, self._groups, strict=True):
                for tensor, size in tensors if blocks.device.size else ():
                    nbytes += size * blocks.device.size
                    if lane == "backup":
                        ends.append(self._store(tensor, size, blocks))
                    else:
                        self._load(tensor, size, blocks)
        self._jobs[lane].append(_Job(job_id, self._streams.mark(lane), begun, nbytes, ends))
        return True

    def get_finished(self) -> list[Any]:
        """Return vLLM's `TransferResult` of the jobs that have ended since the last call."""
        result = engine_module(f"{_OFFLOAD}.worker.worker", _RELEASE).TransferResult
        ended = []
        for lane, jobs in self._jobs.items():
            kind = ("GPU", "CPU") if lane == "backup" else ("CPU", "GPU")
            while jobs and jobs[0].mark.reached():
                job = jobs.popleft()
                job.finish()
                took = time.monotonic() - job.begun
                ended.append(result(job.number, True, job.nbytes, took, kind))
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Block until the jobs are done; they are reported by `get_finished` all the same."""
        for jobs in self._jobs.values():
            for job in jobs:
                if job.number in job_ids:
                    job.mark.wait_on_host()
                    job.finish()

    def shutdown(self) -> None:
        """Wait for what is under way and let the host memory go."""
        self.wait({job.number for jobs in self._jobs.values() for job in jobs})
        for jobs in self._jobs.values():
            jobs.clear()
        self._host.clear()

    def _store(self, tensor: int, size: int, blocks: _Blocks) -> Callable[[], None]:
        device, host = self._device[tensor], self._host[tensor]
        rows = device.index_select(0, torch.from_numpy(blocks.device).to(device.device))[:, :size]
        staged = _staging(len(rows), size, device)
        staged.copy_(rows, non_blocking=True)

        def keep() -> None:
            host[blocks.host, blocks.part, :size] = staged.numpy()

        return keep

    def _load(self, tensor: int, size: int, blocks: _Blocks) -> None:
        device, host = self._device[tensor], self._host[tensor]
        staged = _staging(len(blocks.device), size, device)
        staged.numpy()[...] = host[blocks.host, blocks.part, :size]
        rows = staged.to(device.device, non_blocking=True)
        device[:, :size].index_copy_(0, torch.from_numpy(blocks.device).to(device.device), rows)

    def _blocks(self, device: Any, host: Any) -> list[_Blocks]:
        """Pair device blocks with parts of host blocks, group by group; a group may begin inside a host block."""
        found, begin, first = [], 0, 0
        device_ids, host_ids = np.asarray(device.block_ids), np.asarray(host.block_ids)
        if len(device.group_sizes) != len(self._groups):
            raise _refused("group_sizes", len(device.group_sizes), f"{len(self._groups)} groups")
        for size, index in zip(device.group_sizes, device.block_indices, strict=True):
            places = index % self._factor + np.arange(size)
            count = -(-(int(places[-1]) + 1) // self._factor) if size else 0
            mine = host_ids[first : first + count]
            if len(mine) != count:
                raise _refused("block_ids", f"{len(host_ids)} host blocks", "one for all parts of each group")
            found.append(_Blocks(device_ids[begin : begin + size], mine[places // self._factor], places % self._factor))
            begin, first = begin + size, first + count
        if (begin, first) != (len(device_ids), len(host_ids)):
            raise _refused("block_ids", (len(device_ids), len(host_ids)), f"{begin} device and {first} host blocks")
        return found


class NpuHandlers:
    """What a spec of vLLM's tiers needs to serve NPUs; mixed into `TieringOffloadingSpec`."""

    _copies: Any = None

    def get_handlers(self: Any, kv_caches: Any) -> Iterator[tuple[type[Any], type[Any], Any]]:
        """One handler for both directions, over the memory that all ranks of this vLLM share."""
        base = engine_module(f"{_OFFLOAD}.base", _RELEASE)
        common = engine_module(f"{_OFFLOAD}.cpu.common", _RELEASE)
        region = engine_module(f"{_OFFLOAD}.cpu.shared_offload_region", _RELEASE)
        if self._copies is None:
            self._region = region.SharedOffloadRegion(
                instance_id=self.vllm_config.instance_id,
                num_blocks=self.num_blocks,
                rank=self.vllm_config.parallel_config.rank,
                kv_bytes_per_block=self.kv_bytes_per_offloaded_block,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            widths = [held.page_size_bytes * self.block_size_factor for held in kv_caches.tensors]
            host = [self._region.create_next_view(width) for width in widths]
            self._copies = handler_class()(kv_caches, host, self.block_size_factor)
        yield base.GPULoadStoreSpec, common.CPULoadStoreSpec, self._copies
        yield common.CPULoadStoreSpec, base.GPULoadStoreSpec, self._copies


class NpuCaches:
    """What vLLM's connector needs to take vLLM-Ascend's caches; mixed into `OffloadingConnector`."""

    prefer_cross_layer_blocks = False

    def register_kv_caches(self: Any, kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        """Take the caches of this rank, a tensor or several a layer, each with blocks as its first axis.

        Raises:
            LayoutError: A cache that is not contiguous, or does not hold whole blocks.
        """
        worker = self.connector_worker
        config = worker.spec.kv_cache_config
        worker._register_handlers(_canonical(kv_caches, config.kv_cache_groups, config.num_blocks))


def _canonical(caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], groups: Any, blocks: int) -> Any:
    base = engine_module(f"{_OFFLOAD}.base", _RELEASE)
    known: dict[int, int] = {}  # address of a tensor -> its place; layers may share one
    tensors: list[Any] = []
    refs: list[list[Any]] = []
    for group in groups:
        refs.append([])
        for name in group.layer_names:
            held = caches[name]
            for part in [held] if isinstance(held, torch.Tensor) else held:
                rows = _rows(name, part, blocks)
                if rows.data_ptr() not in known:
                    known[rows.data_ptr()] = len(tensors)
                    tensors.append(base.CanonicalKVCacheTensor(rows, rows.shape[1]))
                refs[-1].append(base.CanonicalKVCacheRef(known[rows.data_ptr()], rows.shape[1]))
    return base.CanonicalKVCaches(tensors, refs)


def _rows(name: str, cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """A cache as bytes. Shape: [blocks, bytes of a block]; dtype int8."""
    if not cache.is_contiguous() or cache.nbytes % blocks or not cache.numel():
        raise LayoutError(
            f"kv_caches[{name!r}]",
            given=f"shape {tuple(cache.shape)}, strides {cache.stride()}",
            expected=f"contiguous memory of {blocks} blocks",
            consequence="blocks would be copied from other places than attention reads",
            remedy="allocate the cache with its blocks as the first axis",
        )
    return cache.view(torch.int8).view(blocks, -1)


def _staging(rows: int, size: int, device: torch.Tensor) -> torch.Tensor:
    return torch.empty((rows, size), dtype=torch.int8, pin_memory=device.device.type != "cpu")


def _refused(argument: str, given: object, expected: str) -> StorageError:
    return StorageError(
        argument,
        given=given,
        expected=expected,
        consequence="blocks would be copied to other places than vLLM believes",
        remedy=f"use {_RELEASE}, whose transfers this handler knows",
    )


@functools.cache
def handler_class() -> type[Any]:
    """`BlockCopies` as a subclass of vLLM's `OffloadingHandler`.

    Raises:
        LibraryUnavailable: vLLM 0.23 is not installed.
    """
    base = engine_module(f"{_OFFLOAD}.worker.worker", _RELEASE).OffloadingHandler
    return type("NpuBlockCopies", (BlockCopies, base), {"__module__": __name__, "__doc__": BlockCopies.__doc__})


@functools.cache
def spec_class() -> type[Any]:
    """Return vLLM's `TieringOffloadingSpec` with copies for NPUs.

    Raises:
        LibraryUnavailable: vLLM 0.23 is not installed.
    """
    base = engine_module(f"{_OFFLOAD}.tiering.spec", _RELEASE).TieringOffloadingSpec
    return type("NpuTieringSpec", (NpuHandlers, base), {"__module__": __name__, "__doc__": NpuHandlers.__doc__})


@functools.cache
def connector_class() -> type[Any]:
    """Return vLLM's `OffloadingConnector` for vLLM-Ascend's caches.

    Raises:
        LibraryUnavailable: vLLM 0.23 is not installed.
    """
    base = engine_module(_CONNECTOR, _RELEASE).OffloadingConnector
    return type("NpuOffloadingConnector", (NpuCaches, base), {"__module__": __name__, "__doc__": NpuCaches.__doc__})


_MADE = {"NpuTieringSpec": spec_class, "NpuOffloadingConnector": connector_class}


def __getattr__(name: str) -> Any:
    if name in _MADE:
        return _MADE[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
