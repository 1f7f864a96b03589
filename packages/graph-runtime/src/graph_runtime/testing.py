"""For tests of runners: a device that tells how it was used, and the check that a replay equals an eager step.

It owns recording, and delaying or failing a call on request. It computes nothing: a real device does, underneath.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

import torch

from .device import CapturedGraph, Fence, GraphDevice, OpRecord, UpdateValues
from .gate import DeviceGate
from .replay_check import Batch, ReplayCheck, ReplayDiffers, check_replay_equals_eager

__all__ = ["Batch", "RecordingDevice", "ReplayCheck", "ReplayDiffers", "check_replay_equals_eager"]

T = TypeVar("T")
Hook = Callable[[str], None]


class RecordingDevice:
    """A graph device around another one.

    Events: ``copy``, ``fence`` (recorded), ``wait`` (for a fence), ``capture``, ``update``, ``updated``, ``replay``,
    ``synchronize``, ``bind``.

    Args:
        device: The device that does the work.
        hook: Called with every event before it takes effect, on the thread of the call; it may sleep or raise.

    Attributes:
        events: The events so far.
        hook: May be replaced at any time.
    """

    def __init__(self, device: GraphDevice, hook: Hook | None = None) -> None:
        self._inner = device
        self.hook: Hook = hook if hook is not None else lambda event: None
        self.events: list[str] = []
        self._gate = DeviceGate(f"recording-{device.name}", self.bind)

    def note(self, event: str) -> None:
        """Records an event and runs the hook."""
        self.events.append(event)
        self.hook(event)

    @property
    def name(self) -> str:
        """The name of the device underneath."""
        return self._inner.name

    @property
    def torch_device(self) -> torch.device:
        """The torch device underneath."""
        return self._inner.torch_device

    @property
    def gate(self) -> DeviceGate:
        """A gate of its own, so that binding is seen."""
        return self._gate

    def synchronize(self) -> None:
        """Records and passes on."""
        self.note("synchronize")
        self._inner.synchronize()

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Passes on."""
        return self._inner.allocate_host(nbytes)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Passes on."""
        return self._inner.allocate(nbytes)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Records and passes on."""
        self.note("copy")
        self._inner.copy(destination, source)

    def record_fence(self) -> Fence:
        """Records and passes on."""
        self.note("fence")
        return _Fence(self, self._inner.record_fence())

    def memory_held(self) -> int:
        """Passes on."""
        return self._inner.memory_held()

    def new_pool(self) -> object | None:
        """Passes on."""
        return self._inner.new_pool()

    def capture(self, function: Callable[[], T], *, pool: object | None = None) -> tuple[CapturedGraph, T]:
        """Records and passes on; the graph records too."""
        self.note("capture")
        graph, output = self._inner.capture(function, pool=pool)
        return _Graph(self, graph), output

    def bind(self) -> None:
        """Records and passes on."""
        self.note("bind")
        self._inner.bind()


class _Fence:
    def __init__(self, owner: RecordingDevice, fence: Fence) -> None:
        self._owner = owner
        self._fence = fence

    def done(self) -> bool:
        return self._fence.done()

    def wait(self, timeout: float | None) -> bool:
        self._owner.note("wait")
        return self._fence.wait(timeout)


class _Graph:
    def __init__(self, owner: RecordingDevice, graph: CapturedGraph) -> None:
        self._owner = owner
        self._graph = graph

    @property
    def records(self) -> tuple[OpRecord, ...]:
        return self._graph.records

    @property
    def broken(self) -> str | None:
        return self._graph.broken

    def update(self, values: UpdateValues, *, constant: Collection[str] = ()) -> None:
        self._owner.note("update")
        self._graph.update(values, constant=constant)
        self._owner.note("updated")

    def replay(self) -> None:
        self._owner.note("replay")
        self._graph.replay()

    def abandon(self, reason: str) -> None:
        self._graph.abandon(reason)

    def close(self) -> None:
        self._graph.close()
