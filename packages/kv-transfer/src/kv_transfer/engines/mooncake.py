"""The `mooncake` engine: Mooncake's transfer engine over TCP, between processes and hosts.

Guards what the library does not: calls before it is initialised crash it, unregistered local memory is accepted, the
requested port is ignored, time-outs come from the environment, a blocking call cannot be interrupted, and it listens on
all interfaces whatever host name it is given (see `kv_transfer.isolation`). It does not authenticate peers: whoever
reaches its port can write registered memory.
"""

from __future__ import annotations

import atexit
import importlib
import math
import os
import queue
import threading
import weakref
from typing import Literal, Protocol, cast

from kv_transfer.engine import DONE, Blocks, EngineCapabilities, TransferHandle, TransferState, TransferStatus
from kv_transfer.errors import EngineError, EngineUnavailable
from kv_transfer.regions import RegionTable

__all__ = ["MooncakeEngine", "describe_code"]

_CODES = {
    -1: "the peer refused the write (address not registered there), cannot be reached, or did not answer in time",
    -2: "too many requests",
    -3: "the address is not registered",
    -4: "the batch is still in use",
    -6: "no such device",
    -7: "the address range overlaps a registered one",
    -101: "the host name cannot be resolved",
    -102: "the peer's socket cannot be reached",
    -103: "malformed answer of the peer",
    -104: "the peer rejected the connection",
    -200: "no metadata of the peer",
    -201: "the peer's endpoint is broken",
    -202: "the library's device context is broken",
    -302: "out of memory",
}
_TIMEOUT_VARIABLES = ("MC_TRANSFER_TIMEOUT", "MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")


_OPEN: weakref.WeakSet[MooncakeEngine] = weakref.WeakSet()


@atexit.register
def _close_open_engines() -> None:
    """The library's own threads abort the process when they are still there at its very end."""
    for engine in list(_OPEN):
        engine.close()


