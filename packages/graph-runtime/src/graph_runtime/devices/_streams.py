"""What NPU and CUDA devices share: fences from events, memory, the gate of a device, and a graph's ledger.

It is given the torch module that drives the device (`torch.npu`, `torch.cuda`), whose functions have the same names. It
does not capture: that differs.
"""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

import torch

from graph_runtime.device import OpRecord
from graph_runtime.errors import CaptureRefused, UnknownDevice
from graph_runtime.gate import DeviceGate
from graph_runtime.ledger import UpdateLedger

__all__ = ["EventFence", "StreamDevice", "StreamGraph", "device_index", "refused"]

_gates: dict[str, DeviceGate] = {}
_gates_lock = threading.Lock()


class EventFence:
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
        """Waits for the event; with a time-out it asks again and again, so that a device that stopped is noticed."""
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


class StreamGraph:
    """One captured graph of torch, and what it takes.

    Args:
        graph: The graph; has `replay`.
        module: The torch module of the device.
        index: The device.
        ledger: Its records.
    """

    def __init__(self, graph: Any, module: Any, index: int, ledger: UpdateLedger) -> None:
        self._graph = graph
        self._module = module
        self._index = index
        self._ledger = ledger

    @property
    def records(self) -> tuple[OpRecord, ...]:
        """The updatable ops in capture order."""
        return self._ledger.records

    @property
    def broken(self) -> str | None:
        """Why the graph is out of use, or None."""
        return self._ledger.broken

    def replay(self) -> None:
        """Enqueues the graph on the current stream; see `CapturedGraph.replay`."""
        self._ledger.consume()
        try:
            with self._module.device(self._index):
                self._graph.replay()
        except BaseException as error:
            self._ledger.mark_broken(f"replay raised {type(error).__name__}: {error}")
            raise

    def abandon(self, reason: str) -> None:
        """Takes the graph out of use."""
        self._ledger.mark_broken(reason)


class StreamDevice:
    """One device with streams, all but its captures.

    Args:
        module: The torch module of the device.
        index: Its number, or None for the current device of the calling thread.
        remedy: What to do where there is no such device.

    Raises:
        UnknownDevice: There is no such device.
    """

    kind: ClassVar[str]

    def __init__(self, module: Any, index: int | None, *, remedy: str) -> None:
        self._module = module
        count = int(module.device_count())
        self._index = int(module.current_device()) if index is None and count else (index or 0)
        if not 0 <= self._index < count:
            raise UnknownDevice(
                "index",
                expected=f"0 to {count - 1}" if count else f"a device of kind {self.kind}",
                got=self._index,
                consequence="There is nothing to capture on.",
                remedy=remedy,
            )
        with _gates_lock:
            if self.name not in _gates:
                _gates[self.name] = DeviceGate(self.name, self.bind)
            self._gate = _gates[self.name]
        self._capture_stream: Any = None

    @property
    def name(self) -> str:
        """The name with its index."""
        return f"{self.kind}:{self._index}"

    @property
    def torch_device(self) -> torch.device:
        """The device of static tensors."""
        return torch.device(self.kind, self._index)

    @property
    def gate(self) -> DeviceGate:
        """Lock and worker of this device, shared in the process."""
        return self._gate

    def bind(self) -> None:
        """Makes this device current for the calling thread (a new thread starts on device 0)."""
        self._module.set_device(self._index)

    def synchronize(self) -> None:
        """Waits for all work of the device."""
        self._module.synchronize(self._index)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory. Shape: [nbytes]; dtype uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory. Shape: [nbytes]; dtype uint8."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueues the copy; see `GraphDevice.copy`."""
        destination.copy_(source, non_blocking=True)

    def record_fence(self) -> EventFence:
        """An event after the current stream's work."""
        event = self._module.Event()
        event.record(self._module.current_stream(self._index))
        return EventFence(event)

    def memory_held(self) -> int:
        """Reserved bytes of torch's allocator, graph pools included, after it gave back what is unused."""
        self._module.synchronize(self._index)
        self._module.empty_cache()
        return int(self._module.memory_reserved(self._index))

    def new_pool(self) -> object | None:
        """A graph memory pool."""
        pool: object = self._module.graph_pool_handle()
        return pool

    def _stream(self) -> Any:
        """The stream of all captures of this device object."""
        if self._capture_stream is None:
            self._capture_stream = self._module.Stream(device=self._index)
        return self._capture_stream


def device_index(name: str, kind: str) -> int | None:
    """The number in a device name, or None.

    Args:
        name: ``"npu"`` or ``"npu:1"``.
        kind: The part before the colon.

    Raises:
        UnknownDevice: What follows the colon is no number.
    """
    index = name.partition(":")[2]
    if index and not index.isdigit():
        raise UnknownDevice(
            "name",
            expected=f"{kind} or {kind}:<number>",
            got=name,
            consequence="There is nothing to capture on.",
            remedy="Give a number after the colon.",
        )
    return int(index) if index else None


def refused(name: str, error: BaseException) -> CaptureRefused:
    """What a capture raises where the device or torch refused something.

    Args:
        name: The device's.
        error: The refusal.
    """
    return CaptureRefused(
        f"capture on {name}",
        expected="work that the device can replay",
        got=f"{type(error).__name__}: {error}",
        consequence="There is no graph for this bucket.",
        remedy="Keep host reads, data-dependent shapes and CPU tensors out of the forward.",
    )
