"""The data plane as the rest of the package sees it: the `TransferEngine` protocol and its records.

An engine moves bytes from local memory to a peer's registered memory. It knows nothing of layouts, pages or rooms.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import kv_planner
import numpy as np
import numpy.typing as npt

from kv_transfer.arguments import check_kind, check_limit, check_wait, check_whole
from kv_transfer.errors import ArgumentError, EngineError

__all__ = [
    "Blocks",
    "EngineCapabilities",
    "ForgetsPeers",
    "RegistersTogether",
    "TransferEngine",
    "TransferHandle",
    "TransferState",
    "TransferStatus",
    "check_batch",
    "forget_peer",
    "wait_batch",
]

_SHORTEST, _LONGEST = 20e-6, 1e-3  # seconds between two looks at a batch that is polled


class TransferState(enum.Enum):
    """Where a submitted batch is."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class TransferStatus:
    """What `poll` returns.

    Attributes:
        state: DONE and FAILED are terminal: the engine will not touch memory for this batch again.
        error: Why, in words; empty unless FAILED. After a failure the destination holds undefined bytes.
    """

    state: TransferState
    error: str = ""

    @property
    def is_terminal(self) -> bool:
        """Whether the engine has let go of the memory."""
        return self.state is not TransferState.PENDING


PENDING = TransferStatus(TransferState.PENDING)
DONE = TransferStatus(TransferState.DONE)


class Blocks(Protocol):
    """What an engine is given; `kv_planner.Batch` is one.

    Attributes:
        source: Local addresses. Shape: [blocks]; dtype uint64.
        destination: Addresses at the peer. Shape: [blocks]; dtype uint64.
        nbytes: Bytes of each block. Shape: [blocks]; dtype uint64.
    """

    @property
    def source(self) -> npt.NDArray[np.uint64]:
        """Local addresses."""

    @property
    def destination(self) -> npt.NDArray[np.uint64]:
        """Addresses at the peer."""

    @property
    def nbytes(self) -> npt.NDArray[np.uint64]:
        """Bytes of each block."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine can take; None means that it names no limit.

    Attributes:
        max_entries_per_batch: Blocks in one submitted batch.
        max_block_bytes: Bytes of one block.
        max_blocks: Blocks of one plan.
        cross_process: Reaches memory of other processes.
        progress_on_poll: Moves bytes inside `poll`, so it must be polled without pauses.
        region_alignment: Bytes to which ends of registered regions are rounded; a power of two. Above 1 only where the
            memory around a buffer belongs to it, as with an NPU's 2 MiB pages.
        max_region_bytes: Bytes of one registered region.
        max_regions: Regions that are registered at a time.
        settles_itself: Ends its handles from a thread of its own, so that nobody needs to poll: `TransferHandle.notify`
            and `TransferHandle.wait` are enough. Others are polled.
    """

    max_entries_per_batch: int | None = None
    max_block_bytes: int | None = None
    max_blocks: int | None = None
    cross_process: bool = False
    progress_on_poll: bool = False
    region_alignment: int = 1
    max_region_bytes: int | None = None
    max_regions: int | None = None
    settles_itself: bool = False

    def __post_init__(self) -> None:
        """Refuses limits that no batch could keep.

        Raises:
            ArgumentError: A limit is neither None nor a whole number from 1 on, the alignment is no power of two, or
                what is true or false is neither.
        """
        for field in dataclasses.fields(self):
            name, value = f"EngineCapabilities.{field.name}", getattr(self, field.name)
            if isinstance(field.default, bool):
                check_kind(name, value, bool)
            elif field.default is None:
                check_limit(name, value)
            elif (alignment := check_whole(name, value, least=1)) & (alignment - 1):
                raise ArgumentError(
                    f"{name}: expected a power of two, got {value}",
                    local=value,
                    consequence="ends of regions could not be rounded to it",
                    remedy="give the page size of the memory, or 1",
                )

    def planner(self) -> kv_planner.Capabilities:
        """The part that `kv_planner.lower` needs."""
        return kv_planner.Capabilities(
            max_entries_per_batch=self.max_entries_per_batch,
            max_block_bytes=self.max_block_bytes,
            max_blocks=self.max_blocks,
        )

    def check_entries(self, blocks: int) -> None:
        """Refuses a batch of more blocks than the engine takes.

        Args:
            blocks: Blocks of the batch.

        Raises:
            EngineError: There are too many.
        """
        check_whole("blocks", blocks)
        limit = self.max_entries_per_batch
        if limit is not None and blocks > limit:
            raise EngineError(
                f"batch of {blocks} blocks, the engine takes {limit}",
                local=blocks,
                remedy="lower the plan with this engine's capabilities",
            )


def check_batch(peer: str, batch: Blocks, capabilities: EngineCapabilities) -> None:
    """Refuses a batch that no engine can be given: a thread of its own would stumble over it.

    Args:
        peer: Session of the other engine.
        batch: What is to be written.
        capabilities: Of the engine.

    Raises:
        EngineError: The peer is no text, a column is no array of uint64, they are of unequal length, or there are more
            blocks than the engine takes.
    """
    columns = [getattr(batch, name, None) for name in ("source", "destination", "nbytes")]
    shapes = {own.shape if isinstance(own, np.ndarray) and own.dtype == np.uint64 else None for own in columns}
    shape = shapes.pop()
    if not isinstance(peer, str) or shapes or shape is None or len(shape) != 1:
        given = [
            f"{own.dtype}{list(own.shape)}" if isinstance(own, np.ndarray) else type(own).__name__ for own in columns
        ]
        raise EngineError(
            f"peer, batch: expected a session and source, destination and nbytes, uint64 of one length, got "
            f"{type(peer).__name__} and {', '.join(given)}",
            local=", ".join(given),
            consequence="nothing was written",
            remedy="give the peer's session and a batch of kv_planner.lower",
        )
    capabilities.check_entries(shape[0])


