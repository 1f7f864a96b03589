"""The order of calls of SGLang's NPUCudaGraphBackend, from capture to clean-up, as data.

The backend is SGLang's, unchanged; what it calls is written down here and does nothing else, so that the order does
not hang on when a thread gets its turn. `test_engines_graph_order.py` compares with the golden file, and writes it
where the environment variable `ENGINES_WRITE_GOLDEN` is 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.hardware_backend.npu.graph_runner import npu_cudagraph_backend
from sglang.srt.runtime_context import get_parallel

__all__ = ["GOLDEN", "dump", "record"]

GOLDEN = Path(__file__).resolve().parents[2] / "packages/graph-runtime/tests/golden/order.json"


class Notes:
    """A device module and its graphs that only write down what is asked of them."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def note(self, event: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self.events.append(event)

    def module(self) -> Any:
        return SimpleNamespace(
            current_device=lambda: 0,
            set_device=lambda index: None,
            graph_pool_handle=lambda: (0, 1),
            synchronize=self.note("synchronize"),
            Event=lambda: SimpleNamespace(record=self.note("fence"), synchronize=self.note("wait")),
        )

    def graph(self) -> Any:
        return SimpleNamespace(update=lambda **given: None, replay=self.note("replay"))

    @contextmanager
    def capture(self, *args: Any, **kwargs: Any) -> Any:
        self.events.append("capture")
        yield

    def watch(self, executor: Any) -> None:
        """The hand-over to the worker, and the moment at which its end is awaited."""
        submit = executor.submit

        def submitted(*args: Any, **kwargs: Any) -> Any:
            self.events.append("update")
            future = submit(*args, **kwargs)
            future.result()
            return SimpleNamespace(result=self.note("updated"))

        executor.submit = submitted


def record() -> dict[str, list[str]]:
    """Case to calls: a capture, a plain replay, three replays with an update, and one with a mapping an operator."""
    notes = Notes()
    npu: Any = torch.get_device_module("npu")
    real = npu.NPUGraph, npu.graph
    npu.NPUGraph, npu.graph = notes.graph, notes.capture
    found: dict[str, list[str]] = {}
    try:
        with get_parallel().override(tp_group=SimpleNamespace(barrier=notes.note("barrier"))):
            backend = npu_cudagraph_backend.NPUCudaGraphBackend(SimpleNamespace(device_module=notes.module()))
            notes.watch(backend._update_executor)
            backend._capture_stream = None
            backend.capture_one(4, notes.note("forward"), post_warmup_hook=notes.note("after_warmup"))
        found["capture"] = list(notes.events)
        lens = [3, 4, 0, 0]
        cases: dict[str, Callable[[], Any]] = {
            "plain": lambda: backend.replay(4, None),
            "first": lambda: backend.replay_with_input_update(4, seq_lens=lens, attr_name="kv", attr_type=[]),
            "second": lambda: backend.replay_with_input_update(4, seq_lens=lens, attr_name="kv", attr_type=[]),
            "a mapping an operator": lambda: backend.replay_with_input_update(
                4, None, cpu_update_input=[{"kv": lens}, {"kv": lens}]
            ),
        }
        for name, call in cases.items():
            notes.events.clear()
            call()
            found[name] = list(notes.events)
        backend.cleanup()
    finally:
        npu.NPUGraph, npu.graph = real
    return found


def dump(found: dict[str, list[str]]) -> str:
    """One line a case."""
    lines = [f"{json.dumps(name)}: {json.dumps(events)}" for name, events in found.items()]
    return '{"engine": "SGLang 0.5.23",\n' + ",\n".join(lines) + "}\n"
