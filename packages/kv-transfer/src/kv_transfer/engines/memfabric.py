"""The `memfabric` engine: MemFabric's transfer engine between Ascend NPUs, over SDMA or RDMA.

Written from the wheel's signatures and headers (memfabric_hybrid 1.3.0); it has never run on hardware: without the
Ascend driver the library does not initialise. Guards what the library does not: memory that is registered before the
start is accepted and forgotten, and the port is known only afterwards.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

from kv_transfer.arguments import check_text, check_whole, told
from kv_transfer.engine import EngineCapabilities
from kv_transfer.engines.blocking import BlockingEngine, check_workers
from kv_transfer.errors import EngineError, EngineUnavailable

__all__ = ["MemfabricEngine", "describe_code"]

_CODES = {
    -1: "the library failed; its log says why",
    -2000: "an argument is invalid, such as the store's URL",
    -2001: "out of memory",
    -2002: "no resources",
    -2003: "it is not started",
    -2004: "it did not end in time",
    -2005: "it was called twice",
    -2006: "it is there already",
    -2007: "it is not there",
    -2008: "it is not initialised",
    -2009: "it is in use",
    -2012: "a part of the batch failed",
    -2014: "the peer is not connected",
    -2015: "a buffer is too small",
}

_DEVICE_PAGE = 2 << 20

Transport = Literal["sdma", "host_rdma", "device_rdma", "device_urma", "device_uboe"]


def describe_code(code: int) -> str:
    """What a return code of the library means, in words."""
    return f"{_CODES.get(code, 'a code without a known meaning')} (memfabric code {code})"


class MemfabricEngine(BlockingEngine):
    """Moves bytes with MemFabric, one blocking call at a time on threads of its own.

    Args:
        store_url: The deployment's configuration store, such as tcp://10.0.0.1:21234.
        role: Side of this process.
        device_id: Its NPU.
        transport: How bytes move.
        hostname: Name or address under which peers reach this process.
        workers: Batches on their way at once.
        bind_device: Called once in each worker before its first batch, for example `lambda: torch.npu.set_device(3)`.
        max_entries_per_batch: Longest batch; a batch cannot be interrupted, so it bounds how long `cancel` takes.
        max_block_bytes: Longest block, likewise.
        max_regions: Regions that the devices take; None leaves the refusal to the library, with its code.
        max_region_bytes: Longest region, likewise.

    Raises:
        EngineUnavailable: The wheel is missing or cannot be loaded.
        EngineError: The transport is unknown, or the library did not start; its code is in the text.
    """

    def __init__(
        self,
        *,
        store_url: str,
        role: Literal["Prefill", "Decode"],
        device_id: int,
        transport: Transport = "sdma",
        hostname: str = "127.0.0.1",
        workers: int = 1,
        bind_device: Callable[[], object] | None = None,
        max_entries_per_batch: int = 256,
        max_block_bytes: int | None = 16 << 20,
        max_regions: int | None = None,
        max_region_bytes: int | None = None,
    ) -> None:
        """Starts the library and its worker threads."""
        check_workers(workers, bind_device)
        check_text("store_url", store_url)
        check_text("hostname", hostname)
        check_text("transport", transport)
        check_whole("device_id", device_id, 2**31 - 1)
        capabilities = EngineCapabilities(
            max_entries_per_batch=max_entries_per_batch,
            max_block_bytes=max_block_bytes,
            cross_process=True,
            region_alignment=_DEVICE_PAGE,
            max_regions=max_regions,
            max_region_bytes=max_region_bytes,
            settles_itself=True,
        )
        if not isinstance(role, str) or role not in ("Prefill", "Decode"):
            raise EngineError(
                f"role: expected 'Prefill' or 'Decode', got {told(role)}",
                local=role,
                consequence="the library would fail without a reason",
            )
        kind = _load()
        operation = getattr(kind.TransDataOpType, transport.upper(), None)
        if operation is None:
            raise EngineError(
                f"transport: {transport!r} is none of the installed memfabric_hybrid",
                local=transport,
                consequence="no bytes could be moved",
                remedy="use 'sdma' within a node's NPUs, or 'device_rdma'",
            )
        library = kind()
        code = library.initialize(store_url, f"{hostname}:{library.get_rpc_port()}", role, device_id, operation)
        if code != 0:
            raise EngineError(
                f"memfabric did not start for {role} on device {device_id}: {describe_code(code)}",
                code=code,
                local=store_url,
                remedy="check the Ascend driver, and that the configuration store runs at this URL",
            )
        port = library.get_rpc_port()  # 0 before the start
        if port <= 0:
            library.unInitialize()
            raise EngineError(
                f"memfabric has no port after its start: {port}", local=port, consequence="no peer could reach it"
            )
        self._library = library
        super().__init__(
            "memfabric",
            f"{hostname}:{port}",
            capabilities,
            workers,
            bind_device,
        )

    def _register(self, regions: Sequence[tuple[int, int]]) -> int:
        addresses, sizes = [address for address, _ in regions], [size for _, size in regions]
        return int(self._library.batch_register_memory(addresses, sizes))

    def _unregister(self, address: int) -> int:
        return int(self._library.unregister_memory(address))

    def _write(self, peer: str, source: list[int], destination: list[int], nbytes: list[int]) -> int:
        return int(self._library.batch_transfer_sync_write(peer, source, destination, nbytes))

    def _shut_down(self) -> None:
        self._library.destroy()
        self._library.unInitialize()

    def _describe(self, code: int) -> str:
        return describe_code(code)


def _load() -> Any:
    try:
        return importlib.import_module("memfabric_hybrid").TransferEngine
    except (ImportError, OSError) as error:
        raise EngineUnavailable(
            f"the memfabric engine cannot load its library: {error}",
            consequence="the engine cannot be used",
            remedy="pip install memfabric_hybrid, on a machine with the Ascend driver",
        ) from error
