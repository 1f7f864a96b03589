"""Capture and replay on a CPU: records torch ops and runs them again into the same memory.

It owns the CPU form of every device protocol, so that runners work and are tested anywhere. It does not make a step
faster, and it computes at capture (an accelerator does not).
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch

from graph_runtime.device import OpRecord, UpdateValues
from graph_runtime.devices._recorder import HostReadGuard, Node, Recorder
from graph_runtime.errors import UnknownDevice
from graph_runtime.gate import DeviceGate
from graph_runtime.ledger import UpdateLedger

__all__ = ["CpuDevice", "CpuFence", "CpuGraph", "create"]

T = TypeVar("T")
_serial = itertools.count()


class CpuFence:
    """A fence that is reached when it is made: a CPU finishes each op before the next."""

    def done(self) -> bool:
        """Always true."""
        return True

    def wait(self, timeout: float | None) -> bool:
        """Returns true at once."""
        return True


class CpuGraph:
    """The recorded ops of one call.

    Args:
        nodes: The ops in order.
        updatable: Op name without overload, to the list arguments that may be replaced.
        nbytes: Memory that the ops write and keep.
    """

    def __init__(self, nodes: Sequence[Node], updatable: Mapping[str, Sequence[str]], nbytes: int = 0) -> None:
        self._nodes = list(nodes)
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._slots: list[dict[str, tuple[Any, Any]]] = []
        records = []
        for node in self._nodes:
            name = node.func._schema.name
            if name in updatable:
                record, slots = _describe(node, updatable[name])
                records.append(record)
                self._slots.append(slots)
        self._ledger = UpdateLedger(records)

    @property
    def records(self) -> tuple[OpRecord, ...]:
        """The updatable ops in capture order."""
        return self._ledger.records

    @property
    def broken(self) -> str | None:
        """Why the graph is out of use, or None."""
        return self._ledger.broken

    @property
    def node_count(self) -> int:
        """Number of ops that a replay runs."""
        return len(self._nodes)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that its ops write; 0 when closed."""
        return self._nbytes

    def update(self, values: UpdateValues, *, constant: Collection[str] = ()) -> None:
        """Replaces list arguments for the next replay; see `CapturedGraph.update`."""
        with self._lock:
            plan = self._ledger.check(values, constant)
            for slots, chosen in zip(self._slots, plan, strict=True):
                for key, value in chosen.items():
                    container, where = slots[key]
                    container[where] = value
            self._ledger.armed()

    def replay(self) -> None:
        """Runs the recorded ops; see `CapturedGraph.replay`."""
        with self._lock:
            self._ledger.consume()
            try:
                with torch.inference_mode():
                    for node in self._nodes:
                        node.run()
            except BaseException as error:
                self._ledger.mark_broken(f"replay raised {type(error).__name__}: {error}")
                raise

    def abandon(self, reason: str) -> None:
        """Takes the graph out of use."""
        self._ledger.mark_broken(reason)

    def close(self) -> None:
        """Drops all ops and the tensors that they hold."""
        with self._lock:
            self._ledger.close()
            self._nbytes = 0
            self._nodes.clear()
            self._slots.clear()


class CpuDevice:
    """The CPU as a graph device.

    Args:
        updatable: Qualified op name, such as ``"spec_kernels::paged_attention"``, to the names of those schema
            arguments (``int[]``, ``SymInt[]``) that change from step to step.
        name: Name in messages and of the update thread.

    Raises:
        UnknownDevice: An op or argument of `updatable` does not exist, or the argument is not a list of ints.
    """

    def __init__(self, *, updatable: Mapping[str, Sequence[str]] | None = None, name: str = "cpu") -> None:
        self._name = name
        self._updatable = {op: tuple(keys) for op, keys in (updatable or {}).items()}
        for op, keys in self._updatable.items():
            _check_updatable(op, keys)
        # Devices on a CPU share nothing, so each has its own gate and threads may work beside each other.
        self._captured: weakref.WeakSet[CpuGraph] = weakref.WeakSet()
        self._gate = DeviceGate(f"{name}-{next(_serial)}", self.bind)

    @property
    def name(self) -> str:
        """The name."""
        return self._name

    @property
    def torch_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def gate(self) -> DeviceGate:
        """Lock and worker of this device object."""
        return self._gate

    def bind(self) -> None:
        """Nothing to bind on a CPU; called once by the update worker."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Host memory. Shape: [nbytes]; dtype uint8."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory of the device, here the host's too, but apart from `allocate_host`. Shape: [nbytes]; dtype uint8."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copies at once."""
        destination.copy_(source)

    def record_fence(self) -> CpuFence:
        """A fence that is already reached."""
        return CpuFence()

    def memory_held(self) -> int:
        """Bytes that the captured graphs of this device hold."""
        return sum(graph.nbytes for graph in self._captured)

    def new_pool(self) -> object | None:
        """None: each capture keeps its own memory."""
        return None

    def capture(self, function: Callable[[], T], *, pool: object | None = None) -> tuple[CpuGraph, T]:
        """Runs `function` once and records its ops; see `GraphDevice.capture`."""
        recorder = Recorder("cpu")
        with torch.no_grad(), HostReadGuard(recorder), recorder:
            output = function()
        graph = CpuGraph(recorder.nodes, self._updatable, recorder.nbytes)
        self._captured.add(graph)
        return graph, output


def create(name: str, *, updatable: Mapping[str, Sequence[str]] | None = None) -> CpuDevice:
    """Makes the device for `get_device`.

    Args:
        name: ``"cpu"``, with an index or without.
        updatable: See `CpuDevice`.
    """
    return CpuDevice(updatable=updatable, name=name)


def _describe(node: Node, keys: Sequence[str]) -> tuple[OpRecord, dict[str, tuple[Any, Any]]]:
    slots: dict[str, tuple[Any, Any]] = {}
    lengths: dict[str, int] = {}
    absent: list[str] = []
    for key in keys:
        place = node.argument(key)
        value = None if place is None else place[0][place[1]]  # type: ignore[index]
        if place is None or value is None:
            absent.append(key)
        else:
            slots[key] = place
            lengths[key] = len(value)
    record = OpRecord(node.func._schema.name, tuple(slots), (), tuple(absent), lengths)
    return record, slots


def _check_updatable(op: str, keys: Sequence[str]) -> None:
    namespace, _, base = op.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), base, None) if base else None
    if packet is None:
        raise _bad_updatable(op, "an op that is registered with torch", "no such op")
    types = {
        argument.name: str(argument.type)
        for overload in packet.overloads()
        for argument in getattr(packet, overload)._schema.arguments
    }
    for key in keys:
        if "List[int]" not in types.get(key, "").replace("SymInt", "int"):
            raise _bad_updatable(f"{op}, argument {key!r}", "an int[] or SymInt[] argument", types.get(key, "none"))


def _bad_updatable(subject: str, expected: str, got: str) -> UnknownDevice:
    return UnknownDevice(
        f"updatable {subject}",
        expected=expected,
        got=got,
        consequence="No update would ever reach it.",
        remedy="Register the op first and name its list arguments as in its schema.",
    )
