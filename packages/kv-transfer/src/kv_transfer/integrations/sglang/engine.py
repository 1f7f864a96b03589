"""Owns SGLang's view of a `TransferEngine`: its session ids, its registration calls, and blocks moved until they are.

SGLang's managers ask for `batch_register`, `batch_transfer_sync` and a session id that ends in a port; a kv_transfer
engine registers ranges, takes batches and has a session of its own form. It does not know what the blocks hold.
"""

from __future__ import annotations

import binascii
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.arguments import check_items, check_seconds, check_text, check_whole
from kv_transfer.engine import Blocks, TransferEngine, TransferHandle, forget_peer, wait_batch
from kv_transfer.errors import ArgumentError, EngineError, TransferError, TransferFailed
from kv_transfer.regions import register_buffers

__all__ = ["BlockList", "SessionEngine", "session_of"]

_PREFIX = "kv-transfer/1/"
_TOP = 2**64 - 1
logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BlockList:
    """Blocks by their numbers; a `kv_transfer.engine.Blocks`.

    Attributes:
        source: Shape: [blocks].
        destination: Shape: [blocks].
        nbytes: Shape: [blocks].
    """

    source: npt.NDArray[np.uint64]
    destination: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, source: Sequence[int], destination: Sequence[int], nbytes: Sequence[int]) -> BlockList:
        """Takes lists of numbers; blocks without bytes are left out.

        Raises:
            TransferFailed: No lists, lists of unequal length, or a number that is no 64-bit address.
        """
        columns = [
            _column(name, values)
            for name, values in (("sources", source), ("destinations", destination), ("lengths", nbytes))
        ]
        sizes = [len(column) for column in columns]
        if len(set(sizes)) > 1:
            raise TransferFailed(
                f"blocks: {sizes[0]} sources, {sizes[1]} destinations, {sizes[2]} lengths",
                local=str(sizes),
                consequence="nothing was written",
                remedy="give one of each for every block",
            )
        kept = columns[2] > 0
        first, second, size = (column[kept] for column in columns)
        past = np.flatnonzero(np.maximum(first, second) > np.uint64(_TOP) - size)
        if len(past):
            block = tuple(int(column[past[0]]) for column in (first, second, size))
            raise TransferFailed(
                f"block {block}: an address outside the 64-bit range",
                local=block,
                consequence="nothing was written",
                remedy="check pointers, item lengths and page ids",
            )
        return cls(first, second, size)


def _column(name: str, values: object) -> npt.NDArray[np.uint64]:
    """One column of blocks. Shape: [blocks].

    Raises:
        TransferFailed: It is no list of 64-bit numbers.
    """
    try:
        if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str | bytes):
            raise TypeError(f"a {type(values).__name__}")
        array = np.asarray(values)
        if array.ndim == 1 and (not array.size or (array.dtype.kind in "iu" and array.min() >= 0)):
            return array.astype(np.uint64)
        found = f"{array.dtype} of shape {array.shape}, among them {array.reshape(-1)[:4].tolist()!r:.80}"
    except (TypeError, ValueError, OverflowError) as error:
        found = str(error)
    raise TransferFailed(
        f"{name}: expected a list of numbers within the 64-bit range, got {found}",
        local=found,
        consequence="nothing was written",
        remedy="check pointers, item lengths and page ids",
    )


def session_of(wire: str, engine: str) -> str:
    """The engine's session inside a session id of SGLang's control messages.

    Args:
        wire: As a peer sent it. One without our prefix is of SGLang's own manager, and is taken as it is.
        engine: Name of the local engine.

    Raises:
        ArgumentError: No session id.
        EngineError: The peer moves bytes with another engine.
    """
    check_text("session", wire)
    if not wire.startswith(_PREFIX):
        return wire
    name, _, rest = wire.removeprefix(_PREFIX).partition("/")
    if name != engine:
        raise EngineError(
            f"the peer moves bytes with {name!r}, this side with {engine!r}",
            local=engine,
            consequence="nothing was written",
            remedy="set the same engine on both sides",
        )
    return rest.rpartition(":")[0]


class StillWriting(TransferFailed):
    """A transfer that did not end in time.

    Attributes:
        handle: Its batch: the engine writes until this is terminal.
    """

    def __init__(self, handle: TransferHandle, message: str, *, consequence: str, remedy: str) -> None:
        super().__init__(message, consequence=consequence, remedy=remedy)
        self.handle = handle


