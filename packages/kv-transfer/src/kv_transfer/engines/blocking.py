"""What engines share whose library has one blocking call for a batch: registered memory, worker threads, codes.

A batch cannot be interrupted: `cancel` ends what waits, and what runs ends by itself. The library's calls are the
subclass's.
"""

from __future__ import annotations

import abc
import queue
import threading
from collections.abc import Callable, Sequence

from kv_transfer.arguments import check_kind, check_whole
from kv_transfer.engine import (
    DONE,
    Blocks,
    EngineCapabilities,
    TransferHandle,
    TransferState,
    TransferStatus,
    check_batch,
)
from kv_transfer.errors import EngineError
from kv_transfer.regions import RegionTable, check_region_count

__all__ = ["BlockingEngine", "check_workers"]


def check_workers(workers: int, bind_device: Callable[[], object] | None) -> None:
    """Refuses a number of worker threads that is none, and what cannot be called in them.

    Raises:
        ArgumentError: Not one to 1024 threads, or no function.
    """
    check_whole("workers", workers, 1024, least=1)
    if bind_device is not None:
        check_kind("bind_device", bind_device, Callable)  # type: ignore[arg-type]


class _Handle(TransferHandle):
    __slots__ = ("batch", "cancelled")

    def __init__(self, peer: str, batch: Blocks) -> None:
        super().__init__(peer, len(batch.nbytes), int(batch.nbytes.sum()))
        self.batch = batch
        self.cancelled = threading.Event()


class BlockingEngine(abc.ABC):
    """A `TransferEngine` over blocking calls whose codes are 0 for success.

    Args:
        name: As for `create_engine`.
        session: What peers reach it by.
        capabilities: Its limits; `settles_itself` is true of every such engine.
        workers: Batches on their way at once.
        bind_device: Called once in each worker, before its first batch: a new thread starts on device 0. A batch whose
            worker cannot be bound fails, and the next one tries again.
    """

    def __init__(
        self,
        name: str,
        session: str,
        capabilities: EngineCapabilities,
        workers: int,
        bind_device: Callable[[], object] | None = None,
    ) -> None:
        """Starts the worker threads; the library has started."""
        self._bind_device = bind_device
        self._name = name
        self._session = session
        self._capabilities = capabilities
        self._regions = RegionTable()
        self._queue: queue.SimpleQueue[_Handle | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._workers = tuple(
            threading.Thread(target=self._work, name=f"kv-transfer-{name}-{index}", daemon=True)
            for index in range(workers)
        )
        for worker in self._workers:
            worker.start()

    @property
    def name(self) -> str:
        """The name under which it was created."""
        return self._name

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
        self.register_all([(address, nbytes)])

    def register_all(self, regions: Sequence[tuple[int, int]]) -> None:
        """See `RegistersTogether.register_all`."""
        with self._regions.lock:
            self._refuse_closed()
            added: list[int] = []
            new: list[tuple[int, int]] = []
            try:
                for address, nbytes in regions:
                    if self._regions.add(address, nbytes):
                        new.append((address, nbytes))
                    added.append(address)
                check_region_count(self._name, len(self._regions), self._capabilities.max_regions)
                self._open(new)
            except BaseException:
                for address in added:
                    self._regions.remove(address)
                raise

    def _open(self, regions: Sequence[tuple[int, int]]) -> None:
        """Asks the library; what it took before it refused one is taken back, whatever it says to that."""
        if not regions:
            return
        code = self._register(regions)
        if code != 0:
            if len(regions) > 1:  # which of them it took, its code does not say
                for address, _ in regions:
                    self._unregister(address)
            nbytes = sum(size for _, size in regions)
            where = f"at {regions[0][0]:#x}" if len(regions) == 1 else f"in {len(regions)} regions"
            raise EngineError(
                f"{self._name} cannot register {nbytes} bytes {where}: {self._describe(code)}",
                code=code,
                local=regions[0] if len(regions) == 1 else len(regions),
                consequence="nothing of it is open to peers",
            )

    def unregister(self, address: int) -> None:
        """See `TransferEngine.unregister`."""
        with self._regions.lock:
            if self._closed:
                return
            if self._regions.remove(address):
                code = self._unregister(address)
                if code != 0:
                    raise EngineError(
                        f"{self._name} cannot unregister {address:#x}: {self._describe(code)}",
                        code=code,
                        local=address,
                        consequence="peers may still be able to write there",
                        remedy="close the engine before the memory is freed",
                    )

    def submit(self, peer: str, batch: Blocks) -> TransferHandle:
        """See `TransferEngine.submit`."""
        self._refuse_closed()
        check_batch(peer, batch, self._capabilities)
        self._regions.check(batch.source, batch.nbytes, "source")
        handle = _Handle(peer, batch)
        with self._lock:
            self._refuse_closed()
            self._queue.put(handle)
        return handle

    def poll(self, handle: TransferHandle) -> TransferStatus:
        """See `TransferEngine.poll`."""
        return check_kind("handle", handle, TransferHandle).status

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
                self._unregister(address)
            self._shut_down()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineError(f"engine {self._session} is closed", local=self._session)

    def _work(self) -> None:
        bound = self._bind_device is None
        while (handle := self._queue.get()) is not None:
            if self._closed:
                handle.settle(TransferStatus(TransferState.FAILED, f"engine {self._session} was closed"))
            elif handle.cancelled.is_set():
                handle.settle(TransferStatus(TransferState.FAILED, "cancelled"))
            elif not bound and (error := self._bind()):
                handle.settle(TransferStatus(TransferState.FAILED, error))
            else:
                bound = True
                handle.settle(self._run(handle))

    def _bind(self) -> str:
        """Binds this thread to the caller's device; in words why not, or nothing."""
        try:
            if self._bind_device is not None:
                self._bind_device()
        except Exception as error:  # the caller's own function
            return f"{self._name}: bind_device raised {error!r}; no byte of the batch was written"
        return ""

    def _run(self, handle: _Handle) -> TransferStatus:
        batch = handle.batch
        try:
            code = self._write(handle.peer, batch.source.tolist(), batch.destination.tolist(), batch.nbytes.tolist())
            if code == 0:
                return DONE
            problem = self._describe(code)
        except Exception as error:  # the library's, and of its binding: the next batch is another
            problem = str(error) if isinstance(error, EngineError) else repr(error)
        return TransferStatus(
            TransferState.FAILED,
            f"{self._name} write of {handle.blocks} blocks, {handle.nbytes} bytes, to {handle.peer!r:.80}: {problem}",
        )

    @abc.abstractmethod
    def _register(self, regions: Sequence[tuple[int, int]]) -> int: ...

    @abc.abstractmethod
    def _unregister(self, address: int) -> int: ...

    @abc.abstractmethod
    def _write(self, peer: str, source: list[int], destination: list[int], nbytes: list[int]) -> int: ...

    @abc.abstractmethod
    def _shut_down(self) -> None: ...

    @abc.abstractmethod
    def _describe(self, code: int) -> str: ...
