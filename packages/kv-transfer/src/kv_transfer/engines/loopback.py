"""The `loopback` engine: both peers in one process, bytes moved by memmove.

The reference for what an engine promises: memory is checked on both sides before each block, and bytes move inside
`poll` only, so that a test can stop between any two blocks. It does not reach other processes.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import weakref

from kv_transfer.engine import DONE, Blocks, EngineCapabilities, TransferHandle, TransferState, TransferStatus
from kv_transfer.errors import EngineError, RegionError
from kv_transfer.process import process_name
from kv_transfer.regions import RegionTable

__all__ = ["LoopbackEngine"]

_SESSIONS: weakref.WeakValueDictionary[str, LoopbackEngine] = weakref.WeakValueDictionary()
_SESSIONS_LOCK = threading.Lock()
_NUMBERS = itertools.count(1)


class _Handle(TransferHandle):
    __slots__ = ("__weakref__", "batch", "position")

    def __init__(self, peer: str, batch: Blocks) -> None:
        super().__init__(peer, len(batch.nbytes), int(batch.nbytes.sum()))
        self.batch = batch
        self.position = 0


class LoopbackEngine:
    """Moves bytes between engines of one process.

    Args:
        blocks_per_poll: Blocks that one `poll` moves; None moves the whole batch.
        max_entries_per_batch: Longest batch.
        max_block_bytes: Longest block.
    """

    def __init__(
        self,
        *,
        blocks_per_poll: int | None = None,
        max_entries_per_batch: int | None = 1024,
        max_block_bytes: int | None = None,
    ) -> None:
        """Opens a new session of this process."""
        if blocks_per_poll is not None and blocks_per_poll < 1:
            raise ValueError(f"blocks_per_poll: expected None or at least 1, got {blocks_per_poll}")
        self._blocks_per_poll = blocks_per_poll
        self._capabilities = EngineCapabilities(
            max_entries_per_batch=max_entries_per_batch, max_block_bytes=max_block_bytes, progress_on_poll=True
        )
        self._regions = RegionTable()
        self._pending: weakref.WeakSet[_Handle] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._closed = False
        self._pid = os.getpid()
        self._session = f"loopback:{process_name()}:{next(_NUMBERS)}"
        with _SESSIONS_LOCK:
            _SESSIONS[self._session] = self

    @property
    def name(self) -> str:
        """Always "loopback"."""
        return "loopback"

    @property
    def session(self) -> str:
        """Name of this engine; no engine of this or another process has the same."""
        return self._session

    @property
    def capabilities(self) -> EngineCapabilities:
        """As given to the constructor."""
        return self._capabilities

    def register(self, address: int, nbytes: int) -> None:
        """See `TransferEngine.register`."""
        with self._lock:
            self._refuse_unusable()
            self._regions.add(address, nbytes)

    def unregister(self, address: int) -> None:
        """See `TransferEngine.unregister`."""
        with self._lock:
            if not self._closed:
                self._regions.remove(address)

    def submit(self, peer: str, batch: Blocks) -> TransferHandle:
        """See `TransferEngine.submit`."""
        self._refuse_unusable()
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
            self._refuse_unusable()
            self._pending.add(handle)
        return handle

    def poll(self, handle: TransferHandle) -> TransferStatus:
        """Moves the next blocks; see `TransferEngine.poll`."""
        if not isinstance(handle, _Handle):
            raise EngineError(f"handle of another engine: {type(handle).__name__}")
        with self._lock:
            if not handle.status.is_terminal:
                self._advance(handle)
            return handle.status

    def cancel(self, handle: TransferHandle) -> None:
        """Ends a batch between two blocks."""
        with self._lock:
            handle.settle(TransferStatus(TransferState.FAILED, "cancelled"))

    def close(self) -> None:
        """See `TransferEngine.close`."""
        with self._lock:
            self._closed = True
            for handle in list(self._pending):
                handle.settle(TransferStatus(TransferState.FAILED, f"engine {self._session} was closed"))
            self._regions.clear()
        with _SESSIONS_LOCK:
            _SESSIONS.pop(self._session, None)

    def _refuse_unusable(self) -> None:
        if self._closed:
            raise EngineError(f"engine {self._session} is closed", local=self._session)
        if self._pid != os.getpid():
            raise EngineError(
                f"engine {self._session} was made in process {self._pid} and is used in {os.getpid()}, after a fork",
                local=os.getpid(),
                consequence="its bytes would land in another memory than its peers see",
                remedy="create the engine in the process that uses it",
            )

    def _advance(self, handle: _Handle) -> None:
        with _SESSIONS_LOCK:
            peer = _SESSIONS.get(handle.peer)
        if peer is None:
            handle.settle(
                TransferStatus(TransferState.FAILED, f"no engine with session {handle.peer!r} in this process")
            )
            return
        stop = handle.blocks
        if self._blocks_per_poll is not None:
            stop = min(stop, handle.position + self._blocks_per_poll)
        try:
            self._move(peer, handle, stop)
        except RegionError as error:
            handle.settle(TransferStatus(TransferState.FAILED, str(error)))
            return
        if handle.position == handle.blocks:
            handle.settle(DONE)

    def _move(self, peer: LoopbackEngine, handle: _Handle, stop: int) -> None:
        source = handle.batch.source[handle.position : stop]
        destination = handle.batch.destination[handle.position : stop]
        nbytes = handle.batch.nbytes[handle.position : stop]
        first, second = sorted((self, peer), key=lambda engine: engine._session)
        with first._regions.lock, second._regions.lock:
            self._regions.check(source, nbytes, "source")
            peer._regions.check(destination, nbytes, "destination")
            for block in zip(destination.tolist(), source.tolist(), nbytes.tolist(), strict=True):
                ctypes.memmove(*block)
                handle.position += 1
