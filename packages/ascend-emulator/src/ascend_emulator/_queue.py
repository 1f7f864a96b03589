"""Queues of pending work, one a stream, and the waits that drain them. It owns order and blocking, not what work does.

Execution is cooperative: nothing runs in the background. An operator on an idle stream runs at once, in issue order.
Work that cannot run yet (it, or something before it, waits for a flag) stays in the stream's queue until somebody
drains it: the next operator of the stream without blocking, a wait of the host with blocking. So a run is
deterministic, whatever the threads' timing. Order between streams exists only through events; `order/` is told of
every access when the stream reaches it.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from . import order
from ._runtime import StreamState, runtime
from .errors import DeadlockError, DeferredExecutionError, EmulatorError, RaceError

__all__ = ["Blocked", "Item", "Scheduler", "StreamQueue", "Work", "scheduler"]


@dataclass(frozen=True)
class Blocked:
    """Why a queue cannot go on: a text for people, and what a deadlock error reports as attributes."""

    text: str
    graph: int | None = None
    record: int | None = None
    operator: str | None = None


class Item(Protocol):
    """A unit of work of a stream. `ticket` is its number in the stream, set when it is queued."""

    ticket: int

    def run(self, queue: StreamQueue) -> Blocked | None:
        """Do the work, or say why it cannot be done yet (then it is tried again)."""

    def drop(self) -> None:
        """The work will not be done: undo what others rely on."""

    def describe(self) -> str:
        """What failed, for an error text."""


class Work:
    """An item that calls a function once.

    `accesses` gives what the function touches (`order/`); None: nothing that others could touch, or told already.
    """

    __slots__ = ("accesses", "call", "name", "ticket")

    def __init__(self, name: str, call: Callable[[], Any], accesses: Callable[[], array[int]] | None = None) -> None:
        self.name = name
        self.call = call
        self.accesses = accesses
        self.ticket = 0

    def run(self, queue: StreamQueue) -> Blocked | None:
        """Call the function."""
        if self.accesses is not None and order.on:
            order.touch(queue.address, self.accesses())
        self.call()
        return None

    def drop(self) -> None:
        """Nothing to undo."""

    def describe(self) -> str:
        """The name of the work."""
        return self.name


class StreamQueue:
    """Pending work of one stream, and what the next wait of the host has to settle."""

    __slots__ = ("address", "checks", "deliveries", "failures", "items", "running", "state")

    def __init__(self, address: int) -> None:
        self.address = address
        self.state = StreamState.from_address(address)
        self.items: deque[Item] = deque()
        self.deliveries: list[tuple[int, Callable[[], None]]] = []  # host destinations, by ticket
        self.checks: list[tuple[int, Callable[[], None]]] = []  # host sources that must not have changed
        self.failures: list[tuple[int, EmulatorError]] = []
        self.running = False


class Scheduler:
    """All queues of the process, under one lock.

    Attributes:
        slow: true while an operator has to look at its stream before it runs: something is pending, captured or
        updated. wait_seconds: how long a wait of the host lasts without progress before it is a deadlock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.wait_seconds = 10.0
        self.slow = False
        self.captures = 0
        self.updates = 0
        self._queues: dict[int, StreamQueue] = {}
        self._busy: set[StreamQueue] = set()
        self._unsettled: set[StreamQueue] = set()
        self._progress = 0

    def queue(self, stream: int) -> StreamQueue:
        """The queue of a stream, by the address of its record in C."""
        queue = self._queues.get(stream)
        if queue is None:
            with self.lock:
                queue = self._queues.setdefault(stream, StreamQueue(stream))
        return queue

    def refresh(self) -> None:
        """Recompute the two flags after queues, captures or updates changed."""
        self.slow = bool(self._busy or self.captures or self.updates)
        runtime.set_slow(self.slow)
        runtime.set_active(bool(self._busy or self._unsettled))

    def count(self, *, captures: int = 0, updates: int = 0) -> None:
        """Add to the number of open captures and of updates."""
        with self.lock:
            self.captures += captures
            self.updates += updates
            self.refresh()

    # --- adding work ---

    def submit(self, queue: StreamQueue, item: Item) -> None:
        """Append work to a stream without running it."""
        with self.lock:
            item.ticket = runtime.enqueue(queue.address)
            queue.items.append(item)
            self._busy.add(queue)
            self.refresh()

    def deliver_later(self, queue: StreamQueue, ticket: int, deliver: Callable[[], None]) -> None:
        """Call `deliver` at the wait of the host that covers the ticket."""
        with self.lock:
            queue.deliveries.append((ticket, deliver))
            self._unsettled.add(queue)
            self.refresh()

    def check_later(self, queue: StreamQueue, ticket: int, check: Callable[[], None]) -> None:
        """Call `check`, which may raise, at the wait of the host that covers the ticket."""
        with self.lock:
            queue.checks.append((ticket, check))
            self._unsettled.add(queue)
            self.refresh()

    def notify(self) -> None:
        """A flag changed: waits look again."""
        with self.lock:
            self._progress += 1
            self.changed.notify_all()

    # --- running work ---

    def progress(self, queue: StreamQueue) -> Blocked | None:
        """Run a stream's work as far as it goes without blocking; why it stopped, or None when nothing is left."""
        with self.lock:
            if queue.running:  # reached again from its own work: a cycle of waits, or a host function that waits
                return Blocked(f"stream {queue.state.index} waits for its own work")
            queue.running = True
            try:
                with torch.no_grad(), torch._C._DisableTorchDispatch():  # whatever the caller's context is
                    return self._drain(queue)
            finally:
                queue.running = False

    def _drain(self, queue: StreamQueue) -> Blocked | None:
        while queue.items:
            item = queue.items[0]
            try:
                blocked = item.run(queue)
            except Exception as error:
                self._fail(queue, item, error)
                blocked = None
            if blocked is not None:
                return blocked
            self._finish(queue)
        return None

    def _finish(self, queue: StreamQueue) -> None:
        queue.items.popleft()
        runtime.advance(queue.address)
        self._progress += 1
        if not queue.items:
            self._busy.discard(queue)
            self.refresh()

    def _fail(self, queue: StreamQueue, item: Item, error: Exception) -> None:
        failure: EmulatorError
        if isinstance(error, RaceError):
            failure = error
        else:
            failure = DeferredExecutionError(item.describe(), error)
            failure.__cause__ = error
        item.drop()
        queue.failures.append((item.ticket, failure))
        self._unsettled.add(queue)
        self.refresh()

    # --- waits of the host ---

    def wait(self, queue: StreamQueue, ticket: int) -> None:
        """Drain a stream up to a ticket, blocking on flags that other threads may set.

        Raises:
            DeadlockError: no progress within `wait_seconds`; the blocked work is dropped and the process stays usable.
        """
        with self.lock:
            seen, deadline = -1, 0.0
            while queue.state.executed < ticket:
                blocked = self.progress(queue)
                if queue.state.executed >= ticket:
                    break
                assert blocked is not None
                if self._drive(queue):
                    continue
                if seen != self._progress:
                    seen, deadline = self._progress, time.monotonic() + self.wait_seconds
                left = deadline - time.monotonic()
                if queue.running:  # a host function of the stream waits for the stream
                    raise DeadlockError(blocked.text)
                if left > 0:
                    self.changed.wait(left)
                    continue
                self._drop_head(queue)
                raise DeadlockError(
                    f"{blocked.text}. Waited {self.wait_seconds:g} s; the blocked work was dropped.",
                    graph=blocked.graph,
                    record=blocked.record,
                    operator=blocked.operator,
                    seconds=self.wait_seconds,
                )

    def _drive(self, waiting: StreamQueue) -> bool:
        """Let all other streams go on, since one of them may set the flag; whether any did."""
        before = self._progress
        for queue in list(self._busy):
            if queue is not waiting:
                self.progress(queue)
        return self._progress != before

    def _drop_head(self, queue: StreamQueue, visited: frozenset[StreamQueue] = frozenset()) -> None:
        """Give up the item at which a queue is blocked, also in the streams that it waits for."""
        if queue in visited or not queue.items:
            return
        item = queue.items[0]
        if isinstance(item, EventWait):
            self._drop_head(item.other, visited | {queue})
        item.drop()
        self._finish(queue)

    def settle(self) -> None:
        """After a wait: deliver and check all that the host has now waited for.

        Raises:
            EmulatorError: the first failure of work that was waited for, a host race, or a race between streams,
                whether that work was waited for or not.
        """
        if not self._unsettled:
            return
        first: EmulatorError | None = None
        with self.lock:
            for queue in list(self._unsettled):
                reached = min(runtime.host_saw(queue.state.index), queue.state.executed)
                queue.deliveries = _settle(queue.deliveries, reached)
                failed = [error for ticket, error in queue.failures if _due(ticket, error, reached)]
                queue.failures = [entry for entry in queue.failures if not _due(*entry, reached)]
                try:
                    queue.checks = _settle(queue.checks, reached)
                except EmulatorError as error:
                    queue.checks = [entry for entry in queue.checks if entry[0] > reached]
                    failed.append(error)
                if first is None and failed:
                    first = failed[0]
                if not (queue.deliveries or queue.checks or queue.failures):
                    self._unsettled.discard(queue)
            self.refresh()
        if first is not None:
            raise first

    def wait_stream(self, queue: StreamQueue) -> None:
        """What a synchronize of the stream does."""
        self.wait(queue, queue.state.enqueued)
        runtime.host_sees_stream(queue.address)
        self.settle()

    def wait_event(self, event: int) -> None:
        """What a synchronize of an event (by its address) does."""
        stream, ticket = runtime.event_point(event)
        if stream:
            self.wait(self.queue(stream), ticket)
        runtime.host_sees_event(event)
        self.settle()

    def devices(self) -> list[int]:
        """The devices that have a stream, which torch_npu makes at a device's first use: no other one has work."""
        return sorted({self.queue(address).state.device for address in runtime.streams()})

    def wait_device(self, device: int) -> None:
        """What a synchronize of the device does."""
        queues = [self.queue(address) for address in runtime.streams()]
        own = [queue for queue in queues if queue.state.device == device]
        for queue in own:
            self.wait(queue, queue.state.enqueued)
        for queue in own:
            runtime.host_sees_stream(queue.address)
        self.settle()


