"""Capture and replay on an Ascend NPU through torch_npu's graphs.

It owns everything that knows torch_npu: devices, events, pools, and reading the records of a captured graph. The order
of update and replay is the runner's.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch

from graph_runtime.device import OpRecord, UpdateValues
from graph_runtime.errors import CaptureRefused, GraphError, UnknownDevice, UpdateFailed
from graph_runtime.gate import DeviceGate
from graph_runtime.ledger import UpdateLedger

__all__ = ["NpuDevice", "NpuFence", "NpuGraph", "create"]

T = TypeVar("T")

_gates: dict[int, DeviceGate] = {}
_gates_lock = threading.Lock()


def _npu() -> Any:
    try:
        return importlib.import_module("torch_npu").npu
    except ImportError as error:
        raise UnknownDevice(
            "npu",
            expected="torch_npu and the CANN libraries that it loads",
            got=f"{type(error).__name__}: {error}",
            consequence="There is nothing to capture on.",
            remedy="Install graph-runtime[npu] and CANN, or use get_device('cpu').",
        ) from error


class NpuFence:
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


class NpuGraph:
    """One `torch.npu.NPUGraph` with its updatable ops.

    Args:
        graph: A captured graph.
        index: Its device.
    """

    def __init__(self, graph: Any, index: int) -> None:
        self._graph = graph
        self._index = index
        self._updating = threading.Lock()
        found = [_describe(record) for record in graph.graph_dispatch_mode.graph_dispatch_records]
        self._host_tensors = [dtypes for _, dtypes in found]
        self._ledger = UpdateLedger([record for record, _ in found])

    @property
    def records(self) -> tuple[OpRecord, ...]:
        """The updatable ops in capture order."""
        return self._ledger.records

    @property
    def broken(self) -> str | None:
        """Why the graph is out of use, or None."""
        return self._ledger.broken

    def update(self, values: UpdateValues, *, constant: Collection[str] = ()) -> None:
        """Re-issues every updatable op with new lists; see `CapturedGraph.update`.

        torch_npu ignores keys that an op was not captured with, so nothing reaches it that was not checked first.
        """
        with self._updating:
            plan: list[dict[str, Any]] = list(self._ledger.check(values, constant))
            if not plan:
                return
            for chosen, dtypes in zip(plan, self._host_tensors, strict=True):
                for key, dtype in dtypes.items():
                    if key in chosen:
                        chosen[key] = torch.tensor(chosen[key], dtype=dtype)
            try:
                self._graph.update(cpu_update_input=plan)
            except Exception as error:
                self._ledger.mark_broken(f"update raised {type(error).__name__}: {error}")
                raise UpdateFailed(
                    f"update of {[record.name for record in self.records]}",
                    expected="every captured op re-issued with the lists of this step",
                    got=f"{type(error).__name__}: {error}",
                    consequence="Nothing was replayed; ops may hold new and old lists, so the graph is out of use.",
                    remedy="Mend the cause and capture the bucket again.",
                ) from error
            self._ledger.armed()

    def replay(self) -> None:
        """Enqueues the graph on the current stream; see `CapturedGraph.replay`."""
        self._ledger.consume()
        npu = _npu()
        try:
            with npu.device(self._index):
                self._graph.replay()
        except BaseException as error:
            self._ledger.mark_broken(f"replay raised {type(error).__name__}: {error}")
            raise

    def abandon(self, reason: str) -> None:
        """Takes the graph out of use."""
        self._ledger.mark_broken(reason)

    def close(self) -> None:
        """Releases the graph. An update that hangs keeps it alive until that update ends."""
        self._ledger.close()
        graph, self._graph = self._graph, None
        if graph is not None and self._updating.acquire(blocking=False):
            try:
                graph.graph_dispatch_mode.graph_dispatch_records.clear()
                graph.reset()
            finally:
                self._updating.release()


class NpuDevice:
    """One NPU as a graph device.

    Args:
        index: Its number, or None for the current device of the calling thread.

    Raises:
        UnknownDevice: There is no such NPU.
    """

    def __init__(self, index: int | None = None) -> None:
        npu = _npu()
        count = int(npu.device_count())
        self._index = int(npu.current_device()) if index is None and count else (index or 0)
        if not 0 <= self._index < count:
            raise UnknownDevice(
                "index",
                expected=f"0 to {count - 1}" if count else "an NPU",
                got=self._index,
                consequence="There is nothing to capture on.",
                remedy="Look at torch.npu.device_count().",
            )
        with _gates_lock:
            if self._index not in _gates:
                _gates[self._index] = DeviceGate(self.name, self.bind)
            self._gate = _gates[self._index]
        self._capture_stream: Any = None
        self._update_stream: Any = None

    @property
    def name(self) -> str:
        """The name with its index."""
        return f"npu:{self._index}"

    @property
    def torch_device(self) -> torch.device:
        """The device of static tensors."""
        return torch.device("npu", self._index)

    @property
    def gate(self) -> DeviceGate:
        """Lock and worker of this NPU, shared in the process."""
        return self._gate

    def bind(self) -> None:
        """Makes this NPU current for the calling thread (a new thread starts on device 0)."""
        _npu().set_device(self._index)

    def synchronize(self) -> None:
        """Waits for all work of the NPU."""
        _npu().synchronize(self._index)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory. Shape: [nbytes]; dtype uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory. Shape: [nbytes]; dtype uint8."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueues the copy; see `GraphDevice.copy`."""
        destination.copy_(source, non_blocking=True)

    def record_fence(self) -> NpuFence:
        """An event after the current stream's work."""
        npu = _npu()
        event = npu.Event()
        event.record(npu.current_stream(self._index))
        return NpuFence(event)

    def memory_held(self) -> int:
        """Reserved bytes of torch_npu's allocator, graph pools included, after it gave back what is unused."""
        npu = _npu()
        npu.synchronize(self._index)
        npu.empty_cache()
        return int(npu.memory_reserved(self._index))

    def new_pool(self) -> object | None:
        """A graph memory pool."""
        pool: object = _npu().graph_pool_handle()
        return pool

    def capture(self, function: Callable[[], T], *, pool: object | None = None) -> tuple[NpuGraph, T]:
        """Captures with auto dispatch, so that updatable ops get records; see `GraphDevice.capture`."""
        npu = _npu()
        failure: list[BaseException] = []

        def guarded() -> T:
            try:
                return function()
            except BaseException as error:
                failure.append(error)
                raise

        with npu.device(self._index), torch.no_grad():
            if self._capture_stream is None:
                self._capture_stream = npu.Stream(device=self._index)
            stream = npu.current_stream(self._index)
            graph = npu.NPUGraph()
            self._own_update_stream(npu, graph)
            try:
                with npu.graph(graph, pool=pool, stream=self._capture_stream, auto_dispatch_capture=True):
                    output = guarded()
            except BaseException as error:
                original = failure[0] if failure else error
                failure.clear()
                self._clean_up(npu, graph, stream)
                if isinstance(original, RuntimeError) and not isinstance(original, GraphError):
                    raise CaptureRefused(
                        f"capture on {self.name}",
                        expected="work that the device can replay",
                        got=f"{type(original).__name__}: {original}",
                        consequence="There is no graph for this bucket.",
                        remedy="Keep host reads, data-dependent shapes and CPU tensors out of the forward.",
                    ) from original
                raise original from None
            return NpuGraph(graph, self._index), output

    def _own_update_stream(self, npu: Any, graph: Any) -> None:
        """torch_npu keeps one update stream for the process, on the device that captured first."""
        if graph.graph_dispatch_mode.update_stream.device_index != self._index:
            if self._update_stream is None:
                self._update_stream = npu.Stream(device=self._index)
            graph.graph_dispatch_mode.update_stream = self._update_stream

    @staticmethod
    def _clean_up(npu: Any, graph: Any, stream: Any) -> None:
        """torch.npu.graph leaves its dispatch mode and stream current when ending the capture raises as well."""
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        mode: Any = graph.graph_dispatch_mode
        if id(_get_current_dispatch_mode()) == id(mode):
            mode.__exit__(None, None, None)
        npu.set_stream(stream)
        graph.graph_dispatch_mode.graph_dispatch_records.clear()


