"""The long proof on the emulated NPU: replay equals eager for every runner and bucket, then 20,000 replays in a row.

`nox -s soak -- graph-runtime` runs it as a script, which prints a line a figure; `test_graph_npu_soak.py` runs a slice.
It owns batches and counts. Layers are those of the multi-token prediction models, without a choice of tokens: an eager
step has other shapes, so sums may differ in their last bit, and a choice would turn that into another token.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

if __name__ == "__main__":
    import ascend_emulator

    sys.path.insert(0, str(Path(__file__).parent))
    ascend_emulator.install(devices=1)

import mtp_deepseek
import mtp_mimo
from graph_runtime import (
    DecodeRunner,
    DerivedUpdate,
    DraftDecodeRunner,
    DraftExtendRunner,
    MultiStepDraftExtendRunner,
    Rotation,
    StaticBuffers,
    StepInputs,
    TargetVerifyRunner,
    get_device,
    step_list,
)
from graph_runtime.testing import Batch, check_replay_equals_eager
from kv_planner import RowField, RowLayout

__all__ = ["BUCKETS", "KINDS", "equal", "flat"]

BUCKETS, ROWS, WIDTH, STEPS = (1, 2, 4), 4, mtp_mimo.WINDOW, 2
# For batches that do not fill their bucket, the others must give the same bits. A last bit of a product of another
# shape can move a rounding to bfloat16, and three layers carry that on; a wrong length or row moves outputs, whose size
# is about 3, by as much.
TOLERANCE = {"rtol": 5e-2, "atol": 0.4}
KINDS = ("decode", "target_verify", "draft_decode", "draft_extend", "multi_step_draft_extend")


class Whole:
    """A multi-step runner behind the interface of the check: all steps' outputs as one."""

    def __init__(self, runner: MultiStepDraftExtendRunner) -> None:
        self.runner = runner
        self.buckets = runner.steps[0].buckets
        self.can_run = runner.steps[0].can_run
        self.capture, self.close = runner.capture, runner.close

    def run(self, *given: Any, **options: Any) -> SimpleNamespace:
        results = self.runner.run(*given, **options)
        return SimpleNamespace(output=tuple(result.output for result in results), bucket=results[0].bucket)


