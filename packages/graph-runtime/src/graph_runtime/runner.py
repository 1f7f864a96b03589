"""The decode runner: buckets captured once, then one load, one update and one replay a step.

It owns the order wait(previous step) → load → update → replay → fence, the choice between graph and eager, and the
counters. It does not own attention metadata, sampling or the model: those are in the forward that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .agreement import RankAgreement, ReduceMin
from .buckets import Buckets
from .buffers import PreparedLoad, StaticBuffers
from .capture import BucketGraph, capture_bucket
from .device import Fence, GraphDevice, HostLengths
from .errors import (
    BatchTooLarge,
    BucketError,
    DeviceMismatch,
    GraphClosed,
    RunnerPaused,
    StepFailed,
)
from .graphs import BucketGraphs
from .hooks import Hooks
from .host_lists import live_host_lists, pad_host_lists
from .outputs import OutputRows, check_output, clone_output, cut_output
from .previous import await_step
from .replay import update_and_replay
from .request_rows import RequestRows
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
        output_rows_per_request: Output rows a request, for all outputs, or one number an output in order or by name.
        before_step: Called after the load and before the replay or eager forward, outside the graph, for instance to
            fill device-written fields.
        barrier: Called before every warm-up and capture, by every rank the same number of times.
        hooks: Further places where the runner calls others.
        reduce_min: Minimum over the data-parallel ranks, with which they agree on graph or eager and on the bucket; see
            `RankAgreement`. Every rank must then call `run` the same number of times, idle ranks with no rows.
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
        output_rows_per_request: OutputRows = 1,
        before_step: Callable[[StepInputs], None] | None = None,
        barrier: Callable[[], None] | None = None,
        hooks: Hooks | None = None,
        reduce_min: ReduceMin | None = None,
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
        self._buffers = buffers
        self._buckets = buckets if isinstance(buckets, Buckets) else Buckets(buckets)
        self._update = update if update is not None else UpdateSpec()
        self._per_request = dict(rows_per_request or {})
        self._output_rows = output_rows_per_request
        self._before_step = before_step
        self._barrier = barrier if barrier is not None else lambda: None
        self._hooks = hooks if hooks is not None else Hooks()
        self._forward = self._hooks.around(forward)
        self._agreement = None if reduce_min is None else RankAgreement(reduce_min, self._buckets)
        self._warmups = warmups
        self._update_timeout = update_timeout
        self._fence_timeout = fence_timeout
        self._turn = Turn(f"a decode runner on {device.name}")
        self._graphs = BucketGraphs(device, self._buckets)
        self._fence: Fence | None = None
        self._last: int | None = None
        self._closed = self._paused = False
        self.counters = RunnerCounters()
        self._rows = RequestRows(buffers, self._per_request)
        self._capacity = self._rows.capacity
        if self._capacity < self._buckets.largest:
            raise BucketError(
                "buckets",
                expected=f"at most {self._capacity}, the requests that the static buffers hold",
                got=self._buckets.largest,
                consequence="The largest bucket could not be loaded.",
                remedy="Lay the RowLayout out with more rows, or capture smaller buckets.",
            )
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
            return self._graphs.capture(self._capture_one, progress=progress)

    def can_run(self, raw_bs: int) -> Decision:
        """Which bucket a batch replays, or why none does. An idle step (0 rows) replays the smallest one.

        Ranks that agree may choose a larger one, or none.
        """
        return self._graphs.decide(raw_bs)

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
            RunnerPaused: The runner is paused.
            PeerRefused: Another rank refused the step; it runs nowhere. Nothing was written.
            RanksDisagree: The reduction gave an unequal answer. Nothing was written.
            StepFailed: The device raised in the previous step. Nothing was written; its bucket must be captured again.
            UpdateFailed: The device raised in the update. Nothing was replayed; the bucket must be captured again.
            UpdateTimeout: The update did not end in time. As above.
        """
        with self._exclusive("run()"):
            decision, bs, host, prepared = self._plan(values, host_lists or {}, raw_bs, eager)
            inputs = StepInputs(self._rows.views(bs), host, bs, raw_bs)
            with self._on_device("run()"), torch.no_grad():
                with self._hooks.profile("load"):
                    self._buffers.load(prepared)
                if self._before_step is not None:
                    with self._hooks.profile("before_step"):
                        self._before_step(inputs)
                self._buffers.check_written()
                if decision.bucket is None:
                    with self._hooks.profile("eager"):
                        output = self._forward(inputs)
                    check_output(output, bs, self._output_rows)
                else:
                    self._buffers.check_addresses()
                    held = self._graphs[decision.bucket]
                    output = update_and_replay(held, host, self._worker, self._update_timeout, self._hooks.profile)
                output = cut_output(output, raw_bs, self._output_rows)
                if clone:
                    output = clone_output(output)
                self._fence = self._device.record_fence()
                self._last = decision.bucket
            self._count(decision, bs - raw_bs)
            mode: Mode = "eager" if decision.bucket is None else "graph"
            return StepResult(output, mode, decision.bucket, decision.reason)

    def pause(self) -> None:
        """Waits for the last step and lets the memory saver of the hooks take the graphs' memory; steps are refused.

        Raises:
            FenceTimeout, ReentrantCall, StepFailed: As for `close`; nothing was paused.
        """
        with self._exclusive("pause()"):
            self._check_open()
            self._await_previous()
            self._paused = True
            if self._hooks.memory is not None:
                self._hooks.memory.pause()

    def resume(self) -> None:
        """Takes the memory back, and fills the static buffers, whose contents may be lost.

        Raises:
            AddressChanged: The saver mapped the static buffers elsewhere; the runner stays paused.
            ReentrantCall: As for `close`.
        """
        with self._exclusive("resume()"):
            if not self._paused:
                return
            if self._hooks.memory is not None:
                self._hooks.memory.resume()
            self._buffers.check_addresses()
            with self._on_device("resume()"):
                self._buffers.reset()
            self._paused = False

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
                    self._graphs.close()
                self._fence = None
                self._device.gate.leave()

    def _exclusive(self, call: str) -> AbstractContextManager[None]:
        what = f"{call} of {self._turn.name}"
        return take_turn(self._turn, self._device.gate.lock, self._fence_timeout, what)

    def _on_device(self, call: str) -> AbstractContextManager[None]:
        return self._device.gate.lock.hold(self._fence_timeout, f"{call} of {self._turn.name}")

    def _host_lists(self, host_lists: Mapping[str, HostLengths]) -> Mapping[str, HostLengths]:
        """The lists that the update names, from those of the caller; runners of other kinds count here."""
        return host_lists

    def _plan(
        self, values: Mapping[str, Any], host_lists: Mapping[str, HostLengths], raw_bs: int, eager: bool
    ) -> tuple[Decision, int, dict[str, list[int]], PreparedLoad]:
        """Checks everything that is given, waits for the previous step, and agrees with other ranks."""
        try:
            self._check_open()
            decision = self.can_run(raw_bs)
            if raw_bs > self._capacity:
                raise BatchTooLarge(
                    "raw_bs",
                    expected=f"at most {self._capacity}",
                    got=raw_bs,
                    consequence="Rows would be lost.",
                    remedy="Split the batch, or lay the static buffers out for more requests.",
                )
            lists = self._host_lists(host_lists)
            live = live_host_lists(self._update.host_names, lists, raw_bs, self._per_request)
            prepared = self._buffers.prepare(self._rows.live(raw_bs), values)
            self._await_previous()
        except BaseException:
            if self._agreement is not None:
                self._agreement.refuse()
            raise
        if eager:
            decision = Decision(None, "forced", "asked for by the caller")
        if self._agreement is not None:
            decision = self._agreed(self._agreement, decision, raw_bs)
        bs = decision.bucket if decision.bucket is not None else (raw_bs or self._buckets.smallest)
        return decision, bs, pad_host_lists(live, bs, self._per_request), prepared

    def _agreed(self, agreement: RankAgreement, own: Decision, raw_bs: int) -> Decision:
        bucket = agreement.choose([] if own.bucket is None else self._graphs.usable(raw_bs))
        if bucket is None and own.bucket is not None:
            return Decision(None, "peers", "another rank has no graph for this step")
        return own if bucket is None else Decision(bucket, None, own.detail)

    def _capture_one(self, bucket: int, pool: object | None) -> BucketGraph:
        hooks = self._hooks
        region = nullcontext() if hooks.memory is None else hooks.memory.region()
        with self._on_device("capture()"), capturing(f"bucket {bucket} on {self._device.name}"):
            self._buffers.reset()
            host = pad_host_lists({name: [] for name in self._update.host_names}, bucket, self._per_request)
            with region, hooks.profile("capture"):
                return capture_bucket(
                    self._device,
                    self._forward,
                    StepInputs(self._rows.views(bucket), host, bucket, 0),
                    update=self._update,
                    pool=pool,
                    warmups=self._warmups,
                    barrier=self._barrier,
                    output_rows=self._output_rows,
                    after_warmup=hooks.after_warmup,
                )

    def _await_previous(self) -> None:
        if self._fence is None:
            return
        ran = "eager" if self._last is None else f"bucket {self._last}"
        try:
            await_step(self._fence, f"previous step ({ran})", self._fence_timeout)
        except StepFailed as error:
            self._fence = None
            self._graphs.abandon(self._last, f"a replay failed on the device: {error.__cause__}")
            raise
        self._fence = None

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
        if self._paused:
            raise RunnerPaused(
                "runner",
                expected="a runner with its memory",
                got="a paused one",
                consequence="A replay would read and write memory that has been taken away.",
                remedy="Call resume() first.",
            )
