"""The decode runner: buckets captured once, then one load, one update and one replay a step.

It owns the order wait(previous step) → load → update → replay → fence, the choice between graph and eager, and the
counters. It does not own attention metadata, sampling or the model: those are in the forward that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ._progress import track
from .buckets import Buckets
from .buffers import StaticBuffers
from .capture import BucketGraph, capture_bucket
from .device import Fence, GraphDevice, HostLengths
from .errors import (
    BatchTooLarge,
    BucketError,
    CaptureFailed,
    DeviceMismatch,
    FenceTimeout,
    GraphClosed,
    StepFailed,
)
from .host_lists import pad_host_lists
from .outputs import check_output, clone_output, cut_output
from .replay import update_and_replay
from .step import CaptureReport, Decision, Mode, RunnerCounters, StepInputs, StepResult
from .turns import Turn, capturing, take_turn
from .update import UpdateSpec

__all__ = ["DecodeRunner"]


class DecodeRunner:
    """Runs decode steps from captured graphs, and eagerly, with a reason, where there is none.

    One runner may be used from several threads; steps then take turns, and each should ask for a clone of its output,
    which the next step would overwrite. Runners of one device share its update worker. `before_step` may run another
    runner, of the same device too. A call of a runner from inside its own call, and any call from inside a capture, is
    refused.

    Args:
        device: Where to capture; the buffers' device.
        forward: Computes a step from `StepInputs`, and returns a tensor or a tuple of tensors whose first dimension is
            rows. It must not read `raw_bs` or values of tensors: a graph would keep what it read at capture.
        buffers: The static inputs; this runner alone loads them.
        buckets: The batch sizes to capture.
        update: Which host list feeds which argument of the captured ops; None when there is none.
        rows_per_request: Field or host list name to rows a request, where that is not 1 (a window of W tokens: W);
            0 for a field that is loaded whole whatever the batch.
        output_rows_per_request: Output rows a request, for all outputs or one number an output.
        before_step: Called after the load and before the replay or eager forward, outside the graph, for instance to
            fill device-written fields.
        barrier: Called before every warm-up and capture, by every rank the same number of times.
        warmups: Forwards before the capture of a bucket.
        update_timeout: Seconds that an update may take.
        fence_timeout: Seconds that the previous step may take, and those that another thread's call may.

    Raises:
        BucketError: The buffers hold fewer requests than the largest bucket.
        DeviceMismatch: The buffers are on another device.
    """

    def __init__(
        self,
        *,
        device: GraphDevice,
        forward: Callable[[StepInputs], Any],
        buffers: StaticBuffers,
        buckets: Buckets | Sequence[int],
        update: UpdateSpec | None = None,
        rows_per_request: Mapping[str, int] | None = None,
        output_rows_per_request: int | Sequence[int] = 1,
        before_step: Callable[[StepInputs], None] | None = None,
        barrier: Callable[[], None] | None = None,
        warmups: int = 2,
        update_timeout: float | None = 30.0,
        fence_timeout: float | None = 60.0,
    ) -> None:
        if buffers.device.torch_device != device.torch_device:
            raise DeviceMismatch(
                "buffers",
                expected=f"static buffers on {device.name}",
                got=buffers.device.name,
                consequence="Captured graphs would read memory of another device.",
                remedy="Make the buffers with the runner's device.",
            )
        self._device = device
        self._forward = forward
        self._buffers = buffers
        self._buckets = buckets if isinstance(buckets, Buckets) else Buckets(buckets)
        self._update = update if update is not None else UpdateSpec()
        self._per_request = dict(rows_per_request or {})
        self._output_rows = output_rows_per_request
        self._before_step = before_step
        self._barrier = barrier if barrier is not None else lambda: None
        self._warmups = warmups
        self._update_timeout = update_timeout
        self._fence_timeout = fence_timeout
        self._turn = Turn(f"a decode runner on {device.name}")
        self._graphs: dict[int, BucketGraph] = {}
        self._failed: dict[int, str] = {}
        self._fence: Fence | None = None
        self._last: int | None = None
        self._closed = False
        self.counters = RunnerCounters()
        self._capacity = min(
            (buffers.field(name).rows // factor for name in buffers.names if (factor := self._factor(name))), default=0
        )
        if self._capacity < self._buckets.largest:
            raise BucketError(
                "buckets",
                expected=f"at most {self._capacity}, the requests that the static buffers hold",
                got=self._buckets.largest,
                consequence="The largest bucket could not be loaded.",
                remedy="Lay the RowLayout out with more rows, or capture smaller buckets.",
            )
        self._pool: object | None = None
        self._worker = device.gate.enter()

    @property
    def capacity(self) -> int:
        """The most live requests that a step can have."""
        return self._capacity

    @property
    def buckets(self) -> Buckets:
        """The stated buckets."""
        return self._buckets

    def capture(self, progress: bool = True) -> CaptureReport:
        """Captures every bucket that has no usable graph, the largest first, in one memory pool.

        A bucket whose forward or capture raises a RuntimeError is left out, the others stay usable; calling again
        tries it again.

        Args:
            progress: Show a bar on a terminal when `rich` is installed.

        Raises:
            UpdateSpecError: The update does not fit the captured ops; graphs of this call are released.
            OutputShapeError: An output cannot be cut to live rows; graphs of this call are released.
            CaptureFailed: No bucket at all could be captured; eager steps still work.
            ReentrantCall: Called from inside a call of this runner or a capture.
            FenceTimeout: The previous step, or another thread's call, did not end in time.
        """
        with self._exclusive("capture()"):
            self._check_open()
            self._await_previous()
            for bucket, held in list(self._graphs.items()):
                if held.graph.broken is not None:
                    self._graphs.pop(bucket).close()
            self._failed.clear()
            cause: BaseException | None = None
            made: list[int] = []
            wanted = [bucket for bucket in reversed(self._buckets.sizes) if bucket not in self._graphs]
            try:
                for bucket in track(wanted, enabled=progress):
                    try:
                        self._graphs[bucket] = self._capture_one(bucket)
                        made.append(bucket)
                    except RuntimeError as error:
                        cause = error
                        self._failed[bucket] = f"{type(error).__name__}: {error}"
            except BaseException:
                for bucket in made:
                    self._graphs.pop(bucket).close()
                raise
            if not self._graphs:
                raise CaptureFailed(
                    "capture",
                    expected=f"graphs for buckets {list(self._buckets.sizes)}",
                    got=dict(self._failed),
                    consequence="Every step would run eagerly.",
                    remedy="Read the reasons; run() still works, eagerly.",
                ) from cause
            return CaptureReport(
                tuple(sorted(self._graphs)),
                dict(self._failed),
                {bucket: len(held.graph.records) for bucket, held in sorted(self._graphs.items())},
            )

    def can_run(self, raw_bs: int) -> Decision:
        """Which bucket a batch replays, or why none does. An idle step (0 rows) replays the smallest one."""
        nominal = self._buckets.pick(raw_bs)
        if nominal is None:
            return Decision(None, "no_bucket", f"{raw_bs} rows, the largest bucket has {self._buckets.largest}")
        problems: list[str] = []
        for bucket in self._buckets.sizes:
            if bucket < nominal:
                continue
            held = self._graphs.get(bucket)
            if held is not None and held.graph.broken is None:
                return Decision(bucket, None, "; ".join(problems))
            problems.append(self._why_not(bucket))
        held = self._graphs.get(nominal)
        if held is not None:
            return Decision(None, "graph_broken", "; ".join(problems))
        return Decision(None, "capture_failed" if nominal in self._failed else "not_captured", "; ".join(problems))

    def run(
        self,
        values: Mapping[str, Any],
        host_lists: Mapping[str, HostLengths] | None = None,
        raw_bs: int = 0,
        *,
        eager: bool = False,
        clone: bool = False,
    ) -> StepResult:
        """Runs one step.

        Args:
            values: Field to value of the live rows; see `StaticBuffers.prepare`.
            host_lists: Host list name to lengths of the live rows, exactly the names of the update. Neither mapping nor
                lists are changed or kept.
            raw_bs: Live requests.
            eager: Do not replay.
            clone: Copy the output before another step can start. Without it the output of a replay is a view of static
                memory, valid until the next step of this runner begins: enough for one thread that reads it before its
                next `run`, not for several threads that share the runner, nor for outputs that are kept.

        Returns:
            The output of the live rows, and how it was made.

        Raises:
            HostListError: A host list is missing, unknown, too short or long, or holds something else than lengths.
            RowValueError: A value does not fit its field.
            BatchTooLarge: More requests than the buffers hold.
            BucketError: `raw_bs` is negative.
            FenceTimeout: The previous step, or another thread's call, did not end in time. Nothing was written.
            ReentrantCall: Called from inside a call of this runner or a capture. Nothing was written.
            StepFailed: The device raised in the previous step. Nothing was written; its bucket must be captured again.
            UpdateFailed: The device raised in the update. Nothing was replayed; the bucket must be captured again.
            UpdateTimeout: The update did not end in time. As above.
        """
        with self._exclusive("run()"):
            self._check_open()
            decision = self.can_run(raw_bs)
            if eager:
                decision = Decision(None, "forced", "asked for by the caller")
            if raw_bs > self._capacity:
                raise BatchTooLarge(
                    "raw_bs",
                    expected=f"at most {self._capacity}",
                    got=raw_bs,
                    consequence="Rows would be lost.",
                    remedy="Split the batch, or lay the static buffers out for more requests.",
                )
            bs = decision.bucket if decision.bucket is not None else (raw_bs or self._buckets.smallest)
            host = pad_host_lists(self._update.host_names, host_lists or {}, raw_bs, bs, self._per_request)
            prepared = self._buffers.prepare(self._rows(raw_bs), values)
            self._await_previous()
            inputs = self._inputs(host, bs, raw_bs)
            with self._on_device("run()"), torch.no_grad():
                self._buffers.load(prepared)
                if self._before_step is not None:
                    self._before_step(inputs)
                self._buffers.check_written()
                if decision.bucket is None:
                    output = self._forward(inputs)
                    check_output(output, bs, self._output_rows)
                else:
                    self._buffers.check_addresses()
                    held = self._graphs[decision.bucket]
                    output = update_and_replay(held, host, self._worker, self._update_timeout)
                output = cut_output(output, raw_bs, self._output_rows)
                if clone:
                    output = clone_output(output)
                self._fence = self._device.record_fence()
                self._last = decision.bucket
            self._count(decision, bs - raw_bs)
            mode: Mode = "eager" if decision.bucket is None else "graph"
            return StepResult(output, mode, decision.bucket, decision.reason)

    def close(self) -> None:
        """Waits for the last step and releases graphs, outputs and the share in the worker; may be called twice.

        The buffers belong to the caller and stay open.

        Raises:
            FenceTimeout: The last step did not end in time; everything was released all the same. Or another thread's
                call did not; nothing was released.
            ReentrantCall: Called from inside a call of this runner or a capture; nothing was released.
            StepFailed: The device raised in the last step; everything was released all the same.
        """
        with self._exclusive("close()"):
            if self._closed:
                return
            self._closed = True
            try:
                self._await_previous()
            finally:
                with self._on_device("close()"):
                    for held in self._graphs.values():
                        held.close()
                self._graphs.clear()
                self._pool = self._fence = None
                self._device.gate.leave()

    def _exclusive(self, call: str) -> AbstractContextManager[None]:
        what = f"{call} of {self._turn.name}"
        return take_turn(self._turn, self._device.gate.lock, self._fence_timeout, what)

    def _on_device(self, call: str) -> AbstractContextManager[None]:
        return self._device.gate.lock.hold(self._fence_timeout, f"{call} of {self._turn.name}")

    def _factor(self, name: str) -> int:
        return self._per_request.get(name, 1)

    def _rows(self, raw_bs: int) -> dict[str, int]:
        return {
            name: raw_bs * self._factor(name) if self._factor(name) else self._buffers.field(name).rows
            for name in self._buffers.names
        }

    def _inputs(self, host: Mapping[str, list[int]], bs: int, raw_bs: int) -> StepInputs:
        views = {
            name: self._buffers.view(name, bs * self._factor(name) if self._factor(name) else None)
            for name in self._buffers.names
        }
        return StepInputs(views, host, bs, raw_bs)

    def _capture_one(self, bucket: int) -> BucketGraph:
        with self._on_device("capture()"), capturing(f"bucket {bucket} on {self._device.name}"):
            if not self._graphs:  # a pool ends with its last graph and cannot be used again
                self._pool = self._device.new_pool()
            self._buffers.reset()
            names = self._update.host_names
            host = pad_host_lists(names, {name: [] for name in names}, 0, bucket, self._per_request)
            return capture_bucket(
                self._device,
                self._forward,
                self._inputs(host, bucket, 0),
                update=self._update,
                pool=self._pool,
                warmups=self._warmups,
                barrier=self._barrier,
                output_rows=self._output_rows,
            )

    def _await_previous(self) -> None:
        fence, what = self._fence, f"previous step ({'eager' if self._last is None else f'bucket {self._last}'})"
        if fence is None:
            return
        try:
            reached = fence.wait(self._fence_timeout)
        except Exception as error:
            self._fence = None
            if self._last in self._graphs:
                self._graphs[self._last].graph.abandon(f"a replay failed on the device: {error}")
            raise StepFailed(
                what,
                expected="a step without a device error",
                got=f"{type(error).__name__}: {error}",
                consequence="Its output is not valid; nothing of the present step was written.",
                remedy="Mend the cause and capture the bucket again; steps may go on if the device still works.",
            ) from error
        if not reached:
            raise FenceTimeout(
                what,
                expected=f"an end within {self._fence_timeout} s",
                got="still running",
                consequence="A write or update now would reach the step in flight, so nothing was written.",
                remedy="Look for an op that waits for an update, a collective without its peers, or a stopped device.",
            )
        self._fence = None

    def _why_not(self, bucket: int) -> str:
        held = self._graphs.get(bucket)
        if held is not None:
            return f"bucket {bucket} is broken: {held.graph.broken}"
        return f"bucket {bucket}: {self._failed.get(bucket, 'not captured')}"

    def _count(self, decision: Decision, padded: int) -> None:
        if decision.reason is None:
            self.counters.graph_replays += 1
            self.counters.padded_rows += padded
        else:
            self.counters.eager_steps[decision.reason] = self.counters.eager_steps.get(decision.reason, 0) + 1

    def _check_open(self) -> None:
        if self._closed:
            raise GraphClosed(
                "runner",
                expected="an open runner",
                got="a closed one",
                consequence="Its graphs have been released.",
                remedy="Make a new runner.",
            )