class _Library(Protocol):
    """The calls of `mooncake.engine.TransferEngine` that are used here; all codes are 0 or negative."""

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, /) -> int: ...

    def get_rpc_port(self) -> int: ...

    def register_memory(self, buffer_addr: int, capacity: int) -> int: ...

    def unregister_memory(self, addr: int, /) -> int: ...

    def batch_transfer_sync_write(
        self, target_hostname: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int: ...


class _Handle(TransferHandle):
    __slots__ = ("batch", "cancelled")

    def __init__(self, peer: str, batch: Blocks) -> None:
        super().__init__(peer, len(batch.nbytes), int(batch.nbytes.sum()))
        self.batch = batch
        self.cancelled = threading.Event()


def describe_code(code: int) -> str:
    """What a return code of the library means, in words."""
    return f"{_CODES.get(code, 'a code without a known meaning')} (mooncake code {code})"


class MooncakeEngine:
    """Moves bytes with Mooncake, one blocking call at a time on threads of its own.

    Args:
        hostname: Name or address under which peers reach this process. It does not restrict where the library listens.
        protocol: Only "tcp": the library accepts any text without an error, and nothing else was ever run here.
        transfer_timeout: Seconds after which the library gives up on a peer that does not answer; whole seconds,
            rounded up. Set as MC_TRANSFER_TIMEOUT, MC_TCP_PROGRESS_TIMEOUT_SEC and MC_TCP_STATUS_TIMEOUT_SEC in this
            process's environment before the library starts, so the engines of one process share it. None leaves the
            environment alone.
        workers: Batches on their way at once.
        log_level: What the library writes to standard error, unless MC_LOG_LEVEL says otherwise already.
        max_entries_per_batch: Longest batch; a batch cannot be interrupted, so it bounds how long `cancel` takes.
        max_block_bytes: Longest block, likewise.

    Raises:
        EngineUnavailable: The wheel or one of its system libraries is missing.
        EngineError: The library did not start; its code is in the text.
    """

    def __init__(
        self,
        *,
        hostname: str = "127.0.0.1",
        protocol: str = "tcp",
        transfer_timeout: float | None = 10.0,
        workers: int = 1,
        log_level: Literal["INFO", "WARNING", "ERROR"] = "ERROR",
        max_entries_per_batch: int = 256,
        max_block_bytes: int | None = 16 << 20,
    ) -> None:
        """Starts the library and its worker threads."""
        if protocol != "tcp":
            raise EngineError(
                f"protocol: {protocol!r} is not supported",
                local=protocol,
                consequence="the library would accept the name silently and might use another transport",
                remedy="use 'tcp'",
            )
        if workers < 1:
            raise ValueError(f"workers: expected at least 1, got {workers}")
        if transfer_timeout is not None:
            if not (math.isfinite(transfer_timeout) and transfer_timeout > 0):
                raise ValueError(f"transfer_timeout: expected a positive number of seconds, got {transfer_timeout!r}")
            for variable in _TIMEOUT_VARIABLES:
                os.environ[variable] = str(math.ceil(transfer_timeout))
        os.environ.setdefault("MC_LOG_LEVEL", log_level)
        library = _load()
        code = library.initialize(hostname, "P2PHANDSHAKE", protocol, "")
        if code != 0:
            raise EngineError(
                f"mooncake did not start on {hostname!r}: {describe_code(code)}",
                code=code,
                local=hostname,
                remedy="check the host name, and that ports of MC_MIN_RPC_PORT to MC_MAX_RPC_PORT are free",
            )
        self._library = library
        self._session = f"{hostname}:{library.get_rpc_port()}"
        self._capabilities = EngineCapabilities(
            max_entries_per_batch=max_entries_per_batch, max_block_bytes=max_block_bytes, cross_process=True
        )
        self._regions = RegionTable()
        self._queue: queue.SimpleQueue[_Handle | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._workers = tuple(
            threading.Thread(target=self._work, name=f"kv-transfer-mooncake-{index}", daemon=True)
            for index in range(workers)
        )
        for worker in self._workers:
            worker.start()
        _OPEN.add(self)

    @property
    def name(self) -> str:
        """Always "mooncake"."""
        return "mooncake"

    @property
    def session(self) -> str:
        """Host and the port that the library really has."""
        return self._session

    @property
    def capabilities(self) -> EngineCapabilities:
        """As given to the constructor."""
        return self._capabilities

    def register(self, address: int, nbytes: int) -> None:
        """See `TransferEngine.register`."""
        with self._regions.lock:
            self._refuse_closed()
            if not self._regions.add(address, nbytes):
                return
            code = self._library.register_memory(address, nbytes)
            if code != 0:
                self._regions.remove(address)
                raise EngineError(
                    f"mooncake cannot register {nbytes} bytes at {address:#x}: {describe_code(code)}",
                    code=code,
                    local=(address, nbytes),
                    consequence="the range stays closed",
                )

    def unregister(self, address: int) -> None:
        """See `TransferEngine.unregister`."""
        with self._regions.lock:
            if self._closed:
                return
            if self._regions.remove(address):
                code = self._library.unregister_memory(address)
                if code != 0:
                    raise EngineError(
                        f"mooncake cannot unregister {address:#x}: {describe_code(code)}",
                        code=code,
                        local=address,
                        consequence="peers may still be able to write there",
                        remedy="close the engine before the memory is freed",
                    )

    def submit(self, peer: str, batch: Blocks) -> TransferHandle:
        """See `TransferEngine.submit`."""
        self._refuse_closed()
        limit = self._capabilities.max_entries_per_batch
        if limit is not None and len(batch.nbytes) > limit:
            raise EngineError(
                f"batch of {len(batch.nbytes)} blocks, the engine takes {limit}",
                local=len(batch.nbytes),
                remedy="lower the plan with this engine's capabilities",
            )
        self._regions.check(batch.source, batch.nbytes, "source")
        handle = _Handle(peer, batch)
        with self._lock:
            self._refuse_closed()
            self._queue.put(handle)
        return handle

    def poll(self, handle: TransferHandle) -> TransferStatus:
        """See `TransferEngine.poll`."""
        return handle.status

    def cancel(self, handle: TransferHandle) -> None:
        """Ends a batch that waits. One that runs ends by itself, at the latest after the library's time-out."""
        if isinstance(handle, _Handle):
            handle.cancelled.set()

    def close(self) -> None:
        """Lets running batches end, fails waiting ones, unregisters all memory and stops the threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for _ in self._workers:
            self._queue.put(None)
        for worker in self._workers:
            worker.join()
        with self._regions.lock:
            for address in self._regions.clear():
                self._library.unregister_memory(address)
            del self._library

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError(f"engine {self._session} is closed", local=self._session)

    def _work(self) -> None:
        while (handle := self._queue.get()) is not None:
            if self._closed:
                handle.settle(TransferStatus(TransferState.FAILED, f"engine {self._session} was closed"))
            elif handle.cancelled.is_set():
                handle.settle(TransferStatus(TransferState.FAILED, "cancelled"))
            else:
                handle.settle(self._write(handle))

    def _write(self, handle: _Handle) -> TransferStatus:
        batch = handle.batch
        code = self._library.batch_transfer_sync_write(
            handle.peer, batch.source.tolist(), batch.destination.tolist(), batch.nbytes.tolist()
        )
        if code == 0:
            return DONE
        return TransferStatus(
            TransferState.FAILED,
            f"mooncake write of {handle.blocks} blocks, {handle.nbytes} bytes, to {handle.peer}: {describe_code(code)}",
        )


def _load() -> _Library:
    try:
        module = importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise EngineUnavailable(
            f"the mooncake engine needs the Mooncake wheel: {error}",
            consequence="the engine cannot be used",
            remedy="pip install 'kv-transfer[mooncake]'",
        ) from error
    except ImportError as error:
        remedy = "apt-get install libibverbs1" if "libibverbs" in str(error) else "install the missing system library"
        raise EngineUnavailable(
            f"the mooncake engine cannot load its library: {error}",
            consequence="the engine cannot be used",
            remedy=remedy,
        ) from error
    return cast(_Library, module.TransferEngine())
