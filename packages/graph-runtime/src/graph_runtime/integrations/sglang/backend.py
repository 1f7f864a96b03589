"""SGLang's graph backend for an NPU: one graph a shape, checked updates, the device's one worker.

It differs from SGLang's own in what goes wrong there: an update is complete, or has failed, before its replay is
launched; a key that no captured op takes is refused; a replay without its update is refused before launch, also through
`replay`. It owns no buffers and chooses no shape: SGLang's runner does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from sglang.srt.distributed.device_communicators.pynccl_allocator import set_graph_pool_id
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import get_bool_env_var

from graph_runtime.capture import BucketGraph
from graph_runtime.device import Fence, HostLengths, get_device
from graph_runtime.errors import CaptureRefused
from graph_runtime.keys import DerivedUpdate
from graph_runtime.previous import await_step
from graph_runtime.replay import update_and_replay
from graph_runtime.turns import Turn, capturing, take_turn
from graph_runtime.update import BoundUpdate, UpdateSpec

__all__ = ["GraphBackend"]

TIMEOUT = 60.0  # seconds that an update, the previous replay or another thread's call may take
_NAME = "kv"


def _no_range(name: str) -> AbstractContextManager[object]:
    return nullcontext()


class GraphBackend(BaseCudaGraphBackend):  # type: ignore[misc]
    """In place of `NPUCudaGraphBackend`, with its signatures.

    Args:
        cuda_graph_runner: SGLang's runner; its `device_module` says which NPU is meant.
        enable_memory_saver: As SGLang passes it.

    Raises:
        CaptureRefused: The memory saver is asked for graphs, whose captures torch_npu's saver would have to open.
    """

    def __init__(self, cuda_graph_runner: Any, *, enable_memory_saver: bool = False) -> None:
        if enable_memory_saver and get_bool_env_var("SGLANG_MEMORY_SAVER_CUDA_GRAPH"):
            raise CaptureRefused(
                "enable_memory_saver",
                expected="graphs outside the memory saver",
                got="SGLANG_MEMORY_SAVER_CUDA_GRAPH is set",
                consequence="The saver's own capture takes no updates of host lengths.",
                remedy="Unset it, or use SGLang's own backend.",
            )
        self._device = get_device(f"npu:{cuda_graph_runner.device_module.current_device()}")
        self._compiled = bool(getattr(cuda_graph_runner, "enable_torch_compile", False))
        self._barrier: Callable[[], object] = get_parallel().tp_group.barrier
        self._held: dict[Any, BucketGraph] = {}
        self._inputs: dict[Any, Any] = {}
        self._pool: object | None = None
        self._fence: Fence | None = None
        self._closed = False
        self._turn = Turn(f"SGLang's graphs on {self._device.name}")
        self._worker = self._device.gate.enter()

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        """Around SGLang's loop over shapes; graphs are captured on a stream of the device's own."""
        if self._pool is None:
            self._pool = self._device.new_pool()
        set_graph_pool_id(self._pool)
        yield

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any | None = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        """Two warm-ups, each with a synchronise and a barrier, then the capture.

        Args:
            shape_key: Names the graph.
            forward_fn: The step.
            capture_inputs: Kept as long as the graph.
            post_warmup_hook: Called after each warm-up.

        Raises:
            CaptureRefused: The forward ran something that cannot be replayed.
            UpdateSpecError: An op was captured whose lengths no update could reach.
        """
        with self._exclusive("capture_one()"), capturing(f"shape {shape_key} on {self._device.name}"):
            for _ in range(2):
                self._device.synchronize()
                self._barrier()
                forward_fn()
                if post_warmup_hook is not None:
                    post_warmup_hook()
            # The inputs are static: guards that held at the warm-ups hold here.
            stance = torch.compiler.set_stance(skip_guard_eval_unsafe=True) if self._compiled else nullcontext()
            with stance:
                graph, output = self._device.capture(forward_fn, pool=self._pool)
            try:
                spec = DerivedUpdate(_NAME) if graph.records else UpdateSpec()
                held = BucketGraph(shape_key, graph, output, spec.bind(graph.records))
            except BaseException:
                graph.close()
                raise
            if shape_key in self._held:
                self._held.pop(shape_key).close()
            self._held[shape_key] = held
            self._inputs[shape_key] = capture_inputs

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        """Whether there is a graph that works."""
        held = self._held.get(shape_key)
        return held is not None and held.graph.broken is None

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        """Around replays; nothing to do."""
        yield

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        """Replays a graph none of whose ops takes host lengths.

        Raises:
            MissingUpdate: One does; the replay would wait for its update for ever.
        """
        with self._exclusive("replay()"):
            held = self._held[shape_key]
            held.graph.replay()
            return held.output

    def replay_with_input_update(
        self,
        shape_key: Any,
        seq_lens: HostLengths | None,
        attr_name: str | None = None,
        attr_type: Any | None = None,
        cpu_update_input: Sequence[Mapping[str, HostLengths]] | None = None,
    ) -> Any:
        """Waits for the last replay, updates, replays and fences.

        Args:
            shape_key: Names the graph.
            seq_lens: KV lengths, padded to the graph's rows.
            attr_name: The key that SGLang would use; compared with what was captured. None: that of the captured ops.
            attr_type: Not needed: whether an op holds a list or a host tensor is read from what was captured.
            cpu_update_input: In place of lengths and name: one mapping an op, or one for all.

        Returns:
            The output of the capture, rewritten.

        Raises:
            UpdateSpecError: A key, a count or a length does not fit what was captured. Nothing was replayed.
            UpdateFailed, UpdateTimeout: The update failed or hangs. Nothing was replayed; the graph is out of use.
            StepFailed, FenceTimeout: The replay before did.
        """
        with self._exclusive("replay_with_input_update()"):
            held = self._held[shape_key]
            if self._fence is not None:
                fence, self._fence = self._fence, None
                await_step(fence, "previous replay", TIMEOUT)
            bound, lists = self._update_of(held, seq_lens, attr_name, cpu_update_input)
            output = update_and_replay(
                BucketGraph(held.bucket, held.graph, held.output, bound), lists, self._worker, TIMEOUT, _no_range
            )
            self._fence = self._device.record_fence()
            return output

    def cleanup(self) -> None:
        """Waits for the last replay and releases graphs, outputs and the share in the worker; may be called twice."""
        with self._exclusive("cleanup()"):
            if self._closed:
                return
            self._closed = True
            try:
                if self._fence is not None:
                    await_step(self._fence, "last replay", TIMEOUT)
            finally:
                self._fence = None
                for held in self._held.values():
                    held.close()
                self._held.clear()
                self._inputs.clear()
                self._pool = None
                self._device.gate.leave()

    @contextmanager
    def _exclusive(self, call: str) -> Iterator[None]:
        lock, what = self._device.gate.lock, f"{call} of {self._turn.name}"
        with take_turn(self._turn, lock, TIMEOUT, what), lock.hold(TIMEOUT, what), torch.no_grad():
            yield

    @staticmethod
    def _update_of(
        held: BucketGraph,
        seq_lens: HostLengths | None,
        attr_name: str | None,
        each: Sequence[Mapping[str, HostLengths]] | None,
    ) -> tuple[BoundUpdate, dict[str, Any]]:
        """The update of one replay, and its lists by name."""
        records = held.graph.records
        if each is None and attr_name is None:
            return held.bound, {_NAME: seq_lens}
        mappings: list[Mapping[str, Any]] = [{str(attr_name): seq_lens}] if each is None else list(each)
        plan = [{key: f"{at}:{key}" for key in mapping} for at, mapping in enumerate(mappings)]
        lists = {f"{at}:{key}": value for at, mapping in enumerate(mappings) for key, value in mapping.items()}
        spec = UpdateSpec(plan[0] if len(plan) == 1 else plan, constant=held.bound.constant)
        return spec.bind(records), lists