class TransferHandle:
    """One submitted batch. Engines keep no table of them: a handle that is dropped is gone."""

    __slots__ = ("_calls", "_lock", "_status", "blocks", "nbytes", "peer")

    def __init__(self, peer: str, blocks: int, nbytes: int) -> None:
        """A pending batch of `blocks` blocks, `nbytes` bytes, to `peer`."""
        self.peer = peer
        self.blocks = blocks
        self.nbytes = nbytes
        self._status = PENDING
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []

    @property
    def status(self) -> TransferStatus:
        """The last known status; once terminal it stays."""
        return self._status

    def settle(self, status: TransferStatus) -> bool:
        """Ends the batch; for engines. The first call wins.

        Returns:
            Whether this call ended it.
        """
        with self._lock:
            if self._status.is_terminal:
                return False
            self._status = status
            calls, self._calls = self._calls, []
        for call in calls:
            call()
        return True

    def notify(self, call: Callable[[], None]) -> None:
        """Has `call` called once when the batch ends, by the thread that ends it; at once when it has ended.

        Args:
            call: Must not block and must not raise.
        """
        with self._lock:
            if not self._status.is_terminal:
                self._calls.append(call)
                return
        call()

    def wait(self, timeout: float | None = None) -> TransferStatus:
        """Sleeps until the batch ends, at most `timeout` seconds.

        For engines that end their handles themselves; `wait_batch` waits for any.

        Returns:
            The status; pending when the time ran out.

        Raises:
            ArgumentError: The time is none.
        """
        check_wait("timeout", timeout)
        ended = threading.Event()
        self.notify(ended.set)
        ended.wait(timeout)
        return self._status


@runtime_checkable
class TransferEngine(Protocol):
    """What sender and receiver need of an engine. All methods may be called from any thread."""

    @property
    def name(self) -> str:
        """The name under which it was created."""

    @property
    def session(self) -> str:
        """What a peer passes to `submit` in order to reach this engine."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Its limits."""

    def register(self, address: int, nbytes: int) -> None:
        """Opens [address, address + nbytes) for transfers from here and for writes by peers.

        The same range may be registered again; it closes with the last `unregister`.

        Raises:
            RegionError: The range is empty, or overlaps another one in part.
            EngineError: The library refused it.
        """

    def unregister(self, address: int) -> None:
        """Closes the range that starts at `address`; does nothing after `close`.

        Raises:
            RegionError: No such range.
        """

    def submit(self, peer: str, batch: Blocks) -> TransferHandle:
        """Starts to write `batch` into the memory of the engine with session `peer`, and returns without waiting.

        Raises:
            RegionError: A source block is not in registered memory.
            EngineError: The engine is closed, or the batch is over its limits.
        """

    def poll(self, handle: TransferHandle) -> TransferStatus:
        """The status of a batch; may be called again after the end.

        An exception means that the engine let go of the batch.
        """

    def cancel(self, handle: TransferHandle) -> None:
        """Asks for an early end.

        A batch that already runs may still finish; only a terminal status says that it stopped.
        """

    def close(self) -> None:
        """Ends everything that is pending and releases the library. May be called twice."""


@runtime_checkable
class RegistersTogether(Protocol):
    """An engine that registers many ranges in one call of its library."""

    def register_all(self, regions: Sequence[tuple[int, int]]) -> None:
        """Opens every (address, bytes) range as `register` does, or none of them.

        Raises:
            RegionError: As `register`, or there would be more regions than the engine takes.
            EngineError: The library refused them.
        """


@runtime_checkable
class ForgetsPeers(Protocol):
    """An engine that holds something for each peer it wrote to: connections, mapped memory, names."""

    def forget(self, peer: str) -> None:
        """Gives back what is held for a peer to which its caller writes no more; returns without waiting for it.

        Batches of others to that peer go on, and a later `submit` to it begins anew. Does nothing for a peer that is
        not known.

        Raises:
            ArgumentError: No text.
        """


def forget_peer(engine: TransferEngine, peer: str) -> None:
    """Has an engine forget a peer, where it is one that can.

    Args:
        engine: Wrote to the peer.
        peer: Its session; an empty one is none.
    """
    if peer and isinstance(engine, ForgetsPeers):
        engine.forget(peer)


def wait_batch(engine: TransferEngine, handle: TransferHandle, timeout: float | None = None) -> TransferStatus:
    """Waits for the end of a batch, whatever kind of engine has it.

    Sleeps where the engine ends its handles itself, polls without pauses where `poll` moves the bytes, and polls with
    growing pauses otherwise.

    Args:
        engine: Has the batch.
        handle: From its `submit`.
        timeout: Seconds; None waits without end.

    Returns:
        The status; pending when the time ran out.

    Raises:
        ArgumentError: There is no such engine, handle or time.
    """
    check_kind("handle", handle, TransferHandle)
    check_wait("timeout", timeout)
    if not isinstance(getattr(engine, "capabilities", None), EngineCapabilities):
        check_kind("engine", engine, TransferEngine)  # type: ignore[type-abstract]
    if engine.capabilities.settles_itself:
        return handle.wait(timeout)
    end = None if timeout is None else time.monotonic() + timeout
    pause = 0.0 if engine.capabilities.progress_on_poll else _SHORTEST
    while not (status := engine.poll(handle)).is_terminal and (end is None or time.monotonic() < end):
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    return status
