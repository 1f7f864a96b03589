"""Owns loads, from the host to the device: their queue, their layers, their cancellation. It does not choose them.

Layers are submitted as far ahead of compute as the limits say, so that the rest can still be cancelled. A load that is
asked for while another one is being copied waits, and goes together with others that wait when the lane is free, or
when compute waits for it. All loads of a pool share one lane, so a mark is reached when all before it are.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kv_pool.hicache._inflight import Load, LoadBatch, take_together
from kv_pool.hicache.streams import issue

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_planner import PrefixIndex, PrefixLock

    from kv_pool.hicache._inflight import CopyLimits
    from kv_pool.hicache.movers import Mover
    from kv_pool.hicache.streams import Mark, Streams
    from kv_pool.tables import IntArray

__all__ = ["Loads"]


class Loads:
    """Loads of one pool, a cache's own or a companion's.

    Args:
        index: The index, for the locks.
        mover: What moves the bytes.
        streams: The lanes.
        limits: How much is submitted at a time.
        layers: Global layer ids, in the order in which compute asks for them.
        keep: Keeps the device and the host pages of a load from everybody else; returns what ends that.
        failed: Called once for each load of which the mover or device has said later that it failed.
    """

    def __init__(
        self,
        index: PrefixIndex,
        mover: Mover,
        streams: Streams,
        limits: CopyLimits,
        layers: list[int],
        *,
        keep: Callable[[IntArray, IntArray], Callable[[], object]],
        failed: Callable[[Load], object],
    ) -> None:
        self._keep = keep
        self._index = index
        self._mover = mover
        self._streams = streams
        self._limits = limits
        self._layers = layers
        self._failed = failed
        self._queue: deque[Load] = deque()
        self._submitted: deque[LoadBatch] = deque()
        self._stopped: deque[tuple[Load, Mark]] = deque()
        self.counts = dict.fromkeys(("loaded_pages", "load_batches", "cancelled_load_pages"), 0)

    @property
    def pages(self) -> tuple[int, int]:
        """Pages that wait, and pages that are under way."""
        waiting = sum(load.device_pages.size for load in self._queue)
        return waiting, sum(load.device_pages.size for load in self.all()) - waiting

    def all(self) -> list[Load]:
        """Loads that still hold their device pages."""
        submitted = [load for batch in self._submitted for load in batch.parts]
        return [*(load for load, _ in self._stopped), *submitted, *self._queue]

    def start(self, nodes: IntArray, host_pages: IntArray, device_pages: IntArray, lock: PrefixLock) -> Load:
        """Copy pages to the device behind the compute issued so far; takes the lock over.

        Raises:
            Exception: What the mover or the device raised; the lock is dropped, and nothing writes the pages any more.
        """
        try:
            after = self._streams.mark("compute")
            load = Load(nodes, host_pages, device_pages, lock, after, self._keep(device_pages, host_pages))
        except BaseException:
            self._index.unlock(lock)
            raise
        self._queue.append(load)
        try:
            if not self._busy():
                self._submit(new=load)
        except BaseException:
            if load.batch is None:  # others have failed, before it was its turn
                self._queue.remove(load)
                self._release(load)
            raise
        return load

    def wait_layer(self, load: Load, layer_id: int) -> None:
        """Let compute that is issued from now on begin after a layer of a load, and submit the layers behind it.

        Raises:
            Exception: What the mover or the device raised: the load has failed.
        """
        while load.batch is None:
            self._submit()
        self._advance(load.batch, self._layers.index(layer_id) + 1 + self._limits.layers_ahead)
        if load.batch.failure is not None:
            raise load.batch.failure
        self._streams.wait("compute", load.batch.layers[layer_id])

    def cancel(self, load: Load) -> bool:
        """Submit no more of a load; returns whether there was more. Its pages stay held until the rest has ended.

        A load that is wholly submitted is left to end, and counts.
        """
        batch = load.batch
        if batch is None:
            self._queue.remove(load)
            self._release(load)
        elif batch.left and load in batch.parts:
            batch.parts.remove(load)
            self._stopped.append((load, batch.mark))
            if not batch.parts:
                self._submitted.remove(batch)
        else:
            return False
        self.counts["cancelled_load_pages"] += load.device_pages.size
        return True

    def cancellable(self, load: Load) -> bool:
        """Whether `cancel` would stop anything."""
        return load.batch is None or bool(load.batch.left and load in load.batch.parts)

    def poll(self) -> None:
        """Acknowledge what has ended, and submit what waits for that."""
        while self._stopped and self._stopped[0][1].reached():
            self._stop(*self._stopped.popleft())
        while self._submitted and self._submitted[0].mark.reached():
            batch = self._submitted[0]
            if batch.left:
                self._advance(batch, len(batch.layers) + self._limits.layers_ahead)
                break
            self._end(self._submitted.popleft())
        if self._queue and not self._busy():
            self._submit()

    def drain(self) -> None:
        """Wait for everything, and acknowledge it."""
        while self._queue or self._submitted or self._stopped:
            while self._stopped:
                self._stop(*self._stopped.popleft())
            while self._submitted:
                self._advance(self._submitted[0], len(self._layers))
                self._end(self._submitted.popleft())
            if self._queue:
                self._submit()

    def _busy(self) -> bool:
        return bool(self._submitted) and not self._submitted[-1].mark.reached()

    def _submit(self, new: Load | None = None) -> None:
        """Submit the first layers of what waits, as many loads together as the limit allows, and one at least."""
        parts = take_together(self._queue, self._limits.batch_pages, lambda load: load.device_pages.size)
        whole = self._mover.capabilities.granularity == "page"
        batch = LoadBatch(parts, deque([None] if whole else self._layers), parts[-1].after)
        for part in parts:
            part.batch = batch
        self._submitted.append(batch)
        self.counts["load_batches"] += 1
        self._advance(batch, self._limits.layers_ahead, new)

    def _advance(self, batch: LoadBatch, count: int, new: Load | None = None) -> None:
        """Submit layers of a batch until `count` of them are."""
        while batch.left and len(batch.layers) < count:
            layer = batch.left[0]
            device_pages, host_pages = (
                np.concatenate([getattr(part, name) for part in batch.parts]) for name in ("device_pages", "host_pages")
            )
            after = [] if batch.layers else [part.after for part in batch.parts]
            work = partial(self._mover.load, device_pages, host_pages, layer)
            try:
                batch.mark = issue(self._streams, "load", after, work)
            except BaseException as error:
                self._fail(batch, error, new)
                raise
            batch.left.popleft()
            batch.layers.update(dict.fromkeys(self._layers if layer is None else [layer], batch.mark))

    def _fail(self, batch: LoadBatch, error: BaseException, new: Load | None) -> None:
        """Nothing of a batch counts; its loads hold nothing any more."""
        batch.failure = error
        batch.left.clear()
        self._submitted.remove(batch)
        with ExitStack() as ends:
            for part in batch.parts:  # the last one leaves the index first: it may lie behind the others
                if part is not new:  # whoever starts it hears of it by the error
                    ends.callback(self._failed, part)
                ends.callback(self._release, part)

    def _end(self, batch: LoadBatch) -> None:
        try:
            batch.mark.wait_on_host()
        except BaseException as error:
            self._submitted.appendleft(batch)
            self._fail(batch, error, None)
            raise
        with ExitStack() as ends:
            for part in reversed(batch.parts):
                ends.callback(self._release, part)
        self.counts["loaded_pages"] += sum(part.device_pages.size for part in batch.parts)

    def _stop(self, load: Load, mark: Mark) -> None:
        try:
            mark.wait_on_host()
        finally:
            self._release(load)

    def _release(self, load: Load) -> None:
        self._index.unlock(load.lock)
        load.let_go()
