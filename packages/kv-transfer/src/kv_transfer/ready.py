"""When the bytes of a layer may be read: the `Ready` protocol of layer-wise sends, and marks set by the host.

Says nothing about pages or rooms: a `Ready` is given together with a chunk, and speaks of that chunk's pages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

import kv_planner

from kv_transfer.arguments import check_items, check_kind, check_seconds, check_whole, check_word, told
from kv_transfer.errors import ArgumentError
from kv_transfer.terms import ALL_PARTS

__all__ = ["LayerMarks", "NotifyingReady", "Ready"]


@runtime_checkable
class Ready(Protocol):
    """Which layers of one chunk have been computed; device events behind it are the caller's.

    One that is no `NotifyingReady` is asked every millisecond.
    """

    def query(self, part: kv_planner.Part, layer_id: int) -> bool:
        """Whether all bytes of the layer lie in the chunk's pages; once true it stays true. Must not block."""

    def wait(self, part: kv_planner.Part, layer_id: int, seconds: float) -> bool:
        """Waits for that, at most `seconds`; called by the thread that waits in `SenderSession.finish`."""


@runtime_checkable
class NotifyingReady(Ready, Protocol):
    """A `Ready` that says when to ask it again, so that a layer leaves at once and nobody polls."""

    def subscribe(self, wake: Callable[[], None]) -> None:
        """From now on calls `wake` after each change, from any thread.

        `wake` neither blocks nor raises, and may be called at any time later; given twice, it is called once. A sender
        subscribes when the chunk is handed to it.
        """


class LayerMarks:
    """Layers that the host marks one by one; all methods may be called from any thread. A `NotifyingReady`."""

    def __init__(self) -> None:
        """Nothing is computed yet."""
        self._changed = threading.Condition()
        self._marked: set[tuple[kv_planner.Part, int]] = set()
        self._wakes: set[Callable[[], None]] = set()

    def mark(self, layer_ids: int | Iterable[int], part: kv_planner.Part = "target") -> None:
        """Says that layers are computed.

        Raises:
            ArgumentError: No layer ids, or no part: the layers would never leave.
        """
        several = isinstance(layer_ids, Iterable) and not isinstance(layer_ids, str | bytes)
        given = check_items("layer_ids", layer_ids) if several else (layer_ids,)  # type: ignore[arg-type]
        ids = [check_whole("layer_ids", layer_id, 2**31 - 1) for layer_id in given]
        check_word("part", part, ALL_PARTS)
        with self._changed:
            self._marked.update((part, layer_id) for layer_id in ids)
            self._changed.notify_all()
            wakes = tuple(self._wakes)
        for wake in wakes:
            wake()

    def subscribe(self, wake: Callable[[], None]) -> None:
        """See `NotifyingReady.subscribe`."""
        check_kind("wake", wake, Callable)  # type: ignore[arg-type]
        with self._changed:
            self._wakes.add(wake)

    def query(self, part: kv_planner.Part, layer_id: int) -> bool:
        """See `Ready.query`."""
        with self._changed:
            return self._is_marked(part, layer_id)

    def wait(self, part: kv_planner.Part, layer_id: int, seconds: float) -> bool:
        """See `Ready.wait`."""
        check_seconds("seconds", seconds)
        with self._changed:
            return self._changed.wait_for(lambda: self._is_marked(part, layer_id), seconds)

    def _is_marked(self, part: kv_planner.Part, layer_id: int) -> bool:
        try:
            return (part, layer_id) in self._marked
        except TypeError:  # a list, for example; asked for each layer, so that nothing is looked at beforehand
            raise ArgumentError(
                f"part, layer_id: expected a part and a whole number, got {told(part)} and {told(layer_id)}",
                local=f"{type(part).__name__}, {type(layer_id).__name__}",
                consequence="no such layer will ever be computed",
                remedy='ask for "target" or "draft" and a layer id',
            ) from None
