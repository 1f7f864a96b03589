"""The captured buckets of one runner: which exist, why others do not, and which one serves a batch.

It owns graphs, their memory pool and their release. It does not know how a bucket is captured, and runs no step.
"""

from __future__ import annotations

from collections.abc import Callable

from ._progress import track
from .buckets import Buckets
from .capture import BucketGraph
from .device import GraphDevice
from .errors import CaptureFailed
from .step import CaptureReport, Decision

__all__ = ["BucketGraphs"]

CaptureOne = Callable[[int, "object | None"], BucketGraph]


class BucketGraphs:
    """Graphs by bucket.

    Args:
        device: Where they are captured.
        buckets: The stated sizes.
    """

    def __init__(self, device: GraphDevice, buckets: Buckets) -> None:
        self._device = device
        self._buckets = buckets
        self._held: dict[int, BucketGraph] = {}
        self._failed: dict[int, str] = {}
        self._bytes: dict[int, int] = {}
        self._pool: object | None = None

    def __getitem__(self, bucket: int) -> BucketGraph:
        return self._held[bucket]

    def capture(self, capture_one: CaptureOne, *, progress: bool) -> CaptureReport:
        """Captures every bucket without a usable graph, the largest first; see `DecodeRunner.capture`.

        Args:
            capture_one: Captures a bucket in a pool.
            progress: Show a bar.
        """
        for bucket, held in list(self._held.items()):
            if held.graph.broken is not None:
                self._drop(bucket)
        self._failed.clear()
        cause: BaseException | None = None
        made: list[int] = []
        wanted = [bucket for bucket in reversed(self._buckets.sizes) if bucket not in self._held]
        try:
            for bucket in track(wanted, enabled=progress):
                if not self._held:  # a pool ends with its last graph and cannot be used again
                    self._pool = self._device.new_pool()
                before = self._device.memory_held()
                try:
                    self._held[bucket] = capture_one(bucket, self._pool)
                    made.append(bucket)
                except RuntimeError as error:
                    cause = error
                    self._failed[bucket] = f"{type(error).__name__}: {error}"
                else:
                    self._bytes[bucket] = self._device.memory_held() - before
        except BaseException:
            for bucket in made:
                self._drop(bucket)
            raise
        if not self._held:
            raise CaptureFailed(
                "capture",
                expected=f"graphs for buckets {list(self._buckets.sizes)}",
                got=dict(self._failed),
                consequence="Every step would run eagerly.",
                remedy="Read the reasons; run() still works, eagerly.",
            ) from cause
        return CaptureReport(
            tuple(sorted(self._held)),
            dict(self._failed),
            {bucket: len(held.graph.records) for bucket, held in sorted(self._held.items())},
            dict(sorted(self._bytes.items())),
        )

    def usable(self, raw_bs: int) -> list[int]:
        """Buckets that can be replayed and hold so many rows, ascending."""
        return [bucket for bucket in self._buckets if bucket >= raw_bs and self._works(bucket)]

    def decide(self, raw_bs: int) -> Decision:
        """See `DecodeRunner.can_run`."""
        nominal = self._buckets.pick(raw_bs)
        if nominal is None:
            return Decision(None, "no_bucket", f"{raw_bs} rows, the largest bucket has {self._buckets.largest}")
        usable = self.usable(nominal)
        above = [bucket for bucket in self._buckets if bucket >= nominal and (not usable or bucket < usable[0])]
        problems = "; ".join(self._why_not(bucket) for bucket in above)
        if usable:
            return Decision(usable[0], None, problems)
        if nominal in self._held:
            return Decision(None, "graph_broken", problems)
        return Decision(None, "capture_failed" if nominal in self._failed else "not_captured", problems)

    def abandon(self, bucket: int | None, reason: str) -> None:
        """Takes a bucket's graph, if there is one, out of use."""
        if bucket in self._held:
            self._held[bucket].graph.abandon(reason)

    def close(self) -> None:
        """Releases all graphs and the pool."""
        for bucket in list(self._held):
            self._drop(bucket)
        self._pool = None

    def _drop(self, bucket: int) -> None:
        self._bytes.pop(bucket, None)
        self._held.pop(bucket).close()

    def _works(self, bucket: int) -> bool:
        held = self._held.get(bucket)
        return held is not None and held.graph.broken is None

    def _why_not(self, bucket: int) -> str:
        held = self._held.get(bucket)
        if held is not None:
            return f"bucket {bucket} is broken: {held.graph.broken}"
        return f"bucket {bucket}: {self._failed.get(bucket, 'not captured')}"
