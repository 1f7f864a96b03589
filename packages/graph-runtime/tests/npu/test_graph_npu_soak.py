"""A slice of the soak: every runner and bucket from graphs and eagerly, and a few replays in a row."""

from __future__ import annotations

from typing import Any

import graph_soak
import pytest
import torch
from graph_runtime import Rotation
from graph_runtime.errors import UnwrittenRows
from graph_runtime.testing import ReplayDiffers, check_replay_equals_eager


@pytest.mark.parametrize("kind", graph_soak.KINDS)
def test_replay_equals_eager(kind: str) -> None:
    replays = graph_soak.equal(kind, batches=2, seed=3)
    assert set(replays) == set(graph_soak.BUCKETS) and min(replays.values()) >= 2


def test_memory_is_flat_and_no_thread_is_added() -> None:
    measures = graph_soak.flat(60, seed=3)
    for name in ("threads", "device bytes"):
        before, after = measures[name]
        assert after <= before, name
    before, after = measures["objects"]
    assert after - before < 30


def test_the_check_finds_lengths_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naive: a list that the update does not reach."""
    world = graph_soak.World("target_verify")
    world.runner.capture(progress=False)
    held: Any = world.runner._graphs
    monkeypatch.setattr(held[4].bound, "values", lambda host: [{"actual_seq_kvlen": [4] * 4}] * 3)
    with pytest.raises(ReplayDiffers):
        check_replay_equals_eager(
            world.runner, world.draw, steps=10, seed=3, restore=world.restore, **graph_soak.TOLERANCE
        )
    world.runner.close()


def test_poison_finds_rows_that_the_rotation_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def lazy(rotation: Rotation) -> None:
        rotation.inputs.tensors["ids"][: rotation.output.shape[0]] = torch.zeros_like(rotation.previous.tensors["ids"])

    monkeypatch.setattr(graph_soak.World, "_rotate", staticmethod(lazy))
    world = graph_soak.World("multi_step_draft_extend")
    with pytest.raises(UnwrittenRows):
        check_replay_equals_eager(world.runner, world.draw, steps=2, seed=3, restore=world.restore)
    world.runner.close()
