"""Capturing one bucket: warm-ups, barriers, the capture itself, and the checks of what came out.

It owns the order of these steps and their clean-up. It does not choose buckets and does not replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .device import CapturedGraph, GraphDevice
from .outputs import OutputRows, check_output
from .step import StepInputs
from .update import BoundUpdate, UpdateSpec

__all__ = ["BucketGraph", "capture_bucket"]


class BucketGraph:
    """One captured bucket.

    Attributes:
        bucket: Rows.
        graph: The captured graph.
        output: What the forward returned at capture; every replay rewrites it.
        bound: The update, checked against the graph's records.
    """

    def __init__(self, bucket: int, graph: CapturedGraph, output: Any, bound: BoundUpdate) -> None:
        self.bucket = bucket
        self.graph = graph
        self.output = output
        self.bound = bound

    def close(self) -> None:
        """Releases the graph and its outputs."""
        self.output = None
        self.graph.close()


def capture_bucket(
    device: GraphDevice,
    forward: Callable[[StepInputs], Any],
    inputs: StepInputs,
    *,
    update: UpdateSpec,
    pool: object | None,
    warmups: int,
    barrier: Callable[[], None],
    output_rows: OutputRows,
    after_warmup: Callable[[StepInputs], None] | None = None,
) -> BucketGraph:
    """Captures one bucket.

    Each warm-up is: wait for the device, barrier, forward, `after_warmup`. A further wait and barrier precede the
    capture. When a rank fails it still takes part in the remaining barriers, so that its peers do not wait for it.

    Args:
        device: The device.
        forward: The step.
        inputs: Static views of the bucket and host lists of zeros.
        update: The stated update.
        pool: Memory pool shared by the buckets.
        warmups: Number of warm-ups.
        barrier: Called by every rank the same number of times.
        output_rows: Output rows a request.
        after_warmup: Undoes what a warm-up leaves behind.

    Raises:
        UpdateSpecError: The update does not fit what was captured.
        OutputShapeError: An output's rows are not those of the bucket.
        Exception: Whatever the forward or the device raised.
    """
    barriers_left = warmups + 1
    try:
        for _ in range(warmups):
            device.synchronize()
            barriers_left -= 1
            barrier()
            with torch.no_grad():
                forward(inputs)
                if after_warmup is not None:
                    after_warmup(inputs)
        device.synchronize()
        barriers_left -= 1
        barrier()
        graph, output = device.capture(lambda: forward(inputs), pool=pool)
    except BaseException:
        for _ in range(barriers_left):
            barrier()
        raise
    try:
        check_output(output, inputs.bs, output_rows)
        return BucketGraph(inputs.bs, graph, output, update.bind(graph.records))
    except BaseException:
        graph.close()
        raise
