"""The `nixl` engine: NIXL's UCX backend, over shared memory or TCP, between processes and hosts.

NIXL peers need each other's metadata, which names the memory that is registered: the session is that metadata as text,
so it is read after `register`, and grows with every registration. UCX chooses the path (`UCX_TLS`, `UCX_NET_DEVICES`);
it listens without authentication, as Mooncake does (see `kv_transfer.isolation`). On one host it writes through shared
memory: a peer that has the session can write into a range that was unregistered since, so only the sessions of
kv_transfer say when a page is free.
"""

from __future__ import annotations

import atexit
import base64
import binascii
import dataclasses
import importlib
import logging
import os
import threading
import uuid
import weakref
import zlib
from typing import Any

import numpy as np

from kv_transfer.arguments import check_kind, check_text, check_whole
from kv_transfer.engine import (
    DONE,
    Blocks,
    EngineCapabilities,
    TransferHandle,
    TransferState,
    TransferStatus,
    check_batch,
)
from kv_transfer.errors import EngineError, EngineUnavailable
from kv_transfer.isolation import warn_if_open
from kv_transfer.regions import RegionTable

__all__ = ["NixlEngine"]

_MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
_MEMORY = "DRAM"
_SHORTEST, _LONGEST = 20e-6, 500e-6  # seconds between two questions after a transfer
_PROGRESS_PAUSE = 1000  # µs that a progress thread without events sleeps at most
_LOG = logging.getLogger(__name__)
_OPEN: weakref.WeakSet[NixlEngine] = weakref.WeakSet()


@atexit.register
def _close_open_engines() -> None:
    """The library's progress threads must not outlive the interpreter."""
    for engine in list(_OPEN):
        engine.close()


class _Handle(TransferHandle):
    __slots__ = ("transfer",)

    def __init__(self, peer: str, batch: Blocks) -> None:
        super().__init__(peer, len(batch.nbytes), int(batch.nbytes.sum()))
        self.transfer: Any = None


@dataclasses.dataclass(slots=True)
class _Metadata:
    """What the library knows of a peer: its data, of which state of its memory, and whether older data is mixed in."""

    changes: int
    data: bytes
    stale: bool


