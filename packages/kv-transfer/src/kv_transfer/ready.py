"""When the bytes of a layer may be read: the `Ready` protocol of layer-wise sends, and marks set by the host.

Says nothing about pages or rooms: a `Ready` is given together with a chunk, and speaks of that chunk's pages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import kv_planner

__all__ = ["LayerMarks", "Ready"]


@runtime_checkable
class Ready(Protocol):
    """Which layers of one chunk have been computed; device events behind it are the caller's."""

    def query(self, part: kv_planner.Part, layer_id: int) -> bool:
        """Whether all bytes of the layer lie in the chunk's pages; once true it stays true. Must not block."""

    def wait(self, part: kv_planner.Part, layer_id: int, seconds: float) -> bool:
        """Waits for that, at most `seconds`; called by the thread that waits in `SenderSession.finish`."""


class LayerMarks:
    """Layers that the host marks one by one; all methods may be called from any thread."""

    def __init__(self) -> None:
        """Nothing is computed yet."""
        self._changed = threading.Condition()
        self._marked: set[tuple[kv_planner.Part, int]] = set()

    def mark(self, layer_ids: int | Iterable[int], part: kv_planner.Part = "target") -> None:
        """Says that layers are computed."""
        ids = [layer_ids] if isinstance(layer_ids, int) else list(layer_ids)
        with self._changed:
            self._marked.update((part, layer_id) for layer_id in ids)
            self._changed.notify_all()

    def query(self, part: kv_planner.Part, layer_id: int) -> bool:
        """See `Ready.query`."""
        with self._changed:
            return (part, layer_id) in self._marked

    def wait(self, part: kv_planner.Part, layer_id: int, seconds: float) -> bool:
        """See `Ready.wait`."""
        with self._changed:
            return self._changed.wait_for(lambda: (part, layer_id) in self._marked, seconds)
