"""Capture and replay on a CUDA device through torch's CUDA graphs.

It owns everything that knows torch.cuda. No op of a CUDA graph takes new host arguments, so graphs here have no records
and an `UpdateSpec` that names keys is refused at capture: lengths belong into static buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch

from graph_runtime.device import UpdateValues
from graph_runtime.errors import GraphError
from graph_runtime.ledger import UpdateLedger

from ._streams import StreamDevice, StreamGraph, device_index, refused

__all__ = ["CudaDevice", "CudaGraph", "create"]

T = TypeVar("T")

_cuda: Any = torch.cuda  # streams and events are untyped in some releases of torch


class CudaGraph(StreamGraph):
    """One `torch.cuda.CUDAGraph`.

    Args:
        graph: A captured graph.
        index: Its device.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, index: int) -> None:
        super().__init__(graph, _cuda, index, UpdateLedger(()))

    def update(self, values: UpdateValues, *, constant: Collection[str] = ()) -> None:
        """Refuses every key; see `CapturedGraph.update`."""
        self._ledger.check(values, constant)

    def close(self) -> None:
        """Releases the graph."""
        self._ledger.close()
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.reset()


class CudaDevice(StreamDevice):
    """One CUDA device as a graph device.

    Args:
        index: Its number, or None for the current device of the calling thread.

    Raises:
        UnknownDevice: There is no such device.
    """

    kind = "cuda"

    def __init__(self, index: int | None = None) -> None:
        super().__init__(_cuda, index, remedy="Look at torch.cuda.device_count(), or use get_device('cpu').")

    def capture(self, function: Callable[[], T], *, pool: object | None = None) -> tuple[CudaGraph, T]:
        """Captures on a stream of its own; see `GraphDevice.capture`."""
        options: dict[str, Any] = {} if pool is None else {"pool": pool}
        with torch.cuda.device(self._index), torch.no_grad():
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, stream=self._stream(), **options):
                    output = function()
            except GraphError:
                raise
            except RuntimeError as error:
                raise refused(self.name, error) from error
        return CudaGraph(graph, self._index), output


def create(name: str) -> CudaDevice:
    """Makes the device for `get_device`.

    Args:
        name: ``"cuda"`` or ``"cuda:1"``.
    """
    return CudaDevice(device_index(name, "cuda"))
