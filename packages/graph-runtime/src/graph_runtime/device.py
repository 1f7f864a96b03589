"""What a device must offer for capture and replay, and the registry that finds a device by name.

It owns the protocols and the `OpRecord` that describes a captured, updatable op. It does not own any device: those
are leaves under `devices/`, registered here by import string and imported when they are first asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from .errors import UnknownDevice
from .gate import DeviceGate

__all__ = [
    "CapturedGraph",
    "Fence",
    "GraphDevice",
    "HostLengths",
    "OpRecord",
    "UpdateValues",
    "get_device",
    "register_device",
]

T = TypeVar("T")

HostLengths = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor
"""Lengths on the host: a list, an integer array or a CPU tensor of ints."""

UpdateValues = Mapping[str, HostLengths] | Sequence[Mapping[str, HostLengths]]
"""One mapping for all captured ops, or one mapping an op in capture order."""


@dataclass(frozen=True)
class OpRecord:
    """One captured op whose host arguments can be replaced between replays.

    Attributes:
        name: Name of the op as the device recorded it.
        updatable: Length arguments that were passed as host lists: an update replaces them.
        tensor_valued: Length arguments that were passed as device tensors: an update cannot replace them.
        absent: Length arguments that the op knows and that were not passed: an update would be ignored.
        lengths: Number of elements seen at capture, for every key of `updatable`.
    """

    name: str
    updatable: tuple[str, ...] = ()
    tensor_valued: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    lengths: Mapping[str, int] = field(default_factory=dict)


class Fence(Protocol):
    """A point in the device's work, recorded after what was enqueued before it."""

    def done(self) -> bool:
        """Whether everything before the fence has finished; never blocks."""
        ...

    def wait(self, timeout: float | None) -> bool:
        """Blocks the caller until the fence is reached; false when `timeout` seconds passed first."""
        ...


class CapturedGraph(Protocol):
    """A captured function. Each replay consumes exactly one update when there are updatable ops."""

    @property
    def records(self) -> tuple[OpRecord, ...]:
        """The updatable ops in capture order."""
        ...

    @property
    def broken(self) -> str | None:
        """Why the graph cannot be replayed any more, or None."""
        ...

    def update(self, values: UpdateValues, *, constant: Collection[str] = ()) -> None:
        """Replaces host arguments for the next replay; complete when it returns.

        Args:
            values: New lists, for all ops or one mapping an op.
            constant: Keys that deliberately keep the value of capture time.

        Raises:
            UpdateSpecError: The values do not fit the records; the graph is unchanged.
            UpdatePending: The previous update was not consumed by a replay.
            UpdateFailed: The device raised; the graph is broken.
        """
        ...

    def replay(self) -> None:
        """Enqueues the captured work on the caller's current stream.

        Raises:
            MissingUpdate: There are updatable ops and no update since the last replay.
            GraphBroken: An earlier update or replay failed.
        """
        ...

    def abandon(self, reason: str) -> None:
        """Marks the graph broken, for instance after an update that did not end in time."""
        ...

    def close(self) -> None:
        """Releases everything that the capture holds; may be called twice."""
        ...


class GraphDevice(Protocol):
    """A device on which functions are captured and replayed."""

    @property
    def name(self) -> str:
        """The name as `get_device` takes it."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Where static tensors live."""
        ...

    @property
    def gate(self) -> DeviceGate:
        """The lock and the update worker shared by everybody who must not interleave on this device."""
        ...

    def bind(self) -> None:
        """Makes the device current for the calling thread; the update worker calls it once before its first job."""
        ...

    def synchronize(self) -> None:
        """Waits for all work of the device."""
        ...

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Host memory from which the device can copy. Shape: [nbytes]; dtype uint8."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory that is never moved. Shape: [nbytes]; dtype uint8."""
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueues one copy on the current stream; the source must stay as it is until a later fence is done."""
        ...

    def record_fence(self) -> Fence:
        """A fence after everything enqueued on the current stream so far."""
        ...

    def memory_held(self) -> int:
        """Bytes that graphs and tensors keep from others, after what is unused was given back; for reports at capture.

        On a device with an allocator these are its reserved bytes, on a CPU those of captured graphs.
        """
        ...

    def new_pool(self) -> object | None:
        """A memory pool that several captures share, or None where that has no meaning."""
        ...

    def capture(self, function: Callable[[], T], *, pool: object | None = None) -> tuple[CapturedGraph, T]:
        """Captures one call of `function`.

        Returns:
            The graph, and what the function returned: its tensors are rewritten in place by every replay.

        Raises:
            CaptureRefused: The function ran something that cannot be replayed.
        """
        ...


_REGISTRY: dict[str, str] = {
    "cpu": "graph_runtime.devices.cpu:create",
    "cuda": "graph_runtime.devices.cuda:create",
    "npu": "graph_runtime.devices.npu:create",
}


def register_device(kind: str, factory: str) -> None:
    """Makes a kind of device known.

    Args:
        kind: The part of a device name before the colon.
        factory: ``module:function``; called with the whole name and the options of `get_device`.
    """
    module, _, function = factory.partition(":")
    if not kind or not module or not function:
        raise UnknownDevice(
            "factory",
            expected="a kind and 'module:function'",
            got=(kind, factory),
            consequence="The device could never be imported.",
            remedy="Give the import path and the function, separated by a colon.",
        )
    _REGISTRY[kind] = factory


def get_device(name: str, **options: Any) -> GraphDevice:
    """Finds and makes a device.

    Args:
        name: ``"cpu"``, ``"npu"`` or ``"npu:1"``, or a registered kind.
        **options: Passed to the device, for instance ``updatable=`` of the CPU device.

    Raises:
        UnknownDevice: No such kind is registered.
    """
    kind = name.partition(":")[0]
    if kind not in _REGISTRY:
        raise UnknownDevice(
            "name",
            expected=f"one of {sorted(_REGISTRY)} with an optional index",
            got=name,
            consequence="There is nothing to capture on.",
            remedy="Use a known kind, or register_device() first.",
        )
    module, _, function = _REGISTRY[kind].partition(":")
    return cast(GraphDevice, getattr(importlib.import_module(module), function)(name, **options))
