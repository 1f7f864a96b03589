"""Captured graphs: records with their flags, replay as a queue item, and the rules of update.

It owns what a graph holds (raw addresses, never npu tensors, except outputs of task groups and pinned host buffers) and
when an update is legal. Nodes are in `_nodes.py`, streams and waits in `_queue.py`.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections import deque
from typing import Any

import torch

from . import order
from ._nodes import FlagWait, FlagWrite, HostCopy, Node, OperatorNode, write_flag
from ._queue import Blocked, StreamQueue, scheduler
from ._random import next_seed
from ._runtime import runtime
from .errors import CaptureError, CaptureFailedError, DoubleUpdateError, EmulatorError, FenceError, RaceError

__all__ = ["Graph", "Record", "Replay", "graphs", "local"]


class Record:
    """A task group: an operator whose host arguments `graph.update()` replaces before each replay.

    The legal order per record is update, replay (either first), wait of the host, update, …; every update belongs to
    one replay, the k-th to the k-th.
    """

    __slots__ = ("consumer", "flag", "graph", "index", "node", "outputs", "unmatched", "waiting")

    def __init__(self, graph: Graph, index: int) -> None:
        self.graph = graph
        self.index = index
        self.flag: FlagWait | None = None
        self.node: OperatorNode | None = None
        self.outputs: Any = None
        self.unmatched = False  # an update that no replay has been issued for
        self.waiting: deque[Replay] = deque()  # replays that no update has been issued for
        self.consumer: Replay | None = None  # replay that uses the last update

    @property
    def operator(self) -> str:
        """Short name of the operator."""
        return self.node.name if self.node is not None else "(empty task group)"

    def check_update(self) -> None:
        """Raise unless an update is legal now.

        Raises:
            DoubleUpdateError: the last update has no replay yet.
            FenceError: the host has not waited for the replay of the last update.
        """
        if self.unmatched:
            raise DoubleUpdateError(self.graph.number, self.index, self.operator)
        consumer = self.consumer
        if consumer is not None and runtime.host_saw(consumer.queue.state.index) < consumer.ticket:
            raise FenceError(self.graph.number, self.index, self.operator)

    def updated(self) -> None:
        """An update has been accepted: pair it with a replay."""
        if self.waiting:
            self.consumer = self.waiting.popleft()
        else:
            self.consumer = None
            self.unmatched = True

    def replayed(self, replay: Replay) -> None:
        """A replay has been issued: pair it with an update."""
        if self.unmatched:
            self.unmatched = False
            self.consumer = replay
        else:
            self.waiting.append(replay)

    def dropped(self, replay: Replay, consumed: bool) -> None:
        """A replay will not reach this record, or has left it unfinished."""
        if replay in self.waiting:
            self.waiting.remove(replay)
        if self.consumer is replay:
            self.consumer = None
            if not consumed and self.flag is not None:
                write_flag(self.flag.address, 0)


class Graph:
    """Nodes in issue order, and the records among them."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.nodes: list[Node] = []
        self.records: list[Record] = []
        self.host_copies: list[HostCopy] = []
        self.last_flag: FlagWait | None = None
        self.failure: str | None = None  # why the capture failed
        self._merged: dict[int, array[int]] = {}  # accesses of the nodes from one on, up to the next flag
        self._generators: dict[int, tuple[Any, torch.Generator]] = {}  # by id of the npu generator, which is kept

    def generator(self, source: Any) -> torch.Generator:
        """The CPU generator that stands for an npu generator in this graph."""
        return self._generators.setdefault(id(source), (source, torch.Generator()))[1]

    def seeds(self) -> list[tuple[torch.Generator, int]]:
        """Seeds of a new replay for the graph's generators."""
        return [(generator, next_seed(source)) for source, generator in self._generators.values()]

    def add(self, node: Node, queue: StreamQueue) -> None:
        """Append a node of a captured stream; the last operator in a task group becomes what an update rewrites.

        Raises:
            RaceError: another stream of the capture touches the same bytes.
        """
        if order.on and isinstance(node.accesses, array):
            try:
                order.touch(queue.address, node.accesses)
            except RaceError as error:
                self.failure = self.failure or str(error)
                raise
        runtime.order_node(queue.address)
        self.nodes.append(node)
        if isinstance(node, FlagWait):
            self.last_flag = node
        elif isinstance(node, HostCopy):
            self.host_copies.append(node)
        elif isinstance(node, OperatorNode) and local.group is not None and local.group.graph is self:
            local.group.node = node

    def accesses_from(self, start: int) -> array[int]:
        """What the nodes from one on touch, up to the next flag; without those whose index tensors decide."""
        words = self._merged.get(start)
        if words is None:
            parts = []
            for i in range(start, len(self.nodes)):
                node = self.nodes[i]
                if isinstance(node, (FlagWait, FlagWrite)) and i > start:
                    break
                if isinstance(node.accesses, array):
                    parts.append((order.place_of(self.number, i), node.accesses))
            words = self._merged[start] = order.merged(parts)
        return words

    def refuse(self, what: str, reason: str) -> CaptureError:
        """The error of something that a capture cannot hold; the graph is never replayed."""
        error = CaptureError(what, reason)
        self.failure = self.failure or str(error)
        return error


