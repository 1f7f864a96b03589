"""SGLang's own queue of requests whose pages are under way at decode, and an engine that moves bytes when it is let.

The queue fails requests, holds their pages and frees them; what stands in for its scheduler takes the answers and the
freed pages.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from engines_transfer import Request
from kv_transfer.engine import TransferHandle, wait_batch
from sglang.srt.disaggregation.decode import DecodeRequest, DecodeTransferQueue
from sglang.srt.runtime_context import get_parallel
from torch._C._distributed_c10d import HashStore

__all__ = ["Gate", "Queue", "queued", "within"]


class Queue(DecodeTransferQueue):  # type: ignore[misc]  # Any: SGLang's
    """SGLang's; `answers` are the requests that ended, `free` the pages that others may have."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.free: list[int] = []
        slots = SimpleNamespace(clear_slot=lambda slot: None, free=lambda slot: None)
        scheduler = SimpleNamespace(
            enable_decode_hicache=False, enable_hisparse=False, spec_algorithm=None,
            metrics_reporter=SimpleNamespace(enable_metrics=False),
            output_streamer=SimpleNamespace(stream_output=lambda requests, _: self.answers.extend(requests)),
        )  # fmt: skip
        super().__init__(slots, slots, scheduler, SimpleNamespace(unlock=lambda lock: None))

    def follow(self, request: Request, pages: list[int], receiver: int = 0) -> None:
        """Take over a request whose pages prefill ranks know."""
        own = SimpleNamespace(rid=f"r{request.room}", bootstrap_room=request.room, return_logprob=False, pages=pages)
        self.add(DecodeRequest(req=own, kv_receiver=request.receivers[receiver], metadata_buffer_index=0))

    def step(self) -> None:
        """What SGLang's scheduler does with it, once a loop."""
        self.resolve_deferred_releases()
        assert not self.pop_transferred()

    def reasons(self) -> list[str]:
        return [one.finished_reason.message for one in self.answers]

    def _release_request(self, decode_req: DecodeRequest) -> None:
        self.free += decode_req.req.pages


@contextlib.contextmanager
def queued(patch: pytest.MonkeyPatch, seconds: float = float("inf")) -> Iterator[Callable[[], Queue]]:
    """Makes queues, whose holding ends after `seconds`; infinite, as the plugin sets it."""
    patch.setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT", str(seconds))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with get_parallel().override(attn_tp_group=SimpleNamespace(cpu_group=dist.group.WORLD), tp_rank=0):
            yield Queue
    finally:
        dist.destroy_process_group()


def within(seconds: float, done: Callable[[], bool], what: str, each: Callable[[], object] = lambda: None) -> float:
    """Repeat `each` until `done`; the seconds that it took."""
    start = time.monotonic()
    while not done():
        assert time.monotonic() - start < seconds, f"{what}: not in {seconds:g} s"
        each()
        time.sleep(0.005)
    return time.monotonic() - start


class Gate:
    """In front of a manager's engine: batches move when it is open, each after `delay` seconds.

    `error` is raised instead, as by an engine whose link is down.
    """

    def __init__(self, manager: Any, *, is_open: bool = False, delay: float = 0.0) -> None:
        self._engine, manager.engine.engine = manager.engine.engine, self
        self.opened, self.delay, self.error = threading.Event(), delay, None
        self.batches = 0
        if is_open:
            self.opened.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, peer: str, batch: Any) -> TransferHandle:
        if self.error is not None:
            raise self.error
        self.batches += 1
        handle = TransferHandle(peer, len(batch.nbytes), int(batch.nbytes.sum()))
        threading.Thread(target=self._move, args=(handle, peer, batch), daemon=True).start()
        return handle

    def poll(self, handle: TransferHandle) -> Any:
        return handle.status

    def cancel(self, handle: TransferHandle) -> None:
        """The batch runs already."""

    def _move(self, handle: TransferHandle, peer: str, batch: Any) -> None:
        self.opened.wait()
        time.sleep(self.delay)
        handle.settle(wait_batch(self._engine, self._engine.submit(peer, batch)))
