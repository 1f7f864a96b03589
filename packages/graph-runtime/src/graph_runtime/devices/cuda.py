"""Capture and replay on a CUDA device through torch's CUDA graphs.

It owns everything that knows torch.cuda. No op of a CUDA graph takes new host arguments, so graphs here have no records
and an `UpdateSpec` that names keys is refused at capture: lengths belong into static buffers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch

from graph_runtime.device import OpRecord, UpdateValues
from graph_runtime.errors import CaptureRefused, GraphError, UnknownDevice
from graph_runtime.gate import DeviceGate
from graph_runtime.ledger import UpdateLedger

__all__ = ["CudaDevice", "CudaFence", "CudaGraph", "create"]

T = TypeVar("T")

_cuda: Any = torch.cuda  # streams and events are untyped in some releases of torch

_gates: dict[int, DeviceGate] = {}
_gates_lock = threading.Lock()


class CudaFence:
    """An event on the stream that was current when it was made.

    Args:
        event: A recorded event.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        """Whether the event was reached."""
        return bool(self._event.query())

    def wait(self, timeout: float | None) -> bool:
        """Waits for the event; with a time-out it asks again and again."""
        if timeout is not None:
            deadline = time.monotonic() + timeout
            pause = 20e-6
            while not self._event.query():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(pause)
                pause = min(pause * 2, 1e-3)
        self._event.synchronize()
        return True


class CudaGraph:
    """One `torch.cuda.CUDAGraph`.

    Args:
        graph: A captured graph.
        index: Its device.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, index: int) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._index = index
        self._ledger = UpdateLedger(())

    @property
    def records(self) -> tuple[OpRecord, ...]:
        """None: see the module."""
        return self._ledger.records

    @property
    def broken(self) -> str | None:
        """Why the graph is out of use, or None."""
        return self._ledger.broken

    def update(self, values: UpdateValues, *, constant: Collection[str] = ()) -> None:
        """Refuses every key; see `CapturedGraph.update`."""
        self._ledger.check(values, constant)

    def replay(self) -> None:
        """Enqueues the graph on the current stream; see `CapturedGraph.replay`."""
        self._ledger.consume()
        try:
            if self._graph is not None:
                with torch.cuda.device(self._index):
                    self._graph.replay()
        except BaseException as error:
            self._ledger.mark_broken(f"replay raised {type(error).__name__}: {error}")
            raise

    def abandon(self, reason: str) -> None:
        """Takes the graph out of use."""
        self._ledger.mark_broken(reason)

    def close(self) -> None:
        """Releases the graph."""
        self._ledger.close()
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.reset()


class CudaDevice:
    """One CUDA device as a graph device.

    Args:
        index: Its number, or None for the current device of the calling thread.

    Raises:
        UnknownDevice: There is no such device.
    """

    def __init__(self, index: int | None = None) -> None:
        count = torch.cuda.device_count()
        self._index = torch.cuda.current_device() if index is None and count else (index or 0)
        if not 0 <= self._index < count:
            raise UnknownDevice(
                "index",
                expected=f"0 to {count - 1}" if count else "a CUDA device, and a torch that was built for it",
                got=self._index,
                consequence="There is nothing to capture on.",
                remedy="Look at torch.cuda.device_count(), or use get_device('cpu').",
            )
        with _gates_lock:
            if self._index not in _gates:
                _gates[self._index] = DeviceGate(self.name, self.bind)
            self._gate = _gates[self._index]
        self._capture_stream: Any = None

    @property
    def name(self) -> str:
        """The name with its index."""
        return f"cuda:{self._index}"

    @property
    def torch_device(self) -> torch.device:
        """The device of static tensors."""
        return torch.device("cuda", self._index)

    @property
    def gate(self) -> DeviceGate:
        """Lock and worker of this device, shared in the process."""
        return self._gate

    def bind(self) -> None:
        """Makes this device current for the calling thread."""
        torch.cuda.set_device(self._index)

    def synchronize(self) -> None:
        """Waits for all work of the device."""
        torch.cuda.synchronize(self._index)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory. Shape: [nbytes]; dtype uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory. Shape: [nbytes]; dtype uint8."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueues the copy; see `GraphDevice.copy`."""
        destination.copy_(source, non_blocking=True)

    def record_fence(self) -> CudaFence:
        """An event after the current stream's work."""
        event = _cuda.Event()
        event.record(torch.cuda.current_stream(self._index))
        return CudaFence(event)

    def memory_held(self) -> int:
        """Reserved bytes of torch's allocator, graph pools included, after it gave back what is unused."""
        torch.cuda.synchronize(self._index)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._index)

    def new_pool(self) -> object | None:
        """A graph memory pool."""
        pool: object = torch.cuda.graph_pool_handle()
        return pool

    def capture(self, function: Callable[[], T], *, pool: object | None = None) -> tuple[CudaGraph, T]:
        """Captures on a stream of its own; see `GraphDevice.capture`."""
        options: dict[str, Any] = {} if pool is None else {"pool": pool}
        with torch.cuda.device(self._index), torch.no_grad():
            if self._capture_stream is None:
                self._capture_stream = _cuda.Stream(self._index)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, stream=self._capture_stream, **options):
                    output = function()
            except GraphError:
                raise
            except RuntimeError as error:
                raise CaptureRefused(
                    f"capture on {self.name}",
                    expected="work that the device can replay",
                    got=f"{type(error).__name__}: {error}",
                    consequence="There is no graph for this bucket.",
                    remedy="Keep host reads, data-dependent shapes and CPU tensors out of the forward.",
                ) from error
        return CudaGraph(graph, self._index), output


def create(name: str) -> CudaDevice:
    """Makes the device for `get_device`.

    Args:
        name: ``"cuda"`` or ``"cuda:1"``.
    """
    _, _, index = name.partition(":")
    if index and not index.isdigit():
        raise UnknownDevice(
            "name",
            expected="cuda or cuda:<number>",
            got=name,
            consequence="There is nothing to capture on.",
            remedy="Give a number after the colon.",
        )
    return CudaDevice(int(index) if index else None)