class Replay:
    """A queued replay of a graph; it remembers how far it got."""

    __slots__ = ("cursor", "graph", "queue", "seeds", "ticket", "told")

    def __init__(self, graph: Graph, queue: StreamQueue) -> None:
        self.graph = graph
        self.queue = queue
        self.seeds = graph.seeds()
        self.cursor = 0
        self.ticket = 0
        self.told = False  # of the accesses before the first flag

    def touch_first(self) -> None:
        """Nothing is pending before the replay: tell now of what it touches before its first flag.

        Raises:
            RaceError: another stream touched the same bytes.
        """
        if self.graph.nodes and not isinstance(self.graph.nodes[0], (FlagWait, FlagWrite)):
            order.touch(self.queue.address, self.graph.accesses_from(0))
            self.told = True

    def run(self, queue: StreamQueue) -> Blocked | None:
        """Run nodes until one has to wait."""
        nodes = self.graph.nodes
        while self.seeds:
            generator, seed = self.seeds.pop()
            generator.manual_seed(seed)
        while self.cursor < len(nodes):
            node = nodes[self.cursor]
            is_flag = isinstance(node, (FlagWait, FlagWrite))
            blocked = node.step(queue) if is_flag else None
            if blocked is not None:
                return self._explain(blocked)
            if order.on:
                self._touch(queue, node, is_flag)
            if not is_flag:
                node.step(queue)
            self.cursor += 1
        return None

    def _touch(self, queue: StreamQueue, node: Node, is_flag: bool) -> None:
        """Tell of accesses: at the first node and behind each flag of all up to the next one, and of refined ones."""
        if (self.cursor == 0 and not self.told) or is_flag:
            order.touch(queue.address, self.graph.accesses_from(self.cursor))
        if isinstance(node, OperatorNode) and isinstance(node.accesses, order.Refined):
            words = order.words_of(node.accesses, node.args, node.kwargs)
            order.touch(queue.address, order.located(words, order.place_of(self.graph.number, self.cursor)))

    def _explain(self, blocked: Blocked) -> Blocked:
        record = self.graph.nodes[self.cursor].record
        number = self.graph.number
        if record is None:
            return Blocked(f"replay of graph {number} {blocked.text}", graph=number)
        return Blocked(
            f"replay of graph {number} waits for record {record.index} ({record.operator}): no graph.update() arrived",
            graph=number,
            record=record.index,
            operator=record.operator,
        )

    def drop(self) -> None:
        """Leave the graph's records as if this replay had never been issued."""
        passed = set(map(id, self.graph.nodes[: self.cursor]))
        for record in self.graph.records:
            record.dropped(self, record.flag is not None and id(record.flag) in passed)

    def describe(self) -> str:
        """Which node of which graph was running."""
        node = self.graph.nodes[self.cursor]
        record = node.record
        which = (
            f"record {record.index} ({record.operator})" if record is not None else f"node {self.cursor} ({node.name})"
        )
        return f"{which} in the replay of graph {self.graph.number}"


