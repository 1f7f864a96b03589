"""Our order of calls beside that of SGLang's backend, recorded from SGLang (`tests/engines/engines_order.py`).

Both wait for the last replay, hand the update to one worker, replay and fence. The one difference is meant: ours knows
how the update ended before it replays (docs/decisions/2026-11-29-update-before-replay.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_lengths import ATTEND, lengths
from graph_runtime import (
    Buckets,
    DecodeRunner,
    DerivedUpdate,
    DraftDecodeRunner,
    Hooks,
    StaticBuffers,
    StepInputs,
    get_device,
    step_list,
)
from graph_runtime.testing import RecordingDevice
from kv_planner import RowField, RowLayout

THEIRS: dict[str, Any] = json.loads((Path(__file__).parent / "golden/order.json").read_text())
STEP = {"wait", "update", "updated", "replay", "fence"}


def updated_first(events: list[str]) -> list[str]:
    """Their calls with the one meant difference undone."""
    rest = [event for event in events if event != "updated"]
    at = rest.index("update") + 1
    return [*rest[:at], "updated", *rest[at:]]


def steps(device: RecordingDevice, run: Callable[[], object]) -> list[str]:
    """Calls of one step around its replay: what belongs to the load of static buffers comes before the update."""
    device.events.clear()
    run()
    events = [event for event in device.events if event in STEP]
    load = events.index("update") if "update" in events else events.index("replay")
    return [event for event in events[:load] if event == "wait"][:1] + events[load:]


def test_theirs_replays_before_the_update_has_ended() -> None:
    """What the golden file says, so that a new SGLang that mends it is noticed."""
    for name in ("first", "second", "a mapping an operator"):
        events = THEIRS[name]
        assert events.index("update") < events.index("replay") < events.index("updated") < events.index("fence")
    assert "wait" not in THEIRS["first"] and THEIRS["second"][0] == "wait"
    assert THEIRS["plain"] == ["replay"]


@pytest.mark.parametrize("case", ["second", "a mapping an operator"])
def test_the_calls_of_a_step_are_theirs_but_for_the_wait_on_the_update(case: str) -> None:
    device = RecordingDevice(get_device("cpu", updatable=ATTEND))
    layout = RowLayout([RowField("x", "float32", rows=2)])
    options: dict[str, Any] = {"device": device, "buffers": StaticBuffers(layout, device), "buckets": [2]}

    def drafts(step: StepInputs) -> torch.Tensor:
        return torch.stack([lengths(step, step.host[step_list("kv_lens", number)]) for number in range(2)], 1)

    runner: DecodeRunner
    if case == "second":
        runner = DecodeRunner(
            forward=lambda step: lengths(step, step.host["kv_lens"]), update=DerivedUpdate(), **options
        )
    else:
        runner = DraftDecodeRunner(forward=drafts, steps=2, **options)
    runner.capture(progress=False)

    def run() -> object:
        return runner.run({"x": [1.0, 2.0]}, {"kv_lens": [3, 4]}, 2)

    run()
    assert steps(device, run) == updated_first(THEIRS[case])
    runner.close()


def test_a_capture_warms_up_as_theirs_does() -> None:
    device = RecordingDevice(get_device("cpu"))
    events = device.events
    layout = RowLayout([RowField("x", "float32", rows=4, width=1)])

    def forward(step: StepInputs) -> torch.Tensor:
        events.append("forward")
        return step.tensors["x"] + 1

    runner = DecodeRunner(
        device=device,
        forward=forward,
        buffers=StaticBuffers(layout, device),
        buckets=Buckets([4]),
        barrier=lambda: events.append("barrier"),
        hooks=Hooks(after_warmup=lambda step: events.append("after_warmup")),
    )
    events.clear()
    runner.capture(progress=False)
    calls = [event for event in events if event in {"synchronize", "barrier", "forward", "after_warmup", "capture"}]
    assert THEIRS["capture"] == [*["synchronize", "barrier", "forward", "after_warmup"] * 2, "capture", "forward"]
    # Ours waits, and meets the other ranks, once more before the capture itself.
    assert calls == [*THEIRS["capture"][:8], "synchronize", "barrier", *THEIRS["capture"][8:]]
    runner.close()