class SessionEngine:
    """An engine with SGLang's calls.

    Args:
        engine: Moves the bytes; closed with `close`.
        timeout: Seconds after which a transfer that does not end counts as failed; the engine's own limit is the
            shorter one where it has one.
    """

    def __init__(self, engine: TransferEngine, *, timeout: float = 30.0) -> None:
        self.engine = engine
        self._timeout = check_seconds("timeout", timeout)
        self._lock = threading.Lock()
        self._registered: list[int] = []

    def get_session_id(self) -> str:
        """What peers name this side by; read after `batch_register`, since an engine's session may name its memory.

        It ends in a number, as SGLang shards its queues by the port behind the last colon.
        """
        session = self.engine.session
        return f"{_PREFIX}{self.engine.name}/{session}:{binascii.crc32(session.encode()) % 65536}"

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int:
        """Opens memory: joined, rounded and cut as the engine says, and without empty buffers.

        Returns:
            0.

        Raises:
            ArgumentError: No lists of whole numbers, or of unequal length.
            EngineError: The engine refused a region, or its limits do; none of this call is open.
        """
        addresses, sizes = check_items("ptrs", ptrs), check_items("lengths", lengths)
        if len(addresses) != len(sizes):
            raise ArgumentError(
                f"ptrs, lengths: {len(addresses)} addresses and {len(sizes)} lengths",
                local=len(addresses),
                consequence="nothing was registered",
                remedy="give one length for every address",
            )
        buffers = [
            (check_whole("ptrs", at, _TOP), own)
            for at, size in zip(addresses, sizes, strict=True)
            if (own := check_whole("lengths", size, _TOP))
        ]
        with self._lock:
            self._registered += register_buffers(self.engine, buffers)
        return 0

    def batch_deregister(self, ptrs: Sequence[int]) -> int:
        """Closes all memory that `batch_register` opened: joined regions have no starts of single buffers."""
        with self._lock:
            while self._registered:
                self.engine.unregister(self._registered.pop())
        return 0

    def batch_transfer_sync(
        self, session: str, sources: Sequence[int], destinations: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Writes blocks, as SGLang's engines do.

        Returns:
            0, or -1 with the reason in the log.
        """
        try:
            self.move(session, self.batches(sources, destinations, lengths))
        except TransferError as error:
            logger.error("transfer to %.80s failed: %s", session, error)
            return -1
        return 0

    def send_probe(self, session: str) -> int:
        """SGLang's question whether a failed peer is back: a failed session stays failed until it registers anew."""
        return -1

    def move(self, session: str, batches: Iterable[Blocks]) -> int:
        """Writes batches, one after another, and waits for each.

        Returns:
            Bytes written.

        Raises:
            EngineError: Another engine's peer, or memory that is not registered.
            TransferFailed: The engine could not write; what arrived is undefined. A `StillWriting`: it may go on to.
        """
        peer, moved = session_of(session, self.engine.name), 0
        for batch in batches:
            if not len(batch.nbytes):
                continue
            handle = self.engine.submit(peer, batch)
            status = wait_batch(self.engine, handle, self._timeout)
            if not status.is_terminal:
                self.engine.cancel(handle)
                raise StillWriting(
                    handle,
                    f"{self.engine.name}: {handle.blocks} blocks to {peer[:80]} did not end in {self._timeout:g} s",
                    consequence="the engine may still write: the destination must not be used again yet",
                    remedy="look after the peer, or raise the time-out",
                )
            if status.error:
                raise TransferFailed(status.error, consequence="the destination holds undefined bytes")
            moved += handle.nbytes
        return moved

    def forget(self, session: str) -> None:
        """Has the engine give back what it holds for a peer that is gone, where it holds something."""
        with contextlib.suppress(EngineError):  # a peer of another engine was never written to
            forget_peer(self.engine, session_of(session, self.engine.name))

    def close(self) -> None:
        """Ends the engine."""
        self.engine.close()

    def batches(self, sources: Sequence[int], destinations: Sequence[int], lengths: Sequence[int]) -> Iterable[Blocks]:
        """Blocks, as `batch_transfer_sync` takes them, in batches that the engine takes.

        Raises:
            TransferFailed: They are no list of blocks.
        """
        return self._split(BlockList.of(sources, destinations, lengths))

    def _split(self, blocks: BlockList) -> Iterable[Blocks]:
        caps = self.engine.capabilities
        most, longest = caps.max_entries_per_batch, caps.max_block_bytes
        if longest is not None and len(blocks.nbytes) and int(blocks.nbytes.max()) > longest:
            blocks = _cut(blocks, longest)
        count = len(blocks.nbytes)
        step = most or max(count, 1)
        for start in range(0, count, step):
            window = slice(start, start + step)
            yield BlockList(blocks.source[window], blocks.destination[window], blocks.nbytes[window])


def _cut(blocks: BlockList, longest: int) -> BlockList:
    pieces: list[tuple[int, int, int]] = []
    for source, destination, nbytes in zip(
        blocks.source.tolist(), blocks.destination.tolist(), blocks.nbytes.tolist(), strict=True
    ):
        pieces += [(source + at, destination + at, min(longest, nbytes - at)) for at in range(0, nbytes, longest)]
    return BlockList.of(*(list(column) for column in zip(*pieces, strict=True)))
