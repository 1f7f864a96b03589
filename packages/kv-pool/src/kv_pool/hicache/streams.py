"""Owns the order between compute, loads and backups, as a small protocol: lanes, marks on them, and waits for marks.

A lane is a stream: `compute` is whatever stream is current for the caller, `load` and `backup` are the cache's own. On
a CPU everything is done when the call returns, so marks are always reached and waits do nothing; the same code runs.
It does not own what is issued to a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Literal, Protocol, TypeAlias, cast, runtime_checkable

import torch

from kv_pool._arguments import check_kind
from kv_pool.errors import HostPoolError

__all__ = ["ImmediateStreams", "Lane", "Mark", "Streams", "create_streams", "issue"]

Lane: TypeAlias = Literal["compute", "load", "backup"]


@runtime_checkable
class Mark(Protocol):
    """A point in a lane's work."""

    def reached(self) -> bool:
        """Whether all work before it is done; never blocks."""

    def wait_on_host(self) -> None:
        """Block the calling thread until it is reached. Raises what the device reports."""


@runtime_checkable
class Streams(Protocol):
    """The lanes of one cache.

    Attributes:
        name: What they are, for reports.
    """

    name: str

    def mark(self, lane: Lane) -> Mark:
        """Mark the end of the work issued to a lane so far."""

    def wait(self, lane: Lane, mark: Mark) -> None:
        """Let everything that is issued to a lane from now on begin after a mark; does not block the host."""

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """A context in which work is issued to a lane."""


def issue(streams: Streams, lane: Lane, after: Sequence[Mark], work: Callable[[], None]) -> Mark:
    """Do work on a lane behind marks; returns the mark of its end.

    Raises:
        Exception: What the work or the device raised; nothing of it is under way any more.
    """
    for mark in after:
        streams.wait(lane, mark)
    with streams.on(lane):
        try:
            work()
        except BaseException:
            streams.mark(lane).wait_on_host()
            raise
    return streams.mark(lane)


class _Reached:
    """The mark of a lane whose work is done when it was issued."""

    def reached(self) -> bool:
        """Always."""
        return True

    def wait_on_host(self) -> None:
        """Nothing to wait for."""


class ImmediateStreams:
    """Lanes of a device that does its work at once: host memory."""

    name = "immediate"
    _mark = _Reached()

    def mark(self, lane: Lane) -> Mark:
        """See `Streams.mark`."""
        return self._mark

    def wait(self, lane: Lane, mark: Mark) -> None:
        """See `Streams.wait`."""

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """See `Streams.on`."""
        return nullcontext()


# device type -> where its class lives; every other device type works at once.
_STREAMS = {"npu": "kv_pool.hicache.npu.streams:NpuStreams"}


def create_streams(device: torch.device) -> Streams:
    """Create the lanes for a pool on `device`.

    Raises:
        HostPoolError: It is no `torch.device`.
    """
    check_kind("device", device, torch.device, HostPoolError)
    place = _STREAMS.get(device.type)
    if place is None:
        return ImmediateStreams()
    module, _, attribute = place.partition(":")
    return cast(Streams, getattr(import_module(module), attribute)(device))
