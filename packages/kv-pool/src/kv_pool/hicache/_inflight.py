"""Owns the records of copies that wait or are under way, and how many may be. It does not start or end them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, TypeVar

from kv_pool.errors import HostPoolError
from kv_pool.tables import whole_number

if TYPE_CHECKING:
    from kv_planner import PrefixLock

    from kv_pool.hicache.streams import Mark
    from kv_pool.tables import IntArray

__all__ = ["Backup", "BackupBatch", "CopyLimits", "Load", "LoadBatch", "SharedLock", "UnderWay", "take_together"]

Part = TypeVar("Part")


@dataclass(frozen=True)
class CopyLimits:
    """How much is given to the mover at a time; the rest waits in a queue, under its locks, and is merged.

    Attributes:
        batch_pages: Pages of one submission. One submission to the host is under way at a time, so no more pages than
            that are. A load is never cut, but others are merged with it up to this number.
        layers_ahead: Layers of a load that are submitted beyond the one that compute waits for. What is not submitted
            can be cancelled. A mover that moves all layers at once has no such steps.

    Raises:
        HostPoolError: A number below 1, or no whole one.
    """

    batch_pages: int = 1024
    layers_ahead: int = 8

    def __post_init__(self) -> None:
        for name, value in (("batch_pages", self.batch_pages), ("layers_ahead", self.layers_ahead)):
            consequence = "nothing would ever be copied"
            whole_number(f"limits.{name}", value, least=1, error=HostPoolError, consequence=consequence)


@dataclass(frozen=True)
class UnderWay:
    """Pages between the levels at this moment.

    Attributes:
        queued_backups: Pages that wait to be copied to the host.
        backups: Pages that are being copied to the host.
        queued_loads: Pages that wait to be copied to the device.
        loads: Pages that are being copied to the device, or some layers of them.
        queued_writes: Host pages that wait to be written to the third level.
        writes: Host pages that the third level is writing.
        reads: Host pages that are being read from it.
    """

    queued_backups: int = 0
    backups: int = 0
    queued_loads: int = 0
    loads: int = 0
    queued_writes: int = 0
    writes: int = 0
    reads: int = 0

    def __add__(self, other: UnderWay) -> UnderWay:
        """Pages of both."""
        return UnderWay(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


@dataclass(eq=False)
class SharedLock:
    """A lock of the index over the parts of one backup that was cut.

    Attributes:
        lock: The lock.
        let_go: Ends what keeps the device pages from everybody else, also when their nodes have left the index.
        holders: Parts that have not ended.
    """

    lock: PrefixLock
    let_go: Callable[[], object] | None = None
    holders: int = 1


@dataclass(frozen=True, eq=False)
class Backup:
    """Device pages that are to be copied to the host, or are on their way.

    Attributes:
        nodes: Index nodes, parents first.
        device_pages: Where they lie.
        host_pages: Where they go; nobody else's until they are acknowledged.
        lock: Keeps the device pages, until its last part has ended.
        after: End of the compute that fills them.
    """

    nodes: IntArray
    device_pages: IntArray
    host_pages: IntArray
    lock: SharedLock
    after: Mark

    def cut(self, count: int) -> tuple[Backup, Backup]:
        """The first pages, and the rest."""
        first, rest = (
            (self.nodes[part], self.device_pages[part], self.host_pages[part])
            for part in (slice(count), slice(count, None))
        )
        self.lock.holders += 1
        return Backup(*first, self.lock, self.after), Backup(*rest, self.lock, self.after)


@dataclass(frozen=True)
class BackupBatch:
    """Backups that were submitted together, and the end of their copies."""

    parts: list[Backup]
    mark: Mark


@dataclass(eq=False)
class Load:
    """Host pages that are to be copied to the device, or are on their way.

    Attributes:
        nodes: Index nodes that got their device page by it.
        host_pages: Where they lie.
        device_pages: Where they go.
        lock: Keeps the host pages.
        after: End of the compute that may still use what is overwritten.
        let_go: Ends what keeps the device pages from everybody else until the load has ended, whoever releases them
            meanwhile.
        batch: What it was submitted with; `None` while it waits.
    """

    nodes: IntArray
    host_pages: IntArray
    device_pages: IntArray
    lock: PrefixLock
    after: Mark
    let_go: Callable[[], object]
    batch: LoadBatch | None = None

    @property
    def failure(self) -> BaseException | None:
        """What the mover or the device has said, if its bytes did not come."""
        return None if self.batch is None else self.batch.failure


@dataclass(eq=False)
class LoadBatch:
    """Loads that are submitted together, layer by layer.

    Attributes:
        parts: The loads; without those that were cancelled meanwhile.
        left: Steps that were not submitted: layer ids, or `None` for all layers at once.
        layers: Mark of each submitted layer's arrival, by global layer id.
        mark: End of what was submitted.
        failure: What the mover or the device raised; nothing of it counts.
    """

    parts: list[Load]
    left: deque[int | None]
    mark: Mark
    layers: dict[int, Mark] = field(default_factory=dict)
    failure: BaseException | None = None


def take_together(queue: deque[Part], most: int, size: Callable[[Part], int]) -> list[Part]:
    """Take what goes into one submission: the first of a queue, and what follows while all have at most `most`."""
    parts = [queue.popleft()]
    room = most - size(parts[0])
    while queue and size(queue[0]) <= room:
        parts.append(queue.popleft())
        room -= size(parts[-1])
    return parts