def create(name: str) -> NpuDevice:
    """Makes the device for `get_device`.

    Args:
        name: ``"npu"`` or ``"npu:1"``.
    """
    _, _, index = name.partition(":")
    if index and not index.isdigit():
        raise UnknownDevice(
            "name",
            expected="npu or npu:<number>",
            got=name,
            consequence="There is nothing to capture on.",
            remedy="Give a number after the colon.",
        )
    return NpuDevice(int(index) if index else None)


def _describe(record: Any) -> tuple[OpRecord, dict[str, torch.dtype]]:
    """The updatable arguments of a torch_npu record, and the dtypes of those that are host tensors."""
    handlers = importlib.import_module("torch_npu.npu._npugraph_handlers.npugraph_handler")._NPU_GRAPH_OP_HANDLERS
    name = record.op_cache_entry.__name__
    handler = handlers.get(name)
    specs: Sequence[tuple[str, int | str, str]] = handler.get_update_specs(name) if handler is not None else ()
    updatable: list[str] = []
    tensors: list[str] = []
    absent: list[str] = []
    lengths: dict[str, int] = {}
    dtypes: dict[str, torch.dtype] = {}
    for location, where, key in specs:
        value = record.kwargs.get(key)
        if value is None and location == "arg" and isinstance(where, int) and where < len(record.args):
            value = record.args[where]
        if value is None:
            absent.append(key)
        elif isinstance(value, (list, tuple)):
            updatable.append(key)
            lengths[key] = len(value)
        elif isinstance(value, torch.Tensor) and value.device.type == "cpu":
            updatable.append(key)
            lengths[key] = value.numel()
            dtypes[key] = value.dtype
        else:
            tensors.append(key)
    return OpRecord(name, tuple(updatable), tuple(tensors), tuple(absent), lengths), dtypes
