"""The `loopback` engine: both peers in one process, or on one host with shared memory; bytes moved by memmove.

The reference for what an engine promises: memory is checked on both sides before each block, and bytes move inside
`poll` only, so that a test can stop between any two blocks. Memory of other processes is `shared_memory`'s.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import weakref

from kv_transfer.arguments import check_kind, check_limit
from kv_transfer.engine import (
    DONE,
    Blocks,
    EngineCapabilities,
    TransferHandle,
    TransferState,
    TransferStatus,
    check_batch,
)
from kv_transfer.errors import EngineError, RegionError
from kv_transfer.process import process_name
from kv_transfer.regions import RegionTable
from kv_transfer.shared_memory import Board, PeerBoard

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
    """Moves bytes between engines of one process, or of one host.

    Args:
        shared: Reaches other processes; then registered memory lies in a `SharedArena`.
        blocks_per_poll: Blocks that one `poll` moves; None moves the whole batch.
        max_entries_per_batch: Longest batch.
        max_block_bytes: Longest block.

    Raises:
        ArgumentError: A limit is neither None nor a whole number from 1 on.
        EngineError: There is no shared memory.
    """

    def __init__(
        self,
        *,
        shared: bool = False,
        blocks_per_poll: int | None = None,
        max_entries_per_batch: int | None = 1024,
        max_block_bytes: int | None = None,
    ) -> None:
        """Opens a new session of this process."""
        check_limit("blocks_per_poll", blocks_per_poll)
        self._blocks_per_poll = blocks_per_poll
        self._capabilities = EngineCapabilities(
            max_entries_per_batch=max_entries_per_batch,
            max_block_bytes=max_block_bytes,
            cross_process=shared,
            progress_on_poll=True,
        )
        self._board = Board() if shared else None
        self._peers: dict[str, PeerBoard] = {}
        self._regions = RegionTable()
        self._pending: weakref.WeakSet[_Handle] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._closed = False
        self._pid = os.getpid()
        self._session = f"loopback:{process_name()}:{next(_NUMBERS)}"
        if self._board is not None:
            self._session = self._board.path
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
            try:
                self._publish()
            except BaseException:
                self._regions.remove(address)
                raise

    def unregister(self, address: int) -> None:
        """See `TransferEngine.unregister`."""
        with self._lock:
            if not self._closed:
                self._regions.remove(address)
                self._publish()

    def submit(self, peer: str, batch: Blocks) -> TransferHandle:
        """See `TransferEngine.submit`."""
        self._refuse_unusable()
        check_batch(peer, batch, self._capabilities)
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
            check_kind("handle", handle, TransferHandle).settle(TransferStatus(TransferState.FAILED, "cancelled"))

    def forget(self, peer: str) -> None:
        """Unmaps a peer's memory; see `ForgetsPeers.forget`."""
        check_kind("peer", peer, str)
        with self._lock:
            board = self._peers.pop(peer, None)
            if board is not None:
                board.close()

    def close(self) -> None:
        """See `TransferEngine.close`."""
        with self._lock:
            self._closed = True
            for handle in list(self._pending):
                handle.settle(TransferStatus(TransferState.FAILED, f"engine {self._session} was closed"))
            self._regions.clear()
            if self._board is not None and self._pid == os.getpid():
                self._board.close()
                self._board = None
            for board in self._peers.values():
                board.close()
            self._peers.clear()
        with _SESSIONS_LOCK:
            _SESSIONS.pop(self._session, None)

    def _publish(self) -> None:
        if self._board is not None:
            self._board.publish(self._regions.sizes())

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
        board = self._find_board(handle.peer) if peer is None else None
        if peer is None and board is None:
            where = "on this host" if self._board is not None else "in this process"
            handle.settle(TransferStatus(TransferState.FAILED, f"no engine with session {handle.peer!r} {where}"))
            return
        stop = handle.blocks
        if self._blocks_per_poll is not None:
            stop = min(stop, handle.position + self._blocks_per_poll)
        try:
            if peer is not None:
                self._move(peer, handle, stop)
            elif board is not None:
                self._move_out(board, handle, stop)
        except (RegionError, OSError) as error:
            handle.settle(TransferStatus(TransferState.FAILED, str(error)))
            return
        if handle.position == handle.blocks:
            handle.settle(DONE)

    def _find_board(self, session: str) -> PeerBoard | None:
        if self._board is None:
            return None
        if session not in self._peers:
            try:
                self._peers[session] = PeerBoard(session)
            except OSError:
                return None
        return self._peers[session]

    def _move_out(self, board: PeerBoard, handle: _Handle, stop: int) -> None:
        source = handle.batch.source[handle.position : stop]
        destination = handle.batch.destination[handle.position : stop]
        nbytes = handle.batch.nbytes[handle.position : stop]
        with self._regions.lock, board.open_regions() as regions:
            self._regions.check(source, nbytes, "source")
            table = RegionTable()
            for address, size in regions:
                table.add(address, size)
            table.check(destination, nbytes, "destination")
            for to, from_, count in zip(destination.tolist(), source.tolist(), nbytes.tolist(), strict=True):
                ctypes.memmove(board.here(to), from_, count)
                handle.position += 1

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
