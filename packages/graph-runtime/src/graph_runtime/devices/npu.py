"""Capture and replay on an Ascend NPU through torch_npu's graphs.

It owns everything that knows torch_npu: devices, events, pools, and reading the records of a captured graph. The order
of update and replay is the runner's.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch

from graph_runtime.device import OpRecord, UpdateValues
from graph_runtime.errors import GraphError, UnknownDevice, UpdateFailed
from graph_runtime.ledger import UpdateLedger

from ._streams import StreamDevice, StreamGraph, device_index, refused

__all__ = ["NpuDevice", "NpuGraph", "create"]

T = TypeVar("T")


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


class NpuGraph(StreamGraph):
    """One `torch.npu.NPUGraph` with its updatable ops.

    Args:
        graph: A captured graph.
        index: Its device.
    """

    def __init__(self, graph: Any, index: int) -> None:
        found = [_describe(record) for record in graph.graph_dispatch_mode.graph_dispatch_records]
        super().__init__(graph, _npu(), index, UpdateLedger([record for record, _ in found]))
        self._host_tensors = [dtypes for _, dtypes in found]
        self._updating = threading.Lock()

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


class NpuDevice(StreamDevice):
    """One NPU as a graph device.

    Args:
        index: Its number, or None for the current device of the calling thread.

    Raises:
        UnknownDevice: There is no such NPU.
    """

    kind = "npu"

    def __init__(self, index: int | None = None) -> None:
        super().__init__(_npu(), index, remedy="Look at torch.npu.device_count().")
        self._update_stream: Any = None

    def capture(self, function: Callable[[], T], *, pool: object | None = None) -> tuple[NpuGraph, T]:
        """Captures with auto dispatch, so that updatable ops get records; see `GraphDevice.capture`."""
        npu = self._module
        failure: list[BaseException] = []

        def guarded() -> T:
            try:
                return function()
            except BaseException as error:
                failure.append(error)
                raise

        with npu.device(self._index), torch.no_grad():
            stream = npu.current_stream(self._index)
            graph = npu.NPUGraph()
            self._own_update_stream(npu, graph)
            try:
                with npu.graph(graph, pool=pool, stream=self._stream(), auto_dispatch_capture=True):
                    output = guarded()
            except BaseException as error:
                original = failure[0] if failure else error
                failure.clear()
                self._clean_up(npu, graph, stream)
                if isinstance(original, RuntimeError) and not isinstance(original, GraphError):
                    raise refused(self.name, original) from original
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
    return NpuDevice(device_index(name, "npu"))


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