class _Local(threading.local):
    group: Record | None = None  # open task group of this thread
    handle: int = 0  # its handle
    updating: Record | None = None  # record that the next operator of this thread rewrites
    failure: str | None = None  # why the capture that this thread ended last failed


local = _Local()


class Graphs:
    """All captured graphs, by the number that C gave them."""

    def __init__(self) -> None:
        self._graphs: dict[int, Graph] = {}
        self._records: dict[int, Record] = {}

    def begin(self, number: int) -> None:
        """A capture starts."""
        self._graphs[number] = Graph(number)
        scheduler.count(captures=1)

    def end(self, number: int, *, unjoined: int | None) -> None:
        """A capture ends, whether it failed or not; `unjoined` is a stream that took part and was not waited for."""
        local.group = None
        graph = self._graphs[number]
        if unjoined is not None and graph.failure is None:
            graph.failure = (
                f"error code is 107025 (invalid capture model): stream {unjoined} took part in the capture and the "
                "capturing stream did not wait for it before the end; call wait_stream()"
            )
        local.failure = graph.failure
        scheduler.count(captures=-1)

    def take_failure(self) -> str | None:
        """Why the capture that ended last in this thread failed, once."""
        failure, local.failure = local.failure, None
        return failure

    def fail(self, number: int, what: int) -> None:
        """A capture failed in C, at what the text at this address names."""
        self._graphs[number].refuse(ctypes.string_at(what).decode(), "needs the device to stand still")

    def get(self, number: int) -> Graph:
        """A graph by its number."""
        return self._graphs[number]

    def destroy(self, number: int) -> None:
        """Forget a graph."""
        graph = self._graphs.pop(number, None)
        if graph is not None:
            for handle in [h for h, record in self._records.items() if record.graph is graph]:
                del self._records[handle]

    def begin_group(self, number: int, handle: int) -> None:
        """Open a task group in a graph under capture."""
        graph = self._graphs[number]
        record = Record(graph, len(graph.records))
        record.flag, graph.last_flag = graph.last_flag, None
        graph.records.append(record)
        self._records[handle] = record
        local.group = record
        local.handle = handle

    def end_group(self) -> int:
        """Close this thread's task group; its handle."""
        record = local.group
        if record is None:
            raise CaptureError("end of a task group", "that this thread has not begun")
        local.group = None
        if record.flag is not None:
            record.flag.record = record
        if record.node is not None:
            record.node.record = record
        return local.handle

    def begin_update(self, handle: int) -> None:
        """The next operator of this thread rewrites a record."""
        record = self._records.get(handle)
        if record is None:
            raise EmulatorError(f"update of task group {handle}, whose graph does not exist any more")
        if local.updating is None:
            scheduler.count(updates=1)
        local.updating = record

    def end_update(self) -> None:
        """The update is over, whether an operator came or not."""
        if local.updating is not None:
            local.updating = None
            scheduler.count(updates=-1)

    def replay(self, number: int, stream: int) -> None:
        """Queue a replay; nothing runs."""
        graph = self._graphs[number]
        if graph.failure is not None:
            raise CaptureFailedError(graph.failure)
        queue = scheduler.queue(stream)
        with scheduler.lock:
            replay = Replay(graph, queue)
            if order.on and (not queue.items or scheduler.progress(queue) is None):
                replay.touch_first()
            scheduler.submit(queue, replay)
            for record in graph.records:
                record.replayed(replay)
            for copy in graph.host_copies:
                copy.issue(queue, replay.ticket)


graphs = Graphs()