class NixlEngine:
    """Moves host memory with NIXL; every call into the library happens under one lock.

    The library ends no batch by itself: a thread asks after those that do not end within `submit`.

    Args:
        max_entries_per_batch: Longest batch; within a host, nobody else is served while one is copied.
        log_level: What the library writes to standard error, unless NIXL_LOG_LEVEL says otherwise already.

    Raises:
        EngineUnavailable: The wheel is missing or cannot be loaded.
        EngineError: The library did not start.
    """

    def __init__(self, *, max_entries_per_batch: int = 512, log_level: str = "ERROR") -> None:
        """Starts an agent with a progress thread of its own, which sleeps while nothing comes."""
        check_whole("max_entries_per_batch", max_entries_per_batch, least=1)
        check_text("log_level", log_level)
        os.environ.setdefault("NIXL_LOG_LEVEL", log_level)
        api = _load()
        self._name = f"kv-transfer-{uuid.uuid4()}"
        try:
            self._agent = _start(api, self._name)
        except Exception as error:
            raise EngineError(
                f"nixl did not start: {type(error).__name__}: {error}",
                consequence="the engine cannot be used",
                remedy="check UCX_TLS and UCX_NET_DEVICES, and the library's log (NIXL_LOG_LEVEL=DEBUG)",
            ) from error
        warn_if_open("nixl")
        self._capabilities = EngineCapabilities(
            max_entries_per_batch=max_entries_per_batch, cross_process=True, settles_itself=True
        )
        self._regions = RegionTable()
        self._registered: dict[int, Any] = {}
        self._changes = 0
        self._peers: dict[str, str] = {}
        self._loaded: dict[str, _Metadata] = {}
        self._pending: set[_Handle] = set()
        self._leaving: set[str] = set()
        self._lock = threading.RLock()
        self._closed = False
        self._nudge = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="kv-transfer-nixl", daemon=True)
        self._watcher.start()
        _OPEN.add(self)

    @property
    def name(self) -> str:
        """Always "nixl"."""
        return "nixl"

    @property
    def session(self) -> str:
        """The agent's metadata: how it is reached, and the memory that is registered now."""
        with self._lock:
            self._refuse_closed()
            metadata = base64.b64encode(zlib.compress(self._agent.get_agent_metadata())).decode()
            return f"{self._name}/{self._changes}/{metadata}"

    @property
    def capabilities(self) -> EngineCapabilities:
        """As given to the constructor."""
        return self._capabilities

    def register(self, address: int, nbytes: int) -> None:
        """See `TransferEngine.register`."""
        with self._lock:
            self._refuse_closed()
            if not self._regions.add(address, nbytes):
                return
            try:
                self._registered[address] = self._agent.register_memory([(address, nbytes, 0, "")], _MEMORY)
                self._changes += 1
            except Exception as error:
                self._regions.remove(address)
                raise EngineError(
                    f"nixl cannot register {nbytes} bytes at {address:#x}: {type(error).__name__}: {error}",
                    local=(address, nbytes),
                    consequence="the range stays closed",
                ) from error

    def unregister(self, address: int) -> None:
        """See `TransferEngine.unregister`. Peers that have the session may still reach the range (see the module)."""
        with self._lock:
            if self._closed:
                return
            if self._regions.remove(address):
                self._agent.deregister_memory(self._registered.pop(address))
                self._changes += 1

    def submit(self, peer: str, batch: Blocks) -> TransferHandle:
        """See `TransferEngine.submit`. Within a host the library copies in this call, so it lasts as long as that."""
        self._refuse_closed()
        check_batch(peer, batch, self._capabilities)
        self._regions.check(batch.source, batch.nbytes, "source")
        handle = _Handle(peer, batch)
        with self._lock:
            self._refuse_closed()
            if not handle.blocks:
                handle.settle(DONE)
                return handle
            try:
                agent = self._agent_of(peer)
                local, remote = (
                    self._agent.get_xfer_descs(_descriptors(side, batch.nbytes), _MEMORY)
                    for side in (batch.source, batch.destination)
                )
                handle.transfer = self._agent.initialize_xfer("WRITE", local, remote, agent)
                self._pending.add(handle)
                self._take(handle, self._agent.transfer(handle.transfer))
            except Exception as error:
                self._fail(handle, error)
            if self._pending:
                self._nudge.set()
        return handle

    def poll(self, handle: TransferHandle) -> TransferStatus:
        """See `TransferEngine.poll`."""
        return check_kind("handle", handle, TransferHandle).status

    def cancel(self, handle: TransferHandle) -> None:
        """Asks the library to drop the transfer; one that it cannot drop any more ends by itself."""
        if isinstance(handle, _Handle):
            with self._lock:
                if not handle.status.is_terminal:
                    self._let_go(handle, TransferStatus(TransferState.FAILED, "cancelled"))

    def forget(self, peer: str) -> None:
        """Removes the peer's agent, once no transfer to it is under way; see `ForgetsPeers.forget`."""
        check_kind("peer", peer, str)
        with self._lock:
            name = self._peers.get(peer)
            if name is not None and not self._closed:
                self._leaving.add(name)
                self._remove_leaving()

    def close(self) -> None:
        """Waits for running transfers that cannot be dropped, and releases agent and memory."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for handle in list(self._pending):
                self._let_go(handle, TransferStatus(TransferState.FAILED, "the engine was closed"))
            self._nudge.set()
        self._watcher.join()
        with self._lock:
            for address in self._regions.clear():
                self._agent.deregister_memory(self._registered.pop(address))
            for agent in self._loaded:
                self._agent.remove_remote_agent(agent)
            self._peers.clear()
            self._loaded.clear()
            del self._agent

    def _watch(self) -> None:
        """Asks after the transfers that run: often at first and after each end, then at growing intervals."""
        pause: float | None = None
        while True:
            self._nudge.wait(pause)
            with self._lock:
                self._nudge.clear()
                before = len(self._pending)
                for handle in list(self._pending):
                    self._look(handle)
                left = len(self._pending)
                if self._closed and not left:
                    return
            again = _SHORTEST if pause is None or left < before else min(2 * pause, _LONGEST)
            pause = again if left else None

    def _look(self, handle: _Handle) -> None:
        try:
            self._take(handle, self._agent.check_xfer_state(handle.transfer))
        except Exception as error:
            self._fail(handle, error)

    def _remove_leaving(self) -> None:
        busy = {self._peers.get(handle.peer) for handle in self._pending}
        for name in self._leaving - busy:
            self._leaving.discard(name)
            self._peers = {peer: known for peer, known in self._peers.items() if known != name}
            del self._loaded[name]
            try:
                self._agent.remove_remote_agent(name)
            except Exception as error:  # the thread that asks after the transfers of others must not end by it
                _LOG.warning("nixl keeps what it holds for peer %s: %s: %s", name, type(error).__name__, error)

    def _agent_of(self, peer: str) -> str:
        """The peer's agent, known by its newest metadata.

        The library keeps what it was told first of an address: a range that was registered again with another size
        would not be found. So newer metadata replaces the older, as soon as no transfer to the peer is under way.
        """
        name = self._peers.get(peer)
        if name is None:
            name, changes, data = _parse(peer)
            known = self._loaded.get(name)
            if known is None or changes > known.changes:
                self._agent.add_remote_agent(data)
                self._loaded[name] = _Metadata(changes, data, stale=known is not None)
            self._peers[peer] = name
        self._leaving.discard(name)
        loaded = self._loaded[name]
        if loaded.stale and not any(self._peers.get(handle.peer) == name for handle in self._pending):
            self._agent.remove_remote_agent(name)
            self._agent.add_remote_agent(loaded.data)
            loaded.stale = False
        return name

    def _take(self, handle: _Handle, state: str) -> None:
        if state == "DONE":
            self._let_go(handle, DONE)
        elif state != "PROC":
            self._fail(handle, RuntimeError(f"state {state}"))

    def _fail(self, handle: _Handle, error: Exception) -> None:
        text = f"nixl write of {handle.blocks} blocks, {handle.nbytes} bytes: {type(error).__name__}: {error}"
        self._let_go(handle, TransferStatus(TransferState.FAILED, text))

    def _let_go(self, handle: _Handle, status: TransferStatus) -> None:
        """Settle once the library has dropped the transfer; until then the memory is its."""
        if handle.transfer is not None:
            try:
                self._agent.release_xfer_handle(handle.transfer)
            except Exception:
                if self._still_runs(handle):
                    return
            handle.transfer = None
        self._pending.discard(handle)
        if self._leaving:
            self._remove_leaving()
        handle.settle(status)

    def _still_runs(self, handle: _Handle) -> bool:
        """Whether the library still holds the transfer; a state that it cannot tell any more is an ended one."""
        try:
            return bool(self._agent.check_xfer_state(handle.transfer) == "PROC")
        except Exception:
            return False

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError(f"engine {self._name} is closed", local=self._name)


def _start(api: Any, name: str) -> Any:
    """An agent whose progress thread waits for events.

    The library's own constructor sets no pause, and its thread then asks without end: a core each agent, idle or not,
    which the copies lack. So that one makes an agent without a backend, hence without a thread, and the agent that
    moves bytes takes the place of its inner one.
    """
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
    config = api.nixlBind.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, _PROGRESS_PAUSE
    config.syncMode = api.nixlBind.NIXL_THREAD_SYNC_NONE
    agent.agent = api.nixlBind.nixlAgent(name, config)
    agent.create_backend("UCX")
    return agent


def _descriptors(addresses: Any, nbytes: Any) -> Any:
    """Rows of (address, bytes, device 0). Shape: [blocks, 3]; dtype uint64."""
    rows = np.zeros((len(nbytes), 3), np.uint64)
    rows[:, 0], rows[:, 1] = addresses, nbytes
    return rows


def _parse(session: str) -> tuple[str, int, bytes]:
    """Agent, state of its memory, and metadata."""
    try:
        name, changes, data = session.split("/", 2)
        return name, int(changes), zlib.decompress(base64.b64decode(data, validate=True))
    except (ValueError, binascii.Error, zlib.error) as error:
        raise ValueError(f"{session[:40]!r} is no session of a nixl engine") from error


def _load() -> Any:
    missing: Exception | None = None
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error
        except ImportError as error:
            raise EngineUnavailable(
                f"the nixl engine cannot load its library: {error}",
                consequence="the engine cannot be used",
                remedy="install the missing system library",
            ) from error
    raise EngineUnavailable(
        f"the nixl engine needs a NIXL wheel: {missing}",
        consequence="the engine cannot be used",
        remedy="pip install --no-deps nixl-cu12 (it runs without CUDA; its dependencies are not needed)",
    ) from missing