def _due(ticket: int, error: EmulatorError, reached: int) -> bool:
    return ticket <= reached or isinstance(error, RaceError)


def _settle(entries: Iterable[tuple[int, Callable[[], None]]], reached: int) -> list[tuple[int, Callable[[], None]]]:
    later = []
    for ticket, call in entries:
        if ticket <= reached:
            call()
        else:
            later.append((ticket, call))
    return later


class EventWait:
    """A stream waits until another one has done its first `until` items.

    `point` is the event's record in C, held for this wait: it says what the other stream had done and known there.
    """

    __slots__ = ("other", "point", "ticket", "until")

    def __init__(self, other: StreamQueue, until: int, point: int) -> None:
        self.other = other
        self.until = until
        self.point = point
        self.ticket = 0

    def run(self, queue: StreamQueue) -> Blocked | None:
        """Drive the other stream; blocked for as long as that one is."""
        if self.other.state.executed < self.until:
            blocked = scheduler.progress(self.other)
            if self.other.state.executed < self.until:
                return blocked
        runtime.join_point(queue.address, self.point)
        return None

    def drop(self) -> None:
        """The wait is given up: so is its hold on the event's record."""
        runtime.join_point(self.other.address, self.point)

    def describe(self) -> str:
        """Which wait it is."""
        return f"wait for an event of stream {self.other.state.index}"


scheduler = Scheduler()
