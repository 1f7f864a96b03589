"""The `mooncake` engine: Mooncake's transfer engine over TCP, between processes and hosts.

Guards what the library does not: calls before it is initialised crash it, unregistered local memory is accepted, the
requested port is ignored, time-outs come from the environment, a blocking call cannot be interrupted, a peer that comes
back at its old port is not found again, connections of a peer that died are kept until they are used again, and it
listens on all interfaces whatever host name it is given (see `kv_transfer.isolation`). It does not authenticate peers:
whoever reaches its port can write registered memory.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import math
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias, cast, get_args

from kv_transfer.arguments import check_kind, check_period, check_text, check_word, told
from kv_transfer.engine import EngineCapabilities
from kv_transfer.engines.blocking import BlockingEngine, check_workers
from kv_transfer.errors import EngineError, EngineUnavailable
from kv_transfer.gone import is_gone
from kv_transfer.isolation import warn_if_open

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
_LANES = 16  # the most connections that the library opens to a peer
_NOWHERE = ctypes.c_char()
_LOOKS = (0.0, 0.05, 0.25, 1.0, 3.0)  # seconds before each look at forgotten peers
_TIMEOUT_VARIABLES = ("MC_TRANSFER_TIMEOUT", "MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")


LogLevel: TypeAlias = Literal["INFO", "WARNING", "ERROR"]
"""What the library writes to standard error."""

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

    def batch_register_memory(self, buffer_addresses: list[int], capacities: list[int]) -> int: ...

    def unregister_memory(self, addr: int, /) -> int: ...

    def batch_transfer_sync_write(
        self, target_hostname: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int: ...

    def batch_transfer_sync_read(
        self, target_hostname: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int: ...


def describe_code(code: int) -> str:
    """What a return code of the library means, in words."""
    return f"{_CODES.get(code, 'a code without a known meaning')} (mooncake code {code})"


class MooncakeEngine(BlockingEngine):
    """Moves bytes with Mooncake, one blocking call at a time on threads of its own.

    Its session ends in a word that no other engine has, not even one that comes later at the same host and port.

    Args:
        hostname: Name or address under which peers reach this process. It does not restrict where the library listens.
        protocol: Only "tcp": the library accepts any text without an error, and nothing else was ever run here.
        transfer_timeout: Seconds after which the library gives up on a peer that does not answer; whole seconds,
            rounded up. Set as MC_TRANSFER_TIMEOUT, MC_TCP_PROGRESS_TIMEOUT_SEC and MC_TCP_STATUS_TIMEOUT_SEC in this
            process's environment before the library starts, so the engines of one process share it. None leaves the
            environment alone.
        workers: Batches on their way at once.
        bind_device: Called once in each worker before its first batch, for example `lambda: torch.npu.set_device(3)`.
        log_level: What the library writes to standard error, unless MC_LOG_LEVEL says otherwise already.
        max_entries_per_batch: Longest batch; a batch cannot be interrupted, so it bounds how long `cancel` takes.
        max_block_bytes: Longest block, likewise.
        max_regions: Regions that this machine's network takes; None leaves the refusal to the library, with its code.
        max_region_bytes: Longest region, likewise.

    Raises:
        ArgumentError: An option that is none of its kind; nothing was set.
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
        bind_device: Callable[[], object] | None = None,
        log_level: LogLevel = "ERROR",
        max_entries_per_batch: int = 256,
        max_block_bytes: int | None = 16 << 20,
        max_regions: int | None = None,
        max_region_bytes: int | None = None,
    ) -> None:
        """Starts the library and its worker threads."""
        check_text("hostname", hostname)
        check_word("log_level", log_level, get_args(LogLevel))
        if not isinstance(protocol, str) or protocol != "tcp":
            raise EngineError(
                f"protocol: {told(protocol)} is not supported",
                local=protocol,
                consequence="the library would accept the name silently and might use another transport",
                remedy="use 'tcp'",
            )
        check_workers(workers, bind_device)
        if transfer_timeout is not None:
            check_period("transfer_timeout", transfer_timeout)
        capabilities = EngineCapabilities(
            max_entries_per_batch=max_entries_per_batch,
            max_block_bytes=max_block_bytes,
            cross_process=True,
            max_regions=max_regions,
            max_region_bytes=max_region_bytes,
            settles_itself=True,
        )
        if transfer_timeout is not None:
            for variable in _TIMEOUT_VARIABLES:
                os.environ[variable] = str(math.ceil(transfer_timeout))
        os.environ.setdefault("MC_LOG_LEVEL", log_level)
        self._hostname = hostname
        self._library = self._writer = _start(hostname)
        warn_if_open("mooncake")
        self._lives: dict[str, list[str]] = {}  # of each address, the newest last
        self._connected: dict[str, list[_Library]] = {}  # those that have connections to an address
        self._lives_lock = threading.Lock()
        self._forgotten: set[str] = set()
        self._looks = 0
        self._sweeper: threading.Thread | None = None
        self._sweep_lock = threading.Lock()
        self._leave = threading.Event()
        session = f"{hostname}:{self._library.get_rpc_port()}/{secrets.token_hex(8)}"
        super().__init__("mooncake", session, capabilities, workers, bind_device)
        _OPEN.add(self)

    def forget(self, peer: str) -> None:
        """Has the connections to a peer closed once its process is gone; see `ForgetsPeers.forget`.

        The library has no call for it: a connection is closed when it is used and turns out to be broken. So as soon
        as nobody listens at the peer's port, a byte is asked for over each. One that lives is looked at again when
        another peer is forgotten.
        """
        check_kind("peer", peer, str)
        address, _, _ = peer.partition("/")
        with self._sweep_lock:
            if self._leave.is_set() or address not in self._connected:
                return
            self._forgotten.add(address)
            self._looks = 0
            if self._sweeper is None:
                self._sweeper = threading.Thread(target=self._sweep, name="kv-transfer-mooncake-sweep", daemon=True)
                self._sweeper.start()

    def close(self) -> None:
        """As `BlockingEngine.close`."""
        with self._sweep_lock:
            self._leave.set()
            sweeper = self._sweeper
        if sweeper is not None:
            sweeper.join()
        super().close()

    def _sweep(self) -> None:
        while True:
            with self._sweep_lock:
                if not self._forgotten or self._looks == len(_LOOKS) or self._leave.is_set():
                    self._sweeper = None
                    return
                pause, addresses = _LOOKS[self._looks], list(self._forgotten)
                self._looks += 1
            if self._leave.wait(pause):
                continue
            for address in addresses:
                host, _, port = address.rpartition(":")
                if not port.isdecimal() or is_gone((host.strip("[]"), int(port))):
                    with self._lives_lock:
                        libraries = self._connected.pop(address, [])
                    for library in libraries:  # nothing comes: no memory is registered at that address
                        here = [ctypes.addressof(_NOWHERE)] * _LANES
                        library.batch_transfer_sync_read(address, here, [1] * _LANES, [1] * _LANES)
                    with self._sweep_lock:
                        self._forgotten.discard(address)

    def _register(self, regions: Sequence[tuple[int, int]]) -> int:
        return self._library.batch_register_memory([address for address, _ in regions], [size for _, size in regions])

    def _unregister(self, address: int) -> int:
        return self._library.unregister_memory(address)

    def _write(self, peer: str, source: list[int], destination: list[int], nbytes: list[int]) -> int:
        address, _, life = peer.partition("/")
        return self._writer_to(address, life).batch_transfer_sync_write(address, source, destination, nbytes)

    def _writer_to(self, address: str, life: str) -> _Library:
        """The library that writes to a peer.

        It keeps the ports and connections that an address had when it was first written to, for good. A peer that was
        started again at its old address is another life: it is written to by a new library, as all peers are then. The
        old one ends with the last batch that it moves, unless it has our memory.

        Raises:
            EngineError: The peer of this life is gone: another one is at its address.
        """
        with self._lives_lock:
            lives = self._lives.setdefault(address, [life])
            if life not in lives:
                self._writer = _start(self._hostname)
                lives.append(life)
                for known in self._connected.values():
                    known[:] = [library for library in known if library is self._library]
            elif life != lives[-1]:
                raise EngineError(
                    f"the peer at {address} was started again, as {lives[-1]}",
                    local=life,
                    consequence="what is meant for its earlier life is not written",
                )
            known = self._connected.setdefault(address, [])
            if self._writer not in known:
                known.append(self._writer)
            return self._writer

    def _shut_down(self) -> None:
        self._connected.clear()
        del self._library, self._writer

    def _describe(self, code: int) -> str:
        return describe_code(code)


def _start(hostname: str) -> _Library:
    """A library that has started.

    Raises:
        EngineUnavailable: As for `MooncakeEngine`.
        EngineError: It did not start.
    """
    library = _load()
    code = library.initialize(hostname, "P2PHANDSHAKE", "tcp", "")
    if code != 0:
        raise EngineError(
            f"mooncake did not start on {hostname!r} (mooncake code {code})",
            code=code,
            local=hostname,
            consequence="the engine cannot be used",
            remedy="check the host name, and that two ports of MC_MIN_RPC_PORT to MC_MAX_RPC_PORT are free",
        )
    return library


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
