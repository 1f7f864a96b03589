"""When the layers of a step are computed: device events behind the `Ready` protocol, or marks where there is no device.

One object a step, shared by the chunks of all its requests.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import kv_planner

__all__ = ["StepLayers"]

_PAUSE = 0.0005


class _Event(Protocol):
    def record(self) -> None: ...

    def query(self) -> bool: ...


class StepLayers:
    """Layers that the model has passed.

    Args:
        device: `torch.device` of the caches.
        module: torch's module of that device, with `Event` and `device`; None where what is called has happened.
    """

    def __init__(self, device: Any, module: Any | None) -> None:
        """None is computed yet."""
        self._device = device
        self._module = module
        self._changed = threading.Condition()
        self._layers: dict[tuple[kv_planner.Part, int], _Event | None] = {}
        self._all: list[_Event | None] = []

    def passed(self, part: kv_planner.Part, layer_id: int) -> None:
        """The layer's work is on the device's current stream; call on the thread that put it there."""
        event = self._mark()
        with self._changed:
            self._layers[part, layer_id] = event
            self._changed.notify_all()

    def passed_all(self) -> None:
        """The whole step is on the current stream, with layers that never called, as in a replayed graph."""
        event = self._mark()
        with self._changed:
            self._all.append(event)
            self._changed.notify_all()

    def query(self, part: kv_planner.Part, layer_id: int) -> bool:
        """See `Ready.query`."""
        with self._changed:
            known = (part, layer_id) in self._layers
            events = [self._layers[part, layer_id]] if known else list(self._all)
        return any(self._happened(event) for event in events)

    def wait(self, part: kv_planner.Part, layer_id: int, seconds: float) -> bool:
        """See `Ready.wait`."""
        end = time.monotonic() + seconds
        while not self.query(part, layer_id):
            left = end - time.monotonic()
            if left <= 0:
                return False
            with self._changed:
                waiting = (part, layer_id) not in self._layers and not self._all
                self._changed.wait(left if waiting else min(left, _PAUSE))
        return True

    def _mark(self) -> _Event | None:
        if self._module is None:
            return None
        event: _Event = self._module.Event()
        event.record()
        return event

    def _happened(self, event: _Event | None) -> bool:
        if event is None or self._module is None:
            return True
        with self._module.device(self._device):
            return event.query()