class World:
    """A model whose every slot was written, its runner of one kind, and batches for it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.width = 1 if kind in {"decode", "draft_decode"} else WIDTH
        self.rows = STEPS if kind == "draft_decode" else self.width  # token rows a request
        shape: Any = mtp_deepseek if kind == "draft_decode" else mtp_mimo
        self.shape, self.model = shape, shape.OnDevice(shape.random_weights())
        model = self.model
        groups = [model.latents, model.ropes] if kind == "draft_decode" else [model.keys, model.values]
        layers = {"decode": slice(3), "target_verify": slice(3), "multi_step_draft_extend": slice(3, 6)}
        self.caches: list[torch.Tensor] = [cache for group in groups for cache in group[layers.get(kind, slice(3, 4))]]
        for number, cache in enumerate(self.caches):
            cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(number)).bfloat16())
        self.first = [cache.clone() for cache in self.caches]
        self.device = get_device("npu:0")
        self.runner = self._make()

    def restore(self) -> None:
        for cache, first in zip(self.caches, self.first, strict=True):
            cache.copy_(first)

    def draw(self, generator: random.Random, rows: int) -> Batch:
        pages = list(range(1, 13))
        generator.shuffle(pages)
        made = torch.Generator().manual_seed(generator.randrange(1 << 30))
        starts = [generator.randrange(3 * self.shape.PAGE - WIDTH) for _ in range(rows)]
        values = {
            "start": starts,
            "live": [1] * rows,
            "table": torch.tensor(pages[: 3 * rows], dtype=torch.int32).view(rows, 3),
            "ids": torch.randint(0, self.shape.VOCAB, (rows * self.rows,), generator=made),
        }
        if self.kind not in {"decode", "target_verify"}:
            own = rows * (1 if self.kind == "draft_decode" else self.width)
            values["hidden"] = torch.randn(own, self.shape.HIDDEN, generator=made)
        ahead = {"decode": 1, "draft_extend": self.width, "multi_step_draft_extend": self.width}.get(self.kind, 0)
        return Batch(values, {"kv_lens": [start + ahead for start in starts]})

    def _at(self, step: StepInputs, ahead: int, kv: str) -> SimpleNamespace:
        start, live = step.tensors["start"], step.tensors["live"]
        positions = ((start + ahead) * live).unsqueeze(1) + torch.arange(self.width, device=start.device)
        return SimpleNamespace(positions=positions, table=step.tensors["table"], kv_lens=step.host[kv], live=live)

    def _target(self, step: StepInputs) -> Any:
        return self.model.target(step.tensors["ids"], self._at(step, 0, "kv_lens"), exact=True)

    def _draft(self, number: int) -> Callable[[StepInputs], Any]:
        def forward(step: StepInputs) -> Any:
            at = self._at(step, 0, "kv_lens")
            return self.model.draft(number, step.tensors["ids"], step.tensors["hidden"], at, exact=True)

        return forward

    def _draft_steps(self, step: StepInputs) -> Any:
        hidden, found = step.tensors["hidden"], []
        for number, ids in enumerate(step.tensors["ids"].view(step.bs, STEPS).unbind(1)):
            at = self._at(step, number, step_list("kv_lens", number))
            hidden = self.model.draft(ids.contiguous(), hidden, at, exact=True)
            found.append(hidden)
        return torch.cat(found, 1)

    @staticmethod
    def _rotate(rotation: Rotation) -> None:
        count = rotation.output.shape[0]
        rotation.inputs.tensors["ids"][:count] = rotation.previous.tensors["ids"][:count].roll(-1)
        rotation.inputs.tensors["hidden"][:count] = rotation.output

    def _make(self) -> Any:
        fields = [
            RowField("start", "int64", rows=ROWS),
            RowField("live", "int64", rows=ROWS),
            RowField("table", "int32", rows=ROWS, width=3),
            RowField("ids", "int64", rows=ROWS * self.rows),
        ]
        if self.kind not in {"decode", "target_verify"}:
            own = ROWS * (1 if self.kind == "draft_decode" else self.width)
            fields.append(RowField("hidden", "float32", rows=own, width=self.shape.HIDDEN))
        layout = RowLayout(fields)
        options: dict[str, Any] = {"device": self.device, "buckets": list(BUCKETS)}
        if self.kind == "multi_step_draft_extend":
            return Whole(
                MultiStepDraftExtendRunner(
                    forwards=[self._draft(step) for step in range(mtp_mimo.DRAFTS)],
                    layout=layout,
                    window=self.width,
                    rotate=self._rotate,
                    rotated=["ids", "hidden"],
                    token_fields=["ids", "hidden"],
                    poison=True,
                    **options,
                )
            )
        options["buffers"] = StaticBuffers(layout, self.device, poison=True)
        if self.kind == "decode":
            return DecodeRunner(forward=self._target, update=DerivedUpdate(), **options)
        if self.kind == "target_verify":
            return TargetVerifyRunner(
                forward=self._target, window=self.width, kind="eagle", token_fields=["ids"], **options
            )
        if self.kind == "draft_extend":
            fields_of_tokens = ["ids", "hidden"]
            return DraftExtendRunner(
                forward=self._draft(0), window=self.width, token_fields=fields_of_tokens, **options
            )
        return DraftDecodeRunner(forward=self._draft_steps, steps=STEPS, rows_per_request={"ids": STEPS}, **options)


def equal(kind: str, *, batches: int, seed: int) -> Mapping[int, int]:
    """Compares `batches` batches or more in every bucket, sizes in random order; the replays of each."""
    world = World(kind)
    world.runner.capture(progress=False)
    steps = batches * (ROWS + 1)  # sizes 0 to ROWS equally often; bucket 2 gets one of them
    seen = check_replay_equals_eager(
        world.runner, world.draw, steps=steps, seed=seed, restore=world.restore, **TOLERANCE
    )
    world.runner.close()
    return seen.replays


def flat(replays: int, *, seed: int) -> dict[str, Sequence[int]]:
    """Runs `replays` draft-extend steps after a quarter as many that may fill caches; each measure before and after."""
    world = World("draft_extend")
    world.runner.capture(progress=False)
    generator = random.Random(seed)
    batches = [(rows, world.draw(generator, rows)) for rows in range(ROWS + 1)]
    seen: list[tuple[int, ...]] = []
    for count in (max(replays // 4, 1), replays):
        for _ in range(count):
            rows, batch = generator.choice(batches)
            world.runner.run(batch.values, batch.host_lists, rows)
        world.device.synchronize()
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 1024
        seen.append((len(gc.get_objects()), threading.active_count(), world.device.memory_held(), resident))
    assert world.runner.counters.graph_replays == replays + max(replays // 4, 1)
    world.runner.close()
    names = ("objects", "threads", "device bytes", "resident KiB")
    return {name: pair for name, pair in zip(names, zip(*seen, strict=True), strict=True)}


def main() -> int:
    """The full counts; 0 when everything holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=200, help="a runner and bucket (%(default)s)")
    parser.add_argument("--replays", type=int, default=20_000, help="in a row (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    ok = True
    for kind in KINDS:
        replays = equal(kind, batches=chosen.batches, seed=chosen.seed)
        ok = ok and set(replays) == set(BUCKETS) and min(replays.values()) >= chosen.batches
        each = ", ".join(f"{count} in bucket {bucket}" for bucket, count in replays.items())
        print(f"count: replays of {kind} that equal the eager step | {each}", flush=True)
    measures = flat(chosen.replays, seed=chosen.seed)
    print(f"count: replays in a row | {chosen.replays:,}")
    for name, (before, after) in measures.items():
        print(f"count: {name}, before and after | {before:,} and {after:,}")
    # Allocators keep pages, and Python keeps a few caches: a leak of one object a replay would be 20,000.
    grown = {name: after - before for name, (before, after) in measures.items()}
    ok = ok and grown["threads"] <= 0 and grown["device bytes"] <= 0
    ok = ok and grown["objects"] < chosen.replays / 100 and grown["resident KiB"] < 32 * 1024
    print("held" if ok else f"FAILED: grown by {grown}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
